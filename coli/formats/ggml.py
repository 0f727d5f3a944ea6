"""The tensor types of ggml, the ones a GGUF file stores: sizes, what coli computes on, exact decoding.

Idea: a type is a name in upper case ("Q4_K"), the dtype of a `Tensor`. A row of k features is k / elements blocks of
`nbytes` bytes each, one after another, so a matrix is uint8 [rows, row bytes] and needs no other description.
NATIVE types have kernels that compute on the file's own blocks; DECODED ones are turned into float32 when they are
loaded, by the `gguf` package (imported late: only a file that holds such a type pays for it). Whatever is in neither
(integers, float64, types nobody can decode) is no weight.
Guarded by tests/formats/test_ggml.py, which compares the table with the `gguf` package's.
"""

from __future__ import annotations

import numpy as np

from coli.errors import ModelError
from coli.kernels.blocked import decode

FLOATS = ("F32", "F16", "BF16")

SIZES: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8),
    "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 40),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ1_S": (256, 50), "IQ1_M": (256, 56), "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54), "TQ2_0": (256, 66), "MXFP4": (32, 17), "NVFP4": (64, 36), "Q1_0": (128, 18),
}  # fmt: skip
"""type -> (elements, bytes) of one block; floats and integers are blocks of one."""

IDS: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""The number a GGUF file writes -> type."""

NATIVE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Quantised types that kernels compute on as they are stored."""

DECODED = ("Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
           "MXFP4", "NVFP4")  # fmt: skip
"""Quantised types that are decoded to float32 when they are loaded."""

QUANTISED = frozenset(NATIVE + DECODED)
"""Every type whose `view` is uint8 [..., row bytes]."""


def row_bytes(dtype: str, k: int) -> int:
    """Bytes of a row of `k` features; `k` must be a multiple of the type's block."""
    elements, nbytes = SIZES[dtype]
    if k % elements:
        raise ValueError(f"{k} features are no whole blocks of {dtype} ({elements} each)")
    return k // elements * nbytes


def dequantize(dtype: str, raw: np.ndarray) -> np.ndarray:
    """float32 [..., features] of uint8 `raw` [..., row bytes], exactly as `gguf.quants.dequantize` gives it.

    Raises ModelError where the installed `gguf` package is too old to know the type.
    """
    elements, nbytes = SIZES[dtype]
    shape = (*raw.shape[:-1], raw.shape[-1] // nbytes * elements)
    if not raw.size:
        return np.empty(shape, np.float32)
    if dtype in NATIVE:  # the same bits, without a package to import before the first token
        return decode(dtype.lower(), np.ascontiguousarray(raw).reshape(-1, raw.shape[-1])).reshape(shape)
    from gguf import quants
    from gguf.constants import GGMLQuantizationType

    kind = getattr(GGMLQuantizationType, dtype, None)
    try:
        if kind is None:
            raise NotImplementedError
        with np.errstate(all="ignore"):  # a scale of NaN or infinity is the file's own business here
            return quants.dequantize(np.ascontiguousarray(raw), kind)
    except NotImplementedError:
        raise ModelError(f"type {dtype} cannot be decoded by the installed gguf package", "gguf",
                         "pip install --upgrade gguf") from None  # fmt: skip
