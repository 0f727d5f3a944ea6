"""Rows 56, 57 and 59: clients that leave, prompts that do not fit, and what usage says, over a live server's sockets.

That a cancel comes within one forward is counted with scripted sessions (tests/server/test_scheduler.py), a thousand
disconnects at random moments are tests/server/disconnects.py; here is each moment once, as a client brings it about."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing, contextmanager

import pytest

from coli.models.find import NANO
from tests.complaints.over_http import PATIENCE_S, ask, expected, frames, idle
from tests.server.live import live
from tests.server.scrape import Scrape

CTX = 2048  # nano's
NEVER = {str(token): -100 for token in json.loads((NANO / "generation_config.json").read_text())["eos_token_id"]}
ASKED = [{"role": "user", "content": "Tell me a short story about a fox."}]
ENDLESS = {"model": "nano", "messages": ASKED, "max_tokens": 1900, "temperature": 0, "logit_bias": NEVER}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One slot, and two that may wait for it."""
    with live(tmp_path_factory.mktemp("alone"), "--slots", "1", "--max-queue", "2") as server:
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


def newest(server, count=1):
    """The turns that ended last, the newest first."""
    turns = server.get("/profile").json()["turns"]
    return sorted(turns, key=turns.index)[-count:] if False else turns[:count]


@contextmanager
def sent(server, body, path="/v1/chat/completions"):
    """A request that was sent and not read; its connection is closed in the end."""
    with closing(server.connect()) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection


# ---- 56: the client is gone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", (False, True))
def test_row_56_gone_in_decode(alone, stream):
    with sent(alone, ENDLESS | {"stream": stream}) as connection:
        if stream:
            answer = connection.getresponse()
            assert answer.readline().startswith(b"data: ")
        else:
            until(alone, 1, 0)
    idle(alone)
    (turn,) = newest(alone)
    assert turn["finish_reason"] == "cancelled" and turn["completion_tokens"] < 1900


@pytest.mark.parametrize("stream", (False, True))
def test_row_56_gone_in_prefill(alone, stream):
    before, prompt = scrape(alone), [7 + number % 4000 for number in range(2000)]
    body = {"model": "nano", "prompt": prompt, "max_tokens": 40, "logit_bias": NEVER, "stream": stream}
    with sent(alone, body, "/v1/completions"):
        pass
    idle(alone)
    (turn,) = newest(alone)
    assert turn["finish_reason"] == "cancelled" and turn["completion_tokens"] < 40
    assert (scrape(alone) - before)("generation_tokens_total") < 40
    right = ask(alone, stream=False, messages=ASKED, max_tokens=5)[0]
    assert right.completion == 5, "the slot is of use again"


def test_row_56_gone_in_the_queue(alone):
    with ExitStack() as running:
        held = running.enter_context(sent(alone, ENDLESS | {"stream": True}))
        held.getresponse().readline()
        before = scrape(alone)
        with sent(alone, ENDLESS), sent(alone, ENDLESS | {"stream": True}):
            until(alone, 1, 2)
            refused = alone.post("/v1/chat/completions", ENDLESS)
            assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        until(alone, 1, 0)
        assert scrape(alone)("requests_running") == 1, "who runs is not who left"
        gone = [turn for turn in newest(alone, 2) if turn["slot"] is None]
        assert len(gone) == 2 and {turn["finish_reason"] for turn in gone} == {"cancelled"}
        assert (scrape(alone) - before)("prompt_tokens_total") == 0, "nobody read their prompts"
    idle(alone)


def test_row_56_gone_between_the_tokens_of_a_verify(alone, plain_nano):
    """Long verifies by a prediction of the answer; what the next client is told is right nevertheless."""
    right = expected(plain_nano, ASKED, max_tokens=60)
    body = ENDLESS | {"stream": True, "prediction": {"type": "content", "content": right.text}}
    for lines in range(1, 12, 2):
        with sent(alone, body) as connection:
            answer = connection.getresponse()
            for _ in range(lines):
                answer.readline()
        assert ask(alone, stream=lines % 4 == 1, messages=ASKED, max_tokens=60)[0] == right
    idle(alone)


# ---- 57: what does not fit -------------------------------------------------------------------------------------------


def work(server):
    seen = scrape(server)
    return [seen(name) for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total",
                                    "forward_seconds_count", "request_queue_time_seconds_count")]  # fmt: skip


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
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json"), "a 5xx makes routers go elsewhere"
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


def test_row_59_counts_are_those_of_the_answer(server, plain_nano):
    """Reasoning and content, a stop token and a stop string: completion_tokens is what was delivered, and what ended
    it where that was a token."""
    for wish in ({"enable_thinking": True}, {"stop": ["fox"]}, {}):
        for stream in (False, True):
            seen, usage = ask(server, stream=stream, messages=ASKED, max_tokens=300, **wish)
            ended = seen.finish == "stop" and "stop" not in wish
            assert seen.completion == len(seen.tokens) + ended
            assert usage.accepted + usage.rejected > 0 and usage.accepted < seen.completion
    off, _ = ask(server, stream=False, messages=ASKED, max_tokens=300, speculative=False), None
    assert off[1].accepted == off[1].rejected == 0 and off[0] == seen
