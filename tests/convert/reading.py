"""What conversions are compared with: their files read and their integers decoded by this file's own few lines."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from tests.tiny import e4m3

FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8, "U8": np.uint8, "I8": np.int8,
          "I64": np.int64}  # fmt: skip
E4M3 = np.full(256, np.nan, np.float32)
for _code in range(256):
    _s, _e, _m = _code >> 7, _code >> 3 & 15, _code & 7
    if _code & 127 != 127:
        E4M3[_code] = (-1) ** _s * (_m * 2.0**-9 if _e == 0 else (1 + _m / 8) * 2.0 ** (_e - 7))
assert (e4m3(E4M3[:127]) == np.arange(127)).all()


def read_file(path: Path) -> dict[str, tuple[str, np.ndarray, int]]:
    """name -> (dtype, stored array, absolute offset) of a safetensors file."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        begin, end = entry["data_offsets"]
        data = np.frombuffer(raw, FLOATS[entry["dtype"]], offset=8 + length + begin,
                             count=(end - begin) // np.dtype(FLOATS[entry["dtype"]]).itemsize)  # fmt: skip
        found[name] = entry["dtype"], data.reshape(entry["shape"]), 8 + length + begin
    return found


def read_folder(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Every tensor of a folder's safetensors files, by the names in the files."""
    return {name: (dtype, data) for path in sorted(folder.glob("*.safetensors"))
            for name, (dtype, data, _) in read_file(path).items()}  # fmt: skip


def wide(dtype: str, data: np.ndarray) -> np.ndarray:
    """float32 of a stored tensor (without any scale)."""
    if dtype == "BF16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return E4M3[data] if dtype == "F8_E4M3" else data.astype(np.float32)


def dense(tensors: dict[str, tuple[str, np.ndarray]], name: str, block: int = 128) -> np.ndarray:
    """float32 of a tensor, times its FP8 scales where it has some."""
    values = wide(*tensors[name])
    if f"{name}_scale_inv" not in tensors:
        return values
    scale = wide(*tensors[f"{name}_scale_inv"])
    big = np.repeat(np.repeat(scale, block, -2), block, -1)
    return values * big[..., : values.shape[-2], : values.shape[-1]]


def quantised(w: np.ndarray, bits: int, group: int) -> np.ndarray:
    """What int storage makes of w, straight from its definition."""
    out = np.empty_like(w)
    step = group or w.shape[1]
    top = {4: 7, 8: 127}[bits]
    for row in range(w.shape[0]):
        for start in range(0, w.shape[1], step):
            part = w[row, start : start + step]
            scale = np.float32(max(np.abs(part).max(), np.float32(1e-12))) / np.float32(top)
            codes = np.clip(np.round(part / scale), -8 if bits == 4 else -127, top)
            out[row, start : start + step] = codes.astype(np.float32) * scale
    return out


def pairs(data: np.ndarray, k: int) -> np.ndarray:
    """Two's-complement nibbles, low first."""
    both = np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)[:, :k].astype(np.int16)
    return np.where(both > 7, both - 16, both).astype(np.float32)


def planar(data: np.ndarray, k: int) -> np.ndarray:
    """planar64-v8."""
    out = np.empty((data.shape[0], k), np.float32)
    for j in range(k):
        block, inside = divmod(j, 64)
        if block < k // 64:
            nibble = data[:, 32 * block + inside % 32] >> (4 * (inside // 32))
        else:
            nibble = data[:, 32 * block + inside // 2] >> (4 * (inside % 2))
        out[:, j] = (nibble & 15).astype(np.float32) - 8
    return out


def times(codes: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    return codes * np.repeat(scales, group or codes.shape[1], axis=1)[:, : codes.shape[1]]


def merged(tensors: dict, name: str, hidden: int, inter: int, bits: int, group: int) -> list[np.ndarray]:
    """gate, up and down of a container's expert."""
    raw, scales = tensors[name][1], tensors[f"{name}.qs"][1]
    out = []
    for n, k in ((inter, hidden), (inter, hidden), (hidden, inter)):
        size, count = n * k * bits // 8, n * (-(-k // group) if group else 1)
        codes = pairs(raw[:size].reshape(n, -1), k) if bits == 4 else raw[:size].reshape(n, k).astype(np.float32)
        out.append(times(codes, scales[:count].reshape(n, -1), group))
        raw, scales = raw[size:], scales[count:]
    assert not raw.size and not scales.size
    return out


def bytes_of(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip
