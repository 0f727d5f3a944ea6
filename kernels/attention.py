"""Attention, gated or not, over selected rows: caches, the indexer that selects, and the attention itself.

The indexer pools `ratio` raw keys to a block key, scores complete blocks and picks the `budget` best; a row then
attends the picked blocks' rows and the tail behind the last complete block. While no more than `budget` blocks are
complete a row attends everything (counts = -1). Either way its rows are a short list of *contiguous* ranges.

`attention` works on a (row, up to 4 query heads of one kv head) unit in three phases: scores into scratch (4 cache
rows x 4 heads = 16 accumulators), exp and sum, weighted sum of V (4 heads x 64 features = 16 accumulators). A head's
accumulators and order are its own, so the grouping does not show in the bits (tests/kernels/test_attention.py).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from coli.kernels.abi import af, ai, ld1_i32, ld1_i64, pos, rows, share, st1_f32, st1_i32, st1_i64
from coli.kernels.moe import largest
from coli.kernels.norm import dot, normalise
from coli.kernels.simd import (
    add,
    bits_gt,
    div,
    f32_of_bits,
    first_lanes,
    fma,
    hsum,
    ld_f32,
    ld_part,
    lowest_bit,
    mul,
    popcount,
    splat,
    splat_at,
    st_f32,
    st_hsum4,
    st_part,
    sub,
    vexp,
    vsigmoid,
    zero_f,
)


# ---- norms, rope, caches ---------------------------------------------------------------------------------------
@njit(inline="always")
def _rotate(x, table, rot):
    """Half-layout rope in place: pairs (j, j + rot/2) of the first `rot` features; table row = cos | sin."""
    half = rot // 2
    for j in range(0, half, 16):
        left = half - j
        a, b = ld_part(x + 4 * j, left), ld_part(x + 4 * (half + j), left)
        c, s = ld_part(table + 4 * j, left), ld_part(table + 4 * (half + j), left)
        st_part(x + 4 * j, sub(mul(a, c), mul(b, s)), left)
        st_part(x + 4 * (half + j), add(mul(b, c), mul(a, s)), left)


@njit(inline="always")
def _norm_rotate(x, w, y, n, eps, table, rot):
    normalise(x, w, y, n, eps)
    _rotate(y, table, rot)


@njit(inline="always")
def _copy(src, dst, n):
    for j in range(0, n, 16):
        st_part(dst + 4 * j, ld_part(src + 4 * j, n - j), n - j)


def attention_prep(p, tid, nt):
    """0 step, 1 q [R][nq][2d] (q | gate), 2 ldq, 3 k, 4 ldk, 5 v, 6 ldv, 7 qn [d], 8 kn [d], 9 eps, 10 rope rows of
    cos | sin, 11 off, 12 K [nkv][ctx][d], 13 V, 14 ctx, 15 nq, 16 nkv, 17 d, 18 rot, 19 gated (0: q is [R][nq][d]): q
    normed and rotated in place; k so stored in the cache at pos + r, v beside it. Row r's angles are in rope row
    r + off."""
    ctx, nq, nkv, d, rot = ai(p, 14), ai(p, 15), ai(p, 16), ai(p, 17), ai(p, 18)
    units, apart = nq + nkv, d + d * ai(p, 19)  # floats from one head of q to the next
    u0, u1 = share(rows(ai(p, 0)) * units, tid, nt)
    for u in range(u0, u1):
        r = u // units
        h = u - r * units
        table = ai(p, 10) + 4 * (r + ai(p, 11)) * rot
        g = h - nq
        at = 4 * (g * ctx + pos(ai(p, 0)) + r) * d
        x, w = ai(p, 1) + 4 * (r * ai(p, 2) + h * apart), ai(p, 7)
        y = x
        if g >= 0:
            x, w, y = ai(p, 3) + 4 * (r * ai(p, 4) + g * d), ai(p, 8), ai(p, 12) + at
            _copy(ai(p, 5) + 4 * (r * ai(p, 6) + g * d), ai(p, 13) + at, d)
        _norm_rotate(x, w, y, d, af(p, 9), table, rot)


def index_prep(p, tid, nt):
    """0 step, 1 qk [R][nh*di + di], 2 ld, 3 qn [di], 4 eps, 5 rope, 6 off, 7 raw [ctx][di], 8 nh, 9 di, 10 rot:
    the index queries normed and rotated in place, the raw key copied to raw[pos + r]."""
    nh, di = ai(p, 8), ai(p, 9)
    units = nh + 1
    u0, u1 = share(rows(ai(p, 0)) * units, tid, nt)
    for u in range(u0, u1):
        r = u // units
        h = u - r * units
        x = ai(p, 1) + 4 * (r * ai(p, 2) + h * di)
        if h < nh:
            _norm_rotate(x, ai(p, 3), x, di, af(p, 4), ai(p, 5) + 4 * (r + ai(p, 6)) * ai(p, 10), ai(p, 10))
        else:
            _copy(x, ai(p, 7) + 4 * (pos(ai(p, 0)) + r) * di, di)


def block_keys(p, tid, nt):
    """0 step, 1 raw [ctx][di], 2 pooled [ctx/ratio][di], 3 kn [di], 4 eps, 5 rope, 6 off (>= ratio-1), 7 di, 8 rot,
    9 ratio: the blocks this call completes: mean of their raw keys, normed, rotated at the block's first position."""
    t, di, rot, ratio = pos(ai(p, 0)), ai(p, 7), ai(p, 8), ai(p, 9)
    j0 = t // ratio
    u0, u1 = share((t + rows(ai(p, 0))) // ratio - j0, tid, nt)
    count = splat(np.float32(ratio))
    for j in range(j0 + u0, j0 + u1):
        key = ai(p, 2) + 4 * j * di
        for i in range(0, di, 16):
            total = zero_f()
            for r in range(j * ratio, (j + 1) * ratio):
                total = add(total, ld_part(ai(p, 1) + 4 * (r * di + i), di - i))
            st_part(key + 4 * i, div(total, count), di - i)
        table = ai(p, 5) + 4 * (j * ratio - t + ai(p, 6)) * rot
        _norm_rotate(key, ai(p, 3), key, di, af(p, 4), table, rot)


# ---- the indexer -----------------------------------------------------------------------------------------------
_RANGE = 32  # blocks of one unit: 16 KB of keys, which all rows of the call reuse


def index_scores(p, tid, nt):
    """0 step, 1 qk, 2 ld, 3 pooled, 4 scores [R][ldscore], 5 ldscore, 6 nh, 7 di, 8 ratio, 9 budget: rows with
    F = (pos+r+1) // ratio > budget complete blocks: score_j = sum over heads of relu(q_h . K_j) / sqrt(di), j < F."""
    t, count, nh, di, ratio = pos(ai(p, 0)), rows(ai(p, 0)), ai(p, 6), ai(p, 7), ai(p, 8)
    scale = np.float32(1.0) / np.float32(math.sqrt(np.float32(di)))
    most = (t + count) // ratio
    if most <= ai(p, 9):
        return
    u0, u1 = share((most + _RANGE - 1) // _RANGE * count, tid, nt)
    for u in range(u0, u1):  # ranges of blocks outside, rows inside
        part = u // count
        r = u - part * count
        full = (t + r + 1) // ratio
        if full > ai(p, 9):
            q = ai(p, 1) + 4 * r * ai(p, 2)
            for j in range(part * _RANGE, min((part + 1) * _RANGE, full)):
                total = np.float32(0.0)
                for h in range(nh):
                    s = dot(q + 4 * h * di, ai(p, 3) + 4 * j * di, di)
                    if s > 0:
                        total += s
                st1_f32(ai(p, 4) + 4 * (r * ai(p, 5) + j), total * scale)


@njit(inline="always")
def _above(scores, n, bits):
    """How many of n scores (>= 0) exceed the float with these bits (>= 0: the zeros behind the tail do not count)."""
    threshold = splat(f32_of_bits(bits))
    count = 0
    for j in range(0, n, 16):
        count += popcount(bits_gt(ld_part(scores + 4 * j, n - j), threshold))
    return count


def index_pick(p, tid, nt):
    """0 step, 1 scores, 2 ldscore, 3 picks int32 [R][budget], 4 unused, 5 counts int64 [R], 6 ratio, 7 budget: while
    F <= budget counts = -1 (attend every row); else counts = budget and the best blocks in ascending order, ties to
    the lower index. The budget-th best score is the least that fewer than `budget` scores exceed: found by bisection
    over the float bits, which order like the non-negative floats they stand for."""
    ratio, budget = ai(p, 6), ai(p, 7)
    r0, r1 = share(rows(ai(p, 0)), tid, nt)
    for r in range(r0, r1):
        full = (pos(ai(p, 0)) + r + 1) // ratio
        scores, picks, n = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 3) + 4 * r * budget, 0
        low, high = 0, 0x7F800000  # the answer lies in [low, high]; nothing exceeds infinity
        while full > budget and low < high:
            middle = (low + high) // 2
            if _above(scores, full, middle) < budget:
                high = middle
            else:
                low = middle + 1
        limit = splat(f32_of_bits(low))
        ties = budget - _above(scores, full, low)
        st1_i64(ai(p, 5) + 8 * r, budget if full > budget else -1)
        for j in range(0, full if full > budget else 0, 16):
            x = ld_part(scores + 4 * j, full - j)
            better, worse = bits_gt(x, limit), bits_gt(limit, x)
            here = ((1 << min(full - j, 16)) - 1) & ~worse
            while here != 0:
                i = lowest_bit(here)
                here &= here - 1
                tie = ((better >> i) & 1) == 0
                if not tie or ties > 0:
                    st1_i32(picks + 4 * n, np.int32(j + i))
                    n += 1
                if tie:
                    ties -= 1


# ---- attention -------------------------------------------------------------------------------------------------
@njit(inline="always")
def _scores_4x4(q0, q1, q2, q3, k, d, s0, s1, s2, s3):
    """q_h . k_i for four heads and four cache rows in a row (d % 16 == 0); head h's four scores go to s_h."""
    a0, a1, a2, a3 = zero_f(), zero_f(), zero_f(), zero_f()
    b0, b1, b2, b3 = zero_f(), zero_f(), zero_f(), zero_f()
    c0, c1, c2, c3 = zero_f(), zero_f(), zero_f(), zero_f()
    e0, e1, e2, e3 = zero_f(), zero_f(), zero_f(), zero_f()
    for at in range(0, 4 * d, 64):
        k0, k1, k2, k3 = ld_f32(k + at), ld_f32(k + 4 * d + at), ld_f32(k + 8 * d + at), ld_f32(k + 12 * d + at)
        q = ld_f32(q0 + at)
        a0, a1, a2, a3 = fma(q, k0, a0), fma(q, k1, a1), fma(q, k2, a2), fma(q, k3, a3)
        q = ld_f32(q1 + at)
        b0, b1, b2, b3 = fma(q, k0, b0), fma(q, k1, b1), fma(q, k2, b2), fma(q, k3, b3)
        q = ld_f32(q2 + at)
        c0, c1, c2, c3 = fma(q, k0, c0), fma(q, k1, c1), fma(q, k2, c2), fma(q, k3, c3)
        q = ld_f32(q3 + at)
        e0, e1, e2, e3 = fma(q, k0, e0), fma(q, k1, e1), fma(q, k2, e2), fma(q, k3, e3)
    st_hsum4(s0, a0, a1, a2, a3)
    st_hsum4(s1, b0, b1, b2, b3)
    st_hsum4(s2, c0, c1, c2, c3)
    st_hsum4(s3, e0, e1, e2, e3)


@njit(inline="always")
def _softmax(s, n, scale):
    """s = softmax(s * scale) over n floats, in place."""
    top, factor, total = splat(largest(s, n)), splat(scale), zero_f()
    for j in range(0, n, 16):
        e = vexp(mul(sub(ld_part(s + 4 * j, n - j), top), factor))
        st_part(s + 4 * j, e, n - j)
        total = add(total, first_lanes(e, n - j))
    inverse = splat(np.float32(1.0) / hsum(total))
    for j in range(0, n, 16):
        st_part(s + 4 * j, mul(ld_part(s + 4 * j, n - j), inverse), n - j)


@njit(inline="always")
def _store64(out, v0, v1, v2, v3):
    st_f32(out, v0)
    st_f32(out + 64, v1)
    st_f32(out + 128, v2)
    st_f32(out + 192, v3)


@njit(inline="always")
def _span(picks, b, blocks, ratio, tail, end):
    """Range b of the rows attended: picked block b, or behind the blocks the tail."""
    if b < blocks:
        start = ld1_i32(picks + 4 * b) * ratio
        return start, start + ratio
    return tail, end


@njit(inline="always")
def _values_4x64(s0, s1, s2, s3, v, d, picks, blocks, ratio, tail, end, o0, o1, o2, o3):
    """64 features of sum_i s_h[i] * V_i for four heads to o_h."""
    a0, a1, a2, a3 = zero_f(), zero_f(), zero_f(), zero_f()
    b0, b1, b2, b3 = zero_f(), zero_f(), zero_f(), zero_f()
    c0, c1, c2, c3 = zero_f(), zero_f(), zero_f(), zero_f()
    e0, e1, e2, e3 = zero_f(), zero_f(), zero_f(), zero_f()
    at = 0
    for b in range(blocks + 1):
        start, stop = _span(picks, b, blocks, ratio, tail, end)
        for i in range(start, stop):
            x = v + 4 * i * d
            v0, v1, v2, v3 = ld_f32(x), ld_f32(x + 64), ld_f32(x + 128), ld_f32(x + 192)
            w = splat_at(s0 + at)
            a0, a1, a2, a3 = fma(w, v0, a0), fma(w, v1, a1), fma(w, v2, a2), fma(w, v3, a3)
            w = splat_at(s1 + at)
            b0, b1, b2, b3 = fma(w, v0, b0), fma(w, v1, b1), fma(w, v2, b2), fma(w, v3, b3)
            w = splat_at(s2 + at)
            c0, c1, c2, c3 = fma(w, v0, c0), fma(w, v1, c1), fma(w, v2, c2), fma(w, v3, c3)
            w = splat_at(s3 + at)
            e0, e1, e2, e3 = fma(w, v0, e0), fma(w, v1, e1), fma(w, v2, e2), fma(w, v3, e3)
            at += 4
    _store64(o0, a0, a1, a2, a3)
    _store64(o1, b0, b1, b2, b3)
    _store64(o2, c0, c1, c2, c3)
    _store64(o3, e0, e1, e2, e3)


@njit(inline="always")
def _values_16(s, v, d, left, picks, blocks, ratio, tail, end, out):
    """Up to 16 features of sum_i s[i] * V_i for one head (what is left of d % 64)."""
    total = zero_f()
    for b in range(blocks + 1):
        start, stop = _span(picks, b, blocks, ratio, tail, end)
        for i in range(start, stop):
            total = fma(splat_at(s), ld_part(v + 4 * i * d, left), total)
            s += 4
    st_part(out, total, left)


def attention(p, tid, nt):
    """0 step, 1 q [R][nq][2d] (q | gate), 2 ldq, 3 K [nkv][ctx][d], 4 V, 5 ctx, 6 picks [R][budget], 7 budget,
    8 counts [R], 9 ratio, 10 out [R][nq*d], 11 ldo, 12 nq, 13 nkv, 14 d, 15 scratch, 16 scratch floats per thread
    (>= 4 * rows attended), 17 gated (0: q is [R][nq][d]): o = softmax(q . K / sqrt(d)) V over rows 0..t (counts -1) or
    the picked blocks' rows and the tail; out = o * sigmoid(gate), or o. Query heads h share kv head h // (nq/nkv), up
    to 4 in one unit."""
    count, ratio, d, share_by = rows(ai(p, 0)), ai(p, 9), ai(p, 14), ai(p, 12) // ai(p, 13)
    groups, apart = (share_by + 3) // 4, 4 * (d + d * ai(p, 17))  # bytes from one head of q to the next
    scale = np.float32(1.0) / np.float32(math.sqrt(np.float32(d)))
    s0 = ai(p, 15) + 4 * tid * ai(p, 16)
    u0, u1 = share(ai(p, 13) * groups * count, tid, nt)
    for u in range(u0, u1):  # kv heads outside, rows inside: rows of a call follow each other on the same K and V
        group = u // count
        r = u - group * count
        kv = group // groups
        g0 = 4 * (group - kv * groups)
        heads = min(share_by - g0, 4)
        end = pos(ai(p, 0)) + r + 1
        blocks, tail = ld1_i64(ai(p, 8) + 8 * r), end // max(ratio, 1) * ratio
        if blocks < 0:
            blocks, tail = 0, 0
        n = blocks * ratio + end - tail
        # fewer than four heads: the last one again, with the same bits into the same places
        h1, h2, h3 = min(1, heads - 1), min(2, heads - 1), heads - 1
        q0 = ai(p, 1) + 4 * r * ai(p, 2) + (kv * share_by + g0) * apart
        q1, q2, q3 = q0 + h1 * apart, q0 + h2 * apart, q0 + h3 * apart
        s1, s2, s3 = s0 + 4 * h1 * n, s0 + 4 * h2 * n, s0 + 4 * h3 * n
        picks, k, v = ai(p, 6) + 4 * r * ai(p, 7), ai(p, 3) + 4 * kv * ai(p, 5) * d, ai(p, 4) + 4 * kv * ai(p, 5) * d

        at = 0
        for b in range(blocks + 1):
            i, stop = _span(picks, b, blocks, ratio, tail, end)
            while d % 16 == 0 and i + 4 <= stop:
                _scores_4x4(q0, q1, q2, q3, k + 4 * i * d, d, s0 + at, s1 + at, s2 + at, s3 + at)
                i += 4
                at += 16
            while i < stop:
                for h in range(heads):
                    st1_f32(s0 + 4 * h * n + at, dot(q0 + h * apart, k + 4 * i * d, d))
                i += 1
                at += 4
        for h in range(heads):
            _softmax(s0 + 4 * h * n, n, scale)

        o0 = ai(p, 10) + 4 * (r * ai(p, 11) + (kv * share_by + g0) * d)
        o1, o2, o3 = o0 + 4 * h1 * d, o0 + 4 * h2 * d, o0 + 4 * h3 * d
        whole = d & ~63
        for j in range(0, 4 * whole, 256):
            _values_4x64(
                s0, s1, s2, s3, v + j, d, picks, blocks, ratio, tail, end, o0 + j, o1 + j, o2 + j, o3 + j
            )  # fmt: skip
        for h in range(heads):
            for j in range(whole, d, 16):
                out = o0 + 4 * (h * d + j)
                _values_16(s0 + 4 * h * n, v + 4 * j, d, d - j, picks, blocks, ratio, tail, end, out)
            for j in range(0, d if ai(p, 17) else 0, 16):
                out, gate = o0 + 4 * (h * d + j), q0 + h * apart + 4 * (d + j)
                st_part(out, mul(ld_part(out, d - j), vsigmoid(ld_part(gate, d - j))), d - j)


KERNELS = {
    "attention_prep": attention_prep,
    "index_prep": index_prep,
    "block_keys": block_keys,
    "index_scores": index_scores,
    "index_pick": index_pick,
    "attention": attention,
}
