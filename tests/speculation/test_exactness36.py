"""Decoding with drafts is plain decoding on the engines of qwen36: up to seven drafts of the head, eight rows a verify.

tests/speculation/test_exactness.py says what is compared, and tests the harness itself."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.settings import load
from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation
from tests.speculation import harness
from tests.speculation.engines import CODER, ENGINES36, HEADED36, MOE, QUOTAS36
from tests.speculation.harness import Compared, compare, counts, forced_counts, fuzz, record
from tests.tiny36 import HEADED, tiny36_config, write_tiny36

MODES = ("accept", "reject", "mixed", "cycle", "row1", "row2", "row3", "row6", "row8")


def options(**changes) -> Speculation:
    """As the settings make them for qwen36."""
    return Speculation(**dict(most=7, strict=True) | changes)


def test_a_hundred_thousand_tokens_are_asked_for() -> None:
    assert sum(QUOTAS36.values()) >= 100_000 and min(QUOTAS36.values()) >= 2_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES36)
def test_random_walks(engines, name):
    before = Compared.tokens
    assert engines.walk(name, QUOTAS36[name]) == Compared.tokens - before >= QUOTAS36[name]


# ---- forced drafts, exact counters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("name", HEADED36)
def test_forced_drafts_of_the_head(engines, name, depth):
    recording = engines.recording(name, 1)
    for mode in ("cycle",) if QUOTAS36[name] < 10_000 else MODES:
        if mode.startswith("row") and int(mode[3:]) > depth + 1:
            continue
        chosen = options(drafts=depth, lookup=False, gate=False, mtp_force=mode)
        report = compare(recording, chosen, f"{name}, {mode}, {depth}", absorb=mode == "mixed")
        assert counts(report, "mtp") == forced_counts(mode, depth, len(recording.tokens)), mode
        assert report.mtp_force == mode and report.mtp.written == report.mtp.drafts and not report.ended_mid_verify


@pytest.mark.parametrize("name", ["moe f32", "next bf16, log", "coder odd fp8", "coder bf16, two experts"])
@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("mode", ["accept", "reject", "mixed", "cycle", "row2", "row5"])
def test_forced_drafts_of_the_lookup(engines, name, depth, mode):
    recording = engines.recording(name, 1)
    report = compare(recording, options(mtp=False, lookup_drafts=depth, gate=False, lookup_force=mode))
    assert counts(report, "lookup") == forced_counts(mode, depth, len(recording.tokens))
    assert report.mtp is None


# ---- the gate, both sources, per-step depth ------------------------------------------------------------------------

NATURAL = {
    "gate's depth": options(drafts=0, lookup=False),
    "gate's depth, right drafts": options(drafts=0, lookup=False, mtp_force="accept"),
    "no gate, depth left open": options(drafts=0, lookup=False, gate=False),
    "the default": options(drafts=1, pstep=True),
    "lookup": options(mtp=False),
    "lookup, no gate, 2": options(mtp=False, gate=False, lookup_drafts=2),
    "both by the gate": options(drafts=0),
    "both, no gate": options(drafts=7, gate=False),
    "both forced": options(drafts=5, gate=False, mtp_force="cycle", lookup_force="mixed"),
    "per step": options(drafts=7, pstep=True, lookup=False),
    "per step, right drafts": options(drafts=6, pstep=True, lookup=False, mtp_force="accept"),
    "per step with lookup": options(drafts=3, pstep=True),
    "only likely drafts": options(drafts=7, pmin=0.05, lookup=False, gate=False),
    "only certain drafts": options(drafts=7, pmin=1.0, lookup=False, gate=False),
    "likely drafts, right ones, per step": options(drafts=7, pmin=0.03, pstep=True, mtp_force="accept"),
}


WAYS = [(name, what) for name in ("moe f32", "moe fp8", "next bf16, log", "dense int8 trunk, log") for what in NATURAL]
WAYS += [("coder odd fp8", what) for what in ("lookup", "lookup, no gate, 2", "both, no gate", "both by the gate")]


@pytest.mark.parametrize(("name", "what"), WAYS)
def test_every_way_to_choose_drafts(engines, name, what):
    compare(engines.recording(name, 1), NATURAL[what], f"{name}, {what}")
    compare(engines.repeating(name), NATURAL[what], f"{name}, repeating, {what}", absorb=True)


def test_the_head_stops_at_a_draft_it_holds_unlikely(engines):
    """The first draft is always kept; at 1 no other is."""
    recording = engines.recording("moe f32", 1)
    report = compare(recording, options(drafts=7, pmin=1.0, lookup=False, gate=False))
    assert [carried for carried, _ in report.mtp.by_position[1:]] == [0] * (len(report.mtp.by_position) - 1)
    some = compare(recording, options(drafts=7, pmin=0.05, lookup=False, gate=False))
    every = compare(recording, options(drafts=7, lookup=False, gate=False))
    assert report.mtp.drafts < some.mtp.drafts < every.mtp.drafts


@pytest.mark.parametrize("left", range(10))
def test_the_context_ends_inside_a_verify(engines, left):
    """Drafts stop where the context does, whatever the phase, with every source asked for more."""
    engine = engines["moe f32"]
    ids = ([40, 41] * engine.ctx)[: engine.ctx]
    recording = record(engine, ids[: 100 + left], ids[100 + left :])
    for chosen in (options(mtp=False, gate=False), options(drafts=7, lookup=False, gate=False, mtp_force="accept")):
        report = compare(recording, chosen)
        assert report.tokens == 28 - left and not report.ended_mid_verify


# ---- what must make no difference ----------------------------------------------------------------------------------

FLAGS = {
    "undo by log": dict(undo="log"), "undo by slots": dict(undo="slots"), "one expert": dict(cap=1),
    "three experts": dict(cap=3, mtp_cap=2), "one thread": dict(threads=1), "three threads": dict(threads=3),
    "prefill in threes": dict(prefill_chunk=3), "plain kernels": dict(simd=False),
}  # fmt: skip


@pytest.fixture(scope="module", params=HEADED)
def same_model(request, tmp_path_factory):
    """The folder of a checkpoint, and its recording as opened without flags."""
    folder = write_tiny36(tmp_path_factory.mktemp("same36"), tiny36_config(request.param), seed=30, dtype="BF16")
    with _opened(folder) as engine:
        ids = harness.random_tokens(np.random.default_rng(30), engine.geometry.vocab, 64)
        yield folder, record(engine, ids[:9], ids[9:])


def _opened(folder, **flags) -> Engine:
    return Engine.open(load({"model": str(folder), "threads": 2, "ctx": 64, "mtp": True} | flags, {})[0])


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_bytes_do_not_depend_on_how_the_engine_was_opened(same_model, flags):
    """A recording made by one engine judges another: state, head and logits are the same bytes."""
    folder, recording = same_model
    with _opened(folder, **flags) as engine:
        other = harness.Recording(engine, recording.ids, recording.prompt, recording.logits, recording.states,
                                  recording.heads)  # fmt: skip
        for chosen in (options(drafts=7, gate=False, lookup=False, mtp_force="cycle"), options(drafts=0)):
            compare(other, chosen)
        fuzz(other, 5, str(flags))


@pytest.mark.parametrize("mode", ["int4", "int8"])
@pytest.mark.parametrize("family", [MOE, CODER])
def test_experts_made_smaller_at_load_change_nothing_but_the_numbers(tmp_path, family, mode):
    """Row independent like any others, alone in memory or with all."""
    config = tiny36_config(family, moe_intermediate_size=64)
    folder, recordings = write_tiny36(tmp_path, config, seed=31, dtype="BF16"), []
    ids = harness.random_tokens(np.random.default_rng(31), 272, 64)
    mtp = family in HEADED
    for flags in (dict(), dict(experts=mode), dict(experts=mode, cap=1)):
        with _opened(folder, mtp=mtp, **flags) as engine:
            recordings.append(record(engine, ids[:9], ids[9:]))
            compare(recordings[-1], options(drafts=5, gate=False, mtp_force="cycle"))
            fuzz(recordings[-1], 7, str(flags))
    plain, small, alone = ([logits.tobytes() for logits in recording.logits] for recording in recordings)
    assert small == alone and small != plain


def test_two_sequences_take_turns_on_one_engine(engines):
    """The rows a verify keeps for later survive the forwards of another sequence."""
    first, second = engines.recording("moe f32", 1), engines.recording("moe f32", 2, prompt=30)
    chosen = options(drafts=7, lookup=False, gate=False, mtp_force="cycle")
    running: list[tuple[harness.Recording, Decoder, harness.Judge]] = [
        (recording, *harness.start(recording, chosen, "taking turns")) for recording in (first, second)
    ]
    for recording, decoder, judge in running:
        decoder.begin(recording.ids[: recording.prompt])
        judge.logits(0, harness.read(decoder, recording.ids[: recording.prompt], 16))
    for at in range(1, 90):
        for recording, decoder, judge in running:
            judge.logits(at, decoder.feed(recording.tokens[at - 1]))
    for _, decoder, judge in running:
        decoder.finish()
        judge.end()
