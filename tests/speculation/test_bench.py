"""`coli bench` without a model: the loop on a session whose clock the test owns, the statistics on known numbers."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from csv import DictReader
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from coli.bench import figure, render
from coli.bench.measure import WARM_UP, Bench, Trace, order
from coli.bench.summary import Row, RowTime, contests, paired, row_times, spread, summarise
from coli.errors import UsageError
from coli.report import Experts, ModelFacts, RunReport, Timings
from coli.session import Request
from coli.speculation.report import SourceReport, SpeculationReport

ANSWER = (5, 6, 7, 8)
MODEL = ModelFacts("/m", "qwen38", {})


class Clock:
    """The machine of the test: `speed` says how fast it is at a moment, and every answer takes a second."""

    def __init__(self, speed: Callable[[float], float] = lambda _: 1.0) -> None:
        self.speed, self.now = speed, 0.0
        self.calls: list[str] = []


class Scripted:
    """A session that decodes at `rate` tokens per second times the clock's speed, `first` at its first answer."""

    def __init__(
        self, clock: Clock, name: str, rate: float, *, first: float | None = None, ids: tuple[int, ...] = ANSWER,
        speculation: SpeculationReport | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.name, self.rate, self.first, self.ids = clock, name, rate, first, ids
        self.speculation = speculation
        self.forwards: tuple[tuple[int, float], ...] = ()
        self.trace: Trace = lambda _: None
        self.report: RunReport | None = None
        self.cancelled = False
        self.during: Callable[[], None] | None = None

    def cancel(self) -> None:
        self.cancelled = True

    def generate(self, request: Request) -> Iterator[str]:
        self.cancelled = False
        self.clock.calls.append(self.name)
        if self.during is not None:
            self.during()
        for rows, seconds in self.forwards:
            self.trace({"k": rows - 1, "seconds": seconds})
        yield "text"
        rate = self.first if self.first is not None else self.rate
        self.first = None
        timings = Timings(decode_tok_s=rate * self.clock.speed(self.clock.now))
        self.clock.now += 1
        reason = "cancelled" if self.cancelled else "length"
        self.report = RunReport("text", self.ids, 1, len(self.ids), reason, timings, 0, Experts(0, 1, 1000), MODEL,
                                self.speculation)  # fmt: skip


def bench_of(*sessions: Scripted, repeats: int, prompts: tuple[str, ...] = ("p",)) -> Bench:
    by_name = {session.name: session for session in sessions}

    def open_session(arm: str, trace: Trace) -> Scripted:
        by_name[arm].trace = trace
        return by_name[arm]

    return Bench(by_name, open_session, {name: Request((1,)) for name in prompts}, repeats)


def measured(*sessions: Scripted, repeats: int, prompts: tuple[str, ...] = ("p",)) -> Bench:
    bench = bench_of(*sessions, repeats=repeats, prompts=prompts)
    bench.run(lambda _: None)
    return bench


def rows_of(*sessions: Scripted, repeats: int = 3) -> dict[str, Row]:
    rows = summarise(measured(*sessions, repeats=repeats).samples, sessions[0].name)
    return {row.arm: row for row in rows}


# ---- the loop --------------------------------------------------------------------------------------------------------


def test_arms_alternate_after_a_warm_up_of_each() -> None:
    clock = Clock()
    measured(*(Scripted(clock, name, 1.0) for name in "abc"), repeats=3)
    assert "".join(clock.calls) == "abc" + "abc" + "cba" + "bca"
    assert [order("abc", repeat) for repeat in (0, 6)] == [["a", "b", "c"]] * 2


@pytest.mark.parametrize("arms", range(2, 8))
def test_every_arm_runs_before_another_as_often_as_after_it(arms: int) -> None:
    names = [str(arm) for arm in range(arms)]
    orders = [order(names, repeat) for repeat in range(2 * arms)]
    for a, b in combinations(names, 2):
        before = [turn.index(a) < turn.index(b) for turn in orders]
        assert all(sum(before[at : at + 2]) == 1 for at in range(0, 2 * arms, 2))
    assert all(sorted(turn) == names for turn in orders) and {turn[0] for turn in orders} == set(names)


def test_every_prompt_is_warmed_up_and_the_sessions_are_kept() -> None:
    clock = Clock()
    bench = measured(Scripted(clock, "a", 1.0), Scripted(clock, "b", 1.0), repeats=1, prompts=("p", "q"))
    assert [(s.prompt, s.arm, s.repeat) for s in bench.samples] == [
        (prompt, arm, repeat) for prompt in "pq" for repeat in (WARM_UP, 0) for arm in "ab"
    ]


def test_the_warm_up_is_not_timed() -> None:
    clock = Clock()
    rows = rows_of(Scripted(clock, "off", 10.0, first=1.0), Scripted(clock, "2", 20.0, first=0.5))
    assert rows["off"].speeds == (10.0,) * 3 and rows["2"].speeds == (20.0,) * 3
    assert rows["2"].ratios == (2.0,) * 3


@pytest.mark.parametrize(("repeats", "lost"), [(4, 0.5), (14, 0.5), (5, 0.2)])
def test_drift_cancels_in_the_pairwise_ratios(repeats: int, lost: float) -> None:
    """The machine loses that part of its speed over the run: medians of speeds are off by far, ratios hardly (by most
    for an odd number of repeats, where one order has no backward twin)."""
    names = ("off", "1", "2", "3", "auto", "lookup", "mtp+lookup")
    clock = Clock(lambda now: (1 - lost) ** (now / (len(names) * (repeats + 1))))
    rows = rows_of(*(Scripted(clock, name, 10.0 * (1 + i / 10)) for i, name in enumerate(names)), repeats=repeats)
    for i, name in enumerate(names):
        assert rows[name].ratio.median == pytest.approx(1 + i / 10, rel=0.03)
    assert rows["off"].speed.median < 9


def test_a_slow_minute_hits_both_of_a_pair() -> None:
    clock = Clock(lambda now: 0.25 if 4 <= now < 6 else 1.0)  # the second repeat
    rows = rows_of(Scripted(clock, "off", 10.0), Scripted(clock, "2", 15.0))
    assert sorted(rows["2"].speeds) == [3.75, 15.0, 15.0] and rows["2"].ratios == (1.5,) * 3


def test_cancelling_keeps_what_was_measured_and_drops_the_broken_answer() -> None:
    clock = Clock()
    sessions = [Scripted(clock, "off", 10.0), Scripted(clock, "2", 15.0)]
    bench = bench_of(*sessions, repeats=3, prompts=("p", "q"))
    sessions[1].during = lambda: bench.cancel() if len(clock.calls) == 4 else None
    bench.run(lambda _: None)
    assert [(s.prompt, s.arm, s.repeat) for s in bench.samples] == [("p", "off", -1), ("p", "2", -1), ("p", "off", 0)]
    assert clock.calls == ["off", "2", "off", "2"]


def test_cancelling_before_an_answer_starts_none() -> None:
    clock = Clock()
    bench = bench_of(Scripted(clock, "off", 10.0), repeats=3)
    bench.cancel()
    bench.run(lambda _: None)
    assert bench.samples == [] and clock.calls == []


# ---- output compared -------------------------------------------------------------------------------------------------


def test_an_arm_that_answers_otherwise_is_caught_where_it_leaves() -> None:
    clock = Clock()
    liar = Scripted(clock, "2", 1.0)
    liar.during = lambda: setattr(liar, "ids", (5, 6, 9, 8) if len(clock.calls) > 4 else ANSWER)
    rows = rows_of(Scripted(clock, "off", 1.0), Scripted(clock, "1", 1.0), liar)
    assert rows["1"].same and rows["off"].same and rows["1"].compared == 4
    found = rows["2"].difference
    assert not rows["2"].same and found is not None
    assert (found.repeat, found.position, found.token, found.expected) == (0, 2, 9, 7)
    assert render.difference(rows["2"]) == "p, arm 2, repeat 1: token 3 of the answer is 9, arm off has 7"
    assert render.cells(rows["2"])["same"] == "NO" and render.cells(rows["1"])["same"] == "yes"


def test_an_answer_cut_short_differs_too() -> None:
    clock = Clock()
    rows = rows_of(Scripted(clock, "off", 1.0), Scripted(clock, "2", 1.0, ids=ANSWER[:3]))
    found = rows["2"].difference
    assert found is not None and (found.repeat, found.position, found.token, found.expected) == (-1, 3, None, 8)


def test_without_a_baseline_nothing_is_said_about_the_output() -> None:
    clock = Clock()
    samples = measured(Scripted(clock, "2", 1.0), repeats=1).samples
    (row,) = summarise(samples, "off")
    assert row.same is None and row.ratio is None and render.record(row)["same_output"] is None


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_spread_of_known_numbers() -> None:
    got = spread([3.0, 1.0, 2.0, 10.0, 4.0])
    assert got is not None
    assert (got.median, got.low, got.quarter, got.three_quarters, got.high) == (3.0, 1.0, 2.0, 4.0, 10.0)
    assert spread([2.0]) is not None and spread([2.0]).median == spread([2.0]).quarter == 2.0  # type: ignore[union-attr]
    assert spread([]) is None


def test_pairs_are_of_the_same_repeat() -> None:
    assert paired({0: 3.0, 1: 8.0, 2: 5.0}, {0: 2.0, 1: 4.0}) == (1.5, 2.0)


def test_an_answer_of_one_token_has_no_speed() -> None:
    rows = rows_of(Scripted(Clock(), "off", 0.0))
    assert rows["off"].speed is None and rows["off"].ratio is None and rows["off"].speeds == ()


def test_auto_is_held_against_the_fastest_other_arm() -> None:
    clock = Clock()
    sessions = [Scripted(clock, name, rate) for name, rate in (("off", 10.0), ("2", 20.0), ("auto", 19.0))]
    (found,) = contests(summarise(measured(*sessions, repeats=3).samples, "off"))
    assert (found.prompt, found.best, found.ratio) == ("p", "2", pytest.approx(0.95))
    assert render.contest(found) == "auto on p: 0.95x the fastest other arm (2)"


def drafting(*drafts: tuple[int, int]) -> SpeculationReport:
    """A report whose head carried and had accepted these by position."""
    accepted, carried = sum(hits for _, hits in drafts), sum(number for number, _ in drafts)
    return SpeculationReport(
        engine="qwen38", tokens=10 + accepted, forwards=10, lookup=None, gate_on=True, fixed_depth=2, wiring="b",
        mtp=SourceReport("mtp", drafts[0][0], carried, carried, accepted, accepted, by_position=drafts),
        gate=None, mtp_force=None, lookup_force=None, ended_mid_verify=False, expert_bytes=0, rejected_rows=0,
        rejected_bytes=0, vocabulary=None,
    )  # fmt: skip


def test_counts_are_summed_before_they_are_divided() -> None:
    clock = Clock()
    arm, off = Scripted(clock, "2", 1.0), Scripted(clock, "off", 1.0)
    arm.forwards, off.forwards = ((2, 0.6), (3, 0.75)) * 5, ((1, 0.5),) * 10
    seen = iter([drafting((9, 0)), drafting((10, 9), (10, 4)), drafting((30, 15), (10, 8))])
    arm.during = lambda: setattr(arm, "speculation", next(seen))  # the first is the warm-up's
    rows = rows_of(off, arm, repeats=2)
    row = rows["2"]
    assert row.acceptance == {"mtp": (24 / 40, 12 / 20)} and row.rows == (RowTime(2, 1.2, 10), RowTime(3, 1.5, 10))
    assert row.tokens_per_forward == (20 + 36) / 20 and row.bytes_per_token == 1000 / len(ANSWER)
    shown = render.cells(row)
    assert shown["hits, %"] == "mtp 60 60" and shown["T(n) / T(1)"] == "2:1.20 3:1.50"
    assert shown["tokens / forward"] == "2.80" and shown["read / token"] == "250 B"
    assert rows["off"].tokens_per_forward == 1.0 and rows["off"].acceptance == {} and rows["off"].rows == ()


def test_forwards_of_n_rows_cost_their_median_over_the_median_plain_step() -> None:
    mine = [(2, 1.0), (2, 1.2), (2, 9.0), (4, 3.0), (1, 77.0)]
    assert row_times(mine, [(1, 0.5), (1, 0.4), (1, 5.0), (2, 1.0)]) == (
        RowTime(2, 2.4, 3), RowTime(4, 6.0, 1)
    )  # fmt: skip
    assert row_times(mine, [(2, 1.0)]) == ()


def test_the_median_of_an_even_count_is_the_middle() -> None:
    got = spread([1.0, 2.0, 3.0, 4.0])
    assert got is not None and got.median == statistics.median([1.0, 2.0, 3.0, 4.0]) == 2.5 and got.quarter == 1.75


# ---- forms -----------------------------------------------------------------------------------------------------------


def some_rows() -> list[Row]:
    clock = Clock()
    sessions = [Scripted(clock, "off", 10.0), Scripted(clock, "2", 15.0, speculation=drafting((10, 5)))]
    return summarise(measured(*sessions, repeats=2, prompts=("p", "q")).samples, "off")


def test_csv_reads_back() -> None:
    rows = some_rows()
    back = list(DictReader(render.comma_separated([render.flat(row) for row in rows]).splitlines()))
    assert [(row["prompt"], row["arm"]) for row in back] == [("p", "off"), ("p", "2"), ("q", "off"), ("q", "2")]
    assert float(back[1]["tok_s_median"]) == 15.0 and float(back[1]["ratio_median"]) == 1.5
    assert back[1]["same_output"] == "1" and back[1]["mtp_acceptance"] == "0.5000" and back[0]["rows"] == ""


def test_numbers_in_json_are_short_and_the_rest_is_untouched() -> None:
    line = render.json_lines([{"a": [1 / 3, 10**7], "b": {"c": (123456789.0, None, True, "x")}}])
    assert line == '{"a": [0.333333, 10000000], "b": {"c": [123457000.0, null, true, "x"]}}'


def test_a_time_of_few_forwards_is_left_out_of_the_table() -> None:
    row = some_rows()[1]
    few, enough = RowTime(2, 1.25, render.ENOUGH - 1), RowTime(3, 1.5, render.ENOUGH)
    assert render.cells(replace(row, rows=(few, enough)))["T(n) / T(1)"] == "3:1.50"
    assert render.record(replace(row, rows=(few,)))["rows"] == [{"rows": 2, "ratio": 1.25, "forwards": 4}]


def test_markdown_has_a_cell_a_column_and_escapes_bars() -> None:
    lines = render.markdown([{"a": "x|y", "b": None}, {"a": 0.5, "b": 2}]).splitlines()
    assert lines == ["| a | b |", "| --- | --- |", "| x\\|y |  |", "| 0.5 | 2 |"]


def test_the_document_is_json_and_says_whether_all_went_well() -> None:
    rows = some_rows()
    value = json.loads(json.dumps(render.document(rows, contests(rows), {"cpu": "x"}, complete=True), allow_nan=False))
    assert value["same_output"] is True and value["complete"] is True and value["environment"] == {"cpu": "x"}
    assert value["rows"][1]["ratio"]["median"] == 1.5 and value["rows"][1]["samples"]["tok_s"] == [15.0, 15.0]
    assert render.cells(rows[0])["x off"] == render.NOTHING and render.cells(rows[1])["x off"] == "1.50"
    assert render.cells(rows[1])["tok/s"] == "15.0 (15.0..15.0)"


@pytest.mark.parametrize(("form", "magic"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_picture(form: str, magic: bytes) -> None:
    data = figure.draw(some_rows(), "title", form)
    assert data.startswith(magic) and len(data) > 1000
    assert len(figure.draw([], "nothing was measured", form)) > 1000


def test_what_the_picture_needs_is_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    figure.check(Path("a.SVG"))
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        figure.check(Path("a.gif"))
    monkeypatch.setattr(figure, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install .*coli\[plot\]"):
        figure.check(Path("a.svg"))
