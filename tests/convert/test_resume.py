"""Killed anywhere and given again, a conversion ends in the bytes of one that was left alone."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coli.convert.convert import convert
from coli.convert.files import write_error
from coli.convert.report import Options
from coli.errors import ColiError, ModelError, UsageError
from coli.formats.checkpoint import Checkpoint
from tests.conftest import clean_env
from tests.convert import reading
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

OPTIONS = Options(4, 64)
SMALL = dict(num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])


class Killed(BaseException):
    """What the process would not have outlived."""


@contextmanager
def dying(at: int) -> Iterator[list[int]]:
    """Every sync, every rename and every piece written is a step; step `at` is the last one. Yields [steps so far]."""
    steps, sync, rename = [0], os.fsync, os.replace

    def step() -> None:
        steps[0] += 1
        if steps[0] > at:
            raise Killed

    def dying_sync(fd: int) -> None:
        step()
        sync(fd)

    def dying_rename(old: object, new: object) -> None:
        step()
        rename(old, new)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", dying_sync)
        patch.setattr(os, "replace", dying_rename)
        patch.setattr("tests.convert.test_resume.piece", lambda _: step(), raising=False)
        yield steps


def piece(_: object) -> None:
    """A piece was written; `dying` puts a step here."""


def _hear(progress: object) -> None:
    piece(progress)


def _sources(folder: Path) -> dict[str, Path]:
    return {
        "container": write_tiny36(folder / "moe", tiny36_config("qwen3_5_moe_text", **SMALL), dtype="BF16", shards=2),
        "sidecar": write_tiny(folder / "q38", tiny_config(**SMALL, ple_layer_ids=[2]), dtype="FP8"),
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module", params=["container", "sidecar"])
def whole(request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """(source, digests of an uninterrupted run, number of its steps)."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with dying(at=10**9) as steps:
        convert(sources[request.param], out, OPTIONS, on_progress=_hear)
    return sources[request.param], reading.bytes_of(out), steps[0]


def _is_no_model_yet(out: Path) -> bool:
    return not (out / "config.json").exists() and not any(out.rglob("index.json"))


@pytest.mark.parametrize("number", range(20))
def test_killed_at_a_random_step(whole: tuple, tmp_path: Path, number: int) -> None:
    source, wanted, steps = whole
    at = random.Random(number).randrange(steps)
    with pytest.raises(Killed), dying(at):
        convert(source, tmp_path / "out", OPTIONS, on_progress=_hear)
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    report = convert(source, tmp_path / "out", OPTIONS)
    assert reading.bytes_of(tmp_path / "out") == wanted
    again = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert {name: again[name] for name in kept} == kept, "finished files are not written again"
    assert report.files - report.written == len(kept)


def test_killed_at_every_third_of_its_way(whole: tuple, tmp_path: Path) -> None:
    """The same folder, killed again and again."""
    source, wanted, steps = whole
    for _ in range(20):
        try:
            with dying(steps // 3):
                convert(source, tmp_path / "out", OPTIONS, on_progress=_hear)
        except Killed:
            continue
        break
    assert reading.bytes_of(tmp_path / "out") == wanted


def test_until_its_end_it_is_no_model(whole: tuple, tmp_path: Path) -> None:
    source, _, steps = whole
    for at in (3, steps // 2, steps - 12):
        with pytest.raises(Killed), dying(at):
            convert(source, tmp_path / str(at), OPTIONS, on_progress=_hear)
        assert _is_no_model_yet(tmp_path / str(at))
    with pytest.raises(ModelError, match=r"not come to its end \(give the same `coli convert` again"):
        Checkpoint.open(tmp_path / str(steps // 2))


CHILD = """
import os, signal, sys
from pathlib import Path
from coli.convert.convert import convert
from coli.convert.report import Options
left = int(sys.argv[3])
def hear(progress):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(4, 64), on_progress=hear)
"""


@pytest.mark.parametrize("number", range(4))
def test_really_killed(whole: tuple, tmp_path: Path, number: int) -> None:
    source, wanted, steps = whole
    pieces = 1 + random.Random(100 + number).randrange(steps // 2)
    child = [sys.executable, "-c", CHILD, str(source), str(tmp_path / "out"), str(pieces)]
    done = subprocess.run(child, capture_output=True, env=clean_env())
    assert done.returncode == -9, done.stderr.decode()
    convert(source, tmp_path / "out", OPTIONS)
    assert reading.bytes_of(tmp_path / "out") == wanted


def test_threads_do_not_change_a_byte(whole: tuple, tmp_path: Path) -> None:
    for threads in (1, 5):
        convert(whole[0], tmp_path / str(threads), OPTIONS, threads=threads)
        assert reading.bytes_of(tmp_path / str(threads)) == whole[1]


def test_given_again_a_finished_one_is_left_alone(whole: tuple, tmp_path: Path) -> None:
    first = convert(whole[0], tmp_path / "out", OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = convert(whole[0], tmp_path / "out", OPTIONS)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert again.errors == first.errors and again.written == 0 and again.stored_bytes == first.stored_bytes


def test_a_small_file_that_is_gone_comes_back(whole: tuple, tmp_path: Path) -> None:
    convert(whole[0], tmp_path / "out", OPTIONS)
    (tmp_path / "out" / "config.json").unlink()
    assert convert(whole[0], tmp_path / "out", OPTIONS).written == 0 and reading.bytes_of(tmp_path / "out") == whole[1]


def test_only_a_full_disk_is_told_to_make_room() -> None:
    full, forbidden = (write_error(OSError(number, "words"), "a") for number in (errno.ENOSPC, errno.EACCES))
    assert full.hint.startswith("make room") and forbidden.hint.startswith("give a folder you may write")


def test_a_file_cut_short_by_somebody_is_written_again(whole: tuple, tmp_path: Path) -> None:
    convert(whole[0], tmp_path / "out", OPTIONS)
    victim = sorted((tmp_path / "out").glob("model-0*.safetensors"))[1]
    os.truncate(victim, 100)
    report = convert(whole[0], tmp_path / "out", OPTIONS)
    assert report.written == 1 and reading.bytes_of(tmp_path / "out") == whole[1]


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refused(source: Path, out: Path, words: str, options: Options = OPTIONS, kind: type = ModelError) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} if out.is_dir() else {}
    with pytest.raises(kind, match=words):
        convert(source, out, options)
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} if out.is_dir() else {}
    assert before == after, "a refusal writes nothing"


def _begun(source: Path, out: Path) -> Path:
    with pytest.raises(Killed), dying(30):
        convert(source, out, OPTIONS, on_progress=_hear)
    return out


def test_other_options(sources: dict[str, Path], tmp_path: Path) -> None:
    out = _begun(sources["container"], tmp_path / "out")
    _refused(sources["container"], out, "was begun as qwen36 container, --ebits 4 --group-size 64", Options(8, 64))
    _refused(sources["container"], out, "asked for is qwen36 container, --ebits 4 --group-size 32", Options(4, 32))


def test_another_source_or_a_changed_one(sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "moe"
    shutil.copytree(sources["container"], source)
    out = _begun(source, tmp_path / "out")
    _refused(sources["sidecar"], out, "was begun as")
    weights = next(source.glob("model-*.safetensors"))
    os.utime(weights, ns=(1, 1))
    _refused(source, out, "from another source, or its files changed")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda out: (out.mkdir(), (out / "notes.txt").write_text("mine")), "not empty and no conversion of ours"),
        (lambda out: out.write_text("a file"), "not a folder"),
        (lambda out: (out.mkdir(), (out / "convert.json").write_text("{}")), "not a conversion this version knows"),
        (lambda out: (out.mkdir(), (out / "convert.json").write_text("[")), "not valid JSON"),
    ],
)
def test_somebody_elses_folder(sources: dict[str, Path], tmp_path: Path, spoil: Callable, words: str) -> None:
    spoil(tmp_path / "out")
    _refused(sources["container"], tmp_path / "out", words)


def test_a_state_that_was_edited(sources: dict[str, Path], tmp_path: Path) -> None:
    out = _begun(sources["container"], tmp_path / "out")
    state = json.loads((out / "convert.json").read_text())
    (out / "convert.json").write_text(json.dumps(state | {"files": {"a": 1}}))
    _refused(sources["container"], out, "which files are finished")


def test_an_empty_folder_and_a_missing_parent_are_fine(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(sources["container"], tmp_path / "empty", OPTIONS)
    convert(sources["container"], tmp_path / "new" / "deep", OPTIONS)
    assert reading.bytes_of(tmp_path / "empty") == reading.bytes_of(tmp_path / "new" / "deep")


def test_two_at_once(sources: dict[str, Path], tmp_path: Path) -> None:
    def second(_: object) -> None:
        with pytest.raises(ModelError, match="another conversion is writing here"):
            convert(sources["container"], tmp_path / "out", OPTIONS)
        raise Killed

    with pytest.raises(Killed):
        convert(sources["container"], tmp_path / "out", OPTIONS, on_progress=second)


def test_a_sidecar_of_somebody_else(sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "q38"
    shutil.copytree(sources["sidecar"], source)
    (source / "experts-int4g64").mkdir()
    (source / "experts-int4g64" / "index.json").write_text("{}")
    _refused(source, source, "no conversion of ours: it has index.json")


def test_a_container_into_its_source(sources: dict[str, Path]) -> None:
    _refused(sources["container"], sources["container"], "is the source itself", kind=UsageError)


def test_too_little_room_says_both_numbers(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=5_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    with pytest.raises(ColiError, match=r"needs 1[78]\.\d MB, the disk has 5\.00 MB free") as caught:
        convert(sources["container"], tmp_path / "out", OPTIONS)
    assert caught.value.exit == 1 and not (tmp_path / "out").exists()


def test_room_is_needed_for_what_is_left(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(sources["container"], tmp_path / "out", OPTIONS)
    free = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    assert convert(sources["container"], tmp_path / "out", OPTIONS).written == 0
    (tmp_path / "out" / "model-00001.safetensors").unlink()
    with pytest.raises(ColiError, match="needs 16.9 MB"):
        convert(sources["container"], tmp_path / "out", OPTIONS)


def test_a_full_disk_ends_it_and_it_goes_on(whole: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, wanted, _ = whole
    sync, left = os.fsync, [9]

    def full(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        sync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ColiError, match="No space left on device.*it goes on"):
            convert(source, tmp_path / "out", OPTIONS)
    convert(source, tmp_path / "out", OPTIONS)
    assert reading.bytes_of(tmp_path / "out") == wanted
