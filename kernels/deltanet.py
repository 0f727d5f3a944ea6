"""Gated DeltaNet: the short convolution, what it feeds, the state recurrence, and the gated norm behind it.

A layer's state is float32 [value heads][dv/bw][dk][bw], bw = 64 (16 where dv is no multiple of 64): lanes run along
v, so neither product needs a horizontal sum, and a 32 KB block (dk = 128) stays in L1 between the two passes over it:
  pass 1   kv = k^T S                        reads the block
  pass 2   S = decay*S + k (x) delta, o = q^T S      reads and writes it, and prefetches the next block
with delta = beta * (v - decay * kv). Decode is bound by reading and writing the states once (tests/bench/deltanet.py).

All rows of a call run on one block before the next, which is also the prefill form. A row's arithmetic never depends
on where the state before it lies, so calls of any size and undoable ones give the same bytes
(tests/kernels/test_deltanet.py).

Undoable rows (coli/recurrent.py has the reasons and the layout of the cells). The first row always stands and works in
place. *Slots*: the state behind each later row goes to a slot, behind the last one to the live state. *Log*: later
rows run on a copy of the block in the thread's scratch, and what they would have added (k, delta, decay: 1/90 of the
state) is written to a log; the next call, of whatever kind, first adds the rows that stood. Reading and writing
S once is then all the memory traffic, however many rows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from coli.kernels.abi import af, ai, in_row, ld1_f32, ld1_i64, pos, rows, share, st1_f32, undoable
from coli.kernels.norm import dot, inverse_rms
from coli.kernels.simd import (
    add,
    div,
    fma,
    ld_f32,
    ld_part,
    mul,
    prefetch,
    splat,
    splat_at,
    st_f32,
    st_part,
    sub,
    vabs,
    vexp,
    vmax,
    vsigmoid,
    vsilu,
    zero_f,
)


# ---- convolution -----------------------------------------------------------------------------------------------
@njit(inline="always")
def _conv16(p, r, slot, at, left):
    """silu(conv) of 16 channels of row r; `at` is their byte offset in a row, `slot` the first tap's ring row."""
    x, ldx, w, ring, size = ai(p, 1), 4 * ai(p, 2), ai(p, 3) + at, ai(p, 4) + at, ai(p, 5)
    c, k, dilation, t = 4 * ai(p, 8), ai(p, 9), ai(p, 10), pos(ai(p, 0)) + r
    total = zero_f()
    for i in range(k):
        back = (k - 1 - i) * dilation
        if back <= r:
            total = fma(ld_part(w + i * c, left), ld_part(x + (r - back) * ldx + at, left), total)
        elif back <= t:
            total = fma(ld_part(w + i * c, left), ld_part(ring + slot * c, left), total)
        slot += dilation
        if slot >= size:
            slot -= size
    return vsilu(total)


def conv_silu(p, tid, nt):
    """0 step, 1 x, 2 ldx, 3 w [K][C], 4 ring [len][C], 5 len, 6 y, 7 ldy, 8 C, 9 K, 10 dilation, 11 base, 12 ldbase:
    depthwise causal convolution over the rows before (ring) and in this call; y = silu(c), or y += base + silu(c).
    Input row u lies in ring row u % len; len >= (K-1)*dilation + 8 leaves the history whole when rows are undone."""
    step, ldx, size, c, base = ai(p, 0), 4 * ai(p, 2), ai(p, 5), ai(p, 8), ai(p, 11)
    count = rows(step)
    b0, b1 = share((c + 15) // 16, tid, nt)
    for r in range(count):
        y, add_row = ai(p, 6) + 4 * r * ai(p, 7), base + 4 * r * ai(p, 12)
        slot = (pos(step) + r - (ai(p, 9) - 1) * ai(p, 10)) % size
        for b in range(b0, b1):
            at, left = 64 * b, c - 16 * b
            v = _conv16(p, r, slot, at, left)
            if base:
                v = add(ld_part(y + at, left), add(ld_part(add_row + at, left), v))
            st_part(y + at, v, left)
    for r in range(max(count - size, 0), count):  # after all rows: an older tap may still lie in these places
        x, ring = ai(p, 1) + r * ldx, ai(p, 4) + 4 * ((pos(step) + r) % size) * c
        for b in range(b0, b1):
            st_part(ring + 64 * b, ld_part(x + 64 * b, c - 16 * b), c - 16 * b)


# ---- the recurrence's inputs -----------------------------------------------------------------------------------
@njit(inline="always")
def _log1p(y):
    """log(1 + y) for 0 <= y <= 1: 2 atanh(s), s = y / (2 + y) <= 1/3; the first term left out is below 2e-9."""
    s = div(y, add(splat(np.float32(2.0)), y))
    z = mul(s, s)
    q = fma(z, splat(np.float32(1 / 15)), splat(np.float32(1 / 13)))
    q = fma(q, z, splat(np.float32(1 / 11)))
    q = fma(q, z, splat(np.float32(1 / 9)))
    q = fma(q, z, splat(np.float32(1 / 7)))
    q = fma(q, z, splat(np.float32(1 / 5)))
    q = fma(q, z, splat(np.float32(1 / 3)))
    s = add(s, s)
    return fma(mul(q, z), s, s)


@njit(inline="always")
def _softplus(x):
    return add(vmax(x, zero_f()), _log1p(vexp(sub(zero_f(), vabs(x)))))


@njit(inline="always")
def _unit(x, n, scale):
    """x = x / sqrt(sum of squares + 1e-6) * scale, in place."""
    factor = splat(scale / np.float32(math.sqrt(dot(x, x, n) + np.float32(1e-6))))
    for j in range(0, n, 16):
        st_part(x + 4 * j, mul(ld_part(x + 4 * j, n - j), factor), n - j)


def gdn_prep(p, tid, nt):
    """0 step, 1 u [R][q hk*dk | k hk*dk | v hv*dv], 2 ldu, 3 a, 4 lda, 5 b, 6 ldb, 7 A [hv] (-exp(A_log)), 8 dt [hv],
    9 decay out [R][hv], 10 beta out [R][hv], 11 hk, 12 hv, 13 dk, 14 dv: in place q = unit(q) / sqrt(dk), k = unit(k);
    decay = exp(A * softplus(a + dt)), beta = sigmoid(b). Units: the heads of q and k, and 16 gates at a time."""
    hk, hv, dk = ai(p, 11), ai(p, 12), ai(p, 13)
    units = 2 * hk + (hv + 15) // 16
    u0, u1 = share(rows(ai(p, 0)) * units, tid, nt)
    for r in range(rows(ai(p, 0))):
        h0, h1 = in_row(u0, u1, r, units)
        for h in range(h0, h1):
            if h < 2 * hk:
                scale = np.float32(1.0)
                if h < hk:
                    scale = np.float32(1.0) / np.float32(math.sqrt(np.float32(dk)))
                _unit(ai(p, 1) + 4 * (r * ai(p, 2) + h * dk), dk, scale)
            else:
                j = 16 * (h - 2 * hk)
                left = hv - j
                a = add(ld_part(ai(p, 3) + 4 * (r * ai(p, 4) + j), left), ld_part(ai(p, 8) + 4 * j, left))
                decay = vexp(mul(ld_part(ai(p, 7) + 4 * j, left), _softplus(a)))
                beta = vsigmoid(ld_part(ai(p, 5) + 4 * (r * ai(p, 6) + j), left))
                st_part(ai(p, 9) + 4 * (r * hv + j), decay, left)
                st_part(ai(p, 10) + 4 * (r * hv + j), beta, left)


# ---- the recurrence --------------------------------------------------------------------------------------------
@njit(inline="always")
def _row64(src, dst, q, k, v, out, delta, dk, decay, beta, ahead):
    """One row on a [dk][64] block: src -> dst; delta is written down where `delta` is not 0; `ahead` bytes from src the
    next block is fetched (0: no)."""
    a0, a1, a2, a3 = zero_f(), zero_f(), zero_f(), zero_f()
    b0, b1, b2, b3 = zero_f(), zero_f(), zero_f(), zero_f()
    for i in range(0, dk - 1, 2):  # two chains for each vector: even and odd rows
        e, f, s = splat_at(k + 4 * i), splat_at(k + 4 * i + 4), src + 256 * i
        a0, a1 = fma(ld_f32(s), e, a0), fma(ld_f32(s + 64), e, a1)
        a2, a3 = fma(ld_f32(s + 128), e, a2), fma(ld_f32(s + 192), e, a3)
        b0, b1 = fma(ld_f32(s + 256), f, b0), fma(ld_f32(s + 320), f, b1)
        b2, b3 = fma(ld_f32(s + 384), f, b2), fma(ld_f32(s + 448), f, b3)
    if dk % 2:
        e, s = splat_at(k + 4 * (dk - 1)), src + 256 * (dk - 1)
        a0, a1 = fma(ld_f32(s), e, a0), fma(ld_f32(s + 64), e, a1)
        a2, a3 = fma(ld_f32(s + 128), e, a2), fma(ld_f32(s + 192), e, a3)
    d0 = mul(sub(ld_f32(v), mul(add(a0, b0), decay)), beta)
    d1 = mul(sub(ld_f32(v + 64), mul(add(a1, b1), decay)), beta)
    d2 = mul(sub(ld_f32(v + 128), mul(add(a2, b2), decay)), beta)
    d3 = mul(sub(ld_f32(v + 192), mul(add(a3, b3), decay)), beta)
    if delta:
        st_f32(delta, d0)
        st_f32(delta + 64, d1)
        st_f32(delta + 128, d2)
        st_f32(delta + 192, d3)
    o0, o1, o2, o3 = zero_f(), zero_f(), zero_f(), zero_f()
    for i in range(dk):
        e, f, s, t = splat_at(k + 4 * i), splat_at(q + 4 * i), src + 256 * i, dst + 256 * i
        if ahead:
            prefetch(s + ahead)
            prefetch(s + ahead + 64)
            prefetch(s + ahead + 128)
            prefetch(s + ahead + 192)
        s0, s1 = fma(e, d0, mul(ld_f32(s), decay)), fma(e, d1, mul(ld_f32(s + 64), decay))
        s2, s3 = fma(e, d2, mul(ld_f32(s + 128), decay)), fma(e, d3, mul(ld_f32(s + 192), decay))
        st_f32(t, s0)
        st_f32(t + 64, s1)
        st_f32(t + 128, s2)
        st_f32(t + 192, s3)
        o0, o1, o2, o3 = fma(s0, f, o0), fma(s1, f, o1), fma(s2, f, o2), fma(s3, f, o3)
    st_f32(out, o0)
    st_f32(out + 64, o1)
    st_f32(out + 128, o2)
    st_f32(out + 192, o3)


@njit(inline="always")
def _row16(src, dst, q, k, v, out, delta, dk, decay, beta, ahead):
    """The same on a [dk][16] block."""
    a, b = zero_f(), zero_f()
    for i in range(0, dk - 1, 2):
        a = fma(ld_f32(src + 64 * i), splat_at(k + 4 * i), a)
        b = fma(ld_f32(src + 64 * i + 64), splat_at(k + 4 * i + 4), b)
    if dk % 2:
        a = fma(ld_f32(src + 64 * (dk - 1)), splat_at(k + 4 * (dk - 1)), a)
    d = mul(sub(ld_f32(v), mul(add(a, b), decay)), beta)
    if delta:
        st_f32(delta, d)
    o = zero_f()
    for i in range(dk):
        if ahead:
            prefetch(src + 64 * i + ahead)
        s = fma(splat_at(k + 4 * i), d, mul(ld_f32(src + 64 * i), decay))
        st_f32(dst + 64 * i, s)
        o = fma(s, splat_at(q + 4 * i), o)
    st_f32(out, o)


@njit(inline="always")
def _stand(block, k, delta, dk, decay, vectors):
    """What a row left on a [dk][16 * vectors] block, from the log: the same S = decay*S + k (x) delta."""
    for i in range(dk):
        e, s = splat_at(k + 4 * i), block + 64 * vectors * i
        for j in range(0, 64 * vectors, 64):
            st_f32(s + j, fma(e, ld_f32(delta + j), mul(ld_f32(s + j), decay)))


@njit(inline="always")
def _log_keys(p, log, row_bytes, tid, nt):
    """Write k and decay of the rows behind the first to the log, each thread its share."""
    hk, hv, dk, dv = ai(p, 9), ai(p, 10), ai(p, 11), ai(p, 12)
    for r in range(1, rows(ai(p, 0))):
        row, u = log + (r - 1) * row_bytes, ai(p, 1) + 4 * r * ai(p, 2)
        b0, b1 = share((hk * dk + 15) // 16, tid, nt)
        for b in range(b0, b1):
            left = hk * dk - 16 * b
            st_part(row + 4 * hv * dv + 64 * b, ld_part(u + 4 * hk * dk + 64 * b, left), left)
        h0, h1 = share(hv, tid, nt)
        for h in range(h0, h1):
            st1_f32(row + 4 * (hv * dv + hk * dk + h), ld1_f32(ai(p, 3) + 4 * (r * hv + h)))


def deltanet(p, tid, nt):
    """0 step, 1 u (as gdn_prep leaves it), 2 ldu, 3 decay [R][hv], 4 beta [R][hv], 5 cells int64 (below), 6 byte offset
    of this layer's S, 7 out [R][hv*dv], 8 ldo, 9 hk, 10 hv, 11 dk, 12 dv (% 16 == 0), 13 tiled (0: value head h reads
    key head h // (hv/hk), 1: h % hk), 14 byte offset of this layer's log, 15 bytes of a log row [delta hv*dv | k hk*dk
    | decay hv], 16 scratch, 17 bytes of it a thread: a block.
    Cells: 0 live, 1 log to write (0: undo by slots), 2 log to read, 3 rows of it that stand, 4.. slots. What stands is
    added to live first. Then undoable row r < R-1 leaves its state in slot r and the last one in live, each read from
    where the row before left it; or, with a log, row 0 works on live and the others on scratch. Rows that need not
    be undoable all work on live. A call of no rows only adds what stands."""
    step, cells = ai(p, 0), ai(p, 5)
    hk, hv, dk, dv = ai(p, 9), ai(p, 10), ai(p, 11), ai(p, 12)
    count, undo = rows(step), undoable(step) != 0
    log, old, standing = ld1_i64(cells + 8), ld1_i64(cells + 16) + ai(p, 14), ld1_i64(cells + 24)
    logged = undo and log != 0
    log += ai(p, 14)
    row_bytes, scratch = ai(p, 15), ai(p, 16) + tid * ai(p, 17)
    wide = dv % 64 == 0
    width = 64 if wide else 16
    blocks, nbytes = dv // width, 4 * dk * width
    if logged:
        _log_keys(p, log, row_bytes, tid, nt)
    u0, u1 = share(hv * blocks, tid, nt)
    for unit in range(u0, u1):
        h = unit // blocks
        key = h % hk if ai(p, 13) else h // (hv // hk)
        at = 4 * unit * width
        live = ld1_i64(cells) + ai(p, 6) + unit * nbytes
        for r in range(standing):
            row = old + r * row_bytes
            k, decay = row + 4 * (hv * dv + key * dk), splat_at(row + 4 * (hv * dv + hk * dk + h))
            if wide:
                _stand(live, k, row + at, dk, decay, 4)
            else:
                _stand(live, k, row + at, dk, decay, 1)
        src = live
        for r in range(count):
            last = r == count - 1
            dst, delta = live, 0
            if logged and r > 0:
                dst, delta = scratch, log + (r - 1) * row_bytes + at
            elif undo and not logged and not last:
                dst = ld1_i64(cells + 8 * (4 + r)) + ai(p, 6) + unit * nbytes
            u = ai(p, 1) + 4 * r * ai(p, 2)
            q, k, v = u + 4 * key * dk, u + 4 * (hk + key) * dk, u + 8 * hk * dk + at
            out = ai(p, 7) + 4 * r * ai(p, 8) + at
            decay, beta = splat_at(ai(p, 3) + 4 * (r * hv + h)), splat_at(ai(p, 4) + 4 * (r * hv + h))
            ahead = nbytes + live - src if last else 0
            if wide:
                _row64(src, dst, q, k, v, out, delta, dk, decay, beta, ahead)
            else:
                _row16(src, dst, q, k, v, out, delta, dk, decay, beta, ahead)
            src = dst


# ---- behind it -------------------------------------------------------------------------------------------------
def gated_norm(p, tid, nt):
    """0 step, 1 o [R][heads*dv], 2 ldo, 3 z, 4 ldz, 5 w [dv], 6 heads, 7 dv, 8 eps, 9 gate (0 silu, 1 sigmoid):
    o_h = o_h / rms(o_h) * w * act(z_h) in place."""
    heads, dv = ai(p, 6), ai(p, 7)
    u0, u1 = share(rows(ai(p, 0)) * heads, tid, nt)
    for u in range(u0, u1):
        r = u // heads
        at = 4 * (u - r * heads) * dv
        o, z = ai(p, 1) + 4 * r * ai(p, 2) + at, ai(p, 3) + 4 * r * ai(p, 4) + at
        scale = splat(inverse_rms(o, dv, af(p, 8)))
        for j in range(0, dv, 16):
            left = dv - j
            gate = ld_part(z + 4 * j, left)
            act = vsigmoid(gate) if ai(p, 9) else vsilu(gate)
            v = mul(mul(ld_part(o + 4 * j, left), scale), ld_part(ai(p, 5) + 4 * j, left))
            st_part(o + 4 * j, mul(v, act), left)


KERNELS = {"conv_silu": conv_silu, "gdn_prep": gdn_prep, "deltanet": deltanet, "gated_norm": gated_norm}
