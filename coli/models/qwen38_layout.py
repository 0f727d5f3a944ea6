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

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import SCALE, pair_scales
from coli.formats.safetensors import Tensor
from coli.formats.strict import AGAIN, counted, listing
from coli.kernels.packing import packed_bytes
from coli.models.config import Reader
from coli.models.qwen38_geometry import MODEL_TYPES, Geometry, geometry
from coli.ngrams import NgramHash, table_prefix

__all__ = ["MODEL_TYPES", "Geometry", "Sizes", "check", "check_head", "expected", "expected_head",
           "geometry", "has_mtp", "hash_buffers", "sizes"]

FLOATS = ("BF16", "F16", "F32")
Shape = tuple[int, ...]

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
        table |= dict((_gdn if kind == "gdn" else _attention)(g, prefix))
        table |= dict(_mlp(g, f"{prefix}mlp."))
        table |= dict(_experts(g, f"{prefix}mlp.experts.", fused=f"{prefix}mlp.experts.gate_up_proj" in names))
    for index, layer in enumerate(g.ple_layers):
        table |= dict(_ple_tensors(g, index, layer, names))
    return table


HEAD = "mtp.layers.0."


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
    table |= dict(_attention(g, HEAD))
    table |= dict(_mlp(g, f"{HEAD}mlp."))
    return table | dict(_experts(g, f"{HEAD}mlp.experts.", fused=f"{HEAD}mlp.experts.gate_up_proj" in names))


def _mixer(g: Geometry, p: str, inject: bool = True) -> Iterator[tuple[str, Shape]]:
    yield f"{p}hc_norm.weight", (g.width,)
    yield f"{p}input_mix_weight_down.weight", (g.hc_lowrank, g.width)
    yield f"{p}input_mix_weight_up.weight", (g.width, g.hc_lowrank)
    if inject:
        yield f"{p}block_inject_weight.weight", (g.streams, g.width)


def _gdn(g: Geometry, prefix: str) -> Iterator[tuple[str, Shape]]:
    p, values = f"{prefix}linear_attn.", g.gdn_value_heads * g.gdn_value_dim
    yield f"{p}in_proj_qkv.weight", (g.conv_channels, g.hidden)
    yield f"{p}in_proj_z.weight", (values, g.hidden)
    yield f"{p}in_proj_a.weight", (g.gdn_value_heads, g.hidden)
    yield f"{p}in_proj_b.weight", (g.gdn_value_heads, g.hidden)
    yield f"{p}conv1d.weight", (g.conv_channels, 1, g.gdn_conv)
    yield f"{p}A_log", (g.gdn_value_heads,)
    yield f"{p}dt_bias", (g.gdn_value_heads,)
    yield f"{p}norm.weight", (g.gdn_value_dim,)
    yield f"{p}out_proj.weight", (g.hidden, values)


def _attention(g: Geometry, prefix: str) -> Iterator[tuple[str, Shape]]:
    p = f"{prefix}self_attn."
    yield f"{p}q_proj.weight", (2 * g.heads * g.head_dim, g.hidden)
    yield f"{p}k_proj.weight", (g.kv_heads * g.head_dim, g.hidden)
    yield f"{p}v_proj.weight", (g.kv_heads * g.head_dim, g.hidden)
    yield f"{p}o_proj.weight", (g.hidden, g.heads * g.head_dim)
    yield f"{p}q_norm.weight", (g.head_dim,)
    yield f"{p}k_norm.weight", (g.head_dim,)
    yield f"{p}indexer.index_qk_proj.weight", ((g.index_heads + 1) * g.index_dim, g.hidden)
    yield f"{p}indexer.q_layernorm.weight", (g.index_dim,)
    yield f"{p}indexer.k_layernorm.weight", (g.index_dim,)


def _mlp(g: Geometry, p: str) -> Iterator[tuple[str, Shape]]:
    yield f"{p}gate.weight", (g.experts, g.hidden)
    yield f"{p}shared_expert.gate_proj.weight", (g.shared_inter, g.hidden)
    yield f"{p}shared_expert.up_proj.weight", (g.shared_inter, g.hidden)
    yield f"{p}shared_expert.down_proj.weight", (g.hidden, g.shared_inter)
    yield f"{p}shared_expert_gate.weight", (1, g.hidden)


def _experts(g: Geometry, p: str, fused: bool) -> Iterator[tuple[str, Shape]]:
    if fused:
        yield f"{p}gate_up_proj", (g.experts, 2 * g.moe_inter, g.hidden)
        yield f"{p}down_proj", (g.experts, g.hidden, g.moe_inter)
        return
    for expert in range(g.experts):
        yield f"{p}{expert}.gate_proj.weight", (g.moe_inter, g.hidden)
        yield f"{p}{expert}.up_proj.weight", (g.moe_inter, g.hidden)
        yield f"{p}{expert}.down_proj.weight", (g.hidden, g.moe_inter)


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


# ---- int8 rows -------------------------------------------------------------------------------------------------------

# Tiny, and choices hang on them: gates, routers, the indexer. The embedding is not multiplied.
_NEVER_INT8 = (
    "block_inject_weight.weight", "in_proj_a.weight", "in_proj_b.weight", "index_qk_proj.weight", "mlp.gate.weight",
    "shared_expert_gate.weight", "conv1d.weight", "embed_tokens.weight",
)  # fmt: skip


def int8_rows(name: str) -> bool:
    """Whether Q38_TRUNK_CPU_INT8=1 repacks this dense matrix."""
    return not name.endswith(_NEVER_INT8)


def dense_bytes(checkpoint: Checkpoint, g: Geometry, *, trunk_int8: bool) -> int:
    """Resident bytes of the trunk's dense weights: all but the embedding, whose rows are read one by one."""
    return sum(
        _resident(name, tensor, trunk_int8) for name, tensor in checkpoint.tensors.items()
        if _use(name) == "dense" and (name != "embed_tokens.weight" or g.tied)
    )


def head_bytes(checkpoint: Checkpoint, *, trunk_int8: bool) -> int:
    """Resident bytes of the draft head's dense weights."""
    return sum(
        _resident(name, tensor, trunk_int8) for name, tensor in checkpoint.tensors.items()
        if _use(name) == "mtp" and ".mlp.experts." not in name
    )


def _resident(name: str, tensor: Tensor, trunk_int8: bool) -> int:
    repacked = trunk_int8 and len(tensor.shape) == 2 and tensor.dtype in FLOATS and int8_rows(name)
    return packed_bytes("int8", *tensor.shape) if repacked else tensor.nbytes


# ---- the check ---------------------------------------------------------------------------------------------------


def has_mtp(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint brings a draft head: asked of its tensors, for configs lie about it."""
    return any(name.startswith("mtp.") for name in checkpoint)


def check(checkpoint: Checkpoint, g: Geometry) -> None:
    """Every trunk tensor is there, once, with its shape, a dtype the engine reads and its scale. Raises ModelError."""
    table = expected(g, checkpoint)
    trunk = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith("mtp.")}
    _check(checkpoint, trunk, table, _table_scales(checkpoint, g))
    for index, layer in enumerate(g.ple_layers):
        for name, constants in hash_buffers(NgramHash(g, index), layer).items():
            if not np.array_equal(checkpoint.load(name), constants):
                raise ModelError(f"{name}: the checkpoint's hash constants differ from those of its config",
                                 checkpoint[name].path, "vocab_size, seed or ngram_* are wrong")  # fmt: skip


def check_head(checkpoint: Checkpoint, g: Geometry) -> None:
    """The same of the draft head. Raises ModelError."""
    head = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("mtp.")}
    if not head:
        raise ModelError("the checkpoint has no draft head (no mtp.* tensors)", checkpoint.folder,
                         "use a checkpoint with one, or leave out Q38_MTP=1 (--mtp)")  # fmt: skip
    _check(checkpoint, head, expected_head(g, checkpoint), set())


def head_rope_theta(config: Mapping[str, Any], g: Geometry, where: object) -> float:
    """Base of the head's rotary positions: its own where the config names one, else the trunk's."""
    own = Reader(config, where).inside("mtp")
    return own.number("rope_theta", default=g.rope_theta)


def _check(
    checkpoint: Checkpoint, found: Mapping[str, Tensor], table: Mapping[str, Shape], scalars: set[str]
) -> None:
    """Exactly the tensors of `table` were `found` (and their scales, and `scalars`), with its shapes."""
    exempt = scalars | {t for t in table if ".ngram_embedding." in t}
    scales = pair_scales(found, checkpoint.quantization, exempt, checkpoint.folder)
    _names(checkpoint, table.keys() - found.keys(),
           found.keys() - table.keys() - {name + SCALE for name in scales} - scalars)
    wrong = [f"{name}: expected {list(shape)}, found {list(checkpoint[name].shape)}"
             for name, shape in table.items() if checkpoint[name].shape != shape]  # fmt: skip
    if wrong:
        raise ModelError(f"{counted(len(wrong), 'tensor')} of a wrong shape: {listing(wrong)}", checkpoint.folder,
                         "config.json and the weights belong to different models")  # fmt: skip
    _dtypes(checkpoint, table)
    _expert_kinds(checkpoint, table)


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


def _names(checkpoint: Checkpoint, missing: set[str], unknown: set[str]) -> None:
    parts = [f"{counted(len(names), f'{kind} tensor')}: {listing(names)}"
             for kind, names in (("missing", missing), ("unknown", unknown)) if names]  # fmt: skip
    if parts:
        hint = "the download is incomplete" if missing and not unknown else "not a checkpoint this engine knows"
        raise ModelError("; ".join(parts), checkpoint.folder, hint)


def _dtypes(checkpoint: Checkpoint, table: Mapping[str, Shape]) -> None:
    wrong = []
    for name, shape in table.items():
        allowed: tuple[str, ...] = (*FLOATS, "F8_E4M3") if len(shape) > 1 and "conv1d" not in name else FLOATS
        if name.endswith(("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")):
            allowed = ("I64",)
        if checkpoint[name].dtype not in allowed:
            wrong.append(f"{name} is {checkpoint[name].dtype}, not {' or '.join(allowed)}")
    if wrong:
        raise ModelError(f"{counted(len(wrong), 'tensor')} of a dtype this engine does not read: {listing(wrong)}",
                         checkpoint.folder, "use the BF16 or the FP8 release of the model")  # fmt: skip


def _expert_kinds(checkpoint: Checkpoint, table: Mapping[str, Shape]) -> None:
    """One dtype for all routed experts and one for each n-gram table: slots and rows have one size."""
    groups: dict[str, set[str]] = {}
    for name in table:
        if ".mlp.experts." in name:
            groups.setdefault("the routed experts", set()).add(checkpoint[name].dtype)
        elif ".ngram_embedding." in name:
            groups.setdefault(f"the n-gram table of layer {name.split('.')[1]}", set()).add(checkpoint[name].dtype)
    for group, dtypes in groups.items():
        if len(dtypes) > 1:
            raise ModelError(f"{group} mix {' and '.join(sorted(dtypes))}", checkpoint.folder, "use one dtype")


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint weighs, in bytes on disk; `types` is dtype -> (tensors, bytes) of everything but vision."""

    dense: int
    expert_record: int
    experts: int
    table: int
    mtp: int
    ignored: int
    types: dict[str, tuple[int, int]]


def sizes(checkpoint: Checkpoint, g: Geometry) -> Sizes:
    """Bytes by use, from the headers alone. One expert's record counts its scales."""
    sums = {"dense": 0, "experts": 0, "table": 0, "mtp": 0}
    types: dict[str, tuple[int, int]] = {}
    for name, tensor in checkpoint.tensors.items():
        sums[_use(name)] += tensor.nbytes
        count, nbytes = types.get(tensor.dtype, (0, 0))
        types[tensor.dtype] = count + 1, nbytes + tensor.nbytes
    record = sums["experts"] // (g.layers * g.experts)
    return Sizes(**sums, expert_record=record, ignored=sum(t.nbytes for t in checkpoint.ignored), types=types)


def _use(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    if ".mlp.experts." in name:
        return "experts"
    return "table" if ".ngram_embedding." in name else "dense"
