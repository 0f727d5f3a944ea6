"""The head at load and in use: what may be wrong with it, and that the answer never suffers from it."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import ModelError
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from coli.trace import Record
from tests.tiny import write_tiny

PROMPT = (5, 6, 7, 5, 6, 7, 5, 6)


def answer(engine: Engine, **flags) -> tuple[tuple[int, ...], Session]:
    session = Session(engine, **flags)
    "".join(session.generate(Request(PROMPT, max_tokens=12, stop_ids=frozenset())))
    return session.report.token_ids, session


def opened(folder, environ=None, **flags) -> Engine:
    return Engine.open(load({"model": str(folder), "threads": 2} | flags, environ or {})[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("head"), seed=3, dtype="BF16")


def test_more_expert_slots_than_experts_are_as_many_as_experts(folder):
    with opened(folder, mtp_cap=1_000_000) as engine:
        assert engine.head is not None and engine.stores[1].cap == engine.geometry.experts


def test_slots_of_the_head_give_way_before_the_head_does(folder):
    with opened(folder, cap=2, mtp_cap=1) as engine:
        budget = (engine.terms.total + 1.5 * engine.store.nbytes / engine.store.cap) / 1e9
    with opened(folder, mtp_cap=8, ram=budget) as engine:
        assert engine.head is not None and engine.stores[1].cap == engine.cap
        assert any("--mtp-cap 8" in note for note in engine.notes)


@pytest.mark.parametrize("name", ["mtp.fc_hidden.weight", "mtp.layers.0.mlp.gate.weight"])
def test_a_damaged_head_is_left_out_with_its_reason_or_refused(tmp_path, name):
    folder = write_tiny(tmp_path, seed=3, dtype="BF16", poison=name)
    with opened(folder) as engine:
        assert engine.head is None and name in engine.head_line and len(engine.stores) == 1
        assert engine.terms.of_head == 0
        assert answer(engine)[1].report.speculation.mtp is None
    with pytest.raises(ModelError):
        opened(folder, mtp=True)


def test_logits_that_cannot_be_dumped_stop_the_head_and_not_the_answer(folder):
    with opened(folder) as engine:
        plain, _ = answer(engine, speculation=Speculation.off())
    with opened(folder, {"Q38_MTP_DUMP": "/dev/full"}) as engine:
        ids, session = answer(engine)
        warnings = session.report.speculation.warnings
        assert ids == plain and any("Q38_MTP_DUMP" in line and "No space" in line for line in warnings)


def test_dumped_logits_are_the_scores_of_every_draft(folder, tmp_path):
    with opened(folder, {"Q38_MTP_DUMP": str(tmp_path / "dump")}, lookup=False) as engine:
        _, session = answer(engine)
        written = session.report.speculation.mtp.written
        assert np.fromfile(tmp_path / "dump", np.float32).reshape(-1, engine.geometry.vocab).shape[0] == written > 0


def test_a_trace_of_steps_without_undo_memory_can_be_read(folder, monkeypatch):
    with opened(folder) as engine:
        records: list[dict] = []
        session = Session(engine, trace=records.append)
        monkeypatch.setattr(session.state, "reserve", lambda rows: rows == 0)
        "".join(session.generate(Request(PROMPT, max_tokens=12, stop_ids=frozenset())))
        assert len([Record.of(record) for record in records]) == 11
        assert session.report.speculation.identities() == []


def test_every_pick_counts_in_the_vocabulary_the_last_too(folder, tmp_path):
    with opened(folder, mtp_vocab=20, vocab_usage=tmp_path / "counts", drafts=1) as engine:
        _, session = answer(engine)
        assert session.report.speculation.vocabulary.picks == 12


@pytest.mark.parametrize("flags, environ, name", [
    (dict(mtp=False), {"Q38_MTP_DUMP": "x"}, "Q38_MTP_DUMP"),
    (dict(mtp=False, drafts="3"), {}, "--drafts"),
    (dict(lookup=False, lookup_drafts=3), {}, "--lookup-drafts"),
    (dict(mtp_pstep=True, drafts="1"), {}, "--pstep"),
    (dict(mtp_pstep=True, gate=False), {}, "--pstep"),
    ({}, {"Q38_MTP_FORCE": "row3"}, "Q38_MTP_FORCE"),
])  # fmt: skip
def test_a_setting_that_cannot_act_is_said(folder, flags, environ, name):
    with opened(folder, environ, **flags) as engine:
        assert [note for note in engine.notes if note.startswith(f"{name} has no effect: ")]


def test_settings_that_act_are_not(folder):
    with opened(folder, drafts="3", lookup_drafts=2, mtp_pstep=True, mtp_vocab=9) as engine:
        assert not [note for note in engine.notes if "no effect" in note]
