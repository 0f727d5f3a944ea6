"""From a GGUF's conventions back to those of Hugging Face folders (model_spec.md section 9).

    norms      hold 1 + w                  w = stored - 1
    A_log      holds -exp(A_log)           log(-stored), the float32 whose exp comes closest
    V heads    tiled [r, key heads]        grouped [key heads, r]: rows of in_proj_*, A_log, dt_bias, conv1d's V
                                           channels, columns of out_proj
    index_qk   two tensors                 one, query rows first
    shapes     dimensions of one dropped   as the layout has them

What the engine computes from the result (1 + w, -exp(A_log)) is compared with what the file holds and counted under
"dense": w is exact wherever 1 + w was rounded to float32 by a converter. Guarded by tests/convert/test_gguf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.convert.source import Source
from coli.formats import ggml
from coli.models import qwen36_layout, qwen38_layout
from coli.ngrams import NgramHash

_HEAD_ROWS = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


@dataclass(frozen=True)
class Output:
    """A dense tensor to be written: the rows of the source's `parts`, one after another, or `constant` integers."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    constant: np.ndarray | None = None


def outputs(source: Source, group: str) -> list[Output]:
    """The dense tensors of one group of the source (see Source.dense), under the names and shapes of a folder."""
    shapes, found = _shapes(source), []
    for name in source.dense(group):
        if name.endswith(".indexer.k_proj.weight"):
            continue
        if name.endswith(".indexer.q_proj.weight"):
            parts = (name, name.replace("q_proj", "k_proj"))
            rows = sum(source.checkpoint[part].shape[0] for part in parts)
            found.append(Output(name.replace("q_proj", "index_qk_proj"), (rows, source.g.hidden), parts))
        else:
            found.append(Output(name, shapes.get(name, source.checkpoint[name].shape), (name,)))
    return found + _constants(source, group)


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """A folder's shapes; experts are nobody's concern here."""
    if not source.is_gguf:
        return {}
    layout: Any = qwen38_layout if source.family == "qwen38" else qwen36_layout
    shapes = layout.expected(source.g, source.checkpoint)
    return shapes | (layout.expected_head(source.g, source.checkpoint) if source.has_head else {})


def _constants(source: Source, group: str) -> list[Output]:
    """The n-gram constants a folder repeats and a GGUF keeps elsewhere."""
    if source.family != "qwen38":
        return []
    found = []
    for index, layer in enumerate(source.g.ple_layers):
        if group == f"layers.{layer}.":
            buffers = qwen38_layout.hash_buffers(NgramHash(source.g, index), layer)
            found += [Output(name, values.shape, (), values) for name, values in buffers.items()
                      if name not in source.checkpoint]  # fmt: skip
    return found


def values(source: Source, name: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(float32 to store, what an engine makes of it, what it should be), a few rows at a time or a restored whole."""
    traits = source.checkpoint.traits
    if traits.norms_folded and _is_folded(source, name):
        stored = source.whole(name)
        w = stored - np.float32(1)
        yield w, w + np.float32(1), stored
    elif traits.decay_ready and name.endswith("linear_attn.A_log"):
        stored = _grouped(source, name) if traits.tiled else source.whole(name)
        log = inverse_decay(stored)
        yield log, -np.exp(log), stored
    elif traits.tiled and _is_tiled(name):
        stored = _grouped(source, name)
        yield stored, stored, stored
    else:
        for chunk in source.values(name):
            yield chunk, chunk, chunk


def is_restored(source: Source, name: str) -> bool:
    """Whether the stored codes cannot be copied as they are."""
    traits = source.checkpoint.traits
    return (
        source.checkpoint[name].dtype in ggml.QUANTISED
        or (traits.norms_folded and _is_folded(source, name))
        or (traits.decay_ready and name.endswith("linear_attn.A_log"))
        or (traits.tiled and _is_tiled(name))
    )


def _is_folded(source: Source, name: str) -> bool:
    """Every norm but the DeltaNet's own, in the families whose norms multiply by 1 + w."""
    if not getattr(source.g, "centred", True) or name.endswith("linear_attn.norm.weight"):
        return False
    return len(source.checkpoint[name].shape) == 1 and "norm" in name.rsplit(".", 2)[-2]


def inverse_decay(stored: np.ndarray) -> np.ndarray:
    """A_log whose -exp is `stored`, or comes closest: float32 neighbours of the logarithm and its bfloat16 rounding
    (what a checkpoint most likely held) are tried. Values must be negative."""
    goal = -stored.astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):  # what is no logarithm is refused when it is stored
        log = np.log(goal.astype(np.float64)).astype(np.float32)
    bits = log.view(np.uint32)
    short = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    below, above = np.nextafter(log, np.float32(-np.inf)), np.nextafter(log, np.float32(np.inf))
    tried = np.stack([short, log, below, above])
    best = np.abs(np.exp(tried).astype(np.float64) - goal).argmin(axis=0)
    return np.take_along_axis(tried, best[None], axis=0)[0]


def _is_tiled(name: str) -> bool:
    inner = name.partition("linear_attn.")[2]
    return inner in (*_HEAD_ROWS, "in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight", "out_proj.weight")


def _grouped(source: Source, name: str) -> np.ndarray:
    """A tensor with V heads, back in grouped order."""
    g, tensor = source.g, source.whole(name)
    tensor = tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor
    values = g.gdn_value_heads * g.gdn_value_dim
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(_regroup(tensor.T, g).T)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        keys = len(tensor) - values
        return np.concatenate([tensor[:keys], _regroup(tensor[keys:], g)])
    return _regroup(tensor, g)


def _regroup(rows: np.ndarray, g: Any) -> np.ndarray:
    """Rows by value head from [r, key heads, ...] to [key heads, r, ...]."""
    ratio = g.gdn_value_heads // g.gdn_key_heads
    heads = rows.reshape(ratio, g.gdn_key_heads, -1)
    return np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(rows.shape)
