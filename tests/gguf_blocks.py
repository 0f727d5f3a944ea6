"""Blocks of every ggml type the tests write: float32 rows -> bytes of a GGUF tensor, and back.

Idea: the `gguf` package encodes F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 as llama.cpp does, so it is asked; K-quants
and IQ4 it can only decode. Those get plain encoders here: round the ends of each block, no search for better scales.
Their error is a little above llama.cpp's, their layout is checked by the package's decoder
(tests/formats/test_gguf_files.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip


def elements(dtype: str) -> int:
    """Values in one block: a row must be a multiple of it."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][0]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 [..., k] as the array GGUFWriter takes: float32, float16 or uint8 [..., bytes of a row]."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype not in _ENCODERS:
        return quantize(values, GGMLQuantizationType[dtype])
    blocks = _ENCODERS[dtype](values.reshape(-1, elements(dtype)))
    return blocks.reshape(*values.shape[:-1], -1)


def decode(data: np.ndarray, dtype: str) -> np.ndarray:
    """What a reader must see of `encode`'s result."""
    return dequantize(data, GGMLQuantizationType[dtype])


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of the float16s, their float32 values), one a block."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(len(values), 2), halves.astype(np.float32)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32), where=by != 0)


def _rounded(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.rint(values).clip(low, high).astype(np.int64)


def _paired(codes: np.ndarray, run: int) -> np.ndarray:
    """4-bit codes [n, k]: of every 2 * `run` the first half in the low nibbles, the second in the high ones."""
    halves = codes.astype(np.uint8).reshape(len(codes), -1, 2, run)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)


def _planes(bits: np.ndarray, run: int, width: int) -> np.ndarray:
    """`width`-bit values [n, k]: byte j of a group holds values j, j + run, j + 2 run, ... from its low bits on."""
    parts = bits.astype(np.uint8).reshape(len(bits), -1, 8 // width, run)
    shifts = (width * np.arange(8 // width, dtype=np.uint8))[:, None]
    return np.bitwise_or.reduce(parts << shifts, axis=2).reshape(len(bits), -1)


def _scaled_blocks(blocks: np.ndarray, size: int, top: int, limit: int) -> tuple[np.ndarray, ...]:
    """Blocks of scale * q - minimum in sub-blocks of `size`, q to `top`, scales and minima in integers to `limit`:
    (bytes of d, bytes of dmin, integer scales, integer minima, q)."""
    parts = blocks.reshape(len(blocks), -1, size)
    floor = np.minimum(parts.min(axis=2), 0)
    scales = (parts.max(axis=2).clip(0) - floor) / top
    d_bytes, d = _half(scales.max(axis=1) / limit)
    m_bytes, dmin = _half(-floor.min(axis=1) / limit)
    sc = _rounded(_divided(scales, d[:, None]), 0, limit)
    mins = _rounded(_divided(-floor, dmin[:, None]), 0, limit)
    shifted = parts + (dmin[:, None] * mins)[:, :, None]
    q = _rounded(_divided(shifted, (d[:, None] * sc)[:, :, None]), 0, top)
    return d_bytes, m_bytes, sc, mins, q.reshape(blocks.shape)


def _packed_scales(sc: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """Eight 6-bit scales and minima in 12 bytes (see Q4_K.get_scale_min of the package)."""
    low = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    middle = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    high = (sc[:, 4:] & 15) | (mins[:, 4:] & 15) << 4
    return np.concatenate([low, middle, high], axis=1).astype(np.uint8)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, sc, mins, q = _scaled_blocks(blocks, 16, 3, 15)
    return np.concatenate([(sc | mins << 4).astype(np.uint8), _planes(q, 32, 2), d, dmin], axis=1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, sc, mins, q = _scaled_blocks(blocks, 32, 15, 63)
    return np.concatenate([d, dmin, _packed_scales(sc, mins), _paired(q, 32)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    d, dmin, sc, mins, q = _scaled_blocks(blocks, 32, 31, 63)
    return np.concatenate([d, dmin, _packed_scales(sc, mins), _planes(q >> 4, 32, 1), _paired(q & 15, 32)], axis=1)


def _signed(blocks: np.ndarray, size: int, top: int, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of scale * q around zero, |q| <= `top`, in sub-blocks of `size` with integer scales to `limit`."""
    parts = blocks.reshape(len(blocks), -1, size)
    scales = np.abs(parts).max(axis=2) / top
    d_bytes, d = _half(scales.max(axis=1) / limit)
    sc = _rounded(_divided(scales, d[:, None]), 0, limit)
    q = _rounded(_divided(parts, (d[:, None] * sc)[:, :, None]), -top - 1, top)
    return d_bytes, sc, q.reshape(blocks.shape)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    d, sc, q = _signed(blocks, 16, 3, 31)
    codes, sc = q + 4, sc + 32
    low = sc[:, :8] & 15 | (sc[:, 8:] & 15) << 4
    packed = [_planes(codes >> 2, 32, 1), _planes(codes & 3, 32, 2), low.astype(np.uint8), _planes(sc >> 4, 4, 2), d]
    return np.concatenate(packed, axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    d, sc, q = _signed(blocks, 16, 31, 127)
    codes = q + 32
    return np.concatenate([_paired(codes & 15, 64), _planes(codes >> 4, 32, 2), sc.astype(np.uint8), d], axis=1)


_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _nearest_level(values: np.ndarray) -> np.ndarray:
    return np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, values)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    d_bytes, d = _half(np.abs(blocks).max(axis=1) / 113)
    return np.concatenate([d_bytes, _paired(_nearest_level(_divided(blocks, d[:, None])), 16)], axis=1)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    parts = blocks.reshape(len(blocks), 8, 32)
    scales = np.abs(parts).max(axis=2) / 113
    d_bytes, d = _half(scales.max(axis=1) / 31)
    sc = _rounded(_divided(scales, d[:, None]), 0, 31)
    codes = _nearest_level(_divided(parts, (d[:, None] * sc)[:, :, None])).reshape(blocks.shape)
    sc = sc + 32
    high = ((sc >> 4) << 2 * np.arange(8)).sum(axis=1).astype("<u2").view(np.uint8).reshape(-1, 2)
    low = (sc[:, 0::2] & 15 | (sc[:, 1::2] & 15) << 4).astype(np.uint8)
    return np.concatenate([d_bytes, high, low, _paired(codes, 16)], axis=1)


_ENCODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs
}  # fmt: skip
