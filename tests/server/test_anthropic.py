"""Anthropic's API over a socket, with Anthropic's own client: objects, events, tools, thinking, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from coli.answer import Delta
from coli.errors import ReadError
from coli.server import anthropic as endpoint
from coli.server import anthropic_schema as schema
from coli.server import sse
from coli.server.answering import Batch
from coli.server.carried import seal, unseal
from coli.server.errors import ApiError, parsed
from coli.tools import ToolCall
from tests.server.events import events, parse
from tests.server.live import Live

if TYPE_CHECKING:
    from anthropic import Anthropic

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": "nano", "max_tokens": 40, "messages": PARIS, "temperature": 0}
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [3]}},
        "required": ["city", "days"],
    },
}
EVENT = TypeAdapter(RawMessageStreamEvent)


def post(server: Live, **content: Any) -> dict[str, Any]:
    reply = server.post("/v1/messages", {**GREEDY, **content})
    assert reply.status == 200, reply.body
    Message.model_validate(reply.json(), strict=True)
    return reply.json()


def stream(server: Live, **content: Any) -> dict[str, Any]:
    """The message that a stream adds up to, by the rules of the API."""
    message: dict[str, Any] = {}
    for name, event in events(server, "/v1/messages", {**GREEDY, **content}):
        match name:
            case "ping":
                assert event == {"type": "ping"}
                continue
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == [] and message["stop_reason"] is None
                at_start = message["usage"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                grown = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                assert event["index"] == len(message["content"]) - 1
                if delta["type"] == "input_json_delta":
                    grown += delta["partial_json"]
                    continue
                (field,) = delta.keys() - {"type"}
                assert delta["type"] == f"{field}_delta"
                assert block["type"] == ("thinking" if field == "signature" else field)
                block[field] += delta[field]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(grown)
            case "message_delta":
                message |= event["delta"]
                assert {**at_start, **event["usage"]} == event["usage"]
                assert at_start["cache_read_input_tokens"] == event["usage"]["cache_read_input_tokens"]
                message["usage"] = event["usage"]
        EVENT.validate_python(event, strict=True)
    assert name == "message_stop"
    return message


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal but for ids, and for what of the prompt was cached and how it was drafted."""
    for message in (one, other):
        assert message.pop("id").startswith("msg_")
        usage = message["usage"]
        usage["prompt"] = usage.pop("input_tokens") + usage.pop("cache_read_input_tokens")
        assert usage["output_tokens_details"].keys() == {
            "thinking_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens",
        }  # fmt: skip
        usage["output_tokens_details"] = usage["output_tokens_details"]["thinking_tokens"]
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
    assert one == other


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_message_through_the_client(anthropic_client: Anthropic) -> None:
    message = anthropic_client.messages.create(model="nano", max_tokens=40, messages=PARIS, system="Be brief.",
                                               extra_body={"temperature": 0})  # fmt: skip
    assert (message.type, message.role, message.model) == ("message", "assistant", "nano")
    (block,) = message.content
    assert block.type == "text" and "Paris" in block.text
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id, "the client finds the id under Anthropic's name"
    with anthropic_client.messages.stream(model="nano", max_tokens=40, messages=PARIS, system="Be brief.",
                                          extra_body={"temperature": 0}) as streamed:  # fmt: skip
        assert "".join(streamed.text_stream) == block.text
        final = streamed.get_final_message()
    assert final.content[0].text == block.text and final.usage.output_tokens == message.usage.output_tokens


@pytest.mark.parametrize("content", [
    {}, {"max_tokens": 3}, {"stop_sequences": ["xyzzy", " is"]}, {"stop_sequences": [" capital of", "l o"]},
    {"thinking": {"type": "enabled", "budget_tokens": 30}}, {"speculative": False},
    {"thinking": {"type": "enabled", "budget_tokens": 2}, "max_tokens": 5},
    {"thinking": {"type": "enabled", "budget_tokens": 30, "display": "omitted"}},
    {"messages": [*PARIS, {"role": "assistant", "content": "The capital"}]},
])  # fmt: skip
def test_the_stream_adds_up_to_the_message(server: Live, content: dict[str, Any]) -> None:
    same(stream(server, **content), post(server, **content))


def test_events_come_in_order(server: Live) -> None:
    thinking = {"type": "enabled", "budget_tokens": 30}
    names = [name for name, _ in events(server, "/v1/messages", {**GREEDY, "thinking": thinking})]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    inner = [name for name in names[2:-2] if name != "content_block_delta"]
    assert inner == ["content_block_start", "content_block_stop"] * 2, "thinking, then text"


def test_why_it_stopped(server: Live) -> None:
    told = [(one["stop_reason"], one["stop_sequence"]) for one in (
        post(server), post(server, max_tokens=3), post(server, stop_sequences=["xyzzy", " is"]),
    )]  # fmt: skip
    assert told == [("end_turn", None), ("max_tokens", None), ("stop_sequence", " is")]
    assert post(server, max_tokens=3)["usage"]["output_tokens"] == 3


def test_usage_counts_what_was_read_and_what_was_not(server: Live, anthropic_client: Anthropic) -> None:
    asked = [{"role": "user", "content": "Name a river of Africa."}]
    count = anthropic_client.messages.count_tokens(model="nano", messages=asked).input_tokens
    first, second = (post(server, messages=asked)["usage"] for _ in range(2))
    assert all(one["input_tokens"] + one["cache_read_input_tokens"] == count for one in (first, second))
    assert (first["cache_read_input_tokens"], second["cache_read_input_tokens"]) == (0, count)
    assert first["cache_creation_input_tokens"] == 0


# ---- thinking --------------------------------------------------------------------------------------------------------


def test_thinking_is_off_unless_asked_for(server: Live) -> None:
    assert [block["type"] for block in post(server)["content"]] == ["text"]
    assert post(server, thinking={"type": "disabled"})["content"] == post(server)["content"]
    message = post(server, thinking={"type": "enabled", "budget_tokens": 30})
    thinking, text = message["content"]
    assert (thinking["type"], text["type"]) == ("thinking", "text") and thinking["thinking"] and thinking["signature"]
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


def test_omitted_thinking_comes_back_in_its_signature(tool_server: Live) -> None:
    asked = {"model": "nano-tools", "thinking": {"type": "enabled", "budget_tokens": 30}}
    shown = post(tool_server, **asked)["content"]
    omitted = post(tool_server, model="nano-tools", thinking={**asked["thinking"], "display": "omitted"})["content"]
    assert omitted[0]["thinking"] == "" and unseal(omitted[0]["signature"]) == shown[0]["thinking"]
    counts = []
    for content in (shown, omitted, shown[1:]):
        messages = [*PARIS, {"role": "assistant", "content": content}, {"role": "user", "content": "Sure?"}]
        keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        reply = tool_server.post("/v1/messages/count_tokens",
                                 {"model": "nano-tools", "messages": messages, "context_management": keep})  # fmt: skip
        counts.append(reply.json()["input_tokens"])
    assert counts[0] == counts[1] > counts[2]


def test_a_seal_opens_to_what_was_sealed() -> None:
    assert unseal(seal("Ein Süßwasserfisch 🐟")) == "Ein Süßwasserfisch 🐟"
    assert [unseal(one) for one in (None, "", "coli", "coli:%", "coli:gA==", "EqQBCgIYAhIM")] == [None] * 6


# ---- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_read(tool_server: Live, choice: dict[str, Any]) -> None:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "nano-tools", "max_tokens": 300, "tools": [WEATHER], "messages": PARIS}
        choice = {**choice, "disable_parallel_tool_use": True}
        message = client.messages.create(**asked, tool_choice=choice, extra_body={"temperature": 0})
        assert message.stop_reason == "tool_use"
        (use,) = message.content
        assert use.type == "tool_use" and use.name == "weather" and use.id.startswith("toolu_")
        assert use.input["city"] in ("Paris", "Rome") and use.input["days"] == 3
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "Sunny."}]}
        asked["messages"] = [*PARIS, message.to_param(), {"role": "user", "content": [result]}]
        after = client.messages.create(**asked, tool_choice={"type": "none"}, extra_body={"temperature": 0})
        assert after.stop_reason in ("end_turn", "max_tokens") and after.content[0].type == "text"
        with client.messages.stream(**asked | {"messages": PARIS}, tool_choice=choice,
                                    extra_body={"temperature": 0}) as streamed:  # fmt: skip
            final = streamed.get_final_message()
    assert [(one.name, one.input) for one in final.content if one.type == "tool_use"] == [
        (one.name, one.input) for one in message.content if one.type == "tool_use"
    ]


def test_streamed_uses_and_one_that_was_cut(tool_server: Live) -> None:
    asked = {"model": "nano-tools", "max_tokens": 130, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    one, other = stream(tool_server, **asked), post(tool_server, **asked)
    assert one["stop_reason"] == "max_tokens", "nano calls until it is stopped"
    kinds = [block["type"] for block in one["content"]]
    assert kinds == ["tool_use"] * len(kinds) and len(kinds) > 1, "of a call that was begun nothing is told"
    same(one, other)


def test_an_answer_in_a_form(tool_server: Live) -> None:
    form = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
            "additionalProperties": False}  # fmt: skip
    output = {"format": {"type": "json_schema", "schema": form}}
    message = post(tool_server, model="nano-tools", max_tokens=60, output_config=output)
    assert json.loads(message["content"][0]["text"]) == {"city": "Paris"}


# ---- messages to the template's form ---------------------------------------------------------------------------------


def converted(**content: Any) -> list[dict[str, Any]]:
    return schema.chat_messages(parsed(schema.CountRequest, {"model": "m", **content}))


def test_turns_of_one_role_are_one_turn() -> None:
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    assert converted(system=[text, text], messages=[
        {"role": "user", "content": "a"}, {"role": "user", "content": [text]},
        {"role": "assistant", "content": [text, text]}, {"role": "user", "content": "c"},
    ]) == [
        {"role": "system", "content": "b\nb"}, {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "bb"}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    headed = converted(system="a", messages=[{"role": "system", "content": "b"}, {"role": "user", "content": "c"}])
    assert headed == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "c"}]


def test_uses_and_results() -> None:
    assert converted(messages=[
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Two.", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1]}},
            {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "one"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
            {"type": "text", "text": "And?"},
        ]},
    ])[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}},
            {"id": "toolu_2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ]},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "g", "content": "Error"},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "Error: no such city"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip


def test_strictness_is_passed_on() -> None:
    def strict(**tool: Any) -> dict[str, Any]:
        asked = {"model": "m", "messages": PARIS, "tools": [{**WEATHER, **tool}]}
        return schema.function_tools(parsed(schema.CountRequest, asked).tools)[0]["function"]

    assert strict(strict=True)["strict"] is True and strict(strict=False)["strict"] is False
    assert "strict" not in strict()


def test_what_asks_for_nothing_is_taken() -> None:
    content = {**GREEDY, "mcp_servers": [], "fallbacks": [], "container": None, "thread": None}
    assert parsed(schema.MessagesRequest, schema.accepted(content)).max_tokens == 40


# ---- refusals --------------------------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0]"),
    ({"messages": [*PARIS, {"role": "system", "content": "Be brief."}]}, "messages[1].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [WEATHER]}, "'tools'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "foo": {}}]}]},
     "unknown parameter: 'messages[0].content[0].foo'"),
    ({"messages": [*PARIS, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a"}]}]}, "reads no tool calls"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "bogus"}}}},
     "invalid 'output_config.format': "),
    ({"model": None}, "missing required parameter: 'model'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 40}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"speed": "fast"}, "speed"),
    ({"n": 2}, "unknown parameter: 'n'"),
]


@pytest.mark.parametrize("content, word", REFUSED, ids=[word for _, word in REFUSED])
def test_what_cannot_be_done_is_refused_by_name(server: Live, content: dict[str, Any], word: str) -> None:
    reply = server.post("/v1/messages", {**GREEDY, **content})
    assert reply.status == 400, reply.body
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == reply.headers["request-id"]
    assert body["error"]["type"] == "invalid_request_error" and word in body["error"]["message"]


def test_errors_as_the_client_raises_them(server: Live, anthropic_client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        anthropic_client.messages.create(model="claude", max_tokens=5, messages=PARIS)
    assert missing.value.body["error"]["type"] == "not_found_error" and "'nano'" in str(missing.value)
    with pytest.raises(anthropic.NotFoundError) as missing:
        anthropic_client.models.retrieve("claude")
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.body["request_id"] == missing.value.request_id
    long = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(anthropic.BadRequestError) as overlong:
        anthropic_client.messages.create(model="nano", max_tokens=5, messages=long, stream=True)
    count = anthropic_client.messages.count_tokens(model="nano", messages=long).input_tokens
    assert count > 2048 and f"{count}" in str(overlong.value) and "2048" in str(overlong.value)


# ---- streams that go wrong -------------------------------------------------------------------------------------------


class Scripted:
    """An answering that gives a delta, and then `end`s."""

    def __init__(self, end: Callable[[], Awaitable[None]]) -> None:
        self.job = SimpleNamespace(cached_tokens=0)
        self.prepared = SimpleNamespace(request=SimpleNamespace(prompt_ids=(1, 2)))
        self.end, self.closed = end, False

    async def __aiter__(self) -> AsyncIterator[Batch]:
        yield Batch([Delta("content", "Hi")], ())
        await self.end()

    async def aclose(self) -> None:
        self.closed = True


def serve(answering: Any, send: Callable[[bytes], None]) -> None:
    """Run its stream; `send` is given every piece of the body."""

    async def write(message: Any) -> None:
        send(message.get("body", b""))

    async def run() -> None:
        frames = endpoint.Message("m", answering, omitted=False).frames()
        response = sse.EventStream(answering, frames, endpoint._failure("req_1"), endpoint._frames([endpoint.PING]))
        await response({"type": "http"}, asyncio.Event().wait, write)  # type: ignore[arg-type]

    asyncio.run(run())


def test_a_fault_in_the_middle_ends_the_stream_with_an_error() -> None:
    async def fail() -> None:
        raise ReadError("the disk is gone")

    written: list[bytes] = []
    answering = Scripted(fail)
    with pytest.raises(ReadError):  # for the server to say
        serve(answering, written.append)
    found = parse(b"".join(written))
    names = [name for name, _ in found]
    assert names == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]
    assert found[-1][1]["error"] == {"type": "api_error", "message": "the disk is gone"} and answering.closed
    assert found[-1][1]["request_id"] == "req_1"


def test_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    heard = asyncio.Event()
    written: list[bytes] = []

    def send(piece: bytes) -> None:
        written.append(piece)
        if written.count(endpoint._frames([endpoint.PING])) == 3:
            heard.set()

    async def wait() -> None:
        await heard.wait()
        raise ApiError(503, "over")

    serve(Scripted(wait), send)
    names = [name for name, _ in parse(b"".join(written))]
    assert names.count("ping") >= 4 and names[-1] == "error"


# ---- blocks ----------------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.builds(Delta, st.sampled_from(["reasoning", "content"]), st.text(min_size=1, max_size=4), st.none()),
    st.builds(lambda n: Delta("tool_call", "", ToolCall(f"call_{n}", "f", json.dumps({"n": n}))), st.integers(0, 99)),
)


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_blocks_are_what_their_events_add_up_to(deltas: list[Delta], omitted: bool) -> None:
    blocks = endpoint.Blocks(omitted=omitted)
    found = [event for delta in deltas for event in blocks.push(delta)] + blocks.close()
    rebuilt: list[dict[str, Any]] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(rebuilt)
            rebuilt.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            field, value = next((key, value) for key, value in event["delta"].items() if key != "type")
            if field == "partial_json":
                rebuilt[event["index"]]["input"] = json.loads(value)
            else:
                rebuilt[event["index"]][field] += value
    assert rebuilt == blocks.content
    assert sum(event["type"] == "content_block_stop" for event in found) == len(rebuilt)
    shown = [block["text"] for block in blocks.content if block["type"] == "text"]
    assert "".join(shown) == "".join(delta.text for delta in deltas if delta.kind == "content")
    thought = [block["thinking"] or unseal(block["signature"]) for block in blocks.content if "thinking" in block]
    assert "".join(thought) == "".join(delta.text for delta in deltas if delta.kind == "reasoning")
