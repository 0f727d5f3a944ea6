"""A job's steps become an answer (coli/server/answering.py): sorted, counted, and cut short when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.answer import Delta, Form
from coli.chat import Reasoning
from coli.errors import ReadError
from coli.logprobs import Scored
from coli.report import Experts, ModelFacts, RunReport, Timings
from coli.server import anthropic, openai_responses
from coli.server.answering import Answer, Answering, Usage, joined
from coli.server.ask import Prepared
from coli.server.errors import ApiError, parsed
from coli.server.job import Cancelled
from coli.server.responses_schema import ResponsesRequest
from coli.session import Request, Step
from coli.speculation.report import SourceReport, SpeculationReport

CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},)
TEXT = f"Let me see.\n</think>\n\nIt is 1.{CALL}"
DRAFTS = SpeculationReport(
    "qwen38", 9, 6, SourceReport("mtp", drafts=4, accepted=2), SourceReport("lookup", drafts=3, accepted=1), None, True,
    2, "b", None, None, True, 0, 0, 0, None,
)  # fmt: skip


def report(finish: str = "stop", **more: Any) -> RunReport:
    return RunReport("", (), 10, 8, finish, Timings(), 0, Experts(), ModelFacts("", "qwen38", {}), **more)


class FakeJob:
    """Gives batches of steps, then its report or error; `hangs`: never starts, until it is cancelled."""

    def __init__(self, batches: Sequence[list[Step]] = (), report: Any = None, error: Exception | None = None,
                 hangs: bool = False) -> None:  # fmt: skip
        self._batches, self.report, self.error, self._hangs = batches, report, error, hangs
        self.cancelled = asyncio.Event()
        self.pace: float | None = None

    async def started(self) -> None:
        if self._hangs:
            await self.cancelled.wait()
            raise Cancelled

    async def batches(self) -> AsyncIterator[list[Step]]:
        for batch in self._batches:
            yield batch
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.cancelled.set()


class FakeHttp:
    """A request whose body was read; the client leaves when `leaves` is set."""

    def __init__(self, job: Any) -> None:
        self.leaves = asyncio.Event()
        service = SimpleNamespace(submit=lambda prepared, name: job)
        self.app = SimpleNamespace(state=SimpleNamespace(service=service))
        self.state = SimpleNamespace(request_id="req_1")
        self._messages = [{"type": "http.request", "body": b"{}"}]

    async def receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def steps_of(text: str, size: int = 3) -> list[Step]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [Step(piece, (Scored(number, -float(number)),)) for number, piece in enumerate(pieces)]


def read(batches: Sequence[list[Step]], told: RunReport, start: Reasoning = "open", split: bool = True,
         forced: bool = False) -> Answer:  # fmt: skip
    async def run() -> Answer:
        prepared = Prepared(Request((1,), form=Form(start, tuple(TOOLS)) if split else None), "", forced)
        answering = Answering(prepared, FakeJob(batches, told))  # type: ignore[arg-type]
        deltas: list[Delta] = []
        tokens: list[Scored] = []
        async for batch in answering:
            assert batch.deltas == joined(batch.deltas)
            deltas += batch.deltas
            tokens += batch.tokens
        answer = answering.answer
        assert tuple(tokens) == answer.tokens
        assert "".join(delta.text for delta in deltas if delta.kind == "content") == answer.content
        assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == answer.reasoning
        assert tuple(delta.call for delta in deltas if delta.call) == answer.tool_calls
        return answer

    return asyncio.run(run())


def test_an_answer_is_sorted_and_counted() -> None:
    answer = read([steps_of(TEXT)], report(cached_tokens=4, speculation=DRAFTS, stop="x"))
    assert (answer.reasoning, answer.content, answer.stop) == ("Let me see.", "It is 1.", "x")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", '{"a": 1}')]
    assert answer.finish_reason == "tool_calls"
    assert answer.usage == Usage(10, 8, 4, reasoning=7, accepted=3, rejected=4)  # 7 steps begin in it
    assert answer.coli["tokens_per_forward"] == 1.5 and answer.coli["acceptance"] == 3 / 7


def test_a_call_that_was_cut_leaves_the_reason_alone() -> None:
    assert read([steps_of(TEXT)], report("length")).finish_reason == "length"
    begun = TEXT.removesuffix("</tool_call>")
    assert read([steps_of(begun)], report("length")).content == begun.partition("</think>\n\n")[2]
    plain = read([steps_of("Let me")], report())
    assert (plain.finish_reason, plain.reasoning, plain.content, plain.coli["speculation"]) == (
        "stop", "Let me", "", False)  # fmt: skip


@given(st.integers(1, len(CALL) - 1))
def test_of_an_answer_that_can_only_call_no_part_of_a_call_is_text(cut: int) -> None:
    text = f"Let me see.\n</think>\n\n{CALL}\n{CALL[:cut]}"
    answer = read([steps_of(text)], report("length"), forced=True)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("Let me see.", "", "length")
    assert len(answer.tool_calls) == 1 and len(answer.tokens) == len(steps_of(text))


def test_the_facts_have_the_same_keys_with_drafts_and_without() -> None:
    drafted, plain = (read([steps_of("Hi")], report(speculation=spec)).coli for spec in (DRAFTS, None))
    assert drafted.keys() == plain.keys()
    assert {name: plain[name] for name in ("speculation", "tokens", "drafts", "accepted", "tokens_per_forward")} == {
        "speculation": False, "tokens": None, "drafts": 0, "accepted": 0, "tokens_per_forward": None}  # fmt: skip


def test_a_text_is_not_sorted() -> None:
    answer = read([steps_of(TEXT)], report(), split=False)
    assert (answer.content, answer.reasoning, answer.tool_calls, answer.usage.reasoning) == (TEXT, "", (), 0)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 7))
def test_batches_change_nothing(cuts: list[int], size: int) -> None:
    steps, batches = steps_of(TEXT, size), []
    for cut in cuts:
        batches.append(steps[:cut])
        steps = steps[cut:]
    whole, cut_up = (read(some, report()) for some in ([steps_of(TEXT, size)], [*batches, steps]))
    # a call's id is drawn anew
    for answer in (whole, cut_up):
        assert len(answer.tool_calls) == 1
    assert (whole.reasoning, whole.content, whole.tokens, whole.usage) == (
        cut_up.reasoning, cut_up.content, cut_up.tokens, cut_up.usage)  # fmt: skip


@pytest.mark.parametrize("api", ["openai", "anthropic", "responses"])
def test_nobody_is_woken_for_an_answer_in_one_piece(api: str) -> None:
    async def run() -> tuple[float | None, bool]:
        job = FakeJob([steps_of(TEXT)], report())
        job.pace = 1.0
        answering = Answering(Prepared(Request((1,), form=Form("open", tuple(TOOLS))), ""), job)  # type: ignore[arg-type]
        if api == "openai":
            assert (await answering.whole()).tool_calls
        elif api == "anthropic":
            message = await anthropic.Message("m", answering, omitted=False).whole()
            assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
        else:
            asked = parsed(ResponsesRequest, {"model": "m", "input": "Hi"})
            service = SimpleNamespace(model_id="m")
            document = await openai_responses.Reply(service, asked, answering).whole()  # type: ignore[arg-type]
            assert [item["type"] for item in document["output"]] == ["reasoning", "message", "function_call"]
        return job.pace, job.cancelled.is_set()

    assert asyncio.run(run()) == (None, True)


def test_a_client_that_leaves_the_queue_takes_its_job_along() -> None:
    async def run() -> None:
        job = FakeJob(hangs=True)
        http = FakeHttp(job)
        begun = asyncio.create_task(Answering.begin(http, Prepared(Request((1,), form=Form("none")), "")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not job.cancelled.is_set()
        http.leaves.set()
        with pytest.raises(ApiError) as caught:
            await begun
        assert caught.value.status == 499 and job.cancelled.is_set()

    asyncio.run(run())


def test_an_answer_cut_short_says_by_whom() -> None:
    async def status(leaves: bool) -> int:
        job = FakeJob([[Step("a")]], report("cancelled"))
        http = FakeHttp(job)
        answering = await Answering.begin(http, Prepared(Request((1,), form=Form("none")), ""))  # type: ignore[arg-type]
        if leaves:
            http.leaves.set()
            await job.cancelled.wait()
        with pytest.raises(ApiError) as caught:
            await answering.whole()
        return caught.value.status

    assert asyncio.run(status(leaves=True)) == 499
    assert asyncio.run(status(leaves=False)) == 503


def test_the_error_of_a_turn_comes_through_and_nothing_is_left_behind() -> None:
    async def run() -> None:
        job = FakeJob([[Step("a")]], None, ReadError("the disk is gone"))
        answering = await Answering.begin(FakeHttp(job), Prepared(Request((1,), form=Form("none")), ""))  # type: ignore[arg-type]
        with pytest.raises(ReadError):
            await answering.whole()
        await asyncio.sleep(0)
        assert job.cancelled.is_set() and len(asyncio.all_tasks()) == 1

    asyncio.run(run())
