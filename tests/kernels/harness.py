"""Compile kernels (kernels/*.py) one by one and call them from tests, without the program's compile cache or threads.

A kernel is a plain function `(p, tid, nt)`; `p` is the address of an int64 argument block. `call(kernel, *args)` builds
the block (integers as they are, floats as float64 bits, arrays as the address of their first element) and calls the
kernel once for every thread number, one after another: kernels have no barriers, so this gives what `nt` threads give.
Each kernel is compiled once per process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import cfunc, types

Argument = int | float | np.ndarray
TILE_SIGNATURE = types.void(*[types.int64] * 10)
KERNEL_SIGNATURE = types.void(*[types.int64] * 3)


@cache
def compiled(function: Callable, signature=KERNEL_SIGNATURE):
    """The Numba CFunc of a kernel or (with TILE_SIGNATURE) of a tile: `.ctypes(...)` calls it, `.address` names it."""
    return cfunc(signature, nopython=True, error_model="numpy")(function)


def address(array: np.ndarray) -> int:
    """Address of an array's first byte. The caller keeps the array alive, and C contiguous in what the kernel reads."""
    return array.ctypes.data


def block(*args: Argument) -> np.ndarray:
    """An argument block: one int64 per argument, floats as their float64 bits, arrays as addresses."""
    out = np.zeros(max(1, len(args)), np.int64)
    for i, value in enumerate(args):
        if isinstance(value, np.ndarray):
            out[i] = address(value)
        elif isinstance(value, (float, np.floating)):
            out[i : i + 1].view(np.float64)[0] = value
        else:
            out[i] = value
    return out


def call(kernel: Callable, *args: Argument, nt: int = 1) -> None:
    """Run `kernel` with these arguments as `nt` threads would."""
    arguments = block(*args)
    function = compiled(kernel).ctypes
    for tid in range(nt):
        function(address(arguments), tid, nt)


def step(rows: int, pos: int = 0, first: int = 0, undoable: int = 0) -> np.ndarray:
    """The step block of kernels.md: rows of this call, position of the first, first row with logits, undo wanted."""
    return np.array([rows, pos, first, undoable], np.int64)


def pointers(matrix: np.ndarray, multiple: int = 1) -> np.ndarray:
    """Addresses of the rows of `matrix`, padded up to a multiple of `multiple` by repeating the last one."""
    base, stride = address(matrix), matrix.strides[0]
    rows = list(range(len(matrix)))
    rows += [rows[-1]] * (-len(rows) % multiple)
    return np.array([base + r * stride for r in rows], np.int64)


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that begin on a cache line, as the engine's buffers do."""
    raw = np.zeros(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Are two float32 arrays equal bit for bit (NaN equals the same NaN, -0 differs from 0)?"""
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and np.array_equal(a.view(np.int32), b.view(np.int32))


def tile_table(tiles: dict[int, Callable]) -> np.ndarray:
    """int64[8] for `linear` and `grouped`: entry R is the address of the tile for R rows, or 0."""
    table = np.zeros(8, np.int64)
    for rows, tile in tiles.items():
        table[rows] = compiled(tile, TILE_SIGNATURE).address
    return table


def close(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | float, tolerance: float) -> bool:
    """|actual - expected| <= tolerance * scale everywhere (scale: the size of the terms that were added up)."""
    return bool(np.all(np.abs(np.asarray(actual, np.float64) - expected) <= tolerance * np.asarray(scale)))
