"""Weights quantised in blocks (GGML's types and two of our own): their N16 layout, packing, and exact decoding.

*Idea*: a file block stays what it is, byte for byte; 16 weight rows are only laid side by side. A file block is cut
into units (4 bytes of codes, a 2-byte scale) and every unit of 16 rows becomes one vector: lane l = row l. So packing
is a strided copy per part of the block, 10 GB/s on one core without the GIL, and the packed weight has the file's size
(but for the padding of n to 16 rows, with zeros). What the bits of a unit mean is the tile's business
(kernels/tiles_blocked.py) and, for NumPy, `decode`'s.

    block of 16 rows  = k / elements superblocks, one behind the other
    superblock        = the parts of the file block in the order of `Layout.parts`, each 16 x its bytes

`own` kinds: g8_32 is float32 scale | 32 signed codes, g4_32 float32 scale | 16 bytes of nibbles (low: element i, high:
element i + 16; code + 8); `pack_groups` makes them from codes and scales.

*Prepared activations* (op `quantize_blocks`), one form for all these kinds, 48 bytes for each 32 inputs:

    int8 codes [32] | float32 scale | float32 scale * (sum of the codes) | int32 -(sum of the codes)
    | int16 -(sum of the first 16) | int16 -(sum of the last 16)

*Invariant*: `decode` equals gguf.quants.dequantize bit for bit, whatever the bytes (tests/kernels/test_blocked.py).
Everything here is NumPy: nothing imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Part = tuple[int, int, int]  # first byte in the file block, bytes, bytes of a unit


@dataclass(frozen=True)
class Layout:
    """How a kind stores `elements` weights of a row in `nbytes`, and in which order the N16 form has its parts."""

    elements: int
    nbytes: int
    parts: tuple[Part, ...]


_D: Part = (0, 2, 2)  # the float16 scale that most blocks begin with
_MIN: Part = (2, 2, 2)

BLOCKED = {
    "q8_0": Layout(32, 34, ((2, 32, 4), _D)),
    "q4_0": Layout(32, 18, ((2, 16, 4), _D)),
    "q4_1": Layout(32, 20, ((4, 16, 4), _D, _MIN)),
    "q5_0": Layout(32, 22, ((6, 16, 4), (2, 4, 4), _D)),
    "q5_1": Layout(32, 24, ((8, 16, 4), (4, 4, 4), _D, _MIN)),
    "q4_k": Layout(256, 144, ((16, 128, 4), (4, 12, 4), _D, _MIN)),
    "q5_k": Layout(256, 176, ((48, 128, 4), (16, 32, 4), (4, 12, 4), _D, _MIN)),
    "q6_k": Layout(256, 210, ((0, 128, 4), (128, 64, 4), (192, 16, 4), (208, 2, 2))),
    "iq4_nl": Layout(32, 18, ((2, 16, 4), _D)),
    "iq4_xs": Layout(256, 136, ((8, 128, 4), (4, 4, 4), (2, 2, 2), _D)),
    "g8_32": Layout(32, 36, ((4, 32, 4), (0, 4, 4))),
    "g4_32": Layout(32, 20, ((4, 16, 4), (0, 4, 4))),
}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of the iq4 codes

_UNITS = {2: np.uint16, 4: np.uint32}


def base_kind(kind: str) -> str:
    """The kind whose bytes a GEMV kind reads: "q4_0f" (float32 activations) reads q4_0."""
    return kind.removesuffix("f")


def blocked_bytes(kind: str, n: int, k: int) -> int:
    """Bytes of an N16 weight [n, k]; k is a multiple of the kind's elements."""
    layout = BLOCKED[base_kind(kind)]
    if k % layout.elements:
        raise ValueError(f"{kind} has blocks of {layout.elements} weights, and {k} is no multiple of it")
    return -(-n // 16) * 16 * (k // layout.elements) * layout.nbytes


def prepared_blocks_bytes(k: int) -> int:
    """Bytes between two prepared activation rows of width k, for any blocked kind."""
    return -(-(k // 32 * 48) // 64) * 64


def _parts(layout: Layout, raw: np.ndarray, data: np.ndarray):
    """(file side, N16 side) of every part, both [blocks of rows, superblocks, units, 16]; views of raw [multiple of 16,
    bytes] and data."""
    files = raw.reshape(len(raw) // 16, 16, raw.shape[1] // layout.nbytes, layout.nbytes)
    packed = data.reshape(len(files), files.shape[2], 16 * layout.nbytes)
    at = 0
    for first, size, unit in layout.parts:
        file = files[..., first : first + size].view(_UNITS[unit]).transpose(0, 2, 3, 1)
        yield file, packed[..., at : at + 16 * size].view(_UNITS[unit]).reshape(file.shape)
        at += 16 * size


def pack_blocks(kind: str, raw: np.ndarray, out: np.ndarray) -> None:
    """File blocks raw uint8 [n, k / elements * nbytes] -> out uint8 [blocked_bytes(kind, n, k)]."""
    layout, whole = BLOCKED[base_kind(kind)], len(raw) // 16 * 16
    at = whole * raw.shape[1]
    for file, packed in _parts(layout, raw[:whole], out[:at]):
        np.copyto(packed, file)
    if whole < len(raw):
        last = np.zeros((16, raw.shape[1]), np.uint8)
        last[: len(raw) - whole] = raw[whole:]
        pack_blocks(kind, last, out[at:])


def unpack_blocks(kind: str, data: np.ndarray, n: int, k: int) -> np.ndarray:
    """The file blocks, uint8 [n, bytes], of an N16 weight [n, k]."""
    layout = BLOCKED[base_kind(kind)]
    raw = np.empty((-(-n // 16) * 16, k // layout.elements * layout.nbytes), np.uint8)
    for file, packed in _parts(layout, raw, data):
        np.copyto(file, packed)
    return raw[:n]


def pack_groups(kind: str, codes: np.ndarray, scales: np.ndarray, out: np.ndarray) -> None:
    """Codes int8 [n, k] (g4_32: -8..7) and scales float32 [n, k/32] -> N16 in out uint8 [blocked_bytes(kind, n, k)]."""
    n, k = codes.shape
    stored: np.ndarray = codes.reshape(n, k // 32, 32).view(np.uint8)
    if kind == "g4_32":
        stored = (stored + np.uint8(8)) & np.uint8(15)
        stored = stored[..., :16] | stored[..., 16:] << 4
    lead = np.ascontiguousarray(scales, np.float32).reshape(n, k // 32, 1).view(np.uint8)
    pack_blocks(kind, np.concatenate([lead, stored], axis=2).reshape(n, -1), out)


# ---- decoding: the float32 value of every weight, in the order of operations of the gguf package --------------------
def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: np.ndarray, run: int) -> np.ndarray:
    """The nibbles of every `run` bytes: first the low ones, then the high ones."""
    runs = codes.reshape(len(codes), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(codes), -1)


def _bits(planes: np.ndarray, run: int, width: int) -> np.ndarray:
    """Fields of `width` bits, of every `run` bytes first all lowest ones, then the next, ..."""
    runs = planes.reshape(len(planes), -1, 1, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8).reshape(-1, 1)
    return (runs >> shifts & np.uint8((1 << width) - 1)).reshape(len(planes), -1)


def _single_bits(high: np.ndarray) -> np.ndarray:
    """Bit i of four bytes -> element i of 32."""
    return np.unpackbits(np.ascontiguousarray(high), axis=1, bitorder="little")


def _signed(codes: np.ndarray, offset: int) -> np.ndarray:
    return (codes.astype(np.int8) - np.int8(offset)).astype(np.float32)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight 6-bit scales and eight minimums of a q4_k or q5_k block, from their 12 bytes."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 2 & 48)], axis=1)
    minimums = np.concatenate([b & 63, (c >> 4) | (b >> 2 & 48)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scaled(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """scales [blocks, s] times their share of codes [blocks, elements] -> [blocks, s, elements / s]."""
    return scales[..., None] * codes.reshape(*scales.shape, -1)


def _k_block(b: np.ndarray, codes: np.ndarray) -> np.ndarray:
    scales, minimums = _k_scales(b[:, 4:16])
    return _scaled(_f16(b, 0) * scales, codes.astype(np.float32)) - (_f16(b, 2) * minimums)[..., None]


def _q5_k(b: np.ndarray) -> np.ndarray:
    return _k_block(b, _nibbles(b[:, 48:], 32) | _bits(b[:, 16:48], 32, 1) << 4)


def _q6_k(b: np.ndarray) -> np.ndarray:
    codes = _nibbles(b[:, :128], 64) | _bits(b[:, 128:192], 32, 2) << 4
    scales = b[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(_f16(b, 208) * scales, _signed(codes, 32))


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = _nibbles(b[:, 4:8], 1) | (high & 3).astype(np.uint8) << 4
    return _scaled(_f16(b, 0) * _signed(scales, 32), _iq4(b[:, 8:]))


def _iq4(codes: np.ndarray) -> np.ndarray:
    return np.array(IQ4, np.float32)[_nibbles(codes, 16)]


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, :4]).view(np.float32)


_DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "q8_0": lambda b: b[:, 2:].view(np.int8).astype(np.float32) * _f16(b, 0),
    "q4_0": lambda b: _f16(b, 0) * _signed(_nibbles(b[:, 2:], 16), 8),
    "q4_1": lambda b: _f16(b, 0) * _nibbles(b[:, 4:], 16).astype(np.float32) + _f16(b, 2),
    "q5_0": lambda b: _f16(b, 0) * _signed(_nibbles(b[:, 6:], 16) | _single_bits(b[:, 2:6]) << 4, 16),
    "q5_1": lambda b: (
        _f16(b, 0) * (_nibbles(b[:, 8:], 16) | _single_bits(b[:, 4:8]) << 4).astype(np.float32) + _f16(b, 2)
    ),
    "q4_k": lambda b: _k_block(b, _nibbles(b[:, 16:], 32)),
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": lambda b: _f16(b, 0) * _iq4(b[:, 2:]),
    "iq4_xs": _iq4_xs,
    "g8_32": lambda b: _f32(b) * b[:, 4:].view(np.int8).astype(np.float32),
    "g4_32": lambda b: _f32(b) * _signed(_nibbles(b[:, 4:], 16), 8),
}


def decode(kind: str, raw: np.ndarray) -> np.ndarray:
    """File blocks uint8 [n, k / elements * nbytes] -> float32 [n, k], the value of every weight."""
    kind = base_kind(kind)
    with np.errstate(all="ignore"):  # scales may be NaN or infinite: so is the weight then
        return _DECODERS[kind](raw.reshape(-1, BLOCKED[kind].nbytes)).reshape(len(raw), -1)
