"""What a server counts, keeps and says of its turns, against the turns' own reports: nano behind a real scheduler."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.engine import Engine
from coli.errors import ColiError
from coli.planning.measured import in_use
from coli.sampling import Sampling
from coli.server.job import Cancelled, Job
from coli.server.metrics import STEP_S, TURN_S, Histogram, Metrics
from coli.server.observers import Observer, Observers
from coli.server.profile import KEPT, Profile
from coli.server.scheduler import Scheduler
from coli.server.turn_lines import TurnLines, turn_lines
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.report import SourceReport
from tests.server.scrape import Scrape, broken

# server.md section 2, and the labels of each
NAMES = {
    "requests_running": ("gauge", set()),
    "requests_waiting": ("gauge", set()),
    "request_success": ("counter", {"finished_reason"}),
    "prompt_tokens": ("counter", set()),
    "generation_tokens": ("counter", set()),
    "prefix_cache_queries": ("counter", set()),
    "prefix_cache_hits": ("counter", set()),
    "time_to_first_token_seconds": ("histogram", {"le"}),
    "inter_token_latency_seconds": ("histogram", {"le"}),
    "e2e_request_latency_seconds": ("histogram", {"le"}),
    "request_queue_time_seconds": ("histogram", {"le"}),
    "forward_seconds": ("histogram", {"rows", "le"}),
    "spec_drafts": ("counter", {"source"}),
    "spec_draft_tokens": ("counter", {"source"}),
    "spec_accepted_tokens": ("counter", {"source"}),
    "spec_accepted_by_position": ("counter", {"source", "position"}),
    "spec_declined": ("counter", {"source"}),
    "spec_probes": ("counter", {"source"}),
    "experts_hits": ("counter", set()),
    "experts_misses": ("counter", set()),
    "experts_read_bytes": ("counter", set()),
    "memory_bytes": ("gauge", {"kind"}),
}
REPEATED = "Repeat after me: one two three one two three one two three one two three one two three"


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with Engine.open(load({"model": str(nano), "threads": 2, "usage_save": False}, {})[0]) as engine:
        yield engine


class Latest(Observer):
    """When each job's latest token came."""

    def __init__(self) -> None:
        self.at: dict[Job, float] = {}

    def token(self, job: Job, now: float) -> None:
        self.at[job] = now


class Served:
    """A scheduler on an engine with everything that listens to it."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.engine, self.said = engine, list[str]()
        self.metrics, self.profile, self.latest = Metrics(engine), Profile(), Latest()
        self.scheduler = Scheduler(
            engine, observe=Observers(self.metrics, self.profile, self.latest, TurnLines(self.said.append)), **options
        )

    def scrape(self) -> Scrape:
        return Scrape.of(self.metrics.render()[0].decode())

    def run(self, *requests: Request, act: Callable[[int, list[Job]], None] = lambda number, jobs: None) -> list[Job]:
        """Submit all at once; `act` is called when one has begun to answer. The jobs, once they are over."""

        async def read(number: int, jobs: list[Job]) -> None:
            try:
                await jobs[number].started()
                act(number, jobs)
                async for _ in jobs[number].batches():
                    pass
            except ColiError as error:
                assert error is jobs[number].error or isinstance(error, Cancelled)

        async def all_of_them() -> list[Job]:
            jobs = [self.scheduler.submit(request, f"turn-{number}") for number, request in enumerate(requests)]
            self.scheduler.start()
            await asyncio.gather(*(read(number, jobs) for number in range(len(jobs))))
            return jobs

        try:
            return asyncio.run(all_of_them())
        finally:
            self.scheduler.close()


def ask(engine: Engine, text: str, **fields: Any) -> Request:
    assert engine.chat is not None
    prompt = engine.chat.render([{"role": "user", "content": text}])
    return Request(tuple(engine.tokenizer.encode(prompt)), **{"max_tokens": 40} | fields)


def requests(engine: Engine) -> list[Request]:
    """Turns of every kind of end."""
    return [
        ask(engine, REPEATED),
        ask(engine, "Tell me a short story about a fox.", max_tokens=None),
        ask(engine, "Tell me a short story about a fox.", stop=("fox",)),
        ask(engine, "Say hello.", sampling=Sampling(temperature=1.0, seed=3)),
        ask(engine, REPEATED, max_tokens=1),
        Request(()),  # refused
        ask(engine, "Tell me a short story about a fox.", stop_ids=frozenset(range(engine.geometry.vocab))),
    ]


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_the_names_are_those_that_operators_were_told(engine):
    served = Served(engine)
    served.metrics.forward(record(k=0))
    seen, ours = served.scrape(), "coli_"
    assert {name.removeprefix(ours): kind for name, kind in seen.families.items() if name.startswith(ours)} == {
        name: kind for name, (kind, _) in NAMES.items()
    }
    others = {name for name in seen.families if not name.startswith(ours)}
    assert others and all(name.startswith("process_") for name in others)
    for (name, labels), _ in seen.samples.items():
        known = [words for family, (_, words) in NAMES.items() if name.startswith(ours + family)]
        assert not name.startswith(ours) or {label for label, _ in labels} <= known[0], name


@pytest.mark.parametrize("slots", [1, 3])
def test_counters_are_the_sum_of_what_the_turns_report(engine, slots):
    served = Served(engine, slots=slots, max_queue=16)
    jobs = served.run(*requests(engine))
    seen = served.scrape()
    assert broken(seen) == []
    assert [job.error is not None for job in jobs] == [False] * 5 + [True, False]
    reports = [job.report for job in jobs if job.report is not None]
    ends = [report.finish_reason for report in reports]
    assert {"stop", "length"} <= set(ends)
    for reason in ("stop", "length"):
        assert seen("request_success_total", finished_reason=reason) == ends.count(reason)
    assert seen("request_success_total", finished_reason="error") == 1
    assert seen("request_success_total") == len(jobs)
    assert seen("prompt_tokens_total") == sum(report.prompt_tokens for report in reports)
    assert seen("prefix_cache_hits_total") == sum(report.cached_tokens for report in reports)
    assert seen("generation_tokens_total") == sum(report.completion_tokens for report in reports)
    assert seen("request_queue_time_seconds_count") == len(jobs)
    assert seen("requests_running") == seen("requests_waiting") == 0


def test_drafts_are_the_sum_of_what_the_turns_report(engine):
    served = Served(engine, slots=2, max_queue=16)
    reports = [job.report.speculation for job in served.run(*requests(engine)) if job.report is not None]
    seen = served.scrape()
    assert seen("spec_accepted_tokens_total") > 0
    assert seen("forward_seconds_count") == sum(report.forwards for report in reports)
    for source in ("mtp", "lookup"):
        mine = [getattr(report, source) for report in reports]
        for name, field in (("drafts", "verifies"), ("draft_tokens", "drafts"), ("accepted_tokens", "accepted"),
                            ("declined", "declined"), ("probes", "probes")):  # fmt: skip
            assert seen(f"spec_{name}_total", source=source) == sum(getattr(one, field) for one in mine), name
        for place in range(8):
            hits = sum(one.by_position[place][1] for one in mine if place < len(one.by_position))
            assert seen("spec_accepted_by_position_total", source=source, position=str(place + 1)) == hits


def test_a_prompt_was_read_though_a_stop_string_left_nothing_of_its_answer(engine):
    served = Served(engine)
    whole, nothing = (ask(engine, "Say hello.", stop=stop) for stop in ((), tuple("abcdefghijklmnopqrstuvwxyzHIWN")))
    jobs = served.run(whole, nothing)
    assert [job.report.completion_tokens > 0 for job in jobs if job.report is not None] == [True, False]
    seen = served.scrape()
    assert seen("prompt_tokens_total") == seen("prefix_cache_queries_total") == 2 * len(whole.prompt_ids)
    assert seen("prefix_cache_hits_total") == len(whole.prompt_ids)
    assert broken(seen) == []


def test_what_the_gate_declined_and_probed_is_counted_when_a_turn_ends(engine):
    served = Served(engine)
    for _ in range(2):
        sources = (SourceReport("mtp", declined=3, probes=1), SourceReport("lookup", declined=5, probes=2))
        report = SimpleNamespace(completion_tokens=0, finish_reason="cancelled",
                                 speculation=SimpleNamespace(sources=sources))  # fmt: skip
        served.metrics.ended(job(report=report))
    seen = served.scrape()
    assert [seen(f"spec_{name}_total", source=source) for source in ("mtp", "lookup")
            for name in ("declined", "probes")] == [6, 2, 10, 4]  # fmt: skip


def test_tokens_are_forwards_and_accepted_drafts(engine):
    """Where no turn was cut by a string or cancelled, each token but the first of a turn was fed its predecessor."""
    served = Served(engine, slots=2)
    jobs = served.run(ask(engine, REPEATED), ask(engine, "Tell me a short story about a fox."))
    seen = served.scrape()
    fed = seen("forward_seconds_count") + seen("spec_accepted_tokens_total")
    assert seen("generation_tokens_total") == fed + len(jobs)


def test_times_are_those_of_the_jobs(engine):
    served = Served(engine, slots=2, max_queue=16)
    jobs = served.run(*requests(engine))
    seen = served.scrape()
    first = [job.first_at - job.queued_at for job in jobs if job.first_at is not None]
    assert seen("time_to_first_token_seconds_count") == len(first)
    assert seen("time_to_first_token_seconds_sum") == pytest.approx(sum(first))
    between = [served.latest.at[job] - job.first_at for job in jobs if job.first_at is not None]
    assert seen("inter_token_latency_seconds_sum") == pytest.approx(sum(between))
    assert seen("e2e_request_latency_seconds_sum") == pytest.approx(sum(job.ended_at - job.queued_at for job in jobs))
    assert seen("request_queue_time_seconds_sum") == pytest.approx(sum(job.started_at - job.queued_at for job in jobs))


def test_a_cancelled_turn_leaves_no_trace_in_the_gauges(engine):
    served, acted = Served(engine, slots=1), list[Scrape]()

    def cancel(number: int, jobs: list[Job]) -> None:
        if not acted:
            acted.append(served.scrape())
            jobs[1].cancel()
            jobs[0].cancel()

    long = ask(engine, REPEATED, max_tokens=1500, stop_ids=frozenset())
    jobs = served.run(long, ask(engine, "Say hello."), ask(engine, "Say hello.", max_tokens=3), act=cancel)
    seen = served.scrape()
    assert (acted[0]("requests_running"), acted[0]("requests_waiting")) == (1, 2)
    assert jobs[0].report.finish_reason == "cancelled" and jobs[0].report.completion_tokens < 1500
    assert jobs[1].report is jobs[1].error is None and jobs[2].report.completion_tokens == 3
    assert seen("request_success_total", finished_reason="cancelled") == 2
    assert seen("requests_running") == seen("requests_waiting") == 0
    assert seen("generation_tokens_total") == sum(job.report.completion_tokens for job in jobs if job.report)
    assert broken(seen) == []


def test_memory_and_experts_are_the_engine_s_own_figures(engine):
    served = Served(engine)
    session = Session(engine)
    assert [*session.generate(ask(engine, "Say hello."))]
    served.metrics.sessions = [session]
    seen, held = served.scrape(), in_use(engine, [session])
    assert held["kv"] > 0 and held["experts"] > 0
    assert {kind: seen("memory_bytes", kind=kind) for kind in held} == held
    assert seen("memory_bytes", kind="rss") >= held["dense"]
    assert seen("experts_hits_total") == sum(store.hits for store in engine.stores) > 0
    assert seen("experts_misses_total") == sum(store.misses for store in engine.stores) > 0
    assert seen("experts_read_bytes_total") == sum(store.bytes_read for store in engine.stores) > 0


def test_a_scraper_gets_the_format_it_asks_for(engine):
    metrics = Metrics(engine)
    text, kind = metrics.render()
    assert kind.startswith("text/plain") and not text.endswith(b"# EOF\n")
    text, kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and text.endswith(b"# EOF\n")


@given(st.lists(st.floats(0, 2000) | st.sampled_from(STEP_S + TURN_S)), st.sampled_from((STEP_S, TURN_S)))
def test_a_histogram_counts_what_is_at_most_its_bounds(seconds, bounds):
    histogram = Histogram(bounds)
    for value in seconds:
        histogram.add(value)
    assert histogram.buckets() == [
        (end, sum(value <= float(end) for value in seconds)) for end, _ in histogram.buckets()
    ]
    assert [float(end) for end, _ in histogram.buckets()] == [*bounds, float("inf")]
    assert histogram.total == sum(seconds)


@pytest.mark.parametrize("spoil", [
    lambda metrics: metrics._drafts["mtp"].by_position.__setitem__(1, 9),
    lambda metrics: metrics._drafts["mtp"].__setattr__("carried", 1),
    lambda metrics: metrics._forwards.__setitem__(7, metrics._forwards[3]),
    lambda metrics: metrics.__setattr__("_cached", 1),
    lambda metrics: metrics.__setattr__("_generated", 1),
    lambda metrics: metrics._finished.__setitem__("stop", 1),
    lambda metrics: metrics._first.add(1.0),
])  # fmt: skip
def test_the_identities_can_fail(engine, spoil):
    served = Served(engine)
    served.metrics.forward(record(k=2, source="mtp", accepted=2))
    assert broken(served.scrape()) == []
    spoil(served.metrics)
    assert broken(served.scrape())


def record(**fields: Any) -> dict[str, Any]:
    """What the decoder traces of a forward."""
    return {"k": 0, "source": None, "accepted": 0, "seconds": 0.01} | fields


# ---- profile and lines -----------------------------------------------------------------------------------------------


def test_the_profile_says_where_the_time_went_and_keeps_no_text(engine):
    served = Served(engine, slots=1, max_queue=16)
    jobs = served.run(*requests(engine))
    turns = json.loads(json.dumps(served.profile.to_json(), allow_nan=False))["turns"]
    assert sorted(turn["id"] for turn in turns) == [job.id for job in jobs]
    by_id = {turn["id"]: turn for turn in turns}
    for job in jobs:
        turn, report = by_id[job.id], job.report
        assert sum(turn["phases"].values()) == pytest.approx(job.ended_at - job.queued_at)
        assert all(seconds >= 0 for seconds in turn["phases"].values())
        if report is None:
            assert turn["finish_reason"] == "error" and turn["error"] == str(job.error) and turn["drafts"] == {}
            continue
        assert (turn["prompt_tokens"], turn["cached_tokens"]) == (report.prompt_tokens, report.cached_tokens)
        assert (turn["completion_tokens"], turn["finish_reason"]) == (report.completion_tokens, report.finish_reason)
        assert turn["forwards"] == report.speculation.forwards
        assert {name: drafts["accepted"] for name, drafts in turn["drafts"].items()} == {
            source.name: source.accepted for source in report.speculation.sources
        }
    assert "fox" not in json.dumps(turns)


def test_the_profile_keeps_the_newest_turns_first():
    profile = Profile()
    for number in range(KEPT + 5):
        profile.ended(job(id=str(number)))
    assert [turn["id"] for turn in profile.to_json()["turns"]] == [str(KEPT + 4 - number) for number in range(KEPT)]


def test_phases_that_did_not_come_took_no_time():
    profile = Profile()
    profile.ended(job(ended_at=5.0, error=None))
    profile.ended(job(started_at=2.0, ended_at=5.0, error=ValueError("lost")))
    failed, cancelled = profile.to_json()["turns"]
    assert cancelled["phases"] == {"queue_s": 4.0, "prefill_s": 0.0, "decode_s": 0.0}
    assert failed["phases"] == {"queue_s": 1.0, "prefill_s": 3.0, "decode_s": 0.0}
    assert (cancelled["finish_reason"], failed["finish_reason"], failed["error"]) == ("cancelled", "error", "lost")


def test_every_turn_says_what_drafting_brought(engine):
    served = Served(engine, slots=2)
    jobs = served.run(ask(engine, REPEATED), ask(engine, "Say hello."), Request(()))
    expected = {job.id: turn_lines(job) for job in jobs}
    assert sorted(served.said) == sorted(line for lines in expected.values() for line in lines)
    for job in jobs[:2]:
        assert expected[job.id] == job.report.speculation.lines(f"turn {job.id}")
        assert expected[job.id][0].startswith(f"[qwen38 MTP] turn {job.id}: ")
    assert expected[jobs[2].id] == [f"[coli serve] turn turn-2: {jobs[2].error}"]


def test_a_turn_that_was_cancelled_while_it_waited_says_nothing():
    assert turn_lines(job()) == []


def job(**fields: Any) -> Any:
    """A job that is over without a report, as observers see it."""
    facts = dict(id="1", queued_at=1.0, started_at=None, first_at=None, ended_at=1.0, slot=None, cached_tokens=0,
                 report=None, error=None, request=Request((1, 2)))  # fmt: skip
    return Past(**facts | fields)


class Past(SimpleNamespace):
    """Equal to itself alone, as a job is."""

    __hash__, __eq__ = object.__hash__, object.__eq__


# ---- fan-out ---------------------------------------------------------------------------------------------------------


def test_each_observer_hears_what_it_wants_in_order():
    heard: list[tuple[str, str, Any]] = []

    class All(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def queued(self, job: Any) -> None:
            heard.append((self.name, "queued", job))

        def started(self, job: Any) -> None:
            heard.append((self.name, "started", job))

        def forward(self, record: Any) -> None:
            heard.append((self.name, "forward", record))

        def token(self, job: Any, now: float) -> None:
            heard.append((self.name, "token", (job, now)))

        def ended(self, job: Any) -> None:
            heard.append((self.name, "ended", job))

    class Ends(Observer):
        def ended(self, job: Any) -> None:
            heard.append(("ends", "ended", job))

    tell = Observers(All("a"), Ends(), Observers(All("b")))
    tell.queued(1)
    tell.started(2)
    tell.forward({"k": 3})
    tell.token(4, 0.5)
    tell.ended(5)
    facts = {"queued": 1, "started": 2, "forward": {"k": 3}, "token": (4, 0.5), "ended": 5}
    order = [(name, event, fact) for event, fact in facts.items() for name in ("a", "ends", "b")]
    assert heard == [row for row in order if row[0] != "ends" or row[1] == "ended"]
