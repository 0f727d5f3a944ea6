"""The header cache: the same survey without opening a shard, another one as soon as anything it depends on differs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from coli.errors import ModelError, UsageError
from coli.formats.checkpoint import Checkpoint
from coli.planning import header_cache
from coli.planning.header_cache import surveyed
from coli.planning.plan import make_plan
from coli.settings import Settings, load
from tests.containers import write_sidecar
from tests.gguf_files import write_gguf
from tests.tiny import tiny_config, tiny_weights, write_tiny
from tests.tiny36 import FAMILIES, block36_config, tiny36_config, tiny36_weights, write_tiny36


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The paths of all checkpoints opened so far."""
    seen: list[Path] = []
    real = Checkpoint.open.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Checkpoint, "open", classmethod(lambda cls, path: seen.append(path) or real(cls, path)))
    return seen


def settings_of(tmp_path: Path, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    return load(flags, {"COLI_CACHE": str(tmp_path / "cache"), **(environ or {})})[0]


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "headers").iterdir())


def twice(path: Path, settings: Settings, opened: list[Path]) -> None:
    """The second survey equals the first and makes equal plans, and nothing was opened for it."""
    opened.clear()
    first = surveyed(path, settings)
    assert opened == [path] and (first.experts is not None)
    second = surveyed(path, settings)
    assert opened == [path] and second == first and second.experts is None
    assert (second.head is None) == (first.head is None) and second.slot == first.slot
    resolved = settings.resolve(first.engine)
    plans = [make_plan(found, resolved, 1 << 40) for found in (first, second)]
    assert asdict(plans[0].terms) == asdict(plans[1].terms) and plans[0].total == plans[1].total


# ---- the same survey -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen4_exp", *FAMILIES])
@pytest.mark.parametrize("dtype", ["BF16", "FP8"])
def test_a_folder(tmp_path, opened, family, dtype):
    if family == "qwen4_exp":
        path = write_tiny(tmp_path / "m", dtype=dtype, shards=3)
    else:
        path = write_tiny36(tmp_path / "m", tiny36_config(family), dtype=dtype, shards=3)
    twice(path, settings_of(tmp_path), opened)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_5_moe_text"])
def test_a_gguf_file(tmp_path, opened, family, splits):
    config = tiny_config() if family == "qwen4_exp" else block36_config(family)
    weights = tiny_weights(config) if family == "qwen4_exp" else tiny36_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, weights, types="Q8_0", splits=splits)
    twice(path, settings_of(tmp_path), opened)
    (tmp_path / "other.gguf").write_bytes(b"no part of it")
    surveyed(path, settings_of(tmp_path))
    assert opened == [path]
    last = sorted(tmp_path.glob("m*.gguf"))[-1]
    os.utime(last, ns=(1, 1))
    surveyed(path, settings_of(tmp_path))
    assert opened == [path, path]


def test_a_head_that_cannot_run_is_still_said_to_be_wrong(tmp_path, opened):
    def spoil(weights: dict[str, Any]) -> None:
        del weights["mtp.norm.weight"]

    path = write_tiny36(tmp_path / "m", tiny36_config("qwen3_5_moe_text"), dtype="BF16", change=spoil)
    twice(path, settings_of(tmp_path), opened)
    found = surveyed(path, settings_of(tmp_path))
    assert found.head is None and found.has_head and "mtp.norm.weight" in found.no_head[0]
    with pytest.raises(ModelError, match="mtp.norm.weight"):
        make_plan(found, settings_of(tmp_path, mtp=True).resolve("qwen36"), 1 << 40)


# ---- another survey --------------------------------------------------------------------------------------------------


def _append(path: Path) -> None:
    with open(path, "ab") as handle:
        handle.write(b" ")


def _touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def _replace(path: Path) -> None:
    """Another inode, the same bytes, size and time."""
    found = path.stat()
    shutil.copy(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("change", [_touch, _replace, _append])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors",
                                  "experts-int4g64/index.json", "experts-int4g64/layer-000.safetensors"])  # fmt: skip
def test_any_file_that_changes(tmp_path, opened, name, change):
    path = write_tiny(tmp_path / "m", dtype="BF16", shards=3)
    write_sidecar(path, tiny_weights(tiny_config()))
    settings = settings_of(tmp_path, experts="int4")
    surveyed(path, settings)
    change(path / name)
    if change is _append and name.endswith("safetensors"):
        with pytest.raises(ModelError, match="follow the last tensor"):
            surveyed(path, settings)
        return
    opened.clear()
    surveyed(path, settings)
    surveyed(path, settings)
    assert opened == [path] and len(entries(tmp_path)) == 1, "computed once more, in the place of the old one"


def test_files_that_come_and_go(tmp_path, opened):
    path = write_tiny(tmp_path / "m", dtype="BF16")
    settings = settings_of(tmp_path, experts="int4")
    assert "from bf16" in surveyed(path, settings).format
    write_sidecar(path, tiny_weights(tiny_config()))
    assert "sidecar" in surveyed(path, settings).format
    shutil.rmtree(path / "experts-int4g64")
    assert "from bf16" in surveyed(path, settings).format and len(opened) == 3
    (path / "notes.txt").write_text("no part of it")
    surveyed(path, settings)
    assert len(opened) == 3


def test_the_same_bytes_at_another_time_of_a_config(tmp_path, opened):
    """A config of the same size and times is another config."""
    path = write_tiny(tmp_path / "m", tiny_config(max_position_embeddings=512))
    stamp = header_cache._stamp(path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"max_position_embeddings": 512', '"max_position_embeddings": 256'))
    assert header_cache._stamp(path) != stamp


@pytest.mark.parametrize(
    ("environ", "flags"),
    [({}, {"trunk": "int8"}), ({}, {"experts": "int4"}), ({"COLI_ACT": "f32"}, {}), ({"Q38_TRUNK_CPU_INT8": "1"}, {})],
)
def test_settings_that_a_survey_depends_on(tmp_path, opened, environ, flags):
    path = write_tiny(tmp_path / "m", dtype="BF16")
    plain = surveyed(path, settings_of(tmp_path))
    other = surveyed(path, settings_of(tmp_path, environ, **flags))
    assert len(opened) == 2 and len(entries(tmp_path)) == 2
    assert other != plain or "COLI_ACT" in environ, "bf16 experts are read as they are beside any activations"
    assert surveyed(path, settings_of(tmp_path, environ, **flags)) == other and len(opened) == 2


def test_settings_that_no_survey_depends_on(tmp_path, opened):
    path = write_tiny(tmp_path / "m", dtype="BF16")
    surveyed(path, settings_of(tmp_path))
    for flags in ({"ctx": 64}, {"ram": 3.0}, {"mtp": False}, {"drafts": 7}, {"undo": "slots"}):
        if flags == {"drafts": 7}:  # out of this engine's range, which is known once it is open
            with pytest.raises(UsageError):
                settings_of(tmp_path, **flags).resolve("qwen38")
        surveyed(path, settings_of(tmp_path, **flags))
    assert len(opened) == 1


def test_another_version_of_coli(tmp_path, opened, monkeypatch):
    path = write_tiny(tmp_path / "m")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "survey.py").write_text("a = 1\n")
    monkeypatch.setattr(header_cache, "_SOURCES", (sources,))
    surveyed(path, settings_of(tmp_path))
    surveyed(path, settings_of(tmp_path))
    assert len(opened) == 1
    (sources / "survey.py").write_text("a = 2\n")
    surveyed(path, settings_of(tmp_path))
    assert len(opened) == 2
    monkeypatch.setattr(header_cache, "_SOURCES", (tmp_path / "cache",))  # no sources to be seen: no cache
    for _ in range(2):
        surveyed(path, settings_of(tmp_path))
    assert len(opened) == 4


def test_the_sources_are_those_that_make_a_survey():
    names = {name for folder in header_cache._SOURCES for name in os.listdir(folder)}
    assert {"survey.py", "records.py", "checkpoint.py", "layout.py", "packing.py"} <= names


def test_a_model_at_another_path(tmp_path, opened):
    path = write_tiny(tmp_path / "m")
    surveyed(path, settings_of(tmp_path))
    path.rename(tmp_path / "moved")
    assert surveyed(tmp_path / "moved", settings_of(tmp_path)).path == tmp_path / "moved"
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert surveyed(tmp_path / "link", settings_of(tmp_path)).path == tmp_path / "link" and len(opened) == 2


def test_what_changes_while_it_is_read_is_not_kept(tmp_path, opened, monkeypatch):
    path = write_tiny(tmp_path / "m")
    real = header_cache.survey

    def slow(*args: Any) -> Any:
        _touch(path / "model.safetensors")
        return real(*args)

    monkeypatch.setattr(header_cache, "survey", slow)
    surveyed(path, settings_of(tmp_path))
    assert not (tmp_path / "cache" / "headers").exists()


def test_errors_are_not_kept(tmp_path, opened):
    path = write_tiny(tmp_path / "m")
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[:-1])
    for _ in range(2):
        with pytest.raises(ModelError, match="truncated"):
            surveyed(path, settings_of(tmp_path))
    (path / "model.safetensors").write_bytes(whole)
    twice(path, settings_of(tmp_path), opened)


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_torn_file(tmp_path, opened, cut):
    path, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)
    found = surveyed(path, settings)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:cut])
    assert surveyed(path, settings) == found and len(opened) == 2
    assert json.loads(entry.read_bytes()) == json.loads(whole)


def test_any_changed_byte(tmp_path, opened):
    """A digit of a size, a letter of a key, a bracket: never an error, never another survey."""
    path, settings = write_tiny(tmp_path / "m", tiny_config()), settings_of(tmp_path)
    found = surveyed(path, settings)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        for new in (b"7", b"x", b"\xff", b"]"):
            entry.write_bytes(whole[:at] + new + whole[at + 1 :])
            assert surveyed(path, settings) == found
            entry.write_bytes(whole)


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"stamp": 1, "sum": 2, "survey": []}', "[" * 100_000])
def test_another_document(tmp_path, opened, text):
    path, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)
    found = surveyed(path, settings)
    entries(tmp_path)[0].write_text(text)
    assert surveyed(path, settings) == found and len(opened) == 2


def test_a_record_of_a_survey_that_this_version_does_not_know(tmp_path, opened):
    path, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)
    found = surveyed(path, settings)
    (entry,) = entries(tmp_path)
    record = json.loads(entry.read_bytes())
    changes = {"engine": "other"}, {"surprise": 1}, {"config": {"model_type": "qwen4_exp"}}, {"head": {"slot": 1}}
    for change in changes:
        changed = record["survey"] | change
        digest = header_cache._digest([json.dumps(changed).encode()])
        entry.write_text(json.dumps(record | {"survey": changed, "sum": digest}))
        assert surveyed(path, settings) == found
    assert len(opened) == 5


def test_an_entry_that_is_no_file_is_passed_over(tmp_path, opened):
    """A pipe would wait for ever, a device never end."""
    folder, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)
    first = surveyed(folder, settings)
    for made in (os.mkfifo, lambda entry: entry.symlink_to("/dev/zero"), os.mkdir):
        entry = entries(tmp_path)[0]
        entry.rmdir() if entry.is_dir() else entry.unlink()
        made(entry)
        opened.clear()
        assert surveyed(folder, settings) == first and opened == [folder]


@pytest.mark.parametrize("device", [False, True])
def test_a_config_that_is_no_file_is_an_error(tmp_path, opened, device):
    folder = write_tiny(tmp_path / "m")
    config = folder / "config.json"
    config.unlink()
    config.symlink_to("/dev/zero") if device else os.mkfifo(config)
    with pytest.raises(ModelError, match="not a file"):
        surveyed(folder, settings_of(tmp_path))


def test_nowhere_to_write(tmp_path, opened):
    path = write_tiny(tmp_path / "m")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert surveyed(path, settings_of(tmp_path)) == surveyed(path, settings_of(tmp_path)) and len(opened) == 2
    assert (tmp_path / "cache").read_text().startswith("a file")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, opened, monkeypatch):
    path, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    surveyed(path, settings)
    assert entries(tmp_path) == []


def test_old_entries_go(tmp_path, opened):
    path, settings = write_tiny(tmp_path / "m"), settings_of(tmp_path)
    surveyed(path, settings)
    (mine,) = entries(tmp_path)
    for number in range(header_cache.MOST + 5):
        other = mine.with_name(f"{number:032x}.json")
        other.write_text("{}")
        os.utime(other, (1000 + number, 1000 + number))
    os.utime(mine, (1, 1))
    surveyed(path, settings)  # found, so it is the newest now
    surveyed(path, settings_of(tmp_path, trunk="int8"))
    left = entries(tmp_path)
    assert len(left) == header_cache.MOST and mine in left and f"{6:032x}.json" not in {p.name for p in left}


def test_a_bare_config_is_not_cached(tmp_path, opened):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    found = surveyed(folder, settings_of(tmp_path))
    assert found.slots and surveyed(folder / "config.json", settings_of(tmp_path), "q8_0").format == "Q8_0"
    assert opened == [] and not (tmp_path / "cache").exists()
