"""`listed`: the rows of a weight that a list names, in the bits of the whole product, for any list and any threads."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.kernels.linear import listed
from coli.kernels.packing import GRAIN, LISTED, LISTED_KINDS
from coli.kernels.tiles import tile
from tests.kernels.harness import call, pointers, same_bits, step, tile_table
from tests.kernels.test_linear import A, B, Weight, activations, product, rows_for, weight

KINDS = [name.removeprefix(LISTED) for name in LISTED_KINDS]
GUARD = np.float32(7.0)


@cache
def table(kind: str) -> np.ndarray:
    return tile_table({1: tile(LISTED + kind, 1)})


@cache
def known(kind: str, n: int, k: int) -> tuple[Weight, np.ndarray, np.ndarray]:
    """A weight, three activation rows and their whole product."""
    w, x = weight(kind, n, k), activations(3, k)
    return w, x, product(w, x)


def scores(w: Weight, x: np.ndarray, ids: list[int], nt: int = 1) -> np.ndarray:
    """`listed` on these rows; what lies behind the list in y stays as it was."""
    inputs, y = rows_for(w.kind, x), np.full((len(x), len(ids) + 3), GUARD, np.float32)
    places = np.array([*ids, -(1 << 40)], np.int64)  # the id behind the list is nobody's to follow
    call(listed, step(len(x)), w.w, w.s, pointers(inputs), pointers(y), places, w.shape[1], A, B, table(w.kind), GRAIN,
         np.array([len(ids)]), int(w.kind.startswith("int")), nt=nt)  # fmt: skip
    assert np.all(y[:, len(ids) :] == GUARD)
    return y[:, : len(ids)].copy()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_listed_row_has_the_bits_of_the_whole_product(kind: str, data: st.DataObject) -> None:
    n, k = data.draw(st.sampled_from([(1, 1), (17, 70), (129, 200), (300, 64), (40, 1500)]))
    ids = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=2 * n))  # any order, repeated ones too
    if data.draw(st.booleans()):
        ids = sorted(set(ids))
    nt, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    w, x, whole = known(kind, n, k)
    assert same_bits(scores(w, x[:count], ids, nt), whole[:count, ids])


@pytest.mark.parametrize("kind", KINDS)
def test_long_lists_and_more_threads_than_work(kind: str) -> None:
    w, x, whole = known(kind, 700, 130)
    rng = np.random.default_rng(5)
    dense = list(range(400))
    tail = [*range(0, 200), *rng.permutation(np.arange(200, 700))[:90].tolist()]
    for ids in (dense, tail, [699], sorted(rng.choice(700, 333, replace=False).tolist())):
        for nt in (1, 2, 7, 64):
            assert same_bits(scores(w, x, ids, nt), whole[:, ids]), (len(ids), nt)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_several_rows_pass_over_pieces_of_the_list(kind: str) -> None:
    """131072 weights a piece: at this width the list is cut, inside a block of 16 rows too."""
    w, x, whole = known(kind, 90, 4099)
    ids = [i for i in range(90) if i % 5]
    for nt in (1, 2):
        assert same_bits(scores(w, x, ids, nt), whole[:, ids])


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_an_empty_list_does_nothing(kind: str) -> None:
    w, x, _ = known(kind, 17, 70)
    assert scores(w, x, [], 2).shape == (3, 0)


def test_rows_that_are_not_listed_are_not_read() -> None:
    """Natural rows alone are visited: a NaN in any other row changes nothing."""
    w, x, whole = known("f32", 129, 200)
    ids = [3, 4, 77, 128]
    poisoned = np.full_like(w.w, np.nan)
    poisoned[ids] = w.w[ids]
    assert same_bits(scores(Weight("f32", poisoned, w.s, w.dense), x, ids), whole[:, ids])
