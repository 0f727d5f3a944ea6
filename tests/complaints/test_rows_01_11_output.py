"""Rows 1 to 11: speculation changes the output. It does not: ids, logits and state are plain decoding's.

Row 6 is test_row_06_same_function.py, rows 10 and 11 are tests/speculation/test_sampling_drafts.py."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.lookup import Lookup
from coli.speculation.options import Speculation
from tests.speculation.engines import EVERY
from tests.speculation.harness import compare, record

ALL_STOPS_OFF = frozenset({-1})


@pytest.fixture(scope="module")
def engine():
    with Engine.open(load({"threads": 2}, {})[0]) as engine:
        yield engine


def answer(engine, options, request):
    """Everything an answer is, apart from how long it took."""
    session = Session(engine, options)
    text = "".join(session.generate(request))
    report = session.report
    assert text == report.text
    if report.speculation is not None:
        assert report.speculation.identities() == []
    return report.token_ids, report.text, report.finish_reason, session.last_logits.tobytes(), session.state.content()


@pytest.mark.parametrize("text", ["serving" * 48, "a" * 48, " the" * 48, "ab " * 24, "x = 1\n" * 24])
def test_row_01_a_prompt_that_repeats_itself(engine, text):
    ids = tuple(engine.tokenizer.encode(text))
    assert len(set(ids)) <= 6
    request = Request(ids, 24, stop_ids=ALL_STOPS_OFF)
    plain = answer(engine, Speculation.off(), request)
    for k in range(1, 6):
        assert answer(engine, Speculation(mtp=False, lookup_drafts=k, gate=False), request) == plain, k
    assert answer(engine, Speculation(), request) == plain


@pytest.mark.parametrize("tokens", [[65], [65, 66]], ids=["one token", "two tokens"])
def test_row_01_on_a_hybrid_that_does_repeat(engines, tokens):
    """One token 48 times and two 24 times, and the caller goes on picking them: long runs of copied drafts."""
    engine = engines["f32"]
    recording = record(engine, (tokens * 48)[:48], (tokens * 48)[:60])
    for k in range(1, 6):
        report = compare(recording, Speculation(mtp=False, lookup_drafts=k, gate=False), f"{tokens}, {k}")
        assert report.lookup.accepted == report.tokens - report.forwards > 0


@pytest.mark.parametrize("mode", ["reject", "accept", "mixed", "row1", "row2", "row3", "row4", "row5"])
def test_row_02_recurrent_state_goes_back_to_the_standing_row(engines, mode):
    for name in ("f32", "int8 trunk, log"):
        compare(engines.recording(name, 4), Speculation(mtp=False, gate=False, lookup_force=mode), f"{name}, {mode}")


def test_row_04_penalties_see_every_picked_token(engine):
    """The history they work on is prompt and emitted tokens, at every pick, with any drafts."""
    ids = tuple(engine.tokenizer.encode("a b c a b c a b c a b c"))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, repetition_penalty=1.3, presence_penalty=1.0, seed=3)
        request = Request(ids, 40, sampling, stop_ids=ALL_STOPS_OFF)
        plain = answer(engine, Speculation.off(), request)
        free = answer(engine, Speculation.off(), Request(ids, 40, Sampling(temperature), stop_ids=ALL_STOPS_OFF))
        assert plain != free, "the penalties must matter here"
        for options in (Speculation(gate=False), Speculation(mtp=False, gate=False), Speculation(drafts=3)):
            assert answer(engine, options, request) == plain


@pytest.mark.parametrize("name", EVERY)
def test_row_05_a_rows_bits_do_not_depend_on_how_many_there_are(engines, name):
    """The kernels one by one: tests/kernels; here the whole model, each row of S = 1..8 against S = 1."""
    recording = engines.recording(name, 5)
    model, prompt = recording.engine.model, recording.ids[: recording.prompt]
    for rows in range(1, 9):
        state = model.new_state()
        for token in prompt:
            model.forward([token], state)
        answer = model.forward(recording.tokens[:rows], state, want="all", undoable=True)
        for row in range(rows):
            assert answer.logits[row].tobytes() == recording.logits[row + 1].tobytes(), (rows, row)


class AtLeast(Lookup):
    """Proposes only behind a suffix of `shortest` tokens that occurred before."""

    shortest = 2

    def propose(self, k: int) -> list[int]:
        seen, n = self._history, self.shortest
        tail = seen[-n:]
        known = any(seen[at : at + n] == tail for at in range(len(seen) - n))
        return super().propose(k) if known else []


CALL = '<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>\n'


@pytest.mark.parametrize("shortest", range(2, 9))
def test_row_08_the_shortest_match_changes_speed_only(engine, monkeypatch, shortest):
    text = "".join(CALL.format(city) for city in ("Paris", "Rome", "Oslo")) + "<tool_call>\n"
    ids = tuple(engine.tokenizer.encode(text))
    request = Request(ids, 40, stop_ids=ALL_STOPS_OFF)
    plain = answer(engine, Speculation.off(), request)
    monkeypatch.setattr("coli.speculation.decoder.Lookup", type("Longer", (AtLeast,), {"shortest": shortest}))
    for k in (1, 3, 5):
        assert answer(engine, Speculation(mtp=False, lookup_drafts=k, gate=False), request) == plain


def test_row_08_on_random_picks(engines, monkeypatch):
    accepted = []
    for shortest in (2, 4, 8):
        monkeypatch.setattr("coli.speculation.decoder.Lookup", type("Longer", (AtLeast,), {"shortest": shortest}))
        report = compare(engines.recording("odd, log", 6), Speculation(mtp=False, gate=False), str(shortest))
        accepted.append(report.lookup.drafts)
    assert accepted == sorted(accepted, reverse=True) and accepted[0] > accepted[-1]


def test_a_wrong_draft_and_a_right_one_give_the_same_logits(engines):
    """Rows 1 to 11 in one line: the logits of a position, whatever the verify that held it."""
    recording = engines.recording("fp8", 7)
    for mode in ("accept", "reject"):
        options = Speculation(mtp=False, gate=False, lookup_force=mode)
        assert np.isfinite(recording.logits[0]).all() and compare(recording, options).tokens == 108
