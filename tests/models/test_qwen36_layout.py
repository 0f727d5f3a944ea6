"""qwen36's geometry refuses absurd configs by key, its tables are the model spec's, the check refuses anything else."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.models.qwen36_geometry import geometry
from coli.models.qwen36_layout import check, check_head, expected, expected_head
from tests import oracle
from tests.models.test_layout import ABSURD, JSON
from tests.tiny import split_experts, store, write_folder
from tests.tiny36 import (
    FAMILIES,
    HEADED,
    block36_config,
    every_matrix,
    odd36_config,
    shapes36,
    tiny36_config,
    write_tiny36,
)

# ---- the releases (model_spec.md 2a, 3a, 4a; qwen3_moe: Qwen3-Coder-30B-A3B's public config) -----------------------

_ROPE35 = dict(rope_type="default", rope_theta=10_000_000, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
               mrope_interleaved=True)  # fmt: skip
REAL = {
    "Qwen3.6-35B-A3B": tiny36_config(
        "qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, vocab_size=248_320, max_position_embeddings=262_144,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10, rope_parameters=_ROPE35),
    "Qwen3.8-27B": tiny36_config(
        "qwen3_5_text", hidden_size=5120, intermediate_size=17_408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
        linear_key_head_dim=128, linear_value_head_dim=128, vocab_size=248_320, max_position_embeddings=262_144,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16, rope_parameters=_ROPE35),
    "Qwen3-Coder-Next": tiny36_config(
        "qwen3_next", hidden_size=2048, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, vocab_size=151_936, max_position_embeddings=262_144, rope_theta=5e6),
    "Qwen3-Coder-30B-A3B": tiny36_config(
        "qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, vocab_size=151_936,
        max_position_embeddings=262_144, rope_theta=1e7),
}  # fmt: skip
# billions of weights (model_spec.md section 11; the last by its name), tensors of the trunk with experts fused
SIZES = {"Qwen3.6-35B-A3B": (34.66, 1045 - 333 - 19), "Qwen3.8-27B": (26.90, 1199 - 333 - 15),
         "Qwen3-Coder-Next": (79.67, None), "Qwen3-Coder-30B-A3B": (30.53, None)}  # fmt: skip
HEADS = {"Qwen3.6-35B-A3B": (844_640_768, 19), "Qwen3.8-27B": (424_699_392, 15)}


def weights(table) -> int:
    return sum(math.prod(shape) for shape in table.values())


@pytest.mark.parametrize("name", REAL)
def test_the_releases_add_up(name):
    g = geometry(REAL[name])
    table = expected(g, shapes36(REAL[name]))
    billions, tensors = SIZES[name]
    assert weights(table) / 1e9 == pytest.approx(billions, abs=0.01)
    assert tensors in (None, len(table))
    assert weights(expected(g)) == weights(table)  # experts one by one
    if name in HEADS:
        head = expected_head(g, shapes36(REAL[name]))
        assert (weights(head), len(head)) == HEADS[name]


def test_the_releases_geometries():
    found = {name: geometry(config) for name, config in REAL.items()}
    rotary = {name: (g.rotary_dim, g.rope_theta) for name, g in found.items()}
    assert rotary == {"Qwen3.6-35B-A3B": (64, 1e7), "Qwen3.8-27B": (64, 1e7), "Qwen3-Coder-Next": (64, 5e6),
                      "Qwen3-Coder-30B-A3B": (128, 1e7)}  # fmt: skip
    assert found["Qwen3-Coder-Next"].layer_types == ("gdn", "gdn", "gdn", "attention") * 12
    assert set(found["Qwen3-Coder-30B-A3B"].layer_types) == {"attention"}
    assert not found["Qwen3-Coder-30B-A3B"].centred and found["Qwen3.8-27B"].centred
    assert set(found["Qwen3.8-27B"].mlp_types) == {"dense"}
    state = found["Qwen3.6-35B-A3B"]  # one verify copy slot of model_spec.md section 11
    gdn = 4 * (state.gdn_value_heads * state.gdn_key_dim * state.gdn_value_dim + 3 * state.conv_channels)
    assert 30 * gdn == 65_863_680


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_transformers_5_spells_the_same_in_other_words(family):
    """Its own save of a release: RoPE in an object, layer types in full, and qwen3_moe's experts under another name."""
    config = tiny36_config(family)
    saved = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    factor = saved.get("partial_rotary_factor", 1.0)
    saved["rope_parameters"] = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=factor)
    if family == "qwen3_moe":
        saved["num_local_experts"] = saved.pop("num_experts")
    else:
        saved["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 2
        del saved["full_attention_interval"], saved["partial_rotary_factor"]
    assert geometry(saved) == geometry(config)


# ---- tables --------------------------------------------------------------------------------------------------------

TABLES = {f"{family}, {make.__name__}": make(family)
          for family in FAMILIES for make in (tiny36_config, odd36_config, block36_config)}  # fmt: skip
TABLES |= {
    "coder, some layers dense": tiny36_config("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2),
    "next, some layers dense": tiny36_config("qwen3_next", mlp_only_layers=[0, 3]),
    "tied": tiny36_config("qwen3_5_text", tie_word_embeddings=True),
}


@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES.keys())
def test_tables_are_the_model_specs(config):
    """Names and shapes written down twice, from the same document."""
    g, fused = geometry(config), shapes36(config)
    alone = {name: array.shape for name, array in split_experts(_empty(fused)).items()}
    for table in (fused, alone):
        assert expected(g, table) == {name: shape for name, shape in table.items() if not name.startswith("mtp.")}
        if config["model_type"] in HEADED:
            assert expected_head(g, table) == {n: shape for n, shape in table.items() if n.startswith("mtp.")}


def _empty(shapes):
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}


FORMS = {
    "f16, shards, vision": dict(dtype="F16", shards=4, visual=True),
    "fp8": dict(dtype="FP8"),
    "fp8 everywhere": dict(dtype="FP8", fp8=every_matrix, block=(24, 40), scale_dtype="F32"),
    "no head": dict(mtp=False),
    "head spelled another way": dict(per_expert=False, head_per_expert=True),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_passes(tmp_path, family, form):
    with Checkpoint.open(write_tiny36(tmp_path, tiny36_config(family), **form)) as checkpoint:
        g = geometry(checkpoint.config)
        check(checkpoint, g)
        if family in HEADED and form.get("mtp", True):
            check_head(checkpoint, g)
        else:
            with pytest.raises(ModelError, match="no draft head"):
                check_head(checkpoint, g)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_runs_on_it(tmp_path, family):
    write_tiny36(tmp_path, odd36_config(family), dtype="FP8", block=(24, 40))
    model = oracle.load(tmp_path)
    logits, rows = model.forward(np.random.default_rng(0).integers(0, 260, 12))
    assert np.isfinite(logits).all() and 0.1 < np.abs(logits).max() < 100
    assert family not in HEADED or len(oracle.head_of(model).draft(rows[-1], 3, depth=2)) == 2


# ---- absurd configs ------------------------------------------------------------------------------------------------

FINE = {("head_dim", "None"), ("decoder_sparse_step", "None"), ("full_attention_interval", "None")}
UNREAD = ("eos_token_id", "mtp_num_hidden_layers", "max_window_layers")  # of no concern to the geometry


def _pairs(family: str):
    config = tiny36_config(family)
    unread = (*UNREAD, "intermediate_size") if "num_experts" in config else UNREAD  # no layer is dense
    keys = [key for key, value in config.items() if type(value) is int and key not in unread]
    return [(family, key, value) for key in [*keys, "rms_norm_eps", "model_type"] for value in ABSURD
            if (key, repr(value)) not in FINE]  # fmt: skip


PAIRS = [pair for family in FAMILIES for pair in _pairs(family)]


@pytest.mark.parametrize(("family", "key", "value"), PAIRS, ids=[f"{f}-{k}={str(v)[:20]}" for f, k, v in PAIRS])
def test_absurd_values_name_their_key(family, key, value):
    with pytest.raises(ModelError, match=f"config.json: {key}:"):
        geometry(tiny36_config(family, **{key: value}))


WRONG = {
    "heads": ("qwen3_moe", dict(num_attention_heads=5), "num_attention_heads"),
    "value heads": ("qwen3_next", dict(linear_num_value_heads=5), "linear_num_value_heads"),
    "value dim": ("qwen3_5_text", dict(linear_value_head_dim=24), "linear_value_head_dim"),
    "top k": ("qwen3_5_moe_text", dict(num_experts_per_tok=9), "num_experts_per_tok"),
    "layer types short": ("qwen3_5_text", dict(num_hidden_layers=9), "layer_types"),
    "layer type unknown": ("qwen3_5_text", dict(layer_types=["mamba"] * 8), "mamba"),
    "biases": ("qwen3_moe", dict(attention_bias=True), "attention_bias"),
    "sliding window": ("qwen3_moe", dict(use_sliding_window=True, sliding_window=16), "use_sliding_window"),
    "no output gate": ("qwen3_5_text", dict(attn_output_gate=False), "attn_output_gate"),
    "activation": ("qwen3_5_text", dict(hidden_act="gelu"), "hidden_act"),
    "yarn": ("qwen3_moe", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "yarn"),
    "new yarn": ("qwen3_5_text", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "yarn"),
    "dense layers a number": ("qwen3_next", dict(mlp_only_layers=3), "mlp_only_layers"),
    "dense layer outside": ("qwen3_next", dict(mlp_only_layers=[8]), "mlp_only_layers"),
    "no layer with experts": ("qwen3_moe", dict(decoder_sparse_step=9), "decoder_sparse_step"),
    "renormalise maybe": ("qwen3_next", dict(norm_topk_prob="yes"), "norm_topk_prob"),
    "odd rotary": ("qwen3_next", dict(partial_rotary_factor=0.1), "partial_rotary_factor"),
    "absurd experts": ("qwen3_moe", dict(num_hidden_layers=4096, num_experts=1 << 16), "num_experts"),
}  # fmt: skip


@pytest.mark.parametrize(("family", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_values_at_odds(family, change, message):
    with pytest.raises(ModelError, match=message):
        geometry(tiny36_config(family, **change))


@settings(deadline=None, max_examples=300)
@given(family=st.sampled_from(FAMILIES), data=st.data(), value=JSON)
def test_no_config_raises_anything_else(family, data, value):
    key = data.draw(st.sampled_from(sorted(tiny36_config(family))))
    try:
        g = geometry(tiny36_config(family, **{key: value}))
    except ModelError:
        return
    assert g.hidden > 0 and g.top_k <= g.experts


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def tensors(request, tmp_path_factory):
    """A checkpoint's config and tensors to damage: FP8 as released, experts one by one."""
    folder = write_tiny36(tmp_path_factory.mktemp("whole"), tiny36_config(request.param), dtype="FP8", block=(32, 32),
                          prefix="model.")  # fmt: skip
    with Checkpoint.open(folder) as checkpoint:
        stored = {t.name: (t.dtype, checkpoint.load(n)) for n, t in checkpoint.tensors.items()}
        return checkpoint.raw_config, stored


def refused(folder: Path, tensors, *words: str, drop=(), put=None) -> None:
    config, stored = tensors
    out = {name: tensor for name, tensor in stored.items() if name not in drop} | (put or {})
    with Checkpoint.open(write_folder(folder, config, out)) as checkpoint:
        g = geometry(checkpoint.config)
        with pytest.raises(ModelError) as caught:
            check(checkpoint, g)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("seed", range(6))
def test_any_missing_tensor_is_named(tmp_path, tensors, seed):
    names = [name for name in tensors[1] if not name.startswith("mtp.")]
    name = names[np.random.default_rng(seed).integers(len(names))]
    refused(tmp_path, tensors, name.removeprefix("model."), drop={name})


@pytest.mark.parametrize("seed", range(6))
def test_any_scale_without_its_fp8_weight_is_found(tmp_path, tensors, seed):
    """And any weight whose scale went: what is FP8 is known by its scale."""
    names = [name.removesuffix("_scale_inv") for name in tensors[1] if re.match(r"model.*_scale_inv", name)]
    name = names[np.random.default_rng(seed).integers(len(names))]
    values = np.zeros(tensors[1][name][1].shape, np.float32)
    refused(tmp_path / "a", tensors, f"{name.removeprefix('model.')}_scale_inv", put={name: store(values, "BF16")})
    refused(tmp_path / "b", tensors, name.removeprefix("model."), drop={f"{name}_scale_inv"})


def test_what_the_family_has_not_is_unknown(tmp_path, tensors):
    values = store(np.ones((1, 64), np.float32), "F32")
    extra = {f"model.layers.{layer}.{name}": values for layer, name in
             ((3, "self_attn.q_proj.bias"), (99, "input_layernorm.weight"))}  # fmt: skip
    if tensors[0]["model_type"] == "qwen3_moe":
        extra["model.layers.0.mlp.shared_expert_gate.weight"] = values
    for name, value in extra.items():
        refused(tmp_path / name, tensors, f"1 unknown tensor: {name.removeprefix('model.')}", put={name: value})


def test_a_wrong_shape_is_named(tmp_path, tensors):
    put = {"model.norm.weight": store(np.ones(65, np.float32), "F32")}
    refused(tmp_path, tensors, "norm.weight: expected [64], found [65]", put=put)


TURNED = {  # a dimension of one too many, or at another place: read as [n, k] it would be another matrix
    "one too many": ("layers.3.self_attn.q_proj.weight", (-1, 1, 64)),
    "taps last": ("layers.0.linear_attn.conv1d.weight", (-1, 4, 1)),
    "channels second": ("layers.0.linear_attn.conv1d.weight", (1, -1, 4)),
    "a column": ("layers.0.mlp.shared_expert_gate.weight", (-1, 1)),
    "a router's column": ("layers.0.mlp.gate.weight", (-1, 1)),
    "experts": ("layers.0.mlp.experts.down_proj", (-1, 1, 64, 32)),
}


@pytest.mark.parametrize(("name", "shape"), TURNED.values(), ids=TURNED.keys())
def test_dimensions_of_one_do_not_turn_a_matrix(tmp_path, name, shape):
    """A column read for a row has as many outputs as the row has inputs: they would not fit what they are put in."""
    one = {"num_experts": 1, "num_experts_per_tok": 1} if name.endswith("mlp.gate.weight") else {}

    def change(weights):
        weights[name] = weights[name].reshape(shape)

    folder = write_tiny36(tmp_path, tiny36_config("qwen3_5_moe_text", **one), change=change)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ModelError, match=f"wrong shape: {re.escape(name)}"):
        check(checkpoint, geometry(checkpoint.config))
