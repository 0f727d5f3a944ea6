"""From llama.cpp's tensor names to ours: the tensors of a GGUF file under the names a Hugging Face folder would have.

Idea: everything above knows one spelling, so a GGUF file is translated once, here, by tables. What cannot be undone by
a name (norms with 1 folded in, -exp(A_log), value heads in another order) becomes a trait. Shapes get back the
dimensions of 1 that a converter squeezed out; what it joined comes apart again (the two halves of Qwen3.8's eh_proj as
columns of one matrix, the n-gram tables of several layers as rows of one).
Rules: block N is layer N, from number `layers` on a draft head. Names that no table has are one ModelError; missing
tensors are the layout check's business.
Source: model_spec.md 9 and the names of the `gguf` package. Guarded by tests/formats/test_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint, Traits
from coli.formats.ggml import SIZES, row_bytes
from coli.formats.gguf_config import OTHER, TABLE, Keys, config_of, ngram_heads, ple_layers, table_parts
from coli.formats.safetensors import Tensor
from coli.formats.strict import counted, listing, show

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)", re.DOTALL)
_STOPS = ("eos", "eot", "eom")

# ---- tensor names ----------------------------------------------------------------------------------------------------

_GLOBAL = {"token_embd": "embed_tokens", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_DELTANET = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_SPLIT_GATES = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
_GROUPED = {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_SCALARS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}  # names without .weight
_ROUTED = {
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj", "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_INDEXER = {
    "indexer.q_proj": "self_attn.indexer.q_proj", "indexer.k_proj": "self_attn.indexer.k_proj",
    "indexer.q_norm": "self_attn.indexer.q_layernorm", "indexer.k_norm": "self_attn.indexer.k_layernorm",
}  # fmt: skip
_MIXER = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
_STREAMS = {
    f"hc_{short}_{part}": f"{site}_hyper_connection.{name}"
    for short, site in (("attn", "attn"), ("ffn", "mlp"))
    for part, name in (_MIXER | {"inject": "block_inject_weight"}).items()
}
_PLE = {
    "ple_key": "ple.key_proj", "ple_value": "ple.value_proj", "ple_norm_key": "ple.norm_key",
    "ple_norm_query": "ple.norm_query", "ple_norm_conv": "ple.norm_conv", "ple_conv1d": "ple.conv1d",
}  # fmt: skip
_HEAD = {"nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden"}
_PLAIN_HEAD = _HEAD | {"nextn.eh_proj": "mtp.fc", "nextn.shared_head_norm": "mtp.norm"}
_STREAM_HEAD = _HEAD | {"nextn.eh_proj": "mtp.fc"} | {
    f"nextn.hc_head_{part}": f"mtp.hyper_connection_mixer.{name}" for part, name in _MIXER.items()
}  # fmt: skip

_FC, _FC_HALVES = "mtp.fc.weight", ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight")


def _weights(*tables: Mapping[str, str]) -> dict[str, str]:
    """Names with `.weight` on both sides; stacked experts have none on ours."""
    return {f"{theirs}.weight": ours if theirs in _ROUTED else f"{ours}.weight"
            for table in tables for theirs, ours in table.items()}  # fmt: skip


@dataclass(frozen=True)
class Names:
    """How one `general.architecture` spells its tensors."""

    whole: dict[str, str]  # outside blocks
    block: dict[str, str]  # in a block, after `blk.N.`
    head: dict[str, str]  # in the block of the draft head, beyond those of a block
    tiled: bool


_NORMED = _GLOBAL | {"output_norm": "norm"}
_MIXED = _GLOBAL | {f"output_hc_{part}": f"hyper_connection_mixer.{name}" for part, name in _MIXER.items()}
_MOE = _ROUTER | _ROUTED
_GDN = _ATTENTION | _DELTANET

NAMES: dict[str, Names] = {
    "qwen35moe": Names(
        _weights(_NORMED), _weights(_NORMS, _GDN, _SPLIT_GATES, _MOE, _SHARED) | _SCALARS,
        _weights(_PLAIN_HEAD), tiled=True),
    "qwen35": Names(
        _weights(_NORMED), _weights(_NORMS, _GDN, _SPLIT_GATES, _DENSE) | _SCALARS,
        _weights(_PLAIN_HEAD), tiled=True),
    "qwen3next": Names(
        _weights(_NORMED), _weights(_NORMS, _GDN, _GROUPED, _MOE, _SHARED) | _SCALARS,
        _weights(_PLAIN_HEAD), tiled=False),
    "qwen3moe": Names(
        _weights(_NORMED),
        _weights({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}, _ATTENTION, _MOE),
        {}, tiled=False),
    "qwen4exp": Names(
        _weights(_MIXED, {"per_layer_token_embd": "per_layer_token_embd"}),
        _weights(_STREAMS, _GDN, _SPLIT_GATES, _INDEXER, _MOE, _SHARED, _PLE) | _SCALARS,
        _weights(_STREAM_HEAD), tiled=True),
}  # fmt: skip


def apply(checkpoint: Checkpoint, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Fill `checkpoint` from a file's keys and its tensors by the file's names. Raises ModelError."""
    keys = Keys(metadata, tensors, checkpoint.folder)
    known = NAMES[keys.arch]
    checkpoint.metadata = metadata
    checkpoint.traits = Traits(gguf=True, norms_folded=True, decay_ready=True, tiled=known.tiled)
    checkpoint.config = config_of(keys)
    stops = dict.fromkeys(map(keys.token, _STOPS))
    checkpoint.raw_config = {"eos_token_id": [token for token in stops if token is not None]}
    checkpoint.tensors = _rename(keys, known)
    if keys.arch == "qwen4exp":
        _halve(keys, checkpoint.tensors)
        _share_out(keys, checkpoint)


def _rename(keys: Keys, known: Names) -> dict[str, Tensor]:
    """The tensors by canonical name, in shapes of as many dimensions as ours."""
    found: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in keys.tensors.items():
        ours = _canonical(name, keys, known)
        if ours is None:
            unknown.append(name)
        else:
            found[ours] = replace(tensor, shape=_unsqueezed(ours, tensor.shape))
    if any(name.startswith("mtp.") for name in unknown):
        raise ModelError(f"a draft head in the names of an early converter: {listing(unknown)}", keys.where,
                         "convert the model again with llama.cpp's converter, or download another file")  # fmt: skip
    if unknown:
        raise ModelError(f"{counted(len(unknown), 'tensor')} that {keys.arch} has not: {listing(unknown)}", keys.where,
                         "made by a newer or a modified converter")  # fmt: skip
    return found


def _canonical(name: str, keys: Keys, known: Names) -> str | None:
    block = _BLOCK.fullmatch(name)
    if block is None:
        return known.whole.get(name)
    number, rest = int(block[1]), block[2]
    if number == keys.layers < keys.blocks and rest in known.head:
        return known.head[rest]
    ours = known.block.get(rest)
    if ours is None or number >= keys.blocks:
        return None
    return f"layers.{number}.{ours}" if number < keys.layers else f"mtp.layers.{number - keys.layers}.{ours}"


def _unsqueezed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        return (1, *shape)
    if name.endswith("conv1d.weight") and len(shape) == 2:
        return (shape[0], 1, shape[1])
    return shape


def _halve(keys: Keys, tensors: dict[str, Tensor]) -> None:
    """Qwen3.8's eh_proj [H, 2H] is fc_embedding and fc_hidden side by side."""
    whole = tensors.pop(_FC, None)
    if whole is None:
        return
    elements = SIZES[whole.dtype][0]
    if len(whole.shape) != 2 or whole.shape[1] % (2 * elements):
        raise ModelError(f"tensor {show(whole.name)}: {list(whole.shape)} in {whole.dtype} is no two matrices side by "
                         "side", keys.where, OTHER)  # fmt: skip
    rows, columns = whole.shape[0], whole.shape[1] // 2
    row = row_bytes(whole.dtype, columns)
    for i, name in enumerate(_FC_HALVES):
        tensors[name] = replace(whole, shape=(rows, columns), offset=whole.offset + i * row, nbytes=rows * row,
                                pitch=2 * row)  # fmt: skip


def _share_out(keys: Keys, checkpoint: Checkpoint) -> None:
    """Give each PLE layer its rows of the one table, and the hash constants that a folder has as tensors."""
    layers, table = ple_layers(keys), checkpoint.tensors.pop(TABLE, None)
    if not layers:
        if table is not None:
            raise keys.bad("ple.layers", f"no layer uses tensor {TABLE}")
        return
    heads, parts = ngram_heads(keys), table_parts(keys)
    sizes, offsets = (_shares(keys, f"ple.head_{name}", heads) for name in ("vocab_sizes", "offsets"))
    factors = _shares(keys, "ple.layer_multipliers", keys.whole("ple.ngram_size"))
    assert table is not None  # table_parts has seen it
    row = row_bytes(table.dtype, table.shape[1])
    for i, (layer, (start, rows)) in enumerate(zip(layers, parts, strict=True)):
        prefix = f"layers.{layer}.ple.ple_embedding."
        checkpoint.tensors[f"{prefix}ngram_embedding.weight"] = replace(
            table, shape=(rows, table.shape[1]), offset=table.offset + start * row, nbytes=rows * row)  # fmt: skip
        checkpoint.constants |= {f"{prefix}layer_multipliers": factors[i], f"{prefix}ngram_heads_vocab_sizes": sizes[i],
                                 f"{prefix}ngram_heads_offsets": offsets[i] - start}  # fmt: skip


def _shares(keys: Keys, key: str, each: int) -> np.ndarray:
    """An array key as int64 [PLE layers, each]."""
    values, layers = keys.several(key), len(ple_layers(keys))
    if len(values) != each * layers or not all(0 <= value < 1 << 62 for value in values):
        raise keys.bad(key, f"expected {each} for each of {counted(layers, 'layer')}, found {len(values)}")
    return np.array(values, np.int64).reshape(layers, each)
