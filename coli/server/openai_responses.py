"""OpenAI's POST /v1/responses, for text and function tools: one object, or a stream of numbered events.

    response.created, response.in_progress
    output_item.added, its deltas, output_item.done      of one item after another: reasoning, message, function_call
    response.completed, .incomplete or .failed           with the whole object

Idea: deltas grow items (`Items`), and every growth is an event. An answer in one piece is read through the same items
and their events are left out, so both have the same output. Reasoning is an item with its text; a client that wants it
sealed (`include: ["reasoning.encrypted_content"]`, to send it back) gets it both ways. Nothing is kept (`store` is
false).
Log-probabilities are a message's: those of reasoning have no place in these objects, nor have those of calls, which is
why they cannot be asked for where a call may come.
Guarded by tests/server/test_responses.py, over a socket with OpenAI's own client.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coli.answer import Delta
from coli.server import ask, sse
from coli.server import responses_schema as schema
from coli.server.answering import Answering, Batch, Usage
from coli.server.carried import seal
from coli.server.errors import ApiError, parsed, renamed, unsupported
from coli.server.openai_reply import scored_json

if TYPE_CHECKING:
    from coli.logprobs import Scored
    from coli.server.service import Service
    from coli.tokenizer import Tokenizer
    from coli.tools import ToolCall

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"  # in `include`
_NAMES = {"messages": "input", "reasoning_effort": "reasoning.effort", "response_format": "text.format"}


async def endpoint(http: HttpRequest) -> Response:
    """POST /v1/responses."""
    service: Service = http.app.state.service
    request = parsed(schema.ResponsesRequest, schema.accepted(http.state.content))
    service.check_model(request.model)
    if request.stream_options and not request.stream:
        raise ApiError(400, "invalid 'stream_options': only with 'stream': true", param="stream_options",
                       code="invalid_value")  # fmt: skip
    prepared = await asyncio.to_thread(_prepared, service, request)
    answering = await Answering.begin(http, prepared)
    reply = Reply(service, request, answering)
    if request.stream:
        return sse.EventStream(answering, reply.frames(), reply.failed)
    return JSONResponse(await reply.whole())


def _prepared(service: Service, request: schema.ResponsesRequest) -> ask.Prepared:
    if _wants_logprobs(request) and request.tools and request.tool_choice != "none":
        what = "beside tools: there is no place for those of a call"
        raise unsupported("top_logprobs" if request.top_logprobs else "include", what, 'set tool_choice to "none"')
    choice, drafts = request.tool_choice, request.speculative
    options = ask.Options(
        max_tokens=request.max_output_tokens, temperature=request.temperature, top_p=request.top_p, seed=request.seed,
        logprobs=(request.top_logprobs or 0) if _wants_logprobs(request) else None, pin=bool(request.pin),
        response_format=schema.response_format(request),
        speculative=None if drafts is None else ask.Speculative(drafts.enabled, drafts.max_drafts),
    )  # fmt: skip
    with renamed(_NAMES):
        return ask.prepare_chat(
            service, messages=schema.chat_messages(request), options=options,
            tools=schema.function_tools(request.tools),
            tool_choice=ask.Named(choice.name) if isinstance(choice, schema.FunctionChoice) else choice or "auto",
            parallel_tool_calls=request.parallel_tool_calls is not False,
            effort=request.reasoning.effort if request.reasoning else None,
        )  # fmt: skip


def _wants_logprobs(request: schema.ResponsesRequest) -> bool:
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


# ---- what is answered ------------------------------------------------------------------------------------------------


class Items:
    """The output as it grows; every call returns the events of what has changed, without their numbers."""

    def __init__(self, *, sealed: bool) -> None:
        self.done: list[dict[str, Any]] = []
        self._sealed = sealed
        self._kind = self._id = ""  # of the item that grows
        self._parts: list[str] = []  # its text
        self._logprobs: Logprobs = []  # its tokens'

    def push(self, delta: Delta, logprobs: Logprobs) -> list[Event]:
        """`logprobs`: those of the tokens that have become known with it."""
        if delta.call is not None:
            return [*self.close(), *self._function_call(delta.call)]
        events = [] if delta.kind == self._kind else [*self.close(), *self._begin(delta.kind)]
        self._parts.append(delta.text)
        if delta.kind == "reasoning":
            return [*events, self._of_part("reasoning_text.delta", delta=delta.text)]
        self._logprobs += logprobs
        return [*events, self._of_part("output_text.delta", delta=delta.text, logprobs=logprobs)]

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that grows, if there is one."""
        if not self._kind:
            return []
        text, part = "".join(self._parts), self._part()
        if self._kind == "reasoning":
            ended = self._of_part("reasoning_text.done", text=text)
        else:
            ended = self._of_part("output_text.done", text=text, logprobs=self._logprobs)
        events = [ended, self._of_part("content_part.done", part=part), *self._end(self._item(status, [part]))]
        self._kind, self._parts, self._logprobs = "", [], []
        return events

    def _begin(self, kind: str) -> list[Event]:
        self._kind, self._id = kind, f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid.uuid4().hex}"
        added = self._of_output("output_item.added", item=self._item("in_progress", []))
        return [added, self._of_part("content_part.added", part=self._part())]

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if self._kind == "content":
            return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}
        item = {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}
        if self._sealed and content:
            item["encrypted_content"] = seal(content[0]["text"])
        return item

    def _part(self) -> dict[str, Any]:
        text = "".join(self._parts)
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self._logprobs]}

    def _function_call(self, call: ToolCall) -> list[Event]:
        self._id = f"fc_{uuid.uuid4().hex}"
        item = {"id": self._id, "type": "function_call", "status": "in_progress", "call_id": call.id,
                "name": call.name, "arguments": ""}  # fmt: skip
        return [
            self._of_output("output_item.added", item=item),
            self._of_item("function_call_arguments.delta", delta=call.arguments),
            self._of_item("function_call_arguments.done", name=call.name, arguments=call.arguments),
            *self._end({**item, "status": "completed", "arguments": call.arguments}),
        ]

    def _end(self, item: dict[str, Any]) -> list[Event]:
        event = self._of_output("output_item.done", item=item)
        self.done.append(item)
        return [event]

    def _of_output(self, name: str, /, **fields: Any) -> Event:
        return {"type": f"response.{name}", "output_index": len(self.done), **fields}

    def _of_item(self, name: str, /, **fields: Any) -> Event:
        return self._of_output(name, item_id=self._id, **fields)

    def _of_part(self, name: str, /, **fields: Any) -> Event:
        return self._of_item(name, content_index=0, **fields)


class Reply:
    """One answer, as one object or as frames of a stream."""

    def __init__(self, service: Service, request: schema.ResponsesRequest, answering: Answering) -> None:
        self._service, self._request, self._answering = service, request, answering
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._items = Items(sealed=SEALED in (request.include or ()))
        self._numbers = count()
        self._thought = 0  # tokens known of reasoning
        self._logprobs: Logprobs = []  # of tokens whose text has not come
        self._spoke = False  # a token outside reasoning came

    async def whole(self) -> dict[str, Any]:
        await self._answering.whole(self._grow)
        _, ended = self._end()
        return ended

    async def frames(self) -> AsyncGenerator[bytes, None]:
        begun = self._object("in_progress")
        yield self._numbered({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))
        async for batch in self._answering:
            if events := self._grow(batch):
                yield self._numbered(events)
        events, ended = self._end()
        if self._request.stream_options and self._request.stream_options.include_coli:
            ended["coli"] = self._answering.answer.coli
        yield self._numbered([*events, {"type": f"response.{ended['status']}", "response": ended}])

    def failed(self, error: ApiError) -> bytes:
        """The last frame of a stream that cannot go on."""
        why = {"code": "server_error", "message": error.message}
        return self._numbered([{"type": "response.failed", "response": self._object("failed", error=why)}])

    def _grow(self, batch: Batch) -> list[Event]:
        if _wants_logprobs(self._request):
            self._logprobs += self._scored(batch)
        events = []
        for delta in batch.deltas:
            events += self._items.push(delta, self._logprobs)
            self._logprobs = self._logprobs if delta.kind == "reasoning" else []
        return events

    def _scored(self, batch: Batch) -> Logprobs:
        """Of the batch's tokens that are a message's: neither reasoning nor the newlines that part it from the text."""
        thought = self._answering.reasoning_tokens
        fresh, self._thought = batch.tokens[thought - self._thought :], thought
        told = []
        for one in (_logprob(self._service.engine.tokenizer, token) for token in fresh):
            self._spoke = self._spoke or not thought or bool(one["token"].strip("\n"))
            told += [one] if self._spoke else []
        return told

    def _end(self) -> tuple[list[Event], dict[str, Any]]:
        """The events that end the last item, and the whole object."""
        answer = self._answering.answer
        cut = answer.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        silent = self._items.push(Delta("content", ""), self._logprobs) if self._logprobs else []  # tokens without text
        events = [*silent, *self._items.close(status)]
        return events, self._object(
            status, usage=_usage(answer.usage), completed_at=None if cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
        )  # fmt: skip

    def _numbered(self, events: Iterable[Event]) -> bytes:
        return b"".join(sse.event({**event, "sequence_number": next(self._numbers)}, event["type"]) for event in events)

    def _object(self, status: str, **ending: Any) -> dict[str, Any]:
        """The response with what is done of its output, and what was asked for."""
        request, sampling = self._request, self._answering.prepared.request.sampling
        reasoning, text = request.reasoning or schema.Reasoning(), request.text or schema.TextConfig()
        form = {"type": "text"} if text.format is None else _plain(text.format)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self._service.model_id,
            "output": list(self._items.done),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": _plain(request.tool_choice) if request.tool_choice else "auto",
            "tools": [_plain(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
            **ending,
        }


def _logprob(tokenizer: Tokenizer, token: Scored) -> dict[str, Any]:
    """As in chat completions, but that `bytes` are never null here."""
    told = scored_json(tokenizer, token)
    for one in (told, *told["top_logprobs"]):
        one["bytes"] = one["bytes"] or []
    return told


def _plain(asked: BaseModel | str) -> Any:
    """What was asked for, as it came."""
    return asked if isinstance(asked, str) else asked.model_dump(by_alias=True, exclude_unset=True)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
        "total_tokens": usage.prompt + usage.completion,
    }
