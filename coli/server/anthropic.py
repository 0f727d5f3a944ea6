"""Anthropic's API: POST /v1/messages, in one piece or as a stream of events, and /v1/messages/count_tokens.

    message_start                      usage of the prompt
    ping                               now, and whenever nothing was sent for a while
    content_block_start, _delta, _stop of one block after another: thinking, text, tool_use
    message_delta                      stop_reason, stop_sequence, the whole usage
    message_stop                       or, in place of all that is missing, error

Idea: deltas grow blocks (`Blocks`), and every growth is an event. An answer in one piece is read through the
same blocks and their events are left out, so both have the same content.

Thinking is off unless it is asked for: clients of this API expect text first. A template that cannot be told does as it
does; only a `thinking` of "disabled" is refused where the model thinks all the same.
Of a prompt, `input_tokens` are those that had to be read, `cache_read_input_tokens` the others.
Guarded by tests/server/test_anthropic.py, over a socket with Anthropic's own client.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coli.server import anthropic_schema as schema
from coli.server import ask, sse
from coli.server.answering import Answer, Answering, Batch, Usage
from coli.server.carried import seal
from coli.server.errors import ApiError, anthropic_body, parsed, renamed, unsupported

if TYPE_CHECKING:
    from coli.answer import Delta
    from coli.server.service import Service
    from coli.tools import ToolCall

Event = dict[str, Any]
Kind = TypeVar("Kind", bound=schema.CountRequest)
PING: Event = {"type": "ping"}
SIGNATURE = "coli"  # of thinking that is there to be read; clients take a block without one for broken
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_NAMES = {
    "enable_thinking": "thinking", "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}  # fmt: skip


async def endpoint(http: HttpRequest) -> Response:
    """POST /v1/messages."""
    service: Service = http.app.state.service
    request = _request(service, http.state.content, schema.MessagesRequest)
    prepared = await asyncio.to_thread(_prepared, service, request)
    answering = await Answering.begin(http, prepared)
    message = Message(service.model_id, answering, omitted=_omitted(request))
    if request.stream:
        return sse.EventStream(answering, message.frames(), _failure(http.state.request_id), idle=_frames([PING]))
    return JSONResponse(await message.whole())


async def count_tokens(http: HttpRequest) -> Response:
    """POST /v1/messages/count_tokens."""
    service: Service = http.app.state.service
    request = _request(service, http.state.content, schema.CountRequest)
    return JSONResponse({"input_tokens": await asyncio.to_thread(_counted, service, request)})


# ---- what is asked ---------------------------------------------------------------------------------------------------


def _request(service: Service, content: Mapping[str, Any], kind: type[Kind]) -> Kind:
    request = parsed(kind, schema.accepted(content))
    service.check_model(request.model)
    return request


def _prepared(service: Service, request: schema.MessagesRequest) -> ask.Prepared:
    budget = request.thinking.budget_tokens if request.thinking else None
    if budget is not None and budget >= request.max_tokens:
        what = "invalid 'thinking.budget_tokens': must be below max_tokens, which thinking counts to"
        raise ApiError(400, what, param="thinking.budget_tokens", code="invalid_value")
    prompt = _prompt(service, request)
    single = request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use
    with renamed(_NAMES):
        prepared = ask.prepare_chat(service, options=_options(request), parallel_tool_calls=not single, **prompt)
    form, thinking = prepared.request.form, request.thinking
    if form is not None and form.start == "open" and thinking and thinking.type == "disabled":
        raise unsupported("thinking.type", "this model always thinks", "leave 'thinking' out")
    return prepared


def _counted(service: Service, request: schema.CountRequest) -> int:
    prompt = _prompt(service, request)
    with renamed(_NAMES):
        return ask.count_chat(service, **prompt)


def _prompt(service: Service, request: schema.CountRequest) -> dict[str, Any]:
    """What makes the prompt, as `ask` wants it."""
    chat, output = service.engine.chat, request.output_config
    reads = chat.reads if chat is not None else frozenset()
    keeps = request.context_management is not None and bool(request.context_management.edits)
    return {
        "messages": schema.chat_messages(request),
        "tools": schema.function_tools(request.tools),
        "tool_choice": _tool_choice(request),
        "thinking": _thinks(request.thinking, reads),
        "effort": output.effort if output else None,
        "template_kwargs": {"preserve_thinking": True} if keeps and "preserve_thinking" in reads else None,
    }


def _thinks(config: schema.ThinkingConfig | None, reads: Collection[str]) -> bool | None:
    """Whether to think; None leaves it to the template."""
    kind = config.type if config else "disabled"
    if kind == "between_tools":
        raise unsupported("thinking.type", "'between_tools' is not known to templates", "enabled, adaptive, disabled")
    if kind == "enabled":
        return True
    return False if kind == "disabled" and "enable_thinking" in reads else None


def _tool_choice(request: schema.CountRequest) -> ask.ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    if choice.type in ("any", "tool") and not request.tools:
        raise ApiError(400, "invalid 'tool_choice': there are no tools", param="tool_choice", code="invalid_value")
    if isinstance(choice, schema.NamedChoice):
        return ask.Named(choice.name)
    return "required" if choice.type == "any" else choice.type


def _options(request: schema.MessagesRequest) -> ask.Options:
    form = request.output_config.format if request.output_config else None
    drafts = request.speculative
    return ask.Options(
        max_tokens=request.max_tokens, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
        seed=request.seed, stop=tuple(request.stop_sequences or ()), pin=bool(request.pin),
        response_format=None if form is None else {
            "type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_, "strict": True},
        },
        speculative=None if drafts is None else ask.Speculative(drafts.enabled, drafts.max_drafts),
    )  # fmt: skip


def _omitted(request: schema.MessagesRequest) -> bool:
    return request.thinking is not None and request.thinking.display == "omitted"


# ---- what is answered ------------------------------------------------------------------------------------------------


class Blocks:
    """The content of a message as it grows; every call returns the events of what has changed."""

    def __init__(self, *, omitted: bool) -> None:
        self.content: list[dict[str, Any]] = []  # blocks that are whole
        self._omitted = omitted  # thinking is carried, not shown
        self._kind = ""  # of the block that grows
        self._parts: list[str] = []  # its text

    def push(self, delta: Delta) -> list[Event]:
        if delta.call is not None:
            return [*self.close(), *self._tool_use(delta.call)]
        shown, events = delta.kind == "content", []
        if delta.kind != self._kind:
            events = [*self.close(), self._start(_text("") if shown else _thinking("", ""))]
        self._kind = delta.kind
        self._parts.append(delta.text)
        if shown:
            events.append(self._delta("text_delta", text=delta.text))
        elif not self._omitted:
            events.append(self._delta("thinking_delta", thinking=delta.text))
        return events

    def close(self) -> list[Event]:
        """End the block that grows, if there is one."""
        text, kind = "".join(self._parts), self._kind
        self._kind, self._parts = "", []
        if not kind:
            return []
        if kind == "content":
            return [self._stop(_text(text))]
        block = _thinking("", seal(text)) if self._omitted else _thinking(text, SIGNATURE)
        return [self._delta("signature_delta", signature=block["signature"]), self._stop(block)]

    def _tool_use(self, call: ToolCall) -> list[Event]:
        block = {"type": "tool_use", "id": "toolu_" + call.id.removeprefix("call_"), "name": call.name}
        return [
            self._start({**block, "input": {}}),
            self._delta("input_json_delta", partial_json=call.arguments),
            self._stop({**block, "input": json.loads(call.arguments)}),
        ]

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.content), "delta": {"type": kind, **fields}}

    def _stop(self, block: dict[str, Any]) -> Event:
        self.content.append(block)
        return {"type": "content_block_stop", "index": len(self.content) - 1}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": signature}


class Message:
    """One answer, as one object or as frames of a stream."""

    def __init__(self, model: str, answering: Answering, *, omitted: bool) -> None:
        self._id, self._model, self._answering = f"msg_{uuid.uuid4().hex}", model, answering
        self._blocks = Blocks(omitted=omitted)

    async def whole(self) -> dict[str, Any]:
        answer = await self._answering.whole(self._grow)
        self._blocks.close()
        return self._object(self._blocks.content, _usage(answer.usage), **_ending(answer))

    async def frames(self) -> AsyncGenerator[bytes, None]:
        job, prompt = self._answering.job, len(self._answering.prepared.request.prompt_ids)
        start = self._object([], _usage(Usage(prompt, 0, job.cached_tokens)), stop_reason=None, stop_sequence=None)
        yield _frames([{"type": "message_start", "message": start}, PING])
        async for batch in self._answering:
            if events := self._grow(batch):
                yield _frames(events)
        answer = self._answering.answer
        end = {"type": "message_delta", "delta": _ending(answer), "usage": _usage(answer.usage)}
        yield _frames([*self._blocks.close(), end, {"type": "message_stop"}])

    def _grow(self, batch: Batch) -> list[Event]:
        return [event for delta in batch.deltas for event in self._blocks.push(delta)]

    def _object(self, content: list[dict[str, Any]], usage: dict[str, Any], **ending: str | None) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
                **ending, "usage": usage}  # fmt: skip


def _ending(answer: Answer) -> dict[str, str | None]:
    if answer.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,  # what Anthropic asks more for; nothing is paid here
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "thinking_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,  # OpenAI's names: Anthropic has none
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def _frames(events: Iterable[Event]) -> bytes:
    return b"".join(sse.event(event, event["type"]) for event in events)


def _failure(request_id: str) -> Callable[[ApiError], bytes]:
    """What writes the event that ends a stream with an error."""
    return lambda error: _frames([anthropic_body(error, request_id)])
