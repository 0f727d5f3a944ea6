"""POST /v1/chat/completions.

A stream is: a chunk with the role, chunks of the answer as it comes (reasoning_content, content, whole tool calls), one
with the finish_reason alone, one without choices but with usage where that was asked for, `[DONE]`. The first goes out
with the first of the answer, so a client's first data is the first token.

With logprobs a chunk carries those of the tokens that came with it: all of the answer, its reasoning and its calls
included, in order. Where text is held back (it may become a tag) their tokens wait for the next chunk.
Invariant: the chunks joined are the answer in one piece, logprobs and usage included
(tests/server/test_openai_chat.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coli.answer import Delta
from coli.logprobs import Scored
from coli.server.answering import Answer, Answering
from coli.server.ask import prepare_chat
from coli.server.openai_reply import Reply, scored_json, usage_json
from coli.server.openai_schema import ChatRequest
from coli.server.service import Service
from coli.server.sse import DONE, EventStream, event
from coli.tokenizer import Tokenizer
from coli.tools import ToolCall


async def endpoint(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    asked = ChatRequest.of(http.state.content)
    service.check_model(asked.model)
    prepared = await asyncio.to_thread(
        prepare_chat, service, messages=asked.template_messages(), options=asked.options(),
        tools=asked.template_tools(), tool_choice=asked.choice(),
        parallel_tool_calls=asked.parallel_tool_calls is not False, thinking=asked.enable_thinking,
        effort=asked.reasoning_effort, template_kwargs=asked.chat_template_kwargs,
    )  # fmt: skip
    answering = await Answering.begin(http, prepared)
    tokenizer = service.engine.tokenizer
    if asked.stream:
        reply = Reply.new(service, "chatcmpl", "chat.completion.chunk")
        return EventStream(answering, _frames(answering, _Chunks(reply, tokenizer, asked)))
    reply = Reply.new(service, "chatcmpl", "chat.completion")
    return JSONResponse(_document(reply, tokenizer, asked, await answering.whole()))


# ---- in one piece ----------------------------------------------------------------------------------------------------


def _document(reply: Reply, tokenizer: Tokenizer, asked: ChatRequest, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [_call_json(call) for call in answer.tool_calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(tokenizer, answer.tokens) if asked.logprobs else None,
        "finish_reason": answer.finish_reason,
    }
    return reply.document([choice], usage=usage_json(answer.usage))


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(tokenizer: Tokenizer, tokens: Sequence[Scored]) -> dict[str, Any]:
    return {"content": [scored_json(tokenizer, token) for token in tokens], "refusal": None}


# ---- in chunks -------------------------------------------------------------------------------------------------------


async def _frames(answering: Answering, chunks: _Chunks) -> AsyncGenerator[bytes, None]:
    async for batch in answering:
        frames = chunks.of(batch.deltas, batch.tokens)
        if frames:
            yield frames
    yield chunks.end(answering.answer)


class _Chunks:
    """The frames of one answer, those of one batch in one piece: they are written to the socket at once."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer, asked: ChatRequest) -> None:
        self.reply, self.tokenizer, self.asked = reply, tokenizer, asked
        self.calls = 0
        self.begun = False
        self.waiting: list[Scored] = []  # tokens without a chunk

    def of(self, deltas: Sequence[Delta], tokens: Sequence[Scored]) -> bytes:
        if self.asked.logprobs:
            self.waiting += tokens
        return b"".join([*(self._role() if deltas else []), *(self._chunk(self._delta(delta)) for delta in deltas)])

    def end(self, answer: Answer) -> bytes:
        """What is left, the reason, the usage, the end."""
        asked = self.asked
        frames = [*self._role(), *([self._chunk({})] if self.waiting else [])]
        facts = {"coli": answer.coli} if asked.include_coli else {}
        frames.append(self._chunk({}, answer.finish_reason, **({} if asked.include_usage else facts)))
        if asked.include_usage:
            frames.append(event(self.reply.document([], usage=usage_json(answer.usage), **facts)))
        return b"".join([*frames, DONE])

    def _role(self) -> list[bytes]:
        if self.begun:
            return []
        self.begun, waiting, self.waiting = True, self.waiting, []
        chunk = self._chunk({"role": "assistant", "content": "", "refusal": None})
        self.waiting = waiting
        return [chunk]

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.call is None:
            return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}
        self.calls += 1
        return {"tool_calls": [{"index": self.calls - 1, **_call_json(delta.call)}]}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> bytes:
        tokens, self.waiting = self.waiting, []
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(self.tokenizer, tokens) if tokens else None,
            "finish_reason": finish_reason,
        }
        usage = {"usage": None} if self.asked.include_usage else {}
        return event(self.reply.document([choice], **usage, **more))
