"""One answer under way: the job's steps as deltas, and what the answer was.

    answering = await Answering.begin(http, prepared)   the prompt was accepted; raises what refuses it
    async for batch in answering: ...                    deltas and tokens, as they come
    answering.answer                                     all of it, with usage
    await answering.whole()                              the same at once, for an answer in one piece
    await answering.aclose()                             in the end, whatever happened (sse.EventStream does it)

Streamed or not, an answer is read through the same router, so the joined deltas are the whole answer, its tokens and
its usage the same. The client is watched from the beginning: when it leaves, in the queue or later, the job is
cancelled and the iteration ends with an ApiError 499, which nobody reads.

Guarded by tests/server/test_answering.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from coli.answer import AnswerRouter, Delta
from coli.logprobs import Scored
from coli.report import RunReport
from coli.server.ask import Prepared
from coli.server.errors import ApiError
from coli.server.job import Cancelled, Job
from coli.session import Step
from coli.tools import ToolCall


@dataclass(frozen=True)
class Usage:
    """Tokens. `cached`: of the prompt; `reasoning`: of the completion; `accepted`, `rejected`: drafts, whose ever."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Answer:
    """`finish_reason`: "stop", "length" or "tool_calls"; `stop`: the stop string that ended it; `tokens`: those of the
    completion, but for the stop token; `coli`: facts of the drafting for whoever asks."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    stop: str | None
    usage: Usage
    tokens: tuple[Scored, ...]
    coli: dict[str, Any]


class Batch(NamedTuple):
    """What has become known since the last one; neighbours of one kind are joined. `tokens` may run ahead of the
    deltas, where the router still holds text."""

    deltas: list[Delta]
    tokens: tuple[Scored, ...]


class Answering:
    """One reader: iterate once, or ask for the whole."""

    def __init__(self, prepared: Prepared, job: Job) -> None:
        self.prepared, self.job = prepared, job
        form = prepared.request.form
        self._router = None if form is None else form.router()
        self._deltas: list[Delta] = []
        self._tokens: list[Scored] = []
        self._reasoning = 0  # tokens
        self._answer: Answer | None = None
        self._left = False  # the client
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, http: HttpRequest, prepared: Prepared) -> Answering:
        """Queue the request and wait until its prompt was accepted."""
        job = http.app.state.service.submit(prepared, http.state.request_id)
        answering = cls(prepared, job)
        answering._watcher = asyncio.create_task(answering._watch(http.receive))
        try:
            await job.started()
        except BaseException as error:
            await answering.aclose()
            if answering._left and isinstance(error, Exception):
                raise _client_left() from error
            raise
        return answering

    async def __aiter__(self) -> AsyncIterator[Batch]:
        try:
            async for steps in self.job.batches():
                if (batch := self._take(steps)) is not None:
                    yield batch
        except Cancelled:
            raise self._cut_short() from None
        if self.job.report is None or self.job.report.finish_reason == "cancelled":
            raise self._cut_short()
        if self._router is not None and (held := self._held(self._router)):
            yield self._known(held, ())
        self._answer = self._told(self.job.report)

    @property
    def reasoning_tokens(self) -> int:
        """Of those known so far; they come before the content's."""
        return self._reasoning

    @property
    def answer(self) -> Answer:
        """Once the iteration has ended."""
        assert self._answer is not None, "the answer is known when its iteration has ended"
        return self._answer

    async def whole(self, each: Callable[[Batch], object] = lambda batch: None) -> Answer:
        """All of it, `each` batch of it shown on the way; closes. Nobody reads before the end, so nothing wakes this
        thread while the model computes."""
        self.job.pace = None
        try:
            async for batch in self:
                each(batch)
        finally:
            await self.aclose()
        return self.answer

    async def aclose(self) -> None:
        """Cancel what still runs and no longer watch the client."""
        self.job.cancel()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _watch(self, receive: Receive) -> None:
        """Cancel the job when the client leaves; also for an answer in one piece, which writes nothing meanwhile."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self.job.cancel()

    def _take(self, steps: Sequence[Step]) -> Batch | None:
        deltas: list[Delta] = []
        for step in steps:
            if self._router is None:
                deltas += [Delta("content", step.text)] if step.text else []
                continue
            if self._router.in_reasoning:
                self._reasoning += len(step.tokens)
            deltas += self._router.push(step.text)
        tokens = tuple(token for step in steps for token in step.tokens)
        return self._known(deltas, tokens) if deltas or tokens else None

    def _held(self, router: AnswerRouter) -> list[Delta]:
        """What the end lets out. Of an answer that can only call, text is a call that was cut: it says nothing."""
        return [delta for delta in router.flush() if not (self.prepared.forced and delta.kind == "content")]

    def _known(self, deltas: Iterable[Delta], tokens: tuple[Scored, ...]) -> Batch:
        batch = Batch(joined(deltas), tokens)
        self._deltas += batch.deltas
        self._tokens += tokens
        return batch

    def _cut_short(self) -> ApiError:
        return _client_left() if self._left else ApiError(503, "the server stopped and cut the answer short")

    def _told(self, report: RunReport) -> Answer:
        deltas = self._deltas
        calls = tuple(delta.call for delta in deltas if delta.call is not None)
        spec = report.speculation
        carried, accepted = (spec.drafts, spec.accepted) if spec is not None else (0, 0)
        return Answer(
            reasoning="".join(delta.text for delta in deltas if delta.kind == "reasoning"),
            content="".join(delta.text for delta in deltas if delta.kind == "content"),
            tool_calls=calls,
            finish_reason="tool_calls" if calls and report.finish_reason == "stop" else report.finish_reason,
            stop=report.stop,
            usage=Usage(report.prompt_tokens, report.completion_tokens, report.cached_tokens, self._reasoning, accepted,
                        carried - accepted),
            tokens=tuple(self._tokens),
            coli=facts(report),
        )  # fmt: skip


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind as one; calls stay apart."""
    groups: list[Delta] = []
    for delta in deltas:
        if groups and delta.call is None and groups[-1].kind == delta.kind:
            groups[-1] = Delta(delta.kind, groups[-1].text + delta.text)
        else:
            groups.append(delta)
    return groups


def facts(report: RunReport) -> dict[str, Any]:
    """What the drafting brought and what it took, for clients that ask for `coli`; the same keys without it, null where
    nobody counted."""
    spec, timings = report.speculation, report.timings
    return {
        "cached_tokens": report.cached_tokens,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "decode_tok_s": timings.decode_tok_s,
        "speculation": spec is not None,
        "tokens": None if spec is None else spec.tokens,
        "forwards": None if spec is None else spec.forwards,
        "tokens_per_forward": None if spec is None else spec.per_forward,
        "drafts": 0 if spec is None else spec.drafts,
        "accepted": 0 if spec is None else spec.accepted,
        "acceptance": spec.accepted / spec.drafts if spec is not None and spec.drafts else None,
        "gate": None if spec is None or spec.gate is None else {"on": spec.gate_on, **spec.gate.to_json()},
        "ended_mid_verify": spec is not None and spec.ended_mid_verify,
    }


def _client_left() -> ApiError:
    return ApiError(499, "the client closed the connection")
