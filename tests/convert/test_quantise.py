"""Codes, scales and byte layouts against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from coli.convert import quantise
from coli.convert.report import Options, Tally
from coli.kernels.packing import quantise_int4, quantise_int8
from tests.convert import reading


def _weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    w[0] = 0  # a row without a scale of its own
    w[1, : k // 2] = 3.5  # ties: half of 7 is 3.5 codes
    w[2] *= np.float32(1e-14)  # below int4's least scale
    w[3] *= np.float32(1e30)
    return w


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("k", [64, 130, 52])
def test_values_are_those_of_the_definition(bits: int, group: int, k: int) -> None:
    w = _weights(9, k)
    codes, scales = quantise.quantise(w, Options(bits, group))
    assert codes.shape == w.shape and scales.shape == (9, quantise.groups(k, group))
    assert np.array_equal(quantise.restored(codes, scales, group), reading.quantised(w, bits, group))


def test_the_engine_quantises_alike() -> None:
    w = _weights(33, 192)
    for ours, theirs in zip(quantise.quantise(w, Options(4, 64)), quantise_int4(w, 64), strict=True):
        assert np.array_equal(ours, theirs)
    (codes, scales), (theirs, rows) = quantise.quantise(w, Options(8, 0)), quantise_int8(w)
    assert np.array_equal(codes[3:], theirs[3:]) and np.array_equal(scales[3:, 0], rows[3:])


@pytest.mark.parametrize("k", [2, 52, 64, 66, 128, 190, 63, 129])
def test_nibbles_come_back(k: int) -> None:
    codes = np.random.default_rng(1).integers(-8, 8, (5, k)).astype(np.int8)
    assert np.array_equal(reading.planar(quantise.planar(codes), k), codes)
    if k % 2 == 0:
        assert np.array_equal(reading.pairs(quantise.nibble_pairs(codes), k), codes)


def test_an_odd_tail_ends_in_a_nibble_of_zero_value() -> None:
    assert quantise.planar(np.array([[-8, 7, 1]], np.int8)).tolist() == [[0xF0, 0x89]]


def test_errors_are_relative_and_by_kind() -> None:
    rng = np.random.default_rng(2)
    weights = tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((32, 64), (32, 64), (64, 32)))
    tally = Tally()
    codes, scales = quantise.expert(weights, Options(4, 64), tally)
    wanted = {}
    for kind, w, c, s in zip(("gate", "up", "down"), weights, codes, scales, strict=True):
        error = reading.times(c.astype(np.float32), s, 64).astype(np.float64) - w
        wanted[kind] = np.linalg.norm(error) / np.linalg.norm(w.astype(np.float64))
    found = tally.relative()
    assert list(found) == ["gate", "up", "down", "experts"]
    assert all(found[kind] == pytest.approx(value, rel=1e-5) for kind, value in wanted.items())
    assert 0.05 < found["experts"] < 0.15


@pytest.mark.filterwarnings("error")
def test_errors_of_huge_weights_are_numbers() -> None:
    """convert.json and --json hold them: an infinity or a NaN is no JSON."""
    tally = Tally()
    tally.compare("gate", np.array([[3e30, 4e30]], np.float32), np.array([[3e30, 0]], np.float32))
    assert tally.relative()["gate"] == pytest.approx(0.8)
