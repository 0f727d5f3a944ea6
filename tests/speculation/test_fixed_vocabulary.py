"""The fixed list of ids that a head scores (Q36_MTP_VOCAB_IDS): what a file may say, and that nothing changes it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from coli.errors import UsageError
from coli.settings import Settings, load
from coli.speculation.vocabulary import FixedVocabulary, Vocabulary, open_vocabulary, vocab_file

VOCAB = 272


def listed(path: Path, text: str | bytes, vocab: int = VOCAB) -> FixedVocabulary:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return FixedVocabulary(vocab, path, "Q36_MTP_VOCAB_IDS")


@pytest.mark.parametrize("text", [
    "9\n3\n271\n", "9 3 271", "9,3,271", "9, 3,\t271", "\n\n 9\r\n3 ,\n,271\n\n", "009 3 000000271", "3,9,271,",
])  # fmt: skip
def test_ids_with_blanks_commas_or_line_ends_between(tmp_path: Path, text: str) -> None:
    found = listed(tmp_path / "ids", text)
    assert found.ids[: found.count].tolist() == [3, 9, 271] and found.ids.dtype == np.int64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "names no token"), (" ,\n", "names no token"), ("1\n2\nx\n", "line 3: 'x' is no token id"),
        ("1 -2", "line 1: '-2' is no token id"), ("1.0", "'1.0' is no token id"), ("0x10", "'0x10'"), ("1_0", "'1_0'"),
        ("1;2", "'1;2'"), ("5\n7 5", "line 2: 5 is named before"), ("05 5", "line 1: 5 is named before"),
        ("271\n272", "line 2: 272 is no token of this model, whose ids end at 271"), ("9" * 30, "is no token id"),
        (b"\xff\xfe1", "is no token id"), (b"1\x00", "is no token id"), ("# ids\n1", "line 1: '#' is no token id"),
        ("[1, 2]", "'[1' is no token id"), (b" " * 20_000, "is too long for a list of 272 ids"),
    ],
)  # fmt: skip
def test_anything_else_is_an_error_with_its_line(tmp_path: Path, text: str | bytes, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        listed(tmp_path / "ids", text)
    assert fault in caught.value.what and caught.value.where == f"Q36_MTP_VOCAB_IDS {tmp_path / 'ids'}"
    assert caught.value.hint


@pytest.mark.parametrize("name", ["none", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        FixedVocabulary(VOCAB, tmp_path / name, "--mtp-vocab-ids")


def test_an_endless_file_is_too_long() -> None:
    with pytest.raises(UsageError, match="too long"):
        FixedVocabulary(VOCAB, Path("/dev/zero"), "--mtp-vocab-ids")


def test_nothing_that_is_said_changes_the_list(tmp_path: Path) -> None:
    found = listed(tmp_path / "ids", "9 3 271")
    before, address = found.ids.tobytes(), found.ids.ctypes.data
    found.begin([1, 2, 3])
    found.read(np.arange(100))
    for token in (3, 4, 3, 271):
        found.picked(token)
    assert (found.count, found.ids.tobytes(), found.ids.ctypes.data) == (3, before, address)
    assert os.listdir(tmp_path) == ["ids"] and found.save() is None and os.listdir(tmp_path) == ["ids"]
    report = found.turn_report()
    assert (report.size, report.inside, report.picks, report.appended, report.rebuilds) == (3.0, 3, 4, 0, 0)
    assert report.line() == "fixed list of 3 of 272 tokens | picks inside 75.0% (3/4)"
    assert report.to_json()["fixed"] is True and found.turn_report().picks == 0


# ---- which list a head scores ----------------------------------------------------------------------------------------


def settings(flags: dict[str, object], **environ: str) -> Settings:
    return load(flags, environ)[0].resolve("qwen36")


def test_the_list_of_ids_takes_the_place_of_the_most_used_tokens(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("1 2")
    given = {"Q36_MTP_VOCAB_IDS": str(tmp_path / "ids"), "Q36_MTP_VOCAB": "0"}
    found, notes = open_vocabulary(settings({}, **given), tmp_path, VOCAB)
    assert isinstance(found, FixedVocabulary) and found.count == 2 and notes == []
    learned, notes = open_vocabulary(settings({"mtp_vocab": 9}), tmp_path, VOCAB)
    assert isinstance(learned, Vocabulary) and learned.size == 9 and notes == []


def test_the_whole_vocabulary_is_scored_where_the_list_is_none_or_would_be_all_or_is_dumped(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("1 2")
    for given in (settings({"mtp_vocab": 0}), settings({"mtp_vocab": VOCAB}), settings({"mtp_vocab": 16000}),
                  settings({"mtp_vocab_ids": tmp_path / "ids"}, Q36_MTP_DUMP="d")):  # fmt: skip
        assert open_vocabulary(given, tmp_path, VOCAB) == (None, [])


def test_what_is_wrong_with_the_list_is_said_of_the_flag_or_the_variable(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("x")
    for given, name in ((settings({"mtp_vocab_ids": tmp_path / "ids"}), "--mtp-vocab-ids"),
                        (settings({}, Q36_MTP_VOCAB_IDS=str(tmp_path / "ids")), "Q36_MTP_VOCAB_IDS")):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            open_vocabulary(given, tmp_path, VOCAB)
        assert caught.value.where == f"{name} {tmp_path / 'ids'}"


def test_a_model_that_is_one_file_keeps_its_counts_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert vocab_file(tmp_path / "a.gguf", settings({})) == (tmp_path / "a.gguf.coli_vocab", "")
    assert vocab_file(tmp_path, settings({})) == (tmp_path / ".coli_vocab", "")
    path, off = vocab_file(tmp_path / "a.gguf", settings({}, COLI_VOCAB_USAGE=str(tmp_path / "a.gguf.coli_usage")))
    assert path is None and "expert history" in off
