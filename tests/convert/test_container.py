"""The container: every value read back, from every spelling of the source; dense tensors exact; its small files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from tests.convert import reading
from tests.tiny36 import every_matrix, odd36_config, tiny36_config, write_tiny36

MOE = "qwen3_5_moe_text"


def _source_expert(tensors: Mapping, prefix: str, expert: int, inter: int, block: int) -> list[np.ndarray]:
    """gate, up and down of an expert, from whichever spelling the source folder has."""
    stem = f"{prefix}mlp.experts."
    if f"{stem}gate_up_proj" in tensors:
        both = reading.dense(tensors, f"{stem}gate_up_proj", block)[expert]
        return [both[:inter], both[inter:], reading.dense(tensors, f"{stem}down_proj", block)[expert]]
    return [reading.dense(tensors, f"{stem}{expert}.{part}_proj.weight", block) for part in ("gate", "up", "down")]


def _stem(name: str) -> str:
    return name.replace("model.language_model.", "model.")


@pytest.mark.parametrize("options", [Options(4, 64), Options(4, 32), Options(8, 0), Options(8, 128), Options(4, 0)])
@pytest.mark.parametrize(
    ("family", "form"),
    [
        (MOE, dict(dtype="BF16")), (MOE, dict(dtype="BF16", per_expert=True, shards=3)), (MOE, dict(dtype="F32")),
        (MOE, dict(dtype="FP8", block=(32, 32))), (MOE, dict(dtype="FP8", per_expert=False, block=(16, 24))),
        ("qwen3_next", dict(dtype="BF16")), ("qwen3_moe", dict(dtype="F16", mtp=False)),
        (MOE, dict(dtype="BF16", mtp=False)),
    ],
)  # fmt: skip
def test_every_value_is_read_back(tmp_path: Path, options: Options, family: str, form: dict) -> None:
    if form.get("block") == (16, 24):
        form = form | {"block": (16, 16)}
    config = tiny36_config(family)
    write_tiny36(tmp_path / "src", config, **form)
    report = convert(tmp_path / "src", tmp_path / "out", options)
    source = {_stem(name): value for name, value in reading.read_folder(tmp_path / "src").items()}
    made = reading.read_folder(tmp_path / "out")
    block, inter, hidden = form.get("block", (128, 128))[0], config["moe_intermediate_size"], config["hidden_size"]
    prefixes = [f"model.layers.{layer}." for layer in range(config["num_hidden_layers"])]
    prefixes += ["mtp.layers.0."] if any(name.startswith("mtp.") for name in source) else []
    packed = set()
    for prefix in prefixes:
        for expert in range(config["num_experts"]):
            name = f"{prefix}mlp.experts.{expert}.merged_weight"
            packed |= {name, f"{name}.qs"}
            found = reading.merged(made, name, hidden, inter, options.ebits, options.group)
            for ours, w in zip(found, _source_expert(source, prefix, expert, inter, block), strict=True):
                assert np.array_equal(ours, reading.quantised(w, options.ebits, options.group))
    dense = {name for name in source if ".mlp.experts." not in name and not name.endswith("_scale_inv")}
    assert {name for name in made if not name.endswith("_scale_inv")} == dense | packed
    for name in dense:
        ours, theirs = reading.dense(made, name, block), reading.dense(source, name, block)
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)), name
    assert report.files == report.written == len(list((tmp_path / "out").glob("*.safetensors")))


def test_odd_sizes(tmp_path: Path) -> None:
    """23 inputs of down: refused as int4, read back as int8."""
    config = odd36_config(MOE)
    write_tiny36(tmp_path / "src", config, dtype="BF16")
    with pytest.raises(Exception, match="even number of inputs") as caught:
        convert(tmp_path / "src", tmp_path / "out", Options(4, 64))
    assert caught.value.exit == 2 and not (tmp_path / "out").exists()
    convert(tmp_path / "src", tmp_path / "out", Options(8, 32))
    source = {_stem(name): value for name, value in reading.read_folder(tmp_path / "src").items()}
    made = reading.read_folder(tmp_path / "out")
    found = reading.merged(made, "model.layers.2.mlp.experts.6.merged_weight", 52, 23, 8, 32)
    for ours, w in zip(found, _source_expert(source, "model.layers.2.", 6, 23, 128), strict=True):
        assert np.array_equal(ours, reading.quantised(w, 8, 32))


def test_dense_tensors_are_f16_only_where_nothing_is_lost(tmp_path: Path) -> None:
    def change(weights: dict[str, np.ndarray]) -> None:
        weights["norm.weight"][:] = 0.5
        weights["layers.0.input_layernorm.weight"][:] = 70000.0  # beyond f16
        weights["layers.1.input_layernorm.weight"][:] = 2.0**-25  # below f16
        weights["layers.2.input_layernorm.weight"][:] = -0.0
        weights["lm_head.weight"][:] = 0.5
        weights["lm_head.weight"][-1, -1] = np.float32(1.0 + 2**-12)  # too fine: the last value decides

    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="F32", change=change)
    convert(tmp_path / "src", tmp_path / "out", Options())
    made = reading.read_folder(tmp_path / "out")
    kinds = {name: made[name][0] for name in made}
    assert kinds["model.norm.weight"] == "F16" and kinds["model.layers.2.input_layernorm.weight"] == "F16"
    assert np.signbit(made["model.layers.2.input_layernorm.weight"][1]).all()
    assert kinds["model.layers.0.input_layernorm.weight"] == kinds["model.layers.1.input_layernorm.weight"] == "F32"
    assert kinds["lm_head.weight"] == "F32"


def test_fp8_dense_stays_fp8_unless_f16_holds_it(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="FP8", fp8=every_matrix, block=(32, 32))
    convert(tmp_path / "src", tmp_path / "out", Options())
    made = reading.read_folder(tmp_path / "out")
    name = "model.layers.0.linear_attn.in_proj_qkv.weight"
    assert made[name][0] == "F8_E4M3" and made[f"{name}_scale_inv"][0] == "BF16"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [32, 32]


def test_small_files(tmp_path: Path) -> None:
    config = tiny36_config(MOE)
    write_tiny36(tmp_path / "src", config, dtype="BF16")
    convert(tmp_path / "src", tmp_path / "out", Options(4, 32))
    out, src = tmp_path / "out", tmp_path / "src"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (src / name).read_bytes()
    assert json.loads((out / "config.hf.json").read_text()) == json.loads((src / "config.json").read_text())
    flat = json.loads((out / "config.json").read_text())
    assert "text_config" not in flat and flat["hidden_size"] == 64 and flat["model_type"] == MOE
    meta = json.loads((out / "qwen36_meta.json").read_text())
    assert meta == {
        "model_type": MOE, "hidden": 64, "n_layers": 8, "n_active": 8, "layer_types": config["layer_types"],
        "num_experts": 8, "topk": 3, "moe_inter": 32, "shared_inter": 48, "rms_eps": 1e-6, "ebits": 4,
        "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "attn_output_gate": True,
        "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "zero_centered_norms": True,
        "q_heads": 4, "kv_heads": 2, "head_dim": 32, "rope_dim": 8, "expert_gs": 32, "expert_down_bits": 4,
        "expert_down_gs": 32, "dn_vheads": 6, "dn_kheads": 2, "dn_kdim": 16, "dn_vdim": 16, "dn_convk": 4,
        "dn_conv_dim": 160,
    }  # fmt: skip


@pytest.mark.parametrize("family", [MOE, "qwen3_next", "qwen3_moe"])
def test_our_reader_takes_it(tmp_path: Path, family: str) -> None:
    from coli.convert.source import known
    from coli.formats.checkpoint import Checkpoint
    from coli.models.qwen36_geometry import geometry

    write_tiny36(tmp_path / "src", tiny36_config(family), dtype="BF16", mtp=family != "qwen3_moe")
    convert(tmp_path / "src", tmp_path / "out", Options())
    with Checkpoint.open(tmp_path / "src") as source, Checkpoint.open(tmp_path / "out") as made:
        g = geometry(made.config)
        assert g == geometry(source.config)
        known(made, "qwen36", g)
