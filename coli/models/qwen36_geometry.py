"""The sizes of engine qwen36, read from a config and checked: one dataclass for four families.

    qwen3_5_moe   Qwen3.6-35B-A3B       DeltaNet and gated attention, experts and a shared expert
    qwen3_5       Qwen3.8-27B           the same with a dense MLP
    qwen3_next    Qwen3-Coder-Next      as qwen3_5_moe; its DeltaNet inputs are stored grouped by key head
    qwen3_moe     Qwen3-Coder-30B-A3B   plain attention in every layer, experts only, norms not zero-centred

What tells them apart is a field here, never a name later. Source: model_spec.md sections 2 to 4, for qwen3_moe the
public configuration class. Guarded by tests/models/test_qwen36_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coli.formats.strict import show
from coli.models.config import Reader, layer_types, rope

MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "qwen3_next", "qwen3_moe")
LAYER_TYPES = {"linear_attention": "gdn", "full_attention": "attention"}
EXPERT_LIMIT = 1 << 20
GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_INTERVAL = 4  # every fourth layer attends where a config names no types


@dataclass(frozen=True)
class Geometry:
    """Every size of the model, checked. Layers count from 0; sizes of what a family has not are 0."""

    hidden: int
    layers: int
    vocab: int
    layer_types: tuple[str, ...]  # "gdn" or "attention"
    mlp_types: tuple[str, ...]  # "moe" or "dense"
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    output_gate: bool  # q_proj brings a gate for every head's output
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    gdn_conv: int
    gdn_grouped: bool  # its inputs are in_proj_qkvz and in_proj_ba, by key head
    gate: str  # of the DeltaNet output: "silu" or "sigmoid"
    experts: int
    top_k: int
    moe_inter: int
    shared_inter: int
    dense_inter: int
    norm_topk: bool
    centred: bool  # norms hold w - 1
    eps: float
    max_context: int
    tied: bool

    @property
    def width(self) -> int:
        """Features of a row's residual."""
        return self.hidden

    @property
    def conv_channels(self) -> int:
        """Features the DeltaNet convolution sees: q, k and v of all heads."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def query_width(self) -> int:
        """Features of q_proj's output."""
        return self.heads * self.head_dim * (2 if self.output_gate else 1)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(i for i, kind in enumerate(self.mlp_types) if kind == "moe")


def geometry(config: Mapping[str, Any], where: object = "config.json") -> Geometry:
    """The geometry a (flattened) text config describes. Raises ModelError naming the key."""
    read = Reader(config, where)
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise read.bad("model_type", f"{show(kind)} is not a model this engine runs",
                       f"it runs {', '.join(MODEL_TYPES)}")  # fmt: skip
    family = str(kind).removesuffix("_text")
    layers = read.size("num_hidden_layers", limit=4096)
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    plain = family == "qwen3_moe"
    head_dim = read.size("head_dim", default=hidden // heads if plain else 256)
    theta, rotary = rope(read, head_dim, factor=1.0 if plain else 0.25)
    if read.choice("hidden_act", GATES, "silu") != "silu":
        raise read.bad("hidden_act", "only silu is supported")
    _refuse(read, plain)
    mlp_types = ("dense",) * layers if family == "qwen3_5" else _mlp_types(read, layers, family)
    found = Geometry(
        hidden=hidden, layers=layers, vocab=read.size("vocab_size"),
        layer_types=("attention",) * layers if plain else _layer_types(read, layers), mlp_types=mlp_types,
        heads=heads, kv_heads=read.size("num_key_value_heads"), head_dim=head_dim, rotary_dim=rotary,
        rope_theta=theta, output_gate=not plain,
        **_deltanet(read, family),
        **_experts(read, family, mlp_types),
        dense_inter=read.size("intermediate_size") if "dense" in mlp_types else 0,
        centred=not plain, eps=read.number("rms_norm_eps", below=1.0),
        max_context=read.size("max_position_embeddings"), tied=read.flag("tie_word_embeddings", False),
    )  # fmt: skip
    _agree(found, read)
    return found


def _refuse(read: Reader, plain: bool) -> None:
    """Switches of the public configuration classes that would change the math."""
    if read.flag("attention_bias", False):
        raise read.bad("attention_bias", "projections with a bias are not supported")
    if read.flag("use_sliding_window", False):
        raise read.bad("use_sliding_window", "sliding windows are not supported")
    if not plain and not read.flag("attn_output_gate", True):
        raise read.bad("attn_output_gate", "attention without its output gate is not supported")


def _layer_types(read: Reader, layers: int) -> tuple[str, ...]:
    if read.get("layer_types", None) is not None:
        return layer_types(read, layers, LAYER_TYPES)
    every = read.size("full_attention_interval", default=_INTERVAL)
    return tuple("attention" if (i + 1) % every == 0 else "gdn" for i in range(layers))


def _mlp_types(read: Reader, layers: int, family: str) -> tuple[str, ...]:
    """Which layers hold experts: all, but for two old switches of qwen3_next and qwen3_moe."""
    if family == "qwen3_5_moe":
        return ("moe",) * layers
    step = read.size("decoder_sparse_step", default=1)
    only = read.get("mlp_only_layers", [])
    if not isinstance(only, list) or not all(type(i) is int and 0 <= i < layers for i in only):
        raise read.bad("mlp_only_layers", f"{show(only)} is not a list of layers 0..{layers - 1}")
    types = tuple("dense" if i in only or (i + 1) % step else "moe" for i in range(layers))
    if "moe" not in types:
        raise read.bad("decoder_sparse_step", "no layer would hold experts")
    return types


def _deltanet(read: Reader, family: str) -> dict[str, Any]:
    if family == "qwen3_moe":
        names = ("gdn_key_heads", "gdn_value_heads", "gdn_key_dim", "gdn_value_dim", "gdn_conv")
        return dict.fromkeys(names, 0) | {"gdn_grouped": False, "gate": "silu"}
    return {
        "gdn_key_heads": read.size("linear_num_key_heads"), "gdn_value_heads": read.size("linear_num_value_heads"),
        "gdn_key_dim": read.size("linear_key_head_dim"), "gdn_value_dim": read.size("linear_value_head_dim"),
        "gdn_conv": read.size("linear_conv_kernel_dim", low=2, limit=64), "gdn_grouped": family == "qwen3_next",
        "gate": read.choice("output_gate_type", GATES, "silu"),
    }  # fmt: skip


def _experts(read: Reader, family: str, mlp_types: tuple[str, ...]) -> dict[str, Any]:
    if "moe" not in mlp_types:
        return dict.fromkeys(("experts", "top_k", "moe_inter", "shared_inter"), 0) | {"norm_topk": True}
    named = read.get("num_experts", None) is not None
    count = "num_experts" if named or "num_local_experts" not in read.config else "num_local_experts"  # transformers 5
    # renormalising is fixed in qwen3_5_moe, on in qwen3_next and off in qwen3_moe unless the config says otherwise
    norm = True if family == "qwen3_5_moe" else read.flag("norm_topk_prob", family == "qwen3_next")
    return {
        "experts": read.size(count, limit=1 << 16), "top_k": read.size("num_experts_per_tok"),
        "moe_inter": read.size("moe_intermediate_size"),
        "shared_inter": 0 if family == "qwen3_moe" else read.size("shared_expert_intermediate_size"),
        "norm_topk": norm,
    }  # fmt: skip


def _agree(g: Geometry, read: Reader) -> None:
    """Sizes that must fit each other."""
    gdn = "gdn" in g.layer_types
    rules = [
        (g.heads % g.kv_heads == 0, "num_attention_heads", f"{g.heads} heads over {g.kv_heads} key/value heads"),
        (not gdn or g.gdn_value_heads % g.gdn_key_heads == 0, "linear_num_value_heads",
         f"{g.gdn_value_heads} value heads over {g.gdn_key_heads} key heads"),
        (not gdn or g.gdn_value_dim % 16 == 0, "linear_value_head_dim",
         f"{g.gdn_value_dim} is no multiple of 16, the width of the DeltaNet kernel's columns"),
        (g.top_k <= g.experts, "num_experts_per_tok", f"top {g.top_k} of {g.experts} experts"),
        (g.layers * g.experts <= EXPERT_LIMIT, "num_experts", f"{g.layers} layers of {g.experts} are absurd"),
    ]  # fmt: skip
    for holds, key, what in rules:
        if not holds:
            raise read.bad(key, what)
