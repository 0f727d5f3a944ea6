"""Tensors that are no routed experts: copied in their stored dtype, or as float16 where that loses nothing.

Two policies. The container's dense tensors are f16 by its format; bf16 reaches further than f16, so `compact` stores a
tensor as F16 when every value survives the round trip and as it was otherwise (FP8 with its scales). A standalone
sidecar folder keeps every tensor as it was. A GGUF's quantised tensors have no dtype in a safetensors file: they become
F16, rounded (F32 where a value is too large for it), and the report says by how much.
Guarded by tests/convert/test_container.py and tests/convert/test_gguf.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from coli.convert.files import Block, Spec
from coli.convert.report import Tally
from coli.convert.restore import Output, is_restored, values
from coli.convert.source import Source
from coli.errors import ModelError
from coli.formats import ggml
from coli.formats.fp8 import SCALE, widen
from coli.formats.strict import show

FLOATS = ("BF16", "F16", "F32")


def file_name(canonical: str) -> str:
    """The name a folder uses."""
    return canonical if canonical.startswith(("lm_head.", "mtp.")) else f"model.{canonical}"


def bound(source: Source, output: Output) -> int:
    """Bytes of `output` at most (but for quantised tensors beyond f16's range)."""
    stored = sum(source.checkpoint[part].nbytes for part in output.parts)
    scales = sum(scale.nbytes for scale in map(source.scale, output.parts) if scale is not None)
    return max(stored + scales, (8 if output.constant is not None else 2) * prod(output.shape))


def source_bytes(source: Source, outputs: list[Output]) -> int:
    """Bytes of the source that `outputs` are made of."""
    parts = [part for output in outputs for part in output.parts]
    scales = sum(scale.nbytes for scale in map(source.scale, parts) if scale is not None)
    return sum(source.checkpoint[part].nbytes for part in parts) + scales


def blocks(source: Source, output: Output, *, compact: bool) -> list[Block]:
    """The blocks of one tensor, two for FP8 that stays FP8. Reads values to choose their dtype."""
    name = file_name(output.name)
    if output.constant is not None:
        constant = output.constant
        return [Block((Spec(name, "I64", constant.shape),), lambda _: [constant])]
    dtype = _dtype(source, output, compact)
    if dtype is not None:
        return [Block((Spec(name, dtype, output.shape),), lambda tally: _encoded(source, output, dtype, tally))]
    part = output.parts[0]
    raw = Block((Spec(name, source.checkpoint[part].dtype, output.shape),), lambda _: source.chunks(part))
    scale = source.scale(part)
    if scale is None:
        return [raw]
    spec = Spec(name + SCALE, scale.dtype, scale.shape)
    return [raw, Block((spec,), lambda _: source.chunks(part + SCALE))]


def _dtype(source: Source, output: Output, compact: bool) -> str | None:
    """The float dtype to encode in, None to copy what is stored."""
    stored = {source.checkpoint[part].dtype for part in output.parts}
    restored = len(output.parts) > 1 or any(is_restored(source, part) for part in output.parts)
    tensor = source.checkpoint[output.parts[0]]
    if not restored and tensor.dtype not in FLOATS and (not compact or source.scale(output.parts[0]) is None):
        return None  # integers, or an FP8 table with a scale of its own
    if not restored and (not compact or tensor.dtype == "F16"):
        return None
    if stored & ggml.QUANTISED:
        return "F16" if _all(source, output, _in_range) else "F32"
    if compact and _all(source, output, lambda v: _survives(v, "F16")):
        return "F16"
    if not restored:
        return None
    kept = tensor.dtype if len(stored) == 1 and tensor.dtype in FLOATS else "F32"
    return kept if kept == "F32" or _all(source, output, lambda v: _survives(v, kept)) else "F32"


def _all(source: Source, output: Output, holds: Callable[[np.ndarray], bool]) -> bool:
    return all(holds(chunk) for part in output.parts for chunk, _, _ in values(source, part))


def _in_range(chunk: np.ndarray) -> bool:
    return bool(np.abs(chunk).max(initial=0) < 65520)  # what rounds to a finite f16


def _survives(chunk: np.ndarray, dtype: str) -> bool:
    return np.array_equal(widen(encode(chunk, dtype), dtype).view(np.uint32), chunk.view(np.uint32))


def encode(chunk: np.ndarray, dtype: str) -> np.ndarray:
    """float32 in the storage of `dtype`, rounded half to even."""
    if dtype == "F32":
        return chunk
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return chunk.astype(np.float16)
    bits = chunk.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _encoded(source: Source, output: Output, dtype: str, tally: Tally) -> Iterator[np.ndarray]:
    for part in output.parts:
        for chunk, meant, goal in values(source, part):
            if meant is not chunk and not np.isfinite(chunk).all():
                raise ModelError(f"tensor {show(part)} holds values that cannot be", source.checkpoint[part].path,
                                 "the file is damaged: download it again")  # fmt: skip
            stored = encode(chunk, dtype)
            if is_restored(source, part):
                read = widen(stored, dtype)
                tally.compare("dense", goal, meant if meant is not chunk else read)
            yield stored
