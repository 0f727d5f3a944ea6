"""The residual: fill it from the embedding, mix its streams into a block's input, inject the block's output.

A row holds `copies` streams of H features, stream-major. All work is element by element, in units of 16 features; the
sum over streams runs in stream order (tests/kernels/test_streams.py). `stream_inject`, and `residual` for a model with
one plain stream, go by `columns`: a thread takes the features of y that it has just computed itself.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coli.kernels.abi import ai, columns, first, in_row, ld1_f32, ld1_i64, rows, share, st1_i64
from coli.kernels.simd import (
    add,
    div,
    fma,
    hsum,
    ld_bf16,
    ld_bf16_tail,
    ld_f16,
    ld_f16_tail,
    ld_part,
    sigmoid1,
    splat,
    st_part,
    vsigmoid,
    zero_f,
)

F32, F16, BF16 = 0, 1, 2  # kinds of embedding table


@njit(inline="always")
def _table_part(table, kind, at, count):
    """Up to 16 entries from element `at` of a table on."""
    if kind == F32:
        return ld_part(table + 4 * at, count)
    if kind == F16:
        return ld_f16(table + 2 * at) if count >= 16 else ld_f16_tail(table + 2 * at, count)
    return ld_bf16(table + 2 * at) if count >= 16 else ld_bf16_tail(table + 2 * at, count)


def embed(p, tid, nt):
    """0 step, 1 ids int64 [R], 2 table, 3 kind, 4 s, 5 lds, 6 H, 7 copies: every stream = the id's table row."""
    h, kind, copies = ai(p, 6), ai(p, 3), ai(p, 7)
    blocks = (h + 15) // 16
    u0, u1 = share(rows(ai(p, 0)) * blocks, tid, nt)
    for r in range(rows(ai(p, 0))):
        b0, b1 = in_row(u0, u1, r, blocks)
        row = ld1_i64(ai(p, 1) + 8 * r) * h
        s = ai(p, 4) + 4 * r * ai(p, 5)
        for b in range(b0, b1):
            left = h - 16 * b
            v = _table_part(ai(p, 2), kind, row + 16 * b, left)
            for j in range(copies):
                st_part(s + 4 * j * h + 64 * b, v, left)


def stream_mix(p, tid, nt):
    """0 step, 1 m, 2 ldm, 3 n, 4 ldn, 5 x, 6 ldx, 7 H, 8 copies: x = (sum_j sigmoid(m_j) * n_j) / copies."""
    h, copies = ai(p, 7), ai(p, 8)
    blocks = (h + 15) // 16
    count = splat(np.float32(copies))
    u0, u1 = share(rows(ai(p, 0)) * blocks, tid, nt)
    for r in range(rows(ai(p, 0))):
        b0, b1 = in_row(u0, u1, r, blocks)
        m, n, x = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 3) + 4 * r * ai(p, 4), ai(p, 5) + 4 * r * ai(p, 6)
        for b in range(b0, b1):
            left = h - 16 * b
            total = zero_f()
            for j in range(copies):
                at = 4 * j * h + 64 * b
                total = fma(vsigmoid(ld_part(m + at, left)), ld_part(n + at, left), total)
            st_part(x + 64 * b, div(total, count), left)


@njit(inline="always")
def _report(check, bad, layer):
    """Leave layer + 1 in the cell `bad` where it is 0 and a lane of `check` is NaN."""
    total = hsum(check)
    if total != total and ld1_i64(bad) == 0:
        st1_i64(bad, layer + 1)


def stream_inject(p, tid, nt):
    """0 step, 1 s, 2 lds, 3 y, 4 ldy, 5 inject, 6 ldi, 7 H, 8 copies, 9 bad cell, 10 layer, by `columns` of H:
    s_j += 2 * sigmoid(inject_j / copies) * y. The first layer whose streams are not finite leaves layer + 1 in `bad`
    (0 * x is NaN for those x alone, so the check costs one fma)."""
    h, copies = ai(p, 7), ai(p, 8)
    b0, b1 = columns(h, tid, nt)
    check = zero_f()
    for r in range(rows(ai(p, 0))):
        s, y, inject = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 3) + 4 * r * ai(p, 4), ai(p, 5) + 4 * r * ai(p, 6)
        if b0 < b1:
            for j in range(copies):
                gate = splat(np.float32(2.0) * sigmoid1(ld1_f32(inject + 4 * j) / np.float32(copies)))
                for b in range(b0, b1):
                    left = h - 16 * b
                    at = s + 4 * j * h + 64 * b
                    v = fma(gate, ld_part(y + 64 * b, left), ld_part(at, left))
                    check = fma(v, zero_f(), check)
                    st_part(at, v, left)
    _report(check, ai(p, 9), ai(p, 10))


def residual(p, tid, nt):
    """0 step, 1 s, 2 lds, 3 y, 4 ldy, 5 n, 6 bad cell, 7 layer: s += y, by `columns`, with the check of
    `stream_inject`."""
    n = ai(p, 5)
    b0, b1 = columns(n, tid, nt)
    check = zero_f()
    for r in range(rows(ai(p, 0))):
        s, y = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 3) + 4 * r * ai(p, 4)
        for b in range(b0, b1):
            left = n - 16 * b
            v = add(ld_part(s + 64 * b, left), ld_part(y + 64 * b, left))
            check = fma(v, zero_f(), check)
            st_part(s + 64 * b, v, left)
    _report(check, ai(p, 6), ai(p, 7))


def copy_rows(p, tid, nt):
    """0 step, 1 src, 2 lds, 3 dst, 4 ldd, 5 width: rows [first, R) to the front of dst."""
    width, r0 = ai(p, 5), first(ai(p, 0))
    count, blocks = rows(ai(p, 0)) - r0, (width + 15) // 16
    u0, u1 = share(max(count, 0) * blocks, tid, nt)
    for r in range(count):
        b0, b1 = in_row(u0, u1, r, blocks)
        src, dst = ai(p, 1) + 4 * (r0 + r) * ai(p, 2), ai(p, 3) + 4 * r * ai(p, 4)
        for b in range(b0, b1):
            st_part(dst + 64 * b, ld_part(src + 64 * b, width - 16 * b), width - 16 * b)


KERNELS = {"embed": embed, "stream_mix": stream_mix, "stream_inject": stream_inject, "residual": residual,
           "copy_rows": copy_rows}
