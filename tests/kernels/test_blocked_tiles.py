"""Tiles of block-quantised weights: right against decoded weights, and bit for bit the same row in any company."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from coli.kernels.blocked import BLOCKED, base_kind, blocked_bytes, decode, pack_blocks, prepared_blocks_bytes
from coli.kernels.linear import gated, grouped, linear, listed, quantize_blocks
from coli.kernels.linear_reference import linear_blocks_numpy, linear_numpy, prepare_blocks_numpy
from coli.kernels.moe import swiglu
from coli.kernels.packing import BLOCKED_KINDS, GRAIN, LISTED
from coli.kernels.tiles import tile
from tests.kernels.harness import address, aligned, call, close, pointers, same_bits, step, tile_table
from tests.kernels.test_blocked import plain_blocks, random_blocks

GUARD = np.float32(7.0)
FAST = ("q8_0", "q4_0", "q4_k", "q6_k", "q8_0f")  # compiling all tiles takes a while
KINDS = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in BLOCKED_KINDS]


@dataclass(frozen=True)
class Weight:
    """What the kernel reads, and what it means (float32, decoded)."""

    kind: str
    packed: np.ndarray
    dense: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape


def pack(kind: str, raw: np.ndarray) -> Weight:
    base = base_kind(kind)
    dense = decode(kind, raw)
    packed = aligned(blocked_bytes(base, *dense.shape))
    pack_blocks(base, raw, packed)
    return Weight(kind, packed, dense)


@cache
def weight(kind: str, n: int, supers: int, seed: int = 0) -> Weight:
    """A weight of `supers` file blocks a row."""
    base = base_kind(kind)
    return pack(kind, plain_blocks(base, n, supers * BLOCKED[base].elements, seed))


@cache
def table(kind: str) -> np.ndarray:
    return tile_table({r: tile(kind, r) for r in (1, 3, 6)})


@cache
def listed_table(kind: str) -> np.ndarray:
    return tile_table({1: tile(LISTED + kind, 1)})


def rows_for(kind: str, x: np.ndarray) -> np.ndarray:
    return x if kind.endswith("f") else prepare_blocks_numpy(x)


def activations(count: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, k]).standard_normal((count, k), dtype=np.float32)


def product(w: Weight, x: np.ndarray, nt: int = 1) -> np.ndarray:
    """`linear` on these rows; the floats around the output stay what they were."""
    n, inputs = w.shape[0], rows_for(w.kind, x)
    y = np.full((len(x), n + 3), GUARD, np.float32)
    xs, ys = pointers(inputs, 6), pointers(y, 6)
    call(linear, step(len(x)), w.packed, 0, xs, ys, *w.shape, 0, 0, table(w.kind), GRAIN, nt=nt)
    assert np.all(y[:, n:] == GUARD)
    return y[:, :n].copy()


def expected(w: Weight, x: np.ndarray) -> np.ndarray:
    dense = w.dense.astype(np.float64)
    return linear_numpy(dense, x) if w.kind.endswith("f") else linear_blocks_numpy(dense, x)


@pytest.mark.parametrize("kind", KINDS)
def test_product_equals_decoded_weights_times_x(kind: str) -> None:
    for n, supers in ((1, 1), (17, 3), (40, 5), (129, 2)):
        w = weight(kind, n, supers)
        x = activations(4, w.shape[1])
        y = product(w, x)
        assert close(y, expected(w, x), np.abs(y).max(), 1e-6), (n, supers)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_and_packed_scale(kind: str) -> None:
    """Bytes at random, so that all codes and packed scales occur; one input at a time, so that none hides another."""
    base = base_kind(kind)
    raw = plain_blocks(base, 16, BLOCKED[base].elements, seed=5)
    w = pack(kind, raw)
    k = w.shape[1]
    x = np.eye(k, dtype=np.float32)
    y = np.concatenate([product(w, x[i : i + 6]) for i in range(0, k, 6)])
    assert close(y, w.dense.T, np.abs(w.dense).max(), 2e-7)
    if kind.endswith("f"):
        assert same_bits(y + 0.0, w.dense.T + np.float32(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(kind: str) -> None:
    for n, supers in ((1, 1), (35, 3)):
        w = weight(kind, n, supers)
        x = activations(13, w.shape[1])
        alone = np.concatenate([product(w, x[r : r + 1]) for r in range(len(x))])
        for count in (2, 3, 4, 5, 6, 7, 8, 13):
            for nt in (1, 2, 3):
                assert same_bits(product(w, x[:count], nt), alone[:count]), (n, count, nt)


@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("kind", ["q4_0", "q6_k"])
def test_the_other_tiles_have_the_same_bits(kind: str, rows: int) -> None:
    w = weight(kind, 35, 3)
    x = activations(rows, w.shape[1])
    expected, inputs, y = product(w, x), rows_for(kind, x), np.zeros((rows, 35), np.float32)
    tiles = tile_table({rows: tile(kind, rows)})
    call(linear, step(rows), w.packed, 0, pointers(inputs), pointers(y), *w.shape, 0, 0, tiles, GRAIN)
    assert same_bits(y, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_listed_row_has_the_bits_of_the_whole_product(kind: str) -> None:
    w = weight(kind, 150, 3)
    x = activations(2, w.shape[1])
    whole, inputs = product(w, x), rows_for(kind, x)
    rng = np.random.default_rng(4)
    lists = ([0], [149], list(range(150)), sorted(rng.choice(150, 40, replace=False)), rng.permutation(150)[:50])
    for ids in lists:
        places = np.array([*ids, -(1 << 40)], np.int64)  # the id behind the list is nobody's to follow
        for nt in (1, 2, 7):
            y = np.full((2, len(ids) + 3), GUARD, np.float32)
            call(listed, step(2), w.packed, 0, pointers(inputs), pointers(y), places, w.shape[1], 0, 0,
                 listed_table(kind), GRAIN, np.array([len(ids)]), 1, nt=nt)  # fmt: skip
            assert np.all(y[:, len(ids) :] == GUARD)
            assert same_bits(y[:, : len(ids)], whole[:, ids])


@pytest.mark.parametrize("k", [32, 96, 256])
def test_quantize_blocks_equals_its_twin_byte_for_byte(k: int) -> None:
    x = activations(5, k)
    x[1] = 0
    x[2] *= 1e-39  # denormal: counts as zero
    x[3, 0] = 127.0
    x[3, 1:4] = (0.5, 1.5, -2.5)  # ties go to even codes
    x[4, :32] = -1.0  # the largest sums of codes
    wanted = prepare_blocks_numpy(x)
    for nt in (1, 2, 3):
        rows = np.zeros((5, prepared_blocks_bytes(k)), np.uint8)
        call(quantize_blocks, np.array([5]), pointers(x), pointers(rows), k, nt=nt)
        assert np.array_equal(rows, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
def test_a_value_that_is_not_finite_is_not_hidden(kind: str, bad: float) -> None:
    w = weight(kind, 16, 2)
    x = activations(1, w.shape[1])
    x[0, 40] = bad
    rows, y = np.zeros((1, prepared_blocks_bytes(w.shape[1])), np.uint8), np.zeros((1, 16), np.float32)
    call(quantize_blocks, np.array([1]), pointers(x), pointers(rows), w.shape[1])
    call(linear, step(1), w.packed, 0, pointers(rows, 6), pointers(y, 6), *w.shape, 0, 0, table(kind), GRAIN)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_reaches_its_own_row_alone(kind: str) -> None:
    """Any bytes: rows whose weights are all finite come out right beside rows with infinite and NaN ones."""
    base = base_kind(kind)
    raw = random_blocks(base, 48, 2 * BLOCKED[base].elements, seed=9)
    raw[::3] = plain_blocks(base, 16, 2 * BLOCKED[base].elements)
    w = pack(kind, raw)
    x = activations(1, w.shape[1])
    with np.errstate(all="ignore"):
        y, wanted = product(w, x), expected(w, x)
    plain = slice(0, None, 3)
    assert close(y[:, plain], wanted[:, plain], np.abs(wanted[:, plain]).max(), 1e-6)


@pytest.mark.parametrize(("kind", "other"), [("q8_0",) * 2, ("q4_k",) * 2, ("q8_0f",) * 2, ("q4_k", "q6_k")])
def test_experts_as_the_program_runs_them(kind: str, other: str) -> None:
    """gate and up (of another kind, perhaps) into a row, silu(gate) * up over the gate, prepared or not for down:
    against product by product."""
    base, counts, hidden, inner = base_kind(kind), [1, 7, 2], 256, 512
    gates = [weight(kind, inner, hidden // BLOCKED[base].elements, seed=e) for e in range(3)]
    ups = [weight(other, inner, hidden // BLOCKED[base_kind(other)].elements, seed=10 + e) for e in range(3)]
    downs = [weight(kind, hidden, inner // BLOCKED[base].elements, seed=20 + e) for e in range(3)]
    size = max(gates[0].packed.nbytes, ups[0].packed.nbytes)
    arena, groups, pairs = aligned(3 * 3 * size), [3, sum(counts)], 0
    for e, parts in enumerate(zip(gates, ups, downs, strict=True)):
        record = arena[e * 3 * size : (e + 1) * 3 * size]
        for i, part in enumerate(parts):
            record[i * size : i * size + part.packed.nbytes] = part.packed
        groups += [address(record), pairs, counts[e]]
        pairs += counts[e]
    x, cells = activations(pairs, hidden), np.array(groups)
    inputs, prepared = rows_for(kind, x), np.zeros((pairs, prepared_blocks_bytes(inner)), np.uint8)
    both, out = np.zeros((pairs, 2 * inner), np.float32), np.zeros((pairs, hidden), np.float32)
    gate, up, act = pointers(both), pointers(both) + 4 * inner, pointers(prepared)
    tiles, row, row_up = table(kind), gates[0].packed.nbytes // inner, ups[0].packed.nbytes // inner
    for nt in (1, 2, 3):
        both[:] = out[:] = 0
        into, back = (inner, hidden, 0, 0, tiles, GRAIN), (hidden, inner, 0, 0, tiles, GRAIN)
        call(gated, cells, 0, 0, pointers(inputs), gate, *into, size, 0, up, gate, row, table(other), row_up,
             nt=nt)  # fmt: skip
        source = gate
        if not kind.endswith("f"):
            call(quantize_blocks, cells[1:], gate, act, inner, nt=nt)
            source = act
        call(grouped, cells, 2 * size, 0, source, pointers(out), *back, downs[0].packed.nbytes // hidden, nt=nt)
        at = 0
        for e, count in enumerate(counts):
            part = x[at : at + count]
            g, u = product(gates[e], part), product(ups[e], part)
            call(swiglu, np.array([count]), pointers(g), pointers(u), pointers(g), inner)
            assert same_bits(out[at : at + count], product(downs[e], g)), (nt, e)
            at += count
