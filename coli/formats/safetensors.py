"""One safetensors file: an 8-byte length, a JSON header, then the tensors' bytes.

Idea: the header is checked whole before anything trusts it, so whoever holds a `Tensor` may read
`nbytes` at `offset` of its file and knows that shape, dtype and size agree.
Layout (https://github.com/huggingface/safetensors#format): u64 header length N (little endian), N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end]}}, data; offsets count from the end of the header.
Invariant: a hostile, truncated or joined file ends in one ModelError that names file and tensor.
Guarded by tests/formats/test_safetensors.py, which cuts a file at every section and mutates it at random.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from coli.errors import ModelError
from coli.formats.ggml import row_bytes
from coli.formats.strict import AGAIN, parse_object, show

HEADER_LIMIT = 256 << 20  # the reference reader stops at 100 MB; a header names some 100,000 tensors in 20 MB
RANK_LIMIT = 16
_AHEAD = 1 << 18  # bytes: a header has some 100 for each tensor
DIM_LIMIT = 1 << 62

STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1",
        "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
    }.items()
}  # fmt: skip
"""NumPy dtype that holds a file dtype; BF16 and FP8 stay codes (uint16, uint8)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies: `nbytes` bytes at the absolute `offset` of `path`, row major.

    `dtype` is a safetensors name or, in a GGUF file, a type of coli/formats/ggml.py. `pitch` is 0 but for a matrix that
    is some columns of a wider one: then its rows start `pitch` bytes apart, and `nbytes` counts only its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    pitch: int = 0

    def stored(self) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """dtype and shape of the array that holds it as it is in the file: a quantised row is its bytes."""
        storage = STORAGE.get(self.dtype)
        if storage is not None:
            return storage, self.shape
        return np.dtype(np.uint8), (*self.shape[:-1], row_bytes(self.dtype, self.shape[-1]))


def open_file(path: Path) -> int:
    """A read-only descriptor of the regular file `path` (never a pipe or a device). Raises ModelError."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot open: {getattr(error, 'strerror', error)}", path, "check that the file exists "
                         "and may be read") from None  # fmt: skip
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelError("not a regular file", path, "give the folder of a Hugging Face checkpoint")
    return fd


def read_ahead(fd: int) -> None:
    """Have the system fetch where the header is, so that the headers of many files come at once, not one by one."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # no more than advice
            os.posix_fadvise(fd, 0, _AHEAD, os.POSIX_FADV_WILLNEED)


def read_header(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by the name the file uses. Raises ModelError."""
    fd = open_file(path)
    try:
        return header_of(fd, path)
    finally:
        os.close(fd)


def header_of(fd: int, path: Path) -> dict[str, Tensor]:
    """`read_header` for a file that is open already."""
    size = os.fstat(fd).st_size
    head = _pread(fd, path, 8, 0)
    if head == b"version ":
        raise ModelError("a Git LFS pointer, not the weights", path, "run `git lfs pull` in the checkpoint's folder")
    if len(head) < 8:
        raise ModelError(f"{size} bytes are too short for a safetensors file", path, AGAIN)
    length = int.from_bytes(head, "little")
    if length > HEADER_LIMIT:
        raise ModelError(f"header claims {length} bytes, over the limit of {HEADER_LIMIT}", path,
                         "not a safetensors file, or a damaged one: download it again")  # fmt: skip
    if 8 + length > size:
        raise ModelError(f"truncated inside the header: it needs {8 + length} bytes, the file has {size}", path, AGAIN)
    raw = _pread(fd, path, length, 8)
    if len(raw) != length:
        raise ModelError("truncated inside the header", path, AGAIN)
    entries = parse_object(raw, path, "header", unique=True)
    entries.pop("__metadata__", None)
    base = 8 + length
    found = {name: _tensor(name, entry, path, base, size) for name, entry in entries.items()}
    check_spans(list(found.values()), path, base, size)
    return found


def _pread(fd: int, path: Path, nbytes: int, offset: int) -> bytes:
    parts: list[bytes] = []
    try:
        while nbytes:
            part = os.pread(fd, nbytes, offset)
            if not part:
                break
            parts.append(part)
            nbytes, offset = nbytes - len(part), offset + len(part)
    except OSError as error:
        raise ModelError(f"cannot read the header: {error.strerror}", path, "check the disk") from None
    return b"".join(parts)


def _sizes(values: object, most: int) -> TypeGuard[list[int]]:
    """Whether it is a list of at most `most` sizes. A plain loop: it runs 130,000 times at an open."""
    if not isinstance(values, list) or len(values) > most:
        return False
    for value in values:  # noqa: SIM110
        if type(value) is not int or not 0 <= value < DIM_LIMIT:
            return False
    return True


def _tensor(name: str, entry: object, path: Path, base: int, size: int) -> Tensor:
    """One checked header entry; the fast path of a file with 60,000 of them."""
    if not isinstance(entry, dict):
        raise _bad(name, path, "its header entry is not an object")
    dtype, shape, span = str(entry.get("dtype")), entry.get("shape"), entry.get("data_offsets")
    storage = STORAGE.get(dtype)
    if storage is None:
        raise _bad(name, path, f"unknown dtype {show(dtype)}", f"known are {', '.join(STORAGE)}")
    if not _sizes(shape, RANK_LIMIT):
        raise _bad(name, path, f"shape {show(shape)} is not a list of sizes")
    if not _sizes(span, 2) or len(span) != 2:
        raise _bad(name, path, f"data_offsets {show(span)} are not two offsets")
    begin, end = span
    nbytes = prod(shape) * storage.itemsize
    if end - begin != nbytes:
        raise _bad(name, path, f"{dtype} {shape} takes {nbytes} bytes, its data_offsets span {end - begin}")
    if base + end > size:
        raise _bad(name, path, f"truncated: its data ends at byte {base + end}, the file at {size}")
    return Tensor(name, dtype, tuple(shape), path, base + begin, nbytes)


def _bad(name: str, path: Path, what: str, hint: str = AGAIN) -> ModelError:
    return ModelError(f"tensor {show(name)}: {what}", path, hint)


def check_spans(tensors: list[Tensor], path: Path, base: int, size: int, alignment: int = 1) -> None:
    """No two tensors share a byte, and nothing follows the last one (`cat a b > c` would) but padding."""
    end, owner = base, ""
    for tensor in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        if tensor.offset < end:
            raise _bad(tensor.name, path, f"its bytes overlap those of {show(owner)}")
        end, owner = tensor.offset + tensor.nbytes, tensor.name
    if size - end not in range(-end % alignment + 1):
        raise ModelError(f"{size - end} bytes follow the last tensor: the file is damaged, or two files were joined",
                         path, "keep the split files as they were downloaded, side by side in one folder")  # fmt: skip
