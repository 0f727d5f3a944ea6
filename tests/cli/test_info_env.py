"""`coli info` and `coli env`: complete, machine readable, and strict."""

from __future__ import annotations

import json
from pathlib import Path

from coli.models.find import NANO
from coli.settings import VARIABLES
from tests.conftest import Coli
from tests.gguf_files import write_gguf
from tests.tiny36 import block36_config, tiny36_weights


def test_env_lists_every_variable_with_its_origin(coli: Coli) -> None:
    done = coli("env", "--json", "--ctx", "512", env={"COLI_THREADS": "2", "COLI_CTX": "9"})
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [row.name for row in VARIABLES]
    keys = {"name", "value", "origin", "default", "unset", "range", "engines", "flag", "meaning"}
    assert all(set(row) == keys for row in rows.values())
    assert (rows["COLI_CTX"]["value"], rows["COLI_CTX"]["origin"]) == ("512", "flag")
    assert (rows["COLI_THREADS"]["value"], rows["COLI_THREADS"]["origin"]) == ("2", "variable")
    assert (rows["COLI_CAP"]["value"], rows["COLI_CAP"]["origin"]) == (None, "default")
    assert rows["Q38_TRUNK_CPU_INT8"]["engines"] == ["qwen38"]


def test_env_shows_both_engines_names_with_their_own_ranges_and_values(coli: Coli) -> None:
    done = coli("env", "--json", env={"Q36_MTP_DRAFTS": "7", "Q38_TRUNK_CPU_INT8": "1"})
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    said = {name: [rows[name][key] for key in ("value", "origin", "default", "range", "engines", "flag")]
            for name in ("Q38_MTP_DRAFTS", "Q36_MTP_DRAFTS", "COLI_TRUNK", "Q38_TRUNK_CPU_INT8")}  # fmt: skip
    assert said == {
        "Q38_MTP_DRAFTS": ["2", "default", "2", "0..3 or auto", ["qwen38"], "--drafts"],
        "Q36_MTP_DRAFTS": ["7", "variable", "1", "0..7 or auto", ["qwen36"], "--drafts"],
        "COLI_TRUNK": ["stored", "default", "stored", "stored or int8", ["all"], "--trunk"],
        "Q38_TRUNK_CPU_INT8": ["1", "variable", "0", "0 or 1", ["qwen38"], None],
    }
    assert done.stderr == ""


def test_env_as_text(coli: Coli) -> None:
    done = coli("env", env={"COLI_SIMD": "0", "COLI_OLD": "1"})
    assert "COLI_SIMD = 0  (variable)" in done.stdout and "COLI_THREADS = physical cores  (default)" in done.stdout
    assert all(row.name in done.stdout and row.help in done.stdout for row in VARIABLES)
    assert done.stderr.count("\n") == 1 and "COLI_OLD" in done.stderr


def test_a_bad_variable_and_strictness_are_2(coli: Coli) -> None:
    assert coli("env", env={"COLI_SIMD": "yes"}).returncode == 2
    assert coli("env", env={"COLI_OLD": "1", "COLI_ENV_STRICT": "1"}).returncode == 2


def test_info_describes_the_shipped_model(coli: Coli) -> None:
    facts = json.loads(coli("info", "--json").stdout)
    assert facts["path"] == str(NANO) and facts["engine"] == "qwen38" and facts["mtp_head"] is True
    assert facts["geometry"]["layers"] == 12 and facts["geometry"]["experts"] == 16
    parts = facts["sizes"]
    assert sum(parts[use] for use in ("dense", "experts", "table", "mtp")) == facts["total_bytes"]
    assert sum(kind["bytes"] for kind in facts["formats"].values()) == facts["total_bytes"]
    text = coli("info").stdout
    assert "12: 9 DeltaNet, 3 attention" in text and "BF16 44.9 MB in 344 tensors" in text
    assert "draft head  yes: 1 layer, experts fused, BF16" in text and "quantised   none (BF16)" in text
    assert facts["format"] == "safetensors, 1 file" and "format      safetensors, 1 file" in text


def test_info_of_a_tiny_checkpoint_by_folder_and_variable(coli: Coli, tiny: Path) -> None:
    by_folder = coli("info", str(tiny))
    assert by_folder.returncode == 0 and str(tiny) in by_folder.stdout
    assert coli("info", env={"COLI_MODEL": str(tiny)}).stdout == by_folder.stdout


def test_info_of_a_quantised_gguf_of_the_other_engine(coli: Coli, tmp_path: Path) -> None:
    config = block36_config("qwen3_5_moe_text")
    path = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config), types="Q4_K")
    facts = json.loads(coli("info", str(path), "--json").stdout)
    assert (facts["engine"], facts["architecture"], facts["format"]) == ("qwen36", "qwen35moe", "GGUF, 1 file")
    assert facts["quantisation"] == "dense Q4_K, F32; experts Q4_K" and facts["mtp_head"] is True
    assert facts["head"] == "1 layer, experts stacked, Q4_K, F32" and set(facts["formats"]) == {"Q4_K", "F32"}
    sizes = facts["sizes"]
    assert sizes["table"] == 0 and sum(sizes[use] for use in ("dense", "experts", "mtp")) == facts["total_bytes"]
    text = coli("info", str(path)).stdout
    assert "engine      qwen36 (qwen3_5_moe_text), qwen35moe" in text and "n-grams" not in text
    assert "residual streams" not in text and "draft head  yes: 1 layer, experts stacked, Q4_K, F32" in text


def test_info_refuses_what_would_not_load(coli: Coli, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for model in ("nowhere", "broken", "org/name", "x.gguf"):
        done = coli("info", model)
        assert done.returncode == 3 and done.stdout == "" and done.stderr.count("\n") == 1
