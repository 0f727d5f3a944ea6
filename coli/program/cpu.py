"""The CPU player: a team of threads that runs a program's op table (kernels/threads.py).

Thread 0 is the caller. Workers are Python threads inside a compiled function that holds no GIL; when idle for a few
milliseconds they come back to Python and sleep on an event, which the next `play` sets.
"""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import psutil

from coli.program.builder import TEAM_KERNELS, Program, aligned
from coli.program.cache import Kernels

# cells of the control block (kernels/threads.py; tests/program/test_team.py compares them)
CUT, TABLE, PC, END, THREADS, QUIT, SPINS, IDLE_SPINS = 16, 32, 33, 34, 35, 36, 37, 38
LINES, LINE_CELLS, PARKED = 64, 16, 2
MAX_THREADS = 256
# Pauses (10 to 40 ns each) before a waiting thread yields: at a barrier longer than two threads' shares of an op
# differ, between steps longer than the host takes to pick a token and start the next.
_BARRIER_SPINS, _BETWEEN_STEPS_SPINS = 8_000, 40_000
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def usable_cpus() -> int:
    """Logical CPUs this process may run on."""
    if hasattr(psutil.Process, "cpu_affinity"):
        return len(psutil.Process().cpu_affinity())
    return psutil.cpu_count() or 1


def default_threads() -> int:
    """Physical cores this process may use: hyper-threads share the units the kernels are bound by."""
    return max(1, min(psutil.cpu_count(logical=False) or usable_cpus(), usable_cpus(), MAX_THREADS))


class Team:
    """`threads` threads that play programs together. Not reentrant: one play at a time."""

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.threads = threads
        self._kernels = kernels  # the code lives as long as this does
        self.control = aligned((LINES + LINE_CELLS * threads,), np.int64)
        self._control_address = self.control.ctypes.data
        self._wake = [threading.Event() for _ in range(threads)]
        self._started = False
        self.control[THREADS] = threads
        if threads <= usable_cpus():  # with more threads than CPUs the one waited for needs our CPU: yield at once
            self.control[SPINS], self.control[IDLE_SPINS] = _BARRIER_SPINS, _BETWEEN_STEPS_SPINS
        self._members = [
            threading.Thread(target=self._serve, args=(tid,), name=f"coli-{tid}", daemon=True)
            for tid in range(1, threads)
        ]

    def _start(self) -> None:
        """Put the members to work, at the first play: until then a program may still be writing down what else is to
        be compiled, and everything is compiled in one go."""
        self._kernels.load(TEAM_KERNELS)
        self._worker, self._publish, self._lead = (_ENTRY(self._kernels[name]) for name in TEAM_KERNELS)
        for member in self._members:
            member.start()
        self._started = True

    @property
    def cut_cell(self) -> np.ndarray:
        """The cell in which an op leaves its reason for stopping the program."""
        return self.control[CUT : CUT + 1]

    def _serve(self, tid: int) -> None:
        while not self._worker(self._control_address, tid):
            self._wake[tid].wait()
            self._wake[tid].clear()

    def _wake_sleepers(self) -> None:
        for tid in range(1, self.threads):
            parked = LINES + LINE_CELLS * tid + PARKED
            if self.control[parked]:
                self.control[parked] = 0
                self._wake[tid].set()

    def play(self, program: Program, start: int = 0, end: int | None = None) -> int:
        """Play from row `start` to row `end` (the table's own without one); returns the row to continue at, `end` when
        it came that far. A reason left in `cut_cell` says why it stopped earlier."""
        if not self._started:
            self._start()
        control = self.control
        control[CUT] = 0
        control[TABLE], control[PC], control[END] = program.address, start, len(program.table) if end is None else end
        if self._publish(self._control_address, 0):
            self._wake_sleepers()
        return self._lead(self._control_address, 0)

    def close(self) -> None:
        """End the workers; the team cannot play afterwards."""
        if self.control[QUIT] or not self._started:
            return
        self.control[QUIT] = 1
        if self._publish(self._control_address, 0):
            self._wake_sleepers()
        for member in self._members:
            member.join()
