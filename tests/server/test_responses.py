"""OpenAI's Responses over a socket, with OpenAI's own client: objects, numbered events, items, tools, refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from coli.answer import Delta
from coli.server import openai_responses as endpoint
from coli.server import responses_schema as schema
from coli.server.carried import unseal
from coli.server.errors import ApiError, parsed
from coli.tools import ToolCall
from tests.server.events import events, parse
from tests.server.live import Live

if TYPE_CHECKING:
    from openai import OpenAI

PARIS = "What is the capital of France?"
GREEDY = {"model": "nano", "input": PARIS, "max_output_tokens": 40, "temperature": 0}
THINK = {"reasoning": {"effort": "high"}}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [3]}},
        "required": ["city", "days"],
    },
    "strict": True,
}
EVENT = TypeAdapter(ResponseStreamEvent)
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def post(server: Live, **content: Any) -> dict[str, Any]:
    reply = server.post("/v1/responses", {**GREEDY, **content})
    assert reply.status == 200, reply.body
    Response.model_validate(reply.json())
    return reply.json()


def stream(server: Live, **content: Any) -> dict[str, Any]:
    """The response that ends a stream, after its events were checked against it."""
    found = events(server, "/v1/responses", {**GREEDY, **content})
    assert [event["sequence_number"] for _, event in found] == list(range(len(found)))
    for _, event in found:
        EVENT.validate_python(event)
    names = [name.removeprefix("response.") for name, _ in found]
    ended = found[-1][1]["response"]
    assert names[:2] == ["created", "in_progress"] and names[-1] == ended["status"]
    assert found[0][1]["response"]["status"] == "in_progress" and found[0][1]["response"]["output"] == []
    assert rebuilt([event for _, event in found[2:-1]]) == ended["output"]
    return ended


def rebuilt(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the events between the first two and the last add up to."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in found:
        name, index = event["type"].removeprefix("response."), event["output_index"]
        if name == "output_item.added":
            assert index == len(items) == len(done) and event["item"]["status"] == "in_progress"
            items.append(json.loads(json.dumps(event["item"])))
            continue
        item = items[index]
        assert index == len(items) - 1 and event.get("item_id", item["id"]) == item["id"]
        match name:
            case "content_part.added":
                assert event["content_index"] == len(item["content"]) == 0
                item["content"].append(json.loads(json.dumps(event["part"])))
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
                if name == "output_text.delta":
                    item["content"][0]["logprobs"] += event["logprobs"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == item["content"][0]["text"]
                assert event.get("logprobs", []) == item["content"][0].get("logprobs", [])
            case "content_part.done":
                assert event["part"] == item["content"][0]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
            case "output_item.done":
                assert {**event["item"], "status": "in_progress"} | {"encrypted_content": 0} == item | {
                    "encrypted_content": 0
                }
                done.append(event["item"])
            case _:
                raise AssertionError(f"{name} has no place here")
    assert len(done) == len(items)
    return done


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for ids, moments, and what of the prompt was cached and how it was drafted."""
    for response in (one, other):
        assert response.pop("id").startswith("resp_")
        del response["created_at"], response["completed_at"], response["usage"]["input_tokens_details"]
        details = response["usage"]["output_tokens_details"]
        response["usage"]["output_tokens_details"] = details["reasoning_tokens"]
        for item in response["output"]:
            prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[item["type"]]
            assert item.pop("id").startswith(prefix) and item.pop("call_id", "call_").startswith("call_")
    assert one == other


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_response_through_the_client(openai_client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "store": False}
    response = openai_client.responses.create(**asked)
    assert "Paris" in response.output_text and response.status == "completed" and response.object == "response"
    assert (response.model, response.instructions, response.metadata) == ("nano", "Be brief.", {"a": "b"})
    assert (response.temperature, response.tool_choice, response.tools) == (0, "auto", [])
    assert response.created_at <= response.completed_at
    with openai_client.responses.stream(**asked) as streamed:
        texts = [event.delta for event in streamed if event.type == "response.output_text.delta"]
        final = streamed.get_final_response()
    assert "".join(texts) == final.output_text == response.output_text
    assert final.usage.output_tokens == response.usage.output_tokens


@pytest.mark.parametrize("content", [
    {}, {"max_output_tokens": 3}, THINK, {**THINK, "max_output_tokens": 4}, LOGPROBS, {**THINK, **LOGPROBS},
    {**THINK, "include": ["reasoning.encrypted_content"]}, {"speculative": {"enabled": False}},
    {"input": [{"role": "user", "content": PARIS}, {"role": "assistant", "content": "The capital"}]},
])  # fmt: skip
def test_the_stream_adds_up_to_the_response(server: Live, content: dict[str, Any]) -> None:
    same(stream(server, **content), post(server, **content))


def test_usage_and_why_it_ended(server: Live) -> None:
    asked = {"input": "Name a river of Asia."}
    first, second = post(server, **asked), post(server, **asked, max_output_tokens=3)
    assert first["status"] == "completed" and first["incomplete_details"] is None
    usage = first["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert second["status"] == "incomplete" and second["incomplete_details"] == {"reason": "max_output_tokens"}
    assert second["output"][-1]["status"] == "incomplete" and second["usage"]["output_tokens"] == 3
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == usage["input_tokens"]


def test_reasoning_is_an_item_of_its_own(server: Live) -> None:
    reasoning, message = (answer := post(server, **THINK, include=["reasoning.encrypted_content"]))["output"]
    assert (reasoning["type"], message["type"]) == ("reasoning", "message")
    assert unseal(reasoning["encrypted_content"]) == reasoning["content"][0]["text"] != ""
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    assert [item["type"] for item in post(server, reasoning={"effort": "none"})["output"]] == ["message"]


def test_logprobs_are_the_texts(server: Live) -> None:
    for asked in (LOGPROBS, {**LOGPROBS, **THINK}):
        part = post(server, **asked)["output"][-1]["content"][0]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
        for one in part["logprobs"]:
            assert bytes(one["bytes"]).decode() == one["token"] and len(one["top_logprobs"]) == 2
            assert one["logprob"] <= one["top_logprobs"][0]["logprob"] <= 0
    assert post(server)["output"][0]["content"][0]["logprobs"] == []


def test_the_facts_of_drafting_when_asked(server: Live) -> None:
    found = events(server, "/v1/responses", {**GREEDY, "stream_options": {"include_coli": True}})
    told = [event["response"].get("coli") for _, event in found if "response" in event]
    assert told[:-1] == [None, None] and told[-1]["tokens_per_forward"] >= 1


# ---- tools and forms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_function_is_called_and_its_output_read(tool_server: Live, choice: Any) -> None:
    with openai.OpenAI(base_url=tool_server.base_url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {**GREEDY, "model": "nano-tools", "max_output_tokens": 300, "tools": [WEATHER]}
        calling = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
        response = client.responses.create(**calling)
        (call,) = response.output
        assert call.type == "function_call" and call.name == "weather" and response.status == "completed"
        assert response.tools[0].strict is True and response.parallel_tool_calls is False
        assert json.loads(call.arguments).keys() == {"city", "days"}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        items = [{"role": "user", "content": PARIS}, call.model_dump(exclude_none=True), output]
        after = client.responses.create(**{**asked, "input": items, "tool_choice": "none"})
        assert after.output[0].type == "message"
        with client.responses.stream(**calling) as streamed:
            names = [event.type for event in streamed]
            (again,) = streamed.get_final_response().output
    assert again.arguments == call.arguments
    assert names[2:-1] == ["response.output_item.added", "response.function_call_arguments.delta",
                           "response.function_call_arguments.done", "response.output_item.done"]  # fmt: skip


def test_streamed_calls_and_one_that_was_cut(tool_server: Live) -> None:
    asked = {"model": "nano-tools", "max_output_tokens": 130, "tools": [WEATHER], "tool_choice": "required"}
    one, other = stream(tool_server, **asked), post(tool_server, **asked)
    kinds = [item["type"] for item in one["output"]]
    assert kinds == ["function_call"] * len(kinds) and len(kinds) > 1, "of a call that was begun nothing is told"
    assert one["status"] == "incomplete"
    same(one, other)


def test_an_answer_in_a_form(tool_server: Live) -> None:
    form = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
            "additionalProperties": False}  # fmt: skip
    text = {"format": {"type": "json_schema", "name": "city", "schema": form, "strict": True}}
    response = post(tool_server, model="nano-tools", text=text)
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"city": "Paris"}
    assert response["text"]["format"] == text["format"]


# ---- items to the template's form ------------------------------------------------------------------------------------


def converted(**content: Any) -> list[dict[str, Any]]:
    return schema.chat_messages(parsed(schema.ResponsesRequest, {"model": "m", **content}))


def test_leading_system_messages_are_one() -> None:
    assert converted(instructions="a", input=[
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]}, {"role": "user", "content": "c"},
    ]) == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]  # fmt: skip
    assert converted(input="a") == [{"role": "user", "content": "a"}]


def test_the_items_of_an_answer_are_one_message() -> None:
    def call(number: int) -> dict[str, Any]:
        return {"type": "function_call", "id": "fc", "call_id": f"call_{number}", "name": "f", "arguments": '{"a": 1}'}

    def called(number: int) -> dict[str, Any]:
        return {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}

    assert converted(input=[
        {"role": "user", "content": "?"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Two."}]},
        {"type": "message", "id": "msg", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        call(1), call(2),
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "coli:VGhyZWUu"},
        call(3),
        {"type": "function_call_output", "call_id": "call_3", "output": "three"},
    ])[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": [called(1), called(2)]},
        {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "name": "f", "content": "two"},
        {"role": "assistant", "content": "", "reasoning_content": "Three.", "tool_calls": [called(3)]},
        {"role": "tool", "tool_call_id": "call_3", "name": "f", "content": "three"},
    ]  # fmt: skip
    texts = converted(input=[{"role": "assistant", "content": one} for one in "ab"])
    assert [one["content"] for one in texts] == ["a", "b"], "two texts are two messages"


# ---- refusals --------------------------------------------------------------------------------------------------------

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a"}
UNSUPPORTED = [{"truncation": "auto"}, {"text": {"verbosity": "low"}}, {"reasoning": {"summary": "detailed"}},
               {"reasoning": {"generate_summary": "concise"}}, {"prompt_cache_retention": "24h"}, {"store": True},
               {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "input[1].role"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_tool_calls": 1}, "max_tool_calls"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 4.5}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"tools": [WEATHER]}, "tools"),
    ({"tools": [WEATHER], **LOGPROBS}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"input": [{"content": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": "a"}, CALL, OUTPUT]}, "input"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "bogus"}}}}, "text.format"),
    ({"text": {"format": {"type": "text", "text": 5}}}, "text.format.text"),
    ({"input": "word " * 4000}, "input"),
    ({"model": None}, "model"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"stream_options": {"include_coli": True}}, "stream_options"),
    ({"stop": ["a"]}, "stop"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize("content, param", REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
def test_what_cannot_be_done_is_refused_by_name(server: Live, content: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/responses", {**GREEDY, **content})
    assert reply.status == 400, reply.body
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"]


@pytest.mark.parametrize("content", UNSUPPORTED, ids=str)
def test_what_is_not_done_is_refused_in_one_way(content: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        schema.accepted({**GREEDY, **content})
    ((name, inner),) = content.items()
    param = name if not isinstance(inner, dict) or name == "tool_choice" else f"{name}.{next(iter(inner))}"
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert caught.value.message.startswith(f"'{param}' is not supported: ")


def test_what_asks_for_nothing_is_taken() -> None:
    nothing = {"previous_response_id": None, "context_management": [], "access_programs": [], "store": False,
               "background": False, "truncation": "disabled", "prompt_cache_retention": "in_memory",
               "reasoning": {"summary": "auto"}, "text": {"verbosity": "medium"}}  # fmt: skip
    asked = parsed(schema.ResponsesRequest, schema.accepted({**GREEDY, **nothing}))
    assert asked.reasoning is not None and asked.reasoning.summary == "auto"


def test_strictness_is_passed_on() -> None:
    tools = [{**WEATHER, "strict": strict} for strict in (True, False, None)]
    asked = parsed(schema.ResponsesRequest, {**GREEDY, "tools": tools})
    assert [one["function"].get("strict") for one in schema.function_tools(asked.tools)] == [True, False, None]


def test_errors_as_the_client_raises_them(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        openai_client.responses.create(model="gpt", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as overlong:
        openai_client.responses.create(model="nano", input="word " * 4000, stream=True)
    assert overlong.value.code == "context_length_exceeded" and "2048" in str(overlong.value)


def test_a_fault_in_the_middle_is_a_failed_response() -> None:
    request = parsed(schema.ResponsesRequest, {**GREEDY, "stream": True})
    prepared = SimpleNamespace(request=SimpleNamespace(sampling=SimpleNamespace(temperature=0.0, top_p=1.0)))
    reply = endpoint.Reply(SimpleNamespace(model_id="nano"), request, SimpleNamespace(prepared=prepared))  # type: ignore[arg-type]
    ((name, event),) = parse(reply.failed(ApiError(500, "the disk is gone")))
    EVENT.validate_python(event)
    assert name == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "the disk is gone"}


# ---- items -----------------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.builds(Delta, st.sampled_from(["reasoning", "content"]), st.text(min_size=1, max_size=4), st.none()),
    st.builds(lambda n: Delta("tool_call", "", ToolCall(f"call_{n}", "f", json.dumps({"n": n}))), st.integers(0, 99)),
)


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_items_are_what_their_events_add_up_to(deltas: list[Delta], sealed: bool) -> None:
    items = endpoint.Items(sealed=sealed)
    found = [event for delta in deltas for event in items.push(delta, [{"token": delta.text}])] + items.close()
    assert rebuilt(found) == items.done
    messages = [item["content"][0] for item in items.done if item["type"] == "message"]
    said = [delta.text for delta in deltas if delta.kind == "content"]
    assert "".join(part["text"] for part in messages) == "".join(said)
    assert [one["token"] for part in messages for one in part["logprobs"]] == said
