from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.norm import gather, rms_group, silu_scaled
from coli.kernels.reference import rms_group_numpy, silu_scaled_numpy
from tests.kernels.harness import call, close, same_bits, step
from tests.kernels.independence import assert_independent, guarded, inner

EPS = 1e-6


@pytest.mark.parametrize(
    "width, group", [(1, 1), (5, 5), (16, 16), (51, 17), (130, 65), (256, 64), (1024, 256), (2560, 2560)]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_group(width: int, group: int, in_place: bool) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((6, width)).astype(np.float32) * np.float32(3)
    w = rng.standard_normal(width).astype(np.float32)

    def run(part: slice, nt: int) -> np.ndarray:
        source = guarded(x[part])
        target = source if in_place else guarded(np.zeros_like(x[part]), 3)
        call(
            rms_group, step(len(source)), source, source.shape[1], w, target, target.shape[1], width, group, EPS, nt=nt
        )
        return inner(target, width)

    expected = rms_group_numpy(x.astype(np.float64), w.astype(np.float64), group, EPS)
    assert close(assert_independent(run), expected, np.abs(expected), 1e-6)


def test_rms_of_zeros_is_zero() -> None:
    x = np.zeros((1, 40), np.float32)
    call(rms_group, step(1), x, 40, np.ones(40, np.float32), x, 40, 40, 20, EPS)
    assert not x.any()


@pytest.mark.parametrize("n", [1, 15, 16, 33, 320])
def test_silu_scaled(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((6, n)).astype(np.float32) * np.float32(20)

    def run(part: slice, nt: int) -> np.ndarray:
        buffer = guarded(x[part])
        call(silu_scaled, step(len(buffer)), buffer, buffer.shape[1], n, 0.25, nt=nt)
        return inner(buffer, n)

    expected = silu_scaled_numpy(x.astype(np.float64), 0.25)
    assert close(assert_independent(run), expected, np.abs(expected), 1e-6)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (16, 40), (33, 33), (320, 7)])
def test_gather(n: int, width: int) -> None:
    rng = np.random.default_rng(n)
    x, index = rng.standard_normal((6, width)).astype(np.float32), rng.integers(0, width, n).astype(np.int32)

    def run(part: slice, nt: int) -> np.ndarray:
        source, out = guarded(x[part]), guarded(np.zeros((len(x[part]), n)), 3)
        call(gather, step(len(out)), source, source.shape[1], index, out, out.shape[1], n, nt=nt)
        return inner(out, n)

    assert same_bits(assert_independent(run), x[:, index])
