"""Rows that only a guess needs and that cannot be computed: the answer is plain decoding's all the same."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import ColiError, ReadError
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from tests.tiny import tiny_config, write_tiny

REQUEST = Request((65, 66, 67, 68) * 2 + (65, 66, 67), max_tokens=24, stop_ids=frozenset())
GUESSING = Speculation(drafts=2, lookup=False, gate=False)  # the head of a random model is nearly always wrong


def run(engine: Engine, speculation: Speculation) -> tuple[tuple[int, ...], bytes, Session]:
    session = Session(engine, speculation)
    "".join(session.generate(REQUEST))
    return session.report.token_ids, session.last_logits.tobytes(), session


def opened(folder, **flags) -> Engine:
    """Experts are read when a layer waits for them and at no other time."""
    flags = {"model": str(folder), "threads": 2, "ctx": 64, "prefetch": "off", "warm_start": False} | flags
    return Engine.open(load(flags, {})[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config(num_experts=64, num_experts_per_tok=2)
    return write_tiny(tmp_path_factory.mktemp("guesses"), config, seed=3, dtype="BF16")


def needed(folder, speculation: Speculation) -> list[set[int]]:
    """Experts that a run makes resident, by layer."""
    with opened(folder, cap=64) as engine:
        run(engine, speculation)
        return [engine.store.resident(layer) for layer in range(engine.geometry.layers)]


@pytest.mark.parametrize("cap", [64, 3])
@pytest.mark.parametrize("undo", ["slots", "log"])
def test_experts_that_only_wrong_drafts_need_may_be_unreadable(folder, monkeypatch, cap, undo):
    all_needed, plain_needed = needed(folder, GUESSING), needed(folder, Speculation.off())
    only = [mine - plain for mine, plain in zip(all_needed, plain_needed, strict=True)]
    assert sum(map(len, only)) > 3
    with opened(folder, cap=cap, undo=undo) as engine:
        expected = run(engine, Speculation.off())[:2]
        store, loader, fill, failed = engine.store, engine.store._loader, engine.store._loader.fill, []

        def broken(load, parts):
            if load.expert in only[load.layer]:
                failed.append(load.expert)
                raise ReadError("cannot read an expert", "model.safetensors")
            return fill(load, parts)

        for layer in range(engine.geometry.layers):
            store.ensure(layer, [e for e in range(64) if e not in only[layer]][:cap])  # push them out
        monkeypatch.setattr(loader, "fill", broken)
        *got, session = run(engine, GUESSING)
        assert tuple(got) == expected and failed
        assert session.report.speculation.identities() == []


def test_an_expert_the_pick_needs_still_ends_the_answer(folder, monkeypatch):
    with opened(folder, cap=2) as engine:
        def broken(load, parts):
            raise ReadError("cannot read an expert", "model.safetensors")

        session = Session(engine, GUESSING)
        pieces = session.generate(REQUEST)
        next(pieces)
        monkeypatch.setattr(engine.store._loader, "fill", broken)
        with pytest.raises(ColiError):
            list(pieces)
        assert session.report.finish_reason == "error" and session.report.speculation.identities() == []


def test_ngram_rows_of_a_guess_may_be_unreadable(folder, monkeypatch):
    monkeypatch.setattr("coli.ngrams.KEPT", 0)  # tables are read row by row, as large ones are
    with opened(folder) as engine:
        expected = run(engine, Speculation.off())[:2]
        table = engine.model._tables[1]
        wait, start, rows = table.wait, table.start, [0]

        def begin(numbers):
            rows[0] = len(numbers)
            start(numbers)

        def broken():
            values = wait()
            if 1 < rows[0] <= 6:
                raise ReadError("reading the n-gram table failed")
            return values

        monkeypatch.setattr(table, "start", begin)
        monkeypatch.setattr(table, "wait", broken)
        *got, session = run(engine, GUESSING)
        assert tuple(got) == expected
        assert session.report.speculation.mtp.accepted == 0 < session.report.speculation.mtp.written


def test_an_answer_at_a_time_on_a_state(folder):
    with opened(folder) as engine:
        session = Session(engine)
        first = session.generate(REQUEST)
        next(first)
        for other in (session, Session(engine, state=session.state)):
            with pytest.raises(ValueError):
                next(other.generate(REQUEST))
        first.close()
        assert run(engine, Speculation.off())[0] == run(engine, GUESSING)[0]
        assert len(list(session.generate(REQUEST))) > 0 and len(session.report.token_ids) == 24


def test_a_cancel_before_the_first_forward_is_heard_and_not_remembered(folder):
    with opened(folder) as engine:
        session = Session(engine)
        pieces = session.generate(REQUEST)
        session.cancel()
        assert list(pieces) == [] and session.report.finish_reason == "cancelled"
        list(session.generate(REQUEST))
        assert session.report.finish_reason == "length"


@pytest.mark.parametrize("wrong", [dict(drafts=4), dict(drafts=-1), dict(lookup_drafts=6), dict(mtp_force="maybe")])
def test_what_no_engine_can_do_is_refused(wrong):
    with pytest.raises(ColiError):
        Speculation(**wrong)


def test_a_clock_that_does_not_move_is_survived(folder, monkeypatch):
    with opened(folder) as engine:
        expected = run(engine, Speculation.off())[:2]
        monkeypatch.setattr("coli.speculation.decoder.time.perf_counter", lambda: 5.0)
        assert run(engine, GUESSING)[:2] == expected


def test_a_failure_right_behind_a_verify_leaves_no_drafts_in_the_state(folder, monkeypatch):
    with opened(folder) as engine:
        session = Session(engine, GUESSING)
        decoder = session.decoder
        decoder.begin(REQUEST.prompt_ids)
        logits = decoder.prefill(REQUEST.prompt_ids)

        def interrupted(rows, seconds):
            raise KeyboardInterrupt

        monkeypatch.setattr(decoder.gate, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.feed(int(np.argmax(logits)))
        decoder.finish()
        assert session.state.length == len(REQUEST.prompt_ids) + 1
