"""The engines this version has, as one table: model type -> what opens and runs it.

Everything above the models (coli/engine.py, the commands) goes by a `Family` and never by a model's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.experts.records import trunk_layers
from coli.formats.checkpoint import Checkpoint
from coli.formats.strict import show
from coli.models import (
    qwen36_geometry,
    qwen36_layout,
    qwen36_mtp,
    qwen36_program,
    qwen38_geometry,
    qwen38_layout,
    qwen38_mtp,
    qwen38_program,
)
from coli.models.layout import Shape
from coli.models.qwen38 import Qwen38
from coli.models.trunk import Trunk
from coli.state import StateSpec


@dataclass(frozen=True)
class Family:
    """`expert_layers`: name prefixes of the layers with experts; `trunk`, `head_writer`: what writes the programs;
    `expected`, `expected_head`: name -> shape of every tensor; `constants`: those tensors that follow from the config.
    """

    name: str
    model_types: tuple[str, ...]
    geometry: Callable[[Mapping[str, Any], object], Any]
    expected: Callable[..., dict[str, Shape]]
    expected_head: Callable[..., dict[str, Shape]]
    constants: Callable[[Any], dict[str, np.ndarray]]
    check: Callable[[Checkpoint, Any], None]
    int8_rows: Callable[[str], bool]
    expert_layers: Callable[[Any], tuple[str, ...]]
    state_spec: Callable[[Any], StateSpec]
    workspace_bytes: Callable[..., int]
    trunk: Callable[..., Trunk]
    check_head: Callable[[Checkpoint, Any], None]
    head_workspace_bytes: Callable[..., int]
    head_theta: Callable[[Checkpoint, Any], float]
    head_spec: Callable[[Any], StateSpec]
    head_width: Callable[[Any], int]  # of the trunk's row that the head takes
    head_writer: Callable[..., Any]
    has_wirings: bool = False  # the head's input norm may be wired in two ways


def _qwen36(checkpoint: Checkpoint, g: Any, weights: Any, store: Any, kernels: Any, team: Any, *, ctx: int, limit: int,
            undo: str, prefetch: str = "auto") -> Trunk:  # fmt: skip
    writer = qwen36_program.Writer(g, weights, store, team, ctx, limit)
    return Trunk(writer, kernels, ctx=ctx, limit=limit, undo=undo, prefetch=prefetch)


QWEN38 = Family(
    name="qwen38", model_types=qwen38_geometry.MODEL_TYPES, geometry=qwen38_geometry.geometry,
    expected=qwen38_layout.expected, expected_head=qwen38_layout.expected_head, constants=qwen38_layout.constants,
    check=qwen38_layout.check, int8_rows=qwen38_layout.int8_rows,
    expert_layers=trunk_layers,
    state_spec=qwen38_program.state_spec, workspace_bytes=qwen38_program.workspace_bytes, trunk=Qwen38,
    check_head=qwen38_layout.check_head, head_workspace_bytes=qwen38_mtp.head_workspace_bytes,
    head_theta=qwen38_layout.head_rope_theta, head_spec=qwen38_mtp.head_spec, head_width=lambda g: g.width,
    head_writer=qwen38_mtp.HeadWriter,
    has_wirings=True,
)  # fmt: skip
QWEN36 = Family(
    name="qwen36", model_types=qwen36_geometry.MODEL_TYPES, geometry=qwen36_geometry.geometry,
    expected=qwen36_layout.expected, expected_head=qwen36_layout.expected_head, constants=lambda g: {},
    check=qwen36_layout.check, int8_rows=qwen36_layout.int8_rows,
    expert_layers=lambda g: tuple(f"layers.{i}." for i in g.moe_layers),
    state_spec=qwen36_program.state_spec, workspace_bytes=qwen36_program.workspace_bytes, trunk=_qwen36,
    check_head=qwen36_layout.check_head, head_workspace_bytes=qwen36_mtp.head_workspace_bytes,
    head_theta=lambda checkpoint, g: g.rope_theta, head_spec=qwen36_mtp.head_spec, head_width=lambda g: g.hidden,
    head_writer=qwen36_mtp.HeadWriter,
)  # fmt: skip
FAMILIES = (QWEN38, QWEN36)


def family_named(name: str) -> Family:
    """The family of this engine. Raises KeyError."""
    return {family.name: family for family in FAMILIES}[name]


def identify(checkpoint: Checkpoint) -> tuple[Family, Any]:
    """(family, geometry) of a checkpoint that passes its family's check. Raises ModelError."""
    family = family_of(checkpoint)
    geometry = family.geometry(checkpoint.config, checkpoint.config_path)
    family.check(checkpoint, geometry)
    return family, geometry


def family_of(checkpoint: Checkpoint) -> Family:
    """Raises ModelError for a model type that no engine runs."""
    kind = checkpoint.config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ModelError(f"model type {show(kind)} is not one coli runs", checkpoint.config_path, f"it runs {known}")
