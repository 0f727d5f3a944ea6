"""Rows 13 to 19: the ends of a verify. Stops, limits and cancels come token by token; what was drafted behind them is
undone, and the next turn finds what plain decoding would have left."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import UsageError
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from tests.speculation import harness

NO_STOPS = frozenset({-1})
FORCED = {
    "5 right": Speculation(mtp=False, gate=False, lookup_force="accept"),
    "3 right of the head": Speculation(drafts=3, lookup=False, gate=False, mtp_force="accept"),
    "cycle": Speculation(mtp=False, gate=False, lookup_force="cycle"),
    "own": Speculation(gate=False, drafts=3),
}


def run(engine, request, options, reference=None):
    """(session, everything that must be equal)."""
    session = Session(engine, options, reference=reference)
    text = "".join(session.generate(request))
    report = session.report
    assert text == report.text and report.completion_tokens == len(report.token_ids)
    if report.speculation is not None:
        assert report.speculation.identities() == []
    seen = report.token_ids, text, report.finish_reason, session.last_logits.tobytes(), session.state.content()
    return session, seen


@pytest.fixture(scope="module")
def nano():
    with Engine.open(load({"threads": 2}, {})[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def story(nano):
    """A prompt's ids and its plain greedy answer of 40 tokens."""
    messages = [{"role": "user", "content": "Tell me a short story about a fox."}]
    prompt = tuple(nano.tokenizer.encode(nano.chat.render(messages, thinking=None, effort=None)))
    session, _ = run(nano, Request(prompt, 40), Speculation.off())
    return prompt, session.report.token_ids


@pytest.mark.parametrize("what", FORCED)
def test_row_13_the_earliest_cause_ends_it(engines, what):
    """A stop token as the i-th token and at most m of them: `stop` with i tokens, or `length` with m."""
    engine, prompt = engines["f32"], tuple(range(50, 70))
    answer = run(engine, Request(prompt, 14, stop_ids=NO_STOPS), Speculation.off())[0].report.token_ids
    for stop, most in itertools.product(range(1, 10), (1, 2, 5, 6, 7, 8)):
        token = answer[stop - 1]
        if token in answer[: stop - 1]:
            continue
        request = Request(prompt, most, stop_ids=frozenset({token}))
        session, found = run(engine, request, FORCED[what], prompt + answer)
        assert found == run(engine, request, Speculation.off())[1], (stop, most)
        assert (found[2], len(found[0])) == (("stop", stop) if stop <= most else ("length", most)), (stop, most)


@pytest.mark.parametrize("what", FORCED)
def test_row_14_and_15_a_stop_string_ends_at_every_row(nano, story, what):
    """The token that completes it is the last picked; text, ids and counts are cut at the same place, whichever row of
    a verify it came from."""
    prompt, answer = story
    tokenizer, rows = nano.tokenizer, set()
    whole = tokenizer.decode(answer)
    for last in range(2, 20):
        text = tokenizer.decode(answer[:last])
        before = tokenizer.decode(answer[: last - 1])
        stop = next((text[-n:] for n in range(3, len(text)) if whole.find(text[-n:]) + n == len(text)), None)
        if stop is None or len(text) == len(before):
            continue
        request = Request(prompt, 40, stop=(stop, "never seen"))
        session, found = run(nano, request, FORCED[what], prompt + answer)
        assert found == run(nano, request, Speculation.off())[1], stop
        kept = text[: -len(stop)]
        begun = next(n for n in range(last + 1) if len(tokenizer.decode(answer[:n])) >= len(kept))
        assert found[:3] == (answer[:begun], kept, "stop") and session.picked_ids == answer[:last]
        rows.add((last - 1) % 6)
    assert rows == set(range(6))


@pytest.mark.parametrize("end", range(1, 10))
def test_row_16_ended_mid_verify_and_went_on(engines, end):
    """A turn ends behind any token of a verify; the next reads more and answers, from plain decoding's bytes."""
    for name, options in (("f32", FORCED["5 right"]), ("int8 trunk, log", FORCED["3 right of the head"])):
        recording = engines.recording(name, 8)
        decoder, judge = harness.start(recording, options, f"{name}, ended behind {end}")
        decoder.begin(recording.ids[: recording.prompt])
        judge.logits(0, harness.read(decoder, recording.ids[: recording.prompt], 16))
        for at in range(1, end + 1):
            judge.logits(at, decoder.feed(recording.tokens[at - 1]))
        decoder.finish()
        judge.end()
        rows = 6 if options.lookup else 4
        report = decoder.report()
        assert report.ended_mid_verify == (end % rows != 0)
        lines = report.lines()
        assert all(line.endswith(" | ended mid-verify") == report.ended_mid_verify for line in lines[:1])
        decoder.begin(recording.ids[: recording.prompt + end + 9])
        judge.logits(end + 9, harness.read(decoder, recording.tokens[end : end + 9], 4))
        for at in range(end + 10, end + 30):
            judge.logits(at, decoder.feed(recording.tokens[at - 1]))
        decoder.finish()
        judge.end()
        assert decoder.report().tokens == 20 and decoder.report().lines()[0].count("mid-verify") == (20 % rows != 0)


@pytest.mark.parametrize("drafts", range(6))
def test_row_17_resumed_around_chunk_edges(engines, drafts):
    """Back to a place within a prompt that was read in chunks of 7, other text having gone on from there; the first
    step behind it carries 0 to 5 drafts."""
    recording = engines.recording("fp8", 9, prompt=1)
    ids, chunk = recording.ids, recording.engine.limit
    assert chunk == 7
    if drafts == 0:
        options = [Speculation(mtp=True, drafts=0, lookup=False)]
    else:
        options = [Speculation(mtp=False, gate=False, lookup_drafts=drafts, lookup_force="accept")]
    if 1 <= drafts <= 3:
        options.append(Speculation(drafts=drafts, gate=False, lookup=False, mtp_force="accept"))
    for option, length in itertools.product(options, (1, 6, 7, 8, 13, 14, 15, 20, 21, 22)):
        decoder, judge = harness.start(recording, option, f"{drafts} drafts behind {length}")
        harness.read(decoder, ids[:length], chunk)
        place, judged = decoder.copy(), decoder._trace
        decoder._trace = None
        harness.read(decoder, [5, 6, 7, 8, 9], chunk)
        for token in (5, 6, 7, 8):
            decoder.feed(token)
        decoder.finish()
        decoder._trace = judged
        decoder.load(place)
        decoder.begin(ids[:length])
        if drafts == 0:
            decoder._depth = lambda room: (0, 0.0)
        for at in range(length, length + 8):
            judge.logits(at, decoder.feed(ids[at]))
        decoder.finish()
        judge.end()
        assert judge.trace[0]["k"] == drafts


def test_row_17_no_sentinel_reaches_the_embedding(engines):
    model = engines["f32"].model
    for wrong in (-1, engines["f32"].geometry.vocab):
        state = model.new_state()
        model.forward([3, 4], state)
        with pytest.raises(UsageError, match="vocabulary"):
            model.forward([5, wrong], state, want="all", undoable=True)


def cancelled(engine, request, options, reference, pieces: int):
    """The answer of a consumer that cancels when it has had that many pieces."""
    session = Session(engine, options, reference=reference)
    for seen, _ in enumerate(session.generate(request), 1):
        if seen == pieces:
            session.cancel()
            calls = engine.model.calls
    report = session.report
    assert report.finish_reason == "cancelled" and engine.model.calls == calls, "a forward ran for nobody"
    return report.token_ids, report.text, session.state.content(), session.last_logits.tobytes()


@pytest.mark.parametrize("what", FORCED)
def test_row_19_cancelled_between_settled_tokens(nano, story, monkeypatch, what):
    """A consumer cancels while a verify is being settled: nothing more is picked or run, what was drafted is undone."""
    prompt, answer = story
    forward = nano.model.forward

    def counted(*args, **kwargs):
        nano.model.calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(nano.model, "calls", 0, raising=False)
    monkeypatch.setattr(nano.model, "forward", counted)
    for pieces in range(1, 14):
        request, reference = Request(prompt, 40), prompt + answer
        found = cancelled(nano, request, FORCED[what], reference, pieces)
        assert found == cancelled(nano, request, Speculation.off(), reference, pieces), pieces
        assert run(nano, Request(prompt, 3), FORCED[what], reference)[1][0] == answer[:3]


@pytest.mark.parametrize("at", range(1, 8))
def test_row_19_cancelled_while_a_forward_runs(nano, story, monkeypatch, at):
    """As a signal does: the token picked last stays the last, its logits are still those it was picked from."""
    prompt, answer = story
    session = Session(nano, FORCED["5 right"], reference=prompt + answer)
    plain, feed = Session(nano, Speculation.off()), session.decoder.feed
    fed = []

    def cancelling(token):
        fed.append(token)
        if len(fed) == at:
            session.cancel()
        return feed(token)

    monkeypatch.setattr(session.decoder, "feed", cancelling)
    "".join(session.generate(Request(prompt, 40)))
    "".join(plain.generate(Request(prompt, at)))
    assert session.report.token_ids == plain.report.token_ids == answer[:at]
    assert session.last_logits.tobytes() == plain.last_logits.tobytes()


def test_row_19_a_consumer_that_leaves_at_any_token(nano, story):
    prompt, answer = story
    for pieces in range(1, 9):
        states = []
        for options in (FORCED["5 right"], Speculation.off()):
            session = Session(nano, options, reference=prompt + answer)
            running = session.generate(Request(prompt, 40))
            for _ in range(pieces):
                next(running)
            running.close()
            assert session.report.finish_reason == "cancelled"
            assert np.array_equal(session.report.token_ids, answer[: len(session.report.token_ids)])
            states.append(session.state.content())
        assert states[0] == states[1]
