"""Weight layouts of the integer kinds, the layout of prepared activations, and the sizes the drivers agree on.

Everything here is NumPy, so the program can size its buffers and pack weights without importing Numba.

*Natural* kinds (f32, f16, bf16, fp8) are read as the checkpoint stores them: n rows of k values, FP8 scales float32
[ceil(n/a)][ceil(k/b)] beside. Nothing is packed.

*N16* kinds: 16 weight rows form a block, k runs in groups of 64, n is padded to 16 and k to 64 with zero weights.
Codes are stored unsigned (code + offset) because VNNI multiplies unsigned by signed bytes; four consecutive k sit in
one 32-bit lane. One block is one contiguous stream, a multiple of 64 bytes, scales inside:

    int8   per group 16 vectors: lane l of vector v = row l, k = 4v..4v+3, stored code + 128;
           behind the last group 16 float32 row scales              1024 * groups + 64 bytes
    int4   per group 8 vectors: lane l of vector v = row l, low nibbles k = 8v..8v+3, high nibbles k = 8v+4..8v+7,
           stored code + 8; then the group's 16 float32 scales       576 * groups bytes

*Prepared activations* (op `quantize`, kinds int8 and int4), for groups = ceil(k/64):

    int8 codes [64 * groups] | float32 scales [groups] | int32 corrections -offset * (sum of the codes) [groups]

A row's distance is `prepared_bytes(k)`, a multiple of 64. Tests: tests/kernels/test_linear.py packs, unpacks and
multiplies with both. Block-quantised kinds have a layout and prepared rows of their own (kernels/blocked.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coli.kernels.blocked import BLOCKED, blocked_bytes, prepared_blocks_bytes

TILE_ROWS = (1, 2, 3, 4, 6)  # activation rows a tile exists for; 5 run in the tile for 6
TILE_KINDS = ("f32", "f16", "bf16", "fp8", "int8", "int4", "int8f", "int4f")
LISTED = "listed_"  # before a kind: its tile over the weight rows of a list, for one activation row
LISTED_KINDS = tuple(LISTED + kind for kind in ("f32", "f16", "bf16", "fp8", "int8", "int8f"))
PREPARED_KINDS = ("int8", "int4")  # their x rows go through `quantize`
OFFSETS = {"int8": 128, "int4": 8}
BLOCKED_KINDS = tuple(BLOCKED) + tuple(kind + "f" for kind in BLOCKED)  # kernels/blocked.py; f: float32 activations
GRAIN = 16  # weight rows handed to a thread at a time, any kind: a block of N16, a cache line of y
CHUNK = 1024  # scores that are searched and summed together (kernels/draft.py)
GROUP = 64  # inputs that share an activation scale, and an int4 weight scale


def tile_name(kind: str, rows: int) -> str:
    """Name of the tile in the compile cache."""
    return f"tile_{kind}_{rows}"


def tile_rows(kind: str) -> tuple[int, ...]:
    """Activation rows that tiles of this kind exist for."""
    return (1,) if kind.startswith(LISTED) else TILE_ROWS


def parts_of(scores: int) -> int:
    """Floats that kernels/draft.py needs beside this many scores."""
    return 2 * -(-scores // CHUNK)


def groups_of(k: int) -> int:
    return -(-k // GROUP)


def prepared_bytes(k: int) -> int:
    """Bytes between two prepared activation rows of width k."""
    return -(-groups_of(k) * (GROUP + 8) // 64) * 64


def prepared_row_bytes(kind: str, k: int) -> int:
    """Bytes between two activation rows that weights of `kind` take, where they are prepared; 0 for plain float32."""
    if kind in BLOCKED:
        return prepared_blocks_bytes(k)
    return prepared_bytes(k) if kind in PREPARED_KINDS else 0


def is_n16(kind: str) -> bool:
    """Are 16 weight rows of this kind side by side?"""
    return kind in BLOCKED_KINDS or kind.startswith("int")


def block_bytes(kind: str, k: int) -> int:
    """Bytes of one block of 16 weight rows."""
    if kind in BLOCKED_KINDS:
        return blocked_bytes(kind, 16, k)
    return groups_of(k) * 1024 + 64 if kind.startswith("int8") else groups_of(k) * 576


def packed_bytes(kind: str, n: int, k: int) -> int:
    """Bytes of an N16 weight [n, k]."""
    return -(-n // 16) * block_bytes(kind, k)


@dataclass(frozen=True)
class Packed:
    """An N16 weight: `data` uint8, aligned to 64 bytes, of a weight [n, k]; kind "int8" or "int4"."""

    kind: str
    data: np.ndarray
    n: int
    k: int


def block_width(dv: int) -> int:
    """Features of v in one block of a DeltaNet layer's state (kernels/deltanet.py)."""
    return 64 if dv % 64 == 0 else 16


def aligned_bytes(size: int) -> np.ndarray:
    """Zeroed uint8 on a cache line."""
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def _padded(codes: np.ndarray, fill: int) -> np.ndarray:
    n, k = codes.shape
    return np.pad(codes, ((0, -n % 16), (0, -k % GROUP)), constant_values=fill)


def quantise_int8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float [n, k] -> codes int8 [n, k] and row scales float32 [n]: scale = max|w|/127, half to even, +-127."""
    w = np.asarray(w, np.float32)
    scales = np.abs(w).max(axis=1) / np.float32(127)
    safe = np.where(scales > 0, scales, np.float32(1))
    return np.clip(np.rint(w / safe[:, None]), -127, 127).astype(np.int8), scales


def quantise_int4(w: np.ndarray, group: int = GROUP) -> tuple[np.ndarray, np.ndarray]:
    """float [n, k] -> codes int8 [n, k] in -8..7 and scales float32 [n, ceil(k/group)]: max(max|w|, 1e-12)/7."""
    w = np.asarray(w, np.float32)
    n, k = w.shape
    groups = np.pad(w, ((0, 0), (0, -k % group))).reshape(n, -1, group)
    scales = np.maximum(np.abs(groups).max(axis=2), np.float32(1e-12)) / np.float32(7)
    codes = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int8)
    return codes.reshape(n, -1)[:, :k], scales


def pack_int8_codes(codes: np.ndarray, scales: np.ndarray) -> Packed:
    """codes int8 [n, k], row scales float32 [n] -> N16."""
    n, k = codes.shape
    stored = _padded(codes.view(np.uint8) ^ np.uint8(0x80), 0x80)
    blocks = len(stored) // 16
    data = aligned_bytes(packed_bytes("int8", n, k))
    rows = data.reshape(blocks, -1)
    quads = stored.reshape(blocks, 16, -1, 4).transpose(0, 2, 1, 3)
    rows[:, :-64] = quads.reshape(blocks, -1)
    rows[:, -64:].view(np.float32)[...] = np.pad(scales.astype(np.float32), (0, -n % 16)).reshape(blocks, 16)
    return Packed("int8", data, n, k)


def pack_int4_codes(codes: np.ndarray, scales: np.ndarray) -> Packed:
    """codes int8 [n, k] in -8..7, scales float32 [n, ceil(k/64)] -> N16."""
    n, k = codes.shape
    groups = groups_of(k)
    stored = _padded((codes + 8).astype(np.uint8), 8)
    blocks = len(stored) // 16
    data = aligned_bytes(packed_bytes("int4", n, k))
    body = data.reshape(blocks, groups, 576)
    split = stored.reshape(blocks, 16, groups, 8, 2, 4)
    nibbles = split[..., 0, :] | split[..., 1, :] << 4
    body[:, :, :512] = nibbles.transpose(0, 2, 3, 1, 4).reshape(blocks, groups, 512)
    padded = np.pad(scales.astype(np.float32), ((0, -n % 16), (0, 0))).reshape(blocks, 16, groups)
    body[:, :, 512:].view(np.float32)[...] = padded.transpose(0, 2, 1)
    return Packed("int4", data, n, k)


def pack_int8(w: np.ndarray) -> Packed:
    """float [n, k] -> int8 rows, N16."""
    return pack_int8_codes(*quantise_int8(w))


def pack_int4(w: np.ndarray, group: int = GROUP) -> Packed:
    """float [n, k] -> int4 with a scale per 64 inputs, N16. Other groups are a ValueError: the tiles know 64 only."""
    if group != GROUP:
        raise ValueError(f"int4 weights have groups of {GROUP}, not {group}")
    return pack_int4_codes(*quantise_int4(w))


def unpack(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [n, k] and scales (float32 [n], or [n, ceil(k/64)]) of a packed weight."""
    n, k, blocks = packed.n, packed.k, -(-packed.n // 16)
    if packed.kind == "int8":
        rows = packed.data.reshape(blocks, -1)
        quads = rows[:, :-64].reshape(blocks, -1, 16, 4).transpose(0, 2, 1, 3).reshape(blocks * 16, -1)
        return (quads ^ np.uint8(0x80)).view(np.int8)[:n, :k], rows[:, -64:].copy().view(np.float32).reshape(-1)[:n]
    body = packed.data.reshape(blocks, groups_of(k), 576)
    nibbles = body[:, :, :512].reshape(blocks, -1, 8, 16, 4).transpose(0, 3, 1, 2, 4)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-2).reshape(blocks * 16, -1)
    scales = body[:, :, 512:].copy().view(np.float32).transpose(0, 2, 1).reshape(blocks * 16, -1)
    return codes[:n, :k].astype(np.int8) - np.int8(8), scales[:n]
