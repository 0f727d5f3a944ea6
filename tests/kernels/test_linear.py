"""Linear kernels: right against the NumPy twins, and bit for bit the same row in any company (kernels/tiles.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from coli.kernels.linear import gated, grouped, linear, quantize
from coli.kernels.linear_reference import (
    bf16_numpy,
    dequantise,
    fp8_numpy,
    linear_numpy,
    linear_quantised_numpy,
    prepare_numpy,
    to_bf16,
)
from coli.kernels.moe import swiglu
from coli.kernels.packing import (
    GRAIN,
    OFFSETS,
    PREPARED_KINDS,
    TILE_KINDS,
    TILE_ROWS,
    Packed,
    pack_int4,
    pack_int8,
    packed_bytes,
    prepared_bytes,
    quantise_int4,
    quantise_int8,
    unpack,
)
from coli.kernels.tiles import tile
from tests.kernels.harness import address, aligned, call, close, pointers, same_bits, step, tile_table

SIZES = [(1, 1), (3, 15), (17, 70), (129, 200), (40, 64), (5, 1000)]
A, B = 32, 48  # FP8 scale blocks that divide neither n nor k


@dataclass(frozen=True)
class Weight:
    """What the kernel reads (w, s) and what it means (dense float64, or the packed weight)."""

    kind: str
    w: np.ndarray
    s: np.ndarray
    dense: np.ndarray
    packed: Packed | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape


def weight(kind: str, n: int, k: int, seed: int = 0, a: int = A, b: int = B) -> Weight:
    rng = np.random.default_rng([seed, n, k])
    values = rng.standard_normal((n, k), dtype=np.float32)
    none = np.zeros(1, np.float32)
    if kind == "fp8":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 3  # not NaN but a subnormal
        scales = (0.01 + rng.random((-(-n // a), -(-k // b)))).astype(np.float32)
        return Weight(kind, codes, scales, fp8_numpy(codes, scales, a, b))
    if kind == "bf16":
        bits = to_bf16(values)
        return Weight(kind, bits, none, bf16_numpy(bits).astype(np.float64))
    if kind in ("f32", "f16"):
        stored = values.astype({"f32": np.float32, "f16": np.float16}[kind])
        return Weight(kind, stored, none, stored.astype(np.float64))
    packed = (pack_int8 if kind.startswith("int8") else pack_int4)(values)
    return Weight(kind, packed.data, none, dequantise(packed), packed)


@cache
def table(kind: str) -> np.ndarray:
    """Every tile for bf16; fewer for the others (each takes up to a second to compile)."""
    rows = TILE_ROWS if kind == "bf16" else (1, 3, 6)
    return tile_table({r: tile(kind, r) for r in rows})


def rows_for(kind: str, x: np.ndarray) -> np.ndarray:
    return prepare_numpy(x, kind) if kind in PREPARED_KINDS else x


def product(weight: Weight, x: np.ndarray, nt: int = 1) -> np.ndarray:
    """`linear` on these rows; the floats around the output stay what they were."""
    n, k = weight.shape
    inputs = rows_for(weight.kind, x)
    y = np.full((len(x), n + 3), 7.0, np.float32)
    args = (weight.w, weight.s, pointers(inputs, 6), pointers(y, 6), n, k, A, B, table(weight.kind), GRAIN)
    call(linear, step(len(x)), *args, nt=nt)
    assert np.all(y[:, n:] == 7.0)
    return y[:, :n].copy()


def activations(count: int, k: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng([seed, k]).standard_normal((count, k), dtype=np.float32)


@pytest.mark.parametrize("kind", TILE_KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_product_equals_the_numpy_twin(kind: str, n: int, k: int) -> None:
    w, x = weight(kind, n, k), activations(4, k)
    expected = linear_quantised_numpy(w.packed, x) if kind in PREPARED_KINDS else linear_numpy(w.dense, x)
    assert close(product(w, x), expected, linear_numpy(np.abs(w.dense), np.abs(x)), 1e-6)


@pytest.mark.parametrize("kind", TILE_KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 70), (129, 200), (35, 1500)])
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(kind: str, n: int, k: int) -> None:
    w, x = weight(kind, n, k), activations(13, k)
    alone = np.concatenate([product(w, x[r : r + 1]) for r in range(len(x))])
    for count in (2, 3, 4, 5, 6, 7, 13):
        for nt in (1, 2, 3):
            assert same_bits(product(w, x[:count], nt), alone[:count]), (count, nt)


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_many_rows_go_through_weight_blocks_in_the_same_bits(kind: str) -> None:
    k = 4099  # 131072 weights a block: two units of 16 rows, so 70 rows take three blocks
    w, x = weight(kind, 70, k), activations(8, k)
    together = product(w, x, nt=2)
    assert same_bits(together, np.concatenate([product(w, x[r : r + 1]) for r in range(8)]))


@pytest.mark.parametrize("kind", TILE_KINDS)
def test_grouped_equals_separate_products(kind: str) -> None:
    n, k, experts = 37, 130, 5
    weights = [weight(kind, n, k, seed=e, a=16, b=50) for e in range(experts)]
    counts = [1, 7, 2, 5, 4]
    code, scale = weights[0].w.nbytes, weights[0].s.nbytes
    lead, record = 64, -(-(64 + code + scale) // 64) * 64  # a record begins with something else
    arena = aligned(record * experts)
    groups, pairs = [experts, sum(counts)], 0
    for e, w in enumerate(weights):
        part = arena[e * record : (e + 1) * record]
        part[lead : lead + code] = w.w.reshape(-1).view(np.uint8)
        part[lead + code : lead + code + scale] = w.s.reshape(-1).view(np.uint8)
        groups += [address(part), pairs, counts[e]]
        pairs += counts[e]
    x = activations(pairs, k)
    inputs, order = rows_for(kind, x), np.random.default_rng(3).permutation(pairs)
    xs = pointers(inputs)[order]
    expected = np.zeros((pairs, n), np.float32)
    one = np.zeros((1, n), np.float32)
    pair = 0
    for w, count in zip(weights, counts, strict=True):
        for _ in range(count):
            single = np.full(6, xs[pair])
            call(linear, step(1), w.w, w.s, single, pointers(one, 6), n, k, 16, 50, table(kind), GRAIN)
            expected[pair] = one[0]
            pair += 1
    for nt in (1, 2, 3):
        y = np.zeros((pairs, n), np.float32)
        call(
            grouped, np.array(groups), lead, lead + code, xs, pointers(y), n, k, 16, 50, table(kind), GRAIN, nt=nt
        )  # fmt: skip
        assert same_bits(y, expected), nt


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
@pytest.mark.parametrize("n", [37, 64])
def test_gated_equals_two_grouped_products_and_swiglu(kind: str, n: int) -> None:
    k, counts = 130, [1, 3, 2]
    code, scale = (getattr(weight(kind, n, k, a=16, b=50), part).nbytes for part in ("w", "s"))
    record = -(-(code + scale) // 64) * 64
    arena, groups = aligned(record * 6), [3, 6]  # three gates, then three ups
    for e in range(6):
        w = weight(kind, n, k, seed=e, a=16, b=50)
        part = arena[e * record : (e + 1) * record]
        part[:code], part[code : code + scale] = (a.reshape(-1).view(np.uint8) for a in (w.w, w.s))
        if e < 3:
            groups += [address(part), sum(counts[:e]), counts[e]]
    x, up = activations(6, k), 3 * record
    xs, cells = pointers(x), np.array(groups)
    gate, ups, expected, out = (np.zeros((6, n), np.float32) for _ in range(4))
    tail = (n, k, 16, 50, table(kind), GRAIN)
    call(grouped, cells, 0, code, xs, pointers(gate), *tail)
    call(grouped, cells, up, up + code, xs, pointers(ups), *tail)
    call(swiglu, cells[1:], pointers(gate), pointers(ups), pointers(expected), n)
    assert expected.any() and not same_bits(gate, ups)
    for nt in (1, 2, 3, 5):
        gate[:], ups[:], out[:] = 0, 0, 0
        to = (up, up + code, pointers(ups), pointers(out), code // n, table(kind), code // n)
        call(gated, cells, 0, code, xs, pointers(gate), *tail, *to, nt=nt)
        assert same_bits(out, expected), nt


def test_grouped_without_groups_does_nothing() -> None:
    zeros = np.zeros(2, np.int64)
    call(grouped, zeros, 0, 0, zeros, zeros, 5, 64, 1, 1, table("bf16"), GRAIN, nt=2)


@pytest.mark.parametrize("kind", PREPARED_KINDS)
@pytest.mark.parametrize("k", [1, 15, 64, 70, 200])
def test_quantize_equals_its_twin_byte_for_byte(kind: str, k: int) -> None:
    x = activations(5, k)
    x[1] = 0
    x[2] *= 1e-39  # denormal: counts as zero
    x[3, 0] = 127.0
    x[3, 1:4] = (np.array([0.5, 1.5, -2.5]) * 1.0)[: max(0, min(3, k - 1))]  # ties go to even codes
    expected = prepare_numpy(x, kind)
    for nt in (1, 2, 3):
        prepared = np.zeros((5, prepared_bytes(k)), np.uint8)
        call(quantize, np.array([5]), pointers(x), pointers(prepared), k, OFFSETS[kind], nt=nt)
        assert np.array_equal(prepared, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_not_hidden_by_quantisation(bad: float) -> None:
    w, x = weight("int8", 16, 70), activations(1, 70)
    x[0, 66] = bad
    prepared, y = np.zeros((1, prepared_bytes(70)), np.uint8), np.zeros((1, 16), np.float32)
    call(quantize, np.array([1]), pointers(x), pointers(prepared), 70, OFFSETS["int8"])
    call(linear, step(1), w.w, w.s, pointers(prepared, 6), pointers(y, 6), 16, 70, 1, 1, table("int8"), GRAIN)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 64), (17, 70), (50, 129)])
def test_packing_keeps_codes_and_scales(n: int, k: int) -> None:
    w = activations(n, k)
    for pack, quantise in ((pack_int8, quantise_int8), (pack_int4, quantise_int4)):
        packed, (codes, scales) = pack(w), quantise(w)
        assert packed.data.nbytes == packed_bytes(packed.kind, n, k) and packed.data.ctypes.data % 64 == 0
        back = unpack(packed)
        assert np.array_equal(back[0], codes) and np.array_equal(back[1], scales)


def test_quantisation_rules() -> None:
    codes, scales = quantise_int8(np.array([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]], np.float32))
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]] and scales.tolist() == [1.0, 0.0]
    codes, scales = quantise_int4(np.array([[7.0, -7.0, 0.5, 1.5, -3.4]], np.float32))
    assert codes.tolist() == [[7, -7, 0, 2, -3]] and scales.tolist() == [[1.0]]
    assert quantise_int4(np.zeros((1, 3), np.float32))[1][0, 0] == np.float32(1e-12) / np.float32(7)
    with pytest.raises(ValueError, match="groups of 64"):
        pack_int4(np.zeros((1, 32), np.float32), group=32)


def test_all_e4m3_codes_are_exact() -> None:
    """One weight row per code times x = 1: subnormals, signs and the largest values come out as they are."""
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8).reshape(-1, 1)
    scales = np.ones((1, 1), np.float32)
    x, y = np.ones((1, 1), np.float32), np.zeros((1, len(codes)), np.float32)
    call(
        linear, step(1), codes, scales, pointers(x, 6), pointers(y, 6), len(codes), 1, 256, 128, table("fp8"), GRAIN
    )  # fmt: skip
    assert np.array_equal(y[0], fp8_numpy(codes, scales, 256, 128)[:, 0])


def test_a_tile_shows_its_unrolled_source() -> None:
    source = tile("bf16", 2).source
    assert source.startswith("def tile_bf16_2(") and "sum3_1 = fma(v3, e, sum3_1)" in source and "{" not in source
