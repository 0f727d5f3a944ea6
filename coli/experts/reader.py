"""How bytes of experts come from disk: through the page cache or past it, from one disk or two, tried more than once.

Idea: the store asks for a range of a file and buffers to put it in, from several threads at once; what a disk makes
difficult is settled here. Three options, all off by default:

    direct    O_DIRECT into an aligned buffer that every reading thread has, copied out from there (NumPy copies without
              the GIL). Whole sectors around the range are read. It takes a third of the processor time of a read that
              fills the page cache and is then dropped, and compute gets the rest
    mirror    a second copy of the files (coli/experts/mirror.py): a read goes where it would end sooner
    release   an expert is in memory once, in its slot: direct reads where the file system has them, and where not,
              what a read left in the page cache is dropped at once

Ranges below SMALL (scales kept apart from their codes) go through the page cache and stay there: many share a page, and
all together they are small. Descriptors that experts are read through are declared random: the kernel then reads the
range that was asked for, in large requests, and nothing beside it.
A read that fails is tried again another way: a direct one through the page cache, a mirror's from the original, an
original's once more, then from the mirror. When all have failed, the original's OSError leaves.
Invariant: a read that returns has filled every buffer with the file's bytes, whatever failed on the way.
Guarded by tests/formats/test_expert_reader.py and tests/models/test_faults.py.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, local
from typing import NamedTuple

import numpy as np

from coli.experts.mirror import Choice, Copy, Original, open_mirror
from coli.experts.page_cache import cached, declare_random, drop
from coli.formats.checkpoint import Checkpoint, fill

__all__ = ["BOUNCE", "REQUEST", "SMALL", "ExpertReader", "bounce_bytes"]

BOUNCE = 2 << 20  # bytes of a reading thread's aligned buffer, where reads are direct: one huge page
SMALL = 16 << 10
_SECTOR = 4096  # a multiple of every disk's
REQUEST = BOUNCE - 2 * _SECTOR  # bytes that a direct read takes in one turn, wherever they begin
_PATIENCE = 3  # failed reads until a mirror is left alone
_ORIGINAL, _MIRROR = 0, 1
_O_DIRECT = getattr(os, "O_DIRECT", 0)
Buffers = Sequence[memoryview]


def bounce_bytes(record: int) -> int:
    """Bytes of the buffer that a thread reads experts of at most `record` bytes through, past the page cache."""
    return min(BOUNCE, -(-record // _SECTOR) * _SECTOR + 2 * _SECTOR)


class _Way(NamedTuple):
    """One way to a file's bytes: which copy of it, and whether past the page cache."""

    copy: int
    direct: bool


class ExpertReader:
    """Reads the files of one open checkpoint that hold experts; for any number of threads.

    `files`: those to read, by default all that hold experts; `record`: bytes of the largest expert. `read_bytes`,
    `released_bytes`: so far; `bounce_bytes`: of the reading threads' buffers. `notes`: what a user must know at open;
    what comes up later goes to `say` (from any thread), which appends to them by default."""

    def __init__(
        self, checkpoint: Checkpoint, *, direct: bool = False, mirror: Path | None = None, release: bool = False,
        files: Collection[Path] | None = None, record: int = BOUNCE,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self.say: Callable[[str], None] = self.notes.append
        self.read_bytes = self.released_bytes = self.bounce_bytes = 0
        self._checkpoint, self._release, self._wished = checkpoint, release, direct
        self._lock, self._local = Lock(), local()
        self._choice, self._errors, self._refused = Choice(), 0, False
        self._piece = bounce_bytes(record)
        originals = _originals(checkpoint, files)
        copies: dict[Path, Copy] = {}
        if mirror is not None:
            copies, notes = open_mirror(checkpoint.folder, mirror, originals)
            self.notes += notes
        self._copies = {path: Copy(path, file.fd) for path, file in originals.items()}, copies
        self._direct: tuple[dict[Path, int], dict[Path, int]] = {}, {}
        for each in self._copies:
            for copy in each.values():
                declare_random(copy.fd)
        if direct or release:
            self._open_direct()

    def read(self, path: Path, buffers: Buffers, offset: int) -> int:
        """Fill all `buffers` from one contiguous range of `path`; returns its length. Raises OSError."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        errors: dict[int, OSError] = {}
        for way in self._ways(path, nbytes):
            try:
                self._read(way, path, buffers, offset, nbytes)
            except OSError as error:
                errors[way.copy] = error
                self._failed(way, error)
            else:
                return nbytes
        raise errors[_ORIGINAL]

    def cached_bytes(self) -> int:
        """Bytes of the page cache that the files hold now, whoever read them; 0 where the system does not say."""
        return sum(cached(self._checkpoint.mapped(path)) for path in self._copies[_ORIGINAL])

    def close(self) -> None:
        """Close what was opened here; no read may be under way."""
        for fds in self._direct:
            while fds:
                os.close(fds.popitem()[1])
        while self._copies[_MIRROR]:
            os.close(self._copies[_MIRROR].popitem()[1].fd)

    # ---- ways ----------------------------------------------------------------------------------------------------

    def _ways(self, path: Path, nbytes: int) -> Iterator[_Way]:
        """The ways to read a range, best first, each asked for when the one before has failed."""
        mirrored = path in self._copies[_MIRROR]
        if mirrored and self._errors < _PATIENCE:
            with self._lock:
                mirror_first = self._choice.best(nbytes) == _MIRROR
            if mirror_first:
                yield self._way(_MIRROR, path, nbytes)
                mirrored = False
        yield self._way(_ORIGINAL, path, nbytes)
        yield _Way(_ORIGINAL, False)
        if mirrored:
            yield self._way(_MIRROR, path, nbytes)

    def _way(self, copy: int, path: Path, nbytes: int) -> _Way:
        return _Way(copy, nbytes >= SMALL and not self._refused and path in self._direct[copy])

    def _failed(self, way: _Way, error: OSError) -> None:
        """Learn from a failed read; said once."""
        if way.direct and error.errno == errno.EINVAL:
            self._refuse(error)
        elif way.copy == _MIRROR:
            with self._lock:
                self._errors += 1
                errors = self._errors
            if errors == 1:
                self.say(f"a read of the mirror failed ({error.strerror}): the original is read instead")
            elif errors == _PATIENCE:
                self.say(f"{_PATIENCE} reads of the mirror failed: only the original is read from now on")

    # ---- reading -------------------------------------------------------------------------------------------------

    def _read(self, way: _Way, path: Path, buffers: Buffers, offset: int, nbytes: int) -> None:
        good = False
        with self._lock:
            self._choice.start(way.copy, nbytes)
        try:
            if way.direct:
                self._read_direct(self._direct[way.copy][path], buffers, offset, nbytes)
            elif way.copy == _ORIGINAL:
                self._checkpoint.preadv(path, buffers, offset)
            else:
                fill(self._copies[_MIRROR][path].fd, buffers, offset)
            good = True
        finally:
            with self._lock:
                self._choice.end(way.copy, nbytes, good)
                self.read_bytes += nbytes * good
        copy = self._copies[way.copy].get(path)
        if self._release and not way.direct and nbytes >= SMALL and copy is not None:
            released = drop(copy.fd, offset, nbytes)
            with self._lock:
                self.released_bytes += released

    def _read_direct(self, fd: int, buffers: Buffers, offset: int, nbytes: int) -> None:
        """The sectors around the range, as many at a time as the bounce buffer holds."""
        bounce, end = self._bounce(), offset + nbytes
        targets = [np.frombuffer(buffer, np.uint8) for buffer in buffers if buffer.nbytes]
        while offset < end:
            start = offset // _SECTOR * _SECTOR
            wanted = min(self._piece, -(-end // _SECTOR) * _SECTOR - start)
            got = min(os.preadv(fd, [bounce.data[:wanted]], start), end - start) - (offset - start)
            if got <= 0:
                raise OSError(0, "unexpected end of file")
            _hand_out(bounce[offset - start : offset - start + got], targets)
            offset += got

    def _bounce(self) -> np.ndarray:
        """This thread's buffer. A huge page is one segment of a request; 512 scattered ones halve some disks' rate."""
        if not hasattr(self._local, "bounce"):
            memory = mmap.mmap(-1, 2 * BOUNCE)  # what is never touched costs nothing
            if self._piece == BOUNCE and hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without: only speed differs
                    memory.madvise(mmap.MADV_HUGEPAGE)
            both = np.frombuffer(memory, np.uint8)
            start = -both.ctypes.data % BOUNCE
            self._local.bounce = both[start : start + self._piece]
            with self._lock:
                self.bounce_bytes += self._piece
        return self._local.bounce

    def _open_direct(self) -> None:
        """Descriptors for direct reads, until a file system refuses one."""
        for copies, direct in zip(self._copies, self._direct, strict=True):
            for path, copy in copies.items():
                try:
                    if not _O_DIRECT:
                        raise OSError(errno.EINVAL, "not on this system")
                    direct[path] = os.open(copy.path, os.O_RDONLY | _O_DIRECT)
                except OSError as error:
                    self._refuse(error)
                    return

    def _refuse(self, error: OSError) -> None:
        """No direct reads from now on, which who wished for them is told. Their descriptors stay open: another thread
        may be in one."""
        with self._lock:
            first, self._refused = not self._refused, True
        if first and self._wished:
            self.say(f"no direct reads ({error.strerror}): experts are read through the page cache")


def _hand_out(source: np.ndarray, targets: list[np.ndarray]) -> None:
    """Copy `source` into the first bytes of `targets`, which becomes what is left to fill."""
    while len(source):
        count = min(len(source), len(targets[0]))
        targets[0][:count] = source[:count]
        source, targets[0] = source[count:], targets[0][count:]
        if not len(targets[0]):
            targets.pop(0)


def _originals(checkpoint: Checkpoint, files: Collection[Path] | None) -> dict[Path, Original]:
    """Descriptor and header bytes of the files that hold experts, sidecars' among them."""
    tensors = [*checkpoint.tensors.items(), *((tensor.name, tensor) for tensor in checkpoint.ignored)]
    for beside in checkpoint.beside.values():
        tensors += beside.tensors.items()
    wanted = {t.path for name, t in tensors if ".mlp.experts." in name} if files is None else set(files)
    heads: dict[Path, int] = {}
    fds: dict[Path, int] = {}
    for _, tensor in tensors:
        if tensor.path in wanted:
            heads[tensor.path] = min(tensor.offset, heads.get(tensor.path, tensor.offset))
            if tensor.path not in fds:
                fds[tensor.path] = checkpoint.fd(tensor)
    return {path: Original(fds[path], heads[path]) for path in sorted(fds)}
