"""A fence around everything kernels touch: one byte beyond a buffer and the process dies of SIGSEGV.

Kernels work on raw addresses, so Numba's bounds checks see nothing of them (NUMBA_BOUNDSCHECK=1 leaves 38 of our 47
object files as they are). Here every buffer of a program, state, cache and weight gets pages of its own with a
forbidden one right behind it (`end`) or right before it (`start`), and a reduced exactness set is played:

    python -m tests.fence end|start     prints one JSON line
    python -m tests.fence broken        reads one float too many, to prove that the fence holds: dies of SIGSEGV

`end` puts the last byte at the fence, so starts are aligned to items only: kernels may assume no more than that.
Runs as a process of its own (tests/test_fence.py): it replaces allocators for good.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import mmap
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Fence:
    """Allocates behind or before a forbidden page."""

    def __init__(self, side: str) -> None:
        self.side, self.buffers = side, 0

    def bytes(self, size: int) -> np.ndarray:
        """Zeroed uint8 [size]; the memory goes with the last view of it."""
        self.buffers += 1
        room = -(-max(size, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, room + PAGE)
        whole = np.frombuffer(memory, np.uint8)
        forbidden = 0 if self.side == "start" else room
        if _mprotect(whole.ctypes.data + forbidden, PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        first = PAGE if self.side == "start" else room - size
        return whole[first : first + size]

    def zeros(self, shape: Any, dtype: Any = np.float64) -> np.ndarray:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.bytes(size).view(dtype).reshape(shape)

    def copy(self, array: np.ndarray | None) -> np.ndarray | None:
        if array is None:
            return None
        fenced = self.zeros(array.shape, array.dtype)
        fenced[...] = array
        return fenced

    def around(self, function: Callable[..., np.ndarray]) -> Callable[..., Any]:
        """`function`, its answer copied to fenced memory."""
        return lambda *args, **kwargs: self.copy(function(*args, **kwargs))

    def install(self) -> None:
        """Put it in the place of every allocator whose memory a kernel sees."""
        import coli.experts.store
        import coli.kernels.packing
        import coli.models.base
        import coli.models.qwen38_mtp
        import coli.models.qwen38_program
        import coli.program.builder
        import coli.recurrent
        import coli.speculation.vocabulary
        import coli.state

        models = coli.models
        fence = self

        class Numpy:
            zeros, arange = staticmethod(fence.zeros), staticmethod(fence.around(np.arange))

            def __getattr__(self, name: str) -> Any:
                return getattr(np, name)

        for module in (coli.kernels.packing, coli.program.builder, coli.recurrent, models.base):
            module.aligned_bytes = fence.bytes
        for module in (coli.state, coli.recurrent, models.base, models.qwen38_mtp, models.qwen38_program,
                       coli.experts.store, coli.program.builder, coli.speculation.vocabulary):  # fmt: skip
            module.np = Numpy()
        coli.program.builder.row_pointers = fence.around(coli.program.builder.row_pointers)
        coli.experts.store._arena = fence.bytes
        weights = models.base.Weights
        matrix = weights.matrix
        for name in ("vector", "norm", "conv"):
            setattr(weights, name, fence.around(getattr(weights, name)))
        weights.matrix = lambda self, name: fence.weight(matrix(self, name))

    def weight(self, weight: Any) -> Any:
        arrays = {f.name: self.copy(value) for f in dataclasses.fields(weight)
                  if isinstance(value := getattr(weight, f.name), np.ndarray)}  # fmt: skip
        return dataclasses.replace(weight, **arrays)


def play(side: str) -> dict[str, Any]:
    """The reduced set: every kind of engine of the harness, forced and random drafts."""
    fence, began = Fence(side), time.perf_counter()
    fence.install()
    from coli.settings import MOST_DRAFTS
    from coli.speculation.options import Speculation
    from tests.speculation import harness
    from tests.speculation.engines import EVERY, Engines

    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder))
        for name in EVERY:
            recording = engines.recording(name, 1)
            most, lookup = MOST_DRAFTS[recording.engine.name], recording.engine.head is None
            forced = Speculation(drafts=most, most=most, lookup=lookup, gate=False, mtp_force="cycle",
                                 lookup_force="cycle")  # fmt: skip
            for options in (forced, Speculation(drafts=0, most=most)):
                harness.compare(recording, options, name)
            for seed in range(2):
                harness.fuzz(recording, seed, name)
        engines.close()
    return {"fence": side, "tokens": harness.Compared.tokens, "verifies": harness.Compared.verifies, "faults": 0,
            "buffers": fence.buffers, "seconds": round(time.perf_counter() - began, 1)}  # fmt: skip


def broken() -> None:
    """A kernel is told of one row more than there is."""
    fence = Fence("end")
    fence.install()
    from tests.speculation.engines import Engines

    with tempfile.TemporaryDirectory() as folder:
        engine = Engines(Path(folder))["f32"]
        engine.model.forward([3, 4], engine.model.new_state())
        state = engine.model.new_state()
        state.k, state.v = state.k[:, :, :1].copy(), state.v[:, :, :1].copy()
        state.k, state.v = fence.copy(state.k), fence.copy(state.v)
        engine.model.forward([3, 4, 5], state)


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        broken()
    else:
        print(json.dumps(play(sys.argv[1])))
