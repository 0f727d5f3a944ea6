"""Traces: what is written is read back, nothing else is read, and a replay is arithmetic on what was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from coli.errors import ColiError, Exit, UsageError
from coli.speculation.options import Speculation
from coli.trace import ALL, Record, ReplayRow, Writer, read, replay

HEADER = {"model": "a/model", "engine": "qwen38", "threads": 2, "speculation": Speculation(drafts=3)}


def record(k: int = 0, accepted: int = 0, judged: int | None = None, seconds: float = 1.0, *, source: str = "mtp",
           drafting: float = 0.0, **other: Any) -> dict[str, Any]:  # fmt: skip
    """A forward of `k` drafts as the decoder reports it; judged to the first rejection unless said."""
    return {
        "position": 7, "source": source if k else None, "k": k, "written": k, "p": None, "drafts": [5] * k,
        "accepted": accepted, "judged": min(accepted + 1, k) if judged is None else judged, "seconds": seconds,
        "draft_seconds": drafting, "bytes": 100, "rejected_bytes": 0, "pick": 3, "ended": False, **other,
    }  # fmt: skip


def records(*values: dict[str, Any]) -> list[Record]:
    return [Record.of(value) for value in values]


def write(path: Path, *values: dict[str, Any]) -> Path:
    with Writer(path) as writer:
        writer.start(**HEADER)
        for value in values:
            writer(value)
    return path


# ---- the file ----------------------------------------------------------------------------------------------------
def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    values = (record(), record(2, 1, p=[0.5, 1]), record(5, 5, source="lookup", ended=True, written=9))
    path = write(tmp_path / "trace", *values)
    header, found = read(path)
    assert header["coli_trace"] == 1 and header["model"] == "a/model" and header["engine"] == "qwen38"
    assert header["threads"] == 2 and header["speculation"]["drafts"] == 3
    assert found == records(*values) and found[1].p == (0.5, 1) and found[2].drafts == (5,) * 5
    assert read(write(path, record()))[1] == records(record())  # anew


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "trace")
    writer.start(**HEADER)
    writer(record(1, 1))
    assert len(read(tmp_path / "trace")[1]) == 1
    writer.close()


def test_opening_finds_what_cannot_be_written_and_touches_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "folder", tmp_path, Path("a\0b")):
        with pytest.raises(UsageError, match="--trace .*: cannot write: ") as caught:
            Writer(path)
        assert caught.value.exit == Exit.USAGE
    old = write(tmp_path / "trace", record())
    before = old.read_bytes()
    Writer(old).close()  # the model could not be loaded, say
    assert old.read_bytes() == before
    with pytest.raises(ValueError, match="start"), Writer(old) as writer:
        writer(record())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_is_one_error_at_the_end() -> None:
    writer = Writer(Path("/dev/full"))
    writer.start(**HEADER)
    for _ in range(3):
        writer(record())
    with pytest.raises(ColiError, match="--trace /dev/full: .*No space left"):
        writer.close()
    writer.close()
    with pytest.raises(KeyError), Writer(Path("/dev/full")) as writer:  # what broke first is what is said
        writer.start(**HEADER)
        raise KeyError


def test_foreign_and_damaged_files_are_refused_with_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", record(2, 1), record())
    whole = path.read_bytes()
    assert whole.isascii()
    cases = {
        b"": "is empty", b"\n": "line 1: is not JSON", b"hello\n": "line 1: is not JSON",
        b"[1]\n": "line 1: is no header", b'{"model": "x"}\n': "line 1: is no header",
        whole.replace(b'trace": 1', b'trace": 2'): "line 1.*version 2",
        whole[:-1]: "line 3.*cut", whole[:-20]: "line 3.*cut", whole + b"\xff\n": "line 4: is not JSON",
        whole + b"\n": "line 4", whole + b"7\n": "line 4: is no JSON object", whole + b"[" * 100000 + b"\n": "line 4",
        whole.replace(b'"judged"', b'"fudged"', 1): "line 2: lacks judged",
    }  # fmt: skip
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message) as caught:
            read(path)
        assert caught.value.exit == Exit.USAGE and str(path) in str(caught.value)
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "none")


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": -1}, {"k": 2.0}, {"k": True}, {"position": None}, {"seconds": 0}, {"seconds": "1"}, {"seconds": True},
        {"draft_seconds": -1.0}, {"draft_seconds": float("inf")}, {"source": "oracle"}, {"source": None},
        {"accepted": 3}, {"judged": 0}, {"judged": 3}, {"written": 1}, {"rejected_bytes": 101}, {"drafts": [1]},
        {"drafts": [1, -1]}, {"drafts": "ab"}, {"p": [0.5]}, {"p": [0.5, 1.5]}, {"p": [0.5, None]}, {"p": 0.5},
        {"ended": 0}, {"k": 0, "drafts": [], "accepted": 0, "judged": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    Record.of(record(2, 1) | {"a later field": 1})
    with pytest.raises(ValueError, match="rule"):
        Record.of(record(2, 1) | wrong)


# ---- the replay --------------------------------------------------------------------------------------------------
def table(*values: dict[str, Any], depths: Any = range(6)) -> dict[tuple[str, int], ReplayRow]:
    return {(row.source, row.depth): row for row in replay(records(*values), depths)}


def test_measured_depths_are_plain_arithmetic() -> None:
    """T 1, 1.4, 1.6; half the first drafts stand, and of the second ones judged two in three."""
    rows = table(
        record(seconds=0.9), record(seconds=1.1),
        record(1, 0, seconds=1.4, drafting=0.1), record(1, 0, seconds=1.4, drafting=0.1),
        record(1, 0, seconds=1.4, drafting=0.1), record(2, 2, seconds=1.5, drafting=0.3),
        record(2, 2, seconds=1.7, drafting=0.3), record(2, 1, seconds=1.6, drafting=0.3),
    )  # fmt: skip
    one, two = rows["mtp", 1], rows["mtp", 2]
    assert one.tokens_per_forward == pytest.approx(1.5) and one.seconds_per_token == pytest.approx(1.5 / 1.5)
    assert two.tokens_per_forward == pytest.approx(1 + 1 / 2 + 1 / 3)
    assert two.seconds_per_token == pytest.approx(1.9 / (11 / 6)) and two.ratio == pytest.approx(11 / 6 / 1.9)
    assert one.extrapolated == two.extrapolated == rows["mtp", 0].extrapolated == ""
    assert rows["mtp", 0].seconds_per_token == pytest.approx(1.0) and rows["mtp", 0].ratio == 1
    assert rows[ALL, 2].tokens_per_forward == pytest.approx((2 * 1 + 6 * 11 / 6) / 8)
    assert rows[ALL, 2].seconds_per_token == pytest.approx((2 * 1 + 6 * 1.9) / (2 * 1 + 6 * 11 / 6))


def test_what_the_trace_lacks_is_extrapolated_and_named() -> None:
    rows = table(record(seconds=1.0), record(1, 1, seconds=1.2, drafting=0.1))
    three = rows["mtp", 3]
    assert three.extrapolated == "T(4), a2, a3, D(3)"
    rho = (2 * 0.5 + 0.2) / 3
    assert three.tokens_per_forward == pytest.approx(1 + 1 + 0.6 + 0.3)
    assert three.seconds_per_token == pytest.approx((1 + 3 * rho + 0.3) / 2.9)
    assert ("mtp", 4) not in rows and rows[ALL, 5].tokens_per_forward == rows[ALL, 3].tokens_per_forward
    assert rows["mtp", 1].extrapolated == ""


def test_drafting_times_lie_on_a_line() -> None:
    rows = table(record(), record(1, 1, drafting=0.2), record(3, 3, drafting=0.4), depths=[2])
    assert rows["mtp", 2].extrapolated == "T(3), D(2)"
    slope = (2 * 0.5 + 0 + 0) / 4  # both verifies were free
    assert rows["mtp", 2].seconds_per_token == pytest.approx((1 + 2 * slope + 0.3) / 3)


def test_without_a_plain_step_every_figure_against_it_is_a_guess() -> None:
    rows = table(record(2, 2, seconds=3.0), record(2, 0, seconds=3.0))
    assert rows["mtp", 0].seconds_per_token == pytest.approx(1.5) and rows["mtp", 0].extrapolated == "T(1)"
    assert rows["mtp", 2].extrapolated == "T(1)" and rows["mtp", 1].extrapolated == "T(1), T(2)"
    assert rows["mtp", 1].seconds_per_token == pytest.approx(1.5 * 1.5 / 1.5)


def test_sources_are_told_apart_and_mixed_as_they_were() -> None:
    values = [record(seconds=1.0)] * 4 + [record(1, 1, seconds=1.5, drafting=0.5)] * 2
    values += [record(5, 4, seconds=2.0, source="lookup")] * 2
    rows = table(*values)
    assert rows["lookup", 5].tokens_per_forward == pytest.approx(5) and rows["lookup", 5].extrapolated == ""
    assert rows["lookup", 5].ratio == pytest.approx(2.5)
    assert rows["mtp", 1].ratio == pytest.approx(2 / 2)
    assert rows[ALL, 1].tokens_per_forward == pytest.approx((4 * 1 + 2 * 2 + 2 * 2) / 8)
    assert rows[ALL, 1].seconds_per_token == pytest.approx((4 * 1 + 2 * 2 + 2 * 1.5) / 12)
    assert rows[ALL, 0].ratio == 1 and rows[ALL, 0].tokens_per_forward == 1


def test_a_draft_that_was_not_reached_is_not_judged() -> None:
    rows = table(record(), record(3, 1, 1, ended=True), record(3, 1, 2))
    assert rows["mtp", 2].tokens_per_forward == pytest.approx(2 + 0) and rows["mtp", 3].extrapolated == "a3"


def test_a_trace_without_drafts_says_what_off_costs() -> None:
    assert replay([]) == []
    (row,) = replay(records(record(seconds=0.5), record(seconds=1.5)))
    assert row == ReplayRow(ALL, 0, 1.0, 1.0, 1.0, "")
