"""The sizes of engine qwen38 (Qwen3.8-Flash-Next, model type qwen4_exp), read from a config and checked.

Idea: one frozen dataclass filled in one place; everything else in the house takes sizes from it and never looks into a
config. A value that is missing, absurd or at odds with another is a ModelError that names the key.
Source: model_spec.md 5a. Guarded by tests/models/test_layout.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from coli.formats.strict import show
from coli.models.config import Reader, layer_types, rope

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
LAYER_TYPES = {
    "linear_attention": "gdn",
    "full_attention": "attention",
    "qwen_sparse_attention": "attention",
    "indexed_attention": "attention",
}
EXPERT_LIMIT = 1 << 20
HEAD_LIMIT = 1 << 12
GATES = {"sigmoid": "sigmoid", "silu": "silu", "swish": "silu"}


@dataclass(frozen=True)
class Geometry:
    """Every size of the model, checked. Layers count from 0; `index_budget` is in tokens."""

    # what coli/models/qwen36_geometry.py leaves to the config and this architecture settles
    output_gate: ClassVar[bool] = True
    gdn_grouped: ClassVar[bool] = False
    centred: ClassVar[bool] = True
    dense_inter: ClassVar[int] = 0

    hidden: int
    layers: int
    vocab: int
    layer_types: tuple[str, ...]  # "gdn" or "attention"
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    gdn_conv: int
    gate: str  # of the DeltaNet output: "sigmoid" or "silu"
    experts: int
    top_k: int
    moe_inter: int
    shared_inter: int
    norm_topk: bool
    streams: int
    hc_lowrank: int
    index_heads: int
    index_dim: int
    index_budget: int
    index_ratio: int
    ple_layers: tuple[int, ...]  # empty: every ple_ and ngram_ field is 0
    ple_dim: int
    ple_conv: int
    ngram_size: int
    heads_per_ngram: int
    ngram_base: int
    ngram_divisor: int
    ngram_parts: int
    ngram_seed: int
    ngram_eos: int
    eps: float
    max_context: int
    tied: bool

    @property
    def width(self) -> int:
        """Features of a row's residual: all streams side by side."""
        return self.streams * self.hidden

    @property
    def conv_channels(self) -> int:
        """Features the DeltaNet convolution sees: q, k and v of all heads."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def ngram_heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def row_dim(self) -> int:
        """Features of one n-gram table row."""
        return self.ple_dim // self.ngram_heads

    @property
    def index_blocks(self) -> int:
        """Blocks of `index_ratio` rows the indexer may pick."""
        return self.index_budget // self.index_ratio


def geometry(config: Mapping[str, Any], where: object = "config.json") -> Geometry:
    """The geometry a (flattened) text config describes. Raises ModelError naming the key."""
    read = Reader(config, where)
    if config.get("model_type") not in MODEL_TYPES:
        raise read.bad("model_type", f"{show(config.get('model_type'))} is not a model this engine runs",
                       f"it runs {' and '.join(MODEL_TYPES)}")  # fmt: skip
    layers = read.size("num_hidden_layers", limit=4096)
    hidden, heads, head_dim = read.size("hidden_size"), read.size("num_attention_heads"), read.size("head_dim")
    theta, rotary = rope(read, head_dim, factor=0.25)
    act = read.choice("hidden_act", GATES, "silu")
    if act != "silu":
        raise read.bad("hidden_act", f"experts with {act} are not supported")
    found = Geometry(
        hidden=hidden,
        layers=layers,
        vocab=read.size("vocab_size"),
        layer_types=layer_types(read, layers, LAYER_TYPES),
        heads=heads,
        kv_heads=read.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary,
        rope_theta=theta,
        gdn_key_heads=read.size("linear_num_key_heads"),
        gdn_value_heads=read.size("linear_num_value_heads"),
        gdn_key_dim=read.size("linear_key_head_dim"),
        gdn_value_dim=read.size("linear_value_head_dim"),
        gdn_conv=read.size("linear_conv_kernel_dim", limit=64),
        gate=read.choice("output_gate_type", GATES, act),
        experts=read.size("num_experts", limit=1 << 16),
        top_k=read.size("num_experts_per_tok"),
        moe_inter=read.size("moe_intermediate_size"),
        shared_inter=read.size("shared_expert_intermediate_size"),
        norm_topk=read.flag("norm_topk_prob", True),
        streams=read.size("hc_count", limit=64),
        hc_lowrank=read.size("hc_lowrank"),
        index_heads=read.size("indexer_n_heads"),
        index_dim=read.size("indexer_head_dim"),
        index_budget=read.size("indexer_budget"),
        index_ratio=read.size("indexer_compress_ratio"),
        **_ple(read, layers),
        eps=read.number("rms_norm_eps", below=1.0),
        max_context=read.size("max_position_embeddings"),
        tied=read.flag("tie_word_embeddings", False),
    )
    _agree(found, read)
    return found


def _ple(read: Reader, layers: int) -> dict[str, Any]:
    """The ple_ and ngram_ fields; zeros for a model without PLE layers."""
    listed = read.get("ple_layer_ids", [])
    if not isinstance(listed, list) or not all(type(i) is int and 1 <= i <= layers for i in listed):
        raise read.bad("ple_layer_ids", f"{show(listed)} is not a list of layers 1..{layers}")
    if len(set(listed)) != len(listed):
        raise read.bad("ple_layer_ids", f"{show(listed)} names a layer twice")
    names = ("ple_dim", "ple_conv", "ngram_size", "heads_per_ngram", "ngram_base", "ngram_divisor", "ngram_parts",
             "ngram_seed", "ngram_eos")  # fmt: skip
    if not listed:
        return {"ple_layers": ()} | dict.fromkeys(names, 0)
    eos = read.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is not int or not 0 <= eos < read.size("vocab_size"):
        raise read.bad("eos_token_id", f"{show(eos)} is not a token: the n-gram hash cuts its window there")
    values = (
        read.size("ple_embed_dim"),
        read.size("ple_conv_kernel_size", limit=64),
        read.size("ngram_size", low=2, limit=16),
        read.size("heads_per_ngram", limit=256),
        read.size("ngram_vocab_size_base", low=2, limit=1 << 36),
        read.size("make_ngram_vocab_size_divisible_by"),
        read.size("split_ngram_parts", limit=1 << 16, default=1),
        read.size("seed", low=0, limit=1 << 62, default=1234),
        eos,
    )
    return {"ple_layers": tuple(sorted(i - 1 for i in listed))} | dict(zip(names, values, strict=True))


def _agree(g: Geometry, read: Reader) -> None:
    """Sizes that must fit each other."""
    rules = [
        (g.heads % g.kv_heads == 0, "num_attention_heads", f"{g.heads} heads over {g.kv_heads} key/value heads"),
        (g.gdn_value_heads % g.gdn_key_heads == 0, "linear_num_value_heads",
         f"{g.gdn_value_heads} value heads over {g.gdn_key_heads} key heads"),
        (g.top_k <= g.experts, "num_experts_per_tok", f"top {g.top_k} of {g.experts} experts"),
        (g.gdn_value_dim % 16 == 0, "linear_value_head_dim",
         f"{g.gdn_value_dim} is no multiple of 16, the width of the DeltaNet kernel's columns"),
        (g.index_budget >= g.index_ratio, "indexer_budget",
         f"{g.index_budget} tokens do not hold a block of {g.index_ratio}"),
        (g.rotary_dim <= g.index_dim, "indexer_head_dim", f"{g.index_dim} is below the rotated width {g.rotary_dim}"),
        (read.size("indexer_kv_heads", default=1) == 1, "indexer_kv_heads", "only one key head is supported"),
        (not g.ple_layers or g.ple_dim % g.ngram_heads == 0, "ple_embed_dim",
         f"{g.ple_dim} does not divide over {g.ngram_heads} n-gram heads"),
        (g.layers * g.experts <= EXPERT_LIMIT, "num_experts", f"{g.layers} layers of {g.experts} are absurd"),
        (len(g.ple_layers) * g.ngram_heads <= HEAD_LIMIT, "heads_per_ngram",
         f"{g.ngram_heads} heads in {len(g.ple_layers)} layers are absurd"),
    ]  # fmt: skip
    for holds, key, what in rules:
        if not holds:
            raise read.bad(key, what)
