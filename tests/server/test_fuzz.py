"""The bar of tests/server/fuzz.py in small, on two servers; that its requests reach, and each of its faults is one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from pydantic import ValidationError

from tests.server import tool_model
from tests.server.fuzz import FLAGS, Answer, Wire, fuzz, judged
from tests.server.fuzz_bodies import CHAT, COUNT, LITERALS, MESSAGES, MODELS, RESPONSES, TEXT, bodies, written
from tests.server.fuzz_cases import Case, cases
from tests.server.live import Live, live


def drawn(strategy: SearchStrategy[Any], count: int, number: int = 0) -> list[Any]:
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def each(one: Any) -> None:
        found.append(one)

    each()
    return found


@contextmanager
def target(folder: Path, model: str) -> Iterator[Live]:
    with live(folder, *FLAGS, model=tool_model.write(folder) if model == "nano-tools" else None) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nano", "nano-tools"])
def test_requests_of_every_kind(tmp_path: Path, model: str) -> None:
    with target(tmp_path, model) as server:
        tally = fuzz(server, model, 120, seed=1)
    assert not tally.faults, "\n".join(tally.faults[:5])
    assert tally.count == 120 and tally.connections < 60 and tally.streams and sum(tally.sound.values()) > 5
    assert {200, 400} < set(tally.statuses) <= {200, 400, 403, 404, 405}


def test_the_same_seed_makes_the_same_requests() -> None:
    one, again, other = (drawn(cases("nano"), 40, number) for number in (1, 1, 2))
    assert [case.raw() for case in one] == [case.raw() for case in again] != [case.raw() for case in other]


@pytest.mark.parametrize("path", MODELS)
def test_most_sound_bodies_are_what_the_model_takes(path: str) -> None:
    taken, made = 0, drawn(bodies(path, "nano"), 60)
    for body in made:
        with suppress(ValidationError, ValueError, RecursionError):
            taken += MODELS[path].model_validate(json.loads(written(body))) is not None
    assert taken > len(made) / 2


def test_what_values_cannot_say_is_written() -> None:
    body = written({"a": [f"@literal {number}@" for number in range(len(LITERALS))]})
    assert body == ('{"a": [' + ", ".join(LITERALS) + "]}").encode()
    assert written("\ud800") == rb'"\ud800"' and written("\ud800", ascii_only=False) == b'"\xed\xa0\x80"'


def test_a_body_in_chunks_is_the_same_body() -> None:
    whole = Case("sound", "POST", TEXT, (), b"abcde")
    assert whole.raw().endswith(b"content-length: 5\r\n\r\nabcde")
    chunked = whole._replace(chunked=True).raw()
    assert chunked.endswith(b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n")


# ---- every fault is one ----------------------------------------------------------------------------------------------

ID, AS_JSON = {"x-request-id": "req_1"}, {"content-type": "application/json"}
STREAMED = ID | {"content-type": "text/event-stream; charset=utf-8"}
REFUSED = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
UNSAID = {"type": "error", "error": {"type": "api_error", "message": "no"}, "request_id": "req_1"}
CHUNK = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "nano",
         "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}  # fmt: skip
STOP = {"type": "message_stop"}
DONE = "data: [DONE]\n\n"


def post(path: str, *headers: tuple[str, str]) -> Case:
    return Case("bent", "POST", path, headers, b"{}")


def said(content: Any, status: int = 200, headers: dict[str, str] = ID | AS_JSON) -> Answer:
    return Answer(status, headers, content if isinstance(content, bytes) else json.dumps(content).encode())


def stream(*events: dict[str, Any], named: bool = False, end: str = "") -> Answer:
    frames = [(f"event: {one['type']}\n" if named else "") + f"data: {json.dumps(one)}\n\n" for one in events]
    return Answer(200, STREAMED, ("".join(frames) + end).encode())


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        (CHAT, said(REFUSED, 400)), (COUNT, said({"input_tokens": 3})), (CHAT, stream(CHUNK, end=DONE)),
        (MESSAGES, said(UNSAID, 400)),
        (MESSAGES, stream({"type": "ping"}, STOP, named=True)),
    ],
)  # fmt: skip
def test_what_is_sound(path: str, answer: Answer) -> None:
    assert not list(judged(post(path), answer))


@pytest.mark.parametrize(
    ("case", "answer", "words"),
    [
        (post(CHAT), said(REFUSED, 500), "status 500"),
        (post(CHAT), said(REFUSED, 503), "status 503"),
        (post(CHAT), said(REFUSED, 418), "status 418"),
        (post(CHAT), said(REFUSED, 400, AS_JSON), "x-request-id is ''"),
        (post(CHAT, ("x-request-id", "mine")), said(REFUSED, 400), "x-request-id is 'req_1'"),
        (post(CHAT), said(REFUSED, 400, ID | {"content-type": "text/plain"}), "of type 'text/plain'"),
        (post(CHAT), said(b"oops", 400), "in no shape"),
        (post(CHAT), said({"error": {"message": ""}}, 400), "in no shape"),
        (post(MESSAGES), said(REFUSED, 400), "in OpenAI's shape"),
        (post(MESSAGES), said({**UNSAID, "request_id": "req_2"}, 400), "in no shape"),
        (post(CHAT), said(UNSAID, 400), "in Anthropic's shape"),
        (post(CHAT, ("anthropic-version", "x")), said(REFUSED, 400), "in OpenAI's shape"),
        (Case("door", "HEAD", "/health", (), b""), said(b"{}"), "has a body"),
        (Case("door", "GET", "/health", (), b""), said(b"[]"), "no object"),
        (post(COUNT), said(b'{"input_tokens": NaN}'), "not what clients read"),
        (post(CHAT), said({}), "not what clients read"),
        (post(CHAT), stream(CHUNK), "without [DONE]"),
        (post(CHAT), stream({**CHUNK, "choices": []}, end=DONE), "0 reasons to end"),
        (post(CHAT), stream({**CHUNK, "id": 5}, end=DONE), "not what clients read"),
        (post(CHAT), stream(CHUNK, REFUSED, end=DONE), "an error in a stream"),
        (post(CHAT), stream(CHUNK, end=DONE + "data: {"), "within a frame"),
        (post(MESSAGES), stream({"type": "ping"}, named=True), "ends with ['ping']"),
        (post(MESSAGES), stream(STOP), "under other names"),
        (post(MESSAGES), stream(STOP, named=True, end=DONE), "a [DONE]"),
        (post(RESPONSES), stream({"type": "response.completed", "sequence_number": 1}, named=True), "out of order"),
    ],
)  # fmt: skip
def test_faults(case: Case, answer: Answer, words: str) -> None:
    assert any(words in fault for fault in judged(case, answer)), list(judged(case, answer))


def test_a_connection_is_kept_and_opened_again(server: Live) -> None:
    wire, health = Wire(server.port), Case("door", "GET", "/health", (), b"")
    for _ in range(3):
        assert wire.ask(health).status == 200
    assert wire.opened == 1
    assert wire.ask(Case("noise", "", "", (), b"no HTTP\r\n\r\n")).status == 400
    assert wire.ask(health).status == 200 and wire.opened == 2
    wire.close()
