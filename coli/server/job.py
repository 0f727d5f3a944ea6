"""A request on its way through the scheduler, and what the two threads that hold it leave each other.

The engine thread puts steps into a deque; one task of the event loop takes them out. Steps reach the reader as they
gather: it is woken for the first, then at most every `pace` seconds (times the turns that run: each is so much slower),
and at once for the end. A small model makes thousands of tokens a second; a wake-up and a write to a socket for each
would cost more than the model does.

No wake-up is lost: a reader says that it sleeps before it looks a last time, the engine thread looks for sleepers after
it has put a step in place. A wake-up too many only makes it look again.

A reader that goes away takes its job along: whoever is cancelled in `started` or `batches` cancels the job. Guarded by
tests/server/test_job.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from coli.errors import ColiError
from coli.report import RunReport
from coli.session import Request, Step

PACE = 0.02  # seconds between two batches


class Busy(ColiError):
    """The queue is full."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        super().__init__(f"the queue is full: {waiting} requests wait", "", f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Draining(ColiError):
    """No new job is taken: the server is about to end."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", "", "try again when it is back")


class QueueTimeout(ColiError):
    """A job waited for a slot too long."""

    def __init__(self, seconds: float, retry_after_s: int) -> None:
        super().__init__(f"no slot was free for {seconds:g} s", "", f"try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class Cancelled(ColiError):
    """Told to who reads a job that was cancelled before its turn began. One that had begun has a report instead."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled while it waited")


class Bell:
    """Wakes the one task that sleeps on it, from any thread."""

    def __init__(self) -> None:
        self._loop, self._rung = asyncio.get_running_loop(), asyncio.Event()

    def ring(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody sleeps
            self._loop.call_soon_threadsafe(self._rung.set)

    def clear(self) -> None:
        self._rung.clear()

    async def wait(self, seconds: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rung.wait()


class Job:
    """One request on its way. One task reads it: `await started()`, then `batches()`; `cancel()` is for every thread.

    Moments are perf_counter's, None until they come: `started_at` a slot was taken, `first_at` the first token was
    delivered. `cached_tokens`: prompt tokens that the slot need not read again."""

    def __init__(self, request: Request, id: str, cancel: Callable[[Job], None],
                 crowd: Callable[[], int] = lambda: 1) -> None:  # fmt: skip
        """`crowd`: turns that run now, this one too."""
        self.request, self.id = request, id
        self.queued_at = time.perf_counter()
        self.started_at: float | None = None
        self.first_at: float | None = None
        self.ended_at: float | None = None
        self.slot: int | None = None
        self.cached_tokens = 0
        self.report: RunReport | None = None  # None: it has not ended, or its turn never began
        self.error: BaseException | None = None  # being cancelled is none
        self.pace: float | None = PACE  # None: the reader waits for the end
        self._cancel, self._crowd, self._bell = cancel, crowd, Bell()
        self._steps: deque[Step] = deque()
        self._asleep = False  # the reader wants to hear of anything
        self._accepted = self._over = False
        self._known = False  # the observer has heard of it

    def cancel(self) -> None:
        """End the job: at once where it waits, within one forward where it runs. Nothing happens after its end."""
        self._cancel(self)

    # ---- the reader's side
    async def started(self) -> None:
        """Returns when the prompt was accepted: its first chunk ran. Raises what kept it from that."""
        try:
            await self._until(lambda: self._accepted or self._over)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._accepted:
            raise self.error or Cancelled()

    async def batches(self) -> AsyncIterator[list[Step]]:
        """Steps with text or tokens as they gather; then the turn has ended. Raises its error."""
        try:
            while True:
                over = self._over  # looked at first: every step before the end is there then
                batch = self._take()
                if batch:
                    yield batch
                if over:
                    break
                if batch:
                    await self._rest()
                else:
                    await self._until(lambda: bool(self._steps) or self._over)
            if self.error is not None or self.report is None:
                raise self.error or Cancelled()
        finally:
            self.cancel()

    def _take(self) -> list[Step]:
        """What has gathered; steps may come meanwhile."""
        return [self._steps.popleft() for _ in range(len(self._steps))]

    async def _until(self, ready: Callable[[], bool]) -> None:
        try:
            while True:
                self._bell.clear()
                self._asleep = True  # before the look: whatever comes behind it rings
                if ready():
                    return
                await self._bell.wait()
        finally:
            self._asleep = False

    async def _rest(self) -> None:
        """`pace` seconds for every turn that runs, or until the end."""
        self._bell.clear()
        if not self._over:
            await self._bell.wait(None if self.pace is None else self.pace * max(1, self._crowd()))

    # ---- the engine thread's side
    def _accept(self) -> None:
        if not self._accepted:
            self._accepted = True
            self._ring()

    def _give(self, step: Step) -> None:
        self._steps.append(step)
        self._ring()

    def _finish(self) -> None:
        """`report`, `error` and `ended_at` are there."""
        self._over = True
        self._bell.ring()

    def _ring(self) -> None:
        if self._asleep:
            self._asleep = False
            self._bell.ring()
