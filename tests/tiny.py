"""Tiny random checkpoints of the qwen4_exp family, in every form a real one may have.

Idea: `tiny_weights` draws float32 tensors distributed so that every part of the model matters (model_spec.md section 0
was measured with these), `write_tiny` stores them as a Hugging Face folder: any dtype, prefix, split, experts fused or
one by one, block FP8 with any block, with tokenizer, chat template and draft head. What is written here is written by
this file's own few lines, so that reader and writer cannot share a mistake.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coli.models.qwen38_layout import HEAD, expected, expected_head, geometry
from coli.ngrams import NgramHash

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
FIRST_SPECIAL = 256
ITEM = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8}

TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking -%}
<think>
{% else -%}
<think>

</think>

{% endif -%}
{%- endif -%}
"""

Stored = dict[str, tuple[str, np.ndarray]]
"""name -> (safetensors dtype, array in its storage dtype)"""


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A flat text config: 2 x (3 GDN + 1 attention), two PLE layers, an index budget of 16 tokens."""
    config: dict[str, Any] = dict(
        model_type="qwen4_exp_text", architectures=["Qwen4ExpForCausalLM"], hidden_size=64, vocab_size=272,
        num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32, hidden_act="silu",
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=6, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, norm_topk_prob=True, hc_count=4, hc_lowrank=12, ple_layer_ids=[2, 6],
        ple_embed_dim=64, ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=2, ngram_vocab_size_base=101,
        make_ngram_vocab_size_divisible_by=16, split_ngram_parts=4, seed=1234, indexer_n_heads=4, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4, output_gate_type="sigmoid",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5,
                             mrope_section=[3, 3, 2], mrope_interleaved=True),
        rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=FIRST_SPECIAL,
        bos_token_id=None, mtp_num_hidden_layers=1,
    )  # fmt: skip
    return config | overrides


def odd_config(**overrides: Any) -> dict[str, Any]:
    """Sizes that divide nothing: primes and odd numbers wherever the architecture allows them."""
    odd = dict(
        hidden_size=52, vocab_size=269, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
        linear_key_head_dim=10, linear_value_head_dim=48, linear_num_key_heads=1, linear_num_value_heads=3,
        linear_conv_kernel_dim=3, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=23,
        shared_expert_intermediate_size=17, hc_count=3, hc_lowrank=5, ple_embed_dim=36, ple_conv_kernel_size=3,
        ngram_vocab_size_base=53, make_ngram_vocab_size_divisible_by=15, split_ngram_parts=3, indexer_n_heads=3,
        indexer_head_dim=11, indexer_budget=12, indexer_compress_ratio=3, output_gate_type="swish",
    )  # fmt: skip
    return tiny_config(**odd | overrides)


# ---- weights -----------------------------------------------------------------------------------------------------


def tiny_weights(config: dict[str, Any], seed: int = 0, mtp: bool = True) -> dict[str, np.ndarray]:
    """float32 (and int64) tensors by canonical name, experts fused and n-gram tables whole."""
    g = geometry(config)
    names = {f"layers.{i}.mlp.experts.gate_up_proj" for i in range(g.layers)}
    names |= {f"layers.{i}.ple.ple_embedding.ngram_embedding.weight" for i in g.ple_layers}
    shapes = expected(g, names)
    if mtp:
        shapes |= expected_head(g, {f"{HEAD}mlp.experts.gate_up_proj"})
    rng = np.random.default_rng(seed)
    weights = {name: _draw(rng, name, shape) for name, shape in sorted(shapes.items())}
    for index, layer in enumerate(g.ple_layers):
        hashes, p = NgramHash(g, index), f"layers.{layer}.ple.ple_embedding."
        weights[f"{p}layer_multipliers"] = hashes.multipliers
        weights[f"{p}ngram_heads_vocab_sizes"] = hashes.sizes
        weights[f"{p}ngram_heads_offsets"] = hashes.offsets
    return weights


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith(("A_log", "dt_bias")):
        values *= 0.5
    elif len(shape) == 1:
        values = (1.0 if name.endswith("linear_attn.norm.weight") else 0.0) + 0.2 * values
    elif "conv1d" in name:
        values *= 0.4
    else:
        values *= 0.6 if "embed" in name else 1.2 / shape[-1] ** 0.5
    return values.astype(np.float32)


def copied_config(**overrides: Any) -> dict[str, Any]:
    """A GDN layer and an attention layer, for `copy_trunk_into_head`."""
    return tiny_config(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], ple_layer_ids=[], **overrides
    )


def copy_trunk_into_head(weights: dict[str, np.ndarray]) -> None:
    """Make the draft head of a `copied_config` the trunk's own function, so that every draft is right.

    Trunk: the mixers run and write their state, but add nothing, and so do the first layer's experts; what is left is
    embedding, one mixture of experts and the final mixer, a function of the last token. Head: fc_hidden = 0 shuts out
    the streams, fc_embedding = 1 and embeddings of ones and minus ones pass its norm as they are, the rest is copied.
    """
    for name, values in weights.items():
        still = "layers.0.mlp.experts.down_proj", "layers.0.mlp.shared_expert.down_proj.weight"
        if name.endswith(("linear_attn.out_proj.weight", "self_attn.o_proj.weight")) or name in still:
            values[:] = 0
    embedding = weights["embed_tokens.weight"]
    embedding[:] = np.where(embedding < 0, -1, 1)
    weights["mtp.fc_hidden.weight"][:] = 0
    weights["mtp.fc_embedding.weight"][:] = np.eye(embedding.shape[1])
    weights["mtp.pre_fc_norm_embedding.weight"][:] = 0  # a zero-centred norm: times one
    copies = {"mtp.layers.0.": "layers.1.", "mtp.hyper_connection_mixer.": "hyper_connection_mixer."}
    for name in weights:
        for head, trunk in copies.items():
            if name.startswith(head):
                weights[name][:] = weights[trunk + name.removeprefix(head)]


# ---- number formats ----------------------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def store(values: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    if values.dtype == np.int64:
        return "I64", values
    encoded = {"F32": lambda v: v, "F16": lambda v: v.astype(np.float16), "BF16": bf16}[dtype](values)
    return dtype, encoded


def e4m3(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 codes of the nearest E4M3 value (|v| <= 448)."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    grid = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    nearest = np.searchsorted((grid[1:] + grid[:-1]) / 2, np.abs(values))
    return (nearest | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def fp8_blocks(values: np.ndarray, block: tuple[int, int], scale_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 [..., out, in] -> (uint8 codes, scales in the storage of `scale_dtype`), largest of a block at 448."""
    rows, columns = values.shape[-2:]
    br, bc = block
    grid = (-(-rows // br), -(-columns // bc))
    padded = np.zeros((*values.shape[:-2], grid[0] * br, grid[1] * bc), np.float32)
    padded[..., :rows, :columns] = values
    tiles = padded.reshape(*values.shape[:-2], grid[0], br, grid[1], bc)
    scale = np.maximum(np.abs(tiles).max(axis=(-3, -1)), 1e-6) / 448
    stored = store(scale.astype(np.float32), scale_dtype)[1]
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if scale_dtype == "BF16" else stored.astype(np.float32)
    wide = np.repeat(np.repeat(exact, br, axis=-2), bc, axis=-1)[..., :rows, :columns]
    return e4m3(np.clip(values / wide, -448, 448)), stored


# ---- files -------------------------------------------------------------------------------------------------------


def header_bytes(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """(8-byte length and padded JSON, absolute offset of every tensor) for tensors laid out in this order."""
    entries, offsets, end = {}, {}, 0
    for name, (dtype, shape) in specs.items():
        nbytes = int(np.prod(shape, dtype=object)) * ITEM[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        offsets[name] = end
        end += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def write_safetensors(path: Path, tensors: Stored) -> None:
    """Widest items first, as the reference writer does, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: -ITEM[tensors[name][0]])
    head, _ = header_bytes({name: (tensors[name][0], tensors[name][1].shape) for name in order})
    with open(path, "wb") as file:
        file.write(head)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name][1]).tobytes())


def write_folder(folder: Path, config: dict[str, Any], tensors: Stored, shards: int = 1) -> Path:
    """config.json and the weights, in one file or in `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    placed = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in names})
        placed |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(a.nbytes for _, a in tensors.values())}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def split_experts(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Fused experts as one tensor each."""
    out: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(values):
                stem, half = f"{name.removesuffix('gate_up_proj')}{expert}.", len(both) // 2
                out |= {f"{stem}gate_proj.weight": both[:half], f"{stem}up_proj.weight": both[half:]}
        elif name.endswith("experts.down_proj"):
            out |= {f"{name.removesuffix('down_proj')}{e}.down_proj.weight": v for e, v in enumerate(values)}
        else:
            out[name] = values
    return out


def _split_table(weights: dict[str, np.ndarray], parts: int) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, values in weights.items():
        if name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            out |= {f"{stem}shard_{i}.weight": part for i, part in enumerate(np.split(values, parts))}
        else:
            out[name] = values
    return out


def stored_weights(
    weights: Mapping[str, np.ndarray], *, experts: str, dense: str, table: str, block: tuple[int, int],
    scale_dtype: str
) -> Stored:  # fmt: skip
    """Encode every tensor in the dtype of its kind ("FP8" for blocks, or for the table one scalar scale)."""
    out: Stored = {}
    for name, values in weights.items():
        if ".ngram_embedding." in name:
            if table != "FP8":
                out[name] = store(values, table)
                continue
            scale = np.array([2.0**-7], np.float32)
            out[name] = "F8_E4M3", e4m3(np.clip(values / scale, -448, 448))
            out[re.sub(r"(shard_\d+\.)?weight$", "weight_scale", name)] = store(scale, "BF16")
            continue
        matrix = values.ndim >= 2 and "conv1d" not in name and "embed_tokens" not in name
        kind = experts if ".experts." in name else dense
        if kind == "FP8" and matrix:
            codes, scale = fp8_blocks(values, block, scale_dtype)
            out[name], out[f"{name}_scale_inv"] = ("F8_E4M3", codes), (scale_dtype, scale)
        else:
            out[name] = store(values, "BF16" if kind == "FP8" else kind)
    return out


def write_tiny(
    folder: Path, config: dict[str, Any] | None = None, *, seed: int = 0, dtype: str = "F32", dense: str | None = None,
    prefix: str = "model.", shards: int = 1, per_expert: bool | None = None, mtp: bool = True,
    scale_dtype: str = "BF16", block: tuple[int, int] = (128, 128), table_shards: int | None = None,
    visual: bool = False, poison: str | None = None, change: Callable[[dict[str, np.ndarray]], None] | None = None
) -> Path:  # fmt: skip
    """Write a checkpoint and return its folder.

    dtype: F32, F16, BF16 or FP8; FP8 is for experts (blocks) and n-gram tables (one scale), everything else is then
    `dense` (BF16 unless given, may be FP8 too). per_expert: unless given as in the real releases, one by one for FP8
    and fused otherwise. table_shards: None for the config's split_ngram_parts, 0 for the whole table in one tensor,
    another number rewrites the config. poison: canonical name of a tensor to put one infinity in. change: what else to
    do to the float32 weights before they are stored.
    """
    config = tiny_config() if config is None else dict(config)
    if table_shards:
        config["split_ngram_parts"] = table_shards
    weights = tiny_weights(config, seed, mtp)
    if poison:
        weights[poison].reshape(-1)[0] = np.inf
    if change:
        change(weights)
    if per_expert or (per_expert is None and dtype == "FP8"):
        weights = split_experts(weights)
    if table_shards != 0:
        weights = _split_table(weights, config["split_ngram_parts"])
    dense = dense or ("BF16" if dtype == "FP8" else dtype)
    tensors = stored_weights(weights, experts=dtype, dense=dense, table=dtype, block=block, scale_dtype=scale_dtype)
    named = {n if n.startswith(("lm_head.", "mtp.")) else prefix + n: t for n, t in tensors.items()}
    if visual:
        named["model.visual.blocks.0.attn.qkv.weight"] = store(np.ones((6, 2), np.float32), "BF16")
    raw: dict[str, Any] = config
    if prefix == "model.language_model.":
        raw = {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": config,
               "vision_config": {"depth": 1, "hidden_size": 2}}  # fmt: skip
    if "FP8" in (dtype, dense):
        raw = raw | {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    write_folder(Path(folder), raw, named, shards)
    write_text_files(Path(folder), config["vocab_size"])
    return Path(folder)


def write_text_files(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer (id = byte value, specials from 256 as far as `vocab` allows), template, stop ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(min(256, vocab))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIALS[: max(0, vocab - FIRST_SPECIAL)]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stops = {"eos_token_id": [FIRST_SPECIAL + 2, FIRST_SPECIAL], "do_sample": True, "temperature": 0.7}
    (folder / "generation_config.json").write_text(json.dumps(stops))
