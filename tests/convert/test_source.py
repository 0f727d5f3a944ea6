"""What cannot be converted is refused by name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.errors import ModelError, ReadError, UsageError
from tests.convert import reading
from tests.tiny import store, tiny_config, write_safetensors, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

MOE = "qwen3_5_moe_text"


def _refused(source: Path, out: Path, words: str) -> ModelError:
    with pytest.raises(ModelError, match=words) as caught:
        convert(source, out, Options())
    assert not out.exists()
    return caught.value


def test_a_dense_model(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "src", tiny36_config("qwen3_5_text"), dtype="BF16")
    error = _refused(tmp_path / "src", tmp_path / "out", "dense model")
    assert "--trunk int8" in error.hint


def test_another_family(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="BF16", prefix="model.")
    config = (tmp_path / "src" / "config.json").read_text()
    (tmp_path / "src" / "config.json").write_text(config.replace(MOE, "llama"))
    _refused(tmp_path / "src", tmp_path / "out", "model_type llama cannot be converted")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.bias", "mtp.layers.0.mlp.bias"])
def test_an_unknown_tensor(tmp_path: Path, name: str) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="BF16")
    write_safetensors(tmp_path / "src" / "extra.safetensors", {name: store(np.ones(4, np.float32), "BF16")})
    _refused(tmp_path / "src", tmp_path / "out", f"unknown tensor.*{name.removeprefix('model.')}")


def test_a_missing_tensor(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="BF16", change=lambda w: w.pop("norm.weight"))
    _refused(tmp_path / "src", tmp_path / "out", "missing tensor.*norm.weight")


def test_a_container_and_a_sidecar_folder(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "moe", tiny36_config(MOE), dtype="BF16")
    convert(tmp_path / "moe", tmp_path / "moe4", Options())
    _refused(tmp_path / "moe4", tmp_path / "out", "converted container already")
    write_tiny(tmp_path / "q38", dtype="BF16")
    convert(tmp_path / "q38", tmp_path / "q38-4", Options())
    _refused(tmp_path / "q38-4", tmp_path / "out", "in a sidecar")


@pytest.mark.parametrize(
    ("name", "dtype", "per_expert"),
    [
        ("layers.1.mlp.experts.gate_up_proj", "BF16", False), ("layers.1.mlp.experts.down_proj", "F32", False),
        ("layers.1.mlp.experts.down_proj", "BF16", True), ("mtp.layers.0.mlp.experts.gate_up_proj", "F16", True),
        ("layers.1.self_attn.q_norm.weight", "F32", False),
    ],
)  # fmt: skip
def test_not_a_number(tmp_path: Path, name: str, dtype: str, per_expert: bool) -> None:
    """Experts cannot be quantised then; a dense tensor is kept as it is, for the engine to judge."""
    attention = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    write_tiny36(tmp_path / "src", tiny36_config(MOE, **attention), dtype=dtype, per_expert=per_expert, poison=name)
    if "experts" not in name:
        convert(tmp_path / "src", tmp_path / "out", Options())
        dtype, values = reading.read_folder(tmp_path / "out")[f"model.{name}"]
        assert np.isinf(values[0])
        return
    with pytest.raises(ModelError, match="has NaN or infinity"):
        convert(tmp_path / "src", tmp_path / "out", Options())
    assert not (tmp_path / "out" / "config.json").exists()


def test_gate_and_up_in_one_scale_block(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="FP8", per_expert=False, block=(128, 128))
    _refused(tmp_path / "src", tmp_path / "out", "gate and up share a scale")


@pytest.mark.parametrize(("make", "flag"), [(lambda: Options(5, 64), "--ebits"), (lambda: Options(4, 48), "--group")])
def test_options(make: Callable, flag: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.where.startswith(flag)


def test_memory_stays_below_a_layer(tmp_path: Path) -> None:
    """A 64 MB layer is never in memory as a whole: the peak of what NumPy and Python allocate is measured."""
    import tracemalloc

    sizes = dict(hidden_size=512, moe_intermediate_size=128, num_experts=160, num_hidden_layers=1,
                 layer_types=["linear_attention"], ple_layer_ids=[])  # fmt: skip
    source = write_tiny(tmp_path / "src", tiny_config(**sizes), dtype="BF16", mtp=False)
    layer = 3 * 512 * 128 * 160 * 2
    convert(source, source, Options(8, 64), threads=1)  # imports and tables
    tracemalloc.start()
    try:
        convert(source, source, Options(4, 64), threads=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < layer / 5, f"{peak} of {layer} bytes"


def test_text_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny36(tmp_path / "src", tiny36_config(MOE), dtype="BF16")
    read = Path.read_bytes

    def fails(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(ReadError, match="tokenizer.json"):
        convert(tmp_path / "src", tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
