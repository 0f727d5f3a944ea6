"""The sidecar: inside the model's folder and standing alone, every value, the format's order and boundaries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.errors import UsageError
from tests.convert import reading
from tests.tiny import odd_config, tiny_config, write_tiny


def _record(made: dict, prefix: str, expert: int, sizes: tuple[int, int], options: Options) -> list[np.ndarray]:
    hidden, inter = sizes
    out = []
    for part, k in (("gate", hidden), ("up", hidden), ("down", inter)):
        dtype, data, _ = made[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"]
        scales = made[f"{prefix}mlp.experts.{expert}.{part}_proj.weight.qs"][1]
        assert dtype == ("U8" if options.ebits == 4 else "I8")
        codes = reading.planar(data, k) if options.ebits == 4 else data.astype(np.float32)
        out.append(reading.times(codes, scales, options.group))
    return out


def _experts(source: dict, prefix: str, expert: int, inter: int) -> list[np.ndarray]:
    stem = f"{prefix}mlp.experts."
    if f"{stem}gate_up_proj" in source:
        both = reading.dense(source, f"{stem}gate_up_proj")[expert]
        return [both[:inter], both[inter:], reading.dense(source, f"{stem}down_proj")[expert]]
    return [reading.dense(source, f"{stem}{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]


@pytest.mark.parametrize("config", [tiny_config(hidden_size=192, moe_intermediate_size=80), odd_config()])
@pytest.mark.parametrize("dtype", ["BF16", "FP8"])
@pytest.mark.parametrize("options", [Options(4, 64), Options(4, 128), Options(8, 64), Options(8, 32)])
def test_inside_the_model_every_value(tmp_path: Path, config: dict, dtype: str, options: Options) -> None:
    src = write_tiny(tmp_path / "m", config, dtype=dtype)
    before = reading.bytes_of(src)
    report = convert(src, src, options)
    folder = src / f"experts-int{options.ebits}g{options.group}"
    assert report.path == str(folder)
    after = reading.bytes_of(src)
    assert {name: after[name] for name in before} == before, "the model's own files are left alone"
    source, hidden, inter = reading.read_folder(src), config["hidden_size"], config["moe_intermediate_size"]
    record = json.loads((folder / "index.json").read_text())["record_bytes"]
    files = [f"layer-{layer:03d}" for layer in range(8)] + ["layer-mtp"]
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == files
    for file in files:
        made = reading.read_file(folder / f"{file}.safetensors")
        prefix = "mtp.layers.0." if file == "layer-mtp" else f"model.layers.{int(file[-3:])}."
        starts = [at for name, (_, _, at) in made.items() if name.endswith("gate_proj.weight")]
        assert starts == [starts[0] + record * i for i in range(config["num_experts"])] and starts[0] % 4096 == 0
        for expert in range(config["num_experts"]):
            found = _record(made, prefix, expert, (hidden, inter), options)
            for ours, w in zip(found, _experts(source, prefix, expert, inter), strict=True):
                assert np.array_equal(ours, reading.quantised(w, options.ebits, options.group))


def test_the_index(tmp_path: Path) -> None:
    src = write_tiny(tmp_path / "m", tiny_config(hidden_size=128, moe_intermediate_size=64), dtype="BF16")
    convert(src, src / "experts-int4g64", Options())
    assert json.loads((src / "experts-int4g64" / "index.json").read_text()) == {
        "format": "colibri.qwen38.experts-int4g64", "version": 1, "codes": "planar64-v8", "scales": "f32-per-64",
        "geometry": {"hidden": 128, "moe_inter": 64, "experts": 8, "layers": 8},
        "record_bytes": 3 * (128 * 64 // 2 + 4 * 128), "layers": 8, "complete": True,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["BF16", "FP8", "F32"])
def test_standing_alone_everything_else_is_as_it_was(tmp_path: Path, dtype: str) -> None:
    src = write_tiny(tmp_path / "m", dtype=dtype, prefix="model.language_model.", visual=True)
    inside = convert(src, src, Options())
    alone = convert(src, tmp_path / "out", Options())
    assert inside.errors == alone.errors
    ours, theirs = reading.bytes_of(src / "experts-int4g64"), reading.bytes_of(tmp_path / "out" / "experts-int4g64")
    del ours["convert.json"]
    assert ours == theirs
    source = {name.replace("model.language_model.", "model."): tensor
              for name, tensor in reading.read_folder(src).items()}  # fmt: skip
    made = reading.read_folder(tmp_path / "out")
    wanted = {name for name in source if ".mlp.experts." not in name and ".visual." not in name}
    assert set(made) == wanted
    for name in wanted:
        assert made[name][0] == source[name][0] and made[name][1].tobytes() == source[name][1].tobytes(), name
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()


def test_groups_of_64_are_needed_not_rows(tmp_path: Path) -> None:
    src = write_tiny(tmp_path / "m", dtype="BF16")
    with pytest.raises(UsageError, match="never for a row"):
        convert(src, src, Options(4, 0))
    assert list(src.glob("experts*")) == []


def test_our_reader_takes_it(tmp_path: Path) -> None:
    from coli.formats.checkpoint import Checkpoint
    from coli.formats.sidecar import folders, is_complete, open_sidecar
    from coli.models.qwen38_layout import geometry

    src = write_tiny(tmp_path / "m", dtype="BF16")
    convert(src, src, Options())
    with Checkpoint.open(src) as checkpoint:
        [folder] = folders(src)
        assert is_complete(folder)
        made = open_sidecar(checkpoint, folder, geometry(checkpoint.config))
        assert all(made.holds(prefix) for prefix in ("layers.0.", "layers.7.", "mtp.layers.0."))
