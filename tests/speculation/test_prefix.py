"""Prefix reuse changes nothing but the time: whatever came before, a turn is that of a fresh session without drafts,
down to the bytes of state, and it reads again exactly what it must (complaints 16, 17, 32, 33, 35, 36)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coli.errors import ReadError
from coli.prefix import Prefixes
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.speculation.options import Speculation
from tests.speculation.sessions import Trio, Turn, random_session

SESSIONS = 200
# many forms of weights, undo, chunks and heads; `EVERY` in tests/speculation/engines.py has the others
NAMES = ("f32", "fp8", "odd, log", "int8 trunk, log", "prefill in ones", "moe fp8", "next bf16, log", "dense bf16")
EACH = SESSIONS // len(NAMES)


def drafting(engine, seed: int) -> Speculation:
    """Drafts of both sources, more of them than pay."""
    base = Speculation.of(engine.settings)
    return replace(base, gate=False, drafts=1 + seed % 3, lookup=seed % 4 != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_random_sessions(engines, name):
    """With the scripted ones below: 200 sessions of six turns."""
    engine, reused, drafted = engines[name], 0, 0
    for seed in range(EACH):
        trio = Trio(engine, drafting(engine, seed))
        random_session(trio, np.random.default_rng([seed, NAMES.index(name)]), 6)
        reused, drafted = reused + trio.reused, drafted + trio.drafted
    assert reused > EACH * 20 and drafted > EACH * 20


@pytest.mark.parametrize("name", NAMES)
def test_nine_turns(engines, name):
    """One session through every kind of turn, on the same history."""
    engine = engines[name]
    trio = Trio(engine, drafting(engine, 2))
    first = tuple(range(3, 23))
    never = frozenset({-1})

    def ask(prompt, count=8, cancel=None, **more):
        return trio.play(Turn(Request(prompt, count, stop_ids=never, **more), cancel))

    reply = ask(first, marks=(4, 11))
    assert ask(first) == reply  # repeat: nothing to read
    assert trio.warm.report.cached_tokens == len(first)
    longer = first + reply + (30, 31, 32)
    ask(longer, pins=(len(longer),))  # continue: its own reply was never read
    assert trio.warm.report.cached_tokens == len(first) + len(reply) - 1
    ask(first[:11] + (40, 41))  # edit: back to the mark
    assert trio.warm.report.cached_tokens == 11
    ask(longer)  # the pin's rows are gone
    assert trio.warm.report.cached_tokens == 11
    ask(longer, sampling=Sampling(temperature=0.9, seed=5), logprobs=3)
    for row in range(1, 8):  # a limit at each row
        ask(longer, row)
    ask(longer, cancel=2)
    assert trio.warm.report.finish_reason == "cancelled"
    ask(longer + (7,))
    assert trio.warm.report.cached_tokens == len(longer)


@pytest.mark.parametrize("row", range(1, 8))
def test_ended_at_each_row_and_gone_on(engines, row):
    """A stop token as the n-th of an answer, most inside a verify; then the conversation goes on (row 16)."""
    engine = engines["f32"]
    trio = Trio(engine, replace(drafting(engine, 2), lookup=True))
    prompt = (5, 6, 7, 8) * 5
    whole = trio.play(Turn(Request(prompt, 9, stop_ids=frozenset({-1}))))
    ended = trio.play(Turn(Request(prompt, 9, stop_ids=frozenset({whole[row - 1]}))))
    assert len(ended) == whole.index(whole[row - 1]) + 1
    trio.play(Turn(Request(prompt + ended + (9, 9), 9, stop_ids=frozenset({-1}))))
    assert trio.warm.report.cached_tokens == len(prompt) + len(ended) - 1


@pytest.mark.parametrize("length", range(1, 70, 4))
def test_short_prompts_are_reused_too(engines, length):
    """Row 33, and row 17: a resumed verify at lengths around the ends of chunks (7 rows)."""
    engine = engines["fp8"]
    trio = Trio(engine, drafting(engine, 1))
    prompt = tuple(i % 30 + 1 for i in range(length))
    reply = trio.play(Turn(Request(prompt, 5, stop_ids=frozenset({-1}))))
    trio.play(Turn(Request(prompt + reply + (2,), 5, stop_ids=frozenset({-1}))))
    assert trio.warm.report.cached_tokens == length + 4


def test_sessions_take_turns_on_one_engine(engines):
    """Steps of four sessions in any order: each is what it is alone."""
    engine, rng = engines["f32"], np.random.default_rng(8)
    requests = [Request(tuple(int(i) for i in rng.integers(0, 40, 30)), 20, stop_ids=frozenset({-1}), logprobs=2,
                        sampling=Sampling(temperature=1.0 * (n % 2), seed=n)) for n in range(4)]  # fmt: skip
    alone = [list(Session(engine, Speculation.off()).steps(request)) for request in requests]
    sessions = [Session(engine, drafting(engine, n), checkpoints=2) for n in range(4)]
    running = {n: session.steps(request) for n, (session, request) in enumerate(zip(sessions, requests, strict=True))}
    found: dict[int, list] = {n: [] for n in running}
    while running:
        n = int(rng.choice(list(running)))
        step = next(running[n], None)
        if step is None:
            del running[n]
        else:
            found[n].append(step)
    assert [found[n] for n in range(4)] == alone


def test_an_error_leaves_what_was_there_before(engines, monkeypatch):
    engine = engines["f32"]
    session, prompt = Session(engine, checkpoints=4), tuple(range(20))
    request = Request(prompt, 6, stop_ids=frozenset({-1}))
    list(session.steps(request))
    first = session.report.token_ids
    forward = engine.model.forward

    def failing(tokens, state, **more):
        if state.length > 22:
            state.reset()
            raise ReadError("cannot be read", "layer 1")
        return forward(tokens, state, **more)

    with monkeypatch.context() as patched, pytest.raises(ReadError):
        patched.setattr(engine.model, "forward", failing)
        list(session.steps(request))
    assert session.reusable(prompt) == 20 and session.report.finish_reason == "error"
    list(session.steps(request))
    assert session.report.token_ids == first and session.report.cached_tokens == 20


def test_the_budget_binds_and_pins_go_last(engines):
    """A budget of two: the least recently used goes; of pins the latest stay."""
    engine = engines["f32"]
    session, never = Session(engine, checkpoints=1, pins=1), frozenset({-1})
    each = None
    for n in range(6):
        prompt = (1, 2, 3, *range(10 + n, 20 + n))
        list(session.steps(Request(prompt, 3, stop_ids=never, marks=(3,), pins=(3,))))
        each = max(one.nbytes for one in session.prefixes.kept)
        assert session.prefixes.nbytes <= session.prefixes.budget and session.prefixes.pinned == 1
        assert session.reusable((1, 2, 3, 99)) == 3
    assert each is not None and session.prefixes.budget >= 2 * each
    session.prefixes.budget = each
    list(session.steps(Request((7, 7, 7, 7), 3, stop_ids=never)))
    assert len(session.prefixes.kept) <= 1


def test_a_pin_outlives_turns_that_feed_nothing(engines):
    """An answer of one token ends where its prompt does; so does a later one of this prompt that asks for no pin."""
    session, prompt = Session(engines["f32"], checkpoints=1, pins=1), tuple(range(9))
    for pins in ((9,), (), ()):
        list(session.steps(Request(prompt, 1, stop_ids=frozenset({-1}), pins=pins)))
        assert session.prefixes.pinned == 1
    for n in range(4):
        list(session.steps(Request((*prompt, 20 + n), 3, stop_ids=frozenset({-1}))))
    assert session.reusable(prompt) == 9


def test_what_others_begin_with_stays_longer_than_the_rest_and_shorter_than_pins(engines):
    engine, never = engines["f32"], frozenset({-1})
    session = Session(engine, checkpoints=2, pins=1)
    list(session.steps(Request(tuple(range(12)), 3, stop_ids=never, marks=(3, 6), pins=(6,), shared=3)))
    for n in range(5):
        prompt = (*range(6), *range(20 + n, 30 + n))
        list(session.steps(Request(prompt, 3, stop_ids=never)))
        assert session.reusable(range(4)) == 3 and session.reusable(range(7)) == 6
    session.prefixes.budget //= 3
    list(session.steps(Request((*range(6), 50, 51), 3, stop_ids=never)))
    assert session.reusable(range(4)) == 0 and session.reusable(range(7)) == 6


def test_an_answer_needs_no_checkpoint(engines, monkeypatch):
    engine, notes = engines["f32"], []
    session = Session(engine, checkpoints=2)

    def full():
        raise MemoryError

    monkeypatch.setattr(session.decoder, "copy", full)
    monkeypatch.setattr(engine, "say", notes.append)
    list(session.steps(Request((1, 2, 3), 3, stop_ids=frozenset({-1}))))
    assert session.report.completion_tokens == 3 and session.prefixes.kept == [] and "no memory" in notes[0]


def test_no_checkpoints_no_memory(engines):
    session = Session(engines["f32"])
    list(session.steps(Request((1, 2, 3), 3, marks=(1,), pins=(3,))))
    assert session.prefixes.kept == [] and session.reusable((1, 2, 3)) == 0
    assert Prefixes(0, 0).find([1]) is None


def test_speculation_can_differ_from_turn_to_turn(engines):
    """A turn without drafts in between: the head and the lookup go on where they were."""
    engine = engines["f32"]
    session = Session(engine, drafting(engine, 2), checkpoints=4)
    prompt, never = (5, 6, 7, 8) * 5, frozenset({-1})
    runs = []
    for options in (None, Speculation.off(), None, replace(drafting(engine, 1), lookup=False), None):
        list(session.steps(Request(prompt, 12, stop_ids=never, speculation=options)))
        runs.append((session.report.token_ids, session.report.speculation))
    assert len({ids for ids, _ in runs}) == 1
    assert runs[1][1] is None and runs[3][1].lookup is None and runs[3][1].mtp.drafts > 0
    assert runs[4][1].lookup is not None and runs[4][1].identities() == []
