"""What every model shares: its weights as the kernels want them, and the shape of a forward's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from coli.errors import ModelError
from coli.experts.forms import KINDS
from coli.formats import ggml
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import block_size, has_nan_code, widen
from coli.formats.safetensors import STORAGE, Tensor
from coli.kernels.blocked import blocked_bytes, pack_blocks
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
    """Answer of a forward, float32: logits [rows, vocab] of the wanted rows, and residual streams [rows, width], what
    the draft head takes, of all rows (of the last piece, where a long call went in pieces).

    Both are views of the model's buffers, overwritten by the next forward."""

    logits: np.ndarray
    streams: np.ndarray


def never(name: str) -> bool:
    """No tensor is repacked."""
    return False


class Weights:
    """Dense weights of an open checkpoint.

    Float and FP8 matrices stay in the file's mapping (page cache reads at full memory speed, kernels.md section 1)
    unless `int8_rows(name)` has float ones repacked as int8 rows. Quantised GGUF types that kernels compute on are laid
    out for them, byte for byte (coli/kernels/blocked.py); others are decoded to float32, which `notes` tells. Vectors
    become float32 copies. `nbytes` counts all.

    `centred`: the family's norms hold w - 1; what a converter has already done to the values the checkpoint's traits
    say."""

    def __init__(
        self, checkpoint: Checkpoint, *, int8_rows: Callable[[str], bool] = never, activations: str = "int8",
        centred: bool = True,
    ) -> None:  # fmt: skip
        self.checkpoint, self.int8_rows, self.activations = checkpoint, int8_rows, activations
        self._norm_base = np.float32(centred and not checkpoint.traits.norms_folded)
        self.nbytes = 0
        self.decoded: dict[str, int] = {}  # dtype without a kernel -> bytes its matrices take as float32
        self.kinds: dict[str, int] = {}  # GEMV kind -> bytes of the matrices loaded
        self._matrices: dict[str, Weight] = {}
        self._norms: dict[str, np.ndarray] = {}

    def vector(self, name: str) -> np.ndarray:
        """float32, flattened."""
        out = self._floats(self.checkpoint[name]).ravel()
        self.nbytes += out.nbytes
        return out

    def _floats(self, tensor: Tensor) -> np.ndarray:
        values = floats(self.checkpoint.view(tensor), tensor.dtype)
        if not np.isfinite(values).all():
            raise ModelError(f"{tensor.name} holds a value that is not finite", tensor.path, _DAMAGED)
        return values

    def norm(self, name: str) -> np.ndarray:
        """The scale of an RMS norm: 1 + w where norms are zero-centred (model_spec 1.1, `rms1`), else w. Asked again,
        the same array."""
        if name not in self._norms:
            self._norms[name] = self.vector(name) + self._norm_base
        return self._norms[name]

    def decay(self, name: str) -> np.ndarray:
        """-exp(A_log) (model_spec 1.5)."""
        values = self.vector(name)
        return values if self.checkpoint.traits.decay_ready else -np.exp(values)

    def conv(self, name: str) -> np.ndarray:
        """Depthwise taps, transposed to [K][C] so that lanes run along channels."""
        taps = self._floats(self.checkpoint[name])
        out = np.ascontiguousarray(taps.reshape(len(taps), taps.shape[-1]).T)
        self.nbytes += out.nbytes
        return out

    def matrix(self, name: str) -> Weight:
        """[n, k] as a GEMV weight; asked again, the same one."""
        if name not in self._matrices:
            self._matrices[name] = self._load(name)
        return self._matrices[name]

    def _load(self, name: str) -> Weight:
        tensor = self.checkpoint[name]
        n, k = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
        if n * k <= _SMALL and tensor.dtype != "F8_E4M3":
            self._floats(tensor)  # only for its check
        if tensor.dtype == "F8_E4M3":
            weight = self._block_fp8(name)
        elif tensor.dtype in ggml.NATIVE:
            weight = self._blocked(tensor, n, k)
        elif tensor.dtype in ggml.DECODED:
            weight = Weight("f32", n, k, self._floats(tensor).reshape(n, k))
            self.decoded[tensor.dtype] = self.decoded.get(tensor.dtype, 0) + weight.nbytes
        elif self.int8_rows(name):
            weight = self._int8(tensor, n, k)
        else:
            weight = Weight(KINDS[tensor.dtype], n, k, self.checkpoint.view(tensor).reshape(n, k))
        self.nbytes += weight.nbytes
        self.kinds[weight.kind] = self.kinds.get(weight.kind, 0) + weight.nbytes
        return weight

    def _block_fp8(self, name: str) -> Weight:
        scales = np.ascontiguousarray(self._floats(self.checkpoint[name + "_scale_inv"]))
        tensor = self.checkpoint[name]
        n, k = tensor.shape
        codes = self.checkpoint.view(tensor)
        if has_nan_code(codes):  # the kernels decode a NaN code as a number
            raise ModelError(f"{tensor.name} holds a NaN", tensor.path, _DAMAGED)
        return Weight("fp8", n, k, codes, scales, block_size(self.checkpoint.quantization))

    def _kind(self, kind: str) -> str:
        """The kernels of an integer kind that take int8 or float32 activations."""
        return kind if self.activations == "int8" else kind + "f"

    def _blocked(self, tensor: Tensor, n: int, k: int) -> Weight:
        kind = tensor.dtype.lower()
        data = aligned_bytes(blocked_bytes(kind, n, k))
        for at, piece in self._pieces(tensor, n, k):
            start = blocked_bytes(kind, at, k)
            pack_blocks(kind, piece, data[start : start + blocked_bytes(kind, len(piece), k)])
        return Weight(self._kind(kind), n, k, data)

    def _int8(self, tensor: Tensor, n: int, k: int) -> Weight:
        data = aligned_bytes(packed_bytes("int8", n, k))
        for at, piece in self._pieces(tensor, n, k):
            packed = pack_int8(widen(piece.view(STORAGE[tensor.dtype]), tensor.dtype)).data
            start = packed_bytes("int8", at, k)
            data[start : start + len(packed)] = packed
        return Weight(self._kind("int8"), n, k, data)

    def _pieces(self, tensor: Tensor, n: int, k: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, uint8 [rows, row bytes]) of a whole matrix, read piece by piece: neither the file's pages nor
        another copy ever fill the memory. Pieces but the last are whole blocks of 16 rows."""
        rows, row_bytes = max(16, _PIECE // k // 16 * 16), tensor.nbytes // n
        for at in range(0, n, rows):
            piece = np.empty((min(rows, n - at), row_bytes), np.uint8)
            self.checkpoint.read_into(tensor, piece.reshape(-1).data, at * row_bytes, piece.nbytes)
            yield at, piece


def floats(stored: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of what `Checkpoint.view` gives of a dtype, block FP8 apart."""
    return ggml.dequantize(dtype, stored) if dtype in ggml.QUANTISED else widen(stored, dtype)


class Embedding:
    """Rows of the embedding table, read from the file as they are needed: a table of a gigabyte of which a text uses a
    few thousand rows never becomes resident.

    `rows` [limit, H] holds the rows of the current call in the stored dtype (float32 of a quantised one), `kind` names
    it for the embed kernel."""

    def __init__(self, checkpoint: Checkpoint, limit: int) -> None:
        tensor = checkpoint["embed_tokens.weight"]
        self._quantised = tensor.dtype in ggml.QUANTISED
        dtype = "F32" if self._quantised else tensor.dtype
        if dtype not in _TABLE_KINDS:
            known = ", ".join(_TABLE_KINDS)
            raise ModelError(f"an embedding table of {tensor.dtype}", tensor.path, f"it may be {known}")
        self.kind = _TABLE_KINDS[dtype]
        self.rows = np.zeros((limit, tensor.shape[1]), STORAGE[dtype])
        self._checkpoint, self._tensor = checkpoint, tensor
        self._row_bytes = tensor.nbytes // tensor.shape[0]
        self._stored: np.ndarray = np.zeros((limit, self._row_bytes), np.uint8) if self._quantised else self.rows
        self._views = [row.data.cast("B") for row in self._stored]

    def read(self, ids: np.ndarray) -> None:
        """Put the rows of these tokens in place. Raises ReadError."""
        for view, token in zip(self._views, ids.tolist(), strict=False):
            self._checkpoint.read_into(self._tensor, view, token * self._row_bytes)
        if self._quantised:
            self.rows[: len(ids)] = ggml.dequantize(self._tensor.dtype, self._stored[: len(ids)])
