"""What every model shares: its weights as the kernels want them, and the shape of a forward's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coli.errors import ModelError
from coli.experts import KINDS
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import block_size, has_nan_code, widen
from coli.formats.safetensors import STORAGE, Tensor
from coli.kernels.packing import aligned_bytes, pack_int8, packed_bytes
from coli.program.ops import Weight

_TABLE_KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # kernels/streams.py
_DAMAGED = "the file is damaged: download it again"
# Routers, gates and the indexer: their numbers are compared, and a comparison swallows a NaN that elsewhere spreads
# into the streams, where it is seen. So these are looked at when loaded.
_SMALL = 1 << 21
_PIECE = 1 << 22  # weights repacked at a time


@dataclass(frozen=True)
class Rows:
    """Answer of a forward, float32: logits [rows, vocab] of the wanted rows, and residual streams [rows, width] before
    the final mixer of all rows (of the last piece, where a long call went in pieces).

    Both are views of the model's buffers, overwritten by the next forward."""

    logits: np.ndarray
    streams: np.ndarray


def never(name: str) -> bool:
    """No tensor is repacked."""
    return False


class Weights:
    """Dense weights of an open checkpoint.

    Matrices stay in the file's mapping (page cache reads at full memory speed, kernels.md section 1) unless
    `int8_rows(name)` has them repacked as int8 rows; vectors become float32 copies. `nbytes` counts both."""

    def __init__(
        self, checkpoint: Checkpoint, *, int8_rows: Callable[[str], bool] = never, activations: str = "int8"
    ) -> None:
        self.checkpoint, self.int8_rows, self.activations = checkpoint, int8_rows, activations
        self.nbytes = 0

    def vector(self, name: str) -> np.ndarray:
        """float32, flattened."""
        out = self._floats(name).ravel()
        self.nbytes += out.nbytes
        return out

    def _floats(self, name: str) -> np.ndarray:
        tensor = self.checkpoint[name]
        values = widen(self.checkpoint.view(tensor), tensor.dtype)
        if not np.isfinite(values).all():
            raise ModelError(f"{tensor.name} holds a value that is not finite", tensor.path, _DAMAGED)
        return values

    def norm(self, name: str) -> np.ndarray:
        """1 + w: the scale of a zero-centred RMS norm (model_spec 1.1, `rms1`)."""
        return self.vector(name) + np.float32(1)

    def conv(self, name: str) -> np.ndarray:
        """Depthwise taps, transposed to [K][C] so that lanes run along channels."""
        taps = self._floats(name)
        out = np.ascontiguousarray(taps.reshape(len(taps), taps.shape[-1]).T)
        self.nbytes += out.nbytes
        return out

    def matrix(self, name: str) -> Weight:
        """[n, k] as a GEMV weight."""
        tensor = self.checkpoint[name]
        kind = KINDS[tensor.dtype]
        if kind == "fp8":
            weight = self._block_fp8(name)
        elif self.int8_rows(name):
            weight = self._int8(tensor)
        else:
            n, k = tensor.shape
            if n * k <= _SMALL:
                self._floats(name)  # only for its check
            weight = Weight(kind, n, k, self.checkpoint.view(tensor))
        self.nbytes += weight.nbytes
        return weight

    def _block_fp8(self, name: str) -> Weight:
        scales = np.ascontiguousarray(self._floats(name + "_scale_inv"))
        tensor = self.checkpoint[name]
        n, k = tensor.shape
        codes = self.checkpoint.view(tensor)
        if has_nan_code(codes):  # the kernels decode a NaN code as a number
            raise ModelError(f"{tensor.name} holds a NaN", tensor.path, _DAMAGED)
        return Weight("fp8", n, k, codes, scales, block_size(self.checkpoint.quantization))

    def _int8(self, tensor: Tensor) -> Weight:
        """Read and packed in pieces of rows: neither the file's pages nor a float32 copy ever fill the memory."""
        n, k = tensor.shape
        data = aligned_bytes(packed_bytes("int8", n, k))
        rows = max(16, _PIECE // k // 16 * 16)
        row_bytes = tensor.nbytes // n
        for at in range(0, n, rows):
            piece = np.empty((min(rows, n - at), k), STORAGE[tensor.dtype])
            self.checkpoint.read_into(tensor, piece.reshape(-1).view(np.uint8).data, at * row_bytes, piece.nbytes)
            packed = pack_int8(widen(piece, tensor.dtype)).data
            start = packed_bytes("int8", at, k)
            data[start : start + len(packed)] = packed
        return Weight("int8" if self.activations == "int8" else "int8f", n, k, data)


class Embedding:
    """Rows of the embedding table, read from the file as they are needed: a table of a gigabyte of which a text uses a
    few thousand rows never becomes resident.

    `rows` [limit, H] holds the rows of the current call in the stored dtype, `kind` names it for the embed kernel."""

    def __init__(self, checkpoint: Checkpoint, limit: int) -> None:
        tensor = checkpoint["embed_tokens.weight"]
        if tensor.dtype not in _TABLE_KINDS:
            known = ", ".join(_TABLE_KINDS)
            raise ModelError(f"an embedding table of {tensor.dtype}", tensor.path, f"it may be {known}")
        self.kind = _TABLE_KINDS[tensor.dtype]
        self.rows = np.zeros((limit, tensor.shape[1]), STORAGE[tensor.dtype])
        self._checkpoint, self._tensor = checkpoint, tensor
        self._views = [memoryview(row).cast("B") for row in self.rows]
        self._row_bytes = self.rows.strides[0]

    def read(self, ids: np.ndarray) -> None:
        """Put the rows of these tokens in place. Raises ReadError."""
        for view, token in zip(self._views, ids.tolist(), strict=False):
            self._checkpoint.read_into(self._tensor, view, token * self._row_bytes)
