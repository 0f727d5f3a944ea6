"""E4M3 values, blocks of any size, and the rule that FP8 weights and scales come in pairs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import ModelError
from coli.formats.fp8 import E4M3, block_size, blocks, dequantise, has_nan_code, pair_scales, widen
from coli.formats.safetensors import Tensor
from tests.tiny import bf16, e4m3, fp8_blocks

GOLDEN = {0x00: 0.0, 0x80: -0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x38: 1.0, 0x39: 1.125, 0x7E: 448.0,
          0xFE: -448.0, 0xB8: -1.0, 0x40: 2.0}  # fmt: skip


def test_e4m3_values():
    for code, value in GOLDEN.items():
        assert E4M3[code] == value and math.copysign(1, E4M3[code]) == math.copysign(1, value)
    assert np.flatnonzero(np.isnan(E4M3)).tolist() == [0x7F, 0xFF]
    assert not np.isinf(E4M3).any()
    assert (np.diff(E4M3[:0x7F]) > 0).all() and (E4M3[0x80:0xFF] == -E4M3[:0x7F]).all()


def test_the_scale_multiplies():
    """`_inv` notwithstanding (llm-scaler#474)."""
    assert dequantise(np.array([[0x38]], np.uint8), np.array([[0.5]], np.float32), (128, 128)) == [[0.5]]


@pytest.mark.parametrize("rows", [1000, 129, 127, 1])
@pytest.mark.parametrize("columns", [1000, 129, 127, 1])
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128), (7, 5)])
def test_partial_blocks_against_a_direct_reference(rows, columns, block):
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = rng.standard_normal(blocks(codes.shape, block)).astype(np.float32)
    r, c = np.indices(codes.shape)
    direct = E4M3[codes] * scale[r // block[0], c // block[1]]
    assert dequantise(codes, scale, block).tobytes() == direct.tobytes()


def test_stacked_matrices_are_blocked_one_by_one():
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (3, 10, 9)).astype(np.uint8)
    scale = rng.standard_normal(blocks(codes.shape, (4, 4))).astype(np.float32)
    whole = dequantise(codes, scale, (4, 4))
    assert all((whole[e] == dequantise(codes[e], scale[e], (4, 4))).all() for e in range(3))


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=50))
@settings(deadline=None)
def test_the_writer_of_the_tests_rounds_to_nearest(values):
    values = np.array(values, np.float32)
    error = np.abs(E4M3[e4m3(values)] - values)
    finite = E4M3[~np.isnan(E4M3)]
    assert (error <= np.abs(finite[None] - values[:, None]).min(1)).all()


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32", "F16"])
def test_scales_widen_exactly(scale_dtype):
    weight = np.random.default_rng(1).standard_normal((70, 50)).astype(np.float32)
    codes, scale = fp8_blocks(weight, (32, 16), scale_dtype)
    back = dequantise(codes, widen(scale, scale_dtype), (32, 16))
    assert np.abs(back - weight).max() < 0.07 * np.abs(weight).max()


def test_widen():
    values = np.array([1.5, -2.0, 3e-8, 0.1], np.float32)
    assert widen(values, "F32") is values
    assert (widen(values.astype(np.float16), "F16") == values.astype(np.float16)).all()
    assert widen(bf16(values), "BF16").tolist() == [1.5, -2.0, pytest.approx(3e-8, rel=4e-3), 0.10009765625]
    with pytest.raises(ValueError):
        widen(values, "I64")


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_nan_codes_are_found(raw):
    codes = np.frombuffer(raw, np.uint8)
    assert has_nan_code(codes) == bool(np.isnan(E4M3[codes]).any())


# ---- pairs -------------------------------------------------------------------------------------------------------

BLOCKS = {"weight_block_size": [4, 4]}


def tensors(**found: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {n.replace("__", "."): Tensor(n.replace("__", "."), d, s, Path("f"), 0, 0) for n, (d, s) in found.items()}


WEIGHT = ("F8_E4M3", (9, 8))
SCALE = ("BF16", (3, 2))


def test_pairs_are_found():
    found = tensors(a__weight=WEIGHT, a__weight_scale_inv=SCALE, b__weight=("BF16", (9, 8)))
    assert pair_scales(found, BLOCKS) == {"a.weight": found["a.weight_scale_inv"]}
    assert pair_scales(tensors(b__weight=("BF16", (9, 8))), {}) == {}


PAIRS = {
    "missing": (dict(a__weight=WEIGHT), "missing a.weight_scale_inv"),
    "unused": (dict(a__weight=WEIGHT, a__weight_scale_inv=SCALE, c__weight_scale_inv=SCALE), "c.weight_scale_inv"),
    "of a bf16 weight": (dict(a__weight=("BF16", (9, 8)), a__weight_scale_inv=SCALE), "a.weight_scale_inv"),
    "renamed": (dict(a__weight=WEIGHT, a__weight_scale=SCALE), "found a.weight_scale instead"),
    "renamed otherwise": (dict(a__weight=WEIGHT, a__scale_weight=SCALE), "found a.scale_weight instead"),
    "scalar": (dict(a__weight=WEIGHT, a__weight_scale=("F32", ())), "found a.weight_scale instead"),
    "a second one": (dict(a__weight=WEIGHT, a__weight_scale_inv=SCALE, a__weight_scale=SCALE), "a.weight_scale"),
    "moved": (dict(a__weight=WEIGHT, b__weight_scale_inv=SCALE), "without a weight: b.weight_scale_inv"),
    "per row": (dict(a__weight=WEIGHT, a__weight_scale_inv=("F32", (9, 1))), "expected [3, 2]"),
    "one number": (dict(a__weight=WEIGHT, a__weight_scale_inv=("F32", (1,))), "expected [3, 2]"),
    "transposed": (dict(a__weight=WEIGHT, a__weight_scale_inv=("F32", (2, 3))), "expected [3, 2]"),
    "integers": (dict(a__weight=WEIGHT, a__weight_scale_inv=("I64", (3, 2))), "dtype I64"),
    "a vector": (dict(a__weight=("F8_E4M3", (9,)), a__weight_scale_inv=("BF16", (3,))), "matrix"),
}


@pytest.mark.parametrize(("found", "message"), PAIRS.values(), ids=PAIRS.keys())
def test_whatever_is_no_pair_is_refused(found, message):
    with pytest.raises(ModelError) as caught:
        pair_scales(tensors(**found), BLOCKS, where="folder")
    assert message in str(caught.value)


def test_exempt_tensors_are_somebody_elses():
    found = tensors(table=("F8_E4M3", (9, 8)), table_scale=("BF16", (1,)))
    assert pair_scales(found, {}, {"table", "table_scale"}) == {}


@pytest.mark.parametrize("size", [None, 128, [128], [128, 0], [128, -1], [128.0, 128], [True, 128], "128", [1, 2, 3],
                                  [1 << 40, 1]])  # fmt: skip
def test_block_size_comes_from_the_config_or_not_at_all(size):
    with pytest.raises(ModelError, match="weight_block_size"):
        block_size({"weight_block_size": size})
    with pytest.raises(ModelError, match="weight_block_size"):
        pair_scales(tensors(a__weight=WEIGHT, a__weight_scale_inv=SCALE), {"weight_block_size": size})
