"""What a file holds of one expert's matrix, and how those bytes become a weight the kernels compute with.

A `Matrix` is a format: dtype, sizes, scales. `kind_of` chooses the GEMV kind it is computed in, `weight_bytes` says
what that takes in a slot, `convert` makes those bytes of the file's, on the thread that read them:

    F32 F16 BF16        as they are (read straight into the slot, never converted)
    F8_E4M3             codes as they are, their scales widened to float32
    ggml blocks         Q8_0 .. IQ4_XS: repacked N16, the same bytes (kernels/blocked.py); other types: float32, exactly
    I4_PAIRS I4_PLANAR  groups of 64, their multiples, rows: int4; other multiples of 32: g4_32; else float32
    I8                  rows: int8; groups that are multiples of 32: g8_32; else float32

`requantised` kinds (int4, int8) go through float32 and are the one lossy way; all others keep every code and scale.
Nibbles never leave the word they came in: eight codes are one uint32, put into the order of the N16 layout
(kernels/packing.py) by masks and shifts, so an int4 expert of 3 x 2048 x 512 takes some 2 ms and no float.
Invariant: scales that are not finite, and FP8 codes that are NaN, raise `NotFinite` with the place of the culprit among
the pieces. Guarded by tests/formats/test_experts.py and test_container.py, against plain NumPy decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coli.formats import ggml
from coli.formats.fp8 import blocks, dequantise, has_nan_code, widen
from coli.formats.safetensors import STORAGE
from coli.kernels.blocked import pack_blocks, pack_groups
from coli.kernels.packing import (
    GROUP,
    groups_of,
    pack_int4_codes,
    pack_int8_codes,
    packed_bytes,
    quantise_int4,
    quantise_int8,
)

KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "fp8"}
"""Dtypes that kernels read as they are stored."""
ITEM = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1}
PAIRS, PLANAR, BYTES = "I4_PAIRS", "I4_PLANAR", "I8"
"""Integer codes with scales beside: byte j holds inputs 2j and 2j + 1 in two's complement (the qwen36 container); 64
inputs in 32 bytes, j and j + 32, plus 8 (the sidecar); signed bytes."""
INTEGERS = (PAIRS, PLANAR, BYTES)
REQUANTISED = {"int4": "int4 groups of 64", "int8": "int8 rows"}
"""Kinds that other formats are rounded to on request."""
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_PIECE = 1 << 17  # weights requantised at a time: their floats stay in the L2 cache

Raw = Sequence[np.ndarray]
"""The pieces of a matrix as they were read, uint8: [codes] or [codes, scales]."""


class NotFinite(Exception):
    """A piece holds NaN or infinity."""

    def __init__(self, piece: int) -> None:
        super().__init__(f"piece {piece}")
        self.piece = piece


@dataclass(frozen=True)
class Matrix:
    """A stored matrix [n, k]. `group`: inputs that share a scale of INTEGERS, k for one scale a row; `block`, `scale`:
    of F8_E4M3."""

    dtype: str
    n: int
    k: int
    group: int = 0
    block: tuple[int, int] = (0, 0)
    scale: str = ""  # dtype of the FP8 scales

    @property
    def code_bytes(self) -> int:
        """What it takes in the file, without scales."""
        if self.dtype == PAIRS:
            return self.n * (self.k // 2)
        if self.dtype == PLANAR:
            return self.n * planar_row(self.k)
        return self.n * ggml.row_bytes("I8" if self.dtype == "F8_E4M3" else self.dtype, self.k)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the scales beside it; () when there are none."""
        if self.dtype == "F8_E4M3":
            return blocks((self.n, self.k), self.block)
        return (self.n, -(-self.k // self.group)) if self.dtype in INTEGERS else ()

    @property
    def words(self) -> str:
        """The format as the banner says it."""
        if self.dtype in INTEGERS:
            by = "rows" if self.group == self.k else f"groups of {self.group}"
            return f"{'int8' if self.dtype == BYTES else 'int4'} {by}"
        return "FP8" if self.dtype == "F8_E4M3" else KINDS.get(self.dtype, self.dtype)


def planar_row(k: int) -> int:
    """Bytes of a row of k inputs in PLANAR: whole groups of 64, the tail in pairs."""
    return k // 64 * 32 + (k % 64 + 1) // 2


def kind_of(m: Matrix, mode: str = "stored") -> str:
    """The GEMV kind (without "f" for float32 activations) it is computed in. `mode` "int4" and "int8" requantise what
    is not an integer already."""
    if m.dtype in INTEGERS:
        return _integer_kind(m)
    if mode != "stored":
        return mode
    if m.dtype in KINDS:
        return KINDS[m.dtype]
    return m.dtype.lower() if m.dtype in ggml.NATIVE else "f32"


def _integer_kind(m: Matrix) -> str:
    rows, by32 = m.group >= m.k, m.group % 32 == 0 and m.k % 32 == 0
    if m.dtype == BYTES:
        return "int8" if rows else "g8_32" if by32 else "f32"
    return "int4" if rows or m.group % GROUP == 0 else "g4_32" if by32 else "f32"


def weight_bytes(m: Matrix, kind: str) -> tuple[int, int]:
    """(bytes of the weight, bytes of float32 scales beside it) in a slot."""
    if kind in ITEM:
        return m.n * m.k * ITEM[kind], 4 * int(np.prod(m.scale_shape)) if kind == "fp8" else 0
    return packed_bytes(kind, m.n, m.k), 0


def convert(m: Matrix, kind: str, raw: Raw, out: np.ndarray) -> None:
    """Write the weight, `weight_bytes(m, kind)[0]` bytes, into `out`. May use `raw` up. Raises NotFinite."""
    if m.dtype in INTEGERS:
        _integers(m, kind, raw, out)
    elif kind in REQUANTISED:
        _requantise(floats(m, raw), kind, out)
    elif m.dtype in ggml.NATIVE and kind != "f32":
        _finite_halves(m, raw[0])
        pack_blocks(kind, raw[0].reshape(m.n, -1), out)
    else:
        out.view(np.float32).reshape(m.n, m.k)[...] = floats(m, raw)


def floats(m: Matrix, raw: Raw) -> np.ndarray:
    """float32 [n, k], exact but for the one rounding of code times scale. Raises NotFinite."""
    if m.dtype in INTEGERS:
        scales = _scales(m, raw)
        wide = np.repeat(scales, m.group, axis=1)[:, : m.k] if m.group < m.k else scales
        return _codes(m, raw[0]) * wide
    if m.dtype == "F8_E4M3":
        check_codes(raw, raw[0])
        values = dequantise(raw[0].reshape(m.n, m.k), _fp8_scales(m, raw, 1), m.block)
    elif m.dtype in KINDS:
        values = widen(raw[0].view(STORAGE[m.dtype]), m.dtype).reshape(m.n, m.k)
    else:
        values = ggml.dequantize(m.dtype, raw[0].reshape(m.n, -1))
    if not np.isfinite(values).all():
        raise NotFinite(0)
    return values


# ---- FP8 ---------------------------------------------------------------------------------------------------------


def check_codes(raw: Raw, out: np.ndarray) -> None:
    """FP8 codes that were read straight into the slot: no NaN."""
    if has_nan_code(raw[0]):
        raise NotFinite(0)


def widen_scales(m: Matrix, raw: Raw, out: np.ndarray) -> None:
    """FP8 scales as float32."""
    out.view(np.float32)[:] = _fp8_scales(m, raw, 0).reshape(-1)


def _fp8_scales(m: Matrix, raw: Raw, piece: int) -> np.ndarray:
    scales = widen(raw[piece].view(STORAGE[m.scale]), m.scale).reshape(m.scale_shape)
    if not np.isfinite(scales).all():
        raise NotFinite(piece)
    return scales


# ---- ggml blocks -------------------------------------------------------------------------------------------------


def _finite_halves(m: Matrix, raw: np.ndarray) -> None:
    """No float16 of any block is NaN or infinity."""
    halves = raw.view(np.uint16).reshape(-1, ggml.SIZES[m.dtype][1] // 2)
    for at in _HALVES.get(m.dtype, (0,)):
        if ((halves[:, at // 2] & 0x7C00) == 0x7C00).any():
            raise NotFinite(0)


# ---- integers ----------------------------------------------------------------------------------------------------


def _scales(m: Matrix, raw: Raw) -> np.ndarray:
    scales = raw[1].view(np.float32).reshape(m.scale_shape)
    if not np.isfinite(scales).all():
        raise NotFinite(1)
    return scales


def _integers(m: Matrix, kind: str, raw: Raw, out: np.ndarray) -> None:
    if kind == "f32":
        out.view(np.float32).reshape(m.n, m.k)[...] = floats(m, raw)
    elif kind == "int4":
        words = _pair_words(m, raw[0]) if m.dtype == PAIRS else _planar_words(m, raw[0])
        _lay_int4(words, _spread(_scales(m, raw), m, GROUP), out)
    elif kind == "int8":
        _lay_int8(_byte_words(m, raw[0]), _scales(m, raw)[:, 0], out)
    else:
        pack_groups(kind, _codes(m, raw[0]), _spread(_scales(m, raw), m, 32), out)


def _spread(scales: np.ndarray, m: Matrix, group: int) -> np.ndarray:
    """Scales [n, ceil(k / m.group)] as one for every `group` inputs, which divides m.group."""
    if m.group == group:
        return scales
    return scales[:, np.arange(-(-m.k // group)) * group // m.group]


def _codes(m: Matrix, raw: np.ndarray) -> np.ndarray:
    """int8 [n, k]."""
    if m.dtype == BYTES:
        return raw.view(np.int8).reshape(m.n, m.k)
    if m.dtype == PAIRS:
        return _unpaired(raw.reshape(m.n, -1) ^ np.uint8(0x88))
    rows, whole = raw.reshape(m.n, -1), m.k // 64 * 32
    codes = np.empty((m.n, m.k), np.int8)
    halves = codes[:, : 2 * whole].reshape(m.n, -1, 2, 32)
    body = rows[:, :whole].reshape(m.n, -1, 32)
    halves[:, :, 0], halves[:, :, 1] = body & 15, body >> 4
    codes[:, : 2 * whole] -= 8
    codes[:, 2 * whole :] = _unpaired(rows[:, whole:])[:, : m.k - 2 * whole]
    return codes


def _unpaired(pairs: np.ndarray) -> np.ndarray:
    """Codes int8 of bytes that hold two of them plus 8, the first in the low nibble."""
    return (np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)).view(np.int8) - np.int8(8)


def _padded(rows: np.ndarray, width: int, fill: int) -> np.ndarray:
    """uint8 rows as `width` bytes each, whole uint32 words."""
    if rows.shape[1] == width and rows.ctypes.data % 4 == 0:
        return rows
    wide = np.full((len(rows), width), fill, np.uint8)
    wide[:, : rows.shape[1]] = rows
    return wide


def _shuffled(words: np.ndarray) -> np.ndarray:
    """Nibbles 0 1 2 3 4 5 6 7 of every uint32 in the order 0 4 1 5 2 6 3 7, in place."""
    spare = np.empty_like(words)
    for shift, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        np.right_shift(words, np.uint32(shift), out=spare)
        spare ^= words
        spare &= np.uint32(mask)
        words ^= spare
        spare <<= np.uint32(shift)
        words ^= spare
    return words


def _pair_words(m: Matrix, raw: np.ndarray) -> np.ndarray:
    """uint32 [n, 8 * groups]: eight codes plus 8 each, inputs 0 4 1 5 2 6 3 7 from the lowest nibble on."""
    words = _padded(raw.reshape(m.n, -1), 32 * groups_of(m.k), 0).view(np.uint32)
    return np.bitwise_xor(_shuffled(words), np.uint32(0x88888888), out=words)


def _planar_words(m: Matrix, raw: np.ndarray) -> np.ndarray:
    """The same of PLANAR: input j of a group sits beside j + 32, wanted is j beside j + 4."""
    words = _padded(raw.reshape(m.n, -1), 32 * groups_of(m.k), 0x88).view(np.uint32)
    whole = m.k // 64
    planes = words[:, : 8 * whole].reshape(m.n, whole, 4, 2)
    even, odd, low = planes[..., 0].copy(), planes[..., 1].copy(), np.uint32(0x0F0F0F0F)
    made = words[:, : 8 * whole].reshape(m.n, whole, 2, 4)
    made[:, :, 0] = even & low | (odd & low) << np.uint32(4)
    made[:, :, 1] = even >> np.uint32(4) & low | odd & ~low
    words[:, 8 * whole :] = _shuffled(words[:, 8 * whole :].copy())
    return words


def _byte_words(m: Matrix, raw: np.ndarray) -> np.ndarray:
    """uint32 [n, 16 * groups]: four codes plus 128 each."""
    words = _padded(raw.reshape(m.n, -1), GROUP * groups_of(m.k), 0).view(np.uint32)
    return np.bitwise_xor(words, np.uint32(0x80808080), out=words)


def _lay_int4(words: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Words [n, 8 * groups] and scales [n, groups] into blocks of 16 rows (kernels/packing.py)."""
    n, groups = scales.shape
    body = out.view(np.uint32).reshape(-1, groups, 144)
    codes, ends = body[:, :, :128].reshape(-1, groups, 8, 16), body[:, :, 128:].view(np.float32)
    whole = n // 16
    codes[:whole] = words[: 16 * whole].reshape(whole, 16, groups, 8).transpose(0, 2, 3, 1)
    ends[:whole] = scales[: 16 * whole].reshape(whole, 16, groups).transpose(0, 2, 1)
    if n % 16:
        codes[whole], ends[whole] = 0x88888888, 0
        codes[whole, :, :, : n % 16] = words[16 * whole :].reshape(-1, groups, 8).transpose(1, 2, 0)
        ends[whole, :, : n % 16] = scales[16 * whole :].T


def _lay_int8(words: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Words [n, 16 * groups] and row scales [n] into blocks of 16 rows."""
    n, vectors = words.shape
    body = out.view(np.uint32).reshape(-1, 16 * vectors + 16)
    codes, ends = body[:, :-16].reshape(-1, vectors, 16), body[:, -16:].view(np.float32)
    whole = n // 16
    codes[:whole] = words[: 16 * whole].reshape(whole, 16, vectors).transpose(0, 2, 1)
    ends[:whole] = scales[: 16 * whole].reshape(whole, 16)
    if n % 16:
        codes[whole], ends[whole] = 0x80808080, 0
        codes[whole, :, : n % 16] = words[16 * whole :].T
        ends[whole, : n % 16] = scales[16 * whole :]


def _requantise(values: np.ndarray, kind: str, out: np.ndarray) -> None:
    """float32 [n, k] as int4 groups of 64 or int8 rows, rounded as kernels/packing.py does."""
    n, k = values.shape
    rows = max(16, _PIECE // k // 16 * 16)
    for at in range(0, n, rows):
        piece = values[at : at + rows]
        packed = pack_int4_codes(*quantise_int4(piece)) if kind == "int4" else pack_int8_codes(*quantise_int8(piece))
        start = packed_bytes(kind, at, k)
        out[start : start + len(packed.data)] = packed.data
