"""A second copy of the checkpoint's files on another disk: which of them can stand in, and which disk a read goes to.

Idea: a mirror is a folder with the same relative names. A file of it stands in when it has the size and the header (all
bytes before the first tensor) of the original, and the same bytes in places between: another fine-tune of the model has
its size and header, and would answer with other tokens. The others are left alone and said in one note. A read goes to
the disk that would finish it first: bytes under way there and this read's, by the rate the disk has shown. Both start
at the same assumed rate, and what was seen fades with every GB, so that a disk that was slow once is asked again.
Guarded by tests/formats/test_expert_reader.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coli.formats.strict import listing

_ASSUMED = 64 << 20, 0.064  # bytes and seconds a disk is taken to have shown before it was asked: 1 GB/s
_FADE = 1 << 30
_MOST = 64 << 20  # header bytes that are compared
_PLACES, _PLACE = 16, 4096  # between header and end, and the bytes compared there


class Disk:
    """Reads under way on one disk. Not for two threads at once: the reader has a lock."""

    def __init__(self) -> None:
        self._flying = 0
        self._since = 0.0
        self._bytes, self._busy = float(_ASSUMED[0]), _ASSUMED[1]

    def wait(self, nbytes: int) -> float:
        """Seconds until `nbytes` more would be there."""
        return (self._flying + nbytes) * self._busy / self._bytes

    def start(self, nbytes: int, now: float) -> None:
        if not self._flying:
            self._since = now
        self._flying += nbytes

    def end(self, nbytes: int, now: float, good: bool) -> None:
        self._flying -= nbytes
        self._busy += now - self._since  # as long as one read is under way the disk is busy
        self._since = now
        self._bytes += nbytes * good

    def fade(self) -> None:
        """Half of what was seen becomes what is assumed."""
        self._bytes, self._busy = (self._bytes + _ASSUMED[0]) / 2, (self._busy + _ASSUMED[1]) / 2


class Choice:
    """The original's disk and the mirror's."""

    def __init__(self) -> None:
        self.disks = Disk(), Disk()
        self._seen = 0

    def best(self, nbytes: int) -> int:
        """0 for the original, 1 for the mirror."""
        return int(self.disks[1].wait(nbytes) < self.disks[0].wait(nbytes))

    def start(self, disk: int, nbytes: int) -> None:
        self.disks[disk].start(nbytes, time.monotonic())

    def end(self, disk: int, nbytes: int, good: bool) -> None:
        self.disks[disk].end(nbytes, time.monotonic(), good)
        self._seen += nbytes
        if self._seen >= _FADE:
            self._seen = 0
            for each in self.disks:
                each.fade()


class Original(NamedTuple):
    """An open file of the checkpoint, and how many bytes are before its first tensor."""

    fd: int
    head: int


class Copy(NamedTuple):
    """An open file that can stand in for an original."""

    path: Path
    fd: int


def open_mirror(model: Path, mirror: Path, files: Mapping[Path, Original]) -> tuple[dict[Path, Copy], list[str]]:
    """(copies by path of the original, notes) of the checkpoint at `model`, folder or file."""
    base = model if model.is_dir() else model.parent
    copies: dict[Path, Copy] = {}
    unlike: list[str] = []
    for path, original in files.items():
        name = os.path.relpath(path, base)
        fd = _open_copy(mirror / name, original)
        if fd is None:
            unlike.append(name)
        else:
            copies[path] = Copy(mirror / name, fd)
    return copies, _notes(mirror, files, copies, unlike)


def _open_copy(path: Path, original: Original) -> int | None:
    """A descriptor of `path` where it can stand in for the original."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # never waits for a pipe
    except OSError:
        return None
    try:
        theirs, ours = os.fstat(fd), os.fstat(original.fd)
        alike = theirs.st_size == ours.st_size and not os.path.samestat(theirs, ours)
        if alike and _same(fd, original.fd, original.head) and _alike(fd, original.fd, original.head, ours.st_size):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _same(one: int, other: int, nbytes: int, step: int = 1 << 20) -> bool:
    ends = range(0, min(nbytes, _MOST), step)
    return all(os.pread(one, min(step, nbytes - at), at) == os.pread(other, min(step, nbytes - at), at) for at in ends)


def _alike(one: int, other: int, head: int, size: int) -> bool:
    """Whether two files have the same bytes in some places behind their header, spread to the end."""
    room = max(0, size - head - _PLACE)
    places = [head + room * i // (_PLACES - 1) for i in range(_PLACES)]
    return all(os.pread(one, _PLACE, at) == os.pread(other, _PLACE, at) for at in places)


def _notes(
    mirror: Path, files: Mapping[Path, Original], copies: Mapping[Path, Copy], unlike: Sequence[str]
) -> list[str]:
    if unlike:
        used = f"only {len(copies)} of {len(files)} files of" if copies else "none of"
        return [f"{used} the mirror {mirror} can be used: missing there, other in size, header or weights, or the "
                f"model's own files are {listing(unlike)}"]  # fmt: skip
    if any(os.fstat(copy.fd).st_dev == os.fstat(files[path].fd).st_dev for path, copy in copies.items()):
        return [f"{mirror} is on the same file system as the model: if that is one disk, a mirror gains nothing"]
    return []
