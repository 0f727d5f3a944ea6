"""What POST /v1/responses accepts, and how its items become the template's messages.

Idea: an item is one model with a `type`; a plain message may leave it out. Items of one answer (reasoning, message,
function calls) were one assistant message to the model and become one again:
  instructions, and system or developer messages at the head     one system message
  reasoning, message of the assistant, function_call             one assistant message, until reasoning, or text after
                                                                 text, begins the next
  function_call_output                                           a message of role "tool"
Nothing is kept between requests, so what refers to an earlier response is in `_REFUSED` with all else that clients know
and this server does not do: refused by name, never ignored. Guarded by tests/server/test_responses.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from coli.server.carried import unseal
from coli.server.errors import MOST_ITEMS, ApiError, Only, bounded, unsupported, without
from coli.server.openai_schema import PROMPT_CACHE_RETENTION, VERBOSITY, Drafts

_STATELESS = "nothing is kept between requests"
_NO_CONVERSATION = ((), f"{_STATELESS}: send the earlier items in 'input'")
_REFUSED: Only = {
    "previous_response_id": _NO_CONVERSATION,
    "conversation": _NO_CONVERSATION,
    "prompt": ((), "no prompts are kept here: send 'instructions' and 'input'"),
    "context_management": ((), f"{_STATELESS}: send the items you want to be read"),
    "max_tool_calls": ((), "no tools run here: count the calls where you run them"),
    "moderation": ((), "nothing is moderated here"),
    "image": ((), "the model writes text"),
    "background_options": ((), _STATELESS),
    "prompt_cache_options": ((), "prefixes are kept whenever there is room"),
    "prompt_cache_retention": PROMPT_CACHE_RETENTION,
    "access_programs": ((), "there are none here"),
    "store": ((False,), f"{_STATELESS}: send 'store': false, or leave it out"),
    "background": ((False,), f"{_STATELESS}: use 'stream'"),
    "truncation": (("disabled",), "a prompt is read whole or refused"),
}
_OF_TEXT: Only = {"verbosity": VERBOSITY}
_OF_REASONING: Only = {  # "auto" is whatever the server has, which is the reasoning's text itself
    "summary": (("auto",), "the reasoning itself is sent"),
    "generate_summary": (("auto",), "the reasoning itself is sent"),
    "context": (("auto",), "the items of 'input' are what is read"),
    "mode": (("standard",), "there is one mode"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Item(BaseModel):
    """Items come back with fields of servers that made them, which say nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Text(_Item):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class Refusal(_Item):
    type: Literal["refusal"]
    refusal: str


class Unreadable(BaseModel):
    """A part that OpenAI's servers take and we do not."""

    model_config = ConfigDict(extra="allow")
    type: Literal["input_image", "input_file", "input_audio", "image_url", "file", "computer_screenshot"]


def _as_parts(content: Any) -> Any:
    """A text is short for one part of it."""
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _as_items(content: Any) -> Any:
    """A text is short for a user's message."""
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


Part = Annotated[Text | Refusal | Unreadable, Field(discriminator="type")]
Content = Annotated[list[Part], bounded(4096), BeforeValidator(_as_parts)]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: Annotated[list[Text], bounded(4096)] | None = None
    summary: Annotated[list[Text], bounded(4096)] = []
    encrypted_content: str | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _type(item: Any) -> str | None:
    """Of an item; a message needs none. Refusals name the field after this function."""
    return item.get("type", "message" if "role" in item else None) if isinstance(item, dict) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")],
    Discriminator(_type),
]
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


class Tool(_Model):
    type: Literal["function"]
    name: str = Field(pattern=r"^[^<>\s]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[list[Literal["direct"]], bounded(16)] | None = None
    defer_loading: Literal[False] | None = None


class FunctionChoice(_Model):
    type: Literal["function"]
    name: str


class PlainFormat(_Model):
    type: Literal["text", "json_object"]


class SchemaFormat(_Model):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(_Model):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None  # here as below: what else there is, `accepted` refuses by name


class Reasoning(_Model):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class StreamOptions(_Model):
    include_obfuscation: Literal[False] | None = None
    include_coli: bool = False  # ours


Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(_Model):
    model: str
    input: Annotated[list[Item], bounded(MOST_ITEMS), BeforeValidator(_as_items)] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: Annotated[list[Include], bounded(16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], bounded(1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=16
    )
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)  # ours, as are the two below
    speculative: Drafts | None = None
    pin: bool | None = None


def accepted(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` without what asks for nothing. Raises ApiError 400 for what means something to OpenAI and cannot be
    done here."""
    for name, only in (("text", _OF_TEXT), ("reasoning", _OF_REASONING)):
        if isinstance(content.get(name), Mapping):
            without(content[name], only, f"{name}.")
    match content.get("tool_choice"):
        case {"type": str(choice)} if choice != "function":
            raise unsupported("tool_choice", f"type {choice!r} is not known here", "name a function")
    for field, known, hint in (("input", _ITEMS, ""), ("tools", ("function",), "send functions, and run them")):
        for number, item in enumerate(content[field] if isinstance(content.get(field), list) else []):
            kind = _type(item)
            if isinstance(kind, str) and kind not in known:
                raise unsupported(f"{field}[{number}]", f"'{kind}' is nothing this server has", hint)
    return without(content, _REFUSED)


# ---- to the template's form ------------------------------------------------------------------------------------------


def chat_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The messages in the template's form. Raises ApiError 400 for items that cannot be read."""
    rest = list(enumerate(request.input))
    system = [request.instructions] if request.instructions else []
    while rest and isinstance(item := rest[0][1], MessageItem) and item.role in ("system", "developer"):
        system.append(_text(f"input[{rest.pop(0)[0]}].content", item.content))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    names: dict[str, str] = {}  # of the functions called so far, by the id of the call
    for number, item in rest:
        _append(messages, f"input[{number}]", item, names)
    return messages


def _append(messages: list[dict[str, Any]], where: str, item: Item, names: dict[str, str]) -> None:
    match item:
        case ReasoningItem():
            _assistant(messages, fresh=("content", "tool_calls"))["reasoning_content"] = _thoughts(item)
        case MessageItem(role="assistant"):
            message = _assistant(messages, fresh=("content",))
            message["content"] = _text(f"{where}.content", item.content)
        case MessageItem(role="user"):
            messages.append({"role": "user", "content": _text(f"{where}.content", item.content)})
        case MessageItem():
            raise _invalid(f"{where}.role", "system and developer messages stand first or not at all")
        case CallItem():
            names[item.call_id] = item.name
            function = {"name": item.name, "arguments": _arguments(where, item)}
            call = {"id": item.call_id, "type": "function", "function": function}
            _assistant(messages, fresh=()).setdefault("tool_calls", []).append(call)
        case OutputItem():
            if item.call_id not in names:
                what = f"no function_call before it has the call_id '{item.call_id}'"
                raise _invalid(f"{where}.call_id", what)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id],
                             "content": _text(f"{where}.output", item.output)})  # fmt: skip


def _assistant(messages: list[dict[str, Any]], fresh: Iterable[str]) -> dict[str, Any]:
    """The assistant's message at the end; a new one where there is none, or it has one of `fresh`."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in fresh):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _thoughts(item: ReasoningItem) -> str:
    """The text of reasoning: as it is, as we sealed it, else what was told of it."""
    parts = item.content or []
    sealed = None if parts else unseal(item.encrypted_content)
    return "".join(part.text for part in parts or item.summary) if sealed is None else sealed


def _arguments(where: str, item: CallItem) -> dict[str, Any]:
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise _invalid(f"{where}.arguments", "must be a JSON object in a string")
    return arguments


def _text(where: str, content: Iterable[Part]) -> str:
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, Unreadable):
            raise unsupported(f"{where}[{number}]", f"'{part.type}' parts cannot be read", "send text")
        texts.append(part.text if isinstance(part, Text) else part.refusal)
    return "".join(texts)


def _invalid(param: str, what: str) -> ApiError:
    return ApiError(400, f"invalid '{param}': {what}", param=param, code="invalid_value")


def function_tools(tools: Iterable[Tool] | None) -> list[dict[str, Any]]:
    """The tools in the form of chat completions, which templates are written for."""
    return [{"type": "function", "function": {
        "name": tool.name, "description": tool.description or "",
        "parameters": tool.parameters or {"type": "object", "properties": {}},
        **({} if tool.strict is None else {"strict": tool.strict}),
    }} for tool in tools or ()]  # fmt: skip


def response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` in the form of chat completions."""
    form = request.text.format if request.text else None
    if form is None or form.type == "text":
        return None
    if isinstance(form, PlainFormat):
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict}}
