"""Handing a layer's rows to its experts, and the ops where the host may have to act.

`todo` counts the (row, rank) pairs of every expert the router chose. `group` takes those experts that are resident
and not yet done, and writes, expert by expert, the pointer lists the expert GEMVs follow (kernels/linear.py,
`grouped`). When some are missing the program is cut, the host reads them and plays on; when more are needed than the
cache holds, the rows go through in waves: group, compute, cut, read, group again. Every pair has its own output row
and they are summed in rank order afterwards (`combine`), so the bits do not depend on what was resident or on the
number of waves (tests/models/test_qwen38.py).

Groups block, int64: [G, pairs, then G x (record address, first pair, pair count)].
Lists, int64, `limit` entries each: x rows | gate rows | up rows | activation rows | output rows. x and activation rows
are what the weights take: floats, or int8 codes of them. `gated` puts silu(gate) * up over the gate rows; codes of
those go into the activation rows, and floats are read where they are.
"""

from __future__ import annotations

from numba import njit

from coli.kernels.abi import ai, ld1_i64, rows, st1_i64

NEED_EXPERTS, MORE_WAVES, NEED_NGRAMS = 1, 2, 3  # reasons in the CUT cell


def todo(p, tid, nt):
    """0 step, 1 ids [R][K], 2 K, 3 resident [E], 4 E, 5 todo out [E], 6 cut cell: counts pairs per expert; cuts when
    an expert is missing."""
    if tid != 0:
        return
    pairs, resident, todo_ = rows(ai(p, 0)) * ai(p, 2), ai(p, 3), ai(p, 5)
    for e in range(ai(p, 4)):
        st1_i64(todo_ + 8 * e, 0)
    missing = 0
    for i in range(pairs):
        e = ld1_i64(ai(p, 1) + 8 * i)
        st1_i64(todo_ + 8 * e, ld1_i64(todo_ + 8 * e) + 1)
        if ld1_i64(resident + 8 * e) == 0:
            missing = NEED_EXPERTS
    st1_i64(ai(p, 6), missing)


@njit(inline="always")
def _open_groups(p, groups):
    """Write one group for each resident expert still to do; clears its count, stamps its use."""
    resident, stamp, todo_, clock = ai(p, 3), ai(p, 4), ai(p, 5), ld1_i64(ai(p, 6))
    n, first = 0, 0
    for e in range(ai(p, 18)):
        count = ld1_i64(todo_ + 8 * e)
        if count > 0 and ld1_i64(resident + 8 * e) != 0:
            entry = groups + 8 * (2 + 3 * n)
            st1_i64(entry, ld1_i64(resident + 8 * e))
            st1_i64(entry + 8, first)
            st1_i64(entry + 16, 0)
            # the todo cell now says which group the expert has: -1 - group
            st1_i64(todo_ + 8 * e, -1 - n)
            st1_i64(stamp + 8 * e, clock)
            first += count
            n += 1
    st1_i64(groups, n)
    st1_i64(groups + 8, first)
    st1_i64(ai(p, 19), ld1_i64(ai(p, 19)) + n)


def group(p, tid, nt):
    """0 step, 1 ids [R][K], 2 K, 3 resident [E], 4 stamp [E], 5 todo [E], 6 clock cell, 7 groups out, 8 lists,
    9 limit, 10 x base, 11 x row bytes, 12 h base, 13 h row bytes (gate | up), 14 up offset bytes,
    15 activation base, 16 activation row bytes, 17 output base, 18 E, 19 used counter, 20 output row bytes,
    21 cut cell: an op behind, where these groups are done, cuts while experts are left to do."""
    if tid != 0:
        return
    groups, lists, limit, todo_, k = ai(p, 7), ai(p, 8), ai(p, 9) * 8, ai(p, 5), ai(p, 2)
    _open_groups(p, groups)
    for i in range(rows(ai(p, 0)) * k):
        e = ld1_i64(ai(p, 1) + 8 * i)
        mine = -1 - ld1_i64(todo_ + 8 * e)
        if mine >= 0:
            entry = groups + 8 * (2 + 3 * mine)
            count = ld1_i64(entry + 16)
            at = lists + 8 * (ld1_i64(entry + 8) + count)
            h = ai(p, 12) + i * ai(p, 13)
            st1_i64(at, ai(p, 10) + (i // k) * ai(p, 11))
            st1_i64(at + limit, h)
            st1_i64(at + 2 * limit, h + ai(p, 14))
            st1_i64(at + 3 * limit, ai(p, 15) + i * ai(p, 16))
            st1_i64(at + 4 * limit, ai(p, 17) + i * ai(p, 20))
            st1_i64(entry + 16, count + 1)
    for e in range(ai(p, 18)):
        if ld1_i64(todo_ + 8 * e) < 0:
            st1_i64(todo_ + 8 * e, 0)
        elif ld1_i64(todo_ + 8 * e) > 0:
            st1_i64(ai(p, 21), MORE_WAVES)


def wait_ngrams(p, tid, nt):
    """0 cut cell: always cuts; the host puts the n-gram rows in place."""
    if tid == 0:
        st1_i64(ai(p, 0), NEED_NGRAMS)


KERNELS = {"todo": todo, "group": group, "wait_ngrams": wait_ngrams}
