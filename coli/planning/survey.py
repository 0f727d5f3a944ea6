"""What a checkpoint's headers say that memory depends on: the half of a plan that no setting of size changes.

Idea: `survey` reads names, shapes and dtypes once; `coli.planning.plan.make_plan` turns a survey and a budget into
numbers, as often as it is asked. Everything here is plain numbers but for the two `ExpertPlan`s, which say where the
bytes lie and which only the engine that loads the model wants: a survey that comes out of the header cache
(coli/planning/header_cache.py) has none. What a survey depends on besides the files: `--trunk`, `--experts` and
COLI_ACT, which choose what weights become. Guarded by tests/models/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coli.errors import ModelError
from coli.experts.plan import ExpertPlan, plan_experts
from coli.formats.checkpoint import Checkpoint
from coli.kernels.blocked import BLOCKED
from coli.models.base import never
from coli.models.families import Family, family_named
from coli.models.layout import HEAD, dense_formats, head_formats
from coli.settings import Settings


@dataclass(frozen=True)
class HeadSurvey:
    """A sound draft head: resident bytes of its dense weights by format, bytes of one of its experts (0: it has none),
    the base of its rotary positions."""

    dense: Mapping[str, int]
    slot: int
    format: str
    theta: float
    experts: ExpertPlan | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Survey:
    """`dense`: resident bytes of the trunk's dense weights by format, the largest first; `slots`: bytes of an expert,
    by trunk layer with experts; `codes`: kinds of int8 codes that activations are made into; `tokens`: that the
    tokenizer knows, at most.

    `head` is None without a sound one; `no_head` says then what is wrong and what to do."""

    engine: str
    path: Path
    nbytes: int  # of the files' tensors
    geometry: Any
    dense: Mapping[str, int]
    slots: tuple[int, ...]
    format: str
    notes: tuple[str, ...]
    codes: int
    tokens: int
    has_head: bool
    head: HeadSurvey | None
    no_head: tuple[str, str]
    experts: ExpertPlan | None = field(default=None, compare=False, repr=False)

    @property
    def family(self) -> Family:
        return family_named(self.engine)

    @property
    def slot(self) -> int:
        """Bytes of one expert in every layer."""
        return sum(self.slots)

    @property
    def record(self) -> int:
        """Bytes of one expert, where layers differ on average; 0 without experts."""
        return self.slot // len(self.slots) if self.slots else 0


def survey(checkpoint: Checkpoint, family: Family, geometry: Any, settings: Settings) -> Survey:
    """Survey a checkpoint that passed its family's check. Raises ModelError for experts it cannot place."""
    experts = plan_experts(checkpoint, geometry, family.expert_layers(geometry), settings.experts, settings.act)
    head, no_head = None, ("", "")
    try:
        head = _head(checkpoint, family, geometry, settings)
    except ModelError as error:
        no_head = error.what, error.hint
    return Survey(
        engine=family.name, path=checkpoint.folder, nbytes=checkpoint.nbytes, geometry=geometry,
        dense=_sorted(dense_formats(checkpoint, geometry, family.int8_rows if settings.trunk_int8 else never)),
        slots=tuple(layer.record.nbytes for layer in experts.layers), format=experts.format, notes=experts.notes,
        codes=_codes(checkpoint, experts, settings), tokens=_tokens(checkpoint, geometry.vocab),
        has_head=any(name.startswith("mtp.") for name in checkpoint), head=head, no_head=no_head, experts=experts,
    )  # fmt: skip


def _head(checkpoint: Checkpoint, family: Family, geometry: Any, settings: Settings) -> HeadSurvey:
    family.check_head(checkpoint, geometry)
    routed = f"{HEAD}mlp.gate.weight" in checkpoint
    experts = plan_experts(checkpoint, geometry, (HEAD,), settings.experts, settings.act) if routed else None
    return HeadSurvey(
        dense=_sorted(head_formats(checkpoint, family.int8_rows if settings.trunk_int8 else never)),
        slot=experts.nbytes if experts else 0, format=experts.format if experts else "none",
        theta=family.head_theta(checkpoint, geometry), experts=experts,
    )  # fmt: skip


def _codes(checkpoint: Checkpoint, experts: ExpertPlan, settings: Settings) -> int:
    """How many kinds of int8 codes of its inputs the model's integer weights want: each keeps its own."""
    if settings.act == "f32":
        return 0
    kinds = {kind for layer in experts.layers for kind in layer.kinds}
    kinds |= {tensor.dtype.lower() for tensor in checkpoint.tensors.values()}
    kinds |= {"int8"} if settings.trunk_int8 else set()
    return len({"int4", "int8"} & kinds) + bool(kinds & BLOCKED.keys())


def _tokens(checkpoint: Checkpoint, vocab: int) -> int:
    """No more than the model has, and no more than its tokenizer.json can spell, in 16 bytes each and more."""
    with suppress(OSError):
        return min(vocab, (checkpoint.folder / "tokenizer.json").stat().st_size // 16)
    return vocab


def _sorted(sizes: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
