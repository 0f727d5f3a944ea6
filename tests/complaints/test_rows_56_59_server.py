"""Rows 56, 57 and 59: clients that leave, prompts that do not fit, and what usage says, over a live server's sockets.

That a cancel comes within one forward is counted with scripted sessions (tests/server/test_scheduler.py), a thousand
disconnects at random moments are tests/server/disconnects.py; here is each moment once, as a client brings it about."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.complaints.over_http import PATIENCE_S, ask, expected, frames, idle
from tests.server.live import live
from tests.server.scrape import Scrape
from tests.tiny import tiny_config, write_tiny

CTX, MUCH = 2048, 60_000  # nano's context, and the tiny model's, which takes half a minute to fill
ASKED = [{"role": "user", "content": "Tell me a short story about a fox."}]
NEVER = {str(token): -100 for token in (256, 258)}  # what ends an answer of the tiny model
ENDLESS = {"model": "tiny", "messages": ASKED, "temperature": 0, "logit_bias": NEVER}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model that can go on for long: one slot, and two requests may wait for it."""
    folder = tmp_path_factory.mktemp("alone")
    model = write_tiny(folder / "tiny", tiny_config(max_position_embeddings=MUCH), dtype="F32")
    with live(folder, "--slots", "1", "--max-queue", "2", "--ctx", str(MUCH), model=model) as server:
        yield server


def scrape(server):
    return Scrape.of(server.get("/metrics").body.decode())


def until(server, running, waiting):
    end = time.monotonic() + PATIENCE_S
    while True:
        seen = scrape(server)
        if (seen("requests_running"), seen("requests_waiting")) == (running, waiting):
            return
        assert time.monotonic() < end, (seen("requests_running"), seen("requests_waiting"))
        time.sleep(0.005)


def turn_of(server, name):
    """What became of a request, when it is over."""
    end = time.monotonic() + PATIENCE_S
    while True:
        for turn in server.get("/profile").json()["turns"]:
            if turn["id"] == name:
                return turn
        assert time.monotonic() < end, f"{name} goes on"
        time.sleep(0.005)


@contextmanager
def sent(server, body, path="/v1/chat/completions", name="somebody"):
    """A request that was sent and not read; its connection is closed in the end."""
    with closing(server.connect()) as connection:
        head = {"content-type": "application/json", "x-request-id": name}
        connection.request("POST", path, json.dumps(body), head)
        yield connection


# ---- 56: the client is gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", (False, True))
def test_row_56_gone_in_decode(alone, stream):
    with sent(alone, ENDLESS | {"stream": stream}, name=f"decode-{stream}") as connection:
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
        else:
            until(alone, 1, 0)
    turn = turn_of(alone, f"decode-{stream}")
    assert turn["finish_reason"] == "cancelled" and turn["completion_tokens"] < MUCH // 2
    idle(alone)


@pytest.mark.parametrize("stream", (False, True))
def test_row_56_gone_in_prefill(alone, stream):
    """A prompt of hundreds of chunks; its client leaves when it has its slot."""
    body = {"model": "tiny", "prompt": [7 + stream] * (MUCH - 10), "max_tokens": 5, "stream": stream}
    with sent(alone, body, "/v1/completions", name=f"prefill-{stream}"):
        until(alone, 1, 0)
    turn = turn_of(alone, f"prefill-{stream}")
    assert (turn["finish_reason"], turn["completion_tokens"]) == ("cancelled", 0)
    again = alone.post("/v1/chat/completions", ENDLESS | {"max_tokens": 5})
    assert again.json()["usage"]["completion_tokens"] == 5, "the slot is of use again"


def test_row_56_gone_in_the_queue(alone):
    with ExitStack() as running:
        held = running.enter_context(sent(alone, ENDLESS | {"stream": True}))
        held.getresponse().readline()
        before = scrape(alone)
        with sent(alone, ENDLESS, name="waits"), sent(alone, ENDLESS | {"stream": True}, name="waits-too"):
            until(alone, 1, 2)
            refused = alone.post("/v1/chat/completions", ENDLESS)
            assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        until(alone, 1, 0)
        for name in ("waits", "waits-too"):
            turn = turn_of(alone, name)
            assert (turn["finish_reason"], turn["slot"], turn["completion_tokens"]) == ("cancelled", None, 0)
        assert (scrape(alone) - before)("prompt_tokens_total") == 0, "nobody read their prompts"
    idle(alone)


def test_row_56_gone_between_the_tokens_of_a_verify(server, plain_nano):
    """Long verifies by a prediction of the answer; what the next client is told is right nevertheless."""
    right = expected(plain_nano, ASKED, max_tokens=60)
    body = {"model": "nano", "messages": ASKED, "temperature": 0, "max_tokens": 1900, "stream": True,
            "prediction": {"type": "content", "content": right.text}}  # fmt: skip
    for lines in range(1, 12, 2):
        with sent(server, body) as connection:
            answer = connection.getresponse()
            for _ in range(lines):
                answer.readline()
        assert ask(server, stream=lines % 4 == 1, messages=ASKED, max_tokens=60)[0] == right
    idle(server)


# ---- 57: what does not fit -------------------------------------------------------------------------------------------


def work(server):
    """Tokens read and made, and turns that were queued."""
    seen = scrape(server)
    return [seen(name) for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                                    "request_queue_time_seconds_count")]  # fmt: skip


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("tokens", (CTX - 1, CTX, CTX + 1))
def test_row_57_around_the_edge_of_the_context(server, tokens, stream):
    before = work(server)
    reply = server.post("/v1/completions", {"model": "nano", "prompt": [9] * tokens, "max_tokens": 4, "stream": stream})
    if tokens < CTX:
        assert reply.status == 200
        choice = (frames(reply.body)[-1] if stream else reply.json())["choices"][0]
        assert choice["finish_reason"] in ("length", "stop"), "room for one token"
        assert work(server)[0] == before[0] + tokens
        return
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert str(tokens) in error["message"] and str(CTX) in error["message"]
    assert work(server) == before, "work was done for it"


LONG = "the fox and the bear ran to the river " * 300


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
     ("/v1/completions", {"prompt": LONG}),
     ("/v1/responses", {"input": LONG}),
     ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5})],
)  # fmt: skip
def test_row_57_a_long_text_at_every_endpoint(server, path, body, stream):
    before = work(server)
    reply = server.post(path, {"model": "nano", "stream": stream, **body})
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json"), "5xx: routers go elsewhere"
    error = reply.json()["error"]
    counts = [int(word.strip(",.").replace(",", "")) for word in error["message"].split() if word[0].isdigit()]
    assert error["type"] == "invalid_request_error" and CTX in counts and max(counts) > CTX
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
    assert work(server) == before


# ---- 59: usage -------------------------------------------------------------------------------------------------------


def check_usage(usage, completion):
    details, prompt = usage.completion_tokens_details, usage.prompt_tokens_details
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens and usage.prompt_tokens > 0
    assert usage.completion_tokens == completion and 0 <= prompt.cached_tokens <= usage.prompt_tokens
    for count in (details.reasoning_tokens, details.accepted_prediction_tokens, details.rejected_prediction_tokens):
        assert isinstance(count, int) and count >= 0
    assert details.reasoning_tokens + details.accepted_prediction_tokens <= completion


def test_row_59_chat_completions_by_the_openai_client(openai_client):
    asked = {"model": "nano", "messages": ASKED, "max_tokens": 9, "temperature": 0}
    create = openai_client.chat.completions.create
    check_usage(create(**asked).usage, 9)
    without = list(create(**asked, stream=True))
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in without)
    assert [chunk.choices[0].finish_reason for chunk in without][-1] == "length"
    *chunks, last = create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and all(chunk.choices and chunk.usage is None for chunk in chunks)
    check_usage(last.usage, 9)


def test_row_59_completions_by_the_openai_client(openai_client):
    asked = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 9, "temperature": 0}
    create = openai_client.completions.create
    check_usage(create(**asked).usage, 9)
    without = list(create(**asked, stream=True))
    assert all(chunk.choices and "usage" not in chunk.model_fields_set for chunk in without)
    *chunks, last = create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and all(chunk.choices and chunk.usage is None for chunk in chunks)
    check_usage(last.usage, 9)


def test_row_59_counts_are_those_of_the_answer(server):
    """Reasoning and content, a stop token and a stop string: completion_tokens is what was delivered, and what ended
    it where that was a token."""
    for wish in ({"enable_thinking": True}, {"stop": ["fox"]}, {}):
        for stream in (False, True):
            seen, usage = ask(server, stream=stream, messages=ASKED, max_tokens=300, **wish)
            ended = seen.finish == "stop" and "stop" not in wish
            assert seen.completion == len(seen.tokens) + ended
            assert usage.accepted + usage.rejected > 0 and usage.accepted < seen.completion
    plain, usage = ask(server, stream=False, messages=ASKED, max_tokens=300, speculative=False)
    assert usage.accepted == usage.rejected == 0 and plain == seen
