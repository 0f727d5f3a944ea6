"""POST /v1/chat/completions over a socket, by the openai client and by its bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, ConfigDict

from tests.server.asking import TOKENIZER, assistant, system, user
from tests.server.live import Live

STORY = [user("Tell me a short story about a fox.")]
GREEDY: dict[str, Any] = {"model": "nano", "messages": STORY, "temperature": 0.0, "max_tokens": 24}
CALLED: Any = [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]  # fmt: skip
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"], "additionalProperties": False}}}  # fmt: skip


def ask(client: OpenAI, **fields: Any) -> ChatCompletion:
    own = {name: fields.pop(name) for name in OWN if name in fields}
    return client.chat.completions.create(**{**GREEDY, **fields}, extra_body=own)


OWN = ("speculative", "pin", "enable_thinking", "chat_template_kwargs", "top_k", "min_p", "repetition_penalty")


def stream(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    own = {name: fields.pop(name) for name in OWN if name in fields}
    asked = {**GREEDY, "stream_options": {"include_usage": True}, **fields}
    return list(client.chat.completions.create(**asked, stream=True, extra_body=own))


def frames(server: Live, **fields: Any) -> list[Any]:
    """The stream's data lines, the last one included."""
    reply = server.post("/v1/chat/completions", {**GREEDY, "stream": True, **fields})
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    events = reply.body.decode().split("\n\n")
    assert events.pop() == "" and all(one.startswith("data: ") for one in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in events]


def joined(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [choice.delta for choice in choices]
    scored = [choice.logprobs.content for choice in choices if choice.logprobs is not None]
    return {
        "content": "".join(delta.content or "" for delta in deltas),
        "reasoning": "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        "calls": [(call.function.name, call.function.arguments) for delta in deltas for call in delta.tool_calls or []
                  if call.function],
        "finish_reason": choices[-1].finish_reason,
        "logprobs": [token for content in scored for token in content or []] or None,
        "usage": counts(chunks[-1].usage),
    }  # fmt: skip


def whole(answer: ChatCompletion) -> dict[str, Any]:
    choice = answer.choices[0]
    return {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", ""),
        "calls": [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],
        "finish_reason": choice.finish_reason,
        "logprobs": (choice.logprobs.content or None) if choice.logprobs else None,
        "usage": counts(answer.usage),
    }


def counts(usage: Any) -> tuple[int, ...]:
    """What does not depend on what the server did before."""
    return (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
            usage.completion_tokens_details.reasoning_tokens)  # fmt: skip


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_an_answer_in_one_piece(openai_client: OpenAI) -> None:
    answer = ask(openai_client)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "nano"
    assert answer.system_fingerprint and answer.system_fingerprint.startswith("fp_")
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.message.refusal is None
    assert (choice.index, choice.finish_reason, choice.logprobs, choice.message.tool_calls) == (0, "length", None, None)
    usage = answer.usage
    assert usage is not None and usage.completion_tokens == 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    assert prompt is not None and prompt.cached_tokens is not None and prompt.audio_tokens == 0
    assert completion is not None and completion.reasoning_tokens == 0 and completion.audio_tokens == 0
    assert completion.accepted_prediction_tokens is not None and completion.rejected_prediction_tokens is not None


def test_a_stream_frame_by_frame(server: Live) -> None:
    chunks = frames(server, stream_options={"include_usage": True, "include_coli": True})
    first, *answer, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert answer and all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in answer)
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "length")
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *answer])
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert usage["coli"]["tokens"] == usage["coli"]["forwards"] + usage["coli"]["accepted"] == 23
    assert usage["coli"]["gate"] is None or usage["coli"]["gate"]["on"]
    for name in ("id", "created", "model", "system_fingerprint", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1
    assert first["object"] == "chat.completion.chunk"


def test_the_facts_have_the_same_keys_with_drafts_and_without(server: Live) -> None:
    drafted, plain = (frames(server, stream_options={"include_coli": True}, speculative=wish)[-1]["coli"]
                      for wish in (True, False))  # fmt: skip
    assert drafted.keys() == plain.keys() and (drafted["speculation"], plain["speculation"]) == (True, False)


def test_what_was_not_asked_for_is_not_there(server: Live) -> None:
    chunks = frames(server)
    assert all(chunk["choices"] and "usage" not in chunk and "coli" not in chunk for chunk in chunks)
    last = frames(server, stream_options={"include_coli": True})[-1]
    assert last["coli"] and last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [
    {}, {"enable_thinking": True, "max_tokens": 60}, {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "enable_thinking": True, "max_tokens": 60}, {"stop": [" a", "zzz"], "logprobs": True},
    {"temperature": 1.0, "seed": 7, "logprobs": True, "top_logprobs": 1}, {"max_tokens": 1, "logprobs": True},
    {"stop": "Once", "logprobs": True}, {"max_tokens": 400},
])  # fmt: skip
def test_the_joined_stream_is_the_answer_in_one_piece(openai_client: OpenAI, asked: dict[str, Any]) -> None:
    assert joined(stream(openai_client, **asked)) == whole(ask(openai_client, **asked))


# ---- tokens and their log-probabilities ------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_text(openai_client: OpenAI) -> None:
    choice = ask(openai_client, logprobs=True, top_logprobs=5).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 24
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == choice.message.content
    for token in tokens:
        ranked = [other.logprob for other in token.top_logprobs]
        assert len(ranked) == 5 and ranked == sorted(ranked, reverse=True)
        assert token.logprob == ranked[0] and token.token == token.top_logprobs[0].token  # greedy
        assert token.logprob < 0  # p = 1 is never said of a draft


def test_drafts_change_nothing_a_client_can_see(openai_client: OpenAI) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "temperature": 0.9, "seed": 3, "max_tokens": 60}
    plain = ask(openai_client, speculative=False, **asked)
    assert plain.usage and plain.usage.completion_tokens_details
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    drafting = [ask(openai_client, speculative=wish, **asked)
                for wish in (True, {"max_drafts": 1}, {"enabled": True, "max_drafts": 5})]  # fmt: skip
    assert all(whole(answer) == whole(plain) for answer in drafting)
    assert any(answer.usage.completion_tokens_details.accepted_prediction_tokens for answer in drafting)  # type: ignore


def test_a_stop_cuts_text_tokens_and_usage_at_one_place(openai_client: OpenAI) -> None:
    free = ask(openai_client, max_tokens=40).choices[0].message.content or ""
    stop = free[10:14]
    answer = ask(openai_client, max_tokens=40, stop=["never", stop], logprobs=True)
    choice = answer.choices[0]
    assert choice.message.content == free[: free.index(stop)] and choice.finish_reason == "stop"
    assert choice.logprobs and choice.logprobs.content is not None and answer.usage
    spelled = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content[:-1]).decode()
    assert len(spelled) < len(choice.message.content)  # the last token begins before the cut
    assert answer.usage.completion_tokens == len(choice.logprobs.content)


def test_limits_seeds_and_bias(openai_client: OpenAI) -> None:
    short = ask(openai_client, max_tokens=20, max_completion_tokens=3)
    assert short.usage and short.usage.completion_tokens == 3
    same = [ask(openai_client, temperature=1.5, seed=seed).choices[0].message.content for seed in (5, 5, -5)]
    assert same[0] == same[1] != same[2]
    fox = TOKENIZER.encode(" fox")[0]
    biased = ask(openai_client, logit_bias={str(fox): 100}, max_tokens=3, logprobs=True)
    assert biased.choices[0].message.content == " fox fox fox"
    assert biased.choices[0].logprobs.content[0].logprob < -1  # type: ignore  # what the model itself held of it


# ---- messages --------------------------------------------------------------------------------------------------------


def test_reasoning_is_told_apart(openai_client: OpenAI) -> None:
    for wish in ({"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}},
                 {"reasoning_effort": "high"}):  # fmt: skip
        answer = whole(ask(openai_client, **wish, max_tokens=4))
        assert answer["reasoning"] and answer["content"] == "" and answer["usage"][3] == 4
    answer = whole(ask(openai_client, reasoning_effort="none", max_tokens=4))
    assert answer["content"] and answer["reasoning"] == "" and answer["usage"][3] == 0


def test_a_trailing_assistant_message_is_continued(openai_client: OpenAI) -> None:
    head = f"<|im_start|>user\n{STORY[0]['content']}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for begun in ("Once upon", "There was a fox who"):
        answer = ask(openai_client, messages=[*STORY, assistant(begun)], max_tokens=8)
        raw = openai_client.completions.create(model="nano", prompt=head + begun, max_tokens=8, temperature=0.0)
        assert answer.choices[0].message.content == raw.choices[0].text
        assert answer.usage and raw.usage and answer.usage.prompt_tokens == raw.usage.prompt_tokens


def test_a_developers_message_is_a_systems(openai_client: OpenAI) -> None:
    one, other = (ask(openai_client, messages=[{"role": role, "content": "You are a fox."}, *STORY], max_tokens=8)
                  for role in ("system", "developer"))  # fmt: skip
    assert whole(one) == whole(other)


def test_a_conversation_costs_what_is_new(openai_client: OpenAI) -> None:
    messages: list[Any] = [system("You like foxes and tell of them."), user("Who lives in the wood behind the hill?")]
    first = ask(openai_client, messages=messages, max_tokens=12)
    messages += [assistant(first.choices[0].message.content or ""), user("And who else?")]
    second = ask(openai_client, messages=messages, max_tokens=4)
    rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages[:2])
    shared = TOKENIZER.encode(rendered + "<|im_start|>assistant\n")  # nano's template writes no more the second time
    assert second.usage and second.usage.prompt_tokens_details
    assert second.usage.prompt_tokens_details.cached_tokens == len(shared)
    again = ask(openai_client, messages=messages, max_tokens=4)
    assert again.usage and again.usage.prompt_tokens_details and whole(again) == whole(second)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens


def test_the_context_is_used_to_its_last_token(server: Live, openai_client: OpenAI) -> None:
    around = ask(openai_client, messages=[user("")], max_tokens=1).usage
    assert around is not None
    room = 2048 - around.prompt_tokens
    full = ask(openai_client, messages=[user(" a" * (room - 1))], max_tokens=50)
    assert full.usage and full.usage.prompt_tokens == 2047 and full.usage.completion_tokens == 1
    for more in (0, 1):
        with pytest.raises(openai.BadRequestError) as caught:
            stream(openai_client, messages=[user(" a" * (room + more))])
        assert caught.value.code == "context_length_exceeded"
        assert "2048" in caught.value.message and str(2048 + more) in caught.value.message


def test_refusals_are_openais_errors(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        ask(openai_client, model="gpt-5")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    for fields, param in (({"n": 2}, "n"), ({"tools": [WEATHER]}, "tools"), ({"top_p": 0.0}, "top_p"),
                          ({"logit_bias": {"9000": 1}}, "logit_bias"), ({"temperature": 1e9}, "temperature"),
                          ({"messages": [user(" a" * 2048)]}, "messages"),
                          ({"messages": [*STORY, *CALLED]}, "messages"),
                          ({"response_format": {"type": "json_schema", "json_schema": {
                              "name": "x", "schema": {"type": "strange"}}}}, "response_format")):  # fmt: skip
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(openai_client, stream=streamed, **fields)
            assert caught.value.type == "invalid_request_error" and caught.value.param == param and caught.value.code


def test_a_refusal_before_the_queue_is_no_turn(server: Live) -> None:
    before = server.get("/profile").json()["turns"]
    reply = server.post("/v1/chat/completions", {**GREEDY, "logit_bias": {"8192": 1}})
    assert reply.status == 400 and reply.json()["error"]["param"] == "logit_bias"
    assert server.get("/profile").json()["turns"] == before


# ---- forms and tools -------------------------------------------------------------------------------------------------


def test_json_comes_as_it_was_asked_for(openai_client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "tame": {"type": "boolean"}},
              "required": ["name", "tame"], "additionalProperties": False}  # fmt: skip
    form: Any = {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema, "strict": True}}
    for thinking in (False, True):
        asked: dict[str, Any] = {"response_format": form, "max_tokens": 400, "enable_thinking": thinking}
        answer = whole(ask(openai_client, **asked))
        assert answer["finish_reason"] == "stop", answer
        said = json.loads(answer["content"])
        assert list(said) == ["name", "tame"] and isinstance(said["tame"], bool)
        assert bool(answer["reasoning"]) == thinking
        assert joined(stream(openai_client, **asked)) == answer


class Fox(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tame: bool


def test_the_clients_own_helpers_read_the_answer(openai_client: OpenAI, tool_client: OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "max_tokens": 200}
    parsed = openai_client.chat.completions.parse(**fields, response_format=Fox)
    assert isinstance(parsed.choices[0].message.parsed, Fox)
    with openai_client.chat.completions.stream(**fields, response_format=Fox) as helper:
        kinds = {event.type for event in helper}
        final = helper.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed and "content.done" in kinds
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    asked: dict[str, Any] = {**fields, "model": "nano-tools", "tools": [strict], "tool_choice": "required"}
    with tool_client.chat.completions.stream(**asked, parallel_tool_calls=False) as helper:
        calls = helper.get_final_completion().choices[0].message.tool_calls
    assert calls and calls[0].function.name == "weather"


@pytest.fixture(scope="module")
def tool_client(tool_server: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=tool_server.base_url, api_key="none", max_retries=0) as client:
        yield client


def test_a_tool_is_called_and_its_result_read(tool_client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "nano-tools", "messages": [user("Is it warm in Oslo?")], "tools": [WEATHER],
                             "max_tokens": 200}  # fmt: skip
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        answer = ask(tool_client, tool_choice=choice, parallel_tool_calls=False, **asked)
        told = whole(answer)
        assert told["finish_reason"] == "tool_calls" and answer.choices[0].message.content is None
        (name, arguments), = told["calls"]  # fmt: skip
        assert name == "weather" and json.loads(arguments)["city"] == "Oslo"
        assert joined(stream(tool_client, tool_choice=choice, parallel_tool_calls=False, **asked)) == told

    message = answer.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is warm."}
    messages = [*asked["messages"], message.model_dump(), result]
    after = ask(tool_client, **{**asked, "messages": messages}, tool_choice="none")
    assert after.choices[0].message.content


def test_a_stream_of_a_call_is_one_delta(tool_client: OpenAI) -> None:
    chunks = stream(tool_client, model="nano-tools", messages=[user("Warm?")], tools=[WEATHER], tool_choice="required",
                    parallel_tool_calls=False, max_tokens=200)  # fmt: skip
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.type) for call in calls] == [(0, "function")] and (calls[0].id or "").startswith("call_")
    assert chunks[0].choices[0].delta.role == "assistant"


def test_a_required_call_that_was_cut_is_not_told(tool_client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "nano-tools", "messages": [user("Warm?")], "tools": [WEATHER], "max_tokens": 6,
                             "tool_choice": "required"}  # fmt: skip
    told = whole(ask(tool_client, **asked))
    assert (told["content"], told["calls"], told["finish_reason"]) == ("", [], "length") and told["usage"][1] == 6
    assert joined(stream(tool_client, **asked)) == told
