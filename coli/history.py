"""A small file that later runs learn from: where it lies, and how it survives crashes, rivals and full disks.

Idea: what the draft vocabulary's counts (coli/speculation/counts.py) and the experts' (coli/experts/usage.py) share. A
history is read whole and replaced whole. `rewriting` holds a lock on the file itself (POSIX flock, tried again when the
file turns out to have been replaced meanwhile; an absent file is first made empty), so that whoever reads the file
inside and puts back what it read and its own loses nobody's. The new bytes are on the disk in `<name>.part` before they
get the name: a crash at any moment leaves the old file or the new one, and at most that one `.part`, which the next
save replaces. Where flock does not exist (Windows) the replacement alone keeps the file whole, and of two saves in the
same moment one may be lost. Invariant: nothing is put in the place of a file that its caller could not read under the
lock. Guarded by tests/speculation/test_vocabulary.py and tests/models/test_usage.py (two processes, 200 kills, a full
disk).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from coli.errors import ColiError
from coli.models.find import NANO

_PATIENCE = 5.0  # seconds to wait for another process's save, which takes milliseconds
_LOCKS = importlib.util.find_spec("fcntl") is not None


def beside(model: Path, name: str, state: str) -> Path:
    """Where a model's history `name` lies: in its folder (of a model that is one file: `<file><name>` beside it), or in
    the user's state folder, below `state`, where that is read-only or the shipped model's."""
    folder, own = (model.parent, model.name + name) if model.is_file() else (model, name)
    if os.access(folder, os.W_OK) and not same(folder, NANO):
        return folder / own
    import platformdirs

    known = hashlib.sha256(os.fsencode(os.path.realpath(model))).hexdigest()[:20]
    return Path(platformdirs.user_state_dir("coli")) / state / (known + name)


def same(a: Path, b: Path) -> bool:
    """Whether two paths are one file, now or once they are there."""
    try:
        return os.path.samefile(a, b)
    except OSError:  # one of them is not there yet
        return os.path.realpath(a) == os.path.realpath(b)


def hint(variable: str) -> str:
    """What to do about a file that is not the history that `variable` should name."""
    return f"delete or move it, or name another file in {variable}"


def read(path: Path, most: int, variable: str) -> bytes:
    """The file's bytes, at most one more than `most`; none of an absent one. Raises ColiError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ColiError("is not a regular file", path, hint(variable))
        with open(path, "rb") as handle:
            return handle.read(most + 1)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise ColiError(f"cannot be read ({error.strerror})", path, hint(variable)) from error


@contextlib.contextmanager
def rewriting(path: Path, variable: str) -> Iterator[Callable[[bytes], None]]:
    """Nobody else rewrites `path` meanwhile; what this yields puts bytes in its place. Raises ColiError, the file being
    as it was."""
    path = Path(os.path.realpath(path))  # a link stays a link
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            yield lambda data: _replace(path, data)
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise ColiError(what, path, f"{variable} names another file") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else holds the lock of `path`."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    end = time.monotonic() + _PATIENCE
    while True:
        with open(path, "a+b") as handle:
            if _held(path, handle, fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                yield
                return
        if time.monotonic() > end:
            raise ColiError("is locked by another process", path, "the next save tries again")
        time.sleep(0.005)


def _held(path: Path, handle: BinaryIO, flock: Callable[[int, int], None], how: int) -> bool:
    """Whether `handle` could be locked and is still what `path` names."""
    try:
        flock(handle.fileno(), how)
        return os.path.samestat(os.fstat(handle.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _replace(path: Path, data: bytes) -> None:
    # Under the lock a part that is there already was left by a crash; without locks each process has its own.
    part = path.with_name(f"{path.name}.part" if _LOCKS else f"{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with open(part, "xb") as handle:  # never through somebody's link
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        with contextlib.suppress(FileNotFoundError):
            os.chmod(part, stat.S_IMODE(os.stat(path).st_mode))
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    with contextlib.suppress(OSError, AttributeError):  # the data is safe; not every system can sync a folder
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
