"""The element-wise side of a mixture of experts: choose, gate, sum up. The products are kernels/linear.py's.

`router` keeps its sorted list of the best in the output arrays while it walks the experts once; a later expert must
be strictly better to enter, so ties go to the lower index (tests/kernels/test_moe.py). exp() alone decides the order:
dividing by the common sum cannot change it.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coli.kernels.abi import ai, columns, in_row, ld1_f32, ld1_i64, rows, share, st1_f32, st1_i64
from coli.kernels.simd import (
    add,
    bits_gt,
    exp1,
    first_lanes,
    fma,
    hmax,
    hsum,
    ld_f32,
    ld_part,
    lowest_bit,
    mul,
    sigmoid1,
    splat,
    splat_at,
    st_part,
    sub,
    vexp,
    vmax,
    vsilu,
    zero_f,
)


@njit(inline="always")
def largest(x, n):
    """max of n floats; NaN is passed over."""
    best = splat(np.float32(-np.inf))
    j = 0
    while j + 16 <= n:
        best = vmax(ld_f32(x + 4 * j), best)
        j += 16
    top = hmax(best)
    while j < n:
        value = ld1_f32(x + 4 * j)
        if value > top:
            top = value
        j += 1
    return top


@njit(inline="always")
def _insert(ids, weights, count, k, expert, weight):
    """Put an expert into the list of `count` <= k best, behind all that are at least as good."""
    i = min(count, k - 1)
    while i > 0 and ld1_f32(weights + 4 * (i - 1)) < weight:
        st1_f32(weights + 4 * i, ld1_f32(weights + 4 * (i - 1)))
        st1_i64(ids + 8 * i, ld1_i64(ids + 8 * (i - 1)))
        i -= 1
    st1_f32(weights + 4 * i, weight)
    st1_i64(ids + 8 * i, expert)


def router(p, tid, nt):
    """0 step, 1 logits, 2 ldl, 3 E, 4 top_k, 5 ids out int64 [R][K], 6 weights out [R][K], 7 norm:
    the K <= E best by softmax, best first, with p (norm 0) or p / sum over the K (norm 1). Logits that are not
    numbers still give K different experts, with weights that are not numbers either."""
    experts, k = ai(p, 3), ai(p, 4)
    r0, r1 = share(rows(ai(p, 0)), tid, nt)
    for r in range(r0, r1):
        x, ids, weights = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 5) + 8 * r * k, ai(p, 6) + 4 * r * k
        top = largest(x, experts)
        total = zero_f()
        count = 0
        worst = np.float32(-1.0)
        for j in range(0, experts, 16):
            left = min(experts - j, 16)
            e = first_lanes(vexp(sub(ld_part(x + 4 * j, left), splat(top))), left)
            total = add(total, e)
            better = bits_gt(vmax(e, zero_f()), splat(worst)) & ((1 << left) - 1)
            while better != 0:
                i = j + lowest_bit(better)
                better &= better - 1
                weight = exp1(ld1_f32(x + 4 * i) - top)
                if not weight >= np.float32(0.0):
                    weight = np.float32(0.0)  # a NaN: last among equals
                if weight > worst:
                    _insert(ids, weights, count, k, i, weight)
                    count = min(count + 1, k)
                    if count == k:
                        worst = ld1_f32(weights + 4 * (k - 1))
        norm = hsum(total)
        if ai(p, 7):
            norm = norm * np.float32(0.0)  # 0, or NaN where a logit was no number: it must reach the streams
            for i in range(k):
                norm += ld1_f32(weights + 4 * i)
        for i in range(k):
            st1_f32(weights + 4 * i, ld1_f32(weights + 4 * i) / norm)


@njit(inline="always")
def gate_blocks(gate, up, out, b0, b1, n):
    """out = silu(gate) * up for blocks b0..b1 of 16 of n features."""
    for b in range(b0, b1):
        left = n - 16 * b
        st_part(out + 64 * b, mul(vsilu(ld_part(gate + 64 * b, left)), ld_part(up + 64 * b, left)), left)


def swiglu(p, tid, nt):
    """0 count cell, 1 gate row pointers, 2 up row pointers, 3 out row pointers, 4 n: out = silu(gate) * up."""
    count, n = ld1_i64(ai(p, 0)), ai(p, 4)
    blocks = (n + 15) // 16
    u0, u1 = share(count * blocks, tid, nt)
    for r in range(count):
        b0, b1 = in_row(u0, u1, r, blocks)
        gate_blocks(ld1_i64(ai(p, 1) + 8 * r), ld1_i64(ai(p, 2) + 8 * r), ld1_i64(ai(p, 3) + 8 * r), b0, b1, n)


def combine(p, tid, nt):
    """0 step, 1 d [R*K][ldd], 2 ldd, 3 weights [R][K], 4 K, 5 shared, 6 ldshared, 7 shared gate logits, 8 ldg, 9 y,
    10 ldy, 11 H: y = sum over the ranks, best first, of w * d[r*K + rank], then + sigmoid(gate) * shared unless shared
    is 0; by `columns`."""
    k, ldd, h = ai(p, 4), 4 * ai(p, 2), ai(p, 11)
    b0, b1 = columns(h, tid, nt)
    for r in range(rows(ai(p, 0))):
        if b0 < b1:
            d, w, y = ai(p, 1) + r * k * ldd, ai(p, 3) + 4 * r * k, ai(p, 9) + 4 * r * ai(p, 10)
            shared, gate = ai(p, 5), zero_f()
            if shared != 0:
                shared += 4 * r * ai(p, 6)
                gate = splat(sigmoid1(ld1_f32(ai(p, 7) + 4 * r * ai(p, 8))))
            for b in range(b0, b1):
                left = h - 16 * b
                total = zero_f()
                for i in range(k):
                    total = fma(splat_at(w + 4 * i), ld_part(d + i * ldd + 64 * b, left), total)
                if shared != 0:
                    total = fma(gate, ld_part(shared + 64 * b, left), total)
                st_part(y + 64 * b, total, left)


KERNELS = {"router": router, "swiglu": swiglu, "combine": combine}
