"""NumPy twins of the linear kernels: what the tiles must compute, in float64 where rounding is not the point.

Tests only (tests/kernels/test_linear.py). The integer twins repeat the kernels' quantisation exactly, codes and
scales, so that what is left to compare is the order of float32 additions.
"""

from __future__ import annotations

import numpy as np

from coli.kernels.blocked import prepared_blocks_bytes
from coli.kernels.packing import GROUP, OFFSETS, Packed, groups_of, prepared_bytes, unpack


def bf16_numpy(codes: np.ndarray) -> np.ndarray:
    """bfloat16 bits, uint16 -> float32."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16 bits, uint16, half to even (finite values)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_numpy(codes: np.ndarray) -> np.ndarray:
    """E4M3FN codes, uint8 -> float32 (0x7F and 0xFF: NaN)."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((codes & 0x7F) == 0x7F, np.nan, size)
    return np.where(codes & 0x80, -size, size).astype(np.float32)


def fp8_numpy(codes: np.ndarray, scales: np.ndarray, a: int, b: int) -> np.ndarray:
    """Block-FP8 codes uint8 [n, k] and scales [ceil(n/a), ceil(k/b)] -> float64 [n, k]."""
    n, k = codes.shape
    spread = np.repeat(np.repeat(scales.astype(np.float64), a, axis=0)[:n], b, axis=1)[:, :k]
    return e4m3_numpy(codes) * spread


def dequantise(packed: Packed) -> np.ndarray:
    """float64 [n, k] of a packed int8 or int4 weight."""
    codes, scales = unpack(packed)
    if packed.kind == "int8":
        return codes * scales.astype(np.float64)[:, None]
    return codes * np.repeat(scales.astype(np.float64), GROUP, axis=1)[:, : packed.k]


def linear_numpy(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float64 [R, n] of weight [n, k] and x [R, k]."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


def quantize_numpy(x: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [R, k] -> codes int8 [R, 64*groups], scales float32 [R, groups], corrections int32 [R, groups]."""
    count, k = x.shape
    groups = np.pad(np.asarray(x, np.float32), ((0, 0), (0, -k % GROUP))).reshape(count, groups_of(k), GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > np.float32(1.2e-38))
    codes = np.rint(np.clip(groups * inverse[..., None], -127, 127)).astype(np.int8)
    corrections = -offset * codes.sum(axis=2, dtype=np.int32)
    return codes.reshape(count, -1), scales, corrections


def prepare_numpy(x: np.ndarray, kind: str) -> np.ndarray:
    """Prepared rows, uint8 [R, prepared_bytes(k)], of x float32 [R, k] for weights of `kind`."""
    codes, scales, corrections = quantize_numpy(x, OFFSETS[kind])
    parts = (np.ascontiguousarray(part).view(np.uint8) for part in (codes, scales, corrections))
    rows = np.concatenate(list(parts), axis=1)
    return np.pad(rows, ((0, 0), (0, prepared_bytes(x.shape[1]) - rows.shape[1])))


def quantize_blocks_numpy(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [R, k] -> codes int8 [R, groups, 32] and scales float32 [R, groups]."""
    groups = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > np.float32(1.2e-38))
    return np.rint(np.clip(groups * inverse[..., None], -127, 127)).astype(np.int8), scales


def prepare_blocks_numpy(x: np.ndarray) -> np.ndarray:
    """Prepared rows, uint8 [R, prepared_blocks_bytes(k)], for weights of any block-quantised kind."""
    codes, scales = quantize_blocks_numpy(x)
    count, groups = scales.shape
    halves = codes.reshape(count, groups, 2, 16).sum(axis=3, dtype=np.int16)
    whole = halves.sum(axis=2, dtype=np.int32)
    record = np.dtype([("codes", "i1", 32), ("scale", "f4"), ("sum", "f4"), ("minus", "i4"), ("halves", "i2", 2)])
    rows = np.zeros((count, groups), record)
    rows["codes"], rows["scale"], rows["sum"] = codes, scales, scales * whole.astype(np.float32)
    rows["minus"], rows["halves"] = -whole, -halves
    packed = rows.view(np.uint8).reshape(count, groups * 48)
    return np.pad(packed, ((0, 0), (0, prepared_blocks_bytes(x.shape[1]) - packed.shape[1])))


def linear_blocks_numpy(dense: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float64 [R, n]: decoded weights times the int8 activations of block-quantised kinds."""
    codes, scales = quantize_blocks_numpy(x)
    return linear_numpy(dense, (codes * scales.astype(np.float64)[..., None]).reshape(len(x), -1))


def linear_quantised_numpy(packed: Packed, x: np.ndarray) -> np.ndarray:
    """float64 [R, n]: the product with int8 activations, exact but for the final float32 sums."""
    codes, scales, _ = quantize_numpy(x, OFFSETS[packed.kind])
    width = groups_of(packed.k)
    dequantised = codes.reshape(len(x), width, GROUP) * scales.astype(np.float64)[..., None]
    return dequantised.reshape(len(x), -1)[:, : packed.k] @ dequantise(packed).T
