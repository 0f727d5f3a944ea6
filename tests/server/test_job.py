"""What reaches a job's reader, and how often it is woken for it; no scheduler, no model."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from coli.logprobs import Scored
from coli.server import job as jobs
from coli.server.job import Cancelled, Job
from coli.session import Request, Step

STEPS = 20_000


def new_job() -> tuple[Job, list[Job]]:
    cancelled: list[Job] = []
    return Job(Request((1,)), "a", cancelled.append), cancelled


def step(number: int) -> Step:
    return Step(f"{number} ", (Scored(number),))


def end(job: Job, error: Exception | None = None) -> None:
    job.report, job.error = SimpleNamespace(finish_reason="stop"), error
    job._finish()


def bounded(main: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await main()

    asyncio.run(within())


def test_a_reader_rests_between_batches_and_hears_of_the_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PACE", 3600.0)

    async def main() -> None:
        job, _ = new_job()
        batches = job.batches()
        first = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)
        job._accept()
        job._give(step(1))
        assert await first == [step(1)]

        rings = []
        monkeypatch.setattr(job._bell, "ring", lambda ring=job._bell.ring: (rings.append(1), ring()))
        second = asyncio.create_task(anext(batches))
        await asyncio.sleep(0)
        for number in range(2, 1000):
            job._give(step(number))
        assert not rings  # a resting reader is left alone
        await asyncio.sleep(0.02)
        assert not second.done()
        end(job)
        assert await second == [step(number) for number in range(2, 1000)]
        assert len(rings) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    bounded(main)


def test_a_sleeping_reader_is_woken_once_for_many_steps() -> None:
    async def main() -> None:
        job, _ = new_job()
        rings = []
        ring = job._bell.ring
        job._bell.ring = lambda: (rings.append(1), ring())  # type: ignore[method-assign,assignment]
        first = asyncio.create_task(anext(job.batches()))
        await asyncio.sleep(0)
        for number in range(100):
            job._give(step(number))
        assert await first == [step(number) for number in range(100)] and len(rings) == 1

    bounded(main)


@pytest.mark.parametrize("pace", [0.0, 0.0003])
def test_nothing_is_lost_between_two_threads(monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
    """A wake-up that got lost would leave the reader asleep with steps before it."""
    monkeypatch.setattr(jobs, "PACE", pace)

    async def main() -> None:
        job, _ = new_job()

        def give() -> None:
            job._accept()
            for number in range(STEPS):
                job._give(step(number))
            end(job)

        engine = threading.Thread(target=give)
        engine.start()
        await job.started()
        got = [one.tokens[0].id async for batch in job.batches() for one in batch]
        engine.join()
        assert got == list(range(STEPS))

    bounded(main)


def test_every_hand_over_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step at a time, the next only when the last one has come: no step after it would make up for a lost ring."""
    monkeypatch.setattr(jobs, "PACE", 0.0)

    async def main() -> None:
        job, _ = new_job()
        taken = threading.Semaphore(1)

        def give() -> None:
            for number in range(300):
                assert taken.acquire(timeout=20)
                job._give(step(number))
            end(job)

        engine = threading.Thread(target=give)
        engine.start()
        count = 0
        async for batch in job.batches():
            count += len(batch)
            taken.release()
        engine.join()
        assert count == 300

    bounded(main)


def test_the_end_behind_steps() -> None:
    """Steps come before the error that ended the turn; both may be there before anyone looks."""

    async def main() -> None:
        job, cancelled = new_job()
        job._give(step(1))
        end(job, ValueError("a bug"))
        batches = job.batches()
        assert await anext(batches) == [step(1)]
        with pytest.raises(ValueError):
            await anext(batches)
        assert cancelled == [job]  # the scheduler knows that it has ended

    bounded(main)


def test_started_tells_why_not() -> None:
    async def main() -> None:
        job, _ = new_job()
        job._finish()  # neither report nor error: cancelled while it waited
        with pytest.raises(Cancelled):
            await job.started()
        failed, _ = new_job()
        end(failed, ValueError("a bug"))
        with pytest.raises(ValueError):
            await failed.started()
        accepted, _ = new_job()
        accepted._accept()
        end(accepted, ValueError("later"))
        await accepted.started()  # what came later is for `batches` to say

    bounded(main)


def test_a_cancelled_reader_cancels_the_job() -> None:
    async def main() -> None:
        for wait in (lambda job: job.started(), lambda job: anext(job.batches())):
            job, cancelled = new_job()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await wait(job)
            assert cancelled == [job]

    bounded(main)
