"""Drivers of the GEMV tiles: products with dense weights, products of experts, and int8 activations.

A driver hands weight rows to threads in units of `grain` rows and activation rows to tiles in groups of at most six.
Neither choice can change a bit (kernels/tiles.py says why), so both are free to follow the machine: up to six rows go
over the weights once; more rows (prefill) take the weights in blocks that stay in the cache while all groups of rows
pass over them. That is the whole GEMM, in the bits of one-row decode. Tests: tests/kernels/test_linear.py.

`listed` computes the rows of a weight that a list names, in the bits of the full product: the draft head scores 16,000
tokens of 248,320 with it. Natural rows are read alone, so the time is the list's bytes. N16 blocks are read whole,
whatever part of their 16 rows is listed. Tests: tests/kernels/test_listed.py.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coli.kernels.abi import ai, block_end, call_tile, ld1_i64, rows, share, st1_f32, st1_i32
from coli.kernels.moe import gate_blocks
from coli.kernels.simd import (
    add,
    hmax,
    hsum,
    ld_f32,
    ld_f32_tail,
    mul,
    prefetch,
    splat,
    st_i8,
    sub,
    vabs,
    vmax,
    vmin,
    zero_f,
)

_CACHED_WEIGHTS = 1 << 17  # weights of a block that several groups of rows visit: 64..512 KB, within L2
_EARLY = 4096
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to the nearest whole number


@njit(inline="always")
def _tile_rows(tiles, count, padded):
    """Rows of the tile that comes next for `count` rows: the smallest that takes them all where the list of rows is
    padded, else the largest that reads no row too many."""
    size = min(count, 6)
    while ld1_i64(tiles + 8 * size) == 0:
        size += 1 if padded else -1
    return size


@njit
def _product(p, tiles, w, s, xs, ys, count, padded, j0, j1):
    """All `count` activation rows over weight rows j0..j1; arguments 5..8 and 10 of `p` are the same in all
    drivers."""
    n, k, a, b, grain = ai(p, 5), ai(p, 6), ai(p, 7), ai(p, 8), ai(p, 10)
    block = j1 - j0
    if _tile_rows(tiles, count, padded) < count:
        block = max(_CACHED_WEIGHTS // k // grain, 1) * grain
    while j0 < j1:
        end = min(j0 + block, j1)
        r = 0
        while r < count:
            size = _tile_rows(tiles, count - r, padded)
            call_tile(ld1_i64(tiles + 8 * size), w, s, xs + 8 * r, ys + 8 * r, j0, end, n, k, a, b)
            r += size
        j0 = end


def linear(p, tid, nt):
    """y = x W^T. 0 step, 1 w, 2 s, 3 xs, 4 ys, 5 n, 6 k, 7 a, 8 b, 9 tiles (int64[8]: entry R the tile for R rows or 0;
    the tile for 6 must exist), 10 grain. xs, ys: row addresses, padded to a multiple of 6 by repeating the last."""
    n, grain = ai(p, 5), ai(p, 10)
    first, last = share((n + grain - 1) // grain, tid, nt)
    count = rows(ai(p, 0))
    if first < last:
        _product(p, ai(p, 9), ai(p, 1), ai(p, 2), ai(p, 3), ai(p, 4), count, True, first * grain, min(last * grain, n))


@njit(inline="always")
def _piece(p, unit, last, units):
    """What units `unit`..`last` of all groups hold of the first one's group: record, bytes of lists before its pairs,
    pairs, its units j0..j1."""
    entry = ai(p, 0) + 8 * (2 + 3 * (unit // units))
    j0 = unit % units
    return ld1_i64(entry), 8 * ld1_i64(entry + 8), ld1_i64(entry + 16), j0, min(units, j0 + last - unit)


@njit(inline="always")
def _ahead(w, count, row_bytes):
    """Ask for the first _EARLY bytes of each stream (kernels/tiles.py) that `count` weight rows from `w` on are read
    in: an expert of a small model is hardly longer than the way of its first line from memory."""
    part = count * row_bytes // 4
    for j in range(4):
        for at in range(w + j * part, w + j * part + min(part, _EARLY), 64):
            prefetch(at)


def grouped(p, tid, nt):
    """Experts: 0 groups (int64: [0] G, [1] pairs, then G x (record address, first pair, pair count)), 1 w offset,
    2 s offset in a record, 3 xs, 4 ys (row addresses by pair, not padded), 5 n, 6 k, 7 a, 8 b, 9 tiles (the tile for
    1 must exist), 10 grain, 11 bytes of a weight row."""
    n, grain = ai(p, 5), ai(p, 10)
    units = (n + grain - 1) // grain
    unit, last = share(ld1_i64(ai(p, 0)) * units, tid, nt)
    while unit < last:
        record, pair, count, j0, j1 = _piece(p, unit, last, units)
        xs, ys = ai(p, 3) + pair, ai(p, 4) + pair
        if unit + j1 - j0 < last:
            then, _, _, k0, k1 = _piece(p, unit + j1 - j0, last, units)
            _ahead(then + ai(p, 1) + k0 * grain * ai(p, 11), (k1 - k0) * grain, ai(p, 11))
        row0, row1 = j0 * grain, min(j1 * grain, n)
        _product(p, ai(p, 9), record + ai(p, 1), record + ai(p, 2), xs, ys, count, False, row0, row1)
        unit += j1 - j0


def gated(p, tid, nt):
    """Experts' inner rows, silu(gate) * up: 0..10 as `grouped` has them, of the gate; 11 w offset, 12 s offset and
    13 ys of up, 14 out (row addresses by pair; may be the gate's), 15 bytes of a weight row, 16 tiles of up and
    17 bytes of its weight row: two kinds may meet that take the same x. A thread has the same rows of both, so it needs
    to wait for none."""
    n, grain = ai(p, 5), ai(p, 10)
    units = (n + grain - 1) // grain
    unit, last = share(ld1_i64(ai(p, 0)) * units, tid, nt)
    while unit < last:
        record, pair, count, j0, j1 = _piece(p, unit, last, units)
        xs, gates, ups, outs = ai(p, 3) + pair, ai(p, 4) + pair, ai(p, 13) + pair, ai(p, 14) + pair
        row0, row1 = j0 * grain, min(j1 * grain, n)
        _ahead(record + ai(p, 11) + row0 * ai(p, 17), row1 - row0, ai(p, 17))
        _product(p, ai(p, 9), record + ai(p, 1), record + ai(p, 2), xs, gates, count, False, row0, row1)
        if unit + j1 - j0 < last:
            then, _, _, k0, k1 = _piece(p, unit + j1 - j0, last, units)
            _ahead(then + ai(p, 1) + k0 * grain * ai(p, 15), (k1 - k0) * grain, ai(p, 15))
        _product(p, ai(p, 16), record + ai(p, 11), record + ai(p, 12), xs, ups, count, False, row0, row1)
        for i in range(0, 8 * count, 8):
            b0, b1 = row0 // 16, (row1 + 15) // 16
            gate_blocks(ld1_i64(gates + i), ld1_i64(ups + i), ld1_i64(outs + i), b0, b1, n)
        unit += j1 - j0


@njit
def _blocks(ids, count):
    """Stretches of a list whose ids lie in one block of 16 weight rows."""
    found = 1
    for at in range(1, count):
        found += (ld1_i64(ids + 8 * at) >> 4) != (ld1_i64(ids + 8 * at - 8) >> 4)
    return found


@njit
def _skip_blocks(ids, at, count, blocks):
    """The place of a list that is `blocks` stretches behind `at`."""
    for _ in range(blocks):
        at = block_end(ids, at, count)
    return at


def listed(p, tid, nt):
    """y[i] = x W[ids[i]]^T. 0 step, 1 w, 2 s, 3 xs, 4 ys (rows of at least `count` floats), 5 ids (int64), 6 k, 7 a,
    8 b, 9 tiles (int64[8]: entry R the listed tile for R rows or 0; the tile for 1 must exist), 10 grain, 11 address of
    the count, 12 1 for N16 weights: threads share blocks of 16 rows, not places of the list. xs, ys: row addresses."""
    ids, grain, count = ai(p, 5), ai(p, 10), ld1_i64(ai(p, 11))
    if count <= 0:
        return
    if ai(p, 12):
        first, last = share(_blocks(ids, count), tid, nt)
        j0 = _skip_blocks(ids, 0, count, first)
        j1 = _skip_blocks(ids, j0, count, last - first)
    else:
        first, last = share((count + grain - 1) // grain, tid, nt)
        j0, j1 = first * grain, min(last * grain, count)
    _product(p, ai(p, 9), ai(p, 1), ai(p, 2), ai(p, 3), ai(p, 4), rows(ai(p, 0)), False, j0, j1)


@njit(inline="always")
def _codes(x, inverse):
    """x * inverse to the nearest of -127..127, half to even, as floats."""
    c = vmin(vmax(mul(x, splat(inverse)), splat(np.float32(-127.0))), splat(np.float32(127.0)))
    return sub(add(c, splat(_ROUND)), splat(_ROUND))


@njit
def _quantize_group(x, count, codes, scale_at, correction_at, offset):
    """64 inputs, `count` of them there. A NaN or an infinity among them makes the scale one too: nothing is hidden."""
    top, bad = zero_f(), zero_f()
    for i in range(0, 64, 16):
        v = ld_f32_tail(x + 4 * i, count - i)
        top = vmax(top, vabs(v))
        bad = add(bad, mul(v, zero_f()))
    scale = hmax(top) / np.float32(127.0)
    inverse = np.float32(0.0)
    if scale > np.float32(1.2e-38):  # below, the inverse would overflow: the group counts as zeros
        inverse = np.float32(1.0) / scale
    total = zero_f()
    for i in range(0, 64, 16):
        c = _codes(ld_f32_tail(x + 4 * i, count - i), inverse)
        st_i8(codes + i, c)
        total = add(total, c)
    st1_f32(scale_at, scale + hsum(bad))
    st1_i32(correction_at, np.int32(-offset * np.int64(hsum(total))))


def quantize(p, tid, nt):
    """Prepared rows (packing.py has the layout). 0 address of the row count, 1 xs (row addresses, float32),
    2 qs (addresses of prepared rows), 3 k, 4 offset of the weights' codes: 128 (int8) or 8 (int4)."""
    k = ai(p, 3)
    groups = (k + 63) // 64
    first, last = share(ld1_i64(ai(p, 0)) * groups, tid, nt)
    for unit in range(first, last):
        r, g = unit // groups, unit % groups
        x, q = ld1_i64(ai(p, 1) + 8 * r), ld1_i64(ai(p, 2) + 8 * r)
        scales = q + groups * 64
        _quantize_group(x + g * 256, k - g * 64, q + g * 64, scales + g * 4, scales + groups * 4 + g * 4, ai(p, 4))


@njit
def _quantize_block(x, q):
    """32 inputs to 48 bytes, by the rule of `_quantize_group`."""
    a, b = ld_f32(x), ld_f32(x + 64)
    scale = hmax(vmax(vmax(zero_f(), vabs(a)), vabs(b))) / np.float32(127.0)
    inverse = np.float32(0.0)
    if scale > np.float32(1.2e-38):
        inverse = np.float32(1.0) / scale
    first, last = _codes(a, inverse), _codes(b, inverse)
    st_i8(q, first)
    st_i8(q + 16, last)
    scale += hsum(add(mul(a, zero_f()), mul(b, zero_f())))
    s, t = np.int64(hsum(first)), np.int64(hsum(last))
    st1_f32(q + 32, scale)
    st1_f32(q + 36, scale * np.float32(s + t))
    st1_i32(q + 40, np.int32(-s - t))
    st1_i32(q + 44, np.int32((-s & 0xFFFF) | (-t << 16)))


def quantize_blocks(p, tid, nt):
    """Prepared rows for block-quantised weights (blocked.py has the layout). 0 address of the row count, 1 xs (row
    addresses, float32), 2 qs (addresses of prepared rows), 3 k, a multiple of 32."""
    groups = ai(p, 3) // 32
    first, last = share(ld1_i64(ai(p, 0)) * groups, tid, nt)
    for unit in range(first, last):
        r, g = unit // groups, unit % groups
        _quantize_block(ld1_i64(ai(p, 1) + 8 * r) + g * 128, ld1_i64(ai(p, 2) + 8 * r) + g * 48)


KERNELS = {"linear": linear, "grouped": grouped, "gated": gated, "listed": listed, "quantize": quantize,
           "quantize_blocks": quantize_blocks}
