"""Writing safetensors files a block at a time, so that a kill at any instant costs one unfinished file.

Idea: a `Job` is one file, a sequence of `Block`s; a block names its tensors and yields their bytes in order, so the
header is known before the first byte is computed and no more than a few blocks are in memory. Heavy blocks (experts)
are computed ahead of their turn by a few threads; bytes reach the file in order all the same.
Order of events: NAME.part is written and synced, the state learns size and errors, NAME.part becomes NAME. So a file
that has its name is whole, and a state that knows more than the folder is corrected by writing that file again.
Invariant: the bytes are a function of source and options alone. Guarded by tests/convert/test_resume.py.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from coli.convert.report import Tally
from coli.errors import ColiError
from coli.formats.safetensors import STORAGE

PART = ".part"
HEADER_STEP = 8  # the format's own: a header's bytes are padded to it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Spec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * STORAGE[self.dtype].itemsize


@dataclass(frozen=True)
class Block:
    """Tensors that lie side by side. `run` yields their bytes in order and counts its errors."""

    specs: tuple[Spec, ...]
    run: Callable[[Tally], Iterable[np.ndarray]]
    heavy: bool = False


@dataclass(frozen=True)
class Job:
    """One file: at most `nbytes` long, made of `source_bytes` of the source. `step`: its data begins at a multiple."""

    name: str
    label: str
    nbytes: int
    source_bytes: int
    blocks: Callable[[], Sequence[Block]]
    step: int = HEADER_STEP


def header(specs: Iterable[Spec], step: int = HEADER_STEP) -> bytes:
    """The start of a safetensors file whose data begins at a multiple of `step`."""
    entries, end = {}, 0
    for spec in specs:
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % step)
    return struct.pack("<Q", len(text)) + text


def header_bound(specs: Iterable[Spec], step: int = HEADER_STEP) -> int:
    """At least the bytes of `header`, whatever dtypes the specs end up with."""
    return step + 8 + sum(len(spec.name) + 160 for spec in specs)


def write_part(job: Job, part: Path, pool: Executor, ahead: int, advance: Callable[[int], None]) -> Tally:
    """Write the job's bytes to `part` and sync them. `advance` hears of every piece. Raises ColiError."""
    tally = Tally()
    blocks = job.blocks()
    try:
        with open(part, "wb") as file:
            head = header((spec for block in blocks for spec in block.specs), job.step)
            file.write(head)
            advance(len(head))
            for block, arrays in _computed(blocks, pool, ahead, tally):
                _write_block(file, block, arrays, advance)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise write_error(error, part) from error
    return tally


def _write_block(file: BinaryIO, block: Block, arrays: Iterable[np.ndarray], advance: Callable[[int], None]) -> None:
    wanted, written = sum(spec.nbytes for spec in block.specs), 0
    for array in arrays:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        file.write(data)
        written += len(data)
        advance(len(data))
    if written != wanted:
        raise RuntimeError(f"{block.specs[0].name}: {written} bytes were made, {wanted} announced")


def _computed(
    blocks: Sequence[Block], pool: Executor, ahead: int, tally: Tally
) -> Iterator[tuple[Block, Iterable[np.ndarray]]]:
    """Blocks with their bytes, in order; up to `ahead` of the heavy ones are computed before their turn."""
    waiting: deque[tuple[Block, Future | None]] = deque()
    try:
        for block in [*blocks, *[None] * ahead]:
            if block is not None:
                waiting.append((block, pool.submit(_compute, block) if block.heavy else None))
            if len(waiting) > ahead or (block is None and waiting):
                first, future = waiting.popleft()
                if future is None:
                    yield first, first.run(tally)
                else:
                    arrays, own = future.result()
                    tally.merge(own.sums)
                    yield first, arrays
    finally:
        for _, future in waiting:
            if future is not None:
                future.cancel()


def _compute(block: Block) -> tuple[list[np.ndarray], Tally]:
    tally = Tally()
    return list(block.run(tally)), tally


def publish(part: Path, path: Path) -> None:
    """Give a synced file its name, for good. Raises ColiError."""
    try:
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(error, path) from error


def write_whole(path: Path, data: bytes) -> None:
    """A small file, whole or not at all. Raises ColiError."""
    part = path.with_name(path.name + PART)
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(error, part) from error
    publish(part, path)


def sync_folder(folder: Path) -> None:
    """A rename survives a power cut once its folder was synced."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(error: OSError, path: object) -> ColiError:
    hint = "make room, then give the same command again: it goes on"
    hint = hint if error.errno in _FULL else "give a folder you may write, on a disk that is well"
    return ColiError(f"cannot write: {error.strerror}", path, hint)
