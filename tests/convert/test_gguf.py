"""From GGUF: what its converter changed is changed back, its quantised tensors are decoded, its text becomes files.

The reference is the folder the file was made from: `dequantised` says what the file holds, in a folder's conventions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.convert.restore import inverse_decay
from coli.errors import ModelError
from tests.convert import reading
from tests.gguf_files import dequantised, write_gguf
from tests.tiny import tiny_config, tiny_weights
from tests.tiny36 import block36_config, tiny36_config, tiny36_weights

MOE = "qwen3_5_moe_text"
Weights = dict[str, np.ndarray]


def _model(family: str, wide: bool = False) -> tuple[dict, Weights]:
    if family == "qwen4_exp_text":
        config = tiny_config(hidden_size=256 if wide else 64, moe_intermediate_size=256 if wide else 32)
        return config, tiny_weights(config)
    config = block36_config(family) if wide else tiny36_config(family)
    return config, tiny36_weights(config, mtp=family != "qwen3_moe")


def _written(
    tmp_path: Path, family: str, types: str, wide: bool = False, *, splits: int = 1, fused: bool = False
) -> tuple[dict, Weights, Path]:
    """(config, the weights the file holds, its path)."""
    config, weights = _model(family, wide)
    path = write_gguf(tmp_path / "m.gguf", config, weights, types=types, tokenizer=False, splits=splits,
                      fused_experts=fused)  # fmt: skip
    return config, dequantised(config, weights, types=types, fused_experts=fused), path


def _file_name(name: str) -> str:
    return name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"


def _same(name: str, made: dict, wanted: np.ndarray, exact: bool) -> None:
    dtype, data = made[_file_name(name)]
    ours = reading.wide(dtype, data)
    assert ours.shape == wanted.shape, name
    if name.endswith("A_log"):  # -exp of both is the same float32, or one apart
        assert np.abs(np.exp(ours) / np.exp(wanted) - 1).max() <= 2.0**-22, name
    elif "norm" in name and wanted.ndim == 1:
        assert np.array_equal(ours + np.float32(1), wanted + np.float32(1)) or np.array_equal(ours, wanted), name
    elif exact or dtype != "F16":
        assert np.array_equal(ours, wanted), name
    else:
        assert np.array_equal(ours, wanted.astype(np.float16).astype(np.float32)), name


@pytest.mark.parametrize("family", [MOE, "qwen3_next", "qwen3_moe"])
@pytest.mark.parametrize(("types", "splits", "fused"), [("F32", 1, False), ("Q8_0", 1, True), ("Q4_K", 3, False),
                                                        ("BF16", 1, False)])  # fmt: skip
def test_a_container(tmp_path: Path, family: str, types: str, splits: int, fused: bool) -> None:
    wide = types == "Q4_K"
    config, weights, path = _written(tmp_path, family, types, wide, splits=splits, fused=fused)
    report = convert(path, tmp_path / "out", Options(4, 64))
    made = reading.read_folder(tmp_path / "out")
    inter, hidden = config["moe_intermediate_size"], config["hidden_size"]
    dense = 0
    for name, values in weights.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert in (0, config["num_experts"] - 1):
                packed = _file_name(f"{stem}{expert}.merged_weight")
                gate, up, down = reading.merged(made, packed, hidden, inter, 4, 64)
                both = values[expert]
                for ours, w in ((gate, both[:inter]), (up, both[inter:]), (down, weights[f"{stem}down_proj"][expert])):
                    assert np.array_equal(ours, reading.quantised(w, 4, 64)), name
        elif ".mlp.experts." not in name and "in_proj_qkvz" not in name:
            dense += 1
            _same(name, made, values, exact=types in ("F32", "BF16"))
    assert dense + (3 if family == "qwen3_next" else 0) > 20
    if types in ("F32", "BF16"):  # nothing is rounded but what is computed
        assert report.errors.get("dense", 0.0) < 1e-7
    else:
        assert 1e-5 < report.errors["dense"] < 3e-4
        kinds = {made[_file_name(f"layers.0.{name}.weight")][0] for name in ("mlp.gate", "input_layernorm")}
        assert kinds == {"F32"} and made["model.embed_tokens.weight"][0] == "F16"


def test_qwen3_next_keeps_its_inputs_apart(tmp_path: Path) -> None:
    config, weights, path = _written(tmp_path, "qwen3_next", "F32")
    convert(path, tmp_path / "out", Options())
    made = reading.read_folder(tmp_path / "out")
    whole = weights["layers.0.linear_attn.in_proj_qkvz.weight"]
    parts = [reading.wide(*made[f"model.layers.0.linear_attn.{n}.weight"]) for n in ("in_proj_qkv", "in_proj_z")]
    assert np.array_equal(np.sort(np.concatenate(parts), axis=None), np.sort(whole, axis=None))
    assert made["model.layers.0.linear_attn.in_proj_ba.weight"][1].shape == (12, 64)


@pytest.mark.parametrize(("types", "wide"), [("F32", False), ("Q8_0", False), ("Q6_K", True)])
def test_a_standalone_sidecar(tmp_path: Path, types: str, wide: bool) -> None:
    config, weights, path = _written(tmp_path, "qwen4_exp_text", types, wide)
    convert(path, tmp_path / "out", Options(4, 64))
    made = reading.read_folder(tmp_path / "out")
    side = reading.read_folder(tmp_path / "out" / "experts-int4g64")
    inter, hidden = config["moe_intermediate_size"], config["hidden_size"]
    for name, values in weights.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            down = weights[f"{stem}down_proj"]
            for part, w, k in (("gate", values[5][:inter], hidden), ("up", values[5][inter:], hidden),
                               ("down", down[5], inter)):  # fmt: skip
                packed = _file_name(f"{stem}5.{part}_proj.weight")
                codes = reading.planar(side[packed][1], k)
                assert np.array_equal(reading.times(codes, side[f"{packed}.qs"][1], 64), reading.quantised(w, 4, 64))
        elif values.dtype == np.int64:
            assert made[_file_name(name)][0] == "I64" and np.array_equal(made[_file_name(name)][1], values)
        elif ".mlp.experts." not in name:
            _same(name, made, values, exact=types == "F32")


@pytest.mark.parametrize("family", [MOE, "qwen3_next", "qwen3_moe", "qwen4_exp_text"])
def test_our_reader_takes_it(tmp_path: Path, family: str) -> None:
    from coli.convert.source import known
    from coli.formats.checkpoint import Checkpoint
    from coli.models import qwen36_geometry, qwen38_layout

    config, weights, path = _written(tmp_path, family, "Q8_0")
    convert(path, tmp_path / "out", Options())
    module = qwen38_layout if family == "qwen4_exp_text" else qwen36_geometry
    with Checkpoint.open(tmp_path / "out") as made, Checkpoint.open(path) as source:
        g = module.geometry(made.config)  # type: ignore[attr-defined]
        assert g == module.geometry(source.config)  # type: ignore[attr-defined]
        known(made, "qwen38" if family == "qwen4_exp_text" else "qwen36", g)


def test_the_decay_comes_back_from_what_checkpoints_hold() -> None:
    rng = np.random.default_rng(0)
    for held in (np.log(rng.uniform(0.01, 16, 4096)).astype(np.float32), rng.normal(0, 3, 4096).astype(np.float32)):
        short = (held.view(np.uint32) & 0xFFFF0000).view(np.float32)  # bfloat16
        assert np.array_equal(inverse_decay(-np.exp(short)), short)
        back = np.exp(inverse_decay(-np.exp(held)))
        assert np.abs(back / np.exp(held) - 1).max() <= 2.0**-22


def test_quantised_values_beyond_f16_stay_f32(tmp_path: Path) -> None:
    config, weights = _model("qwen3_moe")
    weights["lm_head.weight"] *= np.float32(1e6)
    path = write_gguf(tmp_path / "m.gguf", config, weights, types="Q8_0", tokenizer=False)
    convert(path, tmp_path / "out", Options())
    made = reading.read_folder(tmp_path / "out")
    assert made["lm_head.weight"][0] == "F32"
    assert np.isfinite(reading.wide(*made["lm_head.weight"])).all()


@pytest.mark.parametrize("family", [MOE, "qwen4_exp_text"])
def test_its_text_becomes_files(tmp_path: Path, family: str) -> None:
    from coli.chat import ChatTemplate, stop_ids
    from coli.formats.checkpoint import Checkpoint
    from coli.tokenizer import Tokenizer

    config, weights = _model(family)
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    convert(path, tmp_path / "out", Options())
    with Checkpoint.open(path) as source, Checkpoint.open(tmp_path / "out") as made:
        ours, theirs = Tokenizer.open(made), Tokenizer.open(source)
        text = "<|im_start|>user\nThe 3 foxes\u2019 den, na\u00efve.<|im_end|>"
        assert ours.encode(text) == theirs.encode(text) and len(ours.encode(text)) > 20
        assert ours.special_ids == theirs.special_ids and ours.vocab_size == theirs.vocab_size
        assert stop_ids(made, ours) == stop_ids(source, theirs) != frozenset()
        chats = [ChatTemplate.open(checkpoint, tokens) for checkpoint, tokens in ((made, ours), (source, theirs))]
        said = [{"role": "user", "content": "hi"}]
        assert chats[0] is not None and chats[1] is not None
        assert chats[0].render(said, thinking=False) == chats[1].render(said, thinking=False)


def test_a_tokenizer_we_cannot_read_is_said_before_the_work(tmp_path: Path) -> None:
    def change(facts: dict) -> None:
        facts["tokenizer.ggml.pre"] = "llama-bpe"

    config, weights = _model("qwen3_moe")
    path = write_gguf(tmp_path / "m.gguf", config, weights, change=change)
    with pytest.raises(ModelError, match="llama-bpe"):
        convert(path, tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
