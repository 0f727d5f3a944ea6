"""What POST /v1/chat/completions and /v1/completions accept, and how it becomes ask.Options and template messages.

Idea: three kinds of fields. What is done has a field in a model here, strict in its type. What changes nothing on this
server (`user`, `metadata`, `service_tier`, `safety_identifier`, `prompt_cache_key`; `strict` of a tool, whose calls are
held to the schema only where a call is required) is accepted. What OpenAI knows and this server does not do stands in a
table with the values that ask for nothing (an empty list does so everywhere), and is refused by name otherwise. Wishes
that contradict each other are refused as well. All else is an unknown parameter. null is everywhere the same as left
out.

Beside OpenAI's fields there are those of local servers (top_k, min_p, repetition_penalty, enable_thinking,
chat_template_kwargs, reasoning_content of messages) and coli's own (speculative, pin, stream_options.include_coli).

Guarded by tests/server/test_openai_schema.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coli.server.ask import Named, Options, Speculative, ToolChoice
from coli.server.errors import MOST_ITEMS, ApiError, Only, bounded, missing, parsed, unsupported, without

PROMPT_CACHE_RETENTION = (("in_memory", "in-memory"), "prefixes are kept in memory while there is room")
VERBOSITY = (("medium",), "the models know no such wish")
_ONE = ((1,), "one answer is made of a prompt")
_COMPLETIONS_ONLY: Only = {"best_of": _ONE, "n": _ONE, "suffix": ((), "the models do not fill in")}
_CHAT_ONLY: Only = {
    "n": _ONE,
    "audio": ((), "the answer is text"),
    "function_call": (("auto", "none"), "use tool_choice"),
    "functions": ((), "use tools"),
    "modalities": ((["text"],), "the answer is text"),
    "moderation": ((), "nothing is moderated here"),
    "prompt_cache_options": ((), "prefixes are kept whenever there is room"),
    "prompt_cache_retention": PROMPT_CACHE_RETENTION,
    "store": ((False,), "nothing is stored here"),
    "verbosity": VERBOSITY,
    "web_search_options": ((), "there is no search here"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


# ---- messages --------------------------------------------------------------------------------------------------------


class TextPart(_Model):
    type: Literal["text"]
    text: str


class RefusalPart(_Model):
    type: Literal["refusal"]
    refusal: str


class MediaPart(BaseModel):
    type: Literal["image_url", "input_audio", "file", "video_url"]


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Part = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]
Content = Annotated[list[Part], bounded(4096), BeforeValidator(_as_parts)]


class FunctionCall(_Model):
    name: str
    arguments: str


class Call(_Model):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # of clients that send back what they streamed


class SystemMessage(_Model):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(_Model):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(_Model):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Call], bounded(1024)] | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], bounded(1024)] | None = None  # of an answer that is sent back
    audio: None = None
    function_call: None = None


class ToolMessage(_Model):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# ---- tools and forms -------------------------------------------------------------------------------------------------


class Function(_Model):
    name: str = Field(pattern=r"^[^<>\s]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    type: Literal["function"]
    function: Function


class TextForm(_Model):
    type: Literal["text"]


class ObjectForm(_Model):
    type: Literal["json_object"]


class JsonSchema(_Model):
    name: str
    description: str | None = None
    content: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaForm(_Model):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Form = Annotated[TextForm | ObjectForm | SchemaForm, Field(discriminator="type")]


class Prediction(_Model):
    type: Literal["content"]
    content: Content


# ---- requests --------------------------------------------------------------------------------------------------------


class SpeculativeWish(_Model):
    enabled: bool = True
    max_drafts: int | None = Field(None, ge=0)


class StreamOptions(_Model):
    include_usage: bool | None = None
    include_coli: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Stop = Annotated[str, Field(min_length=1)]
Stops = Annotated[list[Stop], bounded(4), BeforeValidator(_as_list)]


def _as_wish(speculative: Any) -> Any:
    return {"enabled": speculative} if isinstance(speculative, bool) else speculative


Drafts = Annotated[SpeculativeWish, BeforeValidator(_as_wish)]


class _Common(_Model):
    """What both endpoints take. Ranges of the sampler's fields are coli.sampling's to check, but for the one that is
    narrower in this API."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], float] | None = None
    stop: Stops | None = None
    speculative: Drafts | None = None
    pin: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_coli(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_coli)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            what = "'stream_options' says how to stream, and 'stream' is not true"
            raise ApiError(400, what, param="stream_options", code="invalid_value")

    def _options(self, **more: Any) -> Options:
        wish = self.speculative
        return Options(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, seed=self.seed,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
            stop=tuple(self.stop or ()), pin=bool(self.pin),
            speculative=None if wish is None else Speculative(wish.enabled, wish.max_drafts), **more,
        )  # fmt: skip


class ChatRequest(_Common):
    messages: Annotated[list[Message], bounded(MOST_ITEMS)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], bounded(1024)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Form | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ChatRequest:
        """Raises ApiError 400 that names the field."""
        asked = parsed(cls, without(content, _CHAT_ONLY))
        asked.check()
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs' true", param="top_logprobs", code="invalid_value")
        asked._check_thinking()
        return asked

    def _check_thinking(self) -> None:
        """Whether to think can be said in three places. Raises ApiError where they say different things."""
        given = self.chat_template_kwargs or {}
        for name, value in (("enable_thinking", self.enable_thinking), ("reasoning_effort", self.reasoning_effort)):
            if None not in (value, given.get(name)) and given[name] != value:
                raise _contradiction(f"chat_template_kwargs.{name}", name)
        thinking = given.get("enable_thinking") if self.enable_thinking is None else self.enable_thinking
        effort = self.reasoning_effort
        if isinstance(thinking, bool) and effort is not None and thinking == (effort == "none"):
            raise _contradiction("reasoning_effort", "enable_thinking")

    def options(self) -> Options:
        form, tokens = self.response_format, self.max_completion_tokens
        return self._options(
            max_tokens=self.max_tokens if tokens is None else tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            response_format=None if form is None else form.model_dump(by_alias=True, exclude_none=True),
            prediction=None if self.prediction is None else _text(self.prediction.content, "prediction.content"),
        )

    def choice(self) -> ToolChoice:
        match self.tool_choice:
            case None:
                return "auto"
            case "auto" | "none" | "required":
                return self.tool_choice
            case {"type": "function", "function": {"name": str(name)}}:
                return Named(name)
            case {"type": "custom" | "allowed_tools" as kind}:
                raise unsupported("tool_choice", f"type {kind!r} is not known here", "name a function")
        what = '\'tool_choice\' must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise ApiError(400, what, param="tool_choice", code="invalid_value")

    def template_messages(self) -> list[dict[str, Any]]:
        names: dict[str, str] = {}  # of the functions called so far, by the id of the call
        return [_template_message(one, f"messages[{number}]", names) for number, one in enumerate(self.messages)]

    def template_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]


class CompletionRequest(_Common):
    prompt: Any
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's own default
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> CompletionRequest:
        """Raises ApiError 400 that names the field."""
        asked = parsed(cls, without(content, _COMPLETIONS_ONLY))
        asked.check()
        if asked.echo and asked.logprobs is not None:
            raise unsupported("logprobs", "of a prompt that is echoed none are computed", "leave out one of the two")
        return asked

    def options(self) -> Options:
        return self._options(max_tokens=16 if self.max_tokens is None else self.max_tokens, logprobs=self.logprobs)

    def one_prompt(self) -> str | list[int]:
        """The text or the token ids. Raises ApiError for several prompts, and for what is none."""
        match self.prompt:
            case None:
                raise missing("prompt")
            case str():
                return self.prompt
            case [str(text)]:
                return text
            case [list(ids)] if _are_ids(ids):
                return ids
            case list(ids) if _are_ids(ids):
                return ids
            case [str() | list(), _, *_]:
                raise unsupported("prompt", "one prompt a request is answered", "send each in a request of its own")
        what = "'prompt' must be a text, a list with one text, or a list of token ids"
        raise ApiError(400, what, param="prompt", code="invalid_value")


def _are_ids(items: list[Any]) -> bool:
    return bool(items) and all(type(item) is int for item in items)


def _contradiction(param: str, other: str) -> ApiError:
    what = f"'{param}' and '{other}' contradict each other (leave out one of the two)"
    return ApiError(400, what, param=param, code="invalid_value")


# ---- to the template's form ------------------------------------------------------------------------------------------


def _template_message(message: Any, path: str, names: dict[str, str]) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    said["content"] = _text(message.content or (), f"{path}.content")
    if message.name is not None:
        said["name"] = message.name
    if isinstance(message, ToolMessage):
        if message.tool_call_id not in names:
            what = f"invalid '{path}.tool_call_id': no tool call before it has the id '{message.tool_call_id}'"
            raise ApiError(400, what, param=f"{path}.tool_call_id", code="invalid_value")
        said |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
    if isinstance(message, AssistantMessage):
        if message.content is None and message.refusal:
            said["content"] = message.refusal
        if message.reasoning_content is not None:
            said["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            names |= {call.id: call.function.name for call in message.tool_calls}
            said["tool_calls"] = [_template_call(call, f"{path}.tool_calls[{number}]")
                                  for number, call in enumerate(message.tool_calls)]  # fmt: skip
    return said


def _template_call(call: Call, path: str) -> dict[str, Any]:
    """With its arguments as a mapping, which templates go through."""
    function = call.function
    try:
        arguments = json.loads(function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where = f"{path}.function.arguments"
        raise ApiError(400, f"invalid '{where}': no JSON object", param=where, code="invalid_value")
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}


def _text(parts: Sequence[Any], path: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, MediaPart):
            raise unsupported(f"{path}[{number}]", f"the model reads text only, and this is {part.type!r}")
        texts.append(part.refusal if isinstance(part, RefusalPart) else part.text)
    return "".join(texts)
