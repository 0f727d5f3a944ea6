"""The qwen36 container: a folder of one safetensors file a layer, its routed experts as int4 or int8.

Layout (what is read here, and what `coli convert` writes):

    config.json                 text config, flattened (the original as config.hf.json), tokenizer and template files
    qwen36_meta.json            sizes and formats again; MARK
    model-globals.safetensors   embed_tokens, norm, lm_head (f16); with MARK it makes a folder a container
    model-NNNNN.safetensors     layer NNNNN: dense tensors f16 under HF names with prefix `model.`, and its experts
    model-mtp.safetensors       optional: names mtp.*, the head's experts like a layer's or as the release has them
    model-vision.safetensors    ignored

    model.layers.L.mlp.experts.E.merged_weight      U8 or I8 [nbytes]: codes of gate [I, H] | up [I, H] | down [H, I]
    model.layers.L.mlp.experts.E.merged_weight.qs   F32 [count]: scales of gate | up | down, each row major

Bits, by the codes' bytes: 1.5 I H int4 | 3 I H int8 | 2 I H int4 gate and up with int8 down.
int8: signed bytes. int4: two's-complement nibbles, byte j of a row: low nibble = input 2j, high nibble = input 2j + 1
(rows have an even number of inputs). value = code * scale; scale = absmax / 7 or / 127, codes -7..7 or -127..127.
Scales: per row [out], or per group of gs inputs [out, ceil(in / gs)]; `expert_gs` of the meta is gs of gate and up,
`expert_down_gs` that of down (absent or 0: gate's), gs 0 means per row. The length of `.qs` must agree; without the
keys it alone decides: rows, or the one power of two gs >= 16 that explains it.

The meta repeats the config (META_KEYS): where both have a value they must agree, where the config has none the meta's
is used, and layer types missing in both are i % 4 == 3 -> full attention.
Invariant: an expert whose bytes do not add up is refused at open, by name. Guarded by tests/formats/test_container.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coli.errors import ModelError
from coli.formats.safetensors import Tensor
from coli.formats.strict import AGAIN, read_object, show

MARK = "qwen36_meta.json"
GLOBALS = "model-globals.safetensors"
HEAD = "model-mtp.safetensors"
VISION = "model-vision.safetensors"
ROWS = 0  # a group size: one scale a row
_LEAST, _MOST = 16, 1 << 16  # group sizes looked for where the meta names none

META_KEYS = {
    "hidden": "hidden_size", "n_layers": "num_hidden_layers", "layer_types": "layer_types",
    "num_experts": "num_experts", "topk": "num_experts_per_tok", "moe_inter": "moe_intermediate_size",
    "shared_inter": "shared_expert_intermediate_size", "rms_eps": "rms_norm_eps", "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "dn_vheads": "linear_num_value_heads",
    "dn_kheads": "linear_num_key_heads", "dn_kdim": "linear_key_head_dim", "dn_vdim": "linear_value_head_dim",
    "dn_convk": "linear_conv_kernel_dim", "rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor",
    "norm_topk_prob": "norm_topk_prob", "attn_output_gate": "attn_output_gate",
}  # fmt: skip
"""Key of the meta -> key of config.json (rope_theta and partial_rotary_factor may be in its rope_parameters)."""
_ROPE = ("rope_theta", "partial_rotary_factor")
_HINT = "config.json and qwen36_meta.json are of different models: download or convert again"


class Packing(NamedTuple):
    """How one matrix of an expert is stored: 4 or 8 bits, `group` inputs to a scale (ROWS: the whole row)."""

    bits: int
    group: int


def read_meta(folder: Path) -> dict[str, Any]:
    """The qwen36_meta.json of a container; {} for any other folder. Raises ModelError."""
    if not ((folder / MARK).exists() and (folder / GLOBALS).exists()):
        return {}
    meta = read_object(folder / MARK, MARK)
    _understood(meta, folder / MARK)
    return meta


def _understood(meta: Mapping[str, Any], where: Path) -> None:
    """Values that would change the math, or the meaning of bytes, are ones this reader knows."""
    plain = meta.get("model_type") == "qwen3_moe"
    rules = {
        "scoring_func": ("softmax",), "n_group": (0, 1), "topk_group": (0, 1), "zero_centered_norms": (not plain,),
        "ebits": (4, 8), "expert_down_bits": (0, 4, 8),
    }  # fmt: skip
    for key, known in rules.items():
        value = meta.get(key)
        if value is not None and value not in known:
            raise ModelError(f"{key}: {show(value)} is not {' or '.join(map(str, known))}", where,
                             "not a container this engine computes")  # fmt: skip
    for key in ("expert_gs", "expert_down_gs"):
        value = meta.get(key, 0)
        if type(value) is not int or not 0 <= value <= _MOST:
            raise ModelError(f"{key}: {show(value)} is not a group size", where, AGAIN)


def merged_config(config: Mapping[str, Any], meta: Mapping[str, Any], where: object) -> dict[str, Any]:
    """The config with the meta's values where it has none. Raises ModelError where both have one and they differ."""
    found = dict(config)
    rope = config.get("rope_parameters")
    nested = rope if isinstance(rope, dict) else {}
    for key, name in META_KEYS.items():
        value, own = meta.get(key), config.get(name)
        if own is None and name in _ROPE:
            own = nested.get(name)
        if value is None or (value == 0 and not isinstance(value, bool)):  # 0: the family has no such size
            continue
        if own is None and not isinstance(value, bool):
            found[name] = value
        elif own is not None and own != value:
            raise ModelError(f"{key}: {show(value)}, but config.json has {name} {show(own)}", where, _HINT)
    return found


# ---- experts -----------------------------------------------------------------------------------------------------


def packings(codes: Tensor, scales: Tensor, inter: int, hidden: int, meta: Mapping[str, Any]) -> tuple[Packing, ...]:
    """How gate, up and down of an expert are stored, from the bytes of its two tensors. Raises ModelError."""
    shapes = ((inter, hidden), (inter, hidden), (hidden, inter))
    bits = _bits(codes, inter, hidden)
    if meta.get("ebits") not in (None, bits[0]) or meta.get("expert_down_bits") not in (None, 0, bits[2]):
        raise ModelError(f"tensor {show(codes.name)}: {bits[0]} bits a weight and {bits[2]} of down by its size, "
                         f"{MARK} says {show(meta.get('ebits'))} and {show(meta.get('expert_down_bits'))}", codes.path,
                         AGAIN)  # fmt: skip
    if any(b == 4 and k % 2 for b, (_, k) in zip(bits, shapes, strict=True)):
        raise ModelError(f"tensor {show(codes.name)}: int4 rows of an odd number of inputs", codes.path,
                         "not a container this engine reads")  # fmt: skip
    for groups in _groups(meta):
        if sum(n * _parts(k, g) for (n, k), g in zip(shapes, groups, strict=True)) * 4 == scales.nbytes:
            return tuple(Packing(b, g if g < k else ROWS) for b, g, (_, k) in zip(bits, groups, shapes, strict=True))
    raise ModelError(f"tensor {show(scales.name)}: {scales.nbytes // 4} scales fit no group size of experts "
                     f"[{inter}, {hidden}]{_said(meta)}", scales.path, AGAIN)  # fmt: skip


def _bits(codes: Tensor, inter: int, hidden: int) -> tuple[int, int, int]:
    weights = inter * hidden
    known = {3 * weights: (8, 8, 8), 2 * weights: (4, 4, 8)}
    if 3 * weights % 2 == 0:
        known[3 * weights // 2] = (4, 4, 4)
    if codes.nbytes not in known:
        raise ModelError(f"tensor {show(codes.name)}: {codes.nbytes} bytes are no int4 or int8 expert "
                         f"[{inter}, {hidden}], which has {', '.join(map(str, sorted(known)))}", codes.path,
                         "the file and config.json disagree: download or convert again")  # fmt: skip
    return known[codes.nbytes]


def _parts(k: int, group: int) -> int:
    """Scales of a row."""
    return 1 if group == ROWS else -(-k // group)


def _groups(meta: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Group sizes (gate, up, down) that the meta allows, the likeliest first. A down size of 0 may mean gate's."""
    if "expert_gs" not in meta:
        sizes = [ROWS, *(1 << i for i in range(_LEAST.bit_length() - 1, _MOST.bit_length()))]
        return [(g, g, g) for g in sizes]
    group, down = meta["expert_gs"], meta.get("expert_down_gs", 0)
    downs = [down] if down else [group, ROWS]
    return [(group, group, g) for g in downs]


def _said(meta: Mapping[str, Any]) -> str:
    return f", {MARK} says groups of {meta['expert_gs']}" if "expert_gs" in meta else ""
