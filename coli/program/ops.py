"""The vocabulary a model is written in: each function appends the ops of one idea to a program.

A model says *what* (linear, norm, mixture of experts); the kernels own layout and threads. Argument orders are the
kernels' own (their docstrings number them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coli.kernels.packing import GRAIN, OFFSETS, PREPARED_KINDS, prepared_bytes
from coli.program.builder import Program, Rows


@dataclass(frozen=True)
class Weight:
    """A matrix [n, k] (out, in) in one of the GEMV kinds; `codes` and `scales` as kernels/linear.py lays them out."""

    kind: str
    n: int
    k: int
    codes: np.ndarray
    scales: np.ndarray | None = None
    block: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass
class Input:
    """Rows about to be multiplied by weights; int8 codes of them are made once, when a weight first asks."""

    rows: Rows
    width: int
    prepared: dict[str, np.ndarray] = field(default_factory=dict)


def quantized(program: Program, source: Input, kind: str, count: np.ndarray | None = None) -> np.ndarray:
    """Row pointers that a weight of `kind` multiplies: the float rows, or int8 codes of them (per 64 inputs)."""
    if kind not in PREPARED_KINDS:
        return source.rows.pointers
    if kind not in source.prepared:
        rows = program.view(program.buffer(source.rows.array.shape[0], prepared_bytes(source.width), dtype=np.uint8))
        source.prepared[kind] = rows.pointers
        count = program.step if count is None else count
        program.op("quantize", count, source.rows.pointers, rows.pointers, source.width, OFFSETS[kind])
    return source.prepared[kind]


def linear(
    program: Program, source: Input, weight: Weight, out: Rows, *, step: Any = None, barrier: bool = True
) -> None:
    """out = source @ weight.T for the rows of this call."""
    xs = quantized(program, source, weight.kind, step)
    program.op(
        "linear", program.step if step is None else step, weight.codes, 0 if weight.scales is None else weight.scales,
        xs, out.pointers, weight.n, weight.k, *weight.block, program.tiles(weight.kind), GRAIN, barrier=barrier,
    )


def linears(program: Program, source: Input, pairs: list[tuple[Weight, Rows]]) -> None:
    """Several products of the same rows; one barrier behind the last."""
    for weight, _ in pairs:
        quantized(program, source, weight.kind)
    for i, (weight, out) in enumerate(pairs):
        linear(program, source, weight, out, barrier=i == len(pairs) - 1)


def rms_group(
    program: Program, x: Rows, weight: np.ndarray, y: Rows, group: int, eps: float, *, step: Any = None
) -> None:
    """RMS norm of each `group` consecutive features."""
    step = program.step if step is None else step
    program.op("rms_group", step, x.array, x.ld, weight, y.array, y.ld, weight.size, group, eps)
