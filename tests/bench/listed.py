"""Scoring 16,000 of a head's 248,320 rows: `python -m tests.bench.listed [--threads N]`.

Lists of one head in turn, together all of its rows, so that every call reads from memory: *dense* ones (neighbouring
tokens, what an empty history gives), *mixed* (three quarters dense, the rest anywhere) and *scattered*. A call's share
is its list's bytes over time, against a bare read of the same memory next to every trial (tests/bench/gemv.py). For
int8, whose rows lie in blocks of 16, it is also shown which bytes the list costs. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import numpy as np

from coli.kernels.linear import listed
from coli.kernels.linear_reference import prepare_numpy
from coli.kernels.packing import GRAIN, LISTED, PREPARED_KINDS, block_bytes
from coli.kernels.tiles import tile
from tests.bench.gemv import POOL, Team, _row, fill, kernel_address, make_pool, read_ceiling

ROWS, WIDTH, SIZE = 248320, 2560, 16000
LISTS = ROWS // SIZE


def lists(shape: str) -> np.ndarray:
    """int64 [LISTS, SIZE], disjoint, each ascending."""
    scattered = np.random.default_rng(4).permutation(LISTS * SIZE).reshape(LISTS, SIZE)
    if shape == "scattered":
        return np.sort(scattered, axis=1)
    dense = np.arange(LISTS * SIZE).reshape(LISTS, SIZE)
    if shape == "mixed":  # the last quarter of every window is shared out among all lists
        part = SIZE // 4
        rest = np.random.default_rng(4).permutation(dense[:, -part:].reshape(-1)).reshape(LISTS, part)
        return np.sort(np.concatenate([dense[:, :-part], rest], axis=1), axis=1)
    return dense


class Case:
    """One kind and shape of list: a table with one `listed` for each of the lists, and all it points to."""

    def __init__(self, pool: np.ndarray, kind: str, shape: str) -> None:
        self.ids = lists(shape)
        x = np.random.default_rng(2).standard_normal((1, WIDTH), dtype=np.float32)
        self.x = prepare_numpy(x, kind) if kind in PREPARED_KINDS else x
        self.y, self.step, self.count = np.zeros(SIZE, np.float32), np.array([1, 0, 0, 0]), np.array([SIZE])
        self.xs, self.ys = np.array([self.x.ctypes.data]), np.array([self.y.ctypes.data])
        self.tiles = np.array([0, kernel_address(tile(LISTED + kind, 1), 10), *[0] * 6])
        packed = kind == "int8"
        tail = (self.tiles.ctypes.data, GRAIN, self.count.ctypes.data, int(packed))
        self.table = np.array([
            _row(kernel_address(listed), self.step.ctypes.data, pool.ctypes.data, 0, self.xs.ctypes.data,
                 self.ys.ctypes.data, ids.ctypes.data, WIDTH, 1, 1, *tail)
            for ids in self.ids
        ])  # fmt: skip
        row = block_bytes(kind, WIDTH) / 16 if packed else WIDTH * 2
        self.list_bytes = SIZE * row
        blocks = np.mean([len(np.unique(ids >> 4)) for ids in self.ids])
        self.read_bytes = blocks * 16 * row if packed else self.list_bytes


def run(threads_count: int = 2, trials: int = 3, on_result: Callable[[dict], None] = lambda result: None) -> list[dict]:
    """Measure every case; a list of dicts: kind, list, threads, ms (a call), share (of the bytes that must be read,
    against a bare read), read_mb and list_mb."""
    pool, team, results = make_pool(), Team(threads_count), []
    for kind in ("bf16", "int8"):
        fill(pool, kind)
        for shape in ("dense", "mixed", "scattered"):
            case = Case(pool[:POOL], kind, shape)
            team.seconds(case.table[:1])
            seconds, shares = [], []
            for _ in range(trials):
                ceiling = read_ceiling(team, pool)
                seconds.append(team.seconds(case.table) / LISTS)
                shares.append(case.read_bytes / seconds[-1] / ceiling)
            results.append({
                "kind": kind, "list": shape, "threads": threads_count, "ms": round(statistics.median(seconds) * 1e3, 2),
                "share": round(statistics.median(shares), 3), "list_mb": round(case.list_bytes / 1e6, 1),
                "read_mb": round(case.read_bytes / 1e6, 1),
            })  # fmt: skip
            on_result(results[-1])
    return results


def _show(result: dict) -> None:
    print(
        f"{result['kind']:5s} {result['list']:10s} {result['ms']:6.2f} ms  {result['read_mb']:6.1f} MB read for "
        f"{result['list_mb']:5.1f} MB listed  {result['share']:6.1%} of a bare read",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trials", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps({"bench": "listed", "results": run(args.threads, args.trials, _show)}))


if __name__ == "__main__":
    main()
