"""The qwen36 container, as coli/formats/container.py lays it out: one file a layer, experts as `merged_weight` + `.qs`.

config.json is written last: until then the folder is no model to anybody. Guarded by tests/convert/test_container.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from coli.convert import quantise
from coli.convert.dense import file_name
from coli.convert.files import Spec
from coli.convert.plan import Plan, document, expert_blocks, folder_config, job, label, text_files
from coli.convert.report import Options
from coli.convert.source import Source
from coli.errors import UsageError
from coli.formats.container import GLOBALS, MARK
from coli.formats.container import HEAD as HEAD_FILE
from coli.models.layout import HEAD

FORMAT = "qwen36 container"


def plan(source: Source, out: Path, options: Options) -> Plan:
    """Raises UsageError for sizes the format has no bytes for."""
    g = source.g
    if options.ebits == 4 and (g.hidden % 2 or g.moe_inter % 2):
        raise UsageError(f"int4 rows need an even number of inputs, this model has {g.hidden} and {g.moe_inter}",
                         "--ebits 4", "give --ebits 8")  # fmt: skip
    jobs = [job(source, GLOBALS, "the embedding and lm_head", [""], compact=True)]
    for layer in range(g.layers):
        jobs.append(_layer(source, options, f"model-{layer:05d}.safetensors", f"layers.{layer}."))
    if source.has_head:
        jobs.append(_layer(source, options, HEAD_FILE, HEAD))
    return Plan(out, FORMAT, f"{FORMAT}, experts {options.words}", tuple(jobs), _finals(source, options))


def _layer(source: Source, options: Options, name: str, prefix: str) -> Any:
    words = label(source, prefix)
    if prefix not in source.prefixes:
        return job(source, name, words, [prefix], compact=True)
    each = partial(_specs, source, options, prefix)
    specs = [spec for expert in range(source.g.experts) for spec in each(expert)]
    experts = expert_blocks(source, options, prefix, each, quantise.nibble_pairs)
    return job(source, name, words, [prefix], compact=True, experts=experts, specs=specs,
               expert_bytes=source.expert_bytes(prefix))  # fmt: skip


def _specs(source: Source, options: Options, prefix: str, expert: int) -> tuple[Spec, Spec]:
    g, name = source.g, file_name(f"{prefix}mlp.experts.{expert}.merged_weight")
    weights = 3 * g.hidden * g.moe_inter
    codes = Spec(name, "U8", (weights // 2,)) if options.ebits == 4 else Spec(name, "I8", (weights,))
    inner, outer = quantise.groups(g.hidden, options.group), quantise.groups(g.moe_inter, options.group)
    return codes, Spec(f"{name}.qs", "F32", (2 * g.moe_inter * inner + g.hidden * outer,))


def _finals(source: Source, options: Options) -> tuple[tuple[str, bytes], ...]:
    original = [("config.hf.json", document(source.checkpoint.raw_config))] if not source.is_gguf else []
    return (*text_files(source), *original, (MARK, document(meta(source, options))),
            ("config.json", document(folder_config(source))))  # fmt: skip


def meta(source: Source, options: Options) -> dict[str, Any]:
    """qwen36_meta.json."""
    g, config = source.g, source.checkpoint.config
    names = {"gdn": "linear_attention", "attention": "full_attention"}
    rope = config["rope_parameters"] if isinstance(config.get("rope_parameters"), dict) else {}
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", g.rotary_dim / g.head_dim))
    return {
        "model_type": config["model_type"], "hidden": g.hidden, "n_layers": g.layers, "n_active": g.layers,
        "layer_types": [names[kind] for kind in g.layer_types], "num_experts": g.experts, "topk": g.top_k,
        "moe_inter": g.moe_inter, "shared_inter": g.shared_inter, "rms_eps": g.eps, "ebits": options.ebits,
        "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "norm_topk_prob": g.norm_topk,
        "attn_output_gate": g.output_gate, "rope_theta": g.rope_theta, "mrope_section": rope.get("mrope_section"),
        "partial_rotary_factor": part, "zero_centered_norms": g.centred, "q_heads": g.heads,
        "kv_heads": g.kv_heads, "head_dim": g.head_dim, "rope_dim": g.rotary_dim, "expert_gs": options.group,
        "expert_down_bits": options.ebits, "expert_down_gs": options.group, "dn_vheads": g.gdn_value_heads,
        "dn_kheads": g.gdn_key_heads, "dn_kdim": g.gdn_key_dim, "dn_vdim": g.gdn_value_dim, "dn_convk": g.gdn_conv,
        "dn_conv_dim": g.conv_channels,
    }  # fmt: skip
