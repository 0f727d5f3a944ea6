"""The last turns of a server: where their time went and what drafting brought; the answer of /profile.

Idea: a turn that ended becomes one frozen record of numbers, and a ring keeps the newest; nothing of a conversation is
kept, neither text nor tokens. Seconds are wall time: with several slots a turn's decode holds the others' forwards too.
Guarded by tests/server/test_metrics.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from coli.report import rate
from coli.server.metrics import finish_reason
from coli.server.observers import Observer

if TYPE_CHECKING:
    from coli.server.job import Job
    from coli.speculation.report import SourceReport, SpeculationReport

KEPT = 64  # turns


@dataclass(frozen=True)
class Phases:
    """Seconds a turn waited for a slot, read its prompt, and answered after the first token."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class Turn:
    """One turn. `forwards` of decoding brought the tokens after the first; `drafts` has a row for every source that
    was on; `error` is None where nothing went wrong; `slot` where it never got one."""

    id: str
    slot: int | None
    finish_reason: str
    error: str | None
    phases: Phases
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    forwards: int
    decode_tok_s: float
    ended_mid_verify: bool
    drafts: dict[str, dict[str, int]]

    @classmethod
    def of(cls, job: Job) -> Turn:
        report = job.report
        speculation = None if report is None else report.speculation
        tokens = 0 if report is None else report.completion_tokens
        phases = _phases(job)
        return cls(
            id=job.id, slot=job.slot, finish_reason=finish_reason(job),
            error=None if job.error is None else str(job.error), phases=phases,
            prompt_tokens=len(job.request.prompt_ids), cached_tokens=job.cached_tokens, completion_tokens=tokens,
            forwards=max(0, tokens - 1) if speculation is None else speculation.forwards,
            decode_tok_s=rate(max(0, tokens - 1), phases.decode_s),
            ended_mid_verify=speculation is not None and speculation.ended_mid_verify, drafts=_drafts(speculation),
        )  # fmt: skip


def _phases(job: Job) -> Phases:
    """A phase that did not come took no time; one that was cut short ends with the turn."""
    end = job.queued_at if job.ended_at is None else job.ended_at
    started = end if job.started_at is None else job.started_at
    first = end if job.first_at is None else job.first_at
    return Phases(started - job.queued_at, first - started, end - first)


def _drafts(speculation: SpeculationReport | None) -> dict[str, dict[str, int]]:
    return {} if speculation is None else {source.name: _source(source) for source in speculation.sources}


def _source(source: SourceReport) -> dict[str, int]:
    fields = ("verifies", "drafts", "accepted", "declined", "probes")
    return {name: getattr(source, name) for name in fields}


class Profile(Observer):
    """Keeps the last turns."""

    def __init__(self, kept: int = KEPT) -> None:
        self._turns: deque[Turn] = deque(maxlen=kept)

    def ended(self, job: Job) -> None:
        self._turns.append(Turn.of(job))

    def to_json(self) -> dict[str, Any]:
        """The document of /profile, the newest turn first."""
        return {"turns": [asdict(turn) for turn in reversed(self._turns.copy())]}
