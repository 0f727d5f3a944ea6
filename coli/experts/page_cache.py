"""The system's copy of file pages: asked not to grow, dropped, counted. Where a system lacks one of the three, nothing
happens; only memory and speed differ. Guarded by tests/formats/test_expert_reader.py."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress

import numpy as np

_PAGE = mmap.PAGESIZE
_STEP = 4 << 30  # bytes asked about at a time: a byte of answer a page


def declare_random(fd: int) -> None:
    """Reads of this descriptor come in no order: the kernel reads what is asked for at once, and nothing ahead."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def drop(fd: int, offset: int, nbytes: int) -> int:
    """Drop the pages a range touches, also those it shares with its neighbours (who would read 4 KiB again at worst);
    returns the bytes of the range, or 0 where nothing can be dropped."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    start = offset // _PAGE * _PAGE
    with suppress(OSError):
        os.posix_fadvise(fd, start, -(-(offset + nbytes) // _PAGE) * _PAGE - start, os.POSIX_FADV_DONTNEED)
        return nbytes
    return 0


def cached(mapping: mmap.mmap) -> int:
    """Bytes of a mapped file that are in memory; 0 where nobody says."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return 0
    mincore.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
    start, pages = np.frombuffer(mapping, np.uint8).ctypes.data, 0
    for at in range(0, len(mapping), _STEP):
        length = min(_STEP, len(mapping) - at)
        found = np.zeros(-(-length // _PAGE), np.uint8)
        if mincore(start + at, length, found.ctypes.data) == 0:
            pages += int(np.count_nonzero(found & 1))
    return pages * _PAGE
