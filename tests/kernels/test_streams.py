from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.linear_reference import bf16_numpy, to_bf16
from coli.kernels.reference import embed_numpy, stream_inject_numpy, stream_mix_numpy
from coli.kernels.streams import BF16, F16, F32, copy_rows, embed, residual, stream_inject, stream_mix
from tests.kernels.harness import call, close, same_bits, step
from tests.kernels.independence import assert_independent, guarded, inner

WIDTHS = [1, 16, 31, 64, 250]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("h", WIDTHS)
@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_embed(h: int, kind: int) -> None:
    table = normal(h, 9, h)
    stored = {F32: table, F16: table.astype(np.float16), BF16: to_bf16(table)}[kind]
    exact = bf16_numpy(stored) if kind == BF16 else stored.astype(np.float32)
    ids = np.array([8, 0, 3, 3, 1, 7])

    def run(part: slice, nt: int) -> np.ndarray:
        chosen = ids[part].copy()
        s = guarded(np.zeros((len(chosen), 3 * h)))
        call(embed, step(len(chosen)), chosen, stored, kind, s, s.shape[1], h, 3, nt=nt)
        return inner(s, 3 * h)

    assert same_bits(assert_independent(run), embed_numpy(ids, exact, 3))


@pytest.mark.parametrize("h", WIDTHS)
@pytest.mark.parametrize("copies", [1, 4])
def test_stream_mix(h: int, copies: int) -> None:
    m, n = normal(1, 6, copies * h) * np.float32(4), normal(2, 6, copies * h)

    def run(part: slice, nt: int) -> np.ndarray:
        gm, gn, x = guarded(m[part]), guarded(n[part], 2), guarded(np.zeros((len(m[part]), h)), 3)
        call(stream_mix, step(len(x)), gm, gm.shape[1], gn, gn.shape[1], x, x.shape[1], h, copies, nt=nt)
        return inner(x, h)

    expected = stream_mix_numpy(m.astype(np.float64), n.astype(np.float64), copies)
    assert close(assert_independent(run), expected, np.abs(n).max(), 1e-6)


def inject(s: np.ndarray, y: np.ndarray, gates: np.ndarray, bad: np.ndarray, layer: int, nt: int) -> np.ndarray:
    h, copies = y.shape[1], gates.shape[1]
    gs, gy, gi = guarded(s), guarded(y, 2), guarded(gates, 1)
    shapes = (gs, gs.shape[1], gy, gy.shape[1], gi, gi.shape[1])
    call(stream_inject, step(len(s)), *shapes, h, copies, bad, layer, nt=nt)
    return inner(gs, copies * h)


@pytest.mark.parametrize("h", WIDTHS)
@pytest.mark.parametrize("copies", [1, 4])
def test_stream_inject(h: int, copies: int) -> None:
    s, y, gates, bad = normal(1, 6, copies * h), normal(2, 6, h), normal(3, 6, copies) * 5, np.zeros(1, np.int64)
    out = assert_independent(lambda part, nt: inject(s[part], y[part], gates[part], bad, 3, nt))
    expected = stream_inject_numpy(s.astype(np.float64), y.astype(np.float64), gates.astype(np.float64))
    assert close(out, expected, np.abs(s).max() + 2 * np.abs(y).max(), 1e-6)
    assert bad[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["s", "y"])
@pytest.mark.parametrize("column", [0, 17, 36])
def test_the_first_layer_that_is_not_finite_is_named(value: float, where: str, column: int) -> None:
    h, copies = 37, 4
    s, y, gates, bad = normal(1, 2, copies * h), normal(2, 2, h), np.full((2, copies), 9, np.float32), np.zeros(1, int)
    {"s": s, "y": y}[where][1, column] = value
    if value == 3e38:  # finite, but twice as much is not
        s[1, column], y[1, column] = value, value
    inject(s, y, gates, bad, 7, 3)
    assert bad[0] == 8
    inject(s, y, gates, bad, 9, 1)
    assert bad[0] == 8, "a later layer must not take the first one's place"


def add_up(s: np.ndarray, y: np.ndarray, bad: np.ndarray, layer: int, nt: int) -> np.ndarray:
    gs, gy = guarded(s), guarded(y, 2)
    call(residual, step(len(s)), gs, gs.shape[1], gy, gy.shape[1], s.shape[1], bad, layer, nt=nt)
    return inner(gs, s.shape[1])


@pytest.mark.parametrize("h", WIDTHS)
def test_residual(h: int) -> None:
    s, y, bad = normal(1, 6, h), normal(2, 6, h), np.zeros(1, np.int64)
    assert same_bits(assert_independent(lambda part, nt: add_up(s[part], y[part], bad, 3, nt)), s + y)
    assert bad[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("column", [0, 17, 36])
def test_the_first_residual_that_is_not_finite_is_named(value: float, column: int) -> None:
    s, y, bad = normal(1, 2, 37), normal(2, 2, 37), np.zeros(1, np.int64)
    s[1, column] = y[1, column] = value
    for layer, nt in ((7, 3), (9, 1)):
        add_up(s, y, bad, layer, nt)
        assert bad[0] == 8


@pytest.mark.parametrize("width", WIDTHS)
def test_copy_rows(width: int) -> None:
    src = guarded(normal(1, 7, width))
    for first in (0, 3, 6, 7):
        for nt in (1, 2, 3):
            dst = guarded(np.full((7, width), 9.0), 2)
            call(copy_rows, step(7, first=first), src, src.shape[1], dst, dst.shape[1], width, nt=nt)
            out = inner(dst, width)
            assert same_bits(out[: 7 - first], src[first:, :width])
            assert np.all(out[7 - first :] == 9)
