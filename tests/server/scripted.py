"""Sessions that do what a test says, for tests of the scheduler: no model, and no clock.

A turn follows the script under its prompt's first id: how many tokens, where it waits for the test, what it raises.
Every `next` of every session is written down in `World.log`, so that a test can say who ran when.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from coli.logprobs import Scored
from coli.server.observers import Observer
from coli.server.scheduler import Scheduler
from coli.session import Request, Step

PATIENCE = 20.0  # seconds until a wait that should have ended fails the test


class Gate:
    """Where turns wait for the test, once a step. `reached` counts the steps that came here."""

    def __init__(self) -> None:
        self._let, self._came, self._open = threading.Semaphore(0), threading.Semaphore(0), False

    def pass_through(self) -> None:
        self._came.release()
        if not self._open:
            assert self._let.acquire(timeout=PATIENCE), "nobody opened the gate"

    def step(self, steps: int = 1) -> None:
        self._let.release(steps)

    def wait(self) -> None:
        """Until one more step is at the gate."""
        assert self._came.acquire(timeout=PATIENCE), "no turn came to the gate"

    def open(self) -> None:
        self._open = True
        self._let.release(1000)


@dataclass
class Script:
    """`chunks` of the prompt, then `tokens`, then `error`, if any. Steps pass the `gate` before they do anything."""

    tokens: int = 3
    chunks: int = 0
    gate: Gate | None = None
    error: Exception | None = None


class ScriptedSession:
    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.report: Any = None
        self.depths: dict[int, int] = {}  # reusable tokens by a prompt's first id
        self.prefixes = SimpleNamespace(pinned=0)

    def reusable(self, prompt_ids: tuple[int, ...]) -> int:
        return self.depths.get(prompt_ids[0], 0)

    def steps(self, request: Request) -> Iterator[Step]:
        name = request.prompt_ids[0]
        script, given, reason = self.world.scripts.get(name, Script()), 0, "cancelled"
        try:
            for number in range(script.chunks + script.tokens):
                if script.gate is not None:
                    script.gate.pass_through()
                self.world.log.append((self.number, name))
                assert self.world.alone.acquire(blocking=False), "two steps at once"
                self.world.alone.release()
                if number < script.chunks:
                    yield Step()
                else:
                    given += 1
                    yield Step(f"{name}.{given} ", (Scored(given),))
            if script.error is not None:
                reason = "error"
                raise script.error
            reason = "stop"
        finally:
            self.report = SimpleNamespace(finish_reason=reason, request=request, tokens=given)


class Recorder(Observer):
    """What it was told, by job, and on which threads."""

    def __init__(self) -> None:
        self.told: dict[str, list[str]] = {}
        self.threads: set[str] = set()

    def _note(self, event: str, job: Any) -> None:
        self.told.setdefault(job.id, []).append(event)
        self.threads.add(threading.current_thread().name)

    def queued(self, job: Any) -> None:
        self._note("queued", job)

    def started(self, job: Any) -> None:
        self._note("started", job)

    def token(self, job: Any, now: float) -> None:
        self._note("token", job)

    def ended(self, job: Any) -> None:
        self._note("ended", job)


@dataclass
class World:
    """An engine of scripted sessions."""

    patch: pytest.MonkeyPatch
    scripts: dict[int, Script] = field(default_factory=dict)
    log: list[tuple[int, int]] = field(default_factory=list)  # (session, prompt's first id) of every step
    sessions: list[ScriptedSession] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    alone: threading.Semaphore = field(default_factory=threading.Semaphore)
    schedulers: list[Scheduler] = field(default_factory=list)

    def session(self, engine: Any, *, trace: Any, checkpoints: int, pins: int) -> ScriptedSession:
        self.sessions.append(ScriptedSession(self, len(self.sessions)))
        return self.sessions[-1]

    def scheduler(self, *, start: bool = True, **options: Any) -> Scheduler:
        self.patch.setattr("coli.server.scheduler.Session", self.session)
        observe = options.pop("observe", self.recorder)
        made = Scheduler(SimpleNamespace(say=self.said.append), observe=observe, **options)
        self.schedulers.append(made)
        if start:
            made.start()
        return made

    def gate(self, name: int, **script: Any) -> Gate:
        """The turn of prompt `name` waits at this gate before every step."""
        gate = Gate()
        self.scripts[name] = Script(gate=gate, **script)
        return gate

    def close(self) -> None:
        for script in self.scripts.values():
            if script.gate is not None:
                script.gate.open()
        for scheduler in self.schedulers:
            scheduler.close()


def request(name: int) -> Request:
    return Request((name, 1, 2))
