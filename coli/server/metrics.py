"""What a server has done, as Prometheus reads it. Names and identities: server.md section 2; base units, prefix coli_.

Idea: the thread that runs the engine counts in plain integers and lists, and a scrape, on another thread, makes
prometheus-client's families of them. One writer, so no locks: on a small model a lock and a label look-up a token would
be seen in the tokens per second. What a scrape could catch contradicting itself is not counted twice but derived: a
histogram's count from its buckets, accepted drafts from those by position.

When something counts:
  prompt_tokens, prefix_cache_*   when a turn's prompt has been read: with its first token. Queries are its tokens, hits
                                  those that a checkpoint held
  generation_tokens               when delivered, and at the end of a turn the stop token that ended it: together what
                                  all turns' `usage` says
  forward_seconds, spec_*         when a forward of decoding is settled; `rows` is 1 + drafts. declined and probes are
                                  the gate's, known when a turn ends
  request_success, e2e_*          when a turn is over, also one that never got a slot; reasons stop, length, cancelled,
                                  error

Identities (tests/server/scrape.py says them, test_metrics.py and tests/bench/serve_load.py hold them): accepted drafts
by position sum to all and never rise; verifies are the forwards of several rows; hits are among the queries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from coli import memory
from coli.planning.measured import in_use
from coli.server.observers import Observer
from coli.speculation.tally import POSITIONS
from coli.trace import SOURCES

if TYPE_CHECKING:
    from coli.engine import Engine
    from coli.server.job import Job
    from coli.session import Session

REASONS = ("stop", "length", "cancelled", "error")
# nano's tokens take 0.3 ms, those of a large model from disk a second; prompts of both, milliseconds to minutes
STEP_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TURN_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Seconds by bucket; `bounds` are the buckets' upper ends, themselves inside."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.total = tuple(bounds), 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._ends = [floatToGoString(bound) for bound in (*bounds, float("inf"))]

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, how many are at most that), in order."""
        running, out = 0, []
        for end, count in zip(self._ends, self._counts.copy(), strict=True):
            running += count
            out.append((end, float(running)))
        return out


@dataclass
class Drafts:
    """What one source's drafts came to. Positions start at 1."""

    verifies: int = 0
    carried: int = 0
    declined: int = 0
    probes: int = 0
    by_position: list[int] = field(default_factory=lambda: [0] * POSITIONS)  # accepted ones

    @property
    def accepted(self) -> int:
        return sum(self.by_position)

    def settled(self, carried: int, accepted: int) -> None:
        self.verifies += 1
        self.carried += carried
        for position in range(accepted):
            self.by_position[position] += 1

    def copy(self) -> Drafts:
        return replace(self, by_position=self.by_position.copy())


@dataclass(slots=True)
class _Delivered:
    """Tokens of a running turn, and when the last one was delivered."""

    tokens: int = 0
    at: float = 0.0


_NOTHING = _Delivered()


class Metrics(Observer, Collector):
    """Counts what it is told; `render` is the answer of /metrics. `sessions`: those whose memory is told."""

    def __init__(self, engine: Engine, registry: CollectorRegistry | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.sessions: Sequence[Session] = ()
        self._engine = engine
        self._waiting: set[Job] = set()
        self._running: dict[Job, _Delivered] = {}
        self._finished = dict.fromkeys(REASONS, 0)
        self._prompts = self._cached = self._generated = 0
        self._first, self._queue, self._whole = Histogram(TURN_S), Histogram(TURN_S), Histogram(TURN_S)
        self._between = Histogram(STEP_S)
        self._forwards: dict[int, Histogram] = {}  # by rows
        self._drafts = {source: Drafts() for source in SOURCES}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def queued(self, job: Job) -> None:
        self._waiting.add(job)

    def started(self, job: Job) -> None:
        self._waiting.discard(job)
        self._running[job] = _Delivered()
        self._queue.add(_passed(job.queued_at, job.started_at))

    def forward(self, record: Mapping[str, Any]) -> None:
        rows = 1 + record["k"]
        times = self._forwards.get(rows)
        if times is None:
            times = Histogram(STEP_S)
            self._forwards = {**self._forwards, rows: times}  # a scrape goes on with the one it has
        times.add(record["seconds"])
        if record["source"] is not None:
            self._drafts[record["source"]].settled(record["k"], record["accepted"])

    def token(self, job: Job, now: float) -> None:
        delivered = self._running[job]
        if delivered.tokens:
            self._between.add(now - delivered.at)
        else:
            self._first.add(now - job.queued_at)
            self._read(job)
        delivered.tokens += 1
        delivered.at = now
        self._generated += 1

    def ended(self, job: Job) -> None:
        self._waiting.discard(job)
        delivered = self._running.pop(job, _NOTHING).tokens
        self._finished[finish_reason(job)] += 1
        self._whole.add(_passed(job.queued_at, job.ended_at))
        if job.report is None:
            return
        self._generated += job.report.completion_tokens - delivered
        if not delivered and job.report.finish_reason in ("stop", "length"):  # nothing is left of what it picked
            self._read(job)
        if job.report.speculation is not None:
            for source in job.report.speculation.sources:
                self._drafts[source.name].declined += source.declined
                self._drafts[source.name].probes += source.probes

    def _read(self, job: Job) -> None:
        """The prompt was read."""
        self._prompts += len(job.request.prompt_ids)
        self._cached += job.cached_tokens

    # ---- what is told of it ------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(text, content type) for a scraper that sends this Accept header."""
        encode, kind = choose_encoder(accept)
        return encode(self.registry), kind

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("coli_requests_running", "Turns that hold a slot.", len(self._running))
        yield GaugeMetricFamily("coli_requests_waiting", "Turns that wait for a slot.", len(self._waiting))
        yield _counters("request_success", "Turns that are over, by what ended them.", "finished_reason",
                        self._finished)  # fmt: skip
        yield _counter("prompt_tokens", "Tokens of prompts that were read or found in a checkpoint.", self._prompts)
        yield _counter("generation_tokens", "Tokens of answers.", self._generated)
        yield _counter("prefix_cache_queries", "Tokens of prompts that a checkpoint was looked for.", self._prompts)
        yield _counter("prefix_cache_hits", "Tokens of prompts that a checkpoint held.", self._cached)
        yield _histogram("time_to_first_token", "From a turn's arrival to its first token.", self._first)
        yield _histogram("inter_token_latency", "From a token to the next of its turn.", self._between)
        yield _histogram("e2e_request_latency", "From a turn's arrival to its end.", self._whole)
        yield _histogram("request_queue_time", "From a turn's arrival to its slot.", self._queue)
        yield from self._decoding()
        yield from self._drafting()
        yield from self._memory()

    def _decoding(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("coli_forward_seconds", "A forward of decoding, by its rows: the token and its "
                                       "drafts.", labels=["rows"])  # fmt: skip
        for rows, times in sorted(self._forwards.items()):
            family.add_metric([str(rows)], times.buckets(), times.total)
        yield family

    def _drafting(self) -> Iterator[Metric]:
        now = {source: drafts.copy() for source, drafts in self._drafts.items()}
        for name, attribute, words in (
            ("drafts", "verifies", "Verifies that carried drafts."),
            ("draft_tokens", "carried", "Drafts that verifies carried."),
            ("accepted_tokens", "accepted", "Drafts that stood."),
            ("declined", "declined", "Proposals that were not worth a verify."),
            ("probes", "probes", "Verifies deeper than the best one, or out of turn, to learn."),
        ):
            values = {source: getattr(drafts, attribute) for source, drafts in now.items()}
            yield _counters(f"spec_{name}", words, "source", values)
        family = CounterMetricFamily("coli_spec_accepted_by_position", "Drafts that stood, by their place in the "
                                     "verify.", labels=["source", "position"])  # fmt: skip
        for source, drafts in now.items():
            for position, count in enumerate(drafts.by_position, 1):
                family.add_metric([source, str(position)], count)
        yield family

    def _memory(self) -> Iterator[Metric]:
        for name, attribute, words in (
            ("hits", "hits", "Experts that were in memory or on their way when a layer chose them."),
            ("misses", "misses", "Experts that had to be read first."),
            ("read_bytes", "bytes_read", "Bytes of files read for experts."),
        ):
            yield _counter(f"experts_{name}", words, sum(getattr(store, attribute) for store in self._engine.stores))
        family = GaugeMetricFamily("coli_memory_bytes", "Memory held, by what for; rss is all of the process's.",
                                   labels=["kind"])  # fmt: skip
        for kind, nbytes in {"rss": memory.resident(), **in_use(self._engine, self.sessions)}.items():
            family.add_metric([kind], nbytes)
        yield family


def finish_reason(job: Job) -> str:
    """What ended a job that is over: one of REASONS."""
    if job.error is not None:
        return "error"
    return "cancelled" if job.report is None else job.report.finish_reason


def _passed(start: float, end: float | None) -> float:
    return 0.0 if end is None else end - start


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(f"coli_{name}", words, value)


def _counters(name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"coli_{name}", words, labels=[label])
    for which, value in values.items():
        family.add_metric([which], value)
    return family


def _histogram(name: str, words: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(f"coli_{name}_seconds", words, histogram.buckets(), histogram.total)
