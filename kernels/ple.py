"""The gate of the hashed n-gram embedding: how much of its value enters each stream (tests/kernels/test_ple.py)."""

from __future__ import annotations

import math

import numpy as np

from coli.kernels.abi import ai, rows, share
from coli.kernels.norm import dot
from coli.kernels.simd import ld_part, mul, sigmoid1, splat, st_part


def ple_gate(p, tid, nt):
    """0 step, 1 key [R][copies*H], 2 ldk, 3 query [R][copies*H], 4 ldq, 5 val [R][H], 6 ldv, 7 u out, 8 ldu, 9 H,
    10 copies: g_j = key_j . query_j / sqrt(H), u_j = sigmoid(sign(g_j) * sqrt(max(|g_j|, 1e-6))) * val."""
    h, copies = ai(p, 9), ai(p, 10)
    u0, u1 = share(rows(ai(p, 0)) * copies, tid, nt)
    for u in range(u0, u1):
        r = u // copies
        at = 4 * (u - r * copies) * h
        val, out = ai(p, 5) + 4 * r * ai(p, 6), ai(p, 7) + 4 * r * ai(p, 8) + at
        g = dot(ai(p, 1) + 4 * r * ai(p, 2) + at, ai(p, 3) + 4 * r * ai(p, 4) + at, h)
        g /= np.float32(math.sqrt(np.float32(h)))
        size = abs(g)
        if size < np.float32(1e-6):  # a NaN stays one
            size = np.float32(1e-6)
        root = np.float32(math.sqrt(size))
        gate = np.float32(0.5)  # sign(0) = 0
        if g > 0:
            gate = sigmoid1(root)
        elif g != 0:
            gate = sigmoid1(-root)
        for j in range(0, h, 16):
            st_part(out + 4 * j, mul(splat(gate), ld_part(val + 4 * j, h - j)), h - j)


KERNELS = {"ple_gate": ple_gate}
