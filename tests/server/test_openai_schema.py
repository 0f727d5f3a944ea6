"""What OpenAI's endpoints take, and the field that each refusal names (coli/server/openai_schema.py)."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatFields
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionFields

from coli.server.ask import Named, Options, Speculative
from coli.server.errors import ApiError
from coli.server.openai_schema import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "default": None}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.of({"model": "nano", "messages": MESSAGES, **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked = chat(**fields)
        asked.template_messages(), asked.options(), asked.choice()
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    return caught.value


def test_every_field_of_openais_clients_is_known() -> None:
    for fields, kind in ((ChatFields, ChatRequest), (CompletionFields, CompletionRequest)):
        for name in get_type_hints(fields):
            with pytest.raises(ApiError) as caught:
                kind.of({name: object()})
            assert "unknown parameter" not in caught.value.message or caught.value.param != name, name


@pytest.mark.parametrize("field, value", [
    ("n", 2), ("n", True), ("audio", {"voice": "a"}), ("modalities", ["text", "audio"]), ("store", True), ("store", 1),
    ("functions", [{}]), ("function_call", {"name": "f"}), ("web_search_options", {}), ("verbosity", "low"),
    ("prompt_cache_retention", "24h"), ("moderation", {}),
])  # fmt: skip
def test_what_is_not_done_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")


def test_values_that_ask_for_nothing_are_taken() -> None:
    chat(n=1, store=False, modalities=["text"], verbosity="medium", user="u", metadata={"a": "b"},
         service_tier="auto", safety_identifier="s", prompt_cache_key="k", stop=None, tools=None, logprobs=None,
         stream=False, max_tokens=None, function_call="none", functions=[], audio=[],
         temperature=2)  # fmt: skip


def test_one_wish_may_be_said_twice() -> None:
    chat(enable_thinking=True, chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low")
    chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": None, "x": 1}, reasoning_effort="none")
    assert chat(prediction={"type": "content", "content": "a"}, speculative=False).options().prediction == "a"


@pytest.mark.parametrize("fields, param", [
    ({"colour": 1}, "colour"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"model": None}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
     "chat_template_kwargs.enable_thinking"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
     "chat_template_kwargs.reasoning_effort"),
    ({"reasoning_effort": "high", "enable_thinking": False}, "reasoning_effort"),
    ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "reasoning_effort"),
    ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "5"}]}, "messages[0].tool_call_id"),
    ({"messages": [CALLING, {"role": "tool", "tool_call_id": "c2", "content": "5"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "c1", "content": "5"}, CALLING]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
     "messages[0].content[0].cache_control"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ""}, "stop[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"speculative": {"max_drafts": -1}}, "speculative.max_drafts"),
    ({"speculative": "yes"}, "speculative"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "cook", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]"),
    ({"messages": [*MESSAGES, {"role": "assistant", "audio": {"id": "1"}}]}, "messages[1].audio"),
    ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": "[1]"}}]}]}, "messages[1].tool_calls[0].function.arguments"),
    ({"prediction": {"type": "content", "content": [{"type": "file"}]}}, "prediction.content[0]"),
])  # fmt: skip
def test_a_mistake_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param and param in error.message


def test_wishes_become_options() -> None:
    asked = chat(
        max_tokens=9, max_completion_tokens=5, temperature=1, top_p=0.5, top_k=4, min_p=0.1, seed=-3, stop="END",
        logit_bias={"17": -100}, logprobs=True, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1,
        speculative={"enabled": True, "max_drafts": 2}, pin=True,
        prediction={"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": None}}},
    )  # fmt: skip
    assert asked.options() == Options(
        max_tokens=5, temperature=1, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.1, presence_penalty=1,
        frequency_penalty=-1, seed=-3, logit_bias=((17, -100),), stop=("END",), logprobs=0, prediction="ab",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": None}}},
        speculative=Speculative(True, 2), pin=True,
    )  # fmt: skip
    assert chat(max_tokens=9, stop=[]).options() == Options(max_tokens=9)
    assert chat(speculative=False).options().speculative == Speculative(False)
    assert chat(logprobs=True, top_logprobs=3).options().logprobs == 3


def test_messages_become_the_templates() -> None:
    answer = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL], "refusal": None,
              "annotations": [], "audio": None, "function_call": None}  # fmt: skip  # as clients send one back
    asked = chat(messages=[
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Warm?"}]},
        answer, {"role": "tool", "tool_call_id": "c1", "content": "5"}, {"role": "assistant", "refusal": "No."},
    ])  # fmt: skip
    assert asked.template_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "weather"},
        {"role": "assistant", "content": "No."},
    ]  # fmt: skip


def test_tools_stay_as_they_were_sent() -> None:
    asked = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert asked.template_tools() == [TOOL] and asked.choice() == Named("weather")
    assert [chat(tool_choice=word).choice() for word in (None, "auto", "none", "required")] == [
        "auto", "auto", "none", "required"]  # fmt: skip


# ---- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt, one", [
    ("Once", "Once"), (["Once"], "Once"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ("", ""), ([0], [0]),
])  # fmt: skip
def test_one_prompt_in_any_form(prompt: Any, one: Any) -> None:
    assert CompletionRequest.of({"model": "nano", "prompt": prompt}).one_prompt() == one


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [], [[]], None, 5, [1, "a"], [True], [1.5], [["a"]]])
def test_several_prompts_and_none_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        CompletionRequest.of({"model": "nano", "prompt": prompt}).one_prompt()
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("fields, param", [
    ({"best_of": 2}, "best_of"), ({"suffix": "end"}, "suffix"), ({"n": 3}, "n"), ({"logprobs": 6}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "logprobs"), ({"messages": MESSAGES}, "messages"),
    ({"max_tokens": 0}, "max_tokens"), ({"temperature": 3}, "temperature"), ({"model": None}, "model"),
])  # fmt: skip
def test_a_mistake_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        CompletionRequest.of({"model": "nano", "prompt": "a", **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_completion_has_openais_length_unless_told() -> None:
    for fields, most in (({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 40}, 40)):
        assert CompletionRequest.of({"model": "nano", "prompt": "a", **fields}).options().max_tokens == most
