"""Geometry refuses absurd configs by key; the check refuses a checkpoint that is not exactly the model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.models.describe import describe
from coli.models.qwen38_layout import check, check_head, expected, geometry
from tests.big_checkpoint import real_config
from tests.oracle import Qwen4MTP, load
from tests.tiny import odd_config, store, tiny_config, write_folder, write_tiny

NANO = Path(__file__).parents[2] / "coli" / "assets" / "nano"
ABSURD = [None, 0, -1, 1.5, "4", True, [], {}, math.inf, math.nan, 10**400, 1 << 40]


def opened(folder: Path) -> tuple[Checkpoint, object]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, geometry(checkpoint.config)


def refused(folder: Path, *words: str) -> None:
    checkpoint, g = opened(folder)
    with checkpoint, pytest.raises(ModelError) as caught:
        check(checkpoint, g)
    for word in words:
        assert word in str(caught.value), caught.value
    assert "\n" not in str(caught.value) and caught.value.hint


# ---- geometry ----------------------------------------------------------------------------------------------------


def test_the_real_model():
    g = geometry(real_config(layers=48))
    assert (g.hidden, g.layers, g.vocab, g.experts, g.top_k, g.moe_inter) == (2560, 48, 248_320, 512, 10, 640)
    assert g.layer_types == ("gdn", "gdn", "gdn", "attention") * 12
    assert (g.rotary_dim, g.rope_theta, g.gate, g.ple_layers, g.ngram_eos) == (64, 1e7, "sigmoid", (1,), 248_044)
    assert (g.width, g.conv_channels, g.ngram_heads, g.row_dim, g.index_blocks) == (10_240, 10_240, 16, 160, 512)
    table = expected(g)
    weights = sum(math.prod(shape) for name, shape in table.items() if ".ple_embedding." not in name)
    assert weights == pytest.approx(125.74e9, rel=3e-3)  # model_spec.md section 11
    p = "layers.1.ple.ple_embedding.ngram_embedding."
    assert table[f"{p}shard_127.weight"] == (2_500_012, 160) and f"{p}shard_128.weight" not in table


def test_spellings_that_mean_the_same():
    base = geometry(tiny_config())
    kinds = ["linear_attention", "linear_attention", "linear_attention"]
    for kind in ("qwen_sparse_attention", "indexed_attention"):
        assert geometry(tiny_config(layer_types=[*kinds, kind, *kinds, "full_attention"])) == base
    assert geometry(tiny_config(model_type="qwen4_exp")) == base
    assert geometry(tiny_config(eos_token_id=[256, 3])) == base
    assert geometry(tiny_config(ple_layer_ids=[6, 2])) == base
    flat = tiny_config(rope_theta=10000.0, partial_rotary_factor=0.5)
    del flat["rope_parameters"]
    assert geometry(flat) == base
    silu = [tiny_config(output_gate_type=gate) for gate in ("silu", "swish", None)]
    assert {geometry(config).gate for config in silu} == {"silu"}


def test_without_ple_no_ngram_key_is_needed():
    config = {k: v for k, v in tiny_config(ple_layer_ids=[]).items() if not k.startswith(("ple_", "ngram", "eos"))}
    g = geometry(config)
    assert g.ple_layers == () and g.ngram_size == 0 and not any(".ple." in name for name in expected(g))


REQUIRED = [key for key, value in tiny_config().items() if type(value) is int and not key.startswith(("mtp", "seed"))]


FINE = {("eos_token_id", "0"), ("split_ngram_parts", "None"), ("indexer_kv_heads", "None")}
PAIRS = [(key, value) for key in [*REQUIRED, "rms_norm_eps", "layer_types", "model_type"] for value in ABSURD
         if (key, repr(value)) not in FINE]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), PAIRS, ids=[f"{key}={str(value)[:20]}" for key, value in PAIRS])
def test_absurd_values_name_their_key(key, value):
    with pytest.raises(ModelError, match=f"config.json: {key}:"):
        geometry(tiny_config(**{key: value}))


WRONG = {
    "heads": (dict(num_attention_heads=5), "num_attention_heads"),
    "value heads": (dict(linear_num_value_heads=5), "linear_num_value_heads"),
    "top k": (dict(num_experts_per_tok=9), "num_experts_per_tok"),
    "budget below a block": (dict(indexer_budget=3), "indexer_budget"),
    "two index keys": (dict(indexer_kv_heads=2), "indexer_kv_heads"),
    "index narrower than rope": (dict(indexer_head_dim=8), "indexer_head_dim"),
    "table row": (dict(ple_embed_dim=66), "ple_embed_dim"),
    "layer types short": (dict(num_hidden_layers=9), "layer_types"),
    "layer type unknown": (dict(layer_types=["mamba"] * 8), "mamba"),
    "layer type a number": (dict(layer_types=[3] * 8), "layer_types"),
    "gate": (dict(output_gate_type="tanh"), "output_gate_type"),
    "gate a list": (dict(output_gate_type=["silu"]), "output_gate_type"),
    "activation": (dict(hidden_act="sigmoid"), "hidden_act"),
    "flag": (dict(norm_topk_prob="yes"), "norm_topk_prob"),
    "ple layer 0": (dict(ple_layer_ids=[0]), "ple_layer_ids"),
    "ple layer 9": (dict(ple_layer_ids=[9]), "ple_layer_ids"),
    "ple layer twice": (dict(ple_layer_ids=[2, 2]), "ple_layer_ids"),
    "eos outside": (dict(eos_token_id=272), "eos_token_id"),
    "eos empty": (dict(eos_token_id=[]), "eos_token_id"),
    "yarn": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "yarn"),
    "old yarn": (dict(rope_scaling=dict(type="yarn")), "yarn"),
    "no theta": (dict(rope_parameters={}), "rope_theta"),
    "odd rotary": (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.1)), "partial_rotary_factor"),
    "all rotary and more": (dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=2)), "partial_rotary"),
    "absurd heads": (dict(heads_per_ngram=256, ngram_size=16, ple_embed_dim=3840 * 2), "heads_per_ngram"),
    "absurd experts": (dict(num_hidden_layers=4096, layer_types=["linear_attention"] * 4096, num_experts=1 << 16),
                       "num_experts"),
    "other model": (dict(model_type="llama"), "llama"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_values_at_odds(change, message):
    with pytest.raises(ModelError, match=message):
        geometry(tiny_config(**change))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(key=st.sampled_from(sorted(tiny_config())), value=JSON)
def test_no_config_raises_anything_else(key, value):
    try:
        g = geometry(tiny_config(**{key: value}))
    except ModelError:
        return
    assert g.hidden > 0 and g.top_k <= g.experts


# ---- check -------------------------------------------------------------------------------------------------------

FORMS = {
    "f32": dict(),
    "f16": dict(dtype="F16", prefix="model.language_model.", visual=True),
    "bf16 one by one, split": dict(dtype="BF16", per_expert=True, shards=4),
    "fp8": dict(dtype="FP8"),
    "fp8 everywhere": dict(dtype="FP8", dense="FP8", block=(24, 40), scale_dtype="F32"),
    "fp8 fused, whole table": dict(dtype="FP8", per_expert=False, block=(32, 32), table_shards=0),
    "no head, 1 shard of table": dict(mtp=False, table_shards=1),
    "odd": dict(config=odd_config(), dtype="BF16"),
    "tied": dict(config=tiny_config(tie_word_embeddings=True)),
    "no PLE": dict(config=tiny_config(ple_layer_ids=[])),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_passes_and_adds_up(tmp_path, form):
    checkpoint, g = opened(write_tiny(tmp_path, **form))
    check(checkpoint, g)
    found = describe(checkpoint, g, "qwen38")
    assert (found.head is not None) == form.get("mtp", True)
    assert found.dense + found.experts + found.table + found.mtp == checkpoint.nbytes
    assert sum(nbytes for _, nbytes in found.types.values()) == checkpoint.nbytes
    assert sum(count for count, _ in found.types.values()) == len(checkpoint.tensors)
    assert found.expert_record * g.layers * g.experts == found.experts
    assert (found.ignored > 0) == form.get("visual", False)


def test_nano_passes():
    checkpoint, g = opened(NANO)
    check(checkpoint, g)
    check_head(checkpoint, g)
    assert g.gate == "silu" and g.ple_layers == (1, 5)


@pytest.mark.parametrize("form", ["f32", "fp8 everywhere", "odd", "tied", "no PLE", "fp8 fused, whole table"])
def test_the_oracle_runs_on_it(tmp_path, form):
    write_tiny(tmp_path, **FORMS[form])
    model = load(tmp_path)
    ids = np.random.default_rng(0).integers(0, 260, 12)
    logits, streams = model.forward(ids)
    assert np.isfinite(logits).all() and 0.1 < np.abs(logits).max() < 100
    assert len(Qwen4MTP(model).draft(streams[-1], 3, depth=2)) == 2


@pytest.fixture(scope="module")
def tensors():
    """A checkpoint's tensors to damage: block FP8 everywhere, fused table scale, head."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        write_tiny(Path(name), dtype="FP8", dense="FP8", block=(32, 32))
        with Checkpoint.open(Path(name)) as checkpoint:
            stored = {t.name: (t.dtype, checkpoint.load(n)) for n, t in checkpoint.tensors.items()}
            return checkpoint.raw_config, stored


def damaged(folder: Path, tensors, **changes) -> Path:
    config, stored = tensors
    drop, rename, put = (changes.get(key, {}) for key in ("drop", "rename", "put"))
    out = {rename.get(name, name): tensor for name, tensor in stored.items() if name not in drop}
    return write_folder(folder, config | changes.get("config", {}), out | put)


def test_undamaged(tmp_path, tensors):
    checkpoint, g = opened(damaged(tmp_path, tensors))
    check(checkpoint, g)


@pytest.mark.parametrize("seed", range(12))
def test_any_missing_tensor_is_named(tmp_path, tensors, seed):
    names = [name for name in tensors[1] if not name.startswith("mtp.")]
    name = names[np.random.default_rng(seed).integers(len(names))]
    refused(damaged(tmp_path, tensors, drop={name}), name.removeprefix("model."))


KEY = "model.layers.1.ple.key_proj.weight"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding."
BUFFER = "model.layers.5.ple.ple_embedding.layer_multipliers"
ONES = np.ones((64, 64), np.float32)

DAMAGE = {
    "missing and unknown": (dict(rename={KEY: "model.layers.1.ple.kay_proj.weight"},
                                 drop={KEY + "_scale_inv", "model.embed_tokens.weight"}), ("FP8", "kay_proj")),
    "unknown": (dict(put={"model.layers.0.extra": store(ONES, "F32")}), ("1 unknown tensor: layers.0.extra",)),
    "bias": (dict(put={"model.layers.3.self_attn.q_proj.bias": store(ONES[0], "F32")}), ("q_proj.bias",)),
    "both listed": (dict(drop={"model.layers.0.linear_attn.A_log"}, put={"x": store(ONES, "F32")}),
                    ("1 missing tensor: layers.0.linear_attn.A_log", "1 unknown tensor: x")),
    "layer too many": (dict(put={"model.layers.8.linear_attn.A_log": store(ONES[0], "F32")}), ("layers.8",)),
    "wrong shape": (dict(put={"model.layers.0.linear_attn.dt_bias": store(ONES[0], "F32")}),
                    ("layers.0.linear_attn.dt_bias: expected [6], found [64]",)),
    "transposed": (dict(put={"model.embed_tokens.weight": store(np.ones((64, 272), np.float32), "F32")}),
                   ("embed_tokens.weight: expected [272, 64], found [64, 272]",)),
    "integers": (dict(put={"model.layers.0.linear_attn.A_log": ("I64", np.ones(6, np.int64))}), ("is I64",)),
    "fp8 vector": (dict(put={"model.layers.0.linear_attn.A_log": ("F8_E4M3", np.ones(6, np.uint8)),
                             "model.layers.0.linear_attn.A_log_scale_inv": store(np.ones(1, np.float32), "F32")}),
                   ("A_log", "matri")),
    "scale dropped": (dict(drop={EXPERT + "_scale_inv"}), ("missing layers.0.mlp.experts.3.up_proj.weight_scale_inv",)),
    "scale renamed": (dict(rename={EXPERT + "_scale_inv": EXPERT + "_scale"}), ("up_proj.weight_scale instead",)),
    "weight unscaled": (dict(put={"model.layers.0.linear_attn.in_proj_z.weight": store(np.ones((96, 64), np.float32),
                                                                                      "F32")}),
                        ("1 scale without an FP8 weight: layers.0.linear_attn.in_proj_z.weight_scale_inv",)),
    "experts of two kinds": (dict(put={EXPERT: store(np.ones((32, 64), np.float32), "F32")},
                                  drop={EXPERT + "_scale_inv"}), ("routed experts of layer 0 mix F32 and F8_E4M3",)),
    "no table scale": (dict(drop={TABLE + "weight_scale"}), ("FP8 n-gram table of layer 1", "weight_scale")),
    "long table scale": (dict(put={TABLE + "weight_scale": store(ONES[0], "F32")}), ("expected one number",)),
    "table of two kinds": (dict(put={TABLE + "shard_1.weight": store(np.ones((108, 16), np.float32), "F32")}),
                           ("n-gram table of layer 1 mix",)),
    "a shard too few": (dict(drop={TABLE + "shard_3.weight"}), ("shard_3",)),
    "wrong hash": (dict(put={BUFFER: ("I64", np.array([3, 5, 7]))}), ("hash constants", "layer_multipliers")),
    "no block size": (dict(config={"quantization_config": {"quant_method": "fp8"}}), ("weight_block_size",)),
    "another block size": (dict(config={"quantization_config": {"weight_block_size": [64, 64]}}), ("expected [",)),
    "another vocabulary": (dict(config={"vocab_size": 273}), ("expected [273, 64], found [272, 64]",)),
    "another seed": (dict(config={"seed": 1}), ("hash constants",)),
    "fewer layers": (dict(config={"num_hidden_layers": 7, "layer_types": tiny_config()["layer_types"][:7]}),
                     ("unknown tensors", "layers.7", "more")),
    "uneven shards": (dict(config={"split_ngram_parts": 3}), ("split_ngram_parts",)),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(tmp_path, tensors, changes, words):
    refused(damaged(tmp_path, tensors, **changes), *words)


def test_a_table_that_is_not_fp8_has_no_scale(tmp_path):
    write_tiny(tmp_path, dtype="BF16")
    with Checkpoint.open(tmp_path) as checkpoint:
        stored = {t.name: (t.dtype, checkpoint.load(n)) for n, t in checkpoint.tensors.items()}
        config = checkpoint.raw_config
    write_folder(tmp_path, config, stored | {TABLE + "weight_scale": store(ONES[0, :1], "F32")})
    refused(tmp_path, "belongs to no FP8 table")


def test_an_odd_head_is_no_concern_of_the_trunk(tmp_path, tensors):
    checkpoint, g = opened(damaged(tmp_path, tensors, put={"mtp.something.weight": store(ONES, "F32")}))
    check(checkpoint, g)
    with pytest.raises(ModelError, match="mtp.something"):
        check_head(checkpoint, g)


def test_written_text_files_load(tmp_path):
    from tokenizers import Tokenizer

    write_tiny(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>user\nЁлка 👩‍👩‍👧<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 257 and ids[-1] == 258 and bytes(ids[1:-1]) == text[12:-10].encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [258, 256]
