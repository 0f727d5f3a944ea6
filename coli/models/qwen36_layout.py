"""Engine qwen36: its tensors, and whether a checkpoint has them.

The four families of coli/models/qwen36_geometry.py in one table; what one of them lacks its geometry does not ask for.
`mtp.*`, the draft head, has a table and a check of its own: a checkpoint runs without it.
Source of names and shapes: model_spec.md 2d, 3c, 3d, 4d. Guarded by tests/models/test_qwen36_layout.py.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from coli.formats.checkpoint import Checkpoint
from coli.models.layout import HEAD, Shape, attention, check_tensors, gdn, gdn_core, head_tensors, moe, swiglu
from coli.models.qwen36_geometry import Geometry

# Tiny, and choices hang on them: gates and routers. The embedding is not multiplied.
_NEVER_INT8 = (
    "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight", "mlp.gate.weight", "shared_expert_gate.weight",
    "conv1d.weight", "embed_tokens.weight",
)  # fmt: skip


def expected(g: Geometry, names: Container[str] = ()) -> dict[str, Shape]:
    """Shape of every trunk tensor by canonical name, in the spellings `names` (a checkpoint's) chose."""
    table: dict[str, Shape] = {"embed_tokens.weight": (g.vocab, g.hidden), "norm.weight": (g.hidden,)}
    if not g.tied or "lm_head.weight" in names:
        table["lm_head.weight"] = (g.vocab, g.hidden)
    for layer, kind in enumerate(g.layer_types):
        prefix = f"layers.{layer}."
        table |= dict(_norms(g, prefix))
        table |= dict(_gdn(g, prefix, names) if kind == "gdn" else attention(g, prefix, g.query_width))
        table |= dict(_mlp(g, f"{prefix}mlp.", g.mlp_types[layer], names))
    return table


def expected_head(g: Geometry, names: Container[str] = ()) -> dict[str, Shape]:
    """Shape of every tensor of the draft head (model_spec.md 3c): one attention layer behind a projection of embedding
    and hidden row. Embedding and lm_head are the trunk's."""
    table: dict[str, Shape] = {
        "mtp.fc.weight": (g.hidden, 2 * g.hidden),
        "mtp.norm.weight": (g.hidden,),
        "mtp.pre_fc_norm_embedding.weight": (g.hidden,),
        "mtp.pre_fc_norm_hidden.weight": (g.hidden,),
    }
    table |= dict(_norms(g, HEAD))
    table |= dict(attention(g, HEAD, g.query_width))
    return table | dict(_mlp(g, f"{HEAD}mlp.", head_mlp(g, names), names))


def head_mlp(g: Geometry, names: Container[str]) -> str:
    """What the head's layer ends in: experts where the model has any, unless the tensors say otherwise."""
    return "dense" if not g.experts or f"{HEAD}mlp.gate_proj.weight" in names else "moe"


def _norms(g: Geometry, prefix: str) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}input_layernorm.weight", (g.hidden,)
    yield f"{prefix}post_attention_layernorm.weight", (g.hidden,)


def _gdn(g: Geometry, prefix: str, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    """qwen3_next stores its inputs by key head; GGUF has taken qkv and z apart again, not b and a."""
    p = f"{prefix}linear_attn."
    if not g.gdn_grouped:
        yield from gdn(g, prefix)
        return
    values = g.gdn_value_heads * g.gdn_value_dim
    if f"{p}in_proj_qkv.weight" in names:
        yield f"{p}in_proj_qkv.weight", (g.conv_channels, g.hidden)
        yield f"{p}in_proj_z.weight", (values, g.hidden)
    else:
        yield f"{p}in_proj_qkvz.weight", (g.conv_channels + values, g.hidden)
    yield f"{p}in_proj_ba.weight", (2 * g.gdn_value_heads, g.hidden)
    yield from gdn_core(g, prefix)


def _mlp(g: Geometry, p: str, kind: str, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    yield from moe(g, p, names) if kind == "moe" else swiglu(g, p, g.dense_inter)


# ---- int8 rows ------------------------------------------------------------------------------------------------


def int8_rows(name: str) -> bool:
    """Whether the int8 trunk repacks this dense matrix."""
    return not name.endswith(_NEVER_INT8)


# ---- the check -------------------------------------------------------------------------------------------------------


def check(checkpoint: Checkpoint, g: Geometry) -> None:
    """Every trunk tensor is there, once, with its shape, a dtype the engine reads and its scale. Raises ModelError."""
    trunk = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith("mtp.")}
    check_tensors(checkpoint, trunk, expected(g, checkpoint))


def check_head(checkpoint: Checkpoint, g: Geometry) -> None:
    """The same of the draft head. Raises ModelError."""
    check_tensors(checkpoint, head_tensors(checkpoint, "Q36_MTP"), expected_head(g, checkpoint))
