"""What a client of a live server saw of one answer, and what a cold session without drafts would have answered.

`ask` posts a chat request and reads the answer, streamed or not, into a `Seen`; `expected` makes the same of a session
in this process. All of one are compared with all of the other: text, reason, every token's bytes and logprobs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from coli.engine import Engine
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.speculation.options import Speculation
from tests.server.live import Live
from tests.server.scrape import Scrape

Token = tuple[Any, ...]  # bytes, logprob, the alternatives' bytes and logprobs


class Seen(NamedTuple):
    text: str
    finish: str
    tokens: tuple[Token, ...]
    completion: int
    reasoning: str = ""


class Usage(NamedTuple):
    prompt: int
    cached: int
    accepted: int
    rejected: int


def ask(server: Live, *, stream: bool, **body: Any) -> tuple[Seen, Usage]:
    """`body` beside model and logprobs: a greedy request with five alternatives, unless it says otherwise."""
    body = {"model": "nano", "temperature": 0, "logprobs": True, "top_logprobs": 5} | body
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    return _streamed(reply.body) if stream else _whole(reply.json())


def frames(raw: bytes) -> list[dict[str, Any]]:
    """The documents of a stream, which must end as it should."""
    lines = [line for line in raw.decode().split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _whole(document: dict[str, Any]) -> tuple[Seen, Usage]:
    (choice,) = document["choices"]
    tokens = tuple(_tokens([choice]))
    message, usage = choice["message"], document["usage"]
    return Seen(message["content"], choice["finish_reason"], tokens, usage["completion_tokens"],
                message.get("reasoning_content", "")), _usage(usage)  # fmt: skip


def _streamed(raw: bytes) -> tuple[Seen, Usage]:
    *documents, last = frames(raw)
    assert last["choices"] == [] and all(document["usage"] is None for document in documents)
    choices = [choice for document in documents for choice in document["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    finishes = [choice["finish_reason"] for choice in choices]
    assert finishes[-1] is not None and not any(finishes[:-1])
    text, reasoning = ("".join(choice["delta"].get(name) or "" for choice in choices)
                       for name in ("content", "reasoning_content"))  # fmt: skip
    return Seen(text, finishes[-1], tuple(_tokens(choices)), last["usage"]["completion_tokens"],
                reasoning), _usage(last["usage"])  # fmt: skip


def _tokens(choices: Sequence[dict[str, Any]]) -> Iterator[Token]:
    for choice in choices:
        for one in (choice["logprobs"] or {"content": []})["content"]:
            yield (_bytes(one), one["logprob"], tuple((_bytes(top), top["logprob"]) for top in one["top_logprobs"]))


def _bytes(token: dict[str, Any]) -> bytes:
    return bytes(token["bytes"] or token["token"].encode())


def _usage(usage: dict[str, Any]) -> Usage:
    details = usage["completion_tokens_details"]
    return Usage(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"],
                 details["accepted_prediction_tokens"], details["rejected_prediction_tokens"])  # fmt: skip


def prompt_ids(engine: Engine, messages: Sequence[dict[str, Any]], thinking: bool | None = None) -> tuple[int, ...]:
    assert engine.chat is not None
    return tuple(engine.tokenizer.encode(engine.chat.render(messages, thinking=thinking, effort=None)))


def expected(engine: Engine, messages: Sequence[dict[str, Any]], *, max_tokens: int, stop: Sequence[str] = (),
             sampling: Sampling | None = None, thinking: bool | None = None) -> Seen:  # fmt: skip
    """What a session that has seen nothing answers without drafts, its reasoning and all as text."""
    session = Session(engine, Speculation.off())
    prompt = prompt_ids(engine, messages, thinking)
    steps = list(session.steps(Request(prompt, max_tokens, sampling or Sampling(), tuple(stop), logprobs=5)))

    def spelled(token: int) -> bytes:
        return engine.tokenizer.token_bytes(token)

    tokens = tuple((spelled(one.id), one.logprob, tuple((spelled(i), logprob) for i, logprob in one.top))
                   for step in steps for one in step.tokens)  # fmt: skip
    report = session.report
    assert report is not None
    return Seen("".join(step.text for step in steps), report.finish_reason, tokens, report.completion_tokens)


PATIENCE_S = 20.0


def idle(server: Live) -> None:
    """Wait until nobody is answered and nobody waits."""
    end = time.monotonic() + PATIENCE_S
    while True:
        seen = Scrape.of(server.get("/metrics").body.decode())
        if not seen("requests_running") + seen("requests_waiting"):
            return
        assert time.monotonic() < end, "a request that nobody waits for still runs"
        time.sleep(0.02)
