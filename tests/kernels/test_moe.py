from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.moe import combine, router, swiglu
from coli.kernels.reference import combine_numpy, router_numpy, swiglu_numpy
from tests.kernels.harness import call, close, pointers, same_bits, step
from tests.kernels.independence import assert_independent, guarded, inner


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def route(logits: np.ndarray, k: int, norm: int, nt: int = 1) -> tuple[np.ndarray, np.ndarray]:
    buffer = guarded(logits)
    ids, weights = np.full((len(logits) + 1, k), -5), np.full((len(logits) + 1, k), -5, np.float32)
    call(router, step(len(logits)), buffer, buffer.shape[1], logits.shape[1], k, ids, weights, norm, nt=nt)
    assert same_bits(inner(buffer, logits.shape[1]), logits), "the logits are not the router's to change"
    assert np.all(ids[-1] == -5) and np.all(weights[-1] == -5)
    return ids[:-1], weights[:-1]


@pytest.mark.parametrize("experts, k", [(1, 1), (4, 4), (16, 4), (17, 5), (50, 8), (512, 10)])
@pytest.mark.parametrize("norm", [0, 1])
def test_router(experts: int, k: int, norm: int) -> None:
    logits = normal(experts, 6, experts) * np.float32(3)
    ids, weights = router_numpy(logits.astype(np.float64), k, norm=bool(norm))
    assert np.array_equal(route(logits, k, norm)[0], ids)
    out = assert_independent(lambda part, nt: route(logits[part], k, norm, nt)[1])
    assert close(out, weights, weights, 2e-6)
    for r in range(6):
        assert np.array_equal(route(logits[r : r + 1], k, norm, 2)[0], ids[r : r + 1])


@pytest.mark.parametrize("experts, k", [(16, 4), (37, 6), (512, 10)])
def test_equal_experts_go_by_index(experts: int, k: int) -> None:
    rng = np.random.default_rng(experts)
    logits = rng.integers(0, 4, (40, experts)).astype(np.float32)
    logits[0] = 2
    logits[1] = -200  # exp(x - max) is 1 everywhere
    logits[2, :] = -300
    logits[2, 5] = 0  # all others are too small to tell apart
    expected = np.array([np.argsort(-row, kind="stable")[:k] for row in logits])
    assert np.array_equal(route(logits, k, 1)[0], expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_any_logits_give_different_experts_in_range(value: float) -> None:
    logits = normal(1, 3, 40)
    logits[0] = value
    logits[1, ::3] = value
    logits[2, 39] = value
    for norm in (0, 1):
        ids, weights = route(logits, 8, norm)
        for row in ids:
            assert len(set(row)) == 8 and row.min() >= 0 and row.max() < 40
        hidden = np.isneginf(logits[1:]).any()  # an expert that is impossible is no fault; a row of them is
        assert not np.isfinite(weights[0]).any() and (hidden or not np.isfinite(weights).any())


@pytest.mark.parametrize("n", [1, 16, 31, 64, 640])
def test_swiglu(n: int) -> None:
    gate, up = normal(1, 6, n) * np.float32(5), normal(2, 6, n)

    def run(part: slice, nt: int) -> np.ndarray:
        g, u = guarded(gate[part]), guarded(up[part], 2)
        out = guarded(np.zeros_like(gate[part]), 3)
        order = np.random.default_rng(0).permutation(len(out))  # rows lie anywhere: only the pointers say where
        lists = [np.ascontiguousarray(pointers(m)[order]) for m in (g, u, out)]
        call(swiglu, np.array([len(out)]), *lists, n, nt=nt)
        return inner(out, n)

    expected = swiglu_numpy(gate.astype(np.float64), up.astype(np.float64))
    assert close(assert_independent(run), expected, np.abs(expected), 1e-6)


@pytest.mark.parametrize("h", [1, 16, 45, 256])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_combine(h: int, k: int) -> None:
    d, weights, shared, gate = normal(1, 6, k, h), np.abs(normal(2, 6, k)), normal(3, 6, h), normal(4, 6, 1)

    def run(part: slice, nt: int) -> np.ndarray:
        count = len(d[part])
        gd, gs, gg = guarded(d[part].reshape(count * k, h)), guarded(shared[part], 2), guarded(gate[part], 1)
        y, w = guarded(np.zeros((count, h)), 3), weights[part].copy()
        products = (gd, gd.shape[1], w, k, gs, gs.shape[1], gg, gg.shape[1])
        call(combine, step(count), *products, y, y.shape[1], h, nt=nt)
        return inner(y, h)

    def alone(part: slice, nt: int) -> np.ndarray:
        count = len(d[part])
        gd, y, w = guarded(d[part].reshape(count * k, h)), guarded(np.zeros((count, h)), 3), weights[part].copy()
        call(combine, step(count), gd, gd.shape[1], w, k, 0, 0, 0, 0, y, y.shape[1], h, nt=nt)
        return inner(y, h)

    wide = [x.astype(np.float64) for x in (d, weights, shared, gate[:, 0])]
    without = wide[0], wide[1], 0 * wide[2], wide[3]
    assert close(assert_independent(alone), combine_numpy(*without), np.abs(wide[0]).sum(axis=1), 1e-6)
    scale = np.einsum("rk,rkh->rh", wide[1], np.abs(wide[0])) + np.abs(wide[2])
    assert close(assert_independent(run), combine_numpy(*wide), scale, 1e-6)
