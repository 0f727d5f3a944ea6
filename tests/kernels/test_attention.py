from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from coli.kernels.attention import attention, attention_prep, block_keys, index_pick, index_prep, index_scores
from coli.kernels.reference import (
    attended_rows,
    attention_numpy,
    block_keys_numpy,
    index_pick_numpy,
    index_scores_numpy,
    norm_rope_numpy,
    rope_table,
)
from tests.kernels.harness import call, close, same_bits, step
from tests.kernels.independence import GUARD, guarded, inner

EPS = 1e-6
THETA = 1e4


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Shape:
    nq: int
    nkv: int
    d: int
    rot: int
    nh: int
    di: int
    irot: int
    ratio: int
    budget: int
    rows: int = 60
    gated: int = 1


SHAPES = [
    Shape(nq=4, nkv=2, d=64, rot=16, nh=4, di=32, irot=16, ratio=8, budget=2),  # nano's heads
    Shape(nq=24, nkv=2, d=256, rot=64, nh=4, di=128, irot=64, ratio=4, budget=5, rows=40),  # the real ones
    Shape(nq=6, nkv=1, d=80, rot=40, nh=1, di=48, irot=2, ratio=3, budget=4),
    Shape(nq=3, nkv=3, d=21, rot=10, nh=3, di=17, irot=6, ratio=1, budget=7),
    Shape(nq=5, nkv=1, d=128, rot=128, nh=2, di=64, irot=64, ratio=4, budget=100),  # never beyond the budget
    Shape(nq=6, nkv=2, d=48, rot=48, nh=1, di=16, irot=8, ratio=4, budget=3, gated=0),  # q alone
]


class Layer:
    """An attention layer's inputs for a whole sequence, its caches, and the kernels run over parts of it."""

    def __init__(self, shape: Shape) -> None:
        c = self.c = shape
        self.ctx = c.rows + 3
        self.q, self.k, self.v = normal(1, c.rows, c.nq * (1 + c.gated) * c.d), *normal(2, 2, c.rows, c.nkv * c.d)
        self.qk = normal(3, c.rows, (c.nh + 1) * c.di)
        self.qn, self.kn = 1 + normal(4, 2, c.d) / 4
        self.iqn, self.ikn = 1 + normal(5, 2, c.di) / 4
        self.cache = np.full((2, c.nkv, self.ctx, c.d), GUARD, np.float32)
        self.raw = np.full((self.ctx, c.di), GUARD, np.float32)
        self.pooled = np.full((self.ctx // c.ratio + 1, c.di), GUARD, np.float32)

    def table(self, part: slice, rot: int) -> tuple[np.ndarray, int]:
        """Rope rows of a call: the rows' own positions and, before them, those its first block may begin at."""
        off = self.c.ratio - 1
        positions = np.arange(part.start - off, part.stop)
        return rope_table(positions, rot, THETA).astype(np.float32), off

    def run(self, part: slice, nt: int = 1) -> tuple[np.ndarray, list[np.ndarray | None]]:
        """-> (output rows, picked blocks of each row or None)."""
        c, at = self.c, step(part.stop - part.start, part.start)
        n = part.stop - part.start
        q, k, v, qk = (guarded(x[part], i) for i, x in enumerate((self.q, self.k, self.v, self.qk)))
        (rope, off), (irope, _) = self.table(part, c.rot), self.table(part, c.irot)
        inputs = (q, q.shape[1], k, k.shape[1], v, v.shape[1], self.qn, self.kn, EPS, rope, off)
        call(attention_prep, at, *inputs, *self.cache, self.ctx, c.nq, c.nkv, c.d, c.rot, c.gated, nt=nt)
        call(
            index_prep, at, qk, qk.shape[1], self.iqn, EPS, irope, off, self.raw, c.nh, c.di, c.irot, nt=nt
        )  # fmt: skip
        call(block_keys, at, self.raw, self.pooled, self.ikn, EPS, irope, off, c.di, c.irot, c.ratio, nt=nt)
        blocks = max(part.stop // c.ratio, 1)
        scores = guarded(np.full((n, blocks), GUARD))
        shape = (c.nh, c.di, c.ratio, c.budget)
        call(index_scores, at, qk, qk.shape[1], self.pooled, scores, scores.shape[1], *shape, nt=nt)
        inner(scores, blocks)
        picks, counts = np.full((n + 1, c.budget), -9, np.int32), np.zeros(n, np.int64)
        call(index_pick, at, scores, scores.shape[1], picks, c.budget, counts, c.ratio, c.budget, nt=nt)
        assert np.all(picks[-1] == -9)
        self.scores = scores
        out = self.attend(part, q, picks, counts, nt)
        return out, [None if count < 0 else picks[r] for r, count in enumerate(counts)]

    def attend(self, part: slice, q: np.ndarray, picks: np.ndarray, counts: np.ndarray, nt: int) -> np.ndarray:
        c = self.c
        most = max(part.stop if n < 0 else min(part.stop, n * c.ratio + c.ratio) for n in counts)
        scratch = np.full(4 * most * nt + 1, GUARD, np.float32)
        out = guarded(np.full((len(q), c.nq * c.d), GUARD), 2)
        chosen = (picks, c.budget, counts, c.ratio, out, out.shape[1], c.nq, c.nkv, c.d)
        at = step(len(q), part.start)
        call(attention, at, q, q.shape[1], *self.cache, self.ctx, *chosen, scratch, 4 * most, c.gated, nt=nt)
        assert scratch[-1] == GUARD
        return inner(out, c.nq * c.d)


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def one_by_one(request) -> tuple[Layer, np.ndarray, list]:
    """A layer run one row at a time."""
    layer = Layer(request.param)
    outs, picks = zip(*(layer.run(slice(t, t + 1)) for t in range(layer.c.rows)), strict=True)
    return layer, np.concatenate(outs), [p[0] for p in picks]


def test_the_layer_against_numpy(one_by_one) -> None:
    layer, out, picks = one_by_one
    c, wide = layer.c, np.float64
    here = np.arange(c.rows)
    table, irope = rope_table(here, c.rot, THETA), rope_table(here, c.irot, THETA)
    qg = layer.q.astype(wide).reshape(c.rows, c.nq, 1 + c.gated, c.d)
    open_gates = np.full((c.nq, c.d), 1e4)
    q = norm_rope_numpy(qg[:, :, 0], layer.qn.astype(wide), EPS, table)
    k = norm_rope_numpy(layer.k.astype(wide).reshape(c.rows, c.nkv, c.d), layer.kn.astype(wide), EPS, table)
    v = layer.v.astype(wide).reshape(c.rows, c.nkv, c.d)
    assert close(layer.cache[0, :, : c.rows], k.transpose(1, 0, 2), 4.0, 1e-6)
    assert same_bits(layer.cache[1, :, : c.rows], v.transpose(1, 0, 2))
    assert np.all(layer.cache[:, :, c.rows :] == GUARD)

    index = layer.qk.astype(wide).reshape(c.rows, c.nh + 1, c.di)
    assert same_bits(layer.raw[: c.rows], index[:, -1])
    full = c.rows // c.ratio
    keys = block_keys_numpy(index[: full * c.ratio, -1], layer.ikn.astype(wide), EPS, irope[:: c.ratio][:full], c.ratio)
    assert close(layer.pooled[:full], keys, 4.0, 1e-6)
    assert np.all(layer.pooled[full:] == GUARD)

    iq = norm_rope_numpy(index[:, :-1], layer.iqn.astype(wide), EPS, irope)
    for t in range(c.rows):
        done = (t + 1) // c.ratio
        assert (picks[t] is None) == (done <= c.budget)
        if picks[t] is not None:
            scores = index_scores_numpy(iq[t], keys[:done])
            least_in, rest = scores[picks[t]].min(), np.delete(scores, picks[t])
            assert np.all(np.diff(picks[t]) > 0) and picks[t][-1] < done
            assert rest.max() <= least_in + 1e-5, "a better block was left out"
        use = attended_rows(t, picks[t], c.ratio)
        gates = qg[t, :, 1] if c.gated else open_gates
        expected = attention_numpy(q[t], gates, k.transpose(1, 0, 2), v.transpose(1, 0, 2), use)
        assert close(out[t], expected, np.abs(v).max(), 2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_any_size_give_the_same_bytes(one_by_one, seed: int) -> None:
    """Outputs, picks and caches, in random calls on 1..3 threads."""
    layer, out, picks = one_by_one
    other, at, rng = Layer(layer.c), 0, np.random.default_rng(seed)
    while at < layer.c.rows:
        part = slice(at, min(at + int(rng.choice([1, 2, 3, 4, 5, 6, 17])), layer.c.rows))
        rows, chosen = other.run(part, nt=1 + seed)
        assert same_bits(rows, out[part])
        for mine, theirs in zip(chosen, picks[part], strict=True):
            assert (mine is None and theirs is None) or np.array_equal(mine, theirs)
        at = part.stop
    for name in ("cache", "raw", "pooled"):
        assert same_bits(getattr(other, name), getattr(layer, name))


def test_a_head_does_not_see_the_heads_beside_it() -> None:
    """Eight query heads on two kv heads, against every head by itself."""
    nq, nkv, d, rows, t = 14, 2, 80, 30, 29
    layer = Layer(Shape(nq, nkv, d, 2, 1, 2, 2, 4, 3, rows))
    q, layer.cache[:, :, :rows] = normal(1, 1, nq * 2 * d), normal(2, 2, nkv, rows, d)
    for picks, counts in ((np.zeros((1, 3), np.int32), -1), (np.array([[0, 2, 5]], np.int32), 3)):
        together = layer.attend(slice(t, t + 1), q, picks, np.array([counts]), 1).reshape(nq, d)
        for h in range(nq):
            alone = Layer(Shape(1, 1, d, 2, 1, 2, 2, 4, 3, rows))
            alone.cache = np.ascontiguousarray(layer.cache[:, h // (nq // nkv)][:, None])
            mine = np.ascontiguousarray(q[:, h * 2 * d : (h + 1) * 2 * d])
            assert same_bits(alone.attend(slice(t, t + 1), mine, picks, np.array([counts]), 1)[0], together[h])


def test_large_scores_do_not_overflow() -> None:
    layer = Layer(Shape(1, 1, 32, 2, 1, 2, 2, 1, 3, 20))
    q, layer.cache[:, :, :20] = normal(1, 1, 64) * np.float32(1e3), normal(2, 2, 1, 20, 32) * np.float32(1e3)
    out = layer.attend(slice(19, 20), q, np.zeros((1, 3), np.int32), np.array([-1]), 1)
    k, v = layer.cache.astype(np.float64)
    expected = attention_numpy(*q.astype(np.float64).reshape(1, 2, 32)[:, :, None][0], k, v, np.arange(20))
    assert close(out[0], expected, np.abs(v[:, :20]).max(), 1e-6)


@pytest.mark.parametrize("full, budget", [(17, 16), (33, 1), (100, 40), (2048, 512)])
def test_index_pick_and_its_ties(full: int, budget: int) -> None:
    """Row 0: all different; few values; all equal; zeros; with infinity. ratio 1: row r has full + r blocks."""
    rng = np.random.default_rng(full)
    scores = np.zeros((5, full + 4), np.float32)
    scores[0], scores[1] = rng.random(full + 4), rng.integers(0, 3, full + 4)
    scores[2], scores[3, ::7], scores[4] = 0.5, 1e-30, rng.integers(0, 2, full + 4) * 1e38
    scores[4, full // 2] = np.inf
    for nt in (1, 2, 3):
        picks, counts, buffer = np.full((6, budget), -9, np.int32), np.zeros(5, np.int64), guarded(scores)
        call(index_pick, step(5, full - 1), buffer, buffer.shape[1], picks, budget, counts, 1, budget, nt=nt)
        assert np.all(counts == budget) and np.all(picks[-1] == -9)
        for r in range(5):
            assert np.array_equal(picks[r], index_pick_numpy(scores[r, : full + r], budget))


def test_within_the_budget_every_row_is_attended() -> None:
    picks, counts = np.full((3, 4), -9, np.int32), np.zeros(3, np.int64)
    scores = np.zeros((3, 9), np.float32)
    call(index_pick, step(3, 5 * 8 - 3), scores, 9, picks, 4, counts, 8, 4)  # the third row completes block 4
    assert counts.tolist() == [-1, -1, 4] and np.all(picks[:2] == -9)
