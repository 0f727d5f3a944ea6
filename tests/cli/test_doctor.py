"""`coli doctor`: every kind of broken model is named with what to do, no check breaks another, nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli.doctor.examine import CHECKS
from coli.doctor.finding import ERROR, OK, WARN, Check, Finding, Patient, ok
from coli.errors import ColiError, ModelError, UsageError
from coli.formats.checkpoint import INDEX, Checkpoint
from coli.settings import load_sound
from tests.conftest import Coli, clean_env
from tests.containers import write_container
from tests.doctoring import SHARDS, bad, contents, of, only
from tests.gguf_files import write_gguf
from tests.tiny import store, tiny_config, tiny_weights, write_safetensors
from tests.tiny36 import tiny36_config, tiny36_weights

NAME = "model.embed_tokens.weight"


# ---- a model that is well --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_a_sound_folder(whole: Path, deep: bool) -> None:
    before = contents(whole)
    report = of(whole, deep=deep)
    assert bad(report) == [] and report.skipped == () and report.exit_code == 0 and report.path == whole
    facts = only(report, "files").facts
    assert facts["files"] == 4 and facts["bytes"] == sum((whole / name).stat().st_size for name in SHARDS)
    assert facts["tensors"] == len(tiny_weights(tiny_config())) + 2 * 3  # two tables of four parts
    assert only(report, "config").facts["engine"] == "qwen38" and only(report, "tokenizer").facts["tokens"] == 261
    assert only(report, "stop tokens").facts["ids"] == [256, 258]
    assert contents(whole) == before


@pytest.mark.parametrize("splits", [1, 3])
def test_a_sound_gguf(tmp_path: Path, splits: int) -> None:
    config = tiny36_config("qwen3_5_moe_text")
    path = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config), splits=splits)
    report = of(path, deep=True)
    assert bad(report) == [] and report.skipped == ()
    assert only(report, "files").facts["files"] == splits and report.exit_code == 0


def test_a_sound_container(tmp_path: Path) -> None:
    write_container(tmp_path / "c", tiny36_config("qwen3_5_moe_text"), bits=4, group=32)
    report = of(tmp_path / "c", deep=True)
    assert bad(report) == [] and "container" in only(report, "sidecars").what


def test_the_command_on_the_shipped_model(coli: Coli, nano: Path, tmp_path: Path) -> None:
    before = contents(nano)
    done = coli("doctor", "--json", env={"XDG_STATE_HOME": str(tmp_path / "state")})
    report = json.loads(done.stdout)
    assert done.returncode == 0 == report["exit"] and report["model"] == str(nano) and report["errors"] == 0
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert list(by_check) == [check.name for check in CHECKS] and report["skipped"] == []
    assert set(by_check["plan"]) == {"check", "status", "what", "hint", "facts"}
    assert by_check["plan"]["facts"]["cap"] == 16
    assert by_check["versions"]["facts"]["packages"]["numpy"] == np.__version__
    assert by_check["disk speed"]["facts"]["bytes_per_s"] > 0
    assert by_check["cpu"]["facts"]["usable"] >= 1 and by_check["memory"]["facts"]["available"] > 0
    assert "Numba" in by_check["numba"]["what"] and by_check["simd"]["facts"]["features"]
    assert contents(nano) == before and not (tmp_path / "state").exists()


def test_the_command_imports_no_numba() -> None:

    code = ("import sys; from coli.commands.app import main; code = main(['doctor']); "
            "sys.exit(3 if 'numba' in sys.modules or 'rich' in sys.modules else code)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_env())
    assert done.returncode == 0, done.stderr


def test_the_command_as_text(coli: Coli, model: Path) -> None:
    (model / SHARDS[1]).unlink()
    done = coli("doctor", str(model))
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[-1].startswith("1 error, ")
    assert all(line.split()[0] in (OK, WARN, ERROR) for line in lines[:-1])
    (line,) = [line for line in lines if line.startswith("error")]
    assert line.startswith("error files ") and SHARDS[1] in line
    assert line.endswith("(download the missing files into this folder)")
    assert any(line.startswith("ok    tokenizer") for line in lines), "what does not need the weights is looked at"
    assert "tensors" in lines[-1] and "plan" in lines[-1], "what does is named"


@pytest.mark.parametrize("reference", ["nowhere", "org/name", "x.gguf"])
def test_no_model_is_2(coli: Coli, reference: str) -> None:
    done = coli("doctor", reference, "--json", env={"HF_HOME": "/nonexistent"})
    report = json.loads(done.stdout)
    assert done.returncode == 2 == report["exit"] and report["model"] is None
    (finding,) = [finding for finding in report["findings"] if finding["status"] == ERROR]
    assert finding["check"] == "path" and reference in finding["what"] and finding["hint"]
    assert {"cpu", "cache", "versions", "vulkan"} <= {finding["check"] for finding in report["findings"]}
    assert {"files", "tokenizer", "plan"} <= set(report["skipped"])


# ---- broken files ----------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tensors of a file, name -> (dtype, array)."""
    with Checkpoint.open(path.parent) as checkpoint:
        mine = {t.name: (t.dtype, checkpoint.load(t)) for t in checkpoint.tensors.values() if t.path == path}
    change(mine)
    write_safetensors(path, mine)


def home(model: Path) -> str:
    return json.loads((model / INDEX).read_text())["weight_map"][NAME]


def reindex(model: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((model / INDEX).read_text())
    change(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


def _missing(model: Path) -> None:
    (model / SHARDS[2]).unlink()


def _truncated(model: Path) -> None:
    os.truncate(model / SHARDS[0], (model / SHARDS[0]).stat().st_size - 7)


def _header_cut(model: Path) -> None:
    os.truncate(model / SHARDS[3], 100)


def _pointer(model: Path) -> None:
    (model / SHARDS[3]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def _duplicate(model: Path) -> None:
    other = next(name for name in SHARDS if name != home(model))
    rewrite(model / other, lambda tensors: tensors.update({NAME: store(np.ones((4, 4)), "BF16")}))


def _misplaced(model: Path) -> None:
    other = next(name for name in reversed(SHARDS) if name != home(model))
    reindex(model, lambda placed: placed.update({NAME: other}))


def _left_out(model: Path) -> None:
    reindex(model, lambda placed: placed.__delitem__(NAME))


def _invented(model: Path) -> None:
    reindex(model, lambda placed: placed.update({"model.more.weight": SHARDS[0]}))


def _spelt_twice(model: Path) -> None:
    name = NAME.replace("model.", "model.language_model.")
    rewrite(model / SHARDS[1], lambda tensors: tensors.update({name: store(np.ones((4, 4)), "BF16")}))
    reindex(model, lambda placed: placed.update({name: SHARDS[1]}))


def _gap(model: Path) -> None:
    (model / INDEX).unlink()
    (model / SHARDS[2]).unlink()


def _no_json(model: Path) -> None:
    (model / INDEX).write_text("{")


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing": (_missing, (SHARDS[2], "of 4 files 1 missing")),
    "truncated": (_truncated, (SHARDS[0], "truncated")),
    "header cut": (_header_cut, (SHARDS[3], "truncated inside the header")),
    "a pointer": (_pointer, (SHARDS[3], "Git LFS pointer")),
    "duplicate": (_duplicate, ("1 tensor both in", NAME)),
    "misplaced": (_misplaced, ("the index misplaces 1 tensor", NAME)),
    "left out": (_left_out, ("the index leaves out 1 tensor", NAME)),
    "invented": (_invented, ("the index misplaces 1 tensor", "model.more.weight")),
    "spelt twice": (_spelt_twice, (NAME, "model.language_model.embed_tokens.weight", "twice")),
    "gap": (_gap, ("gap", SHARDS[2], "of 4 split files 1 missing")),
    "no JSON": (_no_json, (INDEX, "not valid JSON")),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("deep", [False, True])
def test_broken_files_are_named(model: Path, fault: str, deep: bool) -> None:
    breaks, words = BROKEN[fault]
    breaks(model)
    before = contents(model)
    report = of(model, deep=deep)
    errors = [finding for finding in report.findings if finding.status == ERROR]
    assert report.exit_code == 1 and {finding.check for finding in errors} == {"files"}
    assert any(all(word in finding.what for word in words) for finding in errors), errors
    with pytest.raises(ModelError):
        Checkpoint.open(model)
    assert {"config", "tokenizer", "template"} <= {finding.check for finding in report.findings}
    assert contents(model) == before


def test_all_faults_at_once_are_all_named(model: Path) -> None:
    _duplicate(model)
    _truncated(model)
    _misplaced(model)
    _missing(model)
    _header_cut(model)
    text = "\n".join(finding.what for finding in of(model).findings if finding.status == ERROR)
    for word in (SHARDS[0], SHARDS[2], SHARDS[3], "missing", "truncated:", "truncated inside"):
        assert word in text
    assert "misplaces" not in text, "nobody knows where the tensors of files that cannot be read are"


def test_a_gap_that_the_index_knows_is_a_warning(model: Path) -> None:
    """All tensors in the other three files: nothing is missing but a number."""
    moved: dict[str, Any] = {}
    with Checkpoint.open(model) as checkpoint:
        moved = {t.name: (t.dtype, checkpoint.load(t)) for t in checkpoint.tensors.values()
                 if t.path.name in (SHARDS[2], SHARDS[3])}  # fmt: skip
    (model / SHARDS[2]).unlink()
    write_safetensors(model / SHARDS[3], moved)
    reindex(model, lambda placed: placed.update(dict.fromkeys(moved, SHARDS[3])))
    report = of(model, deep=True)
    assert [(check, SHARDS[2] in what) for check, what in bad(report)] == [("files", True)] and report.exit_code == 0


def test_unlisted_and_unfinished_files_are_warnings(model: Path) -> None:
    shutil.copy(model / SHARDS[0], model / "consolidated.safetensors")
    download = model / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    (download / "abc.incomplete").write_bytes(bytes(1000))
    report = of(model, deep=True)
    assert report.exit_code == 0
    assert [check for check, _ in bad(report)] == ["files", "leftovers"]
    assert "consolidated.safetensors" in bad(report)[0][1] and "abc.incomplete (1.00 kB)" in bad(report)[1][1]


def test_a_folder_of_nothing_and_one_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = bad(of(tmp_path / "empty"))
    assert [check for check, _ in found] == ["files", "config", "tokenizer"]
    assert "no .safetensors file" in found[0][1] and "config.json is missing" in found[1][1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"x")
    assert "only *.bin" in bad(of(tmp_path / "other"))[0][1]
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").write_bytes(b"x")
    report = of(tmp_path / "gguf")
    assert "give the file itself: m.gguf" in only(report, "files").hint and report.exit_code == 1


@pytest.mark.parametrize("text, words", [("{", "not valid JSON"), ('{"model_type": "llama"}', "llama"),
                                         (None, "config.json is missing")])  # fmt: skip
def test_a_config_that_is_none(model: Path, text: str | None, words: str) -> None:
    (model / "config.json").unlink()
    if text is not None:
        (model / "config.json").write_text(text)
    report = of(model)
    ((check, what),) = bad(report)
    assert check == "config" and words in what and only(report, "files").status == OK and report.exit_code == 1


def test_a_config_of_another_size_is_found_by_the_tensors(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 16}))
    report = of(model)
    ((check, what),) = bad(report)
    assert check == "tensors" and "experts" in what and "experts" in report.skipped


def test_a_broken_gguf(tmp_path: Path) -> None:
    config = tiny36_config("qwen3_5_moe_text")
    first = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config), splits=3)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    parts[1].unlink()
    os.truncate(parts[2], parts[2].stat().st_size - 100)
    report = of(first)
    assert [(check, part.name in what) for (check, what), part in zip(bad(report), parts[1:], strict=True)] == [
        ("files", True), ("files", True)]  # fmt: skip
    assert report.exit_code == 1 and {"config", "tokenizer", "tensors"} <= set(report.skipped)
    shutil.copy(parts[0], parts[1])
    os.truncate(parts[2], 10)
    text = " | ".join(what for _, what in bad(of(first)))
    assert "both in" in text and "too short" in text
    report = of(parts[2])
    assert report.exit_code == 1, "a part that is not the first"


def test_a_pipe_where_a_gguf_file_should_be_is_not_called_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    ((check, what),) = bad(of(tmp_path / "m.gguf"))
    assert check == "files" and "not a regular file" in what and "missing" not in what


def test_a_folder_that_this_user_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    assert "may not read the folder" in only(of(tmp_path / "closed"), "path").what


# ---- settings, and checks that fail ----------------------------------------------------------------------------------


def test_settings_that_are_wrong_are_findings(model: Path) -> None:
    report = of(model, COLI_SIMD="yes", COLI_TREADS="4", COLI_CAP="3", Q36_MTP="1")
    texts = [what for check, what in bad(report) if check == "settings"]
    assert len(texts) == 2 and texts[0].startswith("COLI_SIMD: 'yes' is out of range") and "COLI_THREADS" in texts[1]
    assert report.exit_code == 1 and ("config", "Q36_MTP has no effect on the engine qwen38: it belongs to qwen36"
                                      ) in bad(report)  # fmt: skip
    assert next(f for f in report.findings if f.check == "settings" and f.status == OK).facts["given"] == {
        "COLI_CAP": "3", "Q36_MTP": "1"}  # fmt: skip
    with pytest.raises(UsageError):
        load_sound({"ctx": 0}, {})
    strict = of(model, COLI_ENV_STRICT="1", COLI_TREADS="4")
    assert [check for check, _ in bad(strict)] == ["settings", "settings"] and strict.exit_code == 1


def test_a_check_that_fails_breaks_no_other(model: Path) -> None:
    def breaks(patient: Patient) -> Iterator[Finding]:
        yield ok("so far")
        raise ZeroDivisionError("by accident")

    def refuses(patient: Patient) -> Iterator[Finding]:
        raise ColiError("went wrong", "somewhere", "do this")
        yield ok("never")

    def denied(patient: Patient) -> Iterator[Finding]:
        raise PermissionError(13, "Permission denied", "/secret")
        yield ok("never")

    checks = (Check("one", breaks), Check("two", refuses), Check("three", denied),
              Check("four", lambda patient: iter([ok("x")])), Check("five", breaks, ("plan",)))  # fmt: skip
    report = of(model, checks=checks)
    assert [(f.check, f.status) for f in report.findings] == [("one", OK), ("one", ERROR), ("two", ERROR),
                                                              ("three", ERROR), ("four", OK)]  # fmt: skip
    texts = [finding.what for finding in report.findings]
    assert "ZeroDivisionError: by accident" in texts[1] and "breaks" in report.findings[1].facts["traceback"]
    assert texts[2] == "somewhere: went wrong" and texts[3] == "/secret: Permission denied"
    assert report.skipped == ("five",)
