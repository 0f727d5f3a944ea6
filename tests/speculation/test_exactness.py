"""Decoding with drafts is plain decoding: ids, logits, every byte of state after every verify, and exact counters.

The bulk is `test_random_walks`: 100,000 tokens over every kind of tiny engine; `make soak` walks ten times as far."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.settings import load
from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation
from tests.speculation import harness
from tests.speculation.engines import ENGINES, QUOTAS
from tests.speculation.harness import Compared, Counts, compare, counts, forced_counts, fuzz, record
from tests.tiny import write_tiny

MODES = ("accept", "reject", "mixed", "cycle", "row1", "row2", "row3")


def test_a_hundred_thousand_tokens_are_asked_for() -> None:
    assert sum(QUOTAS.values()) >= 100_000 and min(QUOTAS.values()) >= 3_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_random_walks(engines, name):
    before = Compared.tokens
    assert engines.walk(name, QUOTAS[name]) == Compared.tokens - before >= QUOTAS[name]


# ---- forced drafts, exact counters -------------------------------------------------------------------------------


def test_the_counts_of_the_modes_by_hand():
    """99 tokens at two drafts: 33 verifies when all stand, one token each when none does."""
    assert forced_counts("accept", 2, 99) == Counts(99, 33, 33, 66, 66, 66)
    assert forced_counts("reject", 2, 99) == Counts(99, 99, 98, 195, 0, 98)
    assert forced_counts("row2", 3, 8) == Counts(8, 4, 4, 10, 4, 7)  # 3 3 3 1 drafts, the last stands
    assert forced_counts("mixed", 1, 7) == Counts(7, 5, 4, 4, 2, 4)  # stands, does not, stands, does not, none


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_drafts_of_the_head(engines, name, depth):
    recording = engines.recording(name, 1)
    modes = ("cycle",) if QUOTAS[name] < 10_000 else MODES
    for mode in modes:
        options = Speculation(drafts=depth, lookup=False, gate=False, mtp_force=mode)
        report = compare(recording, options, f"{name}, {mode}, {depth}", absorb=mode == "mixed")
        assert counts(report, "mtp") == forced_counts(mode, depth, len(recording.tokens)), mode
        assert report.mtp_force == mode and report.mtp.written == report.mtp.drafts and not report.ended_mid_verify


@pytest.mark.parametrize("name", ["f32", "odd, log", "fp8"])
@pytest.mark.parametrize("depth", [2, 5])
@pytest.mark.parametrize("mode", [*MODES, "row4", "row5"])
def test_forced_drafts_of_the_lookup(engines, name, depth, mode):
    recording = engines.recording(name, 1)
    options = Speculation(mtp=False, lookup_drafts=depth, gate=False, lookup_force=mode)
    report = compare(recording, options)
    assert counts(report, "lookup") == forced_counts(mode, depth, len(recording.tokens))
    assert report.mtp is None


def test_by_position_a_draft_counts_where_its_verify_carried_it(engines):
    recording = engines.recording("f32", 1)
    report = compare(recording, Speculation(drafts=3, lookup=False, gate=False, mtp_force="row2"))
    verifies, n = report.mtp.verifies, len(recording.tokens)
    assert verifies == n // 2  # every verify settles the pick and one draft
    assert [hits for _, hits in report.mtp.by_position] == [verifies, 0, 0]
    assert [judged for judged, _ in report.mtp.judged_by_position][:2] == [verifies, report.mtp.by_position[1][0]]


# ---- the gate, both sources, per-step depth ----------------------------------------------------------------------

NATURAL = {
    "gate's depth": Speculation(drafts=0, lookup=False),
    "gate's depth, right drafts": Speculation(drafts=0, lookup=False, mtp_force="accept"),
    "no gate, depth left open": Speculation(drafts=0, lookup=False, gate=False),
    "lookup": Speculation(mtp=False),
    "lookup, no gate, 2": Speculation(mtp=False, gate=False, lookup_drafts=2),
    "both": Speculation(),
    "both by the gate": Speculation(drafts=0),
    "both, no gate": Speculation(drafts=3, gate=False),
    "both forced": Speculation(drafts=2, gate=False, mtp_force="cycle", lookup_force="mixed"),
    "per step": Speculation(drafts=3, pstep=True, lookup=False),
    "per step, right drafts": Speculation(drafts=3, pstep=True, lookup=False, mtp_force="accept"),
    "per step with lookup": Speculation(drafts=2, pstep=True),
}


@pytest.mark.parametrize("what", NATURAL)
@pytest.mark.parametrize("name", ["f32", "fp8", "int8 trunk, log", "odd, log"])
def test_every_way_to_choose_drafts(engines, name, what):
    compare(engines.recording(name, 1), NATURAL[what], f"{name}, {what}")
    compare(engines.repeating(name), NATURAL[what], f"{name}, repeating, {what}", absorb=True)


def test_the_gate_takes_right_drafts_and_leaves_wrong_ones(engines):
    """What it does is in the counters, and its line says that it decided. A row more costs a tenth here, so that the
    machine's moods do not."""
    recording = engines.recording("f32", 1)

    def timed(decoder: Decoder) -> None:
        gate, forward = decoder.gate, decoder.gate.forward
        gate.forward = lambda rows, seconds: forward(rows, 1e-3 * (0.9 + 0.1 * rows))
        gate.first_cost = gate.draft_cost = lambda source, seconds: None

    right = compare(recording, NATURAL["gate's depth, right drafts"], prepare=timed)
    assert right.mtp.accepted == right.mtp.judged > 0 and right.gate.decided and right.fixed_depth == 0
    assert right.forwards < right.tokens / 2.5
    wrong = compare(recording, Speculation(drafts=0, lookup=False, mtp_force="reject"), prepare=timed)
    assert wrong.mtp.accepted == 0 and wrong.mtp.verifies < wrong.forwards / 3 and wrong.mtp.declined > 50


def test_a_text_that_repeats_is_copied(engines):
    """Once the period is known every draft stands, and each verify carries as many as the context has room for."""
    recording, entries = engines.repeating("f32"), []

    def watch(decoder: Decoder) -> None:
        judge = decoder._trace
        decoder._trace = lambda entry: (judge(entry), entries.append(entry))

    report = compare(recording, Speculation(mtp=False, gate=False), prepare=watch)
    assert report.lookup.accepted == report.lookup.judged == report.lookup.drafts > 80
    assert report.forwards == len(entries) == -(-108 // 6)
    for entry in entries:
        room = recording.engine.ctx - entry["position"] - 1
        assert entry["k"] == min(5, room), entry


@pytest.mark.parametrize("left", range(7))
def test_the_context_ends_inside_a_verify(engines, left):
    """Drafts stop where the context does, whatever the phase, with every source asked for more."""
    engine = engines["f32"]
    ids = ([40, 41] * engine.ctx)[: engine.ctx]
    recording = record(engine, ids[: 100 + left], ids[100 + left :])
    for options in (Speculation(mtp=False, gate=False), Speculation(drafts=3, lookup=False, gate=False)):
        report = compare(recording, options)
        assert report.tokens == 28 - left and not report.ended_mid_verify


def test_no_draft_is_written_for_what_the_answer_may_not_have(engines):
    """A turn of at most n tokens feeds n - 1 of them and has the logits it needs without a row to spare."""
    recording = engines.recording("f32", 1)
    for most in (1, 2, 3, 4, 9, 10):
        options = Speculation(drafts=3, lookup=False, gate=False, mtp_force="accept")
        decoder, judge = harness.start(recording, options, f"at most {most}")
        decoder.begin(recording.ids[: recording.prompt], most=most)
        judge.logits(0, harness.read(decoder, recording.ids[: recording.prompt], 32))
        for at, token in enumerate(recording.tokens[: most - 1], 1):
            judge.logits(at, decoder.feed(token))
        decoder.finish()
        judge.end()
        report = decoder.report()
        assert not report.ended_mid_verify and report.forwards == -(-(most - 1) // 4)
        assert report.mtp.drafts == report.mtp.accepted == most - 1 - report.forwards


# ---- what must make no difference --------------------------------------------------------------------------------

FLAGS = {
    "undo by log": dict(undo="log"), "undo by slots": dict(undo="slots"), "one expert": dict(cap=1),
    "three experts": dict(cap=3, mtp_cap=2),
    "one thread": dict(threads=1), "three threads": dict(threads=3), "prefill in threes": dict(prefill_chunk=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def same_model(tmp_path_factory):
    """The folder of a checkpoint, and its recording as opened without flags."""
    folder = write_tiny(tmp_path_factory.mktemp("same"), seed=30, dtype="BF16")
    with Engine.open(load({"model": str(folder), "threads": 2, "ctx": 64}, {})[0]) as engine:
        ids = harness.random_tokens(np.random.default_rng(30), engine.geometry.vocab, 64)
        yield folder, record(engine, ids[:9], ids[9:])


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_bytes_do_not_depend_on_how_the_engine_was_opened(same_model, flags):
    """A recording made by one engine judges another: state, head and logits are the same bytes."""
    folder, recording = same_model
    with Engine.open(load({"model": str(folder), "threads": 2, "ctx": 64} | flags, {})[0]) as engine:
        other = harness.Recording(engine, recording.ids, recording.prompt, recording.logits, recording.states,
                                  recording.heads)  # fmt: skip
        for options in (Speculation(drafts=3, gate=False, lookup=False, mtp_force="cycle"), Speculation(drafts=0)):
            compare(other, options)
        fuzz(other, 5, str(flags))


def test_two_sequences_take_turns_on_one_engine(engines):
    """The rows a verify keeps for later survive the forwards of another sequence."""
    first, second = engines.recording("f32", 1), engines.recording("f32", 2, prompt=30)
    options = Speculation(drafts=3, lookup=False, gate=False, mtp_force="cycle")
    running = [(recording, *harness.start(recording, options, "taking turns")) for recording in (first, second)]
    for recording, decoder, judge in running:
        decoder.begin(recording.ids[: recording.prompt])
        judge.logits(0, harness.read(decoder, recording.ids[: recording.prompt], 16))
    for at in range(1, 90):
        for recording, decoder, judge in running:
            judge.logits(at, decoder.feed(recording.tokens[at - 1]))
    for _, decoder, judge in running:
        decoder.finish()
        judge.end()


def test_inside_a_turn_there_is_no_place_and_nothing_to_read(engines):
    """An open verify's drafts are in the state: whoever took or extended it now would keep them."""
    recording = engines.recording("f32", 1)
    decoder, judge = harness.start(recording, Speculation(drafts=2, lookup=False, gate=False), "")
    harness.read(decoder, recording.ids[: recording.prompt], 16)
    decoder.feed(recording.tokens[0])
    for refused in (decoder.copy, lambda: decoder.prefill(recording.tokens[1:3])):
        with pytest.raises(ValueError, match="finish"):
            refused()
    decoder.finish()
    assert decoder.copy().trunk.length == recording.prompt + 1
    judge.logits(3, decoder.prefill(recording.tokens[1:3]))
    judge.end()


def test_the_harness_notices(engines):
    """One wrong byte anywhere is found and named: a comparison that cannot fail would prove nothing."""
    recording = engines.recording("f32", 1)
    options = Speculation(drafts=2, lookup=False, gate=False, mtp_force="cycle")

    def spoil(where):
        def prepare(decoder: Decoder) -> None:
            keep = decoder.state.keep

            def kept(rows: int) -> None:
                keep(rows)
                where(decoder)

            decoder.state.keep = kept

        return prepare

    def bump(array: np.ndarray, index: tuple[int, ...]) -> None:
        bits = array.view(np.uint8).reshape(*array.shape, 4)[index]
        bits[0] ^= 1

    spoiled = {
        r"differs in \['recurrent'\]": lambda d: bump(d.state.recurrent.live, (5,)),
        r"differs in \['v'\]": lambda d: bump(d.state.v, (0, 0, 3, 1)),
        r"differs in \['head k'\]": lambda d: bump(d.mtp.state.kv.k, (0, 0, 3, 1)),
        r"differs in \['tokens'\]": lambda d: d.state.tokens.__setitem__(3, 1),
    }
    for words, where in spoiled.items():
        with pytest.raises(AssertionError, match=words):
            compare(recording, options, prepare=spoil(where), absorb=True)

    def flip(decoder: Decoder) -> None:
        feed = decoder.feed

        def fed(token: int) -> np.ndarray:
            logits = feed(token).copy()
            bump(logits, (9,))
            return logits

        decoder.feed = fed

    with pytest.raises(AssertionError, match="logits behind token 1 differ"):
        compare(recording, options, prepare=flip)
