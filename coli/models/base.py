"""What every model shares: its weights as the kernels want them, and the shape of a forward's answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import block_size, widen
from coli.formats.safetensors import STORAGE
from coli.kernels.packing import aligned_bytes, pack_int8, packed_bytes
from coli.program.ops import Weight

_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "fp8"}
_TABLE_KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # kernels/streams.py
_PIECE = 1 << 24  # weights repacked at a time


@dataclass(frozen=True)
class Rows:
    """Answer of a forward: logits [rows, vocab] and residual streams [rows, width] before the final mixer, float32.

    Both are views of the model's buffers, overwritten by the next forward."""

    logits: np.ndarray
    streams: np.ndarray


class Weights:
    """Dense weights of an open checkpoint.

    Matrices stay in the file's mapping (page cache reads at full memory speed, kernels.md section 1) unless
    `trunk_int8` repacks them as int8 rows; vectors become float32 copies. `nbytes` counts both."""

    def __init__(self, checkpoint: Checkpoint, *, trunk_int8: bool = False, activations: str = "int8") -> None:
        self.checkpoint, self.trunk_int8, self.activations = checkpoint, trunk_int8, activations
        self.nbytes = 0

    def vector(self, name: str) -> np.ndarray:
        """float32, flattened."""
        out = self._floats(name).ravel()
        self.nbytes += out.nbytes
        return out

    def _floats(self, name: str) -> np.ndarray:
        return widen(self.checkpoint.view(name), self.checkpoint[name].dtype)

    def norm(self, name: str) -> np.ndarray:
        """1 + w: the scale of a zero-centred RMS norm (model_spec 1.1, `rms1`)."""
        return self.vector(name) + np.float32(1)

    def conv(self, name: str) -> np.ndarray:
        """Depthwise taps, transposed to [K][C] so that lanes run along channels."""
        taps = self._floats(name)
        out = np.ascontiguousarray(taps.reshape(len(taps), taps.shape[-1]).T)
        self.nbytes += out.nbytes
        return out

    def matrix(self, name: str, *, keep: bool = False) -> Weight:
        """[n, k] as a GEMV weight. `keep`: never repacked to int8 (routers and gates: tiny, and choices hang on
        them)."""
        tensor = self.checkpoint[name]
        codes = self.checkpoint.view(name)
        n, k = tensor.shape
        kind = _KINDS[tensor.dtype]
        if kind == "fp8":
            weight = self._block_fp8(name, codes)
        elif self.trunk_int8 and not keep:
            weight = self._int8(codes, tensor.dtype)
        else:
            weight = Weight(kind, n, k, codes)
        self.nbytes += weight.nbytes
        return weight

    def _block_fp8(self, name: str, codes: np.ndarray) -> Weight:
        scales = np.ascontiguousarray(self._floats(name + "_scale_inv"))
        n, k = codes.shape
        return Weight("fp8", n, k, codes, scales, block_size(self.checkpoint.quantization))

    def _int8(self, codes: np.ndarray, dtype: str) -> Weight:
        """Packed in pieces of rows, so that the float32 copy of a piece is all that is ever held beside."""
        n, k = codes.shape
        data = aligned_bytes(packed_bytes("int8", n, k))
        rows = max(16, _PIECE // k // 16 * 16)
        for at in range(0, n, rows):
            piece = pack_int8(widen(codes[at : at + rows], dtype)).data
            start = packed_bytes("int8", at, k)
            data[start : start + len(piece)] = piece
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
