"""The best of a head's scores and its confidence: right, and the same bits on any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.draft import KERNELS
from coli.kernels.packing import CHUNK, parts_of
from coli.kernels.reference import draft_numpy
from tests.kernels.harness import call

GUARD = np.float32(-3.25)


def draft(scores: np.ndarray, ids: np.ndarray | None = None, nt: int = 1) -> tuple[int, int, np.float32]:
    """(place, token, p) of the three ops, on `nt` threads."""
    parts = np.full(parts_of(len(scores)) + 2, GUARD, np.float32)
    place, token, p = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.float32)
    common, count = scores.copy(), np.array([len(scores)])
    for name in ("draft_tops", "draft_sums", "draft_pick"):
        out = (0 if ids is None else ids, place, token, p) if name == "draft_pick" else ()
        call(KERNELS[name], common, count, parts, *out, nt=nt)
    assert np.all(parts[-2:] == GUARD) and common.tobytes() == scores.tobytes()
    return int(place[0]), int(token[0]), p[0]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 5000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0, 60.0])
def test_best_and_confidence(count: int, spread: float) -> None:
    rng = np.random.default_rng([count, int(spread)])
    scores = (rng.standard_normal(count) * spread + 3).astype(np.float32)
    ids = rng.permutation(count) + 100
    place, token, p = draft(scores, ids)
    assert place == np.argmax(scores) and token == ids[place]
    assert p == pytest.approx(draft_numpy(scores)[1], rel=2e-6) and 0 < p <= 1
    assert draft(scores)[:2] == (place, place)
    for nt in (2, 3, 64):
        assert draft(scores, ids, nt) == (place, token, p)


def test_only_scores_within_20_of_the_best_count() -> None:
    assert draft(np.array([5, -15, -15.1, -400], np.float32))[2] == np.float32(1 / (1 + np.exp(-20.0)))
    assert draft(np.array([5.0] + [-15.01] * 3000, np.float32))[2] == 1


def test_the_first_of_equals_wins_and_a_nan_never_does() -> None:
    scores = np.zeros(4000, np.float32)
    scores[[1500, 3000]] = 2
    scores[[0, 1499, 1501, 3999]] = np.nan
    for nt in (1, 3):
        place, _, p = draft(scores, None, nt)
        assert place == 1500
        assert p == pytest.approx(1 / (2 + 3994 * np.exp(-2.0)), rel=2e-6)
    assert draft(np.array([-0.0, 0.0], np.float32))[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_without_a_finite_best_are_never_believed(value: float) -> None:
    assert draft(np.full(40, value, np.float32))[2] == 0
    mixed = np.zeros(2000, np.float32)
    mixed[1200] = value
    place, _, p = draft(mixed)
    assert (place, p) == (1200, 0) if value == np.inf else (place == 0 and p == pytest.approx(1 / 1999, rel=2e-6))
