"""`coli info` and `coli env`: complete, machine readable, and strict."""

from __future__ import annotations

import json
from pathlib import Path

from coli.models.find import NANO
from coli.settings import TABLE
from tests.conftest import Coli


def test_env_lists_every_variable_with_its_origin(coli: Coli) -> None:
    done = coli("env", "--json", "--ctx", "512", env={"COLI_THREADS": "2", "COLI_CTX": "9"})
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [row.name for row in TABLE.values()]
    keys = {"name", "value", "origin", "default", "unset", "range", "engines", "flag", "meaning"}
    assert all(set(row) == keys for row in rows.values())
    assert (rows["COLI_CTX"]["value"], rows["COLI_CTX"]["origin"]) == ("512", "flag")
    assert (rows["COLI_THREADS"]["value"], rows["COLI_THREADS"]["origin"]) == ("2", "variable")
    assert (rows["COLI_CAP"]["value"], rows["COLI_CAP"]["origin"]) == (None, "default")
    assert rows["Q38_TRUNK_CPU_INT8"]["engines"] == ["qwen38"]


def test_env_as_text(coli: Coli) -> None:
    done = coli("env", env={"COLI_SIMD": "0", "COLI_OLD": "1"})
    assert "COLI_SIMD = 0  (variable)" in done.stdout and "COLI_THREADS = physical cores  (default)" in done.stdout
    assert all(row.name in done.stdout and row.help in done.stdout for row in TABLE.values())
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
    assert "12: 9 DeltaNet, 3 attention" in text and "BF16" in text and "draft head" in text


def test_info_of_a_tiny_checkpoint_by_folder_and_variable(coli: Coli, tiny: Path) -> None:
    by_folder = coli("info", str(tiny))
    assert by_folder.returncode == 0 and str(tiny) in by_folder.stdout
    assert coli("info", env={"COLI_MODEL": str(tiny)}).stdout == by_folder.stdout


def test_info_refuses_what_would_not_load(coli: Coli, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for model in ("nowhere", "broken", "org/name", "x.gguf"):
        done = coli("info", model)
        assert done.returncode == 3 and done.stdout == "" and done.stderr.count("\n") == 1
