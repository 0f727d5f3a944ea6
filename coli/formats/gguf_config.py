"""The keys of a GGUF file as the config a Hugging Face folder would have.

Idea: `geometry` of an engine reads one spelling. So each architecture has a function here that turns llama.cpp's keys
(`{arch}.block_count`, ...) into that spelling; types are checked here, ranges and agreement by the geometry.
Layers: `block_count` includes the draft heads (`nextn_predict_layers`), `num_hidden_layers` does not; a block is a head
by its tensors (`nextn.*`): without the key the last one may be, and with it one that has none is refused, for it might
be a layer of the trunk (a head that was taken out whole leaves no block, and is none). Numbers that were
stored in 32 bits come back as the decimal number they were (1e-06), so a folder and its GGUF compute the same bits.
Not stored: the padding of the n-gram table (its length says it) and the hash's seed (the layout check compares the
multipliers). Source: model_spec.md 9. Guarded by tests/formats/test_gguf.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.formats.safetensors import Tensor
from coli.formats.strict import listing, show

BLOCK_LIMIT = 4096
EMBEDDING, OUTPUT, TABLE = "token_embd.weight", "output.weight", "per_layer_token_embd.weight"
OTHER = "the file is damaged, or an old converter made it: convert or download the model again"


class Keys:
    """Typed access to the keys of one architecture; sizes and ranges are checked by whoever reads the config."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], where: object) -> None:
        self.metadata, self.tensors, self.where = metadata, tensors, where
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str) or arch not in CONFIGS:
            what = "no general.architecture" if arch is None else f"architecture {show(arch)} is not supported"
            raise ModelError(what, where, f"coli runs {', '.join(CONFIGS)}")
        self.arch = arch
        self.blocks = self.whole("block_count")
        headed = self._has(self.blocks - 1, "nextn.")
        self.heads = self.whole("nextn_predict_layers", int(headed))  # of them draft heads
        if not 0 < self.blocks <= BLOCK_LIMIT or not 0 <= self.heads < self.blocks:
            raise self.bad("block_count", f"{self.blocks} with {self.heads} of them draft heads is absurd")
        self.layers = self.blocks - self.heads
        if self.heads and self._has(self.layers) and not self._has(self.layers, "nextn."):
            raise self.bad("nextn_predict_layers", f"block {self.layers} would be a draft head, but it has no nextn "
                           "tensors")  # fmt: skip

    def _has(self, block: int, part: str = "") -> bool:
        """Whether the file has tensors of this block whose names go on like that."""
        return any(name.startswith(f"blk.{block}.{part}") for name in self.tensors)

    def bad(self, key: str, what: str) -> ModelError:
        return ModelError(f"{self.arch}.{key}: {what}", self.where, OTHER)

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """The value of `key`, of exactly one of `kinds`; needed where there is no default."""
        value = self.metadata.get(f"{self.arch}.{key}")
        if value is None:
            if default is None:
                raise self.bad(key, "missing")
            return default
        if type(value) not in kinds:
            raise self.bad(key, f"a value of type {type(value).__name__}, expected {kinds[0].__name__}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        return self.get(key, (int,), default)

    def number(self, key: str) -> float:
        """A number, as the decimal one it was before it was stored in 32 bits: 1e-06, not 9.999999974752427e-07."""
        value = self.get(key, (float, int))
        with np.errstate(over="ignore"):
            short = np.float32(value)
        return float(str(short)) if float(short) == value else float(value)

    def several(self, key: str) -> list[int]:
        """An array of whole numbers."""
        value = self.get(key, (np.ndarray,))
        if value.dtype.kind not in "iu" or value.size > BLOCK_LIMIT:
            raise self.bad(key, f"expected at most {BLOCK_LIMIT} whole numbers, found {value.size} of {value.dtype}")
        return value.tolist()

    def per_block(self, key: str, default: int | None = None) -> list[int]:
        """A number for every layer: the key holds one for all, or one for each block."""
        value = self.get(key, (int, np.ndarray), default)
        if type(value) is int:
            return [value] * self.layers
        values = self.several(key)
        if len(values) not in (self.layers, self.blocks):
            raise self.bad(key, f"{len(values)} values for {self.blocks} blocks")
        return values[: self.layers]

    def one(self, key: str, default: int | None = None) -> int:
        """The number that all layers share; those that have none say 0."""
        values = set(self.per_block(key, default)) - {0}
        if len(values) != 1:
            raise self.bad(key, f"expected one number for all layers, found {listing(map(str, values)) or 'none'}")
        return values.pop()

    def token(self, name: str) -> int | None:
        """The id of a special token, if the file names one."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and type(value) is not int:
            raise ModelError(f"tokenizer.ggml.{name}_token_id: {show(value)} is no token id", self.where, OTHER)
        return value


def _common(keys: Keys) -> dict[str, Any]:
    embedding = keys.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"tensor {EMBEDDING} is missing or no matrix", keys.where, OTHER)
    heads = keys.one("attention.head_count")
    head_dim = keys.whole("attention.key_length", keys.whole("embedding_length") // max(heads, 1))
    if keys.whole("attention.value_length", head_dim) != head_dim:
        raise keys.bad("attention.value_length", f"not the {head_dim} of attention.key_length")
    return {
        "hidden_size": keys.whole("embedding_length"),
        "num_hidden_layers": keys.layers,
        "vocab_size": embedding.shape[0],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.one("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": _rope(keys, head_dim),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": OUTPUT not in keys.tensors,
        "eos_token_id": keys.token("eos"),
    }


def _rope(keys: Keys, head_dim: int) -> dict[str, Any]:
    rotated = keys.whole("rope.dimension_count", head_dim)
    if not 0 < rotated <= head_dim:
        raise keys.bad("rope.dimension_count", f"{rotated} features of a head of {head_dim}")
    factor = rotated / head_dim
    if int(head_dim * factor) != rotated:  # rounded down
        factor = math.nextafter(factor, 1.0)
    kind = keys.get("rope.scaling.type", (str,), "none")
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": keys.number("rope.freq_base"),
            "partial_rotary_factor": factor}  # fmt: skip


def _deltanet(keys: Keys) -> dict[str, Any]:
    values, inner = keys.whole("ssm.time_step_rank"), keys.whole("ssm.inner_size")
    if values < 1 or inner % values:
        raise keys.bad("ssm.inner_size", f"{inner} features do not divide over {values} heads")
    return {
        "layer_types": _layer_types(keys),
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
    }


def _layer_types(keys: Keys) -> list[str]:
    """A layer without key/value heads is a DeltaNet; where a file does not list them, every fourth one attends."""
    heads = keys.per_block("attention.head_count_kv", 1)
    every = keys.whole("full_attention_interval", 4)
    if every < 1:
        raise keys.bad("full_attention_interval", f"{every} is no interval")
    attends = [count > 0 for count in heads] if 0 in heads else [(i + 1) % every == 0 for i in range(keys.layers)]
    return ["full_attention" if here else "linear_attention" for here in attends]


def _moe(keys: Keys) -> dict[str, Any]:
    if keys.whole("expert_gating_func", 1) not in (0, 1):  # 0: as the architecture has it, 1: softmax
        raise keys.bad("expert_gating_func", "only a softmax router is known")
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": keys.get("expert_weights_norm", (bool,), True),
    }


def _shared(keys: Keys) -> dict[str, Any]:
    return _moe(keys) | {"shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length")}


def _qwen3moe(keys: Keys) -> dict[str, Any]:
    return _common(keys) | _moe(keys) | {"layer_types": ["full_attention"] * keys.layers}


def _hybrid(keys: Keys) -> dict[str, Any]:
    return _common(keys) | _deltanet(keys) | _shared(keys)


def _qwen35(keys: Keys) -> dict[str, Any]:
    return _common(keys) | _deltanet(keys) | {"intermediate_size": keys.one("feed_forward_length")}


def _qwen4exp(keys: Keys) -> dict[str, Any]:
    found = _hybrid(keys) | {
        "output_gate_type": "sigmoid",
        "hc_count": keys.whole("hyper_connection.count"),
        "hc_lowrank": keys.whole("hyper_connection.low_rank"),
        "indexer_n_heads": keys.whole("attention.indexer.head_count"),
        "indexer_head_dim": keys.whole("attention.indexer.key_length"),
        "indexer_budget": keys.whole("attention.indexer.top_k"),  # in tokens
        "indexer_compress_ratio": keys.one("attention.compress_ratios"),
        "ple_layer_ids": [layer + 1 for layer in ple_layers(keys)],
    }
    if not found["ple_layer_ids"]:
        return found
    return found | {
        "ple_embed_dim": ngram_heads(keys) * keys.whole("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": keys.whole("ple.conv_kernel"),
        "ngram_size": keys.whole("ple.ngram_size"),
        "heads_per_ngram": keys.whole("ple.heads_per_ngram"),
        "ngram_vocab_size_base": keys.several("ple.head_vocab_sizes")[0],  # the smallest: they are successive primes
        "make_ngram_vocab_size_divisible_by": math.gcd(*(rows for _, rows in table_parts(keys))),
        "eos_token_id": keys.whole("ple.eos_token_id"),  # the one that cuts the hash's window
    }


def ple_layers(keys: Keys) -> list[int]:
    """Layers with an n-gram table, counted from 0."""
    listed = [] if f"{keys.arch}.ple.layers" not in keys.metadata else keys.several("ple.layers")
    if listed != sorted(set(listed)) or not all(0 <= layer < keys.layers for layer in listed):
        raise keys.bad("ple.layers", f"{show(listed)} are not layers 0..{keys.layers - 1} in order")
    return listed


def ngram_heads(keys: Keys) -> int:
    """Rows of its table that a PLE layer adds for a token."""
    heads = (keys.whole("ple.ngram_size") - 1) * keys.whole("ple.heads_per_ngram")
    sizes = keys.several("ple.head_vocab_sizes")
    if heads < 1 or len(sizes) != heads * len(ple_layers(keys)):
        raise keys.bad("ple.head_vocab_sizes", f"{len(sizes)} sizes for {heads} heads in each layer")
    return heads


def table_parts(keys: Keys) -> list[tuple[int, int]]:
    """(first row, rows) of every PLE layer's part of the one table: `head_offsets` count from the table's start."""
    table = keys.tensors.get(TABLE)
    if table is None or len(table.shape) != 2:
        raise ModelError(f"tensor {TABLE} is missing or no matrix", keys.where, OTHER)
    starts = keys.several("ple.head_offsets")[:: ngram_heads(keys)]
    parts = [(start, end - start) for start, end in pairwise([*starts, table.shape[0]])]
    if len(starts) != len(ple_layers(keys)) or starts[0] or any(rows < 1 for _, rows in parts):
        raise keys.bad("ple.head_offsets", f"tables at {show(starts)} do not share {table.shape[0]} rows")
    return parts


CONFIGS: dict[str, tuple[str, Callable[[Keys], dict[str, Any]]]] = {
    "qwen35moe": ("qwen3_5_moe_text", _hybrid),
    "qwen35": ("qwen3_5_text", _qwen35),
    "qwen3next": ("qwen3_next", _hybrid),
    "qwen3moe": ("qwen3_moe", _qwen3moe),
    "qwen4exp": ("qwen4_exp_text", _qwen4exp),
}
"""general.architecture -> (model_type, maker of the other keys)."""


def config_of(keys: Keys) -> dict[str, Any]:
    """The config of the model that `keys` describe. Raises ModelError naming the key."""
    model_type, make = CONFIGS[keys.arch]
    return {"model_type": model_type} | make(keys)
