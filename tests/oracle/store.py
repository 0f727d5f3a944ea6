"""Checkpoint access: a tiny safetensors reader plus the dequantization rules.

Only the standard library and numpy.  BF16 and F8_E4M3 are widened here."""
from __future__ import annotations

import glob
import json
import os
import struct

import numpy as np


def _bf16(raw):
    return (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def _e4m3_table():
    t = np.zeros(256, dtype=np.float32)
    for b in range(256):
        s, e, m = b >> 7, (b >> 3) & 15, b & 7
        if e == 15 and m == 7:
            v = float("nan")
        elif e == 0:
            v = m * 2.0 ** -9
        else:
            v = (1 + m / 8.0) * 2.0 ** (e - 7)
        t[b] = -v if s else v
    return t


E4M3 = _e4m3_table()
_NP = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64,
       "I32": np.int32, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_}


class SafetensorsDir:
    """name -> raw numpy array over every *.safetensors of a folder."""

    def __init__(self, path):
        self.index = {}
        for f in sorted(glob.glob(os.path.join(path, "*.safetensors"))):
            with open(f, "rb") as h:
                n = struct.unpack("<Q", h.read(8))[0]
                head = json.loads(h.read(n))
            for name, info in head.items():
                if name != "__metadata__":
                    self.index[name] = (f, 8 + n, info)

    def keys(self):
        return self.index.keys()

    def __contains__(self, name):
        return name in self.index

    def dtype(self, name):
        return self.index[name][2]["dtype"]

    def raw(self, name):
        f, base, info = self.index[name]
        a, b = info["data_offsets"]
        with open(f, "rb") as h:
            h.seek(base + a)
            buf = h.read(b - a)
        dt = info["dtype"]
        if dt == "BF16":
            arr = _bf16(buf)
        elif dt == "F8_E4M3":
            arr = E4M3[np.frombuffer(buf, dtype=np.uint8)]
        else:
            arr = np.frombuffer(buf, dtype=_NP[dt])
        return arr.reshape(info["shape"])


class Weights:
    """Checkpoint names -> float arrays of one dtype, FP8 blocks multiplied out.

    block: rows and columns of a scale block, one number for both or a pair."""

    def __init__(self, src, dtype=np.float64, block=128):
        self.src, self.dtype, self.cache = src, dtype, {}
        self.block = (block, block) if isinstance(block, int) else tuple(block)

    def __contains__(self, name):
        return name in self.src

    def __call__(self, name):
        if name not in self.cache:
            w = np.asarray(self.src.raw(name))
            if w.dtype.kind != "i":
                w = w.astype(self.dtype)
                if name + "_scale_inv" in self.src:
                    s = self.src.raw(name + "_scale_inv").astype(self.dtype)
                    s = np.repeat(np.repeat(s, self.block[0], -2), self.block[1], -1)
                    w = w * s[..., : w.shape[-2], : w.shape[-1]]
            self.cache[name] = w
        return self.cache[name]

    def expert(self, base, e):
        """(gate, up, down) of routed expert e, fused or per-expert layout."""
        if base + "gate_up_proj" in self:
            gu = self(base + "gate_up_proj")[e]
            half = gu.shape[0] // 2
            return gu[:half], gu[half:], self(base + "down_proj")[e]
        p = f"{base}{e}."
        return (self(p + "gate_proj.weight"), self(p + "up_proj.weight"), self(p + "down_proj.weight"))
