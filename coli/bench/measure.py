"""The measuring loop: every arm answers every prompt, again and again, in turn.

One engine, one session an arm. A session is kept over all repeats and prompts, so its gate goes on learning as it would
in a server. For each prompt:
    warm-up    every arm once, not timed: pages, caches, slots of undo and the gate's first averages
    repeats    every arm once a repeat; each order is followed by itself backwards, then starts one arm later. Within
               two repeats every arm comes once before and once after every other, so a machine that gets slower or
               faster hits all alike
Every answer of a prompt, warm-up included, must have the same tokens whatever the arm; summary.py compares them.
Every session reports its forwards through its trace (about 1.5 us each, under every arm alike): the gate's averages
alone cannot give T(n)/T(1) for a fixed depth, which never takes a plain step.
Cancelling ends the answer under way, which is dropped; the samples before it stay.
Guarded by tests/speculation/test_bench.py (a session on a clock that drifts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from coli.report import RunReport
from coli.session import Request

WARM_UP = -1  # the repeat of a sample that is compared but not timed


class Answering(Protocol):
    """What is needed of a `coli.session.Session`."""

    report: RunReport | None

    def generate(self, request: Request) -> Iterator[str]: ...

    def cancel(self) -> None: ...


Trace = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Sample:
    """One answer. `forwards` are the (rows, seconds) of its decode forwards."""

    prompt: str
    arm: str
    repeat: int
    report: RunReport
    forwards: tuple[tuple[int, float], ...]


def order(arms: Iterable[str], repeat: int) -> list[str]:
    """The arms in the order of this repeat."""
    names = list(arms)
    start = repeat // 2 % len(names)
    turned = names[start:] + names[:start]
    return turned[::-1] if repeat % 2 else turned


class Bench:
    """Fills `samples`. `open_session(arm, trace)` makes an arm's session; `requests` go by the prompt's name."""

    def __init__(
        self, arms: Iterable[str], open_session: Callable[[str, Trace], Answering], requests: Mapping[str, Request],
        repeats: int,
    ) -> None:  # fmt: skip
        self.sessions = {arm: open_session(arm, self._trace) for arm in arms}
        self.requests, self.repeats = requests, repeats
        self.samples: list[Sample] = []
        self._forwards: list[tuple[int, float]] = []  # of the answer under way
        self._cancelled = False

    def cancel(self) -> None:
        """End the measuring soon; safe from a signal handler."""
        self._cancelled = True
        for session in self.sessions.values():
            session.cancel()

    def run(self, on_progress: Callable[[str], None]) -> None:
        """Measure until everything is measured, or cancelled. Errors of a session pass through; `samples` stay."""
        arms = len(self.sessions)
        for prompt in self.requests:
            for number, arm in enumerate(self.sessions, 1):
                on_progress(f"warming up {prompt}: {number}/{arms} arms, {arm}")
                if not self._answer(prompt, arm, WARM_UP):
                    return
            for repeat in range(self.repeats):
                for arm in order(self.sessions, repeat):
                    on_progress(f"measuring {prompt}: {repeat + 1}/{self.repeats} repeats, {arm}")
                    if not self._answer(prompt, arm, repeat):
                        return

    def _trace(self, verify: dict[str, Any]) -> None:
        self._forwards.append((verify["k"] + 1, verify["seconds"]))

    def _answer(self, prompt: str, arm: str, repeat: int) -> bool:
        """Take one sample; False when it was cancelled."""
        session = self.sessions[arm]
        self._forwards = []
        if not self._cancelled:
            for _ in session.generate(self.requests[prompt]):
                pass
        report = session.report
        if self._cancelled or report is None or report.finish_reason == "cancelled":
            return False
        self.samples.append(Sample(prompt, arm, repeat, report, tuple(self._forwards)))
        return True
