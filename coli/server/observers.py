"""What happens to the turns of a server, told to whoever wants to know: metrics, profile, report lines.

An observer overrides the events it wants. All of them come on the thread that runs the engine, between two forwards,
and are short work: a token waits for them. `Observers` hands them on to several; one that nobody wants costs an empty
loop. Guarded by tests/server/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coli.server.job import Job


class Observer:
    """Wants nothing."""

    def queued(self, job: Job) -> None:
        """It waits for a slot."""

    def started(self, job: Job) -> None:
        """It has one."""

    def forward(self, record: Mapping[str, Any]) -> None:
        """A forward of decoding is settled: the fields of `coli.trace.Record`."""

    def token(self, job: Job, now: float) -> None:
        """A token was delivered: it stands, whatever the end of the answer cuts off."""

    def ended(self, job: Job) -> None:
        """It is over, however; the last event of every job that was queued."""


_EVENTS = ("queued", "started", "forward", "token", "ended")


class Observers(Observer):
    """Tells several, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._wanted = {
            event: tuple(getattr(each, event) for each in observers
                         if getattr(type(each), event) is not getattr(Observer, event))
            for event in _EVENTS
        }  # fmt: skip
        self._token, self._forward = self._wanted["token"], self._wanted["forward"]

    def queued(self, job: Job) -> None:
        self._tell("queued", job)

    def started(self, job: Job) -> None:
        self._tell("started", job)

    def forward(self, record: Mapping[str, Any]) -> None:
        for tell in self._forward:
            tell(record)

    def token(self, job: Job, now: float) -> None:
        for tell in self._token:
            tell(job, now)

    def ended(self, job: Job) -> None:
        self._tell("ended", job)

    def _tell(self, event: str, job: Job) -> None:
        for tell in self._wanted[event]:
            tell(job)
