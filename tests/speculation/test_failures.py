"""What goes wrong inside a verify: no memory for its undo, rows that are not numbers, experts that cannot be read."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import coli.recurrent
from coli.errors import NonFinite, ReadError
from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation
from tests.speculation import harness
from tests.speculation.engines import open_tiny
from tests.speculation.harness import compare, record


class Allocations:
    """Counts the allocations made for undo, and fails the one numbered `fails`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int = -1) -> None:
        self.count, self.fails = 0, fails
        self._zeros, self._reserving = coli.recurrent.zeros, False
        self._patch = monkeypatch
        monkeypatch.setattr(coli.recurrent, "zeros", self._allocate)

    def watch(self, decoder: Decoder) -> None:
        reserve = decoder.state.recurrent.reserve

        def reserving(rows: int) -> bool:
            self._reserving = True
            try:
                return reserve(rows)
            finally:
                self._reserving = False

        self._patch.setattr(decoder.state.recurrent, "reserve", reserving)

    def _allocate(self, floats: int) -> np.ndarray:
        if self._reserving:
            self.count += 1
            if self.count - 1 == self.fails:
                raise MemoryError
        return self._zeros(floats)


DEEPER = {  # drafts grow from turn to turn, so slots are added one by one and several at once
    "head": Speculation(drafts=3, lookup=False, gate=False, mtp_force="cycle"),
    "lookup": Speculation(mtp=False, gate=False, lookup_force="cycle"),
    "both": Speculation(drafts=2, gate=False, mtp_force="mixed"),
}


@pytest.mark.parametrize("what", DEEPER)
@pytest.mark.parametrize("name", ["f32", "odd, log"])
def test_every_allocation_fails_once(engines, monkeypatch, name, what):
    """The step that needed it runs plain, a later one drafts again, nothing else changes, and the report says so."""
    recording, options = engines.recording(name, 1), DEEPER[what]

    def one_by_one(decoder: Decoder) -> None:
        """The first verifies carry 1, 2, 3 ... drafts."""
        propose, calls = decoder._propose, []

        def shorter(token: int):
            proposal = propose(token)
            calls.append(token)
            keep = (len(calls) + 1) // 2
            if proposal.source == "lookup" and len(proposal.drafts) > keep:
                return dataclasses.replace(proposal, drafts=proposal.drafts[:keep])
            return proposal

        decoder._propose = shorter

    def run(prepare, failing: int = -1):
        allocations = Allocations(monkeypatch, failing)
        report = compare(recording, options, f"{name}, {what}, allocation {failing} fails",
                         prepare=lambda decoder: (allocations.watch(decoder), prepare(decoder)))  # fmt: skip
        monkeypatch.undo()
        assert allocations.count > failing, "it was never made"
        return report, allocations.count

    for prepare in (lambda decoder: None, one_by_one):
        whole, made = run(prepare)
        deepest = max(len(source.by_position) for source in whole.sources)
        assert made == (2 if "log" in name else deepest) and not whole.warnings
        for failing in range(made):
            report, _ = run(prepare, failing)
            assert "no memory" in report.warnings[0] and len(report.warnings) == 1
            assert sum(source.verifies for source in report.sources) > 5


def test_memory_that_never_comes_leaves_plain_decoding(engines, monkeypatch):
    def none(decoder: Decoder) -> None:
        monkeypatch.setattr(decoder.state.recurrent, "reserve", lambda rows: rows == 0)

    report = compare(engines.recording("f32", 1), DEEPER["head"], prepare=none)
    assert report.forwards == report.tokens and report.mtp.verifies == 0 and "no memory" in report.warnings[0]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """Token 100's embedding is infinite, and the recording never sees it."""

    def spoil(weights: dict[str, np.ndarray]) -> None:
        weights["embed_tokens.weight"][100] = np.inf

    form = dict(dtype="F32", seed=24, change=spoil)
    with open_tiny(tmp_path_factory.mktemp("poisoned"), form, {}) as engine:
        ids = [token if token != 100 else 99 for token in harness.random_tokens(np.random.default_rng(9), 272, 60)]
        yield record(engine, ids[:20], ids[20:])


@pytest.mark.parametrize("row", range(5))
def test_a_draft_whose_row_is_no_number_is_only_a_wrong_draft(poisoned, row):
    options = Speculation(mtp=False, gate=False, lookup_force="accept")

    def prepare(decoder: Decoder) -> None:
        forced = decoder._forced
        decoder._forced = lambda *args: [100 if at == row else d for at, d in enumerate(forced(*args) or [])]

    report = compare(poisoned, options, f"row {row}", prepare=prepare)
    assert report.lookup.accepted == report.tokens - report.forwards and report.lookup.by_position[0][1] > 0 or row == 0


def test_a_pick_whose_row_is_no_number_fails_as_it_does_without_drafts(poisoned):
    recording = dataclasses.replace(poisoned, ids=[*poisoned.ids[:25], 100, *poisoned.ids[26:]])
    for options in (Speculation.off(), Speculation(mtp=False, gate=False, lookup_force="accept")):
        decoder, judge = harness.start(recording, options, "")
        harness.read(decoder, recording.ids[:20], 16)
        for at, token in enumerate(recording.ids[20:25], 1):
            judge.logits(at, decoder.feed(token))
        with pytest.raises(NonFinite):
            decoder.feed(100)
        decoder.finish()
        assert decoder.state.length == 0


def test_an_expert_that_cannot_be_read_in_a_verify_ends_the_answer_and_the_next_is_whole(tmp_path, monkeypatch):
    with open_tiny(tmp_path, dict(dtype="BF16", seed=25), dict(cap=1)) as engine:
        ids = harness.random_tokens(np.random.default_rng(1), 272, 50)
        recording = record(engine, ids[:20], ids[20:])
        options = Speculation(drafts=3, lookup=False, gate=False, mtp_force="cycle")
        decoder, _ = harness.start(recording, options, "")
        harness.read(decoder, ids[:20], 16)
        decoder.feed(ids[20])
        ensure = engine.store.ensure

        def failing(layer, experts, *_, **__):
            if layer == 5:
                raise ReadError("Input/output error", f"expert {experts[0]} of layer 5")
            ensure(layer, experts)

        monkeypatch.setattr(engine.store, "ensure", failing)
        with pytest.raises(ReadError, match="layer 5"):
            for token in ids[21:]:
                decoder.feed(token)
        decoder.finish()
        monkeypatch.setattr(engine.store, "ensure", ensure)
        compare(recording, options)
