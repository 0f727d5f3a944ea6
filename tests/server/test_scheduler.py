"""The scheduler: order, limits, and one clean end for every job, whatever happens when (tests/server/scripted.py)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from coli.errors import ReadError
from coli.server.job import Cancelled, Job
from coli.server.scheduler import LONGEST_RETRY, Busy, Draining, QueueTimeout, Scheduler
from coli.session import Step
from tests.server.scripted import PATIENCE, Gate, Recorder, Script, World, request


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(monkeypatch)
    yield world
    world.close()


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await main()

    return asyncio.run(bounded())


async def read(job: Job) -> str:
    """The whole answer."""
    steps = [step async for batch in job.batches() for step in batch]
    assert all(step.text or step.tokens for step in steps)
    return "".join(step.text for step in steps)


async def off_loop(wait: Callable[[], Any]) -> Any:
    """`wait` blocks: on a thread, so that the loop goes on."""
    return await asyncio.to_thread(wait)


async def settle(scheduler: Scheduler, free: int) -> None:
    """Until so many slots are free and the engine thread has read every word."""
    while scheduler.slots - scheduler.running != free or scheduler._leaving or scheduler._arrived:
        await asyncio.sleep(0.001)


def told(world: World, name: str) -> list[str]:
    return [event for event in world.recorder.told.get(name, []) if event != "token"]


# ---- a turn ----------------------------------------------------------------------------------------------------------


def test_a_turn_from_queue_to_report(world: World) -> None:
    world.scripts[7] = Script(tokens=4, chunks=2)

    async def main() -> Job:
        job = world.scheduler().submit(request(7), "a")
        await job.started()
        assert await read(job) == "7.1 7.2 7.3 7.4 "
        return job

    job = run(main)
    assert job.report.finish_reason == "stop" and job.error is None and job.slot == 0
    moments = [job.queued_at, job.started_at, job.first_at, job.ended_at]
    assert moments == sorted(moments)
    assert world.recorder.told == {"a": ["queued", "started", *["token"] * 4, "ended"]}
    assert world.recorder.threads == {"coli-engine"}


def test_started_comes_with_the_first_chunk_of_the_prompt(world: World) -> None:
    gate = world.gate(1, chunks=3)

    async def main() -> None:
        job = world.scheduler().submit(request(1), "a")
        waiting = asyncio.create_task(job.started())
        await off_loop(gate.wait)
        assert not waiting.done()
        gate.step()
        await waiting
        assert job.first_at is None
        gate.open()
        assert await read(job) == "1.1 1.2 1.3 "

    run(main)


def test_slots_take_steps_in_turn(world: World) -> None:
    gate = world.gate(1, tokens=3)
    world.scripts |= {2: Script(tokens=3), 3: Script(tokens=3)}

    async def main() -> None:
        scheduler = world.scheduler(slots=3)
        jobs = [scheduler.submit(request(name), str(name)) for name in (1, 2, 3)]
        gate.open()
        assert await asyncio.gather(*map(read, jobs)) == [f"{n}.1 {n}.2 {n}.3 " for n in (1, 2, 3)]

    run(main)
    order = [name for _, name in world.log]
    assert order[-6:] == [1, 2, 3, 1, 2, 3] or order == [1, 2, 3] * 3


def test_the_queue_is_first_in_first_out(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(start=False, max_queue=20)
        jobs = [scheduler.submit(request(name), str(name)) for name in range(9)]
        assert (scheduler.running, scheduler.waiting) == (0, 9)
        scheduler.start()
        await asyncio.gather(*map(read, jobs))

    run(main)
    assert [name for _, name in world.log] == [name for name in range(9) for _ in range(3)]


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_busy_counts_jobs_that_would_wait(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(start=False, slots=2, max_queue=3)
        jobs = [scheduler.submit(request(name), str(name)) for name in range(5)]
        with pytest.raises(Busy) as refused:
            scheduler.submit(request(9), "no")
        assert 1 <= refused.value.retry_after_s <= LONGEST_RETRY
        jobs[3].cancel()
        jobs.append(scheduler.submit(request(5), "5"))
        with pytest.raises(Busy):
            scheduler.submit(request(9), "no")
        scheduler.start()
        answers = await asyncio.gather(*map(read, jobs), return_exceptions=True)
        assert isinstance(answers.pop(3), Cancelled) and all(map(str.strip, answers))

    run(main)
    assert "no" not in world.recorder.told


def test_no_queue_at_all(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(start=False, max_queue=0)
        job = scheduler.submit(request(1), "a")
        with pytest.raises(Busy):
            scheduler.submit(request(2), "b")
        scheduler.start()
        await read(job)

    run(main)


def test_retry_after_follows_what_turns_take(world: World) -> None:
    scheduler = world.scheduler(slots=2)
    scheduler._turn_s = 7.0
    assert scheduler._retry_s() == 4
    scheduler._turn_s = 1e6
    assert scheduler._retry_s() == LONGEST_RETRY


def test_queue_timeout(world: World) -> None:
    gate = world.gate(1, tokens=5)

    async def main() -> None:
        scheduler = world.scheduler(queue_timeout=300)
        first = scheduler.submit(request(1), "first")
        await off_loop(gate.wait)
        late, later = (scheduler.submit(request(name), str(name)) for name in (2, 3))
        late.queued_at -= 300
        gate.step()
        with pytest.raises(QueueTimeout, match="no slot was free for 300 s"):
            await late.started()
        with pytest.raises(QueueTimeout):
            await read(late)
        assert late.report is None and late.slot is None
        gate.open()
        assert len(await read(first)) == 5 * 4 and await read(later) == "3.1 3.2 3.3 "

    run(main)
    assert told(world, "2") == ["queued", "ended"]


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_cancel_in_the_queue(world: World) -> None:
    gate = world.gate(1)

    async def main() -> None:
        scheduler = world.scheduler()
        first, gone = (scheduler.submit(request(name), str(name)) for name in (1, 2))
        await off_loop(gate.wait)
        assert scheduler.waiting == 1
        gone.cancel()
        gone.cancel()
        assert scheduler.waiting == 0  # at once, a forward is under way
        gate.open()
        with pytest.raises(Cancelled):
            await gone.started()
        with pytest.raises(Cancelled):
            await read(gone)
        assert gone.report is None and gone.error is None
        await read(first)

    run(main)
    assert told(world, "2") == ["queued", "ended"] and (0, 2) not in world.log


@pytest.mark.parametrize("chunks", [0, 4], ids=["decode", "prefill"])
def test_cancel_while_running_ends_within_one_forward(world: World, chunks: int) -> None:
    gate, other = world.gate(1, tokens=9, chunks=chunks), world.gate(2, tokens=9)

    async def main() -> None:
        scheduler = world.scheduler(slots=2)
        job, beside = (scheduler.submit(request(name), str(name)) for name in (1, 2))
        await off_loop(gate.wait)
        gate.step()
        await off_loop(other.wait)
        job.cancel()  # while the other's forward runs: there is none of this one's after it
        other.step()
        await settle(scheduler, free=1)
        assert world.log.count((job.slot, 1)) == 1
        assert job.report.finish_reason == "cancelled" and job.error is None
        assert await read(job) == "" if chunks else "1.1 "
        other.open()
        await read(beside)

    run(main)
    assert told(world, "1") == ["queued", "started", "ended"]


def test_cancel_during_its_own_forward(world: World) -> None:
    gate = world.gate(1, tokens=9)

    async def main() -> None:
        scheduler = world.scheduler()
        job = scheduler.submit(request(1), "a")
        await off_loop(gate.wait)
        threading.Thread(target=job.cancel).start()
        while not scheduler._leaving:
            await asyncio.sleep(0.001)
        gate.step()
        assert await read(job) == "1.1 "
        assert job.report.finish_reason == "cancelled" and len(world.log) == 1

    run(main)


def test_cancel_between_slot_and_first_step_leaves_no_report_of_another(world: World) -> None:
    gate = world.gate(1)

    async def main() -> None:
        scheduler = world.scheduler(slots=2)
        await asyncio.gather(*(read(scheduler.submit(request(name), str(name))) for name in (8, 9)))
        running = scheduler.submit(request(1), "1")
        await off_loop(gate.wait)
        job = scheduler.submit(request(2), "2")
        gate.step()
        await off_loop(gate.wait)
        assert job.slot is not None and (job.slot, 2) not in world.log
        job.cancel()
        gate.open()
        with pytest.raises(Cancelled):
            await read(job)
        assert job.report is None
        await read(running)

    run(main)
    assert told(world, "2") == ["queued", "started", "ended"]


def test_a_turn_that_fails_before_it_begins_has_no_report(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler()
        await read(scheduler.submit(request(1), "1"))
        world.patch.setattr(world.sessions[0], "steps", lambda request: 1 // 0)
        job = scheduler.submit(request(2), "2")
        with pytest.raises(ZeroDivisionError):
            await job.started()
        assert job.report is None and scheduler.running == 0

    run(main)


def test_a_late_cancel_does_not_reach_the_next_turn(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler()
        for name in range(1, 50):
            job = scheduler.submit(request(name), str(name))
            assert await read(job) == f"{name}.1 {name}.2 {name}.3 "
            job.cancel()

    run(main)


@pytest.mark.parametrize("stage", ["queued", "running"])
def test_a_reader_that_is_cancelled_cancels_its_job(world: World, stage: str) -> None:
    gate = world.gate(1, tokens=9)

    async def main() -> None:
        scheduler = world.scheduler()
        first, second = (scheduler.submit(request(name), str(name)) for name in (1, 2))
        await off_loop(gate.wait)
        job = first if stage == "running" else second
        reader = asyncio.create_task(second.started() if stage == "queued" else read(first))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gate.step()
        if stage == "running":
            assert await read(second) == "2.1 2.2 2.3 "
            assert job.report.finish_reason == "cancelled"
        else:
            gate.open()
            assert len(await read(first)) == 36
            assert job.report is None and job.ended_at is not None

    run(main)


def test_a_reader_that_stops_reading_cancels_its_job(world: World) -> None:
    gate = world.gate(1, tokens=9)

    async def main() -> None:
        scheduler = world.scheduler()
        job = scheduler.submit(request(1), "a")
        gate.step()
        batches = job.batches()
        assert len(await anext(batches)) == 1
        await batches.aclose()
        gate.step()
        await settle(scheduler, free=1)
        assert job.report.finish_reason == "cancelled"

    run(main)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ReadError("no disk", "layer 3"), ZeroDivisionError("a bug")], ids=repr)
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_turn_that_raises_ends_alone(world: World, error: Exception, tokens: int) -> None:
    world.scripts[1] = Script(tokens=tokens, error=error)

    async def main() -> None:
        scheduler = world.scheduler(slots=2)
        bad, good = (scheduler.submit(request(name), str(name)) for name in (1, 2))
        if tokens:
            await bad.started()
            got: list[Step] = []
            with pytest.raises(type(error)):
                async for batch in bad.batches():
                    got += batch
            assert "".join(step.text for step in got) == "1.1 1.2 "
        else:
            with pytest.raises(type(error)):
                await bad.started()
        assert bad.error is error and bad.report.finish_reason == "error"
        assert await read(good) == "2.1 2.2 2.3 "
        assert await read(scheduler.submit(request(3), "3")) == "3.1 3.2 3.3 "

    run(main)
    assert told(world, "1") == ["queued", "started", "ended"]


def test_an_observer_that_fails_harms_no_turn(world: World) -> None:
    class Faulty(Recorder):
        def token(self, job: Any, now: float) -> None:
            raise KeyError("cake")

        def ended(self, job: Any) -> None:
            raise OSError("full")

    async def main() -> None:
        scheduler = world.scheduler(observe=Faulty())
        for name in (1, 2):
            assert await read(scheduler.submit(request(name), str(name))) == f"{name}.1 {name}.2 {name}.3 "

    run(main)
    assert world.said == ["what is counted may be wrong: KeyError in token: 'cake'",
                          "what is counted may be wrong: OSError in ended: full"]  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_thread_itself_leaves_nobody_waiting(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(start=False)
        jobs = [scheduler.submit(request(name), str(name)) for name in (1, 2)]
        world.patch.setattr(scheduler, "_advance", lambda job: 1 // 0)
        scheduler.start()
        for job in jobs:
            with pytest.raises(ZeroDivisionError):
                await job.started()
        with pytest.raises(Draining):
            scheduler.submit(request(3), "3")
        await scheduler.drain()

    run(main)
    assert told(world, "1") == ["queued", "started", "ended"] and told(world, "2") == ["queued", "ended"]


# ---- drain and close -------------------------------------------------------------------------------------------------


def test_drain_waits_for_running_and_queued(world: World) -> None:
    gate = world.gate(1)

    async def main() -> None:
        scheduler = world.scheduler()
        jobs = [scheduler.submit(request(name), str(name)) for name in (1, 2, 3)]
        readers = asyncio.gather(*map(read, jobs))
        draining = [asyncio.create_task(scheduler.drain()) for _ in range(2)]
        await off_loop(gate.wait)
        with pytest.raises(Draining):
            scheduler.submit(request(4), "4")
        assert not any(task.done() for task in draining)
        gate.open()
        await asyncio.gather(*draining)
        assert all(job.report.finish_reason == "stop" for job in jobs)
        assert [len(text) for text in await readers] == [12, 12, 12]
        await scheduler.drain()  # nothing left: at once
        scheduler.close()
        await scheduler.drain()

    run(main)


def test_a_drain_ends_when_the_last_job_is_cancelled(world: World) -> None:
    gate = world.gate(1)

    async def main() -> None:
        scheduler = world.scheduler()
        job = scheduler.submit(request(1), "1")
        await off_loop(gate.wait)
        draining = asyncio.create_task(scheduler.drain())
        job.cancel()
        gate.step()
        await draining

    run(main)


def test_close_ends_everything(world: World) -> None:
    gate = world.gate(1, tokens=100)

    async def main() -> None:
        scheduler = world.scheduler()
        running, waiting = (scheduler.submit(request(name), str(name)) for name in (1, 2))
        await off_loop(gate.wait)
        draining = asyncio.create_task(scheduler.drain())
        closing = asyncio.create_task(off_loop(scheduler.close))
        while not scheduler._closing:
            await asyncio.sleep(0.001)
        gate.step()
        await closing
        await draining
        assert await read(running) == "1.1 "
        assert running.report.finish_reason == "cancelled"
        with pytest.raises(Draining):
            await read(waiting)
        assert scheduler._thread is not None and not scheduler._thread.is_alive()
        with pytest.raises(Draining):
            scheduler.submit(request(3), "3")
        running.cancel()
        scheduler.close()

    run(main)
    assert told(world, "2") == ["queued", "ended"]


def test_close_without_a_start(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(start=False)
        job = scheduler.submit(request(1), "1")
        scheduler.close()
        with pytest.raises(Draining):
            await read(job)

    run(main)


def test_a_second_start_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="started already"):
        world.scheduler().start()


def test_a_reader_whose_loop_is_gone_stops_nobody(world: World) -> None:
    gate = world.gate(1)
    scheduler = world.scheduler()

    async def leave() -> Job:
        job = scheduler.submit(request(1), "1")
        await off_loop(gate.wait)
        return job

    job = run(leave)
    gate.open()

    async def come() -> str:
        return await read(scheduler.submit(request(2), "2"))

    assert run(come) == "2.1 2.2 2.3 " and job.report.finish_reason == "stop"


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_the_slot_that_holds_most_of_the_prompt(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(slots=3)
        world.sessions[1].depths, world.sessions[2].depths = {5: 2}, {5: 1}
        job = scheduler.submit(request(5), "a")
        await read(job)
        assert (job.slot, job.cached_tokens) == (1, 2)

    run(main)


def test_ties_go_to_slots_without_pins_and_then_to_the_longest_unused(world: World) -> None:
    async def main() -> None:
        scheduler = world.scheduler(slots=3)
        order = []
        world.sessions[0].prefixes.pinned = 1
        for name in range(4):
            job = scheduler.submit(request(name), str(name))
            await read(job)
            order.append(job.slot)
        assert order == [1, 2, 1, 2]

    run(main)


def test_only_free_slots_are_taken(world: World) -> None:
    gate = world.gate(1)

    async def main() -> None:
        scheduler = world.scheduler(slots=2)
        world.sessions[0].depths = {1: 3, 2: 3}
        first = scheduler.submit(request(1), "1")
        await off_loop(gate.wait)
        second = scheduler.submit(request(2), "2")
        gate.open()
        await read(second)
        assert (first.slot, second.slot, second.cached_tokens) == (0, 1, 0)
        await read(first)

    run(main)


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_of_cancels_errors_and_full_queues(world: World, seed: int) -> None:
    """Readers that stay, leave and cancel, from the loop and from other threads, at any moment."""
    dice, outcomes, timers = random.Random(seed), [], []
    for name in range(200):
        error = dice.choice([None, None, None, ReadError("no disk"), ValueError("a bug")])
        world.scripts[name] = Script(tokens=dice.choice([1, 5, 1000]), chunks=dice.randrange(3), error=error)

    async def one(scheduler: Scheduler, name: int) -> None:
        await asyncio.sleep(dice.random() * 0.1)
        try:
            job = scheduler.submit(request(name), str(name))
        except Busy:
            return
        outcomes.append(job)
        way = dice.choice(["stay", "stay", "timer", "thread", "abandon"])
        if way == "timer":
            asyncio.get_running_loop().call_later(dice.random() * 0.02, job.cancel)
        elif way == "thread":
            timers.append(threading.Timer(dice.random() * 0.02, job.cancel))
            timers[-1].start()
        elif way == "abandon":
            asyncio.get_running_loop().call_later(dice.random() * 0.02, asyncio.current_task().cancel)
        try:
            await job.started()
            text = await read(job)
            script = world.scripts[name]
            if job.report.finish_reason == "stop":
                assert text == "".join(f"{name}.{at} " for at in range(1, script.tokens + 1))
        except (Cancelled, ReadError, ValueError, asyncio.CancelledError):
            pass

    async def main() -> None:
        scheduler = world.scheduler(slots=dice.randrange(1, 5), max_queue=dice.choice([8, 200]))
        await asyncio.gather(*(asyncio.create_task(one(scheduler, name)) for name in range(200)))
        await scheduler.drain()
        assert (scheduler.running, scheduler.waiting) == (0, 0)
        assert sorted(slot.number for slot in scheduler._free) == list(range(scheduler.slots))

    run(main)
    for timer in timers:
        timer.join()
    assert len(outcomes) > 8 and len({job.id for job in outcomes}) == len(outcomes)
    for job in outcomes:
        events = told(world, job.id)
        assert events in (["queued", "started", "ended"], ["queued", "ended"]) and job.ended_at is not None
        if job.report is not None:
            assert job.report.request is job.request
            assert world.recorder.told[job.id].count("token") in (job.report.tokens, job.report.tokens - 1)
        else:
            assert job.first_at is None
    assert not world.said and world.recorder.threads == {"coli-engine"}


def test_gates_fail_loudly() -> None:
    """A test that waits for what does not come must not hang: the gate's own check."""
    gate = Gate()
    gate.step()
    gate.pass_through()
    gate.wait()
    gate.open()
    gate.pass_through()
