"""Norms, the sums they share with the other kernels, and a gathering of features in another order.

One statistic per unit (a row's group of features): four vector accumulators in a fixed order, then `hsum`'s tree, so
a row has the same bits however many rows and threads there are (tests/kernels/test_norm.py).
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from coli.kernels.abi import af, ai, columns, ld1_f32, ld1_i32, rows, share, st1_f32
from coli.kernels.simd import add, fma, hsum, ld_f32, ld_part, mul, splat, st_part, vsilu, zero_f


@njit(inline="always")
def dot(x, y, n):
    """sum over n floats of x*y: float32, order fixed by n alone."""
    a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
    j = 0
    while j + 64 <= n:
        s, t = x + 4 * j, y + 4 * j
        a = fma(ld_f32(s), ld_f32(t), a)
        b = fma(ld_f32(s + 64), ld_f32(t + 64), b)
        c = fma(ld_f32(s + 128), ld_f32(t + 128), c)
        d = fma(ld_f32(s + 192), ld_f32(t + 192), d)
        j += 64
    while j < n:
        a = fma(ld_part(x + 4 * j, n - j), ld_part(y + 4 * j, n - j), a)
        j += 16
    return hsum(add(add(a, b), add(c, d)))


@njit(inline="always")
def inverse_rms(x, n, eps):
    """1 / sqrt(mean of n squares + eps)."""
    return np.float32(1.0) / np.float32(math.sqrt(dot(x, x, n) / np.float32(n) + eps))


@njit(inline="always")
def normalise(x, w, y, n, eps):
    """y = x / rms(x) * w over n floats; y may be x."""
    scale = splat(inverse_rms(x, n, eps))
    for j in range(0, n, 16):
        v = mul(mul(ld_part(x + 4 * j, n - j), scale), ld_part(w + 4 * j, n - j))
        st_part(y + 4 * j, v, n - j)


def rms_group(p, tid, nt):
    """0 step, 1 x, 2 ldx, 3 w [width], 4 y, 5 ldy, 6 width, 7 group, 8 eps:
    y = x / sqrt(mean of the group's squares + eps) * w.
    `w` already holds 1 + weight where the norm is zero-centred; y may be x."""
    x, w, y, group = ai(p, 1), ai(p, 3), ai(p, 4), ai(p, 7)
    groups = ai(p, 6) // group
    u0, u1 = share(rows(ai(p, 0)) * groups, tid, nt)
    for u in range(u0, u1):
        r = u // groups
        at = (u - r * groups) * group * 4
        normalise(x + 4 * r * ai(p, 2) + at, w + at, y + 4 * r * ai(p, 5) + at, group, af(p, 8))


def silu_scaled(p, tid, nt):
    """0 step, 1 x, 2 ldx, 3 n, 4 scale: x = silu(x * scale) in place, by `columns`."""
    n, scale = ai(p, 3), splat(af(p, 4))
    b0, b1 = columns(n, tid, nt)
    for r in range(rows(ai(p, 0))):
        x = ai(p, 1) + 4 * r * ai(p, 2)
        for b in range(b0, b1):
            left = n - 16 * b
            st_part(x + 64 * b, vsilu(mul(ld_part(x + 64 * b, left), scale)), left)


def gather(p, tid, nt):
    """0 step, 1 x, 2 ldx, 3 idx int32 [n], 4 y, 5 ldy, 6 n: y[j] = x[idx[j]], by `columns` of y."""
    n = ai(p, 6)
    b0, b1 = columns(n, tid, nt)
    for r in range(rows(ai(p, 0))):
        x, y = ai(p, 1) + 4 * r * ai(p, 2), ai(p, 4) + 4 * r * ai(p, 5)
        for j in range(16 * b0, min(16 * b1, n)):
            st1_f32(y + 4 * j, ld1_f32(x + 4 * np.int64(ld1_i32(ai(p, 3) + 4 * j))))


KERNELS = {"rms_group": rms_group, "silu_scaled": silu_scaled, "gather": gather}
