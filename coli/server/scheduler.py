"""Who computes next: a bounded queue in front of a few slots, and the one thread that runs the model.

    event loop                                   engine thread ("coli-engine")
    submit() -> Job ──> waiting (FIFO) ──> slot: a Session of its own ──> one next() of each running turn, in turn
    job.started(), job.batches()  <──────────────  steps in a deque, and a bell when the reader sleeps

Everything that touches a session, and every call of the observer, happens on the engine thread. Others only leave word
under the lock (a job has arrived, a job shall end, the scheduler closes), and the thread reads it before every step: so
whatever is asked for is done within one forward, and no turn can be cancelled by a word that was meant for the one
before it. An idle thread sleeps until there is word. Nobody waits while nothing runs, so the queue's timeout needs no
clock of its own: it is looked at between steps.

Invariants (tests/server/test_scheduler.py): every job ends exactly once, with a report if its turn began; the observer
hears queued, started, ended of a job in this order; during a step no job waits beside a free slot for longer than it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from coli.engine import Engine
from coli.server.job import Bell, Busy, Draining, Job, QueueTimeout
from coli.server.observers import Observer
from coli.session import Request, Session, Step

LONGEST_RETRY = 120  # seconds that Busy asks a client to wait, at most
NEWEST = 0.2  # weight of the latest turn in the average of what turns take


@dataclass(eq=False)
class _Slot:
    number: int
    session: Session
    used: float = 0.0  # when its last turn ended
    turn: Generator[Step, None, None] | None = None  # under way, once its first step was asked for

    def rank(self, request: Request) -> tuple[int, bool, float]:
        """The smallest suits `request` best: most of its prompt is there, no pin is at stake, longest unused."""
        return -self.session.reusable(request.prompt_ids), self.session.prefixes.pinned > 0, self.used


class Scheduler:
    """Runs jobs on `slots` sessions. `start` it before or after jobs come, `close` it in the end."""

    def __init__(self, engine: Engine, *, slots: int = 1, max_queue: int = 8, queue_timeout: float = 300.0,
                 checkpoints: int = 4, pins: int = 2, observe: Observer) -> None:  # fmt: skip
        self.slots, self.max_queue, self.queue_timeout = slots, max_queue, queue_timeout
        self._engine, self._observe = engine, observe
        self._all = [
            _Slot(number, Session(engine, trace=self._forward, checkpoints=checkpoints, pins=pins))
            for number in range(slots)
        ]
        self._faulty: set[str] = set()  # events that the observer failed on
        self._thread: threading.Thread | None = None
        self._turn_s = 1.0  # a running average of what turns take
        self._running: deque[Job] = deque()  # the next to take a step first; the engine thread's own
        self._lock = threading.Condition()  # over what follows
        self._free = list(self._all)
        self._waiting: deque[Job] = deque()
        self._arrived: list[Job] = []  # of which the engine thread has not heard yet
        self._leaving: list[Job] = []  # that shall end
        self._drains: list[Bell] = []
        self._draining = self._closing = self._over = False

    # ---- any thread's side
    @property
    def sessions(self) -> list[Session]:
        """Those of all slots, to look at."""
        return [slot.session for slot in self._all]

    @property
    def running(self) -> int:
        """Slots taken."""
        return self.slots - len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def over(self) -> bool:
        """Its thread has ended: closed, or by a fault."""
        return self._over

    def start(self) -> None:
        if self._thread is not None:
            raise ValueError("the scheduler was started already")
        self._thread = threading.Thread(target=self._run, name="coli-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, id: str) -> Job:
        """A job at the end of the queue; called on the event loop that will read it. Raises Busy and Draining."""
        with self._lock:
            if self._draining:
                raise Draining()
            if len(self._waiting) - len(self._free) >= self.max_queue:  # a free slot's next job hardly waits
                raise Busy(len(self._waiting), self._retry_s())
            job = Job(request, id, self._cancel, lambda: self.running)
            self._waiting.append(job)
            self._arrived.append(job)
            self._lock.notify()
        return job

    def _retry_s(self) -> int:
        """When a slot may be free for one more, by what turns took so far."""
        seconds = self._turn_s * (len(self._waiting) + 1) / self.slots
        return min(max(1, math.ceil(seconds)), LONGEST_RETRY)

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if self._over or job.ended_at is not None:
                return
            with suppress(ValueError):  # not waiting any more
                self._waiting.remove(job)
            self._leaving.append(job)
            self._lock.notify()

    async def drain(self) -> None:
        """Take no more jobs; returns when the last one has ended."""
        bell = Bell()
        with self._lock:
            self._draining = True
            if self._over:
                return
            self._drains.append(bell)
            self._lock.notify()
        await bell.wait()

    def close(self) -> None:
        """End every job and the thread; returns when that is done."""
        with self._lock:
            self._draining = self._closing = True
            self._lock.notify()
        if self._thread is None:
            self._end_all(None)
        else:
            self._thread.join()

    # ---- the engine thread
    def _run(self) -> None:
        crash: BaseException | None = None
        try:
            while self._listen():
                if self._running:
                    self._advance(self._running[0])
        except BaseException as error:
            crash = error
            raise
        finally:
            self._end_all(crash)

    def _listen(self) -> bool:
        """Take the words left so far, sleeping until there is one or a turn runs; False when it is time to end."""
        with self._lock:
            while not (self._running or self._waiting or self._leaving or self._closing):
                self._ring_drains()
                self._lock.wait()
            if self._closing:
                return False
            arrived, self._arrived = self._arrived, []
            leaving, self._leaving = self._leaving, []
        for job in arrived:
            self._introduce(job)
        for job in leaving:
            self._end(job)
        self._fill_slots()
        for job in self._late():
            self._end(job, QueueTimeout(self.queue_timeout, self._retry_s()))
        return True

    def _ring_drains(self) -> None:
        if self._draining:
            for bell in self._drains:
                bell.ring()
            self._drains.clear()

    def _fill_slots(self) -> None:
        while True:
            with self._lock:
                if not (self._free and self._waiting):
                    return
                job = self._waiting.popleft()
            try:
                slot = min(self._free, key=lambda slot: slot.rank(job.request))
                job.cached_tokens = slot.session.reusable(job.request.prompt_ids)
            except Exception as error:
                self._end(job, error)
                continue
            with self._lock:
                self._free.remove(slot)
            job.slot, job.started_at = slot.number, time.perf_counter()
            self._running.append(job)
            self._introduce(job)
            self._tell("started", job)

    def _late(self) -> list[Job]:
        """Jobs that have waited too long; they wait no more."""
        late, now = [], time.perf_counter()
        with self._lock:
            while self._waiting and now - self._waiting[0].queued_at >= self.queue_timeout:
                late.append(self._waiting.popleft())
        return late

    def _advance(self, job: Job) -> None:
        """One step of the turn whose turn it is."""
        self._running.rotate(-1)
        assert job.slot is not None
        slot = self._all[job.slot]
        try:
            if slot.turn is None:
                slot.session.report = None
                slot.turn = slot.session.steps(job.request)
            step = next(slot.turn, None)
        except Exception as error:
            self._end(job, error)
            return
        job._accept()
        if step is None:
            self._end(job)
            return
        if step.text or step.tokens:
            job._give(step)
        now = time.perf_counter()
        for _ in step.tokens:
            job.first_at = job.first_at or now
            self._tell("token", job, now)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """The job's one end, however often it is asked for; what still runs of its turn is cancelled."""
        if job.ended_at is not None:
            return
        slot = None if job.slot is None else self._all[job.slot]
        if slot is not None and slot.turn is not None:
            try:
                slot.turn.close()
            except Exception as failed:
                error = error or failed
            job.report, slot.turn = slot.session.report, None
        job.error = error
        job.ended_at = time.perf_counter()
        if slot is not None:
            self._release(job, slot)
        self._introduce(job)
        self._tell("ended", job)
        job._finish()

    def _release(self, job: Job, slot: _Slot) -> None:
        assert job.started_at is not None and job.ended_at is not None
        slot.used = job.ended_at
        self._turn_s += NEWEST * (job.ended_at - job.started_at - self._turn_s)
        self._running.remove(job)
        with self._lock:
            self._free.append(slot)

    def _end_all(self, crash: BaseException | None) -> None:
        """The end of the thread: so it is of every job, with what killed the thread where something did."""
        with self._lock:
            self._draining = self._closing = True
            waiting, self._waiting = self._waiting, deque()
            leaving, self._leaving = self._leaving, []
        for job in [*self._running, *leaving]:
            self._end(job, crash)
        for job in waiting:
            self._end(job, crash or Draining())
        with self._lock:
            self._over = True
            self._ring_drains()

    # ---- the observer
    def _forward(self, record: Mapping[str, Any]) -> None:
        self._tell("forward", record)

    def _introduce(self, job: Job) -> None:
        """A job may get a slot or end in the round it came in, before its arrival was read."""
        if not job._known:
            job._known = True
            self._tell("queued", job)

    def _tell(self, event: str, *facts: Any) -> None:
        """An observer that fails is said to, once an event; no turn is worse for it."""
        try:
            getattr(self._observe, event)(*facts)
        except Exception as error:
            if event not in self._faulty:
                self._faulty.add(event)
                self._engine.say(f"what is counted may be wrong: {type(error).__name__} in {event}: {error}")
