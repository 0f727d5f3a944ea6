"""The table of ggml types is the gguf package's, and decoding is its decoding, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from coli.errors import ModelError
from coli.formats.ggml import DECODED, FLOATS, IDS, NATIVE, QUANTISED, SIZES, dequantize, row_bytes

KINDS = gguf.GGMLQuantizationType


def test_the_table_is_the_packages():
    assert {KINDS[name].value: SIZES[name] for name in SIZES} == {k.value: v for k, v in gguf.GGML_QUANT_SIZES.items()}
    assert {number: KINDS(number).name for number in IDS} == IDS and set(IDS.values()) == set(SIZES)


def test_what_coli_computes_on_is_what_can_be_decoded():
    assert not set(NATIVE) & set(DECODED) and QUANTISED | set(FLOATS) < set(SIZES)
    for name in SIZES.keys() - set(FLOATS):
        raw = np.zeros((1, SIZES[name][1]), np.uint8)
        if name in QUANTISED:
            assert dequantize(name, raw).shape == (1, SIZES[name][0])
        else:
            with pytest.raises(ModelError, match="cannot be decoded"):
                dequantize(name, raw)


def test_rows_are_whole_blocks():
    assert row_bytes("Q8_0", 64) == 68 and row_bytes("Q4_K", 512) == 288 and row_bytes("BF16", 3) == 6
    assert row_bytes("F32", 0) == row_bytes("Q6_K", 0) == 0
    for dtype, k in (("Q8_0", 48), ("Q4_K", 128)):
        with pytest.raises(ValueError, match="no whole blocks"):
            row_bytes(dtype, k)


def blocks(dtype: str) -> np.ndarray:
    """uint8 [rows, 3 blocks]: random bytes, and bytes that make scales of NaN, infinity, zero and their opposites."""
    rng, nbytes = np.random.default_rng(7), 3 * SIZES[dtype][1]
    odd = [np.resize(np.frombuffer(bytes.fromhex(text), np.uint8), nbytes)
           for text in ("00", "ff", "80", "7f", "007c", "00fc", "007e", "0100", "ffff0000")]  # fmt: skip
    return np.concatenate([rng.integers(0, 256, (40, nbytes), np.uint8), odd])


@pytest.mark.parametrize("dtype", sorted(QUANTISED | set(FLOATS)))
def test_decoding_is_the_packages_bit_for_bit(dtype: str):
    raw = blocks(dtype)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, KINDS[dtype]).view(np.uint32)
    got = dequantize(dtype, raw)
    assert got.dtype == np.float32 and got.shape == (len(raw), 3 * SIZES[dtype][0])
    assert np.array_equal(got.view(np.uint32), expected)
    stacked = np.stack([raw, raw[::-1]])
    assert np.array_equal(dequantize(dtype, stacked)[1].view(np.uint32), expected[::-1])  # [E, rows, bytes]
    apart = np.repeat(raw, 2, axis=0)[::2]  # rows that lie apart
    assert np.array_equal(dequantize(dtype, apart).view(np.uint32), expected)
    assert dequantize(dtype, raw[:0]).shape == (0, 3 * SIZES[dtype][0])


def test_a_type_the_installed_package_does_not_know_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(quants._type_traits, KINDS.MXFP4)
    with pytest.raises(ModelError, match="MXFP4.*gguf package.*upgrade"):
        dequantize("MXFP4", np.zeros((1, 17), np.uint8))
