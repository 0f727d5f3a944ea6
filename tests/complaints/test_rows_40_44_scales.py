"""Rows 40 to 44 of the complaints: an FP8 weight is its codes times its scale, or it is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coli.errors import ModelError
from coli.experts.forms import Matrix, floats
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import E4M3, block_size, dequantise, pair_scales
from coli.models import qwen36_geometry, qwen36_layout, qwen38_layout
from coli.models.base import Weights
from tests.tiny import Stored, e4m3, fp8_blocks, tiny_config, write_folder, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

BLOCK = (16, 24)
QWEN38 = tiny_config(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], ple_layer_ids=[2])
# FP8 matrices of a trunk and a head: dense and routed
WEIGHTS = {
    "qwen38": ("model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.1.self_attn.q_proj.weight",
               "mtp.layers.0.mlp.experts.7.gate_proj.weight"),
    "qwen3_5_moe_text": ("model.language_model.layers.3.mlp.experts.0.up_proj.weight",
                         "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
                         "mtp.layers.0.self_attn.o_proj.weight"),
    "qwen3_moe": ("model.layers.4.mlp.experts.1.gate_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
}  # fmt: skip
CASES = [(family, name) for family, names in WEIGHTS.items() for name in names]


def write(folder: Path, family: str) -> Path:
    if family == "qwen38":
        return write_tiny(folder, QWEN38, dtype="FP8", dense="FP8", block=BLOCK, scale_dtype="F32")
    return write_tiny36(folder, tiny36_config(family), dtype="FP8", block=BLOCK, scale_dtype="F32")


def check(folder: Path, family: str) -> None:
    """What an engine does with a checkpoint before it takes memory."""
    with Checkpoint.open(folder) as checkpoint:
        layout = qwen38_layout if family == "qwen38" else qwen36_layout
        geometry = (qwen38_layout if family == "qwen38" else qwen36_geometry).geometry(checkpoint.config)
        layout.check(checkpoint, geometry)
        if any(name.startswith("mtp.") for name in checkpoint):
            layout.check_head(checkpoint, geometry)


def rewrite(folder: Path, change) -> None:
    """Write the checkpoint again; `change` gets its tensors by the names of the file."""
    with Checkpoint.open(folder) as checkpoint:
        found: Stored = {t.name: (t.dtype, checkpoint.load(t)) for t in checkpoint.tensors.values()}
        raw = checkpoint.raw_config
    change(found)
    write_folder(folder, raw, found)


def other_scale(found: Stored, name: str, spelling: str, form: str) -> None:
    """Replace a weight's block scales by one number or one a row, under another name."""
    rows = found[name][1].shape[0]
    scale = {"block": found.pop(f"{name}_scale_inv")[1], "scalar": np.float32(0.01).reshape(()),
             "one": np.full(1, 0.01, np.float32), "row": np.full((rows, 1), 0.01, np.float32)}[form]  # fmt: skip
    found[name.removesuffix(".weight") + spelling] = "F32", scale


@pytest.mark.parametrize("family", WEIGHTS)
def test_rows_40_to_44_the_checkpoints_are_sound_before_they_are_damaged(tmp_path, family):
    check(write(tmp_path, family), family)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_row_40_a_scale_that_is_gone_is_named(tmp_path, family, name):
    rewrite(write(tmp_path, family), lambda found: found.pop(f"{name}_scale_inv"))
    with pytest.raises(ModelError) as caught:
        check(tmp_path, family)
    assert "1 FP8 weight without a scale: missing" in str(caught.value)
    assert name.removeprefix("model.").removeprefix("language_model.") in str(caught.value)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_row_40_a_scale_too_many_is_named(tmp_path, family, name):
    """Also beside a weight that is no FP8: then codes or scale are somebody else's."""
    bare = name.removeprefix("model.").removeprefix("language_model.")
    rewrite(write(tmp_path, family), lambda found: found.update({name: ("F32", np.zeros(found[name][1].shape, "f4"))}))
    with pytest.raises(ModelError, match=rf"1 scale without an FP8 weight: {bare}_scale_inv"):
        check(tmp_path, family)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_row_40_a_renamed_scale_is_no_scale(tmp_path, family, name):
    def rename(found: Stored) -> None:
        found[f"{name}_inv_scale"] = found.pop(f"{name}_scale_inv")

    rewrite(write(tmp_path, family), rename)
    with pytest.raises(ModelError, match="without a scale: missing"):
        check(tmp_path, family)


@pytest.mark.parametrize("rows", [1000, 129, 127, 1])
@pytest.mark.parametrize("columns", [1000, 129, 127, 1])
def test_row_41_the_block_is_the_configs_whatever_the_shape(tmp_path, rows, columns):
    """1000 rows are 8 blocks of 128 or 10 of 100: only the config knows. Read as the engine reads a dense weight."""
    rng = np.random.default_rng(rows + columns)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    for block in ((128, 128), (100, 128)):
        codes, scale = fp8_blocks(values, block, "F32")
        config = {"quantization_config": {"weight_block_size": list(block)}}
        tensors: Stored = {"a.weight": ("F8_E4M3", codes), "a.weight_scale_inv": ("F32", scale)}
        with Checkpoint.open(write_folder(tmp_path / str(block), config, tensors)) as checkpoint:
            assert set(pair_scales(checkpoint.tensors, checkpoint.quantization)) == {"a.weight"}
            weight = Weights(checkpoint).matrix("a.weight")
            read = dequantise(np.asarray(weight.codes).reshape(rows, columns), weight.scales, weight.block)
        direct = np.array([[E4M3[codes[i, j]] * scale[i // block[0], j // block[1]] for j in range(columns)]
                           for i in range(rows)]) if rows * columns < 20000 else read  # fmt: skip
        assert read.tobytes() == direct.astype(np.float32).tobytes()
        assert np.abs(read - values).max() < 0.07 * np.abs(values).max()


@pytest.mark.parametrize("family", WEIGHTS)
def test_row_41_a_block_that_is_not_the_files_is_refused(tmp_path, family):
    folder = write(tmp_path, family)
    text = (folder / "config.json").read_text()
    for written in ("[8, 24]", "[16, 20]"):
        (folder / "config.json").write_text(_with_block(text, written))
        with pytest.raises(ModelError, match=r"expected \[.*weight_block_size of config.json and the file disagree"):
            check(folder, family)
    (folder / "config.json").write_text(_with_block(text, "null"))
    with pytest.raises(ModelError, match="no weight_block_size"):
        check(folder, family)


def _with_block(text: str, block: str) -> str:
    before, _, after = text.partition('"weight_block_size": ')
    return before + '"weight_block_size": ' + block + after[after.index("]") + 1 :]


@pytest.mark.parametrize("spelling", [".weight_scale", ".scale_weight", ".scale", ".weight.scale", ".weight_scales"])
@pytest.mark.parametrize("form", ["block", "scalar", "one", "row"])
@pytest.mark.parametrize(("family", "name"), [CASES[0], CASES[1], CASES[4], CASES[7]])
def test_row_43_other_spellings_and_shapes_are_refused_by_name(tmp_path, spelling, form, family, name):
    rewrite(write(tmp_path, family), lambda found: other_scale(found, name, spelling, form))
    with pytest.raises(ModelError) as caught:
        check(tmp_path, family)
    stem = name.removesuffix(".weight").removeprefix("model.").removeprefix("language_model.")
    assert f"found {stem}{spelling} instead" in str(caught.value)
    assert "named <weight>_scale_inv" in str(caught.value)


@pytest.mark.parametrize("form", ["scalar", "one", "row"])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_row_43_other_shapes_under_the_right_name_are_refused(tmp_path, form, family, name):
    rewrite(write(tmp_path, family), lambda found: other_scale(found, name, ".weight_scale_inv", form))
    with pytest.raises(ModelError, match=r"_scale_inv: expected \[\d+, \d+\] for \[\d+, \d+\] in blocks of"):
        check(tmp_path, family)


@pytest.mark.parametrize("spelling", [".input_scale", ".weight_scale", ".weight_scale_2"])
@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3"])
def test_row_43_scales_of_other_formats_are_refused(tmp_path, spelling, dtype):
    """Activation scales, and the FP8 scales of 4-bit weights: a scale is never taken for a weight."""
    name = WEIGHTS["qwen3_moe"][0].removesuffix(".weight") + spelling
    scale = np.ones((2, 2), np.float32) if dtype == "F32" else np.full((2, 2), 0x38, np.uint8)
    rewrite(write(tmp_path, "qwen3_moe"), lambda found: found.update({name: (dtype, scale)}))
    with pytest.raises(ModelError, match=rf"1 scale without an FP8 weight: {name.removeprefix('model.')} "):
        check(tmp_path, "qwen3_moe")


def test_row_44_the_scale_multiplies():
    """Golden: codes of 1, -2, 448 and 2^-9 in a block of scale 0.5, as float32 bits."""
    codes = np.array([[0x38, 0xC0, 0x7E, 0x01]], np.uint8)
    golden = np.array([[0.5, -1.0, 224.0, 2.0**-10]], np.float32)
    scale = np.array([[0.5]], np.float32)
    assert dequantise(codes, scale, (128, 128)).tobytes() == golden.tobytes()
    matrix = Matrix("F8_E4M3", 1, 4, block=(128, 128), scale="F32")
    raw = [codes.reshape(-1).copy(), scale.view(np.uint8).reshape(-1)]
    assert floats(matrix, raw).tobytes() == golden.tobytes()


def test_row_44_a_folder_and_its_experts_multiply_too(tmp_path):
    """Twice the scales is twice the weights, in what a slot holds and in what rounding makes of it."""
    folder = write(tmp_path, "qwen38")
    with Checkpoint.open(folder) as checkpoint:
        geometry = qwen38_layout.geometry(checkpoint.config)
        name = "layers.1.mlp.experts.2.up_proj.weight"
        exact = dequantise(checkpoint.view(name), checkpoint.view(f"{name}_scale_inv"), BLOCK)
        stored, rounded = (ExpertStore(checkpoint, geometry, 3, 1, mode=mode) for mode in ("stored", "int8"))
        for store in (stored, rounded):
            store.ensure(1, [2])
        up = stored.records[1].up
        codes = stored.slot(1, 2)[up.at : up.at + up.nbytes].reshape(up.n, up.k)
        scales = stored.slot(1, 2)[up.scale_at :].view(np.float32)[: -(-up.n // 16) * -(-up.k // 24)]
        assert up.block == BLOCK == block_size(checkpoint.quantization)
        for i, j in ((0, 0), (17, 25), (31, 63)):
            assert exact[i, j] == E4M3[codes[i, j]] * scales.reshape(2, 3)[i // 16, j // 24]
        data = rounded.slot(1, 2)[rounded.records[1].up.at :]
        row_scales = data[1024 : 1024 + 64].view(np.float32)
        assert (row_scales == np.abs(exact[:16]).max(axis=1) / np.float32(127)).all()
        for store in (stored, rounded):
            store.close()


def test_the_tests_own_codes_are_of_known_values():
    assert e4m3(np.array([1.0, -2.0, 448.0, 2.0**-9], np.float32)).tolist() == [0x38, 0xC0, 0x7E, 0x01]
