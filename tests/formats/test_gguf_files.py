"""The GGUF files other tests stand on, read by the gguf package: names, order of dimensions, transforms, blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.gguf_blocks import TYPES, decode, elements, encode
from tests.gguf_files import architecture, dequantised, layout, type_of, write_gguf
from tests.tiny import split_experts, tiny_config, tiny_weights
from tests.tiny36 import FAMILIES, block36_config, tiny36_config, tiny36_weights

ERRORS = {"F32": 0, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.01, "Q4_0": 0.1, "Q4_1": 0.1, "Q5_0": 0.05, "Q5_1": 0.05,
          "Q2_K": 0.4, "Q3_K": 0.25, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.025, "IQ4_NL": 0.12,
          "IQ4_XS": 0.12}  # fmt: skip


def four_tiles(family: str) -> dict[str, Any]:
    """Value heads of a key head: 3, so that tiled order is not its own inverse."""
    return tiny_config(ple_layer_ids=[2]) if family == "qwen4_exp_text" else tiny36_config(family)


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    return tiny_weights(config) if config["model_type"] == "qwen4_exp_text" else tiny36_weights(config)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors as float32 in HF order (the package reverses the dimensions back), and the metadata."""
    reader = gguf.GGUFReader(path)
    assert all(tuple(t.shape)[::-1] == decode(t.data, t.tensor_type.name).shape for t in reader.tensors)
    tensors = {t.name: decode(t.data, t.tensor_type.name) for t in reader.tensors}
    return tensors, {name: field.contents() for name, field in reader.fields.items()}


ALL = [*FAMILIES, "qwen4_exp_text"]


@pytest.mark.parametrize("dtype", TYPES)
def test_blocks_decode_near_the_values(dtype: str) -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((3, 9, 512)).astype(np.float32) * np.logspace(-3, 3, 9, dtype=np.float32)[:, None]
    values[0, 0], values[0, 1], values[0, 2] = 0, np.abs(values[0, 1]), -np.abs(values[0, 2])
    seen = decode(encode(values, dtype), dtype)
    assert seen.shape == values.shape and not seen[0, 0].any()
    norms = np.linalg.norm(values, axis=-1)
    assert (np.linalg.norm(seen - values, axis=-1) <= ERRORS[dtype] * norms).all()
    assert encode(values, dtype).nbytes == values.size // elements(dtype) * gguf.GGML_QUANT_SIZES[
        gguf.GGMLQuantizationType[dtype]][1]  # fmt: skip


@pytest.mark.parametrize("family", ALL)
def test_names_are_those_the_package_lists(family: str, tmp_path: Path) -> None:
    config = four_tiles(family)
    tensors, facts = read(write_gguf(tmp_path / "a.gguf", config, weights_of(config)))
    arch = architecture(config)
    assert facts["general.architecture"] == arch
    if arch in gguf.MODEL_ARCH_NAMES.values():  # qwen4exp is newer than the package, as are the heads of the rest
        known = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
        stems = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[known]}
        head = f"blk.{config['num_hidden_layers']}."
        trunk = {name for name in tensors if not name.startswith(head)}
        layers = range(config["num_hidden_layers"])
        listed = {stem.format(bid=i) + end for stem in stems for i in layers for end in (".weight", ".bias", "")}
        assert trunk <= listed
    with_head = family != "qwen3_moe"
    assert facts[f"{arch}.block_count"] == config["num_hidden_layers"] + with_head
    assert facts.get(f"{arch}.nextn_predict_layers", 0) == with_head
    assert facts[f"{arch}.embedding_length"] == config["hidden_size"]
    assert len(facts["tokenizer.ggml.tokens"]) == config["vocab_size"] == len(facts["tokenizer.ggml.token_type"])


@pytest.mark.parametrize("family", ALL)
def test_every_weight_is_in_the_file_once(family: str) -> None:
    config = four_tiles(family)
    weights = {n: w for n, w in weights_of(config).items() if w.dtype == np.float32}
    total = sum(w.size for w in weights.values())
    places, start = {}, 0
    for name, values in weights.items():
        places[name] = np.arange(start, start + values.size).reshape(values.shape)
        start += values.size
    for options in ({}, {"fused_experts": True}):
        moved = np.concatenate([a.reshape(-1) for a in layout(config, places, **options).values()])
        assert np.array_equal(np.sort(moved), np.arange(total))


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text"])
def test_value_heads_are_tiled(family: str, tmp_path: Path) -> None:
    config = four_tiles(family)
    weights, (file, _) = weights_of(config), read(write_gguf(tmp_path / "a.gguf", config, weights_of(config)))
    hk, hv, dk, dv = (config[f"linear_{n}"] for n in
                      ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))  # fmt: skip
    p, q = "layers.0.linear_attn.", "blk.0."
    start = 2 * hk * dk
    assert np.array_equal(file[f"{q}attn_qkv.weight"][:start], weights[f"{p}in_proj_qkv.weight"][:start])
    for key in range(hk):
        for j in range(hv // hk):
            ours, theirs = key * (hv // hk) + j, j * hk + key  # grouped, tiled
            a, b = slice(ours * dv, ours * dv + dv), slice(theirs * dv, theirs * dv + dv)
            assert np.array_equal(file[f"{q}attn_qkv.weight"][start:][b], weights[f"{p}in_proj_qkv.weight"][start:][a])
            assert np.array_equal(file[f"{q}ssm_conv1d.weight"][start:][b], weights[f"{p}conv1d.weight"][start:, 0][a])
            assert np.array_equal(file[f"{q}attn_gate.weight"][b], weights[f"{p}in_proj_z.weight"][a])
            assert np.array_equal(file[f"{q}ssm_alpha.weight"][theirs], weights[f"{p}in_proj_a.weight"][ours])
            assert np.array_equal(file[f"{q}ssm_beta.weight"][theirs], weights[f"{p}in_proj_b.weight"][ours])
            assert file[f"{q}ssm_a"][theirs] == -np.exp(weights[f"{p}A_log"][ours])
            assert file[f"{q}ssm_dt.bias"][theirs] == weights[f"{p}dt_bias"][ours]
            assert np.array_equal(file[f"{q}ssm_out.weight"][:, b], weights[f"{p}out_proj.weight"][:, a])


def test_qwen3next_is_ungrouped_and_not_tiled(tmp_path: Path) -> None:
    config = four_tiles("qwen3_next")
    weights = weights_of(config)
    file, _ = read(write_gguf(tmp_path / "a.gguf", config, weights))
    hk, dk, group = 2, 16, 3 * 16
    whole, z = weights["layers.0.linear_attn.in_proj_qkvz.weight"], file["blk.0.attn_gate.weight"]
    q, k, v = np.split(file["blk.0.attn_qkv.weight"], (hk * dk, 2 * hk * dk))
    for head in range(hk):
        rows = whole[head * 2 * (dk + group) : (head + 1) * 2 * (dk + group)]
        own = slice(head * dk, (head + 1) * dk), slice(head * group, (head + 1) * group)
        assert np.array_equal(rows, np.concatenate([q[own[0]], k[own[0]], v[own[1]], z[own[1]]]))
    for name, ours in (("ssm_ba.weight", "in_proj_ba.weight"), ("ssm_out.weight", "out_proj.weight")):
        assert np.array_equal(file[f"blk.0.{name}"], weights[f"layers.0.linear_attn.{ours}"])
    early, _ = read(write_gguf(tmp_path / "b.gguf", config, weights, old=True))
    assert np.array_equal(early["blk.0.ssm_in.weight"], whole) and "blk.0.attn_qkv.weight" not in early


@pytest.mark.parametrize("family", ALL)
def test_norms_are_folded(family: str, tmp_path: Path) -> None:
    config = four_tiles(family)
    weights, (file, _) = weights_of(config), read(write_gguf(tmp_path / "a.gguf", config, weights_of(config)))
    pairs = {"blk.3.attn_q_norm": "layers.3.self_attn.q_norm", "blk.3.attn_k_norm": "layers.3.self_attn.k_norm"}
    if family == "qwen4_exp_text":
        pairs |= {"output_hc_norm": "hyper_connection_mixer.hc_norm", "blk.1.ple_norm_key": "layers.1.ple.norm_key",
                  "blk.0.hc_ffn_norm": "layers.0.mlp_hyper_connection.hc_norm",
                  "blk.8.nextn.hnorm": "mtp.pre_fc_norm_hidden", "blk.1.ple_norm_conv": "layers.1.ple.norm_conv",
                  "blk.8.nextn.hc_head_norm": "mtp.hyper_connection_mixer.hc_norm",
                  "blk.3.indexer.k_norm": "layers.3.self_attn.indexer.k_layernorm"}  # fmt: skip
    else:
        last = "ffn_norm" if family == "qwen3_moe" else "post_attention_norm"
        pairs |= {"output_norm": "norm", "blk.0.attn_norm": "layers.0.input_layernorm",
                  f"blk.0.{last}": "layers.0.post_attention_layernorm"}  # fmt: skip
    if family not in ("qwen3_moe", "qwen4_exp_text"):
        pairs |= {"blk.8.nextn.enorm": "mtp.pre_fc_norm_embedding", "blk.8.nextn.shared_head_norm": "mtp.norm",
                  "blk.8.attn_norm": "mtp.layers.0.input_layernorm"}  # fmt: skip
    for name, ours in pairs.items():
        one = np.float32(family != "qwen3_moe")
        assert np.array_equal(file[f"{name}.weight"], weights[f"{ours}.weight"] + one)
    if family != "qwen3_moe":
        assert np.array_equal(file["blk.0.ssm_norm.weight"], weights["layers.0.linear_attn.norm.weight"])


def test_experts_heads_and_tables_find_their_place(tmp_path: Path) -> None:
    config = four_tiles("qwen4_exp_text") | {"ple_layer_ids": [2, 6]}
    weights = weights_of(config)
    file, facts = read(write_gguf(tmp_path / "a.gguf", config, weights))
    both = weights["layers.2.mlp.experts.gate_up_proj"]
    assert np.array_equal(file["blk.2.ffn_gate_exps.weight"], both[:, :32])
    assert np.array_equal(file["blk.2.ffn_up_exps.weight"], both[:, 32:])
    assert np.array_equal(file["blk.2.ffn_down_exps.weight"], weights["layers.2.mlp.experts.down_proj"])
    assert np.array_equal(file["blk.8.nextn.eh_proj.weight"][:, :64], weights["mtp.fc_embedding.weight"])
    assert np.array_equal(file["blk.8.nextn.eh_proj.weight"][:, 64:], weights["mtp.fc_hidden.weight"])
    indexer = weights["layers.3.self_attn.indexer.index_qk_proj.weight"]
    assert np.array_equal(file["blk.3.indexer.q_proj.weight"], indexer[:64])
    assert np.array_equal(file["blk.3.indexer.k_proj.weight"], indexer[64:])
    starts = facts["qwen4exp.ple.head_offsets"][::4]
    tables = np.split(file["per_layer_token_embd.weight"], starts[1:])
    for layer, table in zip(facts["qwen4exp.ple.layers"], tables, strict=True):
        assert np.array_equal(table, weights[f"layers.{layer}.ple.ple_embedding.ngram_embedding.weight"])
    fused, _ = read(write_gguf(tmp_path / "b.gguf", config, split_experts(weights), fused_experts=True, mtp=False))
    assert np.array_equal(fused["blk.2.ffn_gate_up_exps.weight"], both)
    assert not any(".nextn." in name or name.startswith("blk.8.") for name in fused)


@pytest.mark.parametrize("family", ALL)
def test_dequantised_is_what_the_file_holds(family: str, tmp_path: Path) -> None:
    config = four_tiles(family)
    weights, types = weights_of(config), {"ffn_down_exps.weight": "Q4_0", "": "Q8_0"}
    rounded = dequantised(config, weights, types=types)
    assert rounded.keys() == weights.keys()
    first, _ = read(write_gguf(tmp_path / "a.gguf", config, weights, types=types))
    again, _ = read(write_gguf(tmp_path / "b.gguf", config, rounded))
    assert first.keys() == again.keys() and all(np.array_equal(first[n], again[n]) for n in first)
    assert any((rounded[n] != weights[n]).any() for n in weights)
    assert all(np.array_equal(rounded[n], weights[n]) for n in weights if weights[n].ndim == 1)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_written_and_split(dtype: str, tmp_path: Path) -> None:
    config = block36_config("qwen3_5_moe_text")
    weights = weights_of(config)
    whole, _ = read(write_gguf(tmp_path / "a.gguf", config, weights, types=dtype))
    first = write_gguf(tmp_path / "b.gguf", config, weights, types=dtype, splits=3)
    parts = sorted(tmp_path.glob("b-*.gguf"))
    assert first == parts[0] and [p.name for p in parts] == [f"b-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found: dict[str, np.ndarray] = {}
    for number, path in enumerate(parts):
        tensors, facts = read(path)
        assert (facts["split.no"], facts["split.count"]) == (number, 3) and not found.keys() & tensors.keys()
        assert facts["split.tensors.count"] == len(whole)
        found |= tensors
    assert all(np.array_equal(found[name], whole[name]) for name in whole) and len(found) == len(whole)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert {kinds[n] for n in kinds if n.endswith(("attn_qkv.weight", "_exps.weight", "ssm_out.weight"))} == {dtype}
    assert {kinds[n] for n in kinds if n.endswith(("norm.weight", "ffn_gate_inp.weight", "conv1d.weight"))} == {"F32"}


def test_types_by_suffix() -> None:
    types = {"": "Q4_K", "_exps.weight": "Q5_K", "ffn_down_exps.weight": "Q6_K", "ffn_gate_inp.weight": "BF16"}
    wide = (8, 256)
    named = {"blk.0.ffn_down_exps.weight": "Q6_K", "blk.0.ffn_up_exps.weight": "Q5_K", "output.weight": "Q4_K",
             "blk.0.ffn_gate_inp.weight": "BF16", "blk.0.ssm_conv1d.weight": "F32"}  # fmt: skip
    assert {name: type_of(name, wide, types) for name in named} == named
    assert type_of("output.weight", (8, 128), types) == "F32" == type_of("output_norm.weight", (256,), types)
    assert type_of("output.weight", wide, {"_exps.weight": "Q8_0"}) == "F32"
