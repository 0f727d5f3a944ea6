"""Every exception as a refusal, in both APIs' shapes; what pydantic says, as a sentence about one field."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.exceptions import HTTPException

from coli.errors import ColiError, NonFinite, PromptTooLong, ReadError, UsageError
from coli.server.errors import (
    ApiError,
    anthropic_body,
    body,
    loading,
    model_not_found,
    openai_body,
    parsed,
    unsupported,
)
from coli.server.job import Busy, Cancelled, Draining, QueueTimeout


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "retry"),
    [
        (PromptTooLong("too long", "--ctx"), 400, "invalid_request_error", "context_length_exceeded", None),
        (UsageError("wrong", "top_p"), 400, "invalid_request_error", None, None),
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


def test_both_shapes() -> None:
    error = ApiError(400, "wrong", param="top_p", code="invalid_value")
    inner = {"message": "wrong", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}
    assert openai_body(error) == {"error": inner}
    assert anthropic_body(error) == {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"}}
    assert body(error, "/v1/chat/completions") == openai_body(error)
    assert body(error, "/v1/messages/count_tokens") == anthropic_body(error)


@pytest.mark.parametrize(("status", "type"), [
    (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
    (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "api_error"),
    (503, "overloaded_error"), (504, "api_error"),
])  # fmt: skip
def test_anthropic_types(status: int, type: str) -> None:
    assert anthropic_body(ApiError(status, "x"))["error"]["type"] == type


def test_the_places_of_the_command_line_are_not_a_clients() -> None:
    assert ApiError.of(UsageError("is 3", "--effort", "choose low")).message == "is 3 (choose low)"
    named = ApiError.of(UsageError("is 3", "top_p"))
    assert named.message == "top_p: is 3" and named.param == "top_p"


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
        ({"turns": None}, "turns", "invalid_value", "should be a valid list"),
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
