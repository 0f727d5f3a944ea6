"""The draft vocabulary: which tokens are on the list, and a counts file that nothing but a sound save can change."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli import history
from coli.models.find import NANO
from coli.speculation import counts as file
from coli.speculation.counts import Counts, decode, encode, load, update
from coli.speculation.vocabulary import Vocabulary, vocab_file


class Slow:
    """The rules of section 4 in plain Python, halving at 1024."""

    def __init__(self, vocab: int, size: int) -> None:
        self.vocab, self.size = vocab, size
        self.counts, self.said, self.seen = [0.0] * vocab, set[int](), 0
        self.list = self.chosen()

    def chosen(self) -> set[int]:
        ranked = sorted(range(self.vocab), key=lambda token: (-self.counts[token], token))
        top = ranked[: self.size]
        floor = 0.75 * self.counts[top[-1]]
        return set(top) | {t for t in ranked if self.counts[t] > 0 and self.counts[t] >= floor} | self.said

    def begin(self, conversation: list[int]) -> None:
        self.said = set(conversation)
        self.list = self.chosen()

    def add(self, token: int) -> None:
        self.counts[token] += 1
        self.said.add(token)
        self.list.add(token)
        self.seen += 1
        if self.seen % 1024 == 0:
            self.counts = [count / 2 for count in self.counts]
            self.list = self.chosen()


def listed(vocabulary: Vocabulary) -> list[int]:
    return vocabulary.ids[: vocabulary.count].tolist()


def test_without_a_history_the_lowest_ids() -> None:
    vocabulary = Vocabulary(50, 10)
    assert listed(vocabulary) == list(range(10)) and not vocabulary.notes
    assert listed(Vocabulary(5, 16000)) == list(range(5))
    vocabulary.begin([40, 3, 40, 20])
    assert listed(vocabulary) == [*range(10), 20, 40]


def test_ties_go_to_the_lower_id_and_near_ties_are_all_in() -> None:
    vocabulary = Vocabulary(100, 3)
    vocabulary.read([90] * 8 + [80] * 8 + [70] * 4 + [60] * 4 + [50] * 3 + [40] * 2)
    vocabulary.begin([])
    assert listed(vocabulary) == [50, 60, 70, 80, 90]  # the third has 4, and 3 is 3/4 of it
    vocabulary = Vocabulary(100, 4)
    vocabulary.read([90, 90])
    vocabulary.begin([])
    assert listed(vocabulary) == [0, 1, 2, 90]


def test_a_missing_pick_joins_at_once_and_the_report_says_so() -> None:
    vocabulary = Vocabulary(100, 10)
    address = vocabulary.ids.ctypes.data
    vocabulary.begin([1, 2])
    for token in (5, 77, 77, 9):
        vocabulary.picked(token)
    assert listed(vocabulary) == [*range(10), 77]
    report = vocabulary.turn_report()
    assert (report.size, report.inside, report.picks) == ((10 + 10 + 11 + 11) / 4, 3, 4)
    assert (report.appended, report.rebuilds, report.total) == (1, 1, 100)
    empty = vocabulary.turn_report()
    assert (empty.size, empty.picks, empty.appended, empty.rebuilds) == (11.0, 0, 0, 0)
    assert vocabulary.ids.ctypes.data == address and vocabulary.ids.dtype == np.int64


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_history_gives_the_list_of_the_rules(data: st.DataObject) -> None:
    vocab, size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    ours, slow = Vocabulary(vocab, size), Slow(vocab, min(size, vocab))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    for _ in range(data.draw(st.integers(1, 4))):
        conversation = rng.integers(0, vocab, 3).tolist()
        ours.begin(conversation), slow.begin(conversation)
        prompt = np.minimum(rng.zipf(1.5, rng.integers(0, 2500)) - 1, vocab - 1).tolist()
        ours.read(prompt)
        for token in prompt:
            slow.add(token)
        assert set(listed(ours)) == slow.list
        for token in rng.integers(0, vocab, rng.integers(0, 600)).tolist():
            ours.picked(token), slow.add(token)
        ids = listed(ours)
        assert len(ids) == len(set(ids)) and set(ids) == slow.list


def test_counts_halve_every_1024_tokens_also_across_runs(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    for run in range(3):  # 400 tokens each: 1200 in all
        vocabulary = Vocabulary(20, 4, path)
        vocabulary.read([7] * 400)
        vocabulary.save()
        expected = 400 * (run + 1) if run < 2 else 1024 / 2 + 176
        assert load(path, 20).values[7] == expected and load(path, 20).phase == 400 * (run + 1) % 1024
    long, short = Vocabulary(20, 4, tmp_path / "a"), Vocabulary(20, 4, tmp_path / "b")
    tokens = np.random.default_rng(1).integers(0, 20, 5000)
    long.read(tokens), long.save()
    for at in range(0, 5000, 277):  # a save in between changes nothing
        short.read(tokens[at : at + 277])
        short.save()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_next_run_starts_from_the_saved_counts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "counts"
    first = Vocabulary(1000, 5, path)
    first.read([900, 901, 900])
    first.picked(902)
    first.save()
    again = Vocabulary(1000, 5, path)
    assert listed(again) == [0, 1, 900, 901, 902] and not again.notes
    before = path.stat().st_mtime_ns
    again.save()  # nothing was counted
    assert path.stat().st_mtime_ns == before and os.listdir(path.parent) == ["counts"]


def test_a_big_vocabulary_round_trips() -> None:
    values = np.zeros(248320, np.float32)
    values[[0, 5, 248319]] = [2.0**-149, 3.5, 1000]
    again = decode(encode(Counts(values, 1023)), 248320, Path("x"))
    assert np.array_equal(again.values, values) and again.values.dtype == np.float32 and again.phase == 1023


# ---- files that are not ours to replace --------------------------------------------------------------------------
def refused(path: Path, vocab: int = 30) -> str:
    """The note about a file that must stay as it is, whatever is counted."""
    before = path.read_bytes() if path.is_file() else None
    vocabulary = Vocabulary(vocab, 4, path)
    vocabulary.read([20, 21])
    vocabulary.save()
    assert path.is_dir() or path.read_bytes() == before
    (note,) = vocabulary.notes
    assert str(path) in note and "COLI_VOCAB_USAGE" in note and "\n" not in note
    assert listed(vocabulary) == [0, 1, 2, 3, 20, 21]  # in use all the same
    return note


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "counts"
    vocabulary = Vocabulary(30, 4, path)
    vocabulary.read([3, 29, 3, 11])
    vocabulary.save()
    return path


def test_a_file_cut_or_flipped_anywhere_is_reported_and_kept(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in range(1, len(whole)):
        saved.write_bytes(whole[:size])
        refused(saved)
    for at in range(len(whole)):
        saved.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        refused(saved)
    saved.write_bytes(whole[:-5])
    assert "damaged record" in refused(saved)
    saved.write_bytes(whole + b"\0")
    assert "damaged record" in refused(saved)


@pytest.mark.parametrize(
    "record", [(30, 1.0), (3, 1.0), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))], ids=str
)
def test_an_impossible_record_is_refused_even_with_a_sound_checksum(saved: Path, record: tuple[int, float]) -> None:
    table = np.array([(3, 1.0), record], file._RECORD)
    body = file._HEAD.pack(file.MAGIC, 1, 30, 2, 0) + table.tobytes()
    saved.write_bytes(body + zlib.crc32(body).to_bytes(4, "little"))
    assert "damaged" in refused(saved)


def test_foreign_files_are_named_for_what_they_are(saved: Path, tmp_path: Path) -> None:
    assert "30 tokens, this model's has 31" in refused(saved, 31)
    newer = bytearray(saved.read_bytes())
    newer[8] = 2
    saved.write_bytes(newer)
    assert "version 2" in refused(saved)
    for text in ("-1 48 512\n", "x", "a model's weights " * 100):
        saved.write_text(text)
        assert "no counts" in refused(saved)
    assert "not a regular file" in refused(tmp_path)


def test_a_device_is_never_replaced() -> None:
    vocabulary = Vocabulary(30, 4, Path(os.devnull))
    vocabulary.read([1])
    vocabulary.save()
    assert "not a regular file" in vocabulary.notes[0] and stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_an_empty_file_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    path.touch()
    vocabulary = Vocabulary(30, 4, path)
    vocabulary.read([9])
    vocabulary.save()
    assert not vocabulary.notes and load(path, 30).values[9] == 1


def test_a_file_damaged_while_running_is_kept_as_well(saved: Path) -> None:
    vocabulary = Vocabulary(30, 4, saved)
    vocabulary.picked(5)
    saved.write_bytes(b"something else came here")
    vocabulary.save()
    assert "no counts" in vocabulary.notes[0] and saved.read_bytes() == b"something else came here"


def test_a_failing_disk_is_a_note_and_the_old_file_stays(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, vocabulary = saved.read_bytes(), Vocabulary(30, 4, saved)
    vocabulary.picked(5)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        vocabulary.save()
    assert "No space left" in vocabulary.notes[0] and "\n" not in vocabulary.notes[0]
    assert saved.read_bytes() == before and os.listdir(saved.parent) == ["counts"]
    vocabulary.save()  # there is room again
    assert load(saved, 30).values[5] == 1


def test_mode_and_link_of_the_file_are_kept(saved: Path, tmp_path: Path) -> None:
    saved.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(saved)
    vocabulary = Vocabulary(30, 4, link)
    vocabulary.picked(5)
    vocabulary.save()
    assert link.is_symlink() and stat.S_IMODE(saved.stat().st_mode) == 0o640 and load(saved, 30).values[5] == 1


# ---- two processes -----------------------------------------------------------------------------------------------
SAVER = """
import sys
from pathlib import Path
from coli.speculation.vocabulary import Vocabulary
path, token = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for run in range(6):
    vocabulary = Vocabulary(5000, 10, path)  # a new run
    for _ in range(5):
        vocabulary.picked(token)
        vocabulary.save()
    assert not vocabulary.notes, vocabulary.notes
"""


def test_two_processes_lose_none_of_each_others_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    savers = [
        subprocess.Popen([sys.executable, "-c", SAVER, str(path), token], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for token in ("7", "4999")
    ]  # fmt: skip
    for saver in savers:
        assert saver.stdout.readline() == "ready\n"
    for saver in savers:
        saver.stdin.write("go\n")
        saver.stdin.flush()
    while any(saver.poll() is None for saver in savers):
        load(path, 5000)  # never a torn file
    for saver in savers:
        saver.communicate()
        assert saver.returncode == 0
    counts = load(path, 5000)
    assert counts.values[7] == counts.values[4999] == 30 and counts.phase == 60
    assert os.listdir(tmp_path) == ["counts"]


def test_a_process_killed_while_saving_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    endless = SAVER.replace("for run in range(6)", "for run in iter(int, 1)")
    before = 0.0
    for patience in (0.0, 0.004, 0.009, 0.015):
        with subprocess.Popen([sys.executable, "-c", endless, str(path), "7"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as saver:  # fmt: skip
            assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
            saver.stdin.write("go\n")  # type: ignore[union-attr]
            saver.stdin.flush()  # type: ignore[union-attr]
            while load(path, 5000).values[7] == before:
                pass
            time.sleep(patience)
            saver.kill()
        counts = load(path, 5000)
        assert counts.phase == counts.values[7] > before
        before = counts.values[7]


def test_overlapping_runs_count_as_if_one_followed_the_other(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    Vocabulary(30, 4, path).save()
    one, two = Vocabulary(30, 4, path), Vocabulary(30, 4, path)
    one.read([1] * 1000)
    two.read([2] * 1000)
    one.save()
    two.save()  # its last 976 tokens belong behind the halving that its first 24 make due
    counts = load(path, 30)
    assert counts.phase == 2000 - 1024 and counts.values[1] == 500 and counts.values[2] == 1000


def test_a_save_waits_for_the_lock_but_not_for_ever(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(history, "_PATIENCE", 0.05)
    vocabulary, before = Vocabulary(30, 4, saved), saved.read_bytes()
    vocabulary.picked(5)
    with open(saved, "r+b") as rival:
        fcntl.flock(rival, fcntl.LOCK_EX)
        vocabulary.save()
    assert "locked" in vocabulary.notes[0] and saved.read_bytes() == before
    assert update(saved, 30, lambda counts: counts).values[3] == 2


# ---- where the file is -------------------------------------------------------------------------------------------
def chosen(**given: Path | None) -> SimpleNamespace:
    return SimpleNamespace(**{"vocab_usage": None, "usage": None, **given})


def test_the_file_is_beside_the_model_or_where_it_was_told(tmp_path: Path) -> None:
    assert vocab_file(tmp_path, chosen()) == (tmp_path / ".coli_vocab", "")
    assert vocab_file(tmp_path, chosen(vocab_usage=tmp_path / "mine")) == (tmp_path / "mine", "")


def test_a_read_only_or_shipped_model_gets_a_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    a, b = (vocab_file(tmp_path / name, chosen())[0] for name in ("a", "b"))
    assert a != b and a == vocab_file(tmp_path / "x" / ".." / "a", chosen())[0]
    monkeypatch.undo()
    for path in (a, b, vocab_file(NANO, chosen())[0]):
        assert path is not None and NANO not in path.parents and path.name.endswith(".coli_vocab")


def test_the_experts_history_is_never_used_for_tokens(tmp_path: Path) -> None:
    link = tmp_path / "link"
    (tmp_path / "history").touch()
    link.symlink_to(tmp_path / "history")
    for settings_ in (
        chosen(vocab_usage=link, usage=tmp_path / "history"),
        chosen(usage=tmp_path / ".coli_vocab"),
        chosen(vocab_usage=tmp_path / ".coli_usage"),
    ):
        path, why = vocab_file(tmp_path, settings_)
        assert path is None and "COLI_USAGE" in why and "\n" not in why


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["begin", "read", "picked"]),
                          st.lists(st.integers(0, 39), min_size=1, max_size=6)), max_size=40))  # fmt: skip
def test_sequences_that_take_turns_share_the_counts_alone(moves):
    """Each finds its own conversation on the list and its own picks in the report, whoever came between."""
    shared = Vocabulary(40, 5)
    seats, said, picks = [shared.seat() for _ in range(3)], [set(), set(), set()], [0, 0, 0]
    total = np.zeros(40)
    for which, move, tokens in moves:
        shared.sit(seats[which])
        if move == "begin":
            shared.begin(tokens)
            said[which] = set(tokens)
        elif move == "read":
            shared.read(tokens)
            np.add.at(total, tokens, 1)
            said[which] |= set(tokens)
        else:
            shared.picked(tokens[0])
            total[tokens[0]] += 1
            said[which].add(tokens[0])
            picks[which] += 1
        assert said[which] <= set(listed(shared)) and len(set(listed(shared))) == shared.count >= 5
    for which in range(3):
        shared.sit(seats[which])
        assert said[which] <= set(listed(shared)) and shared.turn_report().picks == picks[which]
    shared.begin([])
    best = sorted(range(40), key=lambda token: (-total[token], token))[:5]
    assert set(best) <= set(listed(shared))
