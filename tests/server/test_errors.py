"""Every exception as a refusal, in both APIs' shapes; what pydantic says, as a sentence about one field."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import pytest
from anthropic.types import ErrorResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.exceptions import HTTPException

from coli.errors import ColiError, NonFinite, PromptTooLong, ReadError, UsageError
from coli.server.anthropic_schema import MessagesRequest
from coli.server.errors import (
    ApiError,
    anthropic_body,
    body,
    loading,
    model_not_found,
    openai_body,
    parsed,
    renamed,
    unsupported,
    without,
)
from coli.server.job import Busy, Cancelled, Draining, QueueTimeout
from coli.server.openai_schema import ChatRequest
from coli.server.responses_schema import ResponsesRequest


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "retry"),
    [
        (PromptTooLong("too long", "--ctx"), 400, "invalid_request_error", "context_length_exceeded", None),
        (UsageError("wrong", "top_p"), 400, "invalid_request_error", "invalid_value", None),
        (Busy(8, 3), 429, "rate_limit_error", "queue_full", "3"),
        (QueueTimeout(300, 2), 503, "server_error", "queue_timeout", "2"),
        (Draining(), 503, "server_error", "draining", "5"),
        (Cancelled(), 503, "server_error", "draining", "5"),
        (ReadError("read failed", "layer 3, expert 4"), 500, "server_error", None, None),
        (NonFinite("a NaN", "layer 3"), 500, "server_error", None, None),
        (ColiError("something"), 500, "server_error", None, None),
        (HTTPException(404), 404, "invalid_request_error", None, None),
        (KeyError("secret"), 500, "server_error", None, None),
        (loading(), 503, "server_error", "loading", "1"),
        (unsupported("n", "one answer a request"), 400, "invalid_request_error", "unsupported_parameter", None),
        (model_not_found("gpt", "nano"), 404, "invalid_request_error", "model_not_found", None),
    ],
)  # fmt: skip
def test_status_type_code_and_retry(error: Exception, status: int, type: str, code: str | None,
                                    retry: str | None) -> None:  # fmt: skip
    refusal = ApiError.of(error)
    assert (refusal.status, refusal.type, refusal.code) == (status, type, code)
    assert refusal.headers.get("retry-after") == retry
    assert "secret" not in refusal.message
    assert ApiError.of(refusal) is refusal


def scope(path: str, **headers: str) -> Any:
    names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": names, "state": {"request_id": "req_1"}}


def test_both_shapes() -> None:
    error = ApiError(400, "wrong", param="top_p", code="invalid_value")
    inner = {"message": "wrong", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}
    assert openai_body(error) == {"error": inner}
    told = anthropic_body(error, "req_1")
    assert told == {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"},
                    "request_id": "req_1"}  # fmt: skip
    assert ErrorResponse.model_validate(told, strict=True)
    assert body(error, scope("/v1/chat/completions")) == body(error, scope("/v1/models")) == openai_body(error)
    assert body(error, scope("/v1/messages/count_tokens")) == told
    assert body(error, scope("/v1/models", anthropic_version="2023-06-01")) == told


@pytest.mark.parametrize(("status", "type"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
    (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
    (503, "overloaded_error"), (504, "api_error"),
])  # fmt: skip
def test_anthropic_types(status: int, type: str) -> None:
    assert anthropic_body(ApiError(status, "x"), "")["error"]["type"] == type


def test_the_places_of_the_command_line_are_not_a_clients() -> None:
    assert ApiError.of(UsageError("is 3", "--effort", "choose low")).message == "is 3 (choose low)"
    named = ApiError.of(UsageError("is 3", "top_p"))
    assert named.message == "top_p: is 3" and named.param == "top_p"
    assert ApiError.of(UsageError("top_p is 3", "top_p")).message == "top_p is 3", "it is said once"
    overlong = ApiError.of(PromptTooLong("the context is full", "messages", "shorten it"))
    assert (overlong.message, overlong.param) == ("the context is full (shorten it)", "messages")


def test_a_field_has_the_name_that_its_api_gave_it() -> None:
    for error in (unsupported("effort", "no"), UsageError("'effort' is 3", "effort"), PromptTooLong("9", "effort")):
        with pytest.raises(ApiError) as caught, renamed({"effort": "output.effort"}):
            raise error
        assert caught.value.param == "output.effort" and "'effort'" not in caught.value.message


# ---- pydantic --------------------------------------------------------------------------------------------------------


class Text(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class Image(BaseModel):
    type: Literal["image"]
    url: str


class Turn(BaseModel):
    content: str | list[Annotated[Text | Image, Field(discriminator="type")]]


class Ask(BaseModel):
    model_config = ConfigDict(extra="forbid")
    turns: list[Turn]
    heat: float = Field(default=1.0, ge=0, le=2)
    stop: str | list[str] | None = None
    bias: dict[str, float] = {}

    @field_validator("bias")
    @classmethod
    def _few(cls, value: dict[str, float]) -> dict[str, float]:
        if len(value) > 1:
            raise ValueError("takes one entry at most")
        return value


@pytest.mark.parametrize(
    ("wrong", "param", "code", "words"),
    [
        ({"heat": 3}, "heat", "invalid_value", "invalid 'heat': should be less than or equal to 2"),
        ({"heat": "hot"}, "heat", "invalid_value", "should be a valid number"),
        ({"more": 1}, "more", "unknown_parameter", "unknown parameter: 'more'"),
        ({"turns": None}, "turns", "missing_required_parameter", "missing required parameter: 'turns'"),
        ({"turns": [5]}, "turns[0]", "invalid_value", "invalid 'turns[0]': should be an object"),
        ({"turns": [{"content": [{}]}]}, "turns[0].content", "invalid_value", "string"),
        ({"more": None}, "more", "unknown_parameter", "unknown parameter: 'more'"),
        ({"turns": [{}]}, "turns[0].content", "missing_required_parameter", "missing required parameter"),
        ({"turns": [{"content": 3}]}, "turns[0].content", "invalid_value", "a valid string or should be a valid list"),
        ({"turns": [{"content": [{"type": "text"}]}]}, "turns[0].content", "invalid_value", "string"),
        ({"stop": ["a", 3]}, "stop", "invalid_value", "should be a valid string"),
        ({"bias": {"a": 1, "b": 2}}, "bias", "invalid_value", "invalid 'bias': takes one entry at most"),
        ({"bias": {"a": "x"}}, "bias.a", "invalid_value", "should be a valid number"),
    ],
)  # fmt: skip
def test_a_sentence_about_one_field(wrong: dict[str, Any], param: str, code: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(Ask, {"turns": [], **wrong})
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, code) and words in error.message


def test_what_is_right_is_parsed_and_what_is_missing_named() -> None:
    assert parsed(Ask, {"turns": [{"content": [{"type": "text", "text": "x"}]}]}).heat == 1.0
    with pytest.raises(ApiError) as caught:
        parsed(Ask, {})
    assert caught.value.message == "missing required parameter: 'turns'"


# ---- fields and members of unions ------------------------------------------------------------------------------------

SCHEMA = {"name": "n", "schema": {}}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE = {"model": "m", "input": "Hi"}
MESSAGE = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"type": "text", "text": "a"}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
MEMBERS: list[tuple[type[BaseModel], dict[str, Any], str]] = [  # a request and where in it a member of a union stands
    *((ChatRequest, {**CHAT, "messages": [one]}, "messages[0]") for one in (
        {"role": "system", "content": "a"}, {"role": "developer", "content": "a"}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a"}, {"role": "tool", "tool_call_id": "t", "content": "a"},
    )),
    *((ChatRequest, {**CHAT, "messages": [{"role": "user", "content": [one]}]}, "messages[0].content[0]") for one in (
        TEXT, {"type": "refusal", "refusal": "a"},
    )),
    *((ChatRequest, {**CHAT, "response_format": one}, "response_format") for one in (
        {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": SCHEMA},
    )),
    (ChatRequest, {**CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
     "response_format.json_schema"),
    (ChatRequest, {**CHAT, "prediction": {"type": "content", "content": [TEXT]}}, "prediction"),
    (ChatRequest, {**CHAT, "prediction": {"type": "content", "content": [TEXT]}}, "prediction.content[0]"),
    (ChatRequest, {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
    (ChatRequest, {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
    *((ResponsesRequest, {**RESPONSE, "text": {"format": one}}, "text.format") for one in (
        {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", **SCHEMA},
    )),
    (ResponsesRequest, {**RESPONSE, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    *((MessagesRequest, {**MESSAGE, "messages": [{"role": "user", "content": [one]}]}, "messages[0].content[0]")
      for one in (TEXT, {"type": "thinking", "thinking": "a"}, RESULT,
                  {"type": "tool_use", "id": "t", "name": "f", "input": {}})),
    (MessagesRequest, {**MESSAGE, "messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT]}]}]},
     "messages[0].content[0].content[0]"),
    (MessagesRequest, {**MESSAGE, "system": [TEXT]}, "system[0]"),
    *((MessagesRequest, {**MESSAGE, "tool_choice": {"type": one}}, "tool_choice") for one in ("auto", "any", "none")),
    (MessagesRequest, {**MESSAGE, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
]  # fmt: skip


def at(content: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        content = content[int(part) if part.isdigit() else part]
    return content


@pytest.mark.parametrize("model, content, path", MEMBERS, ids=[f"{one[0].__name__}-{one[2]}" for one in MEMBERS])
def test_a_member_of_a_union_is_not_taken_for_a_field(model: type[BaseModel], content: Any, path: str) -> None:
    assert parsed(model, content)
    for extra in ("cache_control", "foo", "text", "function", "user"):
        broken = json.loads(json.dumps(content))
        inner = at(broken, path)
        if extra not in inner:
            inner[extra] = 5
            with pytest.raises(ApiError) as caught:
                parsed(model, broken)
            assert caught.value.param == f"{path}.{extra}" and f"'{path}.{extra}'" in caught.value.message
    for name, value in at(content, path).items():
        broken = json.loads(json.dumps(content))
        at(broken, path)[name] = 5
        if name not in ("type", "role", "schema", "content") and isinstance(value, (str, dict)):
            with pytest.raises(ApiError) as caught:
                parsed(model, broken)
            assert caught.value.param == f"{path}.{name}"


@pytest.mark.parametrize("item, param, words", [
    ({"content": "Hi"}, "input[0].type", "missing required parameter: 'input[0].type'"),
    (5, "input[0]", "invalid 'input[0]': should be an object"),
    ({"type": ["message"]}, "input[0].type", "should be one of"),
    ({"role": "user"}, "input[0].content", "missing required parameter"),
])  # fmt: skip
def test_an_item_that_does_not_say_what_it_is(item: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(ResponsesRequest, {**RESPONSE, "input": [item]})
    assert caught.value.param == param and words in caught.value.message
    assert "_type" not in caught.value.message and "Item" not in caught.value.message


def test_null_is_the_same_as_left_out() -> None:
    for model, content in ((ChatRequest, CHAT), (ResponsesRequest, RESPONSE), (MessagesRequest, MESSAGE)):
        for name in content:
            left_out = {key: value for key, value in content.items() if key != name}
            for broken in (left_out, {**content, name: None}):
                with pytest.raises(ApiError) as caught:
                    parsed(model, broken)
                assert (caught.value.param, caught.value.code) == (name, "missing_required_parameter")


def test_what_asks_for_nothing_is_taken_away() -> None:
    only = {"a": ((1, "x"), "no"), "b": ((), "never")}
    for nothing in ({}, {"a": 1}, {"a": "x", "b": None}, {"b": []}):
        assert without({**nothing, "c": 5}, only) == {"c": 5}
    for name, value in (("a", 2), ("a", True), ("b", {}), ("b", [1]), ("b", False)):
        with pytest.raises(ApiError) as caught:
            without({name: value}, only, "in.")
        assert (caught.value.param, caught.value.code) == (f"in.{name}", "unsupported_parameter")


# ---- what a request may hold at most ---------------------------------------------------------------------------------

WRONG = [0] * 9
_BASES = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    MessagesRequest: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    ResponsesRequest: {"model": "m", "input": "x"},
}
_LISTS = [
    (ChatRequest, "messages", 16384), (ChatRequest, "stop", 4), (ChatRequest, "tools", 1024),
    (MessagesRequest, "messages", 16384), (MessagesRequest, "tools", 1024), (MessagesRequest, "system", 4096),
    (MessagesRequest, "stop_sequences", 64), (ResponsesRequest, "input", 16384), (ResponsesRequest, "tools", 1024),
    (ResponsesRequest, "include", 16),
]  # fmt: skip
_TEXT = {"type": "text", "text": ""}
_FUNCTION = {"name": "f", "parameters": {}}
_RIGHT: dict[str, Any] = {
    "messages": {"role": "user", "content": "x"}, "input": {"role": "user", "content": "x"}, "stop": "a",
    "stop_sequences": "a", "system": _TEXT, "include": "reasoning.encrypted_content",
}  # fmt: skip
_TOOLS: dict[Any, Any] = {
    ChatRequest: {"type": "function", "function": _FUNCTION}, ResponsesRequest: {"type": "function", **_FUNCTION},
    MessagesRequest: {"name": "f", "input_schema": {}},
}  # fmt: skip


@pytest.mark.parametrize(("model", "field", "most"), _LISTS)
def test_a_list_has_a_longest_length(model: type[BaseModel], field: str, most: int) -> None:
    item = _RIGHT.get(field) or _TOOLS[model]
    parsed(model, {**_BASES[model], field: [item] * most})
    with pytest.raises(ApiError, match=f"'{field}': List should have at most {most} items") as caught:
        parsed(model, {**_BASES[model], field: [item] * (most + 1)})
    assert caught.value.status == 400 and caught.value.param == field


@pytest.mark.parametrize(("model", "field"), [(model, field) for model, field, _ in _LISTS] + [(ChatRequest, "parts"),
                         (MessagesRequest, "parts"), (ResponsesRequest, "parts")])  # fmt: skip
def test_of_a_list_the_first_wrong_item_is_the_only_one_told(model: type[BaseModel], field: str) -> None:
    """pydantic would make an error of each of two million, in seconds and gigabytes."""
    content: dict[str, Any] = {field: WRONG}
    if field == "parts":
        content = {"input" if model is ResponsesRequest else "messages": [{"role": "user", "content": WRONG}] * 9}
    with pytest.raises(ValidationError) as caught:
        model.model_validate({**_BASES[model], **content})
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("content", [
    {f"x{i}": 0 for i in range(5000)}, {"metadata": {f"x{i}": 0 for i in range(5000)}},
    {"messages": [{f"x{i}": 0 for i in range(5000)}]},
])  # fmt: skip
def test_an_object_too_wide_is_refused_before_its_fields(content: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="has more than 4,096 fields") as caught:
        parsed(ChatRequest, {**_BASES[ChatRequest], **content})
    assert caught.value.status == 400 and caught.value.param == (next(iter(content)) if len(content) == 1 else None)


@pytest.mark.parametrize("kind", [UsageError, ReadError, ColiError])
def test_no_path_of_the_server_reaches_a_client(kind: type[ColiError]) -> None:
    assert ApiError.of(kind("cannot be read", "/srv/secret/model: layer 3", "look")).message == "cannot be read (look)"
    assert ApiError.of(kind("cannot be read", "layer 3")).message == "layer 3: cannot be read"
