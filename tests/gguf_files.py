"""GGUF files of the Qwen families, written as llama.cpp's converter writes them (model_spec.md section 9).

Idea: `layout` moves a checkpoint's canonical tensors to their GGUF names and places, and only moves: squeezes, splits,
stacks, puts V heads in tiled order. So it can be fed the numbers 0, 1, 2, ... in place of weights and tells where each
came from, which is how `dequantised` carries the rounding of a quantised file back to the names and order of a
Hugging Face folder. The two changes of value (norms get their 1 +, A_log becomes -exp) come after, in `values_of`.
What is written here shares no line with the reader.

    write_gguf(path, config, weights, types="Q8_0")                    # path of the (first) file
    write_gguf(path, config, weights, types={"ffn_down_exps.weight": "Q6_K", "": "Q4_K"}, splits=3)
    write_folder(folder, config, stored(dequantised(config, weights, types="Q8_0")))   # the same numbers
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

from tests.gguf_blocks import decode, elements, encode
from tests.tiny import FIRST_SPECIAL, SPECIALS, TEMPLATE

Weights = Mapping[str, np.ndarray]
Types = str | Mapping[str, str]

ARCHITECTURES = {
    "qwen3_5_moe": "qwen35moe", "qwen3_5": "qwen35", "qwen3_next": "qwen3next", "qwen3_moe": "qwen3moe",
    "qwen4_exp": "qwen4exp",
}  # fmt: skip
TILED = ("qwen35", "qwen35moe", "qwen4exp")
_HYPER = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up",
          "block_inject_weight": "inject"}  # fmt: skip
_GLOBAL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"} | {
    f"hyper_connection_mixer.{hf}": f"output_hc_{ours}" for hf, ours in _HYPER.items()
}
_BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_proj": "indexer.q_proj", "self_attn.indexer.k_proj": "indexer.k_proj",
    "self_attn.indexer.q_layernorm": "indexer.q_norm", "self_attn.indexer.k_layernorm": "indexer.k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "ple.key_proj": "ple_key", "ple.value_proj": "ple_value",
    "ple.norm_key": "ple_norm_key", "ple.norm_query": "ple_norm_query", "ple.norm_conv": "ple_norm_conv",
    "ple.conv1d": "ple_conv1d",
} | {f"{site}_hyper_connection.{hf}": f"hc_{short}_{ours}" for site, short in (("attn", "attn"), ("mlp", "ffn"))
     for hf, ours in _HYPER.items()}  # fmt: skip
_HEAD = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm",
} | {f"hyper_connection_mixer.{hf}": f"hc_head_{ours}" for hf, ours in _HYPER.items()}  # fmt: skip
_FLOAT32 = ("ffn_gate_inp.weight", "ssm_conv1d.weight", "ple_conv1d.weight")  # whatever the type of the rest
_TABLE = "per_layer_token_embd.weight"


def architecture(config: Mapping[str, Any]) -> str:
    return ARCHITECTURES[config["model_type"].removesuffix("_text")]


# ---- where everything goes -------------------------------------------------------------------------------------------


def layout(
    config: Mapping[str, Any], arrays: Weights, *, mtp: bool = True, fused_experts: bool = False, old: bool = False
) -> dict[str, np.ndarray]:
    """Canonical tensors under their GGUF names, elements moved and none changed; hash constants are left out.

    mtp=False leaves the draft head out. fused_experts: one ffn_gate_up_exps. old: qwen3next's `ssm_in` of early files.
    """
    arch, out = architecture(config), {}
    for name, array in _joined(arrays).items():
        if name.startswith("mtp.") and not mtp:
            continue
        for part, values in _split(config, name, array, fused_experts, old).items():
            out[gguf_name(arch, config["num_hidden_layers"], part)] = values
    return out


def gguf_name(arch: str, layers: int, name: str) -> str:
    """The GGUF name of a canonical tensor (of one that `_split` gave)."""
    name = re.sub(r"^mtp\.layers\.0\.", f"layers.{layers}.", name)
    stem = name.removesuffix(".weight")
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
    if match is None:
        head = stem.startswith("mtp.")
        new = f"blk.{layers}.nextn.{_HEAD[stem[4:]]}" if head else _GLOBAL.get(stem, stem)
        return f"{new}.weight"
    block, rest = f"blk.{match[1]}.", match[2]
    if rest in ("linear_attn.A_log", "linear_attn.dt_bias"):
        return block + ("ssm_a" if rest.endswith("A_log") else "ssm_dt.bias")
    if arch == "qwen3moe" and rest == "post_attention_layernorm":
        return f"{block}ffn_norm.weight"
    return f"{block}{_BLOCK[rest]}.weight"


def _joined(arrays: Weights) -> dict[str, np.ndarray]:
    """Tensors that become one in a GGUF: experts of a layer, the n-gram tables, the head's two inputs."""
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    tables: list[np.ndarray] = []
    for name in sorted(arrays, key=_numbers):
        if match := re.fullmatch(r"(.+\.experts)\.\d+\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.{match[2]}", []).append(arrays[name])
        elif ".ngram_embedding." in name:
            tables.append(arrays[name])  # layer by layer, shard by shard
        elif ".ple_embedding." not in name and not name.startswith("mtp.fc_"):
            out[name] = arrays[name]
    if "mtp.fc_embedding.weight" in arrays:
        both = arrays["mtp.fc_embedding.weight"], arrays["mtp.fc_hidden.weight"]
        out["mtp.fc.weight"] = np.concatenate(both, axis=1)
    if tables:
        out[_TABLE] = np.concatenate(tables)
    stacks = {name: np.stack(parts) for name, parts in experts.items()}
    for name in [name for name in stacks if name.endswith(".gate_proj")]:
        stem = name.removesuffix("gate_proj")
        out[f"{stem}gate_up_proj"] = np.concatenate([stacks.pop(name), stacks.pop(f"{stem}up_proj")], axis=1)
    return out | stacks


def _numbers(name: str) -> list[tuple[int, str]]:
    """Sorts shard_10 after shard_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _split(config: Mapping[str, Any], name: str, array: np.ndarray, fused: bool, old: bool) -> dict[str, np.ndarray]:
    """One canonical tensor as the converter's one or more."""
    if name.endswith("conv1d.weight"):
        array = array.reshape(len(array), -1)
    if ".linear_attn." in name and architecture(config) in TILED:
        array = _tiled(config, name, array)
    if name.endswith("in_proj_qkvz.weight") and not old:
        qkv, z = _ungrouped(config, array)
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z}
    if name.endswith("experts.gate_up_proj") and not fused:
        half, stem = array.shape[1] // 2, name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj": array[:, :half], f"{stem}up_proj": array[:, half:]}
    if name.endswith("index_qk_proj.weight"):
        queries, stem = len(array) - config["indexer_head_dim"], name.removesuffix("index_qk_proj.weight")
        return {f"{stem}q_proj.weight": array[:queries], f"{stem}k_proj.weight": array[queries:]}
    return {name: array[0] if name.endswith("shared_expert_gate.weight") else array}


def _tiled(config: Mapping[str, Any], name: str, array: np.ndarray) -> np.ndarray:
    """V heads from grouped order (key head by key head) to tiled order (the first of every key head, then ...)."""
    keys, values, width = (config[f"linear_{n}"] for n in ("num_key_heads", "num_value_heads", "value_head_dim"))
    heads = np.arange(values).reshape(keys, values // keys).T.reshape(-1)
    rows = (heads[:, None] * width + np.arange(width)).reshape(-1)
    leaf = name.split("linear_attn.")[1].removesuffix(".weight")
    if leaf in ("in_proj_qkv", "conv1d"):
        start = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([array[:start], array[start:][rows]])
    if leaf == "out_proj":
        return array[:, rows]
    order = {"in_proj_z": rows, "in_proj_a": heads, "in_proj_b": heads, "A_log": heads, "dt_bias": heads}
    return array[order[leaf]] if leaf in order else array


def _ungrouped(config: Mapping[str, Any], array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """in_proj_qkvz, one group a key head, as (all q, all k, all v) and z."""
    keys, dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
    dv = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    groups = array.reshape(keys, 2 * (dk + dv), -1)
    q, k, v, z = (part.reshape(-1, array.shape[1]) for part in np.split(groups, (dk, 2 * dk, 2 * dk + dv), axis=1))
    return np.concatenate([q, k, v]), z


# ---- values and types ------------------------------------------------------------------------------------------------


def values_of(arch: str, name: str, array: np.ndarray) -> np.ndarray:
    """The float32 values of a GGUF tensor before it is quantised."""
    array = np.ascontiguousarray(array, np.float32)
    if name.endswith("ssm_a"):
        return -np.exp(array)
    norm = name.endswith("norm.weight") or ".ple_norm_" in name
    if norm and not name.endswith("ssm_norm.weight") and arch != "qwen3moe":
        return array + np.float32(1)
    return array


def type_of(name: str, shape: tuple[int, ...], types: Types) -> str:
    """`types` is one type for all, or suffix -> type where the longest suffix wins ("" is the rest, F32 unless given).

    F32 whatever `types` says: vectors, and rows that are no whole blocks. Routers and convolutions too, as in the
    converter, unless a suffix names them.
    """
    named = {"": types} if isinstance(types, str) else types
    suffix = max((s for s in named if name.endswith(s)), key=len, default=None)
    dtype = "F32" if suffix is None or (not suffix and name.endswith(_FLOAT32)) else named[suffix]
    return "F32" if len(shape) == 1 or shape[-1] % elements(dtype) else dtype


def dequantised(
    config: Mapping[str, Any], weights: Weights, *, types: Types = "F32", **options: bool
) -> dict[str, np.ndarray]:
    """The canonical weights that a file of `write_gguf` with the same arguments holds: quantised ones rounded.

    What the file holds in F32 is returned as it was, norms without their 1 + and A_log as a logarithm.
    """
    sizes = np.array([array.size for array in weights.values()])
    starts = dict(zip(weights, np.cumsum(sizes) - sizes, strict=True))
    places = {n: np.arange(a.size).reshape(a.shape) + starts[n] for n, a in weights.items()}
    flat = np.concatenate([array.reshape(-1).astype(np.float32) for array in weights.values()])
    for name, at in layout(config, places, **options).items():
        dtype = type_of(name, at.shape, types)
        if dtype != "F32":
            flat[at] = decode(encode(flat[at], dtype), dtype)
    return {n: flat[starts[n] :][: a.size].reshape(a.shape) if a.dtype == np.float32 else a
            for n, a in weights.items()}  # fmt: skip


# ---- metadata --------------------------------------------------------------------------------------------------------


def metadata(config: Mapping[str, Any], *, head: bool) -> dict[str, Any]:
    """Every key of the architecture's row in section 9, values in Python types; `head`: the file has a draft head."""
    arch, layers, c = architecture(config), config["num_hidden_layers"], config
    rope = c.get("rope_parameters") or {}
    theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    keys: dict[str, Any] = {
        "block_count": layers + head, "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"], "attention.head_count": c["num_attention_heads"],
        "feed_forward_length": c.get("intermediate_size") or c["moe_intermediate_size"],
        "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"], "attention.layer_norm_rms_epsilon": float(c["rms_norm_eps"]),
        "rope.freq_base": float(theta),
    }  # fmt: skip
    if c.get("num_experts"):
        keys |= {"expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"],
                 "expert_feed_forward_length": c["moe_intermediate_size"]}  # fmt: skip
    if arch != "qwen3moe":
        keys |= _hybrid_keys(c, rope)
    if arch in TILED:
        keys["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if head:
        keys["nextn_predict_layers"] = 1
    if arch == "qwen4exp":
        keys |= _qwen4_keys(c, layers + head)
    return {"general.name": f"tiny {arch}"} | {f"{arch}.{key}": value for key, value in keys.items()}


def _hybrid_keys(c: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 0.25))
    keys = {
        "rope.dimension_count": int(c["head_dim"] * partial), "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"], "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": c["linear_num_value_heads"],
        "ssm.inner_size": c["linear_num_value_heads"] * c["linear_value_head_dim"],
    }  # fmt: skip
    kinds = c.get("layer_types")
    keys["full_attention_interval"] = 1 + _attends(kinds).index(True) if kinds else c.get("full_attention_interval", 4)
    if c.get("shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    return keys


def _attends(kinds: list[str]) -> list[bool]:
    return [kind != "linear_attention" for kind in kinds]


def _qwen4_keys(c: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    from coli.models.qwen38_layout import geometry
    from coli.ngrams import NgramHash

    g = geometry(dict(c))
    hashes = [NgramHash(g, index) for index in range(len(g.ple_layers))]
    bases = np.cumsum([0, *(h.table_rows for h in hashes)])[:-1]  # tables lie one after another in one tensor
    ratio, eos = c["indexer_compress_ratio"], c["eos_token_id"]
    attends = [*_attends(c["layer_types"]), True][:blocks]
    keys: dict[str, Any] = {
        "hyper_connection.count": c["hc_count"], "hyper_connection.low_rank": c["hc_lowrank"],
        "attention.indexer.head_count": c["indexer_n_heads"], "attention.indexer.key_length": c["indexer_head_dim"],
        "attention.indexer.top_k": c["indexer_budget"], "attention.compress_ratios": [ratio * a for a in attends],
    }  # fmt: skip
    if hashes:
        keys |= {
            "ple.layers": list(g.ple_layers), "ple.ngram_size": c["ngram_size"],
            "ple.heads_per_ngram": c["heads_per_ngram"], "ple.conv_kernel": c["ple_conv_kernel_size"],
            "ple.eos_token_id": eos[0] if isinstance(eos, list) else eos, "embedding_length_per_layer_input": g.row_dim,
            "ple.layer_multipliers": np.concatenate([h.multipliers for h in hashes]),
            "ple.head_offsets": np.concatenate([h.offsets + b for h, b in zip(hashes, bases, strict=True)]),
            "ple.head_vocab_sizes": np.concatenate([h.sizes for h in hashes]),
        }  # fmt: skip
        if "image_token_id" in c:
            keys["ple.image_token_id"] = c["image_token_id"]
    return keys


def tiny_text(vocab: int) -> dict[str, Any]:
    """The tokenizer, template and stop ids of tests/tiny.py's `write_text_files` (id = byte), as metadata."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    specials = SPECIALS[: max(0, vocab - FIRST_SPECIAL)]
    tokens = [letters[byte] for byte in range(min(256, vocab))] + list(specials)
    padding = vocab - len(tokens)
    types = [1] * (len(tokens) - len(specials)) + [3] * len(specials) + [5] * padding
    text = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen35", "tokenizer.chat_template": TEMPLATE,
            "tokenizer.ggml.tokens": tokens + [f"[PAD{len(tokens) + i}]" for i in range(padding)],
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.add_bos_token": False}  # fmt: skip
    if len(specials) > 2:
        text |= {"tokenizer.ggml.eos_token_id": FIRST_SPECIAL + 2, "tokenizer.ggml.padding_token_id": FIRST_SPECIAL}
    return text


# ---- the file --------------------------------------------------------------------------------------------------------


def write_gguf(
    path: Path, config: Mapping[str, Any], weights: Weights, *, types: Types = "F32", splits: int = 1, mtp: bool = True,
    tokenizer: bool | Mapping[str, Any] = True, fused_experts: bool = False, old: bool = False,
    change: Callable[[dict[str, Any]], None] | None = None
) -> Path:  # fmt: skip
    """Write `weights` (canonical names, as in a Hugging Face folder of `config`) as a GGUF file; returns its path.

    types: see `type_of`. splits: that many files `NAME-00001-of-0000N.gguf`, the first one's path is returned.
    tokenizer: the tiny one, none, or the metadata of another. change: what else to do to the metadata.
    """
    path, arch = Path(path), architecture(config)
    tensors = layout(config, weights, mtp=mtp, fused_experts=fused_experts, old=old)
    facts = metadata(config, head=any(".nextn." in name for name in tensors))
    if tokenizer:
        facts |= tiny_text(config["vocab_size"]) if tokenizer is True else tokenizer
    if change:
        change(facts)
    writer = GGUFWriter(path, arch)
    for key, value in facts.items():
        _add(writer, key, value)
    names = list(tensors)
    for part in range(splits):
        if part:
            writer.tensors.append({})
        for name in names[len(names) * part // splits : len(names) * (part + 1) // splits]:
            _add_tensor(writer, name, values_of(arch, name, tensors[name]), types)
    first = writer.format_shard_names(path)[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return first


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, types: Types) -> None:
    dtype = type_of(name, values.shape, types)
    writer.add_tensor(name, encode(values, dtype), raw_dtype=GGMLQuantizationType[dtype])


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, GGUFValueType.INT64)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))
