"""What the memory gives: bytes per second of a pure read, 512-bit loads on four streams a thread.

The yardstick of every bandwidth bar, measured in the same run as the kernels it is compared with.
"""

from __future__ import annotations

import statistics
import threading
import time
from functools import cache

import numpy as np
from numba import njit

from coli.kernels.simd import add, ld_f32, st_f32, zero_f

_BYTES = 1 << 30


@njit(nogil=True)
def _read(address, nbytes, out):
    a, b, c, d = zero_f(), zero_f(), zero_f(), zero_f()
    quarter = nbytes // 4
    for i in range(0, quarter, 64):
        a = add(a, ld_f32(address + i))
        b = add(b, ld_f32(address + quarter + i))
        c = add(c, ld_f32(address + 2 * quarter + i))
        d = add(d, ld_f32(address + 3 * quarter + i))
    st_f32(out, add(add(a, b), add(c, d)))


@cache
def _memory() -> tuple[np.ndarray, np.ndarray]:
    data, out = np.ones(_BYTES // 4, np.float32), np.zeros(16 * 64, np.float32)
    _read(data.ctypes.data, 1 << 20, out.ctypes.data)
    return data, out


def read_bandwidth(threads: int, trials: int = 3) -> float:
    """Median bytes per second over 1 GiB."""
    data, out = _memory()
    part = _BYTES // threads // 256 * 256
    rates = []
    for _ in range(trials):
        team = [
            threading.Thread(target=_read, args=(data.ctypes.data + i * part, part, out.ctypes.data + 64 * i))
            for i in range(threads)
        ]
        start = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        rates.append(part * threads / (time.perf_counter() - start))
    return statistics.median(rates)
