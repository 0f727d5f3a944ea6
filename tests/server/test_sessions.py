"""Whatever came before, with drafts or without, a turn over HTTP is that of an empty server, frame for frame, and reads
again exactly what it must (issue 6; complaints 16, 17, 31, 32, 33, 36). All 200 random sessions:
`python -m tests.server.sessions`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import frames
from tests.server.asking import TOKENIZER, assistant, system, user
from tests.server.live import Live, live
from tests.server.sessions import IDS, UNENDING, Cut, Sides, as_read, random_session, three_servers
from tests.server.talks import STORY, Turn

Servers = tuple[Live, Live, Live]
RANDOM, TURNS = 30, 7
GREEDY: dict[str, Any] = {"temperature": 0.0}
FACT = TOKENIZER.encode(
    "<|im_start|>user\nWhich month comes after January?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with three_servers(tmp_path_factory.mktemp("sessions")) as servers:
        yield servers


@pytest.fixture
def sides(servers: Servers) -> Iterator[Sides]:
    sides = Sides(*servers)
    yield sides
    sides.close()


class Asking:
    """Turns of /v1/completions, greedy and without an end of their own."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.answer: frames.Answer

    def __call__(self, prompt: list[int], tokens: int = 8, *, cached: int | None = None, leave: Any = None,
                 **more: Any) -> list[int]:  # fmt: skip
        """The answer's tokens; `cached` is what the server must say besides what the ledger expects."""
        ask = {"prompt": prompt, "max_tokens": tokens, "logit_bias": UNENDING, **GREEDY, **more}
        self.answer, ids = self.sides.play(Turn(ask, leave))
        assert cached is None or self.answer.cached == cached
        return list(ids)


def test_nine_turns(sides: Sides) -> None:
    """One history through every kind of turn."""
    ask, first = Asking(sides), list(STORY[:20])
    reply = ask(first, cached=0)
    assert ask(first, cached=20) == reply  # repeat: nothing to read
    longer = [*first, *reply, *STORY[40:43]]
    ask(longer, cached=20 + 7, pin=True)  # continue: its own last token was never fed
    ask([*longer[:11], *STORY[60:63]], cached=0)  # edit: completions have no marks
    ask([*longer[:11], *STORY[60:70]], 9, cached=14)
    ask(longer, cached=0)  # return: the pin's rows are gone, and so is the pin
    ask(longer, cached=len(longer), temperature=0.9, seed=5, logprobs=3)  # sample
    ask(longer, cached=len(longer), leave="headers")
    ask(longer, leave="tokens")
    ask([*longer, *STORY[80:81]], cached=len(longer), logprobs=0)
    sides.finish()


def test_nine_turns_of_a_chat(sides: Sides) -> None:
    """Messages as clients send them; what the template will write otherwise next time is read again, and no more."""
    talk = [system("You are Nano, a tiny language model."), user("What is a language model?")]

    def ask(talk: list[dict[str, Any]], cached: int, **more: Any) -> list[dict[str, Any]]:
        """The conversation with its answer."""
        leave = more.pop("leave", None)
        heard = sides.play(Turn({"messages": talk, "max_tokens": 12, **GREEDY, **more}, leave)).answer
        assert leave == "tokens" or heard.cached == cached
        return [*talk, assistant(heard.text())]

    def history(talk: list[dict[str, Any]]) -> int:
        """What the next turn shares with this one."""
        return as_read({"messages": talk}).marks[-1]

    def shared(one: list[dict[str, Any]]) -> int:
        return as_read({"messages": one}).marks[0]

    said = ask(talk, 0)
    second = [*said, user("Name two jobs.")]
    said = ask(second, history(talk), logprobs=True, top_logprobs=3)
    third = [*said, user("Which month comes after January?")]
    ask(third, history(second), stop=["after"])
    whole = len(as_read({"messages": third}).prompt_ids)
    ask(third, whole, temperature=1.0, seed=3, prediction={"type": "content", "content": "February comes after"})
    edited = [*second[:-1], user("Hi!")]
    ask(edited, history(talk), enable_thinking=True)  # what the second turn read of its own is gone
    ask(third, history(talk), pin=True)
    ask([*third[:-1], user("Hello!")], history(talk), leave="tokens")
    ask([third[0], user("Count from one to ten.")], shared(third))  # a new conversation under the same system message
    ask([*third, assistant("February")], shared(third))  # the answer goes on with the beginning of one
    sides.finish()


def test_a_stop_string_in_each_row(sides: Sides) -> None:
    """What it left is reused as far as it was delivered (row 16). In the first row it leaves nothing of the answer."""
    ask, prompt = Asking(sides), list(STORY[:30])
    whole = ask(prompt, 12)
    pieces = [TOKENIZER.decode(whole[:count]) for count in range(len(whole) + 1)]
    for row in range(10):
        stop = pieces[row + 1][len(pieces[row]) :]
        before = pieces[-1].index(stop)
        said = ask(prompt, 12, stop=[stop], logprobs=2)
        assert ask.answer.text() == pieces[-1][:before] and ask.answer.finish_reason == "stop"
        assert said == whole[: len(said)]
        ask([*prompt, *said, *STORY[70:72]], 4)
    sides.finish()


def test_a_stop_string_over_two_tokens(sides: Sides) -> None:
    """The first of them was fed and is not delivered: only the prompt is reusable."""
    ask, prompt = Asking(sides), list(STORY[:30])
    whole = ask(prompt, 12)
    one, two = TOKENIZER.decode(whole[:5]), TOKENIZER.decode(whole[:7])
    assert ask(prompt, 12, stop=[two[len(one) :]]) == whole[:5]
    ask([*prompt, *whole], 4, cached=30)
    assert ask(prompt, 12, stop=[two[len(one) + 1 :]]) == whole[:6]  # its text begins before the stop: it counts
    ask([*prompt, *whole], 4, cached=30 + 6)


def test_the_end_in_each_row(sides: Sides) -> None:
    """The model's own stop token, the n-th of the answer, most of them inside a verify; then it goes on."""
    ask = Asking(sides)
    whole = ask(FACT, 16, logit_bias={})
    assert ask.answer.finish_reason == "stop" and 5 <= len(whole) < 16
    for said in range(len(whole) + 1):
        rest = ask([*FACT, *whole[:said]], 16, logit_bias={}, logprobs=1)
        assert rest == whole[said:] and ask.answer.counts[1] == len(rest) + 1
        ask([*FACT, *whole, *STORY[said : said + 2]], 4, cached=len(FACT) + len(whole))


def test_a_limit_at_each_row(sides: Sides) -> None:
    ask, prompt = Asking(sides), list(STORY[:30])
    whole = ask(prompt, 10)
    for row in range(2, 10):
        assert ask(prompt, row, cached=30) == whole[:row]
        ask([*prompt, *whole], 4, cached=30 + row - 1)
    assert ask(prompt, 1, cached=30) == whole[:1]
    ask([*prompt, *whole], 4, cached=40)  # nothing was fed: what was there stands


def test_a_limit_at_each_row_of_a_thought(sides: Sides) -> None:
    """Also inside its tags, whose tokens have no text of their own; then it is sent back, and the template drops it."""
    talk, closed = [user("Which month comes after January?")], 0
    for row in range(1, 13):
        ask = {"messages": talk, "max_tokens": row, "enable_thinking": True, "logprobs": True, **GREEDY}
        answer = sides.play(Turn(ask)).answer
        assert answer.tokens is not None and len(answer.tokens) == row
        closed += answer.text() == "" and "</think>" in "".join(token["token"] for token in answer.tokens)
        said = assistant(answer.text(), reasoning_content=answer.text("reasoning"))
        again = sides.play(Turn({"messages": [*talk, said, user("Hi!")], "max_tokens": 4, **GREEDY})).answer
        assert again.cached == as_read(ask).marks[-1]
    assert closed
    only = {"messages": talk, "max_tokens": 1, "logit_bias": {str(IDS["</think>"]): 100.0}, "logprobs": True, **GREEDY}
    assert not sides.play(Turn({**only, "enable_thinking": True})).answer.pieces  # a token, and no text to go with it
    sides.finish()


@pytest.mark.parametrize("length", [1, 2, 63, 64, 127, 128, 129, 255, 256, 257, 300])
def test_prompts_around_the_ends_of_chunks(sides: Sides, length: int) -> None:
    """Rows 17 and 33: short prompts are reused as well, and a resumed verify may come anywhere."""
    ask, prompt = Asking(sides), list((STORY * 4)[:length])
    reply = ask(prompt, 5, cached=0)
    ask([*prompt, *reply, *STORY[9:10]], 5, cached=length + 4)


def test_who_leaves_while_the_prompt_is_read(sides: Sides) -> None:
    """The headers come with the first of its three chunks."""
    ask = Asking(sides)
    for number in range(3):
        prompt = [*STORY[number : number + 30], *(STORY * 5)[:300]]
        ask(prompt[:30], 2)
        reply = ask(prompt, leave="headers")
        ask([*prompt, *reply], 4, cached=330 + 7)
    sides.finish()


def test_who_leaves_in_the_queue_leaves_no_trace(sides: Sides) -> None:
    """A second conversation waits behind a first and is given up."""
    ask, prompt, server = Asking(sides), list(STORY[:20]), sides.on
    ask(prompt)
    waits = {"prompt": list(STORY[50:90]), "max_tokens": 4}
    with server.asked({"prompt": prompt, "max_tokens": 2000, "logit_bias": UNENDING, "stream": True}):
        connection = server.server.connect()
        connection.request("POST", "/v1/completions", json.dumps({"model": "nano", **waits}).encode())
        until(lambda: server.counts()("requests_waiting") == 1)
        connection.close()
        until(lambda: server.counts()("requests_waiting") == 0)
    until(lambda: server.counts()("requests_running") == 0)
    assert (server.counts() - server.before)("request_success_total", finished_reason="cancelled") == 2
    ask(prompt, cached=20)


@pytest.mark.slow
def test_random_sessions(sides: Sides) -> None:
    for seed in range(RANDOM):
        random_session(sides, 1000 + seed, TURNS)
    sides.finish()
    seen = sides.seen
    assert seen["cached"] > seen["prompt"] / 3 and seen["accepted"] > RANDOM and seen["drafts"] > seen["accepted"]
    some = ("stop_string", "mid_verify", "left_on_headers", "left_on_tokens", "logprobs", "length", "stop")
    assert all(seen[name] >= RANDOM / 10 for name in some), seen
    left = seen["left_on_headers"] + seen["left_on_tokens"]
    assert left / 2 <= min(seen["cancelled_on"], seen["cancelled_off"]) <= left


# ---- a server as it is started ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`coli serve` without a flag."""
    with live(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture
def as_started(plain: Live, servers: Servers) -> Iterator[Sides]:
    sides = Sides(plain, *servers[1:], exact=False)
    yield sides
    sides.close()


def test_a_chat_with_the_defaults(as_started: Sides) -> None:
    """A conversation is never read twice, however long; the gate decides what is drafted."""
    talk, shared = [system("You are Nano, a tiny language model.")], 0
    for saying in ("Hi!", "Name two jobs.", "Count from one to ten.") * 3:
        talk = [*talk, user(saying)]
        ask = {"messages": talk, "max_tokens": 10, "temperature": 0.8, "seed": 1}
        answer = as_started.play(Turn(ask)).answer
        assert answer.cached == shared
        talk, shared = [*talk, assistant(answer.text())], as_read(ask).marks[-1]


@pytest.mark.parametrize("pin", [True, False])
def test_a_pin_outlives_what_comes_behind_it(as_started: Sides, pin: bool) -> None:
    """As long as its rows hold. Twelve further turns are more than what is kept."""
    ask, prompt = Asking(as_started), list(STORY[:40])
    reply = ask(prompt, pin=pin)
    talk = prompt
    for _ in range(12):
        talk = [*talk, *reply, *STORY[50:52]]
        reply = ask(talk, cached=len(talk) - 3)
    ask([*prompt, *STORY[70:74]], cached=40 if pin else 0)


@pytest.mark.slow
def test_random_sessions_with_the_defaults(as_started: Sides) -> None:
    """What is evicted is read again, and that is all."""
    for seed in range(6):
        random_session(as_started, 2000 + seed, TURNS)
    assert as_started.seen["cached"] > 0


# ---- the harness finds what it looks for -----------------------------------------------------------------------------


def test_a_wrong_expectation_shows(sides: Sides) -> None:
    ask, prompt = Asking(sides), list(STORY[:20])
    ask(prompt)
    sides.ledger.places.clear()
    with pytest.raises(AssertionError, match="20 cached tokens, not {0}"):
        ask(prompt)
    sides.hits["on"] -= 1
    with pytest.raises(AssertionError, match="on"):
        sides.finish()


def test_where_a_stop_cuts() -> None:
    ids = tuple(TOKENIZER.encode("Once upon a time"))
    assert Cut.of(ids, True, ()) == ((*ids, -1), len(ids), "stop", "Once upon a time") and len(ids) == 4
    assert Cut.of(ids, False, ("zzz",)) == (ids, 4, "length", "Once upon a time")
    assert Cut.of(ids, True, ("n a t", "zzz")) == (ids, 2, "stop", "Once upo")
    assert (Cut.of(ids, True, ()).counted, Cut.of(ids, True, ("n a t",)).counted) == (5, 2)


HEAD = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
         "completion_tokens_details": {"reasoning_tokens": 1, "accepted_prediction_tokens": 0,
                                       "rejected_prediction_tokens": 0}}  # fmt: skip


def frame(delta: dict[str, Any], reason: str | None = None, tokens: tuple[str, ...] = ()) -> dict[str, Any]:
    logprobs = {"content": [{"token": token} for token in tokens], "refusal": None} if tokens else None
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
            "usage": None}  # fmt: skip


ROLE, STOP = frame({"role": "assistant", "content": "", "refusal": None}), frame({}, "stop")
THINKS, SAYS, MORE = (frame({"reasoning_content": "a"}, tokens=("a",)), frame({"content": "b"}),
                      frame({"content": "c"}, tokens=("b", "c")))  # fmt: skip
END = {**HEAD, "choices": [], "usage": USAGE}
SOUND = [ROLE, THINKS, SAYS, MORE, STOP, END]


def test_where_a_stream_is_cut_in_time_does_not_matter() -> None:
    at_once = [ROLE, frame({"reasoning_content": "a"}, tokens=("a", "b", "c")), frame({"content": "bc"}), STOP, END]
    one, other = (frames.stream(said, logprobs=True) for said in (SOUND, at_once))
    assert one == other and one.pieces == (("reasoning", "a"), ("content", "bc")) and len(one.tokens or ()) == 3
    message = {"role": "assistant", "content": "bc", "reasoning_content": "a"}
    logprobs = {"content": [{"token": token} for token in "abc"]}
    choice = {"message": message, "logprobs": logprobs, "finish_reason": "stop"}
    assert frames.document({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}).said == one.said
    assert one.said != frames.stream([*SOUND[:3], *SOUND[4:]], logprobs=True).said


@pytest.mark.parametrize("wrong", [
    [THINKS, SAYS, STOP, END], [ROLE, SAYS, frame({"content": "c"}, "stop"), END], [ROLE, STOP, SAYS, END],
    [ROLE, SAYS, END], [ROLE, SAYS, STOP], [ROLE, {**SAYS, "id": "2"}, STOP, END], [ROLE, {**SAYS, "usage": USAGE},
    STOP, END], [{"error": {"message": "no"}}, *SOUND], [ROLE, frame({"content": "b", "role": "assistant"}), STOP, END],
    [ROLE, STOP, STOP, END], [ROLE, ROLE, STOP, END], [ROLE, SAYS, frame({}, "stop", ("b",)), END],
])  # fmt: skip
def test_what_is_no_stream(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError):
        frames.stream(wrong, logprobs=True)


def test_how_a_stream_ends() -> None:
    lines = [b'data: {"a":1}\n', b"\n", b": keep-alive\n", b"\n", b"data: [DONE]\n", b"\n"]
    assert list(frames.chunks(lines)) == [{"a": 1}]
    for wrong, words in ((lines[:4], "without an end"), ([*lines, lines[0]], "behind the end"), ([b"x\n"], "x")):
        with pytest.raises(AssertionError, match=words):
            list(frames.chunks(wrong))


def until(true: Any, patience_s: float = 30.0) -> None:
    end = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end, "it never came"
