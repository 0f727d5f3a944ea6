"""One routed expert as integers: codes, scales, and what that costs in precision.

Scale of a group: its largest magnitude over 7 (int4, at least 1e-12 / 7) or 127 (int8); code: value / scale, rounded
half to even. `group` 0 is one group a row. The arithmetic is that of coli/kernels/packing.py, which the engine uses
when it quantises at load; the byte layouts are those of coli/formats/container.py and coli/formats/sidecar.py.
Guarded by tests/convert/test_quantise.py.
"""

from __future__ import annotations

import numpy as np

from coli.convert.report import KINDS, Options, Tally
from coli.kernels.packing import quantise_int4

FLOOR = np.float32(1e-12)


def groups(k: int, group: int) -> int:
    """Scales of a row of k inputs."""
    return -(-k // group) if group else 1


def quantise(w: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """float32 [n, k] -> codes int8 [n, k] and scales float32 [n, groups]."""
    group = options.group or w.shape[1]
    return quantise_int4(w, group) if options.ebits == 4 else _quantise_int8(w, group)


def _quantise_int8(w: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    n, k = w.shape
    rows = np.pad(w, ((0, 0), (0, -k % group))).reshape(n, -1, group)
    scales = np.maximum(np.abs(rows).max(axis=2), FLOOR) / np.float32(127)
    codes = rows / scales[..., None]
    np.clip(np.rint(codes, out=codes), -127, 127, out=codes)
    return codes.astype(np.int8).reshape(n, -1)[:, :k], scales


def restored(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """float32 [n, k] = code * scale."""
    k = codes.shape[1]
    return codes * np.repeat(scales, group or k, axis=1)[:, :k]


def expert(
    weights: tuple[np.ndarray, ...], options: Options, tally: Tally
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Codes and scales of gate, up and down, their errors counted."""
    made = [quantise(w, options) for w in weights]
    for kind, w, (codes, scales) in zip(KINDS, weights, made, strict=True):
        tally.compare(kind, w, restored(codes, scales, options.group))
    return [codes for codes, _ in made], [scales for _, scales in made]


def nibble_pairs(codes: np.ndarray) -> np.ndarray:
    """int4 codes [n, even k] -> uint8 [n, k / 2], two's complement: low = input 2j, high = input 2j + 1."""
    stored = codes.view(np.uint8) & np.uint8(15)
    return stored[:, ::2] | stored[:, 1::2] << 4


def planar(codes: np.ndarray) -> np.ndarray:
    """int4 codes [n, k] -> uint8 [n, ceil(k / 2)], planar64-v8: code + 8; of each 64 inputs byte j holds input j low
    and input j + 32 high, of a shorter tail inputs 2j and 2j + 1."""
    n, k = codes.shape
    stored = codes.view(np.uint8) + np.uint8(8)
    whole = k // 64 * 64
    halves = stored[:, :whole].reshape(n, -1, 2, 32)
    body = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(n, whole // 2)
    if whole == k:
        return body
    tail = np.pad(stored[:, whole:], ((0, 0), (0, k % 2)), constant_values=8)
    return np.concatenate([body, tail[:, ::2] | tail[:, 1::2] << 4], axis=1)
