"""The HTTP side of `coli chat` against a scripted server: what goes over the wire, what comes back, how it breaks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from coli.answer import Delta
from coli.client import Address, Server, events, is_coli
from coli.conversation import Conversation, Turn, TurnFacts, Wishes
from coli.errors import ColiError, PromptTooLong, UsageError
from coli.speculation.report import GateReport
from tests.cli.chat_server import Script, error, serving


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as url:
        yield url


def opened(url: str, key: str | None = None, wishes: Wishes | None = None) -> Server:
    return Server.open(Address.of(url), key, wishes or Wishes(), lambda text: None)


def answer(server: Server, conversation: Conversation | None = None) -> list[Delta]:
    return list(server.answer(conversation or Conversation(), "q"))


def test_an_answer_its_facts_and_the_request(url: str, script: Script) -> None:
    script.pieces = [{"reasoning_content": "hm"}, {"content": "Hé "}, {"content": "👩"}]
    server = opened(url)
    conversation = Conversation("s")
    conversation.turns.append(Turn("q0", "a0", "r0"))
    assert answer(server, conversation) == [Delta("reasoning", "hm"), Delta("content", "Hé "), Delta("content", "👩")]
    facts = server.facts
    assert isinstance(facts, TurnFacts) and (facts.prompt_tokens, facts.cached_tokens) == (21, 13)
    assert (facts.completion_tokens, facts.accepted, facts.carried, facts.per_forward) == (5, 3, 4, 2.5)
    assert facts.finish_reason == "stop" and 0 <= facts.ttft_s < 60
    assert script.asked == [{
        "model": "scripted", "messages": conversation.messages("q"), "stream": True,
        "stream_options": {"include_usage": True, "include_coli": True},
    }]  # fmt: skip
    assert server.details() == ["context 26"]


def test_what_stats_say_of_a_server_is_what_an_engine_says(url: str, script: Script) -> None:
    gate = GateReport(0.2, ((2, 1.5),), 0.3, 0.01, 0.004, (0.97, 0.5), decided=True)
    script.models = [(200, {"data": [{"id": "scripted", "max_model_len": 2048}]}, {})]
    script.own = {"prefill_s": 0.5, "decode_s": 0.25, "tokens_per_forward": 2.5, "gate": {"on": True, **gate.to_json()}}
    server = opened(url)
    assert server.details() == []
    answer(server)
    context, speeds, drafting = server.details()
    assert context == "context 26 of 2,048 positions" and drafting == f"gate: {gate.line()}"
    assert speeds.startswith("first token 0.") and speeds.endswith(
        "prefill 21 tokens, 16.0 tok/s · decode 5 tokens, 16.0 tok/s · the model ended it"
    )
    for other in ({"on": True}, 7, None, {**gate.to_json(), "rows": 7}, {**gate.to_json(), "decided": False}):
        script.own["gate"] = other
        answer(server)
        assert server.details()[:1] == [context] and len(server.details()) == 2


def test_wishes_travel_and_only_those(url: str, script: Script) -> None:
    wishes = Wishes(max_tokens=7, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.1,
                    presence_penalty=0.2, frequency_penalty=0.3, seed=0, stop=("x",), effort="low")  # fmt: skip
    answer(opened(url, wishes=wishes), Conversation(thinking=False))
    (asked,) = script.asked
    for name in ("model", "messages", "stream", "stream_options"):
        del asked[name]
    assert asked == {
        "max_completion_tokens": 7, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 0, "stop": ["x"],
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


def test_another_server_is_asked_for_nothing_it_may_not_know(url: str, script: Script) -> None:
    script.version = None
    server = opened(url, wishes=Wishes(max_tokens=7))
    assert not server.coli and answer(server)
    (asked,) = script.asked
    assert asked["stream_options"] == {"include_usage": True} and asked["max_tokens"] == 7
    assert server.facts is not None and server.facts.per_forward is None


def test_facts_of_a_server_that_counts_nothing(url: str, script: Script) -> None:
    script.usage, script.own = {}, {}
    server = opened(url)
    answer(server)
    assert server.facts is not None and "0 of 0 prompt tokens cached" in server.facts.line()


def test_the_key_goes_to_the_api_and_not_to_the_question_who_is_there(url: str, script: Script) -> None:
    answer(opened(url, "secret"))
    assert [one["Authorization"] for one in script.headers] == ["Bearer secret"] * 2  # models, chat: not /version


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        ((400, error("too long: 9 of 8", "context_length_exceeded"), {}), PromptTooLong, "too long: 9 of 8"),
        ((400, error("no such field"), {}), UsageError, "no such field"),
        ((401, error("who are you"), {}), UsageError, "COLI_API_KEY"),
        ((404, error("no such model", "model_not_found"), {}), UsageError, "no such model"),
        ((429, error("full"), {"Retry-After": "3"}), ColiError, "again in 3 s"),
        ((503, error("draining", "draining"), {}), ColiError, "again later"),
        ((500, error("broke"), {}), ColiError, "broke"), ((302, {}, {"Location": "/x"}), UsageError, "302"),
        ((502, {"error": "a proxy's words"}, {}), ColiError, "502"),
    ],
)  # fmt: skip
def test_refusals_are_errors_with_the_servers_words(
    url: str, script: Script, refusal: tuple, kind: type, words: str
) -> None:
    server = opened(url)
    script.refusals.append(refusal)
    with pytest.raises(kind, match=words) as raised:
        answer(server)
    assert raised.type is kind and server.facts is None
    assert answer(server)  # and the next one is answered


def test_a_loading_server_is_waited_for(url: str, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coli.client.LOADING_S", 0.0)
    script.models = [(503, error("the model is loading", "loading"), {"Retry-After": "1"})] * 3
    said: list[str] = []
    assert Server.open(Address.of(url), None, Wishes(), said.append).model == "scripted"
    assert len(said) == 3 and "loading" in said[0]


@pytest.mark.parametrize("body", [{}, {"data": []}, {"data": [7]}, {"data": [{"id": 7}]}, {"data": 7}])
def test_a_server_without_models_is_no_partner(url: str, script: Script, body: dict) -> None:
    script.models = [(200, body, {})]
    with pytest.raises(UsageError, match="lists no model"):
        opened(url)


def test_a_stream_that_ends_early_is_an_error(url: str, script: Script) -> None:
    script.cut = True
    server = opened(url)
    said = server.answer(Conversation(), "q")
    assert [next(said).text, next(said).text] == ["Hi ", "there."]
    with pytest.raises(ColiError, match="in the middle|broke"):
        next(said)
    assert server.facts is None


def test_an_error_in_the_stream(url: str, script: Script) -> None:
    script.error = "layer 3: NaN"
    with pytest.raises(ColiError, match="layer 3: NaN"):
        answer(opened(url))


@pytest.mark.parametrize("usage", ["abc", [1], {"prompt_tokens_details": [1]}, {"completion_tokens_details": "x"},
                                   {"prompt_tokens": "7", "completion_tokens": [2]}, {"prompt_tokens": -1},
                                   {"prompt_tokens": 10**400}, {"completion_tokens": True}])  # fmt: skip
@pytest.mark.parametrize("own", ["abc", {"tokens_per_forward": "2", "decode_s": "x", "prefill_s": "y"},
                                 {"tokens_per_forward": float("nan"), "decode_s": 1e400, "gate": 7}])  # fmt: skip
def test_numbers_that_are_none_are_not_shown(url: str, script: Script, usage: Any, own: Any) -> None:
    script.usage, script.own, script.reason = usage, own, ["stop", "\x1b[2J"]
    script.models = [(200, {"data": [{"id": "scripted", "max_model_len": 10**400}]}, {})]
    server = opened(url)
    assert len(answer(server)) == 2
    facts = server.facts
    assert facts is not None and (facts.prompt_tokens, facts.completion_tokens, facts.carried) == (0, 0, 0)
    assert (facts.per_forward, facts.finish_reason) == (None, "")
    assert facts.line().startswith("0 tokens") and server.details() == ["context 0"]


def test_brackets_without_end_are_no_chunk(url: str, script: Script) -> None:
    script.raw = "[" * 100_000
    server = opened(url)
    with pytest.raises(ColiError, match="no chunk"):
        answer(server)
    script.raw = None
    assert answer(server)


@pytest.mark.parametrize("delta", [{"content": 7}, "text", {"content": ["x"]}])
def test_what_is_no_chunk_is_an_error(url: str, script: Script, delta: object) -> None:
    script.pieces = [delta]  # type: ignore[list-item]
    with pytest.raises(ColiError, match="no chunk"):
        answer(opened(url))


def test_cancel_ends_the_answer_and_the_servers_work(url: str, script: Script) -> None:
    script.endless, script.pause = True, 0.005
    server = opened(url)
    said = server.answer(Conversation(), "q")
    next(said)
    threading.Timer(0.05, server.cancel).start()
    start = time.monotonic()
    assert all(delta.kind == "content" for delta in said)
    assert time.monotonic() - start < 30 and server.facts is None
    assert script.gone.wait(30)
    script.endless = False
    assert answer(server) and server.facts is not None


def test_cancel_after_an_answer_is_not_for_the_next(url: str) -> None:
    server = opened(url)
    whole = answer(server)
    server.cancel()
    assert answer(server) == whole and server.facts is not None


def test_cancel_before_the_first_piece_is_asked_for(url: str, script: Script) -> None:
    server = opened(url)
    said = server.answer(Conversation(), "q")
    server.cancel()
    assert list(said) == [] and server.facts is None


def test_cancel_before_the_headers(script: Script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        server = Server(Address.of(f"http://127.0.0.1:{deaf.getsockname()[1]}"), None, Wishes())
        threading.Timer(0.05, server.cancel).start()
        assert answer(server) == []


def test_nobody_there_is_one_error_with_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ColiError, match=f"127.0.0.1:{port}/v1: no server answers there.*coli serve"):
        opened(f"http://127.0.0.1:{port}")


def test_who_is_there(url: str, script: Script) -> None:
    assert is_coli(Address.of(url))
    for version in ({"version": "1"}, {"name": "other"}, None):
        script.version = version
        assert not is_coli(Address.of(url))


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000/v1"), ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://[::1]:8000/", "http://[::1]:8000/v1"), ("https://example.org/llm/v1/", "https://example.org:443/llm/v1"),
        ("http://a", "http://a:80/v1"),
    ],
)  # fmt: skip
def test_addresses(url: str, whole: str) -> None:
    assert str(Address.of(url)) == whole


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://a/v1?x=1",
                                 "http://user@a", "http://a:99999", "http://a..b/", f"http://{'a' * 64}/",
                                 "http://a b/"])  # fmt: skip
def test_no_addresses(url: str) -> None:
    with pytest.raises(UsageError, match="127.0.0.1:8000"):
        Address.of(url)


def test_a_path_outside_ascii_is_refused_with_what_to_write() -> None:
    with pytest.raises(UsageError, match="--url http://host/ä: .*%XX"):
        Address.of("http://host/ä")
    assert str(Address.of("http://bücher.example/%C3%A4")) == "http://bücher.example:80/%C3%A4"


def test_events_are_lines_up_to_an_empty_one() -> None:
    wire = b": hello\ndata: a\n\nevent: x\r\ndata:b\r\ndata: c\r\n\r\n\ndata: d\n"
    assert list(events(wire.splitlines(keepends=True))) == ["a", "b\nc"]
