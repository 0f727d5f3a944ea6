from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.deltanet import conv_silu, deltanet, gated_norm, gdn_prep
from coli.kernels.packing import block_width
from coli.kernels.reference import (
    conv_silu_numpy,
    deltanet_numpy,
    gated_norm_numpy,
    gdn_prep_numpy,
    pack_state,
    unpack_state,
)
from tests.kernels.harness import address, call, close, same_bits, step
from tests.kernels.independence import GUARD, assert_independent, guarded, inner


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def calls(total: int, seed: int) -> list[slice]:
    """`total` rows in calls of random sizes."""
    rng, at, out = np.random.default_rng(seed), 0, []
    while at < total:
        n = min(int(rng.choice([1, 2, 3, 6, 20])), total - at)
        out.append(slice(at, at + n))
        at += n
    return out


# ---- convolution -----------------------------------------------------------------------------------------------
class Conv:
    """A ring and what runs over it."""

    def __init__(self, w: np.ndarray, dilation: int, extra: int = 8) -> None:
        self.w, self.dilation = w, dilation
        self.ring = np.full(((len(w) - 1) * dilation + extra + 1, w.shape[1]), GUARD, np.float32)

    def run(self, x: np.ndarray, pos: int, nt: int = 1, y: np.ndarray | None = None, base: np.ndarray | None = None):
        (taps, c), size = self.w.shape, len(self.ring) - 1
        gx, gy = guarded(x), guarded(x * 0 if y is None else y, 3)
        gb = guarded(base, 2) if base is not None else np.zeros((0, 0), np.float32)
        where = gb if base is not None else 0
        shapes = (gx, gx.shape[1], self.w, self.ring, size, gy, gy.shape[1], c, taps, self.dilation)
        call(conv_silu, step(len(x), pos), *shapes, where, gb.shape[1], nt=nt)
        assert np.all(self.ring[-1] == GUARD)
        return inner(gy, c)


@pytest.mark.parametrize("c", [1, 16, 40, 257])
@pytest.mark.parametrize("taps, dilation", [(4, 1), (4, 3), (1, 1), (3, 2)])
@pytest.mark.parametrize("nt", [1, 2, 3])
def test_conv_in_calls_of_any_size(c: int, taps: int, dilation: int, nt: int) -> None:
    w, x = normal(1, taps, c), normal(2, 90, c)
    one, many = Conv(w, dilation), Conv(w, dilation)
    singles = np.concatenate([one.run(x[t : t + 1], t) for t in range(90)])
    expected = conv_silu_numpy(x.astype(np.float64), np.zeros((taps * dilation, c)), w.astype(np.float64), dilation)
    assert close(singles, expected, np.abs(x).max() * np.abs(w).sum(0).max(), 1e-6)
    chunks = np.concatenate([many.run(x[part], part.start, nt) for part in calls(90, seed=dilation)])
    assert same_bits(chunks, singles)
    assert same_bits(many.ring, one.ring)
    size = len(one.ring) - 1
    for u in range(90 - size, 90):
        assert same_bits(one.ring[u % size], x[u])


def test_conv_over_a_base() -> None:
    w, x, y, base = normal(1, 4, 50), normal(2, 6, 50), normal(3, 6, 50), normal(4, 6, 50)

    def run(part: slice, nt: int) -> np.ndarray:
        conv = Conv(w, 3)
        if part.start:
            conv.run(x[: part.start], 0)
        return conv.run(x[part], part.start, nt, y[part], base[part])

    wide = conv_silu_numpy(x.astype(np.float64), np.zeros((9, 50)), w.astype(np.float64), 3)
    assert close(assert_independent(run), y + (base + wide), 10.0, 1e-6)


def test_undone_rows_leave_the_conv_history_whole() -> None:
    w, x, wrong = normal(1, 4, 33), normal(2, 60, 33), normal(3, 6, 33)
    straight = Conv(w, 3)
    expected = np.concatenate([straight.run(x[t : t + 1], t) for t in range(60)])
    for keep in range(1, 7):
        conv, t = Conv(w, 3), 0
        while t + keep <= 60:
            draft = np.concatenate([x[t : t + keep], wrong[keep:]])  # 6 rows, of which `keep` are right
            assert same_bits(conv.run(draft, t)[:keep], expected[t : t + keep])
            t += keep


# ---- the recurrence's inputs, and behind it --------------------------------------------------------------------
@pytest.mark.parametrize("hk, hv, dk, dv", [(1, 1, 1, 16), (2, 4, 64, 64), (3, 9, 20, 16), (16, 48, 128, 128)])
def test_gdn_prep(hk: int, hv: int, dk: int, dv: int) -> None:
    width = 2 * hk * dk + hv * dv
    u, a, b = normal(1, 6, width), normal(2, 6, hv) * np.float32(6), normal(3, 6, hv) * np.float32(4)
    neg, dt = -np.exp(normal(4, hv)), normal(5, hv)
    u[0, :dk] = 0

    def run(part: slice, nt: int) -> np.ndarray:
        gu, ga, gb = guarded(u[part]), guarded(a[part], 2), guarded(b[part], 3)
        gates = np.full((2, len(gu) + 1, hv), GUARD, np.float32)
        inputs = (gu, gu.shape[1], ga, ga.shape[1], gb, gb.shape[1], neg, dt)
        call(gdn_prep, step(len(gu)), *inputs, gates[0], gates[1], hk, hv, dk, dv, nt=nt)
        assert np.all(gates[:, -1] == GUARD)
        return np.concatenate([inner(gu, width), gates[0, :-1], gates[1, :-1]], 1)

    out = assert_independent(run)
    wide, decay, beta = gdn_prep_numpy(*(x.astype(np.float64) for x in (u, a, b, neg, dt)), hk, dk)
    assert close(out[:, :width], wide, np.abs(wide), 1e-6)
    # exp turns the argument's relative error into its own, times the argument
    assert close(out[:, width : width + hv], decay, decay * (1 - np.log(decay)) + 1e-30, 1e-6)
    assert close(out[:, width + hv :], beta, beta, 1e-6)


@pytest.mark.parametrize("heads, dv", [(1, 1), (3, 16), (4, 64), (5, 50), (48, 128)])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_norm(heads: int, dv: int, gate: str) -> None:
    o, z, w = normal(1, 6, heads * dv), normal(2, 6, heads * dv) * np.float32(3), normal(3, dv)

    def run(part: slice, nt: int) -> np.ndarray:
        go, gz = guarded(o[part]), guarded(z[part], 2)
        kind = {"silu": 0, "sigmoid": 1}[gate]
        call(gated_norm, step(len(go)), go, go.shape[1], gz, gz.shape[1], w, heads, dv, 1e-6, kind, nt=nt)
        return inner(go, heads * dv)

    expected = gated_norm_numpy(*(x.astype(np.float64) for x in (o, z, w)), 1e-6, gate=gate)
    assert close(assert_independent(run), expected, np.abs(expected), 1e-6)


# ---- the recurrence --------------------------------------------------------------------------------------------
SHAPES = [(2, 4, 64, 64), (1, 3, 17, 16), (3, 6, 10, 48), (2, 4, 33, 128), (1, 2, 1, 64), (2, 6, 128, 128)]
SLOTS, LAYERS = 20, 2  # slots beside the live state; layers in each, of which the second is used
LOGGED = 7  # rows of a log: the first of 8 needs no place


class Model:
    """Random inputs of `count` rows, and a state with its slots, or with a log."""

    def __init__(self, shape: tuple[int, int, int, int], count: int = SLOTS, *, tiled=False, log=False) -> None:
        self.hk, self.hv, self.dk, self.dv = shape
        width = 2 * self.hk * self.dk + self.hv * self.dv
        u, a, b = normal(1, count, width), normal(2, count, self.hv), normal(3, count, self.hv)
        prepared = gdn_prep_numpy(u, a, b, -np.ones(self.hv), np.zeros(self.hv), self.hk, self.dk)
        self.u, self.decay, self.beta = (x.astype(np.float32) for x in prepared)
        self.initial, self.tiled = normal(4, self.hv, self.dk, self.dv), tiled
        self.cells = np.full((1 + SLOTS, LAYERS, self.initial.size), GUARD, np.float32)
        self.live[:] = pack_state(self.initial).ravel()
        self.log_width = self.hv * self.dv + self.hk * self.dk + self.hv
        row = -(-self.log_width // 16) * 16 + 16  # the last lanes are nobody's
        self.write, self.read = np.full((2, LAYERS, LOGGED, row), GUARD, np.float32)
        self.log, self.standing = log, 0

    @property
    def live(self) -> np.ndarray:
        return self.cells[0, 1]

    def run(self, part: slice, *, undoable: int = 0, nt: int = 1) -> np.ndarray:
        logs = (address(self.write), address(self.read)) if self.log else (0, 0)
        cells = np.array([address(self.cells[0]), *logs, self.standing, *map(address, self.cells[1:])])
        u, out = guarded(self.u[part]), guarded(np.zeros((len(self.u[part]), self.hv * self.dv)), 16)
        gates = self.decay[part].copy(), self.beta[part].copy()
        scratch = np.full((nt, block_width(self.dv) * self.dk + 16), GUARD, np.float32)
        where = (cells, 4 * self.initial.size, out, out.shape[1])
        shape = (self.hk, self.hv, self.dk, self.dv, int(self.tiled))
        log = (self.write[0].nbytes, self.write[0, 0].nbytes, scratch, scratch[0].nbytes)
        read = self.read.copy()
        call(deltanet, step(len(u), undoable=undoable), u, u.shape[1], *gates, *where, *shape, *log, nt=nt)
        assert np.all(self.cells[:, 0] == GUARD) and np.all(self.write[0] == GUARD), "wrote into another layer"
        assert np.all(self.write[..., self.log_width :] == GUARD) and np.all(scratch[:, -16:] == GUARD)
        assert same_bits(self.read, read), "what is read is not written"
        self.standing = 0
        if self.log and undoable and len(u) > 1:
            self.write, self.read, self.standing = self.read, self.write, len(u) - 1
        return inner(out, self.hv * self.dv)


def one_by_one(shape: tuple[int, int, int, int], **options) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs [20, hv*dv], and the state before the first row and behind each."""
    model = Model(shape, **options)
    outs, states = [], [model.live.copy()]
    for r in range(SLOTS):
        outs.append(model.run(slice(r, r + 1)))
        states.append(model.live.copy())
    assert np.all(model.cells[1:] == GUARD), "calls that need no undo use no slot"
    return np.concatenate(outs), states


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiled", [False, True])
def test_deltanet_against_numpy(shape: tuple[int, int, int, int], tiled: bool) -> None:
    model = Model(shape, tiled=tiled)
    wide = [x.astype(np.float64) for x in (model.initial, model.u, model.decay, model.beta)]
    out, states = deltanet_numpy(*wide, model.hk, tiled=tiled)
    assert close(model.run(slice(0, SLOTS)), out, np.abs(out).max(), 2e-6)
    live = unpack_state(model.live.reshape(pack_state(model.initial).shape))
    assert close(live, states[-1], np.abs(states).max(), 2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_any_size_give_the_same_bytes(shape: tuple[int, int, int, int]) -> None:
    """Outputs and states: row by row, in random calls, in place or undoable, on 1..3 threads."""
    outs, states = one_by_one(shape)
    for seed in range(4):
        for undoable in (0, 1):
            model = Model(shape)
            for part in calls(SLOTS, seed):
                assert same_bits(model.run(part, undoable=undoable, nt=1 + seed % 3), outs[part])
                assert same_bits(model.live, states[part.stop])
                for r in range(part.start, part.stop - 1) if undoable else ():
                    assert same_bits(model.cells[1 + r - part.start, 1], states[r + 1]), "the state behind a row"


def test_undoable_rows_use_no_slot_for_the_last_row() -> None:
    model = Model(SHAPES[0])
    model.run(slice(0, 5), undoable=1, nt=2)
    assert np.all(model.cells[5:] == GUARD) and not np.any(model.cells[1:5, 1] == GUARD)


def test_going_on_from_a_slot_equals_never_having_seen_the_rest() -> None:
    straight = Model(SHAPES[0])
    outs = straight.run(slice(0, 12))
    for keep in range(1, 6):
        model = Model(SHAPES[0])
        model.run(slice(0, 6), undoable=1)
        model.live[:] = model.cells[keep, 1]
        assert same_bits(model.run(slice(keep, 12)), outs[keep:12])
        assert same_bits(model.live, straight.live)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nt", [1, 2, 3])
def test_a_log_equals_one_by_one(shape: tuple[int, int, int, int], nt: int) -> None:
    """R rows of which m stand, then a call of any kind: outputs and states, bit for bit."""
    tiled = nt == 2
    outs, states = one_by_one(shape, tiled=tiled)
    for rows in range(1, 9):
        for kept in range(1, rows + 1):
            for more, undoable in ((0, 0), (1, 0), (1, 1), (3, 1), (8, 1), (12, 0)):
                model = Model(shape, log=True, tiled=tiled)
                assert same_bits(model.run(slice(0, rows), undoable=1, nt=nt), outs[:rows])
                assert same_bits(model.live, states[1]), "the first row always stands, the others wait"
                model.standing = kept - 1
                part = slice(kept, kept + more)
                assert same_bits(model.run(part, undoable=undoable, nt=nt), outs[part])
                assert same_bits(model.live, states[kept + (1 if more and undoable else more)])
                assert np.all(model.cells[1:] == GUARD), "a log needs no slot"
                model.run(slice(0, 0), nt=nt)
                assert same_bits(model.live, states[kept + more]), "what stood, added by a call of no rows"


def test_random_verifies_with_a_log() -> None:
    shape = SHAPES[1]
    outs, states = one_by_one(shape)
    for seed in range(20):
        rng, model, at = np.random.default_rng(seed), Model(shape, log=True), 0
        while at < SLOTS:
            part = slice(at, min(at + int(rng.integers(1, 9)), SLOTS))
            undoable = int(rng.integers(0, 4) > 0)
            assert same_bits(model.run(part, undoable=undoable, nt=1 + seed % 3), outs[part])
            at = part.stop
            if undoable:
                at = part.start + int(rng.integers(1, part.stop - part.start + 1))
                model.standing = at - part.start - 1
        model.run(slice(0, 0))
        assert same_bits(model.live, states[-1])
