"""From a draft head's scores to a draft: the best of them and how likely the head holds it.

p = 1 / sum of exp(s - best) over the scores within 20 of the best (spec_decoding.md section 5). Three ops with barriers
between: `draft_tops` finds the best of every chunk of scores, `draft_sums` the whole best (each thread for itself) and
every chunk's part of the sum, `draft_pick` adds the parts in order. Chunks have a fixed size, so no bit depends on the
number of threads (tests/kernels/test_draft.py).

A score that is NaN never wins and adds nothing. No score above -inf: place 0 and p = 0, and p = 0 too where the best is
infinite: a draft that the gate does not believe, never a NaN in its averages.

Parts, float32, two for each chunk (`parts_of` of kernels/packing.py counts them): best | sum.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coli.kernels.abi import ai, ld1_f32, ld1_i64, share, st1_f32, st1_i64
from coli.kernels.moe import largest
from coli.kernels.packing import CHUNK
from coli.kernels.simd import add, first_lanes, hsum, ld_part, splat, sub, vexp, where_ge, zero_f

_NEAR = np.float32(-20.0)


@njit(inline="always")
def _chunks(count):
    return (count + CHUNK - 1) // CHUNK


@njit
def _best(parts, count):
    best = np.float32(-np.inf)
    for c in range(_chunks(count)):
        best = max(best, ld1_f32(parts + 8 * c))
    return best


def draft_tops(p, tid, nt):
    """0 scores, 1 address of their count, 2 parts."""
    count = ld1_i64(ai(p, 1))
    first, last = share(_chunks(count), tid, nt)
    for c in range(first, last):
        st1_f32(ai(p, 2) + 8 * c, largest(ai(p, 0) + 4 * CHUNK * c, min(CHUNK, count - CHUNK * c)))


def draft_sums(p, tid, nt):
    """Arguments of draft_tops."""
    count, parts = ld1_i64(ai(p, 1)), ai(p, 2)
    first, last = share(_chunks(count), tid, nt)
    best = splat(_best(parts, count))
    for c in range(first, last):
        total, scores, size = zero_f(), ai(p, 0) + 4 * CHUNK * c, min(CHUNK, count - CHUNK * c)
        for i in range(0, size, 16):
            below = sub(ld_part(scores + 4 * i, size - i), best)
            total = add(total, first_lanes(where_ge(below, splat(_NEAR), vexp(below)), size - i))
        st1_f32(parts + 8 * c + 4, hsum(total))


@njit
def _place(scores, parts, count, best):
    """The first score that equals the best; 0 where none does."""
    for c in range(_chunks(count)):
        if ld1_f32(parts + 8 * c) == best:
            for i in range(CHUNK * c, min(CHUNK * (c + 1), count)):
                if ld1_f32(scores + 4 * i) == best:
                    return i
    return 0


def draft_pick(p, tid, nt):
    """0..2 as before, 3 ids (int64, the token of each score; 0: its place), 4 place out (int64), 5 token out (int64),
    6 p out (float32)."""
    if tid != 0:
        return
    count, parts = ld1_i64(ai(p, 1)), ai(p, 2)
    best, total = _best(parts, count), np.float32(0.0)
    for c in range(_chunks(count)):
        total += ld1_f32(parts + 8 * c + 4)
    place = _place(ai(p, 0), parts, count, best)
    st1_i64(ai(p, 4), place)
    st1_i64(ai(p, 5), ld1_i64(ai(p, 3) + 8 * place) if ai(p, 3) else place)
    st1_f32(ai(p, 6), np.float32(1.0) / total if total >= np.float32(1.0) else np.float32(0.0))


KERNELS = {"draft_tops": draft_tops, "draft_sums": draft_sums, "draft_pick": draft_pick}
