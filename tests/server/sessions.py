"""Sessions of many turns over HTTP, on nano, and what each of their turns must be; one JSON line at the end.

    python -m tests.server.sessions [--count 200] [--seed 0] [--turns 7]

A turn is a request with a history: repeat, continue, edit at a token or a message, pin and return, sample, ask for
logprobs, stop, end at a limit, leave. Three servers of one slot get it:
  on     with checkpoints and drafts, streamed
  off    with checkpoints; the request says {"enabled": false}; streamed or in one piece
  cold   without drafts, in the other form. Each turn comes behind a request whose one token differs from every turn's
         first: it overwrites row 0, which ends every checkpoint, so the turn starts from an empty state. Its usage
         must say so: 0 cached tokens
Everything said must be equal (tests/server/frames.py). The cold server also names the answer's tokens by their
logprobs, of the same turn without stop strings: from them it follows in tokens alone where a stop cuts the answer, and
what may be reused next (the ledger of tests/speculation/sessions.py; `on` and `off` keep so many checkpoints that none
is evicted). cached_tokens must be exactly that, and so must the sum that /metrics counts, cancelled turns included.

Who leaves on `tokens` has seen two: the second was picked, so the first was fed, and what the answer left is no
longer than the prompt. Who leaves on `headers` may be gone before any of it or behind: the turn is repeated, and behind
the repetition the ledger is the same either way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from coli.answer import AnswerRouter
from coli.chat import ChatTemplate
from coli.marks import PROBE
from coli.models.find import NANO
from coli.server.openai_reply import token_text
from coli.session import Request
from coli.stream import TextStream
from tests.server import frames
from tests.server.asking import STOPS, TOKENIZER, VOCAB
from tests.server.frames import Answer
from tests.server.live import Live, launch
from tests.server.scrape import Scrape, broken
from tests.server.talks import Ask, ChatTalk, Heard, TextTalk, Turn
from tests.speculation.sessions import Ledger

KEEP = ("--threads", "1", "--checkpoints", "200")  # none is ever evicted
EAGER = ("--no-gate",)  # drafts whenever there are any
COLD = ("--threads", "1", "--checkpoints", "1", "--no-mtp", "--no-lookup")
OFF = {"speculative": {"enabled": False}}
FLUSH = 5  # the token that no turn begins with
CHUNK = 128  # tokens that nano reads in a step
ENDLESS, AGAIN = 1500, 8  # tokens of an answer that is left, and of its repetition
UNENDING = {str(stop): -100.0 for stop in STOPS}
END = -1  # in a row of picks: a stop token, whichever
TEMPLATE = ChatTemplate.load(NANO, TOKENIZER)
IDS = {token_text(TOKENIZER, token): token for token in range(VOCAB)}


# ---- what follows from tokens alone ----------------------------------------------------------------------------------


def as_read(ask: Ask) -> Request:
    """The prompt in tokens, with the places where a chat's is kept besides its end: where another conversation under
    the same system message parts from it, and where this one will when it has gone on."""
    if "messages" not in ask:
        return Request(tuple(ask["prompt"]))
    messages, thinking = ask["messages"], ask.get("enable_thinking")
    prompt, last = _rendered(messages, thinking), messages[-1]
    said = [*messages[:-1], {**last, "content": last["content"] + PROBE}] if last["role"] == "assistant" else [
        *messages, {"role": "assistant", "content": PROBE}]  # fmt: skip
    others = [[*said, {"role": "user", "content": PROBE}]]
    if messages[0]["role"] == "system":
        others.append([messages[0], {"role": "user", "content": PROBE}])
    marks = {_shared(prompt, _rendered(other, thinking)) for other in others} - {0, len(prompt)}
    return Request(prompt, marks=tuple(sorted(marks)))


def _rendered(messages: list[dict[str, Any]], thinking: bool | None) -> tuple[int, ...]:
    goes_on = messages[-1]["role"] == "assistant"
    wish = {} if thinking is None else {"enable_thinking": thinking}
    text = TEMPLATE.render(messages, add_generation_prompt=not goes_on, **wish)
    return tuple(TOKENIZER.encode(text[: text.rindex("<|im_end|>")] if goes_on else text))


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def _sorter(ask: Ask) -> AnswerRouter | None:
    """Of an answer: nano's chats begin with the reasoning or behind it, which the template then closes itself."""
    if "messages" not in ask:
        return None
    thinks = ask.get("enable_thinking") and ask["messages"][-1]["role"] != "assistant"
    return AnswerRouter("open" if thinks else "closed")


class Cut(NamedTuple):
    """An answer as far as its first stop: tokens picked, how many of them are delivered, and their text."""

    picked: tuple[int, ...]
    delivered: int
    reason: str
    text: str

    @classmethod
    def of(cls, ids: tuple[int, ...], ended: bool, stop: tuple[str, ...], sorter: AnswerRouter | None = None) -> Cut:
        """Of the tokens that came without stop strings, behind which a stop token came if it `ended`."""
        text = TextStream(TOKENIZER, stop, sorter)
        for count, token in enumerate(ids, 1):
            text.push(token)
            if text.stopped:
                return cls(ids[:count], text.delivered, "stop", text.text)
        text.flush()
        assert not text.stopped, "a stop string in what no character can begin with"
        return cls((*ids, END) if ended else ids, len(ids), "stop" if ended else "length", text.text)

    @property
    def counted(self) -> int:
        return self.delivered + (self.picked[-1:] == (END,))


# ---- the servers -----------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One server and what it was asked."""

    server: Live
    before: Scrape = field(init=False)

    def __post_init__(self) -> None:
        self.flush()  # whatever was asked before has ended, and is of no use
        self.before = self.counts()

    def counts(self) -> Scrape:
        return Scrape.of(self.server.get("/metrics").body.decode())

    @contextmanager
    def asked(self, ask: Ask) -> Iterator[HTTPResponse]:
        """The response once its headers came; leaving the block closes the connection."""
        path = "/v1/chat/completions" if "messages" in ask else "/v1/completions"
        with closing(self.server.connect()) as connection:
            connection.request("POST", path, json.dumps({"model": "nano", **ask}).encode())
            response = connection.getresponse()
            with closing(response):
                assert response.status == 200, (response.status, response.read(), ask)
                yield response

    def answer(self, ask: Ask, *, stream: bool) -> Answer:
        if not stream:
            with self.asked(ask) as response:
                return frames.document(json.loads(response.read()))
        with self._streamed(ask) as response:
            return frames.stream(list(frames.chunks(response)), logprobs=_logprobs(ask))

    def flush(self) -> None:
        """Overwrite row 0: nothing that is kept is of use to any turn."""
        self.answer({"prompt": [FLUSH], "max_tokens": 1, **OFF}, stream=False)

    def headers(self, ask: Ask) -> None:
        """Leave when they came: a first step was made."""
        with self._streamed(ask):
            pass

    def beginning(self, ask: Ask) -> Answer:
        """Leave when at least two tokens came."""
        seen: list[dict[str, Any]] = []
        with self._streamed(ask) as response:
            for chunk in frames.chunks(response):
                seen.append(chunk)
                said = frames.stream(seen, whole=False, logprobs=True)
                if len(said.tokens or ()) >= 2:
                    return said
        raise AssertionError(f"an answer of {len(seen)} chunks was to be left")

    @contextmanager
    def _streamed(self, ask: Ask) -> Iterator[HTTPResponse]:
        wish = {"include_usage": True, "include_coli": True}
        with self.asked({**ask, "stream": True, "stream_options": wish}) as response:
            yield response


@contextmanager
def three_servers(folder: Path) -> Iterator[tuple[Live, Live, Live]]:
    """On, off and cold."""
    servers: list[Live] = []
    try:
        for name, flags in (("on", (*KEEP, *EAGER)), ("off", KEEP), ("cold", COLD)):
            (folder / name).mkdir()
            servers.append(launch(folder / name, *flags))
        for server in servers:
            server.wait_ready()
        on, off, cold = servers
        yield on, off, cold
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


class Sides:
    """The comparison. `exact` False: `on` and `off` may have evicted what the ledger still holds."""

    def __init__(self, on: Live, off: Live, cold: Live, *, seed: int = 0, exact: bool = True) -> None:
        self.on, self.off, self.cold = Side(on), Side(off), Side(cold)
        self.ledger, self.exact, self.dice = Ledger(), exact, random.Random(seed)
        self.hits = {"on": 0, "off": 0}  # cached tokens of all turns
        self.unsure = 0  # further ones, of turns that were left before anybody knew of a token
        self.seen: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(3, "side")

    def play(self, turn: Turn) -> Heard:
        """Play a turn on every side, and once more if nobody can know how far it came."""
        request = as_read(turn.ask)
        cached = self.ledger.cached(request.prompt_ids)
        if turn.leave is None:
            return self._answered(turn.ask, request, {cached})
        endless = {**_without_stop(turn.ask), "logit_bias": UNENDING, "max_tokens": ENDLESS}
        self.seen[f"left_on_{turn.leave}"] += 1
        if turn.leave == "tokens":
            self._count_hits(cached, cached)
            return self._left(endless, request)
        self.unsure += cached
        self._together(lambda: self.on.headers(endless), lambda: self.off.headers({**endless, **OFF}))
        between = {mark for mark in request.marks if mark > cached}
        whole = len(request.prompt_ids)
        known = {whole} if not between and whole - cached <= CHUNK else {cached, *between, whole}
        return self._answered({**endless, "max_tokens": AGAIN}, request, known)

    def _answered(self, ask: Ask, request: Request, expected: set[int]) -> Heard:
        piecewise = self.dice.random() < 0.5
        on, off, (cold, cut) = self._together(
            lambda: self.on.answer(ask, stream=True),
            lambda: self.off.answer({**ask, **OFF}, stream=piecewise),
            lambda: self._from_cold(ask, stream=not piecewise),
        )
        assert on.said == off.said == cold.said, (on, off, cold)
        assert on.pieces == (off if piecewise else cold).pieces  # the two that were streamed
        assert on.counts[0] == len(request.prompt_ids)
        self._check_cut(ask, on, cut)
        for side in (on, off):
            self._check_cached(side.cached, expected)
        self._count_hits(on.cached, off.cached)
        self._check_drafts(on, off)
        self.ledger.turn(request, cut.picked, cut.delivered, cut.reason)
        self._note(on, cut)
        return Heard(on, cut.picked[: cut.delivered])

    def _left(self, ask: Ask, request: Request) -> Heard:
        ask = _with_logprobs(ask)
        on, off, (cold, cut) = self._together(
            lambda: self.on.beginning(ask), lambda: self.off.beginning({**ask, **OFF}),
            lambda: self._from_cold({**ask, "max_tokens": AGAIN}, stream=True),
        )  # fmt: skip
        for said in (on, off):
            assert said.tokens is not None and cold.tokens is not None and said.made_by == cold.made_by
            count = min(len(said.tokens), AGAIN)
            assert said.tokens[:count] == cold.tokens[:count], (said, cold)
            for kind in frames.NAMES.values():  # text may lag behind tokens and the answer ran on: as far as both go
                one, other = said.text(kind), cold.text(kind).rstrip("\ufffd")  # of a character cut by the limit
                assert one.startswith(other) or other.startswith(one), (one, other)
        self.ledger.turn(request, cut.picked, 2, "cancelled")
        return Heard(on, cut.picked[:2])

    def _from_cold(self, ask: Ask, *, stream: bool) -> tuple[Answer, Cut]:
        """The answer from an empty state, and what its tokens say about where it ends."""
        answer = self._alone(_with_logprobs(_without_stop(ask)), stream=stream)
        assert answer.tokens is not None
        ids, stop = tuple(IDS[token["token"]] for token in answer.tokens), tuple(ask.get("stop") or ())
        cut = Cut.of(ids, answer.finish_reason == "stop", stop, _sorter(ask))
        if stop:
            return self._alone(ask, stream=stream), cut
        return answer if _logprobs(ask) else answer.without_tokens(), cut

    def _alone(self, ask: Ask, *, stream: bool) -> Answer:
        self.cold.flush()
        answer = self.cold.answer({**ask, **OFF}, stream=stream)
        assert answer.cached == 0, "not cold"
        return answer

    def _check_cut(self, ask: Ask, answer: Answer, cut: Cut) -> None:
        assert (answer.finish_reason, answer.counts[1]) == (cut.reason, cut.counted), (answer, cut)
        if "messages" not in ask:
            assert answer.text() == cut.text
        if answer.tokens is not None:
            assert tuple(IDS[token["token"]] for token in answer.tokens) == cut.picked[: cut.delivered]

    def _check_cached(self, cached: int, expected: set[int]) -> None:
        if self.exact:
            assert cached in expected, f"{cached} cached tokens, not {expected}"
        else:
            assert cached <= max(expected), f"{cached} cached tokens, at most {expected}"

    def _check_drafts(self, on: Answer, off: Answer) -> None:
        assert off.drafts == (0, 0)
        accepted, rejected = on.drafts
        told = on.coli
        assert told is not None and told["cached_tokens"] == on.cached
        if told["speculation"]:
            assert told["tokens"] == told["forwards"] + accepted
            assert (told["drafts"], told["accepted"]) == (accepted + rejected, accepted)

    def _note(self, on: Answer, cut: Cut) -> None:
        """What a run went through."""
        self.seen += Counter(
            turns=1, tokens=on.counts[1], prompt=on.counts[0], cached=on.cached, drafts=sum(on.drafts),
            accepted=on.drafts[0], logprobs=on.tokens is not None, **{cut.reason: 1},
            stop_string=cut.reason == "stop" and cut.picked[-1] != END,
            fed_in_vain=len(cut.picked) - 1 > cut.delivered,
            mid_verify=bool(on.coli and on.coli.get("ended_mid_verify")),
        )  # fmt: skip

    def _count_hits(self, on: int, off: int) -> None:
        self.hits["on"] += on
        self.hits["off"] += off

    def finish(self) -> None:
        """What the servers counted is what was expected of them. Behind it they hold nothing of use."""
        self.ledger = Ledger()
        for name, side in (("on", self.on), ("off", self.off)):
            side.flush()  # the last turn may have been left, and not have ended
            now = side.counts()
            counted = now - side.before
            hits = counted("prefix_cache_hits_total")
            assert self.hits[name] <= hits <= self.hits[name] + self.unsure, (name, hits, self.hits, self.unsure)
            assert not list(broken(now))
            self.seen[f"cancelled_{name}"] = int(counted("request_success_total", finished_reason="cancelled"))

    def close(self) -> None:
        self._pool.shutdown()

    def _together(self, *calls: Callable[[], Any]) -> list[Any]:
        return [future.result() for future in [self._pool.submit(call) for call in calls]]


def _logprobs(ask: Ask) -> bool:
    return not (ask.get("logprobs") is None or ask["logprobs"] is False)


def _with_logprobs(ask: Ask) -> Ask:
    """At least those of the answer's own tokens."""
    return ask if _logprobs(ask) else {**ask, "logprobs": True if "messages" in ask else 0}


def _without_stop(ask: Ask) -> dict[str, Any]:
    return {name: value for name, value in ask.items() if name != "stop"}


# ---- sessions --------------------------------------------------------------------------------------------------------


def random_session(sides: Sides, seed: int, turns: int) -> None:
    """One conversation; every third is a chat. An error says where it was."""
    talk = (ChatTalk if seed % 3 == 2 else TextTalk)(random.Random(seed))
    for number in range(turns):
        turn = talk.next()
        try:
            talk.last = sides.play(turn)
        except BaseException as error:
            error.add_note(f"session {seed}, turn {number}: {turn}")
            raise


def main() -> int:
    options = argparse.ArgumentParser(description="Sessions against cold runs, over HTTP.")
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, three_servers(Path(folder)) as servers:
        sides = Sides(*servers, seed=given.seed)
        for number in range(given.count):
            random_session(sides, given.seed + number, given.turns)
        sides.finish()
    facts = {"sessions": given.count, **sides.seen, "seconds": round(time.perf_counter() - start, 1)}
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
