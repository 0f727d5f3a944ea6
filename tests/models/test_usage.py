"""The expert history: a file of exactly one form that only a sound save changes, and what an engine makes of it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.engine import Engine
from coli.experts import usage as module
from coli.experts.store import ExpertStore
from coli.experts.usage import Shape, Usage, decode, encode, faded, open_usage, usage_file
from coli.models.find import NANO
from coli.session import Request, Session
from coli.settings import ENGINES, Settings, load
from tests.tiny import write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

SHAPE = Shape("qwen36", 6, 8, (1, 3, 4))
TEXT = "-1 6 8\n-2 1 36\n1 0 5\n1 7 2\n4 3 1024\n"
HERE = Path("history")


def chosen(**environ: str) -> Settings:
    return load({}, environ)[0].resolve("qwen36")


def opened(path: Path, shape: Shape = SHAPE) -> tuple[Usage | None, list[str]]:
    return open_usage(chosen(COLI_USAGE=str(path)), path.parent, shape)


def uses(*pairs: tuple[int, int, int], shape: Shape = SHAPE) -> np.ndarray:
    found = shape.none()
    for row, expert, count in pairs:
        found[row, expert] = count
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "history"
    path.write_text(TEXT)
    return path


# ---- the form --------------------------------------------------------------------------------------------------------


def test_the_file_is_these_bytes() -> None:
    counts = uses((0, 0, 5), (0, 7, 2), (2, 3, 1024))
    assert encode(counts, SHAPE) == TEXT.encode()
    found = decode(TEXT.encode(), SHAPE, HERE)
    assert np.array_equal(found, counts) and found.dtype == np.int64
    assert encode(SHAPE.none(), Shape("qwen38", 6, 8, (0, 1, 2))) == b"-1 6 8\n-2 1 38\n"
    assert set(module.ENGINES) == set(ENGINES) and len(set(module.ENGINES.values())) == len(ENGINES)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_counts_round_trip_and_a_slow_parser_agrees(data: st.DataObject) -> None:
    layers, experts = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    rows = tuple(sorted(data.draw(st.sets(st.integers(0, layers - 1), min_size=1))))
    shape = Shape(data.draw(st.sampled_from(ENGINES)), layers, experts, rows)
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    counts = rng.integers(0, 1 << 33, shape.none().shape) * rng.integers(0, 2, shape.none().shape)
    text = encode(counts, shape)
    assert np.array_equal(decode(text, shape, HERE), counts)
    lines = [tuple(map(int, line.split(b" "))) for line in text.splitlines()]
    assert lines[:2] == [(-1, layers, experts), (-2, 1, module.ENGINES[shape.engine])]
    assert lines[2:] == [(layer, expert, int(counts[rows.index(layer), expert])) for layer in rows
                         for expert in range(experts) if counts[rows.index(layer), expert]]  # fmt: skip


def test_line_ends_of_another_system_and_any_order_are_read() -> None:
    head, records = TEXT.split("\n")[:2], TEXT.split("\n")[2:-1]
    turned = "\r\n".join([*head, *records[::-1], ""]).encode()
    assert np.array_equal(decode(turned, SHAPE, HERE), decode(TEXT.encode(), SHAPE, HERE))


def test_an_empty_or_absent_file_is_an_empty_history(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "empty"):
        if path.name == "empty":
            path.touch()
        usage, notes = opened(path)
        assert usage is not None and not notes and not usage.counts.any() and usage.hottest() == usage.pins() == []
        assert usage.save(uses((1, 2, 3))) == []
        assert path.read_text() == "-1 6 8\n-2 1 36\n3 2 3\n"


# ---- files that are not ours to replace ------------------------------------------------------------------------------


def refused(path: Path, shape: Shape = SHAPE) -> str:
    """The note about a file that must stay as it is, whenever it comes."""
    before = path.read_bytes() if path.is_file() else None
    usage, notes = opened(path, shape)
    assert usage is None
    (note,) = notes
    running = Usage(path.with_name("other"), shape)  # as if it had come while a run was under way
    running.path = path
    (late,) = running.save(shape.none() + 1)
    for said in (note, late):
        assert str(path) in said and "COLI_USAGE" in said and "\n" not in said
    assert path.is_dir() or path.read_bytes() == before
    return note


@pytest.mark.parametrize("text, words", [
    ("-1 6 9\n-2 1 36\n", "6 layers of 9 experts, this model has 6 of 8"),
    ("-1 7 8\n-2 1 36\n", "7 layers of 8 experts"),
    ("-1 6 8\n-2 2 36\n1 0 5\n", "version 2"),
    ("-1 6 8\n-2 2 36\nsomething new\n", "version 2"),
    ("-1 6 8\n-2 0 36\n", "version 0"),
    ("-1 6 8\n-2 1 38\n1 0 5\n", "the engine qwen38, this model's is qwen36"),
    ("-1 6 8\n-2 1 7\n", "the engine of number 7"),
    ("1 0 5\n", "no expert history"),
    ("-2 1 36\n-1 6 8\n", "no expert history"),
    ("\n", "no expert history"),
    ("a model's weights " * 100, "no expert history"),
    (TEXT + "1 1\n", "line 6 is no whole record"),
    (TEXT + "1 1 1 1\n", "line 6 is no whole record"),
    (TEXT + "1 1 -1\n", "line 6 is no whole record"),
    (TEXT + "-3 1 1\n", "line 6 is no whole record"),
    (TEXT + "\n" + "1 1 1\n", "line 6 is no whole record"),
    (TEXT + "1 1 " + "9" * 11 + "\n", "line 6 is no whole record"),
    (TEXT[:-1], "line 5 is no whole record"),
    (TEXT + "\0", "line 6 is no whole record"),
    (TEXT + "1 0 5\n", "line 6 counts expert 0 of layer 1"),
    (TEXT + "1 8 5\n", "line 6 counts expert 8 of layer 1"),
    (TEXT + "2 0 5\n", "line 6 counts expert 0 of layer 2"),
    (TEXT + "6 0 5\n1 1 1\n", "line 6 counts expert 0 of layer 6"),
], ids=lambda value: ascii(value[-24:]))  # fmt: skip
def test_what_is_no_history_of_this_model_is_named_and_kept(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "history"
    path.write_text(text)
    assert words in refused(path)


def test_a_file_cut_anywhere_is_refused_or_has_lost_whole_lines(saved: Path) -> None:
    whole = saved.read_bytes()
    ends = [at for at in range(1, len(whole)) if whole[at - 1 : at] == b"\n"][1:]
    for size in range(1, len(whole)):
        saved.write_bytes(whole[:size])
        if size in ends:  # the form cannot tell: this is why a save replaces the file as a whole
            assert encode(decode(whole[:size], SHAPE, saved), SHAPE) == whole[:size]
        else:
            refused(saved)
    assert len(ends) == 3


def test_an_endless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "history"
    with open(path, "w") as handle:
        handle.write(TEXT)
        handle.truncate(1 << 40)  # a terabyte of zeros that takes no space
    usage, notes = opened(path)
    assert usage is None and "line 6 is no whole record" in notes[0]


def test_folders_and_devices_are_never_replaced(tmp_path: Path) -> None:
    assert "not a regular file" in refused(tmp_path)
    usage, notes = opened(Path(os.devnull))
    assert usage is None and "not a regular file" in notes[0] and stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_file_that_may_not_be_read_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    usage, notes = opened(saved)
    assert usage is None and f"{saved}: cannot be read (Permission denied)" in notes[0]


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_saves_of_one_run_add_each_use_once(saved: Path) -> None:
    usage, _ = opened(saved)
    assert usage is not None
    counted = uses((0, 0, 1), (1, 1, 2))
    assert usage.save(counted) == [] and usage.save(counted) == []
    counted[1, 1] += 10  # the store goes on counting in the same array
    assert usage.save(counted) == []
    assert saved.read_text() == "-1 6 8\n-2 1 36\n1 0 6\n1 7 2\n3 1 12\n4 3 1024\n"
    before = saved.stat().st_mtime_ns
    again, _ = opened(saved)
    assert again is not None and again.save(SHAPE.none()) == [] and saved.stat().st_mtime_ns == before
    assert os.listdir(saved.parent) == ["history"]


def test_a_failing_disk_is_a_note_and_the_uses_wait_for_the_next_save(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, counted = Usage(saved, SHAPE), uses((0, 1, 4))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        (note,) = usage.save(counted)
    assert f"{saved}: cannot be written (No space left on device)" in note and "\n" not in note
    assert saved.read_text() == TEXT and os.listdir(saved.parent) == ["history"]
    assert usage.save(counted) == [] and usage.counts[0, 1] == 4


def test_mode_and_link_are_kept_and_nobodys_link_is_followed(saved: Path, tmp_path: Path) -> None:
    saved.chmod(0o640)
    link, victim = tmp_path / "link", tmp_path / "victim"
    link.symlink_to(saved)
    victim.write_text("precious")
    (tmp_path / "history.part").symlink_to(victim)
    assert Usage(link, SHAPE).save(uses((0, 1, 1))) == []
    assert link.is_symlink() and stat.S_IMODE(saved.stat().st_mode) == 0o640
    assert victim.read_text() == "precious" and not saved.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["history", "link", "victim"]


def test_old_habits_fade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = SHAPE.none() + 1000
    assert faded(counts) is counts
    counts[0, 0], counts[1, 1] = 5001, 1
    assert faded(counts) is not counts
    assert (faded(counts)[0, 0], faded(counts)[1, 1], faded(counts)[2, 2]) == (2500, 0, 500)
    monkeypatch.setattr(module, "MEAN", 16)
    path = tmp_path / "history"
    for habit in (0, 1):
        for _ in range(60):  # a run uses three experts of eight
            run = SHAPE.none()
            run[:, [habit, 2, 3]] = 10
            assert Usage(path, SHAPE).save(run) == []
            counts = module.load(path, SHAPE)
            assert counts.mean() <= 16
    assert not counts[:, 0].any() and [pair[1] for pair in Usage(path, SHAPE).hottest()] == [1, 2, 3] * 3


# ---- what it is for --------------------------------------------------------------------------------------------------


def test_the_hottest_come_first_and_the_unused_never(tmp_path: Path) -> None:
    usage, rng = Usage(tmp_path / "history", SHAPE), np.random.default_rng(4)
    for _ in range(50):
        usage.counts = rng.integers(0, 5, SHAPE.none().shape)
        ranked = sorted((-int(count), at) for at, count in np.ndenumerate(usage.counts) if count)
        assert usage.hottest() == [at for _, at in ranked]


def test_pins_are_those_clearly_above_their_share(tmp_path: Path) -> None:
    usage = Usage(tmp_path / "history", SHAPE)
    usage.counts[:] = 100
    assert usage.pins() == []  # whoever is used like everybody is no pin
    usage.counts[0, 5], usage.counts[2, 1], usage.counts[1, 1] = 400, 900, 190
    assert usage.pins() == [(2, 1), (0, 5)]
    usage.counts[:] = 0
    usage.counts[0, 0], usage.counts[1, 0] = 31, 32
    assert usage.pins() == [(1, 0)]  # three uses by chance are no habit
    assert all(isinstance(number, int) for pair in usage.pins() for number in pair)


# ---- processes -------------------------------------------------------------------------------------------------------

SAVER = """
import sys
from pathlib import Path
from coli.experts.usage import Shape, Usage
path, expert, shape = Path(sys.argv[1]), int(sys.argv[2]), Shape("qwen38", 30, 64, tuple(range(30)))
print("ready", flush=True)
sys.stdin.readline()
for run in range(6):
    usage, uses = Usage(path, shape), shape.none()
    for _ in range(5):
        uses[:, expert] += 1
        notes = usage.save(uses)
        assert not notes, notes
"""


def test_two_processes_lose_none_of_each_others_counts(tmp_path: Path) -> None:
    path, shape = tmp_path / "history", Shape("qwen38", 30, 64, tuple(range(30)))
    savers = [subprocess.Popen([sys.executable, "-c", SAVER, str(path), expert], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True) for expert in ("7", "63")]  # fmt: skip
    for saver in savers:
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    while any(saver.poll() is None for saver in savers):
        module.load(path, shape)  # never a torn file
    for saver in savers:
        saver.communicate()
        assert saver.returncode == 0
    counts = module.load(path, shape)
    assert np.all(counts[:, [7, 63]] == 30) and counts.sum() == 2 * 30 * 30
    assert os.listdir(tmp_path) == ["history"]


# Forks a saver for every line it reads, says its number, and how it ended: a process for each kill without 200 imports.
NURSERY = """
import os, sys
from pathlib import Path
from coli.experts import usage
from coli.experts.usage import Shape, Usage
usage.MEAN = 1 << 40
path, shape = Path(sys.argv[1]), Shape("qwen38", 12, 64, tuple(range(12)))
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        history, uses = Usage(path, shape), shape.none()
        os.write(1, b"%d\\n" % os.getpid())
        while True:
            uses += 1
            if notes := history.save(uses):
                os.write(2, str(notes).encode())
                os._exit(1)
    os.write(1, b"%d\\n" % os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_hundred_kills_while_saving_leave_a_whole_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEAN", 1 << 40)
    path, shape, rng = tmp_path / "history", Shape("qwen38", 12, 64, tuple(range(12))), np.random.default_rng(9)
    last, halfway = 0, 0
    with subprocess.Popen([sys.executable, "-c", NURSERY, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as nursery:  # fmt: skip
        assert nursery.stdin is not None and nursery.stdout is not None
        for _ in range(200):
            nursery.stdin.write("\n")
            nursery.stdin.flush()
            saver = int(nursery.stdout.readline())
            time.sleep(float(rng.uniform(0, 0.02)))
            os.kill(saver, signal.SIGKILL)
            assert int(nursery.stdout.readline()) == signal.SIGKILL  # it had not ended by itself
            counts = module.load(path, shape)
            assert counts.min() == counts.max() >= last  # every save adds one to every expert: none is ever half there
            last = int(counts.max())
            halfway += (tmp_path / "history.part").exists()
    assert nursery.returncode == 0 and last > 0 and halfway > 0
    assert Usage(path, shape).save(shape.none() + 1) == []  # what the dead left is in nobody's way
    assert os.listdir(tmp_path) == ["history"] and np.all(module.load(path, shape) == last + 1)


# ---- where the file is -----------------------------------------------------------------------------------------------


def test_the_file_is_beside_the_model_or_where_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert usage_file(tmp_path, chosen()) == tmp_path / ".coli_usage"
    assert usage_file(tmp_path / "a.gguf", chosen()) == tmp_path / "a.gguf.coli_usage"
    assert usage_file(tmp_path, chosen(COLI_USAGE="/x/y")) == Path("/x/y")


def test_a_read_only_or_shipped_model_gets_a_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shipped = usage_file(NANO, chosen())
    assert NANO not in shipped.parents and shipped.name.endswith(".coli_usage")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    a, b = (usage_file(tmp_path / name, chosen()) for name in ("a", "b"))
    assert a != b and tmp_path not in (a.parent, b.parent)


def test_a_model_without_experts_has_none_and_says_so_to_whoever_asked(tmp_path: Path) -> None:
    dense = Shape("qwen36", 6, 0, ())
    assert open_usage(chosen(), tmp_path, dense) == (None, [])
    given = load({"usage": tmp_path / "x"}, {"COLI_WARM_START": "1"})[0].resolve("qwen36")
    usage, notes = open_usage(given, tmp_path, dense)
    assert usage is None and notes == [f"{name} has no effect: the model has no experts"
                                       for name in ("--usage", "COLI_WARM_START")]  # fmt: skip


# ---- an engine's -----------------------------------------------------------------------------------------------------


def run(folder: Path, tokens: Sequence[int] = range(40, 70), **flags: Any) -> tuple[Engine, list[int]]:
    """(an engine that has answered and is closed, the tokens it gave)."""
    given = {"model": str(folder), "threads": 1, "mtp": False, "lookup": False, **flags}
    with Engine.open(load(given, {})[0]) as engine:
        session = Session(engine)
        list(session.generate(Request(tuple(tokens), max_tokens=8, stop_ids=frozenset())))
        return engine, list(session.report.token_ids)


@pytest.fixture(params=["qwen38", "qwen36 with a dense layer"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    if request.param == "qwen38":
        write_tiny(folder)
    else:
        write_tiny36(folder, tiny36_config("qwen3_moe", mlp_only_layers=[1]))
    return folder


def test_a_run_leaves_what_it_used_and_the_next_begins_with_it(model: Path) -> None:
    cold, ids = run(model, prefill_chunk=10)
    shape = cold.usage.shape
    counts = module.load(model / ".coli_usage", shape)
    forwards = 3 + 7  # of the prompt, and one for every token but the last
    assert np.array_equal(counts, cold.store.uses) and counts.max() <= forwards
    assert np.all(counts.sum(axis=1) >= forwards * cold.geometry.top_k)
    assert shape.rows == tuple(i for i in range(shape.layers) if shape.engine == "qwen38" or i != 1)

    warm, again = run(model, prefill_chunk=10)
    assert again == ids and np.array_equal(warm.store.uses, cold.store.uses)
    assert (warm.store.misses, warm.store.warmed) == (0, cold.store.misses) and cold.store.misses > 0
    assert np.array_equal(module.load(model / ".coli_usage", shape), 2 * counts)


def test_what_may_not_be_read_ahead_or_written_is_not(model: Path) -> None:
    cold, ids = run(model, usage_save=False)
    assert not (model / ".coli_usage").exists()
    run(model)
    before = (model / ".coli_usage").read_bytes()
    off, again = run(model, usage_save=False, warm_start=False)
    assert again == ids and (model / ".coli_usage").read_bytes() == before
    assert (off.store.warmed, off.store.misses) == (0, cold.store.misses)


def test_pins_and_the_hottest_go_to_the_store_in_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = run(model)
    shape, path = engine.usage.shape, model / ".coli_usage"
    counts = shape.none() + 5
    counts[1, 3], counts[0, 2] = 900, 400
    path.write_bytes(encode(counts, shape))
    asked: dict[str, list[tuple[int, int]]] = {}
    for name in ("pin", "fill"):
        monkeypatch.setattr(ExpertStore, name, lambda self, pairs, name=name: asked.__setitem__(name, list(pairs)))
    run(model, usage_save=False)
    assert asked["pin"] == [(1, 3), (0, 2)] == asked["fill"][:2] and len(asked["fill"]) == counts.size


def test_a_foreign_history_is_a_note_of_the_engine_and_stays(model: Path) -> None:
    (model / ".coli_usage").write_text("-1 48 512\n-2 1 38\n")
    engine, _ = run(model)
    assert engine.usage is None and any("COLI_USAGE" in note and ".coli_usage: " in note for note in engine.notes)
    assert (model / ".coli_usage").read_text() == "-1 48 512\n-2 1 38\n"


def test_what_cannot_be_saved_is_said_when_the_history_is_saved(model: Path) -> None:
    with Engine.open(load({"model": str(model), "threads": 1, "mtp": False}, {})[0]) as engine:
        list(Session(engine).generate(Request((40, 41), max_tokens=2, stop_ids=frozenset())))
        (model / ".coli_usage").write_text("mine")
        (note,) = engine.save_history()
        assert "no expert history" in note
    assert (model / ".coli_usage").read_text() == "mine"


def test_a_dense_model_leaves_no_history(tmp_path: Path) -> None:
    write_tiny36(tmp_path / "model", tiny36_config("qwen3_5_text"))
    engine, _ = run(tmp_path / "model", usage=tmp_path / "x")
    assert engine.usage is None and engine.notes.count("--usage has no effect: the model has no experts") == 1
    assert not (tmp_path / "x").exists() and not (tmp_path / "model" / ".coli_usage").exists()
