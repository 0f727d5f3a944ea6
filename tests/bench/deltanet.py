"""The DeltaNet step against the machine's read+write bandwidth: `python -m tests.bench.deltanet [--threads 2]`.

One row over 400 layers of 48 heads x 128 x 128 float32 states (1.26 GB), visited in turn, with the program's own
interpreter and a barrier behind every layer. The ceiling is an in-place scale of the same memory, timed next to every
trial: one contiguous stream a thread, or four, whichever is faster. `share` is the median over trials of (state bytes
read + written / time) / (the ceiling beside it). A rival on the cores would make the barriers the limit, which the
ceiling does not have, so trials in which the threads did not get their cores are repeated, for a while; `quiet` says
whether that was enough.

`run_undo` then compares the two ways of coli/recurrent.py: verifies of R rows of which `kept` stand, over the 36 layers
of Qwen3.8-Flash-Next (113 MB of states), with the same `Slots` and `Log` a sequence has. All cases in turn, many
times; `us_layer` is the fastest time, `us_median` the median, over 36. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from coli.kernels import threads
from coli.kernels.abi import af, ai, share
from coli.kernels.deltanet import deltanet
from coli.kernels.packing import aligned_bytes
from coli.kernels.reference import gdn_prep_numpy
from coli.kernels.simd import ld_f32, mul, prefetch, splat, st_f32
from coli.recurrent import MAX_UNDOABLE, Log, Slots
from tests.bench.gemv import POOL, Team, kernel_address, make_pool

KEY_HEADS, HEADS, WIDTH = 16, 48, 128
STATE = HEADS * WIDTH * WIDTH * 4  # bytes of a layer
LAYERS = POOL // STATE
BAR = 0.80  # of the ceiling: issue 2
QUIET = 0.95  # of the cores' time must be ours for a trial to count
ATTEMPTS = 5  # times the trials asked for
MODEL_LAYERS = 36
LOG_ROW = -(-4 * (HEADS * WIDTH + KEY_HEADS * WIDTH + HEADS) // 64) * 64  # bytes
VERIFIES = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (6, 3), (6, 6))  # rows, of which stand


def scale(p, tid, nt):
    """The ceiling. 0 address, 1 bytes, 2 factor, 3 streams: x *= factor over this thread's part."""
    streams, factor = ai(p, 3), splat(af(p, 2))
    first, last = share(ai(p, 1) // (256 * streams), tid, nt)
    part = (last - first) * 256
    for i in range(0, part, 256):
        for s in range(streams):
            x = ai(p, 0) + first * 256 * streams + s * part + i
            for j in range(0, 256, 64):
                prefetch(x + 4096 + j)
            a, b, c, d = ld_f32(x), ld_f32(x + 64), ld_f32(x + 128), ld_f32(x + 192)
            st_f32(x, mul(a, factor))
            st_f32(x + 64, mul(b, factor))
            st_f32(x + 128, mul(c, factor))
            st_f32(x + 192, mul(d, factor))


def op(kernel: int, *args: int | float) -> np.ndarray:
    """A row of the op table with a barrier behind it."""
    row = np.zeros(threads.ROW_CELLS, np.int64)
    row[:2] = kernel, threads.BARRIER
    for i, value in enumerate(args):
        if isinstance(value, float):
            row.view(np.float64)[2 + i] = value
        else:
            row[2 + i] = value
    return row


class Call:
    """A call of the recurrence over `rows` random rows: its inputs, and op tables that make it."""

    def __init__(self, rows: int, threads_count: int) -> None:
        rng = np.random.default_rng(1)
        u, gates = rng.standard_normal((rows, (2 * KEY_HEADS + HEADS) * WIDTH)), rng.standard_normal((2, rows, HEADS))
        prepared = gdn_prep_numpy(u, *gates, np.full(HEADS, -0.05), np.zeros(HEADS), KEY_HEADS, WIDTH)
        self.rows = [x.astype(np.float32) for x in prepared]
        self.out = np.zeros((rows, HEADS * WIDTH), np.float32)
        self.step = np.array([rows, 0, 0, 0])
        self.scratch = aligned_bytes(4 * 64 * WIDTH * threads_count)

    def table(self, cells: np.ndarray, layers: int) -> np.ndarray:
        u, decay, beta = self.rows
        inputs = [self.step.ctypes.data, u.ctypes.data, u.shape[1], decay.ctypes.data, beta.ctypes.data]
        shape = [self.out.ctypes.data, self.out.shape[1], KEY_HEADS, HEADS, WIDTH, WIDTH, 0]
        log = [LOG_ROW, self.scratch.ctypes.data, 4 * 64 * WIDTH]
        logs = [(MAX_UNDOABLE - 1) * LOG_ROW * layer for layer in range(layers)]
        kernel = kernel_address(deltanet)
        return np.array([
            op(kernel, *inputs, cells.ctypes.data, layer * STATE, *shape, logs[layer], *log) for layer in range(layers)
        ])


def run(rows: int = 1, threads_count: int = 2, trials: int = 7) -> dict:
    """Measure `rows` rows at once: a dict with us_layer, gb_s, ceiling_gb_s, share, bar (None but for one row)
    and quiet."""
    pool, team = make_pool(), Team(threads_count)
    pool.view(np.float32)[:] = 0.01
    call = Call(rows, threads_count)
    cells = np.array([pool.ctypes.data, 0, 0, 0])
    table = call.table(cells, LAYERS)
    scaling = [
        np.array([op(kernel_address(scale), pool.ctypes.data, LAYERS * STATE, 1.0, streams)]) for streams in (1, 4)
    ]
    moved, measured, undisturbed = 2 * LAYERS * STATE, [], []
    team.seconds(table)
    while len(measured) < ATTEMPTS * trials and len(undisturbed) < trials:
        start, used = time.perf_counter(), time.process_time()
        seconds = team.seconds(table)
        measured.append((seconds, max(moved / team.seconds(way) for way in scaling)))
        if time.process_time() - used >= QUIET * threads_count * (time.perf_counter() - start):
            undisturbed.append(measured[-1])
    quiet = len(undisturbed) == trials
    measured = undisturbed if quiet else measured
    seconds = statistics.median(s for s, _ in measured)
    return {
        "rows": rows,
        "threads": threads_count,
        "us_layer": round(seconds / LAYERS * 1e6, 1),
        "gb_s": round(moved / seconds / 1e9, 2),
        "ceiling_gb_s": round(statistics.median(c for _, c in measured) / 1e9, 2),
        "share": round(statistics.median(moved / s / c for s, c in measured), 3),
        "bar": BAR if rows == 1 else None,
        "quiet": quiet,
    }


class Verify:
    """Verifies of `rows` rows, `kept` of which stand, one after another on one state."""

    def __init__(self, undo: str, rows: int, kept: int, threads_count: int) -> None:
        self.undo, self.rows, self.kept = undo, rows, kept
        floats, half = MODEL_LAYERS * STATE // 4, MODEL_LAYERS * (MAX_UNDOABLE - 1) * LOG_ROW // 4
        self.state = Slots(floats) if undo == "slots" else Log(floats, half, lambda recurrent: None)
        self.state.reserve(rows - 1)
        self.state.load(0.01)
        self.call = Call(rows, threads_count)
        self.call.step[3] = 1
        self.table = self.call.table(self.state.cells, MODEL_LAYERS)
        self.seconds: list[float] = []

    def play(self, team: Team) -> None:
        self.seconds.append(team.seconds(self.table))
        self.state.ran(self.rows, True)
        self.state.keep(self.kept, self.rows)

    def result(self) -> dict:
        return {
            "undo": self.undo,
            "rows": self.rows,
            "kept": self.kept,
            "us_layer": round(min(self.seconds[3:]) / MODEL_LAYERS * 1e6, 1),
            "us_median": round(statistics.median(self.seconds[3:]) / MODEL_LAYERS * 1e6, 1),
            "undo_mb": round(self.state.undo_bytes / 1e6, 1),
        }


def run_undo(threads_count: int = 2, trials: int = 60) -> list[dict]:
    """Slots against the log, one dict a case: undo, rows, kept, us_layer, us_median, undo_mb. Wants 4 GB."""
    team = Team(threads_count)
    cases = [Verify(undo, *verify, threads_count) for verify in VERIFIES for undo in ("slots", "log")]
    for _ in range(3 + trials):
        for case in cases:
            case.play(team)
    return [case.result() for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=7)
    args = parser.parse_args()
    results = []
    for rows in (1, 6):
        result = run(rows, args.threads, args.trials)
        results.append(result)
        print(
            f"deltanet R={rows} {result['us_layer']:7.1f} us/layer {result['gb_s']:6.1f} GB/s of "
            f"{result['ceiling_gb_s']:5.1f}  {result['share']:6.1%}",
            flush=True,
        )
    undo = run_undo(args.threads)
    for result in undo:
        print(
            f"{result['undo']:5s} R={result['rows']}, {result['kept']} stand {result['us_layer']:7.1f} us/layer "
            f"(median {result['us_median']:7.1f})  undo memory {result['undo_mb']:6.1f} MB",
            flush=True,
        )
    met = all(r["share"] >= r["bar"] for r in results if r["bar"])
    print(json.dumps({"bench": "deltanet", "bars_met": met, "results": results, "undo": undo}))


if __name__ == "__main__":
    main()
