"""The vocabulary a model is written in: each function appends the ops of one idea to a program.

A model says *what* (linear, norm, mixture of experts); the kernels own layout and threads. Argument orders are the
kernels' own (their docstrings number them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coli.kernels.blocked import BLOCKED
from coli.kernels.packing import GRAIN, LISTED, OFFSETS, is_n16, parts_of, prepared_row_bytes
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


@dataclass(frozen=True)
class BestScore:
    """Where `best_score` leaves its answer, one cell each: place among the scores, token, probability."""

    place: np.ndarray
    token: np.ndarray
    p: np.ndarray


def prepare_op(
    program: Program, kind: str, count: np.ndarray, xs: np.ndarray, qs: np.ndarray, k: int, *, barrier: bool = True
) -> None:
    """Int8 codes of the first `count` (a cell) rows that xs lists into those that qs lists, as weights of `kind` take
    them: rows of prepared_row_bytes(kind, k) bytes."""
    if kind in BLOCKED:
        program.op("quantize_blocks", count, xs, qs, k, barrier=barrier)
    else:
        program.op("quantize", count, xs, qs, k, OFFSETS[kind], barrier=barrier)


def quantized(program: Program, source: Input, kind: str, count: np.ndarray | None = None) -> np.ndarray:
    """Row pointers that a weight of `kind` multiplies: the float rows, or int8 codes of them."""
    size = prepared_row_bytes(kind, source.width)
    if not size:
        return source.rows.pointers
    form = "blocks" if kind in BLOCKED else kind  # all block-quantised kinds take the same codes
    if form not in source.prepared:
        source.prepared[form] = program.codes_of(source.rows, form, size)
        count = program.step if count is None else count
        prepare_op(program, kind, count, source.rows.pointers, source.prepared[form], source.width)
    return source.prepared[form]


def linear(
    program: Program, source: Input, weight: Weight, out: Rows, *, step: Any = None, barrier: bool = True
) -> None:
    """out = source @ weight.T for the rows of this call."""
    xs = quantized(program, source, weight.kind, step)
    program.op(
        "linear", program.step if step is None else step, weight.codes, 0 if weight.scales is None else weight.scales,
        xs, out.pointers, weight.n, weight.k, *weight.block, program.tiles(weight.kind), GRAIN, barrier=barrier,
    )


def linears(
    program: Program, source: Input, pairs: list[tuple[Weight, Rows]], *, step: Any = None, barrier: bool = True
) -> None:
    """Several products of the same rows; one barrier behind the last, if any."""
    for weight, _ in pairs:
        quantized(program, source, weight.kind, step)
    for i, (weight, out) in enumerate(pairs):
        linear(program, source, weight, out, step=step, barrier=barrier and i == len(pairs) - 1)


def listed(
    program: Program, source: Input, weight: Weight, out: Rows, ids: np.ndarray, count: np.ndarray, *, step: Any = None
) -> None:
    """out = source @ weight[ids[:count]].T: the weight rows that a list names, in the bits of the whole product."""
    program.op(
        "listed", program.step if step is None else step, weight.codes, 0 if weight.scales is None else weight.scales,
        quantized(program, source, weight.kind, step), out.pointers, ids, weight.k, *weight.block,
        program.tiles(LISTED + weight.kind), GRAIN, count, int(is_n16(weight.kind)),
    )


def best_score(program: Program, scores: np.ndarray, count: np.ndarray, ids: np.ndarray | None) -> BestScore:
    """The best of the first `count` (a cell) scores, and the softmax probability it has among them."""
    out = BestScore(*(program.buffer(1, dtype=kind) for kind in (np.int64, np.int64, np.float32)))
    common = (scores, count, program.buffer(parts_of(scores.size)))
    program.op("draft_tops", *common)
    program.op("draft_sums", *common)
    program.op("draft_pick", *common, 0 if ids is None else ids, out.place, out.token, out.p)
    return out


def rms_group(
    program: Program, x: Rows, weight: np.ndarray, y: Rows, group: int, eps: float, *, step: Any = None,
    barrier: bool = True
) -> None:  # fmt: skip
    """RMS norm of each `group` consecutive features."""
    step = program.step if step is None else step
    program.op("rms_group", step, x.array, x.ld, weight, y.array, y.ld, weight.size, group, eps, barrier=barrier)
