"""Experts on their way from the files into slots, on a few threads.

Idea: a `Load` says which expert goes where. One that is wanted now is as many jobs as its bytes lie in places, so that
several threads share it, all of a call's in file order; one that may be wanted later is a single job behind all those,
which can be hastened or cancelled. A job reads what lies side by side in the file at once; a format that kernels do not
read as it is stored is converted by the thread that read it. Jobs report to one queue.
Invariant: a thread touches nothing but the bytes of its slot and the queue. Who calls `next` counts the reports and
sees a `Load` once, when the last byte of it is in place or it has its error.
Guarded by tests/formats/test_experts.py (bytes, faults) and test_experts_background.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import numpy as np

from coli.errors import ColiError, ModelError
from coli.experts.forms import NotFinite
from coli.experts.reader import REQUEST
from coli.experts.records import Fill, LayerExperts, Piece, layer_name
from coli.formats.checkpoint import read_error
from coli.formats.readers import SOMETIME, SOON, ReadPool, Task

JOB = REQUEST  # bytes: an expert that is larger is read by several threads, each in one turn
_T = TypeVar("_T")
_Report = tuple["Load", ColiError | None, int]


class Reader(Protocol):
    """Reads ranges of files; for any number of threads."""

    def read(self, path: Path, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill all `buffers` from one contiguous range of `path`; returns its length. Raises OSError."""


class Why(Enum):
    """What an expert is read for."""

    WANTED = "a layer waits for it"
    GUESSED = "a layer will probably want it"
    WARM = "it was wanted often"


@dataclass(eq=False, slots=True)
class Load:
    """An expert on its way into `slot`, whose bytes are `target`. `left`: jobs that have not reported yet. `error`,
    `nbytes` (of the file): of those that have."""

    layer: int
    expert: int
    slot: int
    target: np.ndarray
    stamp: int
    why: Why
    left: int = 0
    error: ColiError | None = None
    nbytes: int = 0
    task: Task | None = None  # of one for later


class Loader:
    """Carries out loads for the layers of a store. For one caller at a time."""

    def __init__(self, layers: Sequence[LayerExperts], reader: Reader, threads: int) -> None:
        self._layers, self._reader = layers, reader
        self._pool = ReadPool(threads, "experts")
        self._reports: SimpleQueue[_Report] = SimpleQueue()

    def start(self, loads: Sequence[Load]) -> None:
        """Read these now, together."""
        jobs = [(load, fills) for load in loads for fills in _jobs(self._layers[load.layer].fills(load.expert))]
        for load, _ in jobs:
            load.left += 1
        for load, fills in sorted(jobs, key=lambda job: job[1][0].pieces[0].place):
            self._pool.submit(self._read, load, fills)

    def start_later(self, load: Load) -> None:
        """Read this one when nobody waits for anything; what was guessed before what is warm."""
        load.left, rank = 1, SOON if load.why is Why.GUESSED else SOMETIME
        load.task = self._pool.submit(self._read, load, None, rank=rank)

    def hasten(self, load: Load) -> None:
        if load.task is not None:
            self._pool.hasten(load.task)

    def cancel(self, load: Load) -> bool:
        """Whether this load for later had not begun: it never will."""
        return load.task is not None and load.task.cancel()

    def next(self, *, wait: bool) -> Load | None:
        """A load that is over, once; None where that would take waiting."""
        while True:
            try:
                load, error, nbytes = self._reports.get(wait)
            except Empty:
                return None
            load.error = load.error or error
            load.nbytes += nbytes
            load.left -= 1
            if not load.left:
                return load

    def close(self) -> None:
        """Finish what was started and end the threads."""
        self._pool.close()

    # ---- on the threads ----------------------------------------------------------------------------------------------

    def _read(self, load: Load, fills: list[Fill] | None) -> None:
        """Job: these parts of an expert, or all of them, from the file into its slot."""
        error: ColiError | None = None
        nbytes = 0
        try:
            nbytes = self.fill(load, self._layers[load.layer].fills(load.expert) if fills is None else fills)
        except ColiError as failed:
            error = failed
        except Exception as failed:
            error = ColiError(f"reading {self._name(load)} failed: {failed!r}", "experts")
        finally:
            self._reports.put((load, error, nbytes))

    def fill(self, load: Load, fills: list[Fill]) -> int:
        """Read and make some parts of an expert; returns the bytes read. Raises ReadError or ModelError."""
        targets = [load.target[fill.at : fill.at + fill.nbytes] for fill in fills]
        raws = [[target] if fill.direct else [np.empty(piece.nbytes, np.uint8) for piece in fill.pieces]
                for fill, target in zip(fills, targets, strict=True)]  # fmt: skip
        reads = [(piece, buffer) for fill, raw in zip(fills, raws, strict=True)
                 for piece, buffer in zip(fill.pieces, raw, strict=True)]  # fmt: skip
        nbytes = sum(self._read_run(load, run) for run in _runs(reads))
        for fill, raw, target in zip(fills, raws, targets, strict=True):
            try:
                if fill.make is not None:
                    fill.make(raw, target)
            except NotFinite as bad:
                tensor = fill.pieces[bad.piece].tensor
                raise ModelError(f"{self._name(load)} has NaN or infinity in {tensor.name}", tensor.path,
                                 "the file is damaged: download it again") from None  # fmt: skip
        return nbytes

    def _read_run(self, load: Load, run: list[tuple[Piece, np.ndarray]]) -> int:
        first = run[0][0]
        path, offset = first.tensor.path, first.tensor.offset + first.start
        try:
            return self._reader.read(path, [buffer.data for _, buffer in run], offset)
        except OSError as failed:
            raise read_error(failed, self._name(load), path) from failed

    def _name(self, load: Load) -> str:
        return f"expert {load.expert} of {layer_name(self._layers[load.layer].prefix)}"


def _jobs(fills: list[Fill]) -> list[list[Fill]]:
    """Fills by job: what lies side by side is read at once, up to JOB bytes. Where a fill needs pieces from several
    places, an expert is one job."""
    if any(len(fill.pieces) > 1 for fill in fills):
        return [fills]
    jobs: list[list[Fill]] = []
    for run in _runs([(fill.pieces[0], fill) for fill in fills]):
        nbytes = JOB
        for piece, fill in run:
            nbytes += piece.nbytes
            if nbytes > JOB:
                jobs.append([])
                nbytes = piece.nbytes
            jobs[-1].append(fill)
    return jobs


def _runs(items: list[tuple[Piece, _T]]) -> list[list[tuple[Piece, _T]]]:
    """Pieces grouped into contiguous ranges of one file, in file order."""
    runs: list[list[tuple[Piece, _T]]] = []
    end: tuple[str, int] | None = None
    for item in sorted(items, key=lambda item: item[0].place):
        piece, (path, offset) = item[0], item[0].place
        if (path, offset) == end:
            runs[-1].append(item)
        else:
            runs.append([item])
        end = path, offset + piece.nbytes
    return runs
