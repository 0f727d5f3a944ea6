"""The team and the op table: every thread runs the same table of kernel calls, in step.

A *program* is an int64 table. Row: [kernel address, flags, up to 22 arguments]. `play` is the interpreter that each
thread of the team runs over it: call the kernel with this thread's number, meet the others at a barrier where the
flags say so, go on. One Python call plays a whole decode step: 0.05 us an op, 0.3 us with a barrier
(kernels.md section 2), where a Python call per op would cost microseconds and prange tens of them.

A kernel that needs the host (an expert to read, n-gram rows to wait for) stores a nonzero reason in the control
block's CUT cell; the players stop behind that op, the host does the work and plays on from there. Between two ops
that may cut there is always another barrier, or a fast thread's second reason could be read as the first
(coli/program/builder.py checks).

Workers are Python threads inside `worker`. Waiting is bounded: pause instructions first, then sched_yield, so a
rival process gets the core, then short sleeps; a worker idle for some milliseconds returns to Python and sleeps on an
event. How long to spin is the team's choice (SPINS, IDLE_SPINS): yielding too early hands a whole time slice to a
rival for a wait of microseconds. Spinning at all is wrong beside the thread that is waited for: under a rival's load
the kernel may put two of us on one CPU. So every thread leaves its CPU's number in its line, and who waits for a
thread last seen on the same CPU yields at once (a rival then costs half the rate, not nine tenths of it).

Control block, int64 cells by name below; per thread one 128-byte line from LINES on.
"""

from __future__ import annotations

import sys

from numba import njit, types

from coli.kernels.abi import ai, call_kernel, cpu_pause, exchange, ld1_i64, load_acquire, st1_i64, store_release

ROW_CELLS = 24
ARGS = 22
BARRIER, MAY_CUT = 1, 2

# cells of the control block, as int64 indices
GENERATION, CUT, TABLE, PC, END, THREADS, QUIT, SPINS, IDLE_SPINS = 0, 16, 32, 33, 34, 35, 36, 37, 38
LINES = 64  # thread t's line begins at LINES + 16 * t
PHASE, SEEN, PARKED, DONE, CPU = 0, 1, 2, 3, 4

_YIELDS = 4000  # before a waiting thread sleeps between looks, and an idle worker goes to sleep for good
_NAP_US = 50

sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sched_getcpu = types.ExternalFunction("sched_getcpu", types.int32())
_KNOWS_CPU = sys.platform == "linux"


@njit(inline="always")
def _line(ctl, tid):
    return ctl + 8 * (LINES + 16 * tid)


@njit(inline="always")
def _here(line):
    """Leave this thread's CPU in its line."""
    if _KNOWS_CPU:
        st1_i64(line + 8 * CPU, types.int64(sched_getcpu()))


@njit(inline="always")
def _patience(ctl, kind, line, other):
    """Pauses to spend on waiting for the thread of line `other`."""
    if _KNOWS_CPU and ld1_i64(line + 8 * CPU) == ld1_i64(other + 8 * CPU):
        return 0
    return ai(ctl, kind)


@njit
def _wait_at_least(ctl, cell, value, line, other):
    spins, limit = 0, _patience(ctl, SPINS, line, other)
    while load_acquire(cell) < value:
        spins += 1
        if spins < limit:
            cpu_pause()
        elif spins < limit + _YIELDS:
            sched_yield()
        else:
            usleep(_NAP_US)


@njit(inline="always")
def _barrier(ctl, tid, nt):
    if nt > 1:
        mine = _line(ctl, tid)
        phase = ld1_i64(mine) + 1
        _here(mine)
        store_release(mine, phase)
        for other in range(nt):
            if other != tid:
                _wait_at_least(ctl, _line(ctl, other), phase, mine, _line(ctl, other))


@njit
def play(ctl, tid):
    """Run the table from PC to END; returns the row to continue at (behind a cut, or END)."""
    table, pc, end, nt = ai(ctl, TABLE), ai(ctl, PC), ai(ctl, END), ai(ctl, THREADS)
    while pc < end:
        row = table + pc * ROW_CELLS * 8
        call_kernel(ld1_i64(row), row + 16, tid, nt)
        flags = ld1_i64(row + 8)
        pc += 1
        if flags & BARRIER:
            _barrier(ctl, tid, nt)
        if flags & MAY_CUT and load_acquire(ctl + 8 * CUT) != 0:
            break
    return pc


def worker(ctl, tid):
    """Play every generation the leader publishes. Returns 0 to go to sleep, 1 to end."""
    line = _line(ctl, tid)
    while True:
        seen = ld1_i64(line + 8 * SEEN)
        _here(line)
        spins, limit = 0, _patience(ctl, IDLE_SPINS, line, _line(ctl, 0))
        while load_acquire(ctl) == seen:
            spins += 1
            if spins < limit:
                cpu_pause()
                continue
            sched_yield()
            if spins > limit + _YIELDS:
                # Announce the sleep, then look once more: a leader that published before it could see PARKED
                # is seen here; one that publishes later sees PARKED and sets the event.
                exchange(line + 8 * PARKED, 1)
                if load_acquire(ctl) == seen:
                    return 0
                exchange(line + 8 * PARKED, 0)
                spins = 0
        seen += 1
        st1_i64(line + 8 * SEEN, seen)
        if ai(ctl, QUIT):
            return 1
        play(ctl, tid)
        store_release(line + 8 * DONE, seen)


def publish(ctl, unused):
    """Hand the job in the control block to the workers; returns how many of them are asleep."""
    exchange(ctl, ld1_i64(ctl) + 1)
    asleep = 0
    for tid in range(1, ai(ctl, THREADS)):
        asleep += load_acquire(_line(ctl, tid) + 8 * PARKED)
    return asleep


def lead(ctl, unused):
    """Play as thread 0, then wait for the others; returns the row to continue at."""
    pc = play(ctl, 0)
    generation = ld1_i64(ctl)
    for tid in range(1, ai(ctl, THREADS)):
        _wait_at_least(ctl, _line(ctl, tid) + 8 * DONE, generation, _line(ctl, 0), _line(ctl, tid))
    return pc


ENTRIES = {"worker": worker, "publish": publish, "lead": lead}
