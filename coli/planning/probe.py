"""How fast this machine reads: the disk a model lies on, by expert records, and memory, by as many threads as compute.

Idea: measured as the engine works. `disk` reads records at random places of the model's own files, several at a time
and past the page cache (O_DIRECT, macOS's F_NOCACHE, elsewhere after dropping what was cached: then no record is read
twice); `memory` streams through arrays larger than any cache, with NumPy. Both take about as long as they are told to.
What was measured is kept as JSON in the cache folder, by machine, disk and record size, with its date: `coli plan`
predicts from it until `--probe` measures anew.
Invariant: a kept figure is never taken for another machine, disk or number of threads; a file that cannot be read as
this cache is left out and written anew by the next probe.
Guarded by tests/cli/test_plan.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import platform
import random
import re
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, repeat
from pathlib import Path
from threading import Barrier, Lock, Thread
from typing import Any, TypeVar

from coli import history
from coli.errors import ColiError
from coli.experts.page_cache import drop

_ALIGN = 4096  # a multiple of every disk's sectors
_ARRAYS = 1 << 30  # bytes that all threads together stream through at most, several times the largest caches
_ARRAY = 128 << 20  # bytes a thread streams through at most
_PLACES = 1 << 16  # records read at most before one is read again
_MOST = 1 << 20  # bytes of the cache file, far more than it ever has
_SUFFIXES = (".safetensors", ".gguf")
_PART = re.compile(r"(.*-)\d{5}(-of-\d{5}\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class DiskSpeed:
    """What random reads of `record` bytes by `threads` readers gave. `device`: where the disk is mounted, and its
    number; `direct`: past the page cache, and not after dropping it; `date`: of the measurement."""

    bytes_per_s: float
    direct: bool
    record: int
    threads: int
    nbytes: int
    seconds: float
    device: str
    machine: str
    date: str


@dataclass(frozen=True)
class MemorySpeed:
    """What `threads` threads read of memory together."""

    bytes_per_s: float
    threads: int
    machine: str
    date: str


@dataclass(frozen=True)
class Measured:
    """What is known about a machine for one model; None for what was never measured."""

    memory: MemorySpeed | None = None
    disk: DiskSpeed | None = None


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(threads: int, *, seconds: float = 0.5) -> MemorySpeed:
    """Measure how fast `threads` threads together read memory."""
    import numpy as np

    arrays = [np.zeros(min(_ARRAY, _ARRAYS // threads) // 4, np.int32) for _ in range(threads)]
    for array in arrays:
        array.fill(1)  # pages nobody wrote are all the same one
    took = _together(threads, seconds, lambda thread: map(_peak, repeat(arrays[thread])))
    return MemorySpeed(took.rate, threads, machine(), _today())


def _peak(array: Any) -> int:
    """Read all of an array as fast as one thread can; returns its bytes."""
    array.max()  # one comparison an element, 16 at a time, and without the GIL
    return array.nbytes


# ---- the disk --------------------------------------------------------------------------------------------------------


def disk(path: Path, *, record: int, seconds: float = 1.0, threads: int = 4) -> DiskSpeed:
    """Measure random reads of `record` bytes of the model at `path` (its folder or `.gguf` file). A model whose files
    are smaller than that is read in smaller pieces. Raises ColiError where nothing can be measured."""
    found = [file for file in files(path) if file.stat().st_size >= _ALIGN and not _hollow(file)]
    if not found:
        raise ColiError("there are no weights whose reading could be timed", path, "download the model first")
    largest = max(file.stat().st_size for file in found)
    length = min(-(-record // _ALIGN), largest // _ALIGN) * _ALIGN
    with contextlib.ExitStack() as opened:
        try:
            return _disk(path, [_open(file, opened) for file in found], length, seconds, threads)
        except OSError as error:
            raise ColiError(f"cannot be read: {error.strerror}", path, "check the disk") from error


def _disk(path: Path, opened: Sequence[tuple[int, int, bool]], length: int, seconds: float, threads: int) -> DiskSpeed:
    direct = all(way for _, _, way in opened)
    ends = list(accumulate(size // length for _, size, _ in opened))
    places = []
    for at in random.sample(range(ends[-1]), min(ends[-1], _PLACES)):
        which = bisect(ends, at)
        places.append((opened[which][0], (at - ends[which]) * length + opened[which][1] // length * length))
    if not direct:
        for fd, size, _ in opened:
            drop(fd, 0, size)
    took = _together(threads, seconds, _Reader(places, length, again=direct))
    return DiskSpeed(took.rate, direct, length, threads, took.nbytes, took.seconds, device(path), machine(), _today())


class _Reader:
    """Reads every place once in random order, then, where `again`, all over in another; for any number of threads."""

    def __init__(self, places: list[tuple[int, int]], length: int, *, again: bool) -> None:
        self._places, self._length = places, length
        self._lock, self._order = Lock(), self._shuffled(again)

    def _shuffled(self, again: bool) -> Iterator[tuple[int, int]]:
        while True:
            yield from random.sample(self._places, len(self._places))
            if not again:
                return

    def __call__(self, thread: int) -> Iterator[int]:
        with mmap.mmap(-1, self._length) as buffer, memoryview(buffer) as view:  # whole pages: direct reads want that
            while True:
                with self._lock:
                    place = next(self._order, None)
                if place is None:
                    return
                fd, offset = place
                yield os.preadv(fd, [view], offset)


def files(path: Path) -> list[Path]:
    """The files a model's weights lie in, by their names: those of a folder, or a `.gguf` file with its other parts."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file())
    part = _PART.fullmatch(path.name)
    beside = [path] if part is None else path.parent.iterdir()
    alike = [file for file in beside if part is None or _alike(file, part)]
    return sorted(file for file in alike if file.suffix.lower() in _SUFFIXES and file.is_file())


def _alike(file: Path, part: re.Match[str]) -> bool:
    other = _PART.fullmatch(file.name)
    return other is not None and other.groups() == part.groups()


def _hollow(file: Path) -> bool:
    """Whether most of the file was never written: such holes are read without a disk."""
    stat = file.stat()
    return 512 * getattr(stat, "st_blocks", stat.st_size) < stat.st_size // 2


def _open(file: Path, opened: contextlib.ExitStack) -> tuple[int, int, bool]:
    """(descriptor, size, whether its reads go past the page cache)."""
    size = file.stat().st_size
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # the file system may know no direct reads
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            opened.callback(os.close, fd)
            with mmap.mmap(-1, _ALIGN) as buffer, memoryview(buffer) as view:
                os.preadv(fd, [view], 0)
            return fd, size, True
    fd = os.open(file, os.O_RDONLY)
    opened.callback(os.close, fd)
    return fd, size, _uncached(fd)


def _uncached(fd: int) -> bool:
    """Ask macOS to read this descriptor past the page cache; False elsewhere."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        if hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
            return True
    return False


# ---- threads that do the same until time is up -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Took:
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds


def _together(threads: int, seconds: float, work: Callable[[int], Iterator[int]]) -> _Took:
    """Let `threads` threads each draw from `work(thread)`, which yields bytes done, for about so many seconds. Raises
    what one of them raised."""
    start, done = Barrier(threads + 1), [0] * threads
    failed: list[OSError] = []

    def draw(thread: int) -> None:
        start.wait()
        end = time.perf_counter() + seconds
        try:
            for nbytes in work(thread):
                done[thread] += nbytes
                if time.perf_counter() >= end:
                    return
        except OSError as error:
            failed.append(error)

    team = [Thread(target=draw, args=(thread,), daemon=True) for thread in range(threads)]
    for member in team:
        member.start()
    start.wait()
    begun = time.perf_counter()
    for member in team:
        member.join()
    if failed:
        raise failed[0]
    return _Took(sum(done), time.perf_counter() - begun)


# ---- what is kept ----------------------------------------------------------------------------------------------------

_Kept = TypeVar("_Kept", DiskSpeed, MemorySpeed)


def machine() -> str:
    """A name for this machine: a cache folder may be shared by several."""
    return f"{platform.node()} {platform.machine()} {os.cpu_count()}"


def device(path: Path) -> str:
    """A name for the disk that `path` lies on: where it is mounted, and the system's number for it."""
    real = Path(os.path.realpath(next(iter(files(path)), path)))  # files of the Hugging Face cache are links
    mount = next(folder for folder in (real, *real.parents) if os.path.ismount(folder) or folder == folder.parent)
    return f"{mount} {real.stat().st_dev}"


def cache_file(folder: Path | None) -> Path:
    """Where measurements are kept; `folder`: COLI_CACHE."""
    if folder is None:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("coli"))
    return folder / "probe.json"


def kept(folder: Path | None, path: Path, *, record: int, threads: int) -> tuple[Measured, list[str]]:
    """(what is kept for this machine, this many threads and the disk of `path`, notes): of several record sizes the
    nearest one."""
    memories, disks, notes = _read(cache_file(folder))
    mine, there = machine(), device(path)
    disks = [speed for speed in disks if (speed.machine, speed.device) == (mine, there)]
    return Measured(
        next((speed for speed in memories if (speed.machine, speed.threads) == (mine, threads)), None),
        min(disks, key=lambda speed: abs(math.log(speed.record / max(record, 1))), default=None),
    ), notes  # fmt: skip


def keep(folder: Path | None, measured: Measured) -> None:
    """Add measurements to the cache, in the place of older ones alike. Raises ColiError where it cannot be written."""
    path = cache_file(folder)
    with history.rewriting(path, "COLI_CACHE") as rewrite:
        memories, disks, _ = _read(path)
        if (new := measured.memory) is not None:
            memories = [old for old in memories if (old.machine, old.threads) != (new.machine, new.threads)] + [new]
        if (read := measured.disk) is not None:
            disks = [old for old in disks if _which(old) != _which(read)] + [read]
        document = {"coli_probe": 1, "memory": [*map(asdict, memories)], "disk": [*map(asdict, disks)]}
        rewrite(json.dumps(document, indent=1).encode())


def _which(speed: DiskSpeed) -> tuple[object, ...]:
    return speed.machine, speed.device, speed.record, speed.threads


def _read(path: Path) -> tuple[list[MemorySpeed], list[DiskSpeed], list[str]]:
    """(memory speeds, disk speeds, notes) of the cache file; none of an absent one."""
    try:
        data = history.read(path, _MOST, "COLI_CACHE")
        if not data:
            return [], [], []
        document = json.loads(data)
        if document["coli_probe"] != 1:
            raise ValueError
        return _speeds(MemorySpeed, document["memory"]), _speeds(DiskSpeed, document["disk"]), []
    except (ValueError, KeyError, TypeError):
        return [], [], [f"{path}: not measurements of this version, left out (coli plan --probe writes them anew)"]
    except ColiError as error:
        return [], [], [str(error)]


def _speeds(kind: type[_Kept], rows: list[dict[str, Any]]) -> list[_Kept]:
    """Rows as they were kept. Raises ValueError, KeyError or TypeError for anything else."""
    found = [kind(**{field.name: row[field.name] for field in fields(kind)}) for row in rows]
    if not all(0 < speed.bytes_per_s < math.inf and speed.threads > 0 and getattr(speed, "record", 1) > 0
               for speed in found):  # fmt: skip
        raise ValueError
    return found


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def avx512(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor is known to have AVX-512: Linux says so."""
    try:
        with open(info) as handle:
            return " avx512f " in handle.read(1 << 13)  # the first processor's lines
    except OSError:
        return False
