"""The draft head: its numbers against the oracle's, its bytes whatever the order of work, and how it stops."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.settings import load
from coli.speculation.options import Speculation
from tests import oracle
from tests.models.bench_model import random_ids
from tests.speculation import harness
from tests.speculation.engines import open_tiny
from tests.speculation.harness import compare, record
from tests.tiny import odd_config, tiny_config, write_tiny

TOLERANCE = 2.3e-4  # float32 on both sides (model_spec.md section 0)


@pytest.mark.parametrize("wiring", ["a", "b"])
@pytest.mark.parametrize("config", [tiny_config(), odd_config(), tiny_config(mtp=dict(rope_theta=500.0))],
                         ids=["tiny", "odd", "own rope base"])  # fmt: skip
def test_scores_are_the_oracles_at_every_depth(tmp_path, wiring, config):
    """A prompt in pieces, pairs one by one and in batches, then three drafts from the head's own streams."""
    folder = write_tiny(tmp_path, config, seed=21, dtype="F32")
    trunk = oracle.load(folder)
    head = oracle.Qwen4MTP(trunk, wiring)
    ids = random_ids(70, folder).tolist()
    streams = trunk.forward(np.array(ids[:-1]))[1]
    with Engine.open(load({"model": str(folder), "threads": 2, "ctx": 96, "mtp_wiring": wiring}, {})[0]) as engine:
        state, pairs = engine.model.new_state(), engine.head.new_state()
        for start, end in ((0, 33), (33, 50), (50, 51), (51, 69)):
            engine.head.note(pairs, state, _run(engine, ids[start:end], state))
        drafts, p = engine.head.draft(pairs, state, ids[-1])
        scores, _ = head.rows(streams, np.array(ids[1:]))
        own, token = scores[-1], None
        streams = None
        for depth in range(1, 4):
            assert np.abs(engine.head.scores - own).max() <= TOLERANCE
            assert drafts == own.argmax() and p == pytest.approx(_share(own), rel=1e-3)
            if depth == 1:  # the oracle's own streams of its last row
                head.kv.truncate(68)
                _, streams = head.rows(trunk_streams(trunk, ids), np.array(ids[-1:]))
            token = drafts
            drafts, p = engine.head.deeper(pairs, token, depth)
            own, streams = head.rows(streams, np.array([token]))
            own = own[0]


def _run(engine, ids, state):
    return engine.model.forward(ids, state).streams


def trunk_streams(trunk, ids):
    """Streams of the last row but one of `ids`: what the last pair is made of."""
    trunk.reset()
    return trunk.forward(np.array(ids[:-1]))[1][-1:]


def _share(scores: np.ndarray) -> float:
    return float(1 / np.exp(scores.astype(np.float64) - scores.max()).sum())


def test_pairs_may_wait_through_any_number_of_plain_steps(engines):
    """No draft is asked for: pairs pile up, are settled when their place is full, and the bytes are the same."""
    for name in ("f32", "odd, log"):
        def plain(decoder):
            decoder._depth = lambda room: (0, 0.0)

        report = compare(engines.recording(name, 1), Speculation(lookup=False), name, prepare=plain)
        assert report.forwards == report.tokens == 108 and report.mtp.verifies == 0


def test_drafts_do_not_depend_on_when_pairs_were_settled(engines):
    recording = engines.recording("f32", 3)
    for seed in range(4):
        drafts = []
        for absorb in (False, True):
            options = Speculation(drafts=3, lookup=False, gate=False)
            decoder, judge = harness.start(recording, options, "", absorb=absorb)
            harness.read(decoder, recording.ids[: recording.prompt], 1 + 5 * seed)
            for token in recording.tokens[:40]:
                decoder.feed(token)
            decoder.finish()
            drafts.append([entry["drafts"] + entry["p"] for entry in judge.trace])
        assert drafts[0] == drafts[1] and len(drafts[0]) >= 10


# ---- how it stops ------------------------------------------------------------------------------------------------

OPTIONS = Speculation(drafts=2, lookup=False, gate=False)


def test_skipped_rows_stop_the_head_until_a_reset_or_a_restore(engines):
    recording = engines.recording("f32", 1)
    engine, ids = recording.engine, recording.ids
    decoder, judge = harness.start(recording, OPTIONS, "skipped")
    harness.read(decoder, ids[: recording.prompt], 16)
    place = decoder.copy()
    engine.model.forward(recording.tokens[:1], decoder.state)  # behind the decoder's back
    for at, token in enumerate(recording.tokens[1:9], 2):
        judge.logits(at, decoder.feed(token))
    decoder.finish()
    judge.state(head=False)
    report = decoder.report()
    assert "stopped" in report.warnings[0] and "position" in report.warnings[0] and report.forwards == 8
    stopped = decoder.copy()
    decoder.load(stopped)  # a place at which the head had stopped stays one
    decoder.begin(ids)
    judge.logits(10, decoder.feed(recording.tokens[9]))
    decoder.finish()
    assert decoder.report().mtp.verifies == 0 and "stopped" in decoder.report().warnings[0]
    decoder.load(place)
    decoder.begin(ids[: recording.prompt])
    judge.logits(1, decoder.feed(recording.tokens[0]))
    decoder.finish()
    judge.end()
    assert decoder.report().mtp.verifies == 1 and not decoder.report().warnings
    engine.model.forward(recording.tokens[1:2], decoder.state)
    decoder.feed(recording.tokens[2])
    assert "stopped" in decoder.report().warnings[0] and decoder.report().mtp.verifies == 1
    decoder.reset()
    decoder.begin(ids[: recording.prompt])
    harness.read(decoder, ids[: recording.prompt], 16)
    decoder.feed(recording.tokens[0])
    decoder.finish()
    judge.end()
    assert decoder.report().mtp.verifies == 1 and not decoder.report().warnings


def _fed_without_head(recording, ids, name):
    """The report of a sequence whose head stops: every logit and the trunk's state are plain decoding's."""
    decoder, judge = harness.start(recording, OPTIONS, name)
    judge.logits(0, harness.read(decoder, ids[:20], 16))
    for at, token in enumerate(ids[20:], 1):
        judge.logits(at, decoder.feed(token))
    decoder.finish()
    judge.state(head=False)
    return decoder.report()


def test_a_head_whose_numbers_break_stops_and_the_answer_goes_on(tmp_path):
    form = dict(dtype="F32", seed=22, poison="mtp.layers.0.mlp.experts.down_proj")
    with open_tiny(tmp_path, form, {}) as engine:
        ids = harness.random_tokens(np.random.default_rng(2), 272, 60)
        recording = _trunk_only(engine, ids)
        warnings = _fed_without_head(recording, ids, "poisoned").warnings
        assert len(warnings) == 1 and "not finite" in warnings[0] and "--no-mtp" in warnings[0]


def test_an_expert_of_the_head_that_cannot_be_read_stops_it(tmp_path, monkeypatch):
    from coli.errors import ReadError

    with open_tiny(tmp_path, dict(dtype="F32", seed=23), {}) as engine:
        ids = harness.random_tokens(np.random.default_rng(2), 272, 60)
        recording = record(engine, ids[:20], ids[20:])
        engine.head.store.table[:] = 0

        def ensure(layer, experts, *_, **__):
            raise ReadError("Input/output error", f"expert {experts[0]} of the head")

        monkeypatch.setattr(engine.head.store, "ensure", ensure)
        report = _fed_without_head(recording, ids, "unreadable")
        assert len(report.warnings) == 1 and "of the head" in report.warnings[0] and report.mtp.verifies == 0


def _trunk_only(engine, ids):
    """A recording that leaves the head out."""
    head, engine.head = engine.head, None
    recording = record(engine, ids[:20], ids[20:])
    engine.head = head
    return recording
