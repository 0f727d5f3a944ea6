"""Tiny random checkpoints of the four families of engine qwen36, in every form a real one may have.

Idea: `shapes36` is a table of names and shapes written from model_spec.md 2d, 3c, 3d and 4d (qwen3_moe: from its
modelling code), not from the engine's layout, so that a wrong layout is found. `tiny36_weights` draws float32 tensors
distributed so that every part matters, `write_tiny36` stores them as a Hugging Face folder: any dtype, prefix, split,
experts fused or one by one, any set of matrices in FP8 blocks. The configs are spelled as the releases spell them:
qwen3_next and qwen3_moe with flat RoPE keys and no layer types, qwen3_5 with `rope_parameters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import FIRST_SPECIAL, Stored, fp8_blocks, split_experts, store, write_folder, write_text_files

FAMILIES = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe")
HEADED = FAMILIES[:3]  # those that have a draft head
HEAD = "mtp.layers.0."
Shape = tuple[int, ...]

_COMMON = dict(
    hidden_size=64, vocab_size=272, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    hidden_act="silu", rms_norm_eps=1e-6, max_position_embeddings=512, tie_word_embeddings=False,
    attention_bias=False, eos_token_id=FIRST_SPECIAL, bos_token_id=None,
)  # fmt: skip
_GDN = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
    linear_num_value_heads=6,
)  # fmt: skip
_MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
_SHARED = dict(shared_expert_intermediate_size=48)
_SPARSE = dict(intermediate_size=80, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True)
_TYPES = dict(layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2)
_ROPE35 = dict(
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[2, 1, 1],
                         mrope_interleaved=True),
    attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
)  # fmt: skip
_FLAT_ROPE = dict(rope_theta=10000.0, rope_scaling=None)

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(
        model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], full_attention_interval=4,
        partial_rotary_factor=0.25, **_COMMON, **_GDN, **_MOE, **_SHARED, **_SPARSE, **_FLAT_ROPE),
    "qwen3_5_moe_text": dict(
        model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"], **_COMMON, **_GDN, **_MOE, **_SHARED,
        **_TYPES, **_ROPE35),
    "qwen3_5_text": dict(
        model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], intermediate_size=96,
        output_gate_type="swish", **_COMMON, **_GDN, **_TYPES, **_ROPE35),
    "qwen3_moe": dict(
        model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], use_sliding_window=False, sliding_window=None,
        max_window_layers=8, **(_COMMON | dict(num_hidden_layers=5)), **_MOE, **_SPARSE, **_FLAT_ROPE),
}  # fmt: skip


def tiny36_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A flat text config: 2 x (3 GDN + 1 attention), five attention layers in qwen3_moe."""
    return _CONFIGS[family] | overrides


def odd36_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Sizes that divide nothing wherever the architecture allows it (GDN values come in sixteens)."""
    odd: dict[str, Any] = dict(
        hidden_size=52, vocab_size=269, num_attention_heads=3, num_key_value_heads=1, head_dim=20,
        linear_key_head_dim=10, linear_value_head_dim=48, linear_num_key_heads=1, linear_num_value_heads=3,
        linear_conv_kernel_dim=3, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=23,
        shared_expert_intermediate_size=17, intermediate_size=37, partial_rotary_factor=0.5,
    )  # fmt: skip
    if "rope_parameters" in _CONFIGS[family]:
        sections = dict(partial_rotary_factor=0.5, mrope_section=[2, 2, 1])
        odd["rope_parameters"] = _CONFIGS[family]["rope_parameters"] | sections
    return _CONFIGS[family] | {key: value for key, value in odd.items() if key in _CONFIGS[family]} | overrides


def block36_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Every matrix has columns in multiples of 256, so that each ggml type can hold it; four layers.

    Value heads in fours a key head: the order GGUF files keep them in and its inverse differ."""
    even: dict[str, Any] = dict(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        linear_key_head_dim=32, linear_value_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=8,
        moe_intermediate_size=256, shared_expert_intermediate_size=256, intermediate_size=512,
        layer_types=_TYPES["layer_types"][:4],
    )  # fmt: skip
    if "rope_parameters" in _CONFIGS[family]:
        even["rope_parameters"] = _CONFIGS[family]["rope_parameters"] | dict(mrope_section=[3, 3, 2])
    return _CONFIGS[family] | {key: value for key, value in even.items() if key in _CONFIGS[family]} | overrides


def layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The mixer of every layer, "linear_attention" or "full_attention", however the config says it."""
    layers = config["num_hidden_layers"]
    if config["model_type"] == "qwen3_moe":
        return ["full_attention"] * layers
    every = config.get("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return config.get("layer_types") or default


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether the layer has experts, not one dense MLP."""
    if "num_experts" not in config or layer in config.get("mlp_only_layers", ()):
        return False
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0


# ---- names and shapes --------------------------------------------------------------------------------------------


def shapes36(config: Mapping[str, Any], mtp: bool = True) -> dict[str, Shape]:
    """Shape of every tensor by canonical name, experts fused; the head's too where the family has one."""
    c, hidden = config, config["hidden_size"]
    table: dict[str, Shape] = {"embed_tokens.weight": (c["vocab_size"], hidden), "norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        table["lm_head.weight"] = (c["vocab_size"], hidden)
    for layer, kind in enumerate(layer_kinds(c)):
        table |= _layer(c, f"layers.{layer}.", kind, is_sparse(c, layer))
    if mtp and c["model_type"] in HEADED:
        table |= {"mtp.fc.weight": (hidden, 2 * hidden)}
        table |= {f"mtp.{n}.weight": (hidden,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        table |= _layer(c, HEAD, "full_attention", "num_experts" in c)
    return table


def _layer(c: Mapping[str, Any], p: str, kind: str, sparse: bool) -> dict[str, Shape]:
    norms = {f"{p}{name}_layernorm.weight": (c["hidden_size"],) for name in ("input", "post_attention")}
    mixer = _gdn(c, f"{p}linear_attn.") if kind == "linear_attention" else _attention(c, f"{p}self_attn.")
    mlp = _experts(c, f"{p}mlp.") if sparse else _dense(c, f"{p}mlp.", c.get("intermediate_size", 0))
    return norms | mixer | mlp


def _gdn(c: Mapping[str, Any], p: str) -> dict[str, Shape]:
    hidden, hk, hv = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys, values = hk * c["linear_key_head_dim"], hv * c["linear_value_head_dim"]
    projections = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_a": hv, "in_proj_b": hv}
    if c["model_type"] == "qwen3_next":
        projections = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * hv}
    return {f"{p}{name}.weight": (rows, hidden) for name, rows in projections.items()} | {
        f"{p}conv1d.weight": (2 * keys + values, 1, c["linear_conv_kernel_dim"]),
        f"{p}A_log": (hv,), f"{p}dt_bias": (hv,), f"{p}norm.weight": (c["linear_value_head_dim"],),
        f"{p}out_proj.weight": (hidden, values),
    }  # fmt: skip


def _attention(c: Mapping[str, Any], p: str) -> dict[str, Shape]:
    hidden, d = c["hidden_size"], c["head_dim"]
    heads, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    gated = 1 if c["model_type"] == "qwen3_moe" else 2
    return {
        f"{p}q_proj.weight": (gated * heads, hidden), f"{p}k_proj.weight": (kv, hidden),
        f"{p}v_proj.weight": (kv, hidden), f"{p}o_proj.weight": (hidden, heads), f"{p}q_norm.weight": (d,),
        f"{p}k_norm.weight": (d,),
    }  # fmt: skip


def _dense(c: Mapping[str, Any], p: str, inter: int) -> dict[str, Shape]:
    hidden = c["hidden_size"]
    return {
        f"{p}gate_proj.weight": (inter, hidden), f"{p}up_proj.weight": (inter, hidden),
        f"{p}down_proj.weight": (hidden, inter),
    }  # fmt: skip


def _experts(c: Mapping[str, Any], p: str) -> dict[str, Shape]:
    hidden, experts, inter = c["hidden_size"], c["num_experts"], c["moe_intermediate_size"]
    table: dict[str, Shape] = {
        f"{p}gate.weight": (experts, hidden), f"{p}experts.gate_up_proj": (experts, 2 * inter, hidden),
        f"{p}experts.down_proj": (experts, hidden, inter),
    }  # fmt: skip
    if "shared_expert_intermediate_size" in c:
        table |= _dense(c, f"{p}shared_expert.", c["shared_expert_intermediate_size"])
        table[f"{p}shared_expert_gate.weight"] = (1, hidden)
    return table


# ---- weights -----------------------------------------------------------------------------------------------------


def tiny36_weights(config: Mapping[str, Any], seed: int = 0, mtp: bool = True) -> dict[str, np.ndarray]:
    """float32 tensors by canonical name, experts fused."""
    rng, plain = np.random.default_rng(seed), config["model_type"] == "qwen3_moe"
    return {name: _draw(rng, name, shape, plain) for name, shape in sorted(shapes36(config, mtp).items())}


def _draw(rng: np.random.Generator, name: str, shape: Shape, plain_norms: bool) -> np.ndarray:
    values = rng.standard_normal(shape)
    if name.endswith(("A_log", "dt_bias")):
        values *= 0.5
    elif len(shape) == 1:
        around = 1.0 if plain_norms or name.endswith("linear_attn.norm.weight") else 0.0
        values = around + 0.2 * values
    elif "conv1d" in name:
        values *= 0.4
    else:
        values *= 0.6 if "embed" in name else 1.2 / math.sqrt(shape[-1])
    return values.astype(np.float32)


def copied36_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A GDN layer and an attention layer, for `copy_trunk_into_head36`."""
    two = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], full_attention_interval=2)
    return tiny36_config(family, **{key: two[key] for key in two if key in _CONFIGS[family]} | overrides)


def copy_trunk_into_head36(weights: dict[str, np.ndarray]) -> None:
    """Make the draft head the trunk's own function, so that every draft is right. The last layer must be attention.

    Trunk: the mixers run and write their state, but add nothing, and so do all MLPs but the last layer's; what is left
    is embedding, that MLP, final norm and lm_head, a function of the last token. Head: fc = [1 | 0] takes the
    embedding and shuts the trunk's row out, embeddings of ones and minus ones pass the norm before it as they are, the
    rest is copied.
    """
    last = max(int(match[1]) for name in weights if (match := re.match(r"layers\.(\d+)\.", name)))
    mixers = "linear_attn.out_proj.weight", "self_attn.o_proj.weight"
    mlps = "mlp.down_proj.weight", "mlp.experts.down_proj", "mlp.shared_expert.down_proj.weight"
    for name, values in weights.items():
        if name.endswith(mixers) or (name.endswith(mlps) and not name.startswith(("mtp.", f"layers.{last}."))):
            values[:] = 0
    embedding = weights["embed_tokens.weight"]
    embedding[:] = np.where(embedding < 0, -1, 1)
    hidden = embedding.shape[1]
    weights["mtp.fc.weight"][:] = np.eye(hidden, 2 * hidden)
    weights["mtp.pre_fc_norm_embedding.weight"][:] = 0  # a zero-centred norm: times one
    weights["mtp.norm.weight"][:] = weights["norm.weight"]
    for name in weights:
        if name.startswith(HEAD):
            weights[name][:] = weights[f"layers.{last}.{name.removeprefix(HEAD)}"]


# ---- files -------------------------------------------------------------------------------------------------------

# What the FP8 releases quantise (model_spec.md 3d, 4d), in trunk and head. Readers must not know this list.
_RELEASE_FP8 = re.compile(
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj)|mlp\.(shared_expert\.)?(gate|up|down)_proj)"
    r"\.weight$"
)


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def release_fp8(name: str) -> bool:
    """Whether the FP8 releases keep this tensor in FP8 blocks."""
    return is_expert(name) or _RELEASE_FP8.search(name) is not None


def every_matrix(name: str) -> bool:
    """Whether a tensor is multiplied as a matrix: the most that an FP8 checkpoint could quantise."""
    return is_expert(name) or re.search(r"(proj\w*|gate|fc|lm_head)\.weight$", name) is not None


def encoded(weights: Mapping[str, np.ndarray], *, dtype: str, fp8: Callable[[str], bool], dense: str,
            block: tuple[int, int], scale_dtype: str, exact: str | None) -> Stored:  # fmt: skip
    """Every tensor in its storage dtype: with dtype "FP8" what `fp8` picks in blocks and the rest `dense`, else
    experts in `dtype` and the rest `dense`. `exact`: the dtype of A_log and dt_bias where it differs."""
    out: Stored = {}
    for name, values in weights.items():
        if dtype == "FP8" and fp8(name):
            codes, scale = fp8_blocks(values, block, scale_dtype)
            out[name], out[f"{name}_scale_inv"] = ("F8_E4M3", codes), (scale_dtype, scale)
        elif exact and name.endswith(("A_log", "dt_bias")):
            out[name] = store(values, exact)
        else:
            out[name] = store(values, dtype if is_expert(name) and dtype != "FP8" else dense)
    return out


def write_tiny36(
    folder: Path, config: Mapping[str, Any], *, seed: int = 0, dtype: str = "F32", dense: str | None = None,
    fp8: Callable[[str], bool] = release_fp8, prefix: str | None = None, shards: int = 1,
    per_expert: bool | None = None, head_per_expert: bool | None = None, mtp: bool = True,
    block: tuple[int, int] = (128, 128), scale_dtype: str = "BF16", exact: str | None = None, visual: bool = False,
    poison: str | None = None, change: Callable[[dict[str, np.ndarray]], None] | None = None
) -> Path:  # fmt: skip
    """Write a checkpoint and return its folder.

    dtype: F32, F16, BF16, or FP8 for the tensors that `fp8` picks by canonical name; `dense`: of everything that is no
    expert (BF16 beside FP8 unless given). prefix: "model." or "model.language_model." (as the release unless given).
    per_expert, head_per_expert: as the releases unless given, the head as the trunk. exact: dtype of A_log and dt_bias
    (as the rest unless given). poison: canonical name of a tensor to put one infinity in. change: what else to do to
    the float32 weights before they are stored.
    """
    family = config["model_type"]
    weights = tiny36_weights(config, seed, mtp)
    if poison:
        weights[poison].reshape(-1)[0] = np.inf
    if change:
        change(weights)
    if per_expert is None:
        per_expert = dtype == "FP8" or family in ("qwen3_next", "qwen3_moe")
    head_per_expert = per_expert if head_per_expert is None else head_per_expert
    parts = [({n: w for n, w in weights.items() if not n.startswith("mtp.")}, per_expert),
             ({n: w for n, w in weights.items() if n.startswith("mtp.")}, head_per_expert)]  # fmt: skip
    weights = {n: w for part, split in parts for n, w in (split_experts(part) if split else part).items()}
    dense = dense or ("BF16" if dtype == "FP8" else dtype)
    tensors = encoded(weights, dtype=dtype, fp8=fp8, dense=dense, block=block, scale_dtype=scale_dtype, exact=exact)
    nested = family.endswith("_text")
    prefix = prefix or ("model.language_model." if nested else "model.")
    named = {n if n.startswith(("lm_head.", "mtp.")) else prefix + n: t for n, t in tensors.items()}
    if visual:
        named["model.visual.blocks.0.attn.qkv.weight"] = store(np.ones((6, 2), np.float32), "BF16")
    raw = dict(config)
    if prefix == "model.language_model." and nested:
        raw = {"model_type": family.removesuffix("_text"), "text_config": raw,
               "tie_word_embeddings": config["tie_word_embeddings"],
               "architectures": [config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")],
               "vision_config": {"depth": 1, "hidden_size": 2}}  # fmt: skip
    if dtype == "FP8":
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    write_folder(Path(folder), raw, named, shards)
    write_text_files(Path(folder), config["vocab_size"])
    return Path(folder)
