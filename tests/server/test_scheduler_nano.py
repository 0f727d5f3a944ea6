"""The scheduler over real sessions: turns that take steps in turn answer what each would have answered alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coli.engine import Engine
from coli.errors import PromptTooLong
from coli.server.job import Job
from coli.server.observers import Observer
from coli.server.scheduler import Scheduler
from coli.session import Request, Session
from coli.settings import load

PROMPTS = ("Tell me a story about a fox.", "The fox and the fox and the", "One two three one two three one", "Why?")


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with Engine.open(load({"model": str(nano), "threads": 2, "usage_save": False}, {})[0]) as engine:
        yield engine


def ask(engine: Engine, text: str, tokens: int = 60) -> Request:
    return Request(tuple(engine.tokenizer.encode(text)), max_tokens=tokens, stop_ids=frozenset(), logprobs=2)


async def read(job: Job) -> tuple[str, list[tuple]]:
    steps = [step async for batch in job.batches() for step in batch]
    return "".join(step.text for step in steps), [token for step in steps for token in step.tokens]


def test_turns_in_turn_are_turns_alone(engine: Engine) -> None:
    """Four slots on one model, its buffers and its head shared, with one turn cancelled midway and one refused."""
    alone = []
    for prompt in PROMPTS:
        session = Session(engine)
        steps = list(session.steps(ask(engine, prompt)))
        alone.append(("".join(step.text for step in steps), [token for step in steps for token in step.tokens]))

    async def main() -> None:
        scheduler = Scheduler(engine, slots=4, max_queue=20, observe=Observer())
        scheduler.start()
        try:
            for _ in range(2):  # the second time from checkpoints
                jobs = [scheduler.submit(ask(engine, prompt), prompt) for prompt in PROMPTS]
                gone = scheduler.submit(ask(engine, PROMPTS[0], 2000), "gone")
                long = scheduler.submit(Request((1,) * (engine.ctx + 1)), "long")
                answers = await asyncio.gather(*map(read, jobs))
                assert answers == alone
                assert all(job.report.cached_tokens == job.cached_tokens for job in jobs)
                await gone.started()
                async for _ in gone.batches():
                    gone.cancel()
                assert gone.report.finish_reason == "cancelled" and len(gone.report.token_ids) < 2000
                with pytest.raises(PromptTooLong):
                    await long.started()
            assert all(job.cached_tokens for job in jobs)
            assert (scheduler.running, scheduler.waiting) == (0, 0)
        finally:
            scheduler.close()

    asyncio.run(main())
