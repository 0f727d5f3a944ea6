"""The property every kernel has: a row's bits depend on the row alone, not on its call nor on the threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.kernels.harness import same_bits

GUARD = np.float32(-7.25e11)  # stands in every place a kernel must neither use nor write


def guarded(x: np.ndarray, extra: int = 5) -> np.ndarray:
    """float32 rows of x with `extra` guard floats behind each: shape[1] is the "ld" to pass."""
    out = np.full((len(x), x.shape[1] + extra), GUARD, np.float32)
    out[:, : x.shape[1]] = x
    return out


def inner(buffer: np.ndarray, width: int) -> np.ndarray:
    """The rows of a guarded buffer, after a look at the guards."""
    assert np.all(buffer[:, width:] == GUARD), "wrote behind a row"
    return buffer[:, :width].copy()


def assert_independent(run: Callable[[slice, int], np.ndarray], count: int = 6) -> np.ndarray:
    """`run(rows, nt)` gives one result row for each row of the slice. Checks all call sizes up to `count`, one by one,
    and 2 and 3 threads against one call on one thread, bit for bit; returns that call's result."""
    whole = run(slice(0, count), 1)
    for nt in (2, 3):
        assert same_bits(run(slice(0, count), nt), whole), f"{nt} threads"
    for n in range(1, count):
        assert same_bits(run(slice(0, n), 1), whole[:n]), f"a call of {n} rows"
    for r in range(count):
        assert same_bits(run(slice(r, r + 1), 1), whole[r : r + 1]), f"row {r} alone"
    return whole
