"""Converted models run: the engine reads what was written as what it would have made itself, and nano stays nano."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.engine import Engine
from coli.settings import load
from tests.convert import loss
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

IDS = [int(i) for i in np.random.default_rng(5).integers(0, 250, 24)]


def _logits(model: Path, **flags: Any) -> np.ndarray:
    settings = load({"model": str(model), "threads": 2, "ctx": 64, **flags}, {"COLI_ACT": "f32"})[0]
    with Engine.open(settings) as engine:
        return engine.model.forward(IDS, engine.model.new_state(), want="all").logits.copy()


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 0)])
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_a_container_is_what_the_engine_quantises_at_load(tmp_path: Path, family: str, bits: int, group: int) -> None:
    source = write_tiny36(tmp_path / "src", tiny36_config(family), dtype="BF16", mtp=family != "qwen3_moe")
    convert(source, tmp_path / "out", Options(bits, group))
    ours = _logits(tmp_path / "out")
    assert np.allclose(ours, _logits(source, experts=f"int{bits}"), rtol=0, atol=2e-4)
    assert np.abs(ours - _logits(source)).max() > 1e-3, "quantised experts are other numbers"


@pytest.mark.parametrize("dtype", ["BF16", "FP8"])
def test_a_sidecar_inside_and_alone(tmp_path: Path, dtype: str) -> None:
    source = write_tiny(tmp_path / "src", tiny_config(), dtype=dtype)
    at_load = _logits(source, experts="int4")
    convert(source, tmp_path / "out", Options())
    convert(source, source, Options())
    assert np.allclose(_logits(tmp_path / "out"), at_load, rtol=0, atol=2e-4)
    assert np.allclose(_logits(source, experts="int4"), at_load, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_nano_at_int8_loses_less_than_a_hundredth(tmp_path: Path) -> None:
    found: Any = loss.measure(2, loss.texts()[::6], tmp_path)
    assert found["tokens"] > 1500 and 0.1 < found["original"] < 1
    assert abs(found["int8"]["relative"]) < loss.BAR
    assert found["int4"]["relative"] < 5 * loss.BAR
