"""Writing a program: buffers, rows of pointers, and an op table that a player runs.

A program is built once per model and serves any number of rows up to its limit: what changes from step to step (row
count, positions, token ids, chosen experts) lies in buffers the ops read. Addresses that belong to a *state* (KV
cache, recurrent state) are left open as `StateCell`s and filled in by `bind`, so one program serves many sequences.

Names of kernels are collected while writing; `finish` makes them ready (compiling on the first run ever) and fills
in their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.kernels.packing import aligned_bytes
from coli.program.cache import Kernels

# The same numbers as in kernels/threads.py, which must not be imported here: it needs Numba
# (tests/program/test_team.py compares them).
ROW_CELLS, ARGS = 24, 22
BARRIER, MAY_CUT = 1, 2
STEP_ROWS, STEP_POS, STEP_FIRST, STEP_UNDO = 0, 1, 2, 3
MAX_TILE_ROWS = 6
TEAM_KERNELS = ("worker", "publish", "lead")  # what plays a program (coli/program/cpu.py)


@dataclass(frozen=True)
class StateCell:
    """An argument that is read from the bound state: `get(state)` gives the address."""

    get: Callable[[Any], int]


@dataclass(frozen=True)
class Rows:
    """A buffer [limit, width] with the addresses of its rows, padded to a multiple of 6 for the GEMV tiles."""

    array: np.ndarray
    pointers: np.ndarray

    @property
    def ld(self) -> int:
        """Distance between rows, in elements."""
        return self.array.strides[0] // self.array.itemsize


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Zeroed array whose first element lies on a 64-byte boundary."""
    return aligned_bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def row_pointers(array: np.ndarray) -> np.ndarray:
    """int64 addresses of the rows, the last repeated up to a multiple of 6."""
    count = array.shape[0]
    index = np.minimum(np.arange(-(-count // MAX_TILE_ROWS) * MAX_TILE_ROWS), count - 1)
    return (array.ctypes.data + index * array.strides[0]).astype(np.int64)


class Program:
    """An op table under construction, then ready to play.

    `limit`: the most rows one call may carry. `control`: the team's control block (its CUT cell is an argument of
    ops that may stop the program)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.step = aligned((8,), np.int64)
        self.nbytes = 0
        self._kept: list[Any] = []
        self._ops: list[tuple[str, list[Any], int]] = []
        self._tiles: dict[str, np.ndarray] = {}
        self._codes: dict[tuple[int, str], np.ndarray] = {}
        self._open: list[tuple[int, int, StateCell]] = []
        self._bound: Any = None
        self.table = np.zeros((0, ROW_CELLS), np.int64)
        self.address = 0  # of the table

    # ---- buffers
    def buffer(self, *shape: int, dtype: Any = np.float32) -> np.ndarray:
        array = aligned(shape, dtype)
        self.nbytes += array.nbytes
        return array

    def rows(self, width: int) -> Rows:
        """float32 [limit, width]."""
        return self.view(self.buffer(self.limit, width))

    def view(self, array: np.ndarray) -> Rows:
        """Rows of an existing buffer, or of a column range of one."""
        self._kept.append(array)  # the table will hold addresses of its rows only
        pointers = row_pointers(array)
        self.nbytes += pointers.nbytes
        return Rows(array, pointers)

    def codes_of(self, rows: Rows, form: str, width: int) -> np.ndarray:
        """Addresses of as many rows of `width` bytes, for int8 codes of `rows`; the same ones each time, for codes live
        no longer than what they are made of."""
        key = rows.pointers.ctypes.data, form
        if key not in self._codes:
            self._kept.append(rows)  # its address is the key
            self._codes[key] = self.view(self.buffer(len(rows.array), width, dtype=np.uint8)).pointers
        return self._codes[key]

    def tiles(self, kind: str) -> np.ndarray:
        """int64[8]: address of the GEMV tile of this weight kind for R rows at index R (0: there is none)."""
        if kind not in self._tiles:
            self._tiles[kind] = np.zeros(8, np.int64)
        return self._tiles[kind]

    # ---- ops
    def op(self, kernel: str, *args: Any, barrier: bool = True, may_cut: bool = False) -> int:
        """Append one op; returns its row in the table. Arguments: arrays (their address), ints, floats, StateCells."""
        assert len(args) <= ARGS, f"{kernel} has {len(args)} arguments"
        self._ops.append((kernel, list(args), BARRIER * barrier | MAY_CUT * may_cut))
        return len(self._ops) - 1

    @property
    def here(self) -> int:
        """The row the next op will have."""
        return len(self._ops)

    def finish(self, kernels: Kernels) -> Program:
        """Make the kernels ready and write the table."""
        self._check_cuts()
        self._kept.append(kernels)  # the code lives as long as they do
        names = {name for name, _, _ in self._ops} .union(TEAM_KERNELS)  # what plays it, in the same go
        names.update(*(kernels.tiles(kind) for kind in self._tiles))
        kernels.load(names)
        for kind, addresses in self._tiles.items():
            for name in kernels.tiles(kind):
                addresses[int(name.rsplit("_", 1)[1])] = kernels[name]
        self.table = aligned((len(self._ops), ROW_CELLS), np.int64)
        self.address = self.table.ctypes.data
        for at, (name, args, flags) in enumerate(self._ops):
            self.table[at, :2] = kernels[name], flags
            for i, value in enumerate(args):
                if isinstance(value, StateCell):
                    self._open.append((at, 2 + i, value))
                else:
                    self.table[at, 2 + i] = self._cell(value)
        return self

    def _cell(self, value: Any) -> int:
        if isinstance(value, np.ndarray):
            self._kept.append(value)
            return value.ctypes.data
        if isinstance(value, float):
            return int(np.float64(value).view(np.int64))
        return int(value)

    def _check_cuts(self) -> None:
        """Between two ops that may cut there must be another barrier (kernels/threads.py)."""
        barriers = 1
        for name, _, flags in self._ops:
            if flags & MAY_CUT:
                assert barriers and flags & BARRIER, f"{name} may cut too close to the cut before it"
                barriers = 0
            elif flags & BARRIER:
                barriers += 1

    def bind(self, state: Any) -> None:
        """Point the open arguments at `state`."""
        if state is not self._bound:
            for at, cell, value in self._open:
                self.table[at, cell] = value.get(state)
            self._bound = state
