"""The recurrent state S of all Gated DeltaNet layers, and the two ways to take its last rows back.

S cannot be rewound by a length. After an undoable forward of R rows `keep(n)` must leave what n of them would have
left, n >= 1: the first row is the caller's own pick and always stands. Either class below does that, with the same
bytes (tests/models/test_undo.py runs every test on both).

*Slots* copies nothing: row r < R-1 writes the state behind it to slot r, the last row to the live state, each reading
where the row before wrote. Keeping n < R swaps the live state with slot n-1: pointers change. A slot is as large as
S, allocated when a verify that deep first runs.

*Log* writes down what the rows behind the first would have added (k, delta, decay: 1/90 of S) and runs them on a
scratch copy of one block at a time. Keeping n says that n-1 rows of the log stand; the next forward, of whatever
kind, adds them to S before its own rows. The log has two halves: one is read while the other is written. S is read
and written once a forward, however many rows. Until the next forward S lacks the rows that stand, so whoever reads
it gets `copy()`, which has `settle` play the recurrence over no rows on the copy: the kernel's own arithmetic, and the
live state stays as it is.

`cells` is what the kernel reads (kernels/deltanet.py, `deltanet`): 0 live, 1 log to write, 2 log to read, 3 rows
standing, 4.. slots. `reserve` either gives all it was asked for or leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coli.kernels.packing import aligned_bytes

MAX_UNDOABLE = 8
LIVE, WRITE, READ, STANDING, SLOTS = 0, 1, 2, 3, 4  # cells


def zeros(floats: int) -> np.ndarray:
    """float32 on a cache line; a page costs memory from its first write on. Raises MemoryError."""
    return aligned_bytes(4 * floats).view(np.float32)


class Recurrent:
    """S of `floats` float32 in all: what both ways share. Forgets nothing by itself: without `keep` all rows stand."""

    def __init__(self, floats: int) -> None:
        self.cells = np.zeros(SLOTS + MAX_UNDOABLE - 1, np.int64)
        self.live = zeros(floats)
        self.cells[LIVE] = self.live.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those for undo included."""
        return self.live.nbytes + self.undo_bytes

    @property
    def undo_bytes(self) -> int:
        raise NotImplementedError

    def reserve(self, rows: int) -> bool:
        """Be ready to take back `rows` rows; False, and nothing changed, when memory does not allow it."""
        raise NotImplementedError

    def ran(self, rows: int, undoable: bool) -> None:
        """A forward of `rows` rows has just run."""

    def keep(self, rows: int, count: int) -> None:
        """`rows` of the `count` rows just run stand, 1 <= rows <= count."""
        raise NotImplementedError

    def copy(self) -> np.ndarray:
        """S behind the last row that stands (all rows, before `keep`)."""
        return self.live.copy()

    def load(self, values: np.ndarray | float) -> None:
        """S becomes `values`; what stood before is forgotten."""
        self.live[:] = values


class Slots(Recurrent):
    """Undo by one copy of S a row."""

    def __init__(self, floats: int) -> None:
        super().__init__(floats)
        self.slots: list[np.ndarray] = []

    @property
    def undo_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def reserve(self, rows: int) -> bool:
        fresh: list[np.ndarray] = []
        try:
            while len(self.slots) + len(fresh) < rows:
                fresh.append(zeros(len(self.live)))
        except MemoryError:
            return False
        self.slots += fresh
        self._point()
        return True

    def keep(self, rows: int, count: int) -> None:
        if rows < count:
            self.live, self.slots[rows - 1] = self.slots[rows - 1], self.live
            self._point()

    def _point(self) -> None:
        self.cells[LIVE] = self.live.ctypes.data
        for i, slot in enumerate(self.slots):
            self.cells[SLOTS + i] = slot.ctypes.data


class Log(Recurrent):
    """Undo by a log of `log_floats` float32 a half, allocated when the first verify runs.

    `settle(recurrent)` plays the recurrence over no rows with `recurrent.cells`."""

    def __init__(self, floats: int, log_floats: int, settle: Callable[[Any], None]) -> None:
        super().__init__(floats)
        self._half, self._settle = log_floats, settle
        self._log: tuple[np.ndarray, ...] = ()

    @property
    def undo_bytes(self) -> int:
        return sum(half.nbytes for half in self._log)

    def reserve(self, rows: int) -> bool:
        if rows and not self._log:
            try:
                self._log = (zeros(self._half), zeros(self._half))
            except MemoryError:
                return False
            self.cells[WRITE], self.cells[READ] = (half.ctypes.data for half in self._log)
        return True

    def ran(self, rows: int, undoable: bool) -> None:
        self.cells[STANDING] = 0  # the forward has added them
        if undoable and rows > 1:
            self.cells[STANDING] = rows - 1
            self.cells[WRITE], self.cells[READ] = self.cells[READ], self.cells[WRITE]

    def keep(self, rows: int, count: int) -> None:
        self.cells[STANDING] = rows - 1

    def copy(self) -> np.ndarray:
        values = zeros(len(self.live))
        values[:] = self.live
        if self.cells[STANDING]:
            self.cells[LIVE] = values.ctypes.data
            try:
                self._settle(self)
            finally:
                self.cells[LIVE] = self.live.ctypes.data
        return values

    def load(self, values: np.ndarray | float) -> None:
        super().load(values)
        self.cells[STANDING] = 0
