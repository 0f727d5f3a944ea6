"""Engine qwen38 (Qwen3.8-Flash-Next, model type qwen4_exp): its tensors, and whether a checkpoint has them.

Idea: `geometry` turns a config into checked numbers, `expected` turns those into a table name -> shape of every
tensor of the trunk, `check` compares that table with a checkpoint before a byte is allocated. Whoever loads
afterwards needs no test of its own.
Spellings that a checkpoint may choose: experts fused (`gate_up_proj` [E, 2I, H], gate rows first) or one by one, the
n-gram table in shards or whole, lm_head left out when tied. `mtp.*`, the draft head, has a table and a check of its
own: a checkpoint runs without it.
Source of names and shapes: model_spec.md 5a to 5d. Guarded by tests/models/test_layout.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.formats.strict import AGAIN
from coli.models.config import Reader
from coli.models.layout import FLOATS, HEAD, Shape, attention, check_tensors, gdn, head_tensors, moe
from coli.models.qwen38_geometry import MODEL_TYPES, Geometry, geometry
from coli.ngrams import NgramHash, table_prefix

__all__ = ["HEAD", "MODEL_TYPES", "Geometry", "check", "check_head", "constants", "expected", "expected_head",
           "geometry", "hash_buffers"]

_CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")  # int64

# ---- tensors -----------------------------------------------------------------------------------------------------


def expected(g: Geometry, names: Container[str] = ()) -> dict[str, Shape]:
    """Shape of every trunk tensor by canonical name, in the spellings `names` (a checkpoint's) chose.

    With no names: experts one by one, the table in shards, lm_head unless tied.
    """
    table: dict[str, Shape] = {"embed_tokens.weight": (g.vocab, g.hidden)}
    if not g.tied or "lm_head.weight" in names:
        table["lm_head.weight"] = (g.vocab, g.hidden)
    table |= dict(_mixer(g, "hyper_connection_mixer.", inject=False))
    for layer, kind in enumerate(g.layer_types):
        prefix = f"layers.{layer}."
        table |= dict(_mixer(g, f"{prefix}attn_hyper_connection."))
        table |= dict(_mixer(g, f"{prefix}mlp_hyper_connection."))
        table |= dict(gdn(g, prefix) if kind == "gdn" else _attention(g, prefix, names))
        table |= dict(moe(g, f"{prefix}mlp.", names))
    for index, layer in enumerate(g.ple_layers):
        table |= dict(_ple_tensors(g, index, layer, names))
    return table


def expected_head(g: Geometry, names: Container[str] = ()) -> dict[str, Shape]:
    """Shape of every tensor of the draft head (model_spec.md 5c): one attention layer of the trunk's kind, its two
    inputs and its own final mixer. Embedding and lm_head are the trunk's."""
    table: dict[str, Shape] = {
        "mtp.fc_embedding.weight": (g.hidden, g.hidden),
        "mtp.fc_hidden.weight": (g.hidden, g.hidden),
        "mtp.pre_fc_norm_embedding.weight": (g.hidden,),
        "mtp.pre_fc_norm_hidden.weight": (g.width,),
    }
    table |= dict(_mixer(g, "mtp.hyper_connection_mixer.", inject=False))
    table |= dict(_mixer(g, f"{HEAD}attn_hyper_connection."))
    table |= dict(_mixer(g, f"{HEAD}mlp_hyper_connection."))
    table |= dict(_attention(g, HEAD, names))
    return table | dict(moe(g, f"{HEAD}mlp.", names))


def _mixer(g: Geometry, p: str, inject: bool = True) -> Iterator[tuple[str, Shape]]:
    yield f"{p}hc_norm.weight", (g.width,)
    yield f"{p}input_mix_weight_down.weight", (g.hc_lowrank, g.width)
    yield f"{p}input_mix_weight_up.weight", (g.width, g.hc_lowrank)
    if inject:
        yield f"{p}block_inject_weight.weight", (g.streams, g.width)


def _attention(g: Geometry, prefix: str, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    """Gated attention and its indexer, whose projections GGUF keeps apart."""
    yield from attention(g, prefix, 2 * g.heads * g.head_dim)
    p, queries = f"{prefix}self_attn.indexer.", g.index_heads * g.index_dim
    if f"{p}q_proj.weight" in names:
        yield f"{p}q_proj.weight", (queries, g.hidden)
        yield f"{p}k_proj.weight", (g.index_dim, g.hidden)
    else:
        yield f"{p}index_qk_proj.weight", (queries + g.index_dim, g.hidden)
    yield f"{p}q_layernorm.weight", (g.index_dim,)
    yield f"{p}k_layernorm.weight", (g.index_dim,)


def _ple_tensors(g: Geometry, index: int, layer: int, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    p = f"layers.{layer}.ple."
    yield f"{p}key_proj.weight", (g.width, g.ple_dim)
    yield f"{p}value_proj.weight", (g.hidden, g.ple_dim)
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield f"{p}{norm}.weight", (g.width,)
    yield f"{p}conv1d.weight", (g.width, 1, g.ple_conv)
    hashes = NgramHash(g, index)
    for name, constants in hash_buffers(hashes, layer).items():
        yield name, constants.shape
    rows, whole = hashes.table_rows, f"{table_prefix(layer)}weight"
    if whole in names:
        yield whole, (rows, g.row_dim)
    elif rows % g.ngram_parts:
        raise ModelError(f"split_ngram_parts: {rows} table rows do not split into {g.ngram_parts} equal shards",
                         "config.json", AGAIN)  # fmt: skip
    else:
        for part in range(g.ngram_parts):
            yield f"{table_prefix(layer)}shard_{part}.weight", (rows // g.ngram_parts, g.row_dim)


def hash_buffers(hashes: NgramHash, layer: int) -> dict[str, np.ndarray]:
    """The int64 constants a checkpoint repeats, by name."""
    p = f"layers.{layer}.ple.ple_embedding."
    return {
        f"{p}layer_multipliers": hashes.multipliers,
        f"{p}ngram_heads_vocab_sizes": hashes.sizes,
        f"{p}ngram_heads_offsets": hashes.offsets,
    }


def constants(g: Geometry) -> dict[str, np.ndarray]:
    """`hash_buffers` of every PLE layer."""
    return {name: values for index, layer in enumerate(g.ple_layers)
            for name, values in hash_buffers(NgramHash(g, index), layer).items()}  # fmt: skip


# ---- int8 rows -------------------------------------------------------------------------------------------------------

# Tiny, and choices hang on them: gates, routers, the indexer. The embedding is not multiplied.
_NEVER_INT8 = (
    "block_inject_weight.weight", "in_proj_a.weight", "in_proj_b.weight", "index_qk_proj.weight",
    "indexer.q_proj.weight", "indexer.k_proj.weight", "mlp.gate.weight", "shared_expert_gate.weight", "conv1d.weight",
    "embed_tokens.weight",
)  # fmt: skip


def int8_rows(name: str) -> bool:
    """Whether Q38_TRUNK_CPU_INT8=1 repacks this dense matrix."""
    return not name.endswith(_NEVER_INT8)


# ---- the check ---------------------------------------------------------------------------------------------------


def check(checkpoint: Checkpoint, g: Geometry) -> None:
    """Every trunk tensor is there, once, with its shape, a dtype the engine reads and its scale. Raises ModelError."""
    table = {name: shape for name, shape in expected(g, checkpoint).items() if name not in checkpoint.constants}
    trunk = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith("mtp.")}
    check_tensors(checkpoint, trunk, table, _table_scales(checkpoint, g), _CONSTANTS)
    for name, values in constants(g).items():
        stored = checkpoint.constants[name] if name in checkpoint.constants else checkpoint.load(name)
        if not np.array_equal(stored, values):
            raise ModelError(f"{name}: the checkpoint's hash constants differ from those of its config",
                             checkpoint.folder, "vocab_size, seed or ngram_* are wrong")  # fmt: skip


def check_head(checkpoint: Checkpoint, g: Geometry) -> None:
    """The same of the draft head. Raises ModelError."""
    check_tensors(checkpoint, head_tensors(checkpoint, "Q38_MTP"), expected_head(g, checkpoint))


def head_rope_theta(checkpoint: Checkpoint, g: Geometry) -> float:
    """Base of the head's rotary positions: its own where the config names one, else the trunk's."""
    own = Reader(checkpoint.config, checkpoint.config_path).inside("mtp")
    return own.number("rope_theta", default=g.rope_theta)


def _table_scales(checkpoint: Checkpoint, g: Geometry) -> set[str]:
    """Names of the n-gram tables' scalar scales: there exactly for FP8 tables."""
    scales: set[str] = set()
    for layer in g.ple_layers:
        name = f"{table_prefix(layer)}weight_scale"
        coded = any(t.dtype == "F8_E4M3" for n, t in checkpoint.tensors.items() if n.startswith(table_prefix(layer)))
        if coded and name not in checkpoint:
            raise ModelError(f"the FP8 n-gram table of layer {layer} has no scale: missing {name}", checkpoint.folder,
                             "the values would be wrong without it: download the checkpoint again")  # fmt: skip
        if not coded and name in checkpoint:
            raise ModelError(f"{name} belongs to no FP8 table", checkpoint.folder,
                             "the checkpoint mixes two formats: download it again")  # fmt: skip
        if coded:
            scale = checkpoint[name]
            if scale.dtype not in FLOATS or scale.shape not in ((), (1,)):
                raise ModelError(f"tensor {name}: expected one number in {', '.join(FLOATS)}, found {scale.dtype} "
                                 f"{list(scale.shape)}", scale.path, AGAIN)  # fmt: skip
            scales.add(name)
    return scales
