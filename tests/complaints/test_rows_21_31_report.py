"""Rows 21 to 31: speed, and an honest report. The gate's own rows (25, 26, 29) are in test_gate_rows.py."""

from __future__ import annotations

import os

import numpy as np
import pytest

from coli.engine import Engine
from coli.models.base import Rows
from coli.sampling import Sampler, Sampling
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation
from coli.state import State, StateSpec
from tests.speculation import harness
from tests.speculation.engines import open_tiny
from tests.speculation.harness import Fuzzed, compare, counts, forced_counts, record
from tests.tiny import tiny_config, write_tiny

# ---- 21 to 23: what is counted ----------------------------------------------------------------------------------


def test_row_21_written_carried_judged_and_accepted_are_four_numbers(engines):
    """A source writes 5 drafts, 2 are carried, some are judged: acceptance is of the carried ones, the rest apart."""

    def trims(decoder: Decoder) -> None:
        decoder.gate.pick = lambda source, proposed: (min(2, proposed), 2.0)

    recording = engines.recording("f32", 1)
    report = compare(recording, Speculation(mtp=False, lookup_force="cycle"), prepare=trims)
    found, shown = report.lookup, report.to_json()["lookup"]
    assert found.written > found.drafts > found.judged > found.accepted > 0
    assert shown["trimmed"] == found.written - found.drafts > 0
    assert f"({found.accepted}/{found.drafts} drafts in {found.verifies} verifies)" in report.lines()[0]
    assert report.identities() == []
    carried = [number for number, _ in found.by_position]
    assert len(carried) == 2 and sum(carried) == found.drafts
    assert 0 < found.judged - found.accepted < found.verifies  # one rejection a verify, and not in all


@pytest.mark.parametrize("tokens", range(1, 14))
def test_row_22_what_a_short_last_verify_carried_is_what_counts(engines, tokens):
    recording = engines.recording("f32", 1)
    short = harness.Recording(recording.engine, recording.ids[: recording.prompt + tokens], recording.prompt,
                              recording.logits, recording.states, recording.heads)  # fmt: skip
    report = compare(short, Speculation(drafts=3, lookup=False, gate=False, mtp_force="accept"))
    assert counts(report, "mtp") == forced_counts("accept", 3, tokens)
    assert report.mtp.drafts == tokens - report.forwards  # not 3 a verify


class Echo:
    """A model of arithmetic alone: the next token is a function of the last two."""

    limit = 16
    row_bytes = np.zeros(8, np.int64)
    spec = StateSpec(0, 1, 1, 1, 4, 0, 0, ())

    def forward(self, tokens, state, want="last", undoable=False):
        before = int(state.tokens[state.length - 1]) if state.length else 0
        ids = np.asarray(tokens)
        state.append(ids, undoable=undoable)
        logits = np.zeros((len(ids), 16), np.float32)
        for row, token in enumerate(ids.tolist()):
            logits[row, (3 * token + before) % 13] = 1
            before = token
        return Rows(logits if want == "all" else logits[-1:], np.zeros((len(ids), 4), np.float32))


def test_row_23_emitted_is_forwards_plus_accepted_in_a_thousand_random_traces():
    for seed in range(1000):
        rng, trace = np.random.default_rng(seed), []
        state = State(Echo.spec, 64)
        picks = rng.integers(0, 13, int(rng.integers(0, 40))).tolist()
        options = Speculation(mtp=False, gate=bool(seed % 2))
        kind = Fuzzed if seed % 4 else Decoder
        decoder = kind(Echo(), state, options, vocab=13, reference=[1, 2, *picks], trace=trace.append)
        decoder.rng = rng
        logits = decoder.prefill([1, 2])
        for token in picks if seed % 3 else range(len(picks)):
            logits = decoder.feed(token if seed % 3 else int(np.argmax(logits)))
        decoder.finish()
        report = decoder.report()
        assert report.identities() == [], seed
        assert report.tokens == len(picks) == len(trace) + sum(entry["accepted"] for entry in trace)
        assert report.forwards == len(trace) and report.lookup.accepted == report.tokens - report.forwards
        assert report.lookup.drafts == sum(entry["k"] for entry in trace)
        assert report.lookup.verifies == sum(entry["k"] > 0 for entry in trace)
        assert state.length == 2 + len(picks)


# ---- 27: a slow disk ---------------------------------------------------------------------------------------------


class Clock:
    """Simulated time in place of `time`: what runs costs what the test says, not what the machine is busy with."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now


class Half(Decoder):
    """The head's first draft is right in every other verify."""

    verifies = 0

    def _forced(self, source, mode, most):
        self.verifies += 1
        right = self._reference[self.state.length + 1 : self.state.length + 1 + most]
        return [(token + self.verifies % 2) % 256 for token in right]


def test_row_27_the_gate_counts_reads_and_follows_a_cache_that_warms_up(tmp_path, monkeypatch):
    """Experts come from a slow disk: two rows ask for more of them than one, and drafts that stand half of the time do
    not pay. When nothing waits for the disk any more, they do; then it is slow again."""
    config = tiny_config(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=8, max_position_embeddings=1024)
    with open_tiny(tmp_path, dict(config=config, dtype="BF16", seed=50), dict(ctx=900, cap=8)) as engine:
        clock, ensure, forward = Clock(), engine.store.ensure, engine.model.forward
        read = 0.4e-3  # seconds an expert

        def reading(layer: int, experts: list[int], *_: object, **__: object) -> None:
            clock.now += read * sum(not engine.store.table[layer][expert] for expert in experts)
            ensure(layer, experts)

        def running(tokens, *args, **kwargs):
            clock.now += 1e-3 + 0.1e-3 * (len(tokens) - 1)
            return forward(tokens, *args, **kwargs)

        monkeypatch.setattr("coli.speculation.decoder.time", clock)
        monkeypatch.setattr("coli.speculation.mtp.time", clock)
        monkeypatch.setattr(engine.store, "ensure", reading)
        monkeypatch.setattr(engine.model, "forward", running)
        ids, trace = np.random.default_rng(5).integers(0, 256, 900).tolist(), []
        decoder = Half(engine.model, engine.model.new_state(), Speculation(drafts=0, lookup=False), vocab=272,
                       head=engine.head, reference=ids, trace=trace.append)  # fmt: skip
        harness.read(decoder, ids[:20], 16)

        def share(start: int, end: int) -> float:
            """Of the forwards that fed these tokens, how many were verifies."""
            first = len(trace)
            for token in ids[start:end]:
                decoder.feed(token)
            return sum(entry["k"] > 0 for entry in trace[first:]) / len(trace[first:])

        share(20, 100)
        assert share(100, 300) < 0.2
        read = 0.0
        share(300, 380)
        assert share(380, 580) > 0.8
        read = 0.4e-3
        share(580, 660)
        assert share(660, 860) < 0.2
        decoder.finish()
        report = decoder.report()
        assert report.expert_bytes > 0 and report.rejected_bytes > 0 and report.identities() == []
        assert report.to_json()["bytes_per_token"] == report.expert_bytes / report.tokens


def test_row_27_bytes_read_for_experts_are_all_counted(tmp_path, monkeypatch):
    """Every byte of a decode forward's experts is in the trace and in the report, by row, rejected rows apart."""
    with open_tiny(tmp_path, dict(dtype="BF16", seed=51), dict(cap=1)) as engine:
        ids = harness.random_tokens(np.random.default_rng(5), 256, 60)
        recording = record(engine, ids[:20], ids[20:])
        read, real = [0], os.preadv

        def counted(fd, buffers, offset, *flags):
            done = real(fd, buffers, offset, *flags)
            read[0] += done
            return done

        options = Speculation(mtp=False, gate=False, lookup_force="cycle")
        decoder, judge = harness.start(recording, options, "bytes")
        harness.read(decoder, ids[:20], 16)
        store = engine.store.bytes_read
        monkeypatch.setattr(os, "preadv", counted)
        for at, token in enumerate(ids[20:], 1):
            judge.logits(at, decoder.feed(token))
        decoder.finish()
        report = decoder.report()
        assert report.expert_bytes == engine.store.bytes_read - store == sum(e["bytes"] for e in judge.trace)
        assert 0 < report.rejected_bytes < report.expert_bytes <= read[0]
        assert report.rejected_bytes == sum(entry["rejected_bytes"] for entry in judge.trace)
        assert report.rejected_rows == report.lookup.drafts - report.lookup.accepted


# ---- 28: what is said is what runs -------------------------------------------------------------------------------


def answered(engine, options=None, tokens=24):
    trace = []
    session = Session(engine, options, trace=trace.append)
    "".join(session.generate(Request(tuple(range(40, 60)), tokens, stop_ids=frozenset({-1}))))
    return session.report.speculation, trace


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_row_28_the_depth_reported_is_the_depth_that_ran(tmp_path, drafts):
    with open_tiny(tmp_path, dict(dtype="BF16", seed=52), dict(drafts=str(drafts), lookup=False, gate=False)) as engine:
        report, trace = answered(engine)
        assert engine.head is not None and "draft head: wiring b" in engine.banner()
        assert report.fixed_depth == drafts == max(entry["k"] for entry in trace)
        assert report.lookup is None and report.to_json()["mtp"]["depth"] == drafts and not report.gate_on
        assert not any("lookup" in line for line in report.lines())


WITHOUT = {
    "no head in the checkpoint": (dict(mtp=False), {}),
    "left out": ({}, dict(mtp=False)),
}


@pytest.mark.parametrize(("form", "flags"), WITHOUT.values(), ids=WITHOUT.keys())
def test_row_28_no_head_is_said_and_not_reported(tmp_path, form, flags):
    with open_tiny(tmp_path, dict(dtype="BF16", seed=52) | form, flags) as engine:
        report, trace = answered(engine)
        assert engine.head is None and "no draft head" in engine.banner()
        assert report.mtp is None and report.to_json()["mtp"] is None
        assert not any("MTP" in line for line in report.lines()) and all(e["source"] != "mtp" for e in trace)


def test_row_28_a_head_that_does_not_fit_is_said(tmp_path):
    """The model fits alone: it runs without the head and says why; asked for by name it is refused."""
    from coli.errors import DoesNotFit

    folder = write_tiny(tmp_path, seed=52, dtype="BF16")

    def opened(ram: int, **flags) -> Engine:
        fixed = {"model": str(folder), "threads": 1, "ctx": 64, "ram": ram / 1e9, "cap": 1}
        return Engine.open(load(fixed | flags, {})[0])

    low, high = 1, 1 << 30  # the least budget that holds the model without its head
    while high - low > 1000:
        middle = (low + high) // 2
        try:
            opened(middle, mtp=False).close()
            high = middle
        except DoesNotFit:
            low = middle
    with opened(high) as engine:
        assert engine.head is None and "budget holds the model only without it" in engine.banner()
        assert answered(engine)[0].mtp is None
    with pytest.raises(DoesNotFit):
        opened(high, mtp=True)


def test_row_28_what_is_off_is_off(engines):
    engine = engines["f32"]
    assert answered(engine, Speculation.off())[0] is None
    report, _ = answered(engine, Speculation(mtp=False))
    assert report.mtp is None and report.lookup is not None
    report, trace = answered(engine, Speculation(drafts=0, lookup=False))
    assert report.fixed_depth == 0 and "depth by the gate" in report.lines()[0]
    assert report.mtp.drafts == sum(entry["k"] for entry in trace)


# ---- 30: a head that is noise ------------------------------------------------------------------------------------


def test_row_30_a_head_quantised_to_noise_is_named_and_changes_nothing(tmp_path):
    """One bit a weight: drafts are never right. The report says so in words; ids, logits and state stay."""

    def crushed(weights: dict[str, np.ndarray]) -> None:
        for name, values in weights.items():
            if name.startswith("mtp.") and values.ndim > 1:
                weights[name] = (np.sign(values) * 0.05).astype(np.float32)

    with open_tiny(tmp_path, dict(dtype="BF16", seed=53, change=crushed), {}) as engine:
        ids = harness.random_tokens(np.random.default_rng(5), 256, 20)
        recording = record(engine, ids, 100)
        report = compare(recording, Speculation(lookup=False, gate=False))
        assert report.mtp.accepted <= 2 and "almost never accepted" in report.warnings[0]
        assert report.warnings[0] in report.lines() and report.warnings[0] in report.to_json()["warnings"]
        short = compare(recording, Speculation(lookup=False, gate=False), count=8)
        assert not short.warnings, "too little was seen to say so"


# ---- 31: the row that produced the pick --------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=2)], ids=["greedy", "sampled"])
def test_row_31_every_pick_sees_plain_decodings_logits(engines, monkeypatch, sampling):
    """What logprobs are made of: the logits each pick was drawn from, byte for byte."""
    engine, seen = engines["fp8"], []

    class Watching(Sampler):
        def pick(self, logits: np.ndarray, allowed: np.ndarray | None = None) -> int:
            token = super().pick(logits, allowed)
            seen.append((token, logits.tobytes()))
            return token

    monkeypatch.setattr("coli.session.Sampler", Watching)
    request = Request(tuple(range(30, 50)), 60, sampling, stop_ids=frozenset({-1}))
    runs = []
    plain = Session(engine, Speculation.off())
    "".join(plain.generate(request))
    reference = [*request.prompt_ids, *plain.report.token_ids]
    runs.append(list(seen))
    for options in (Speculation(mtp=False, gate=False, lookup_force="accept"),
                    Speculation(drafts=3, gate=False, lookup=False, mtp_force="cycle"), Speculation()):  # fmt: skip
        seen.clear()
        "".join(Session(engine, options, reference=reference).generate(request))
        runs.append(list(seen))
    assert len(runs[0]) == 60 and all(run == runs[0] for run in runs)
