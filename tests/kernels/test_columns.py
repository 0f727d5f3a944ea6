"""Between a product and what works on its output feature by feature there is no barrier (coli/models/qwen38_blocks.py):
each thread must find there only what it has written itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from coli.kernels.deltanet import conv_silu
from coli.kernels.linear import linear
from coli.kernels.moe import combine
from coli.kernels.norm import gather, silu_scaled
from coli.kernels.packing import GRAIN, TILE_ROWS
from coli.kernels.streams import residual, stream_inject
from coli.kernels.tiles import tile
from tests.kernels.harness import address, block, compiled, pointers, step, tile_table

ROWS, OLD = 2, np.float32(3)


def written(kernel: Callable, out: np.ndarray, tid: int, nt: int, *args: int | float | np.ndarray) -> np.ndarray:
    """bool, shape of `out`: where thread `tid` alone changes it."""
    out[:] = OLD
    compiled(kernel).ctypes(address(block(*args)), tid, nt)
    return out != OLD


@pytest.mark.parametrize("nt", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [4, 16, 40, 250, 256])
def test_threads_keep_their_columns(n: int, nt: int) -> None:
    ones, two, bad = np.ones((ROWS, n), np.float32), np.ones((ROWS, 2), np.float32), np.zeros(1, np.int64)
    weight, tiles = np.ones((n, 16), np.float32), tile_table({rows: tile("f32", rows) for rows in TILE_ROWS})
    x, y = np.ones((6, 16), np.float32), np.empty((6, n), np.float32)
    out, streams, ring = (np.empty(shape, np.float32) for shape in ((ROWS, n), (ROWS, 2 * n), (9, n)))
    rows, xs, ys = step(ROWS), pointers(x), pointers(y)
    for tid in range(nt):
        product = written(linear, y, tid, nt, rows, weight, 0, xs, ys, n, 16, 0, 0, tiles, GRAIN)[:ROWS]
        assert np.array_equal(written(silu_scaled, out, tid, nt, rows, out, n, n, 0.5), product)
        injected = (rows, streams, 2 * n, ones, n, two, 2, n, 2, bad, 0)
        assert np.array_equal(written(stream_inject, streams, tid, nt, *injected), np.hstack([product, product]))
        assert np.array_equal(written(residual, out, tid, nt, rows, out, n, ones, n, n, bad, 0), product)
        gathered = (rows, ones, n, np.arange(n, dtype=np.int32), out, n, n)
        assert np.array_equal(written(gather, out, tid, nt, *gathered), product)
        combined = (rows, ones, n, two, 1, ones, n, two, 2, out, n, n)
        assert np.array_equal(written(combine, out, tid, nt, *combined), product)
        convolved = (rows, ones, n, ones, ring, 9, out, n, n, 2, 1, 0, 0)
        assert np.array_equal(written(conv_silu, out, tid, nt, *convolved), product)
