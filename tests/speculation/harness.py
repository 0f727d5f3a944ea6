"""Decoding with drafts against plain decoding, byte for byte (spec_decoding.md section 10).

Idea: `record` decodes a sequence plainly, one row a forward and nothing but `model.forward`, and keeps the logits of
every row and a digest of every byte of state behind it, the head's too, fed pair by pair. One recording judges any
number of runs: `compare` feeds the same tokens to a `Decoder` and looks at the logits of every token and at the state
after every verify; `fuzz` does so with drafts of random length and truth, turns that end anywhere, prompts read in
between and places returned to. What is compared is counted (`Compared`), so that a test can demand an amount.

A digest that differs is turned into the names of the parts that differ, by decoding plainly once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coli.engine import Engine
from coli.settings import MOST_DRAFTS
from coli.speculation.decoder import Decoder, Place
from coli.speculation.options import Speculation
from coli.speculation.proposal import Proposal
from coli.speculation.report import SpeculationReport
from coli.state import State


def random_tokens(rng: np.random.Generator, vocab: int, count: int) -> list[int]:
    """Random tokens with stretches copied from earlier, which a lookup finds, and the end-of-text token in between."""
    ids: list[int] = rng.integers(0, vocab, min(12, count)).tolist()
    while len(ids) < count:
        if rng.random() < 0.5:
            start, size = int(rng.integers(0, len(ids) - 4)), int(rng.integers(3, 14))
            ids += ids[start : start + size]
        else:
            ids += rng.integers(0, vocab, int(rng.integers(1, 6))).tolist()
        if rng.random() < 0.1:
            ids.append(256)
    return ids[:count]


# ---- the plain side ----------------------------------------------------------------------------------------------


def digest(content: dict[str, bytes]) -> bytes:
    whole = hashlib.blake2b(digest_size=16)
    for name, part in content.items():
        whole.update(name.encode())
        whole.update(part)
    return whole.digest()


def head_content(head: Any) -> dict[str, bytes]:
    """Every byte of a head's state that later rows can depend on."""
    return head.kv.content() | {"pending": head.pending[: head.waiting].tobytes()}


@dataclass
class Recording:
    """Plain decoding of `ids`, of which the first `prompt` are its prompt. Index i of the lists is the place behind
    `prompt + i` tokens."""

    engine: Engine
    ids: list[int]
    prompt: int
    logits: list[np.ndarray] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt :]

    def differing(self, length: int, state: State, head: Any) -> list[str]:
        """Names of the parts of `state` and `head` that are not those of plain decoding of `length` tokens."""
        plain, plain_head, _ = _decode(self.engine, self.ids[:length], None)
        parts = [("", state.content(), plain.content())]
        if head is not None:
            parts.append(("head ", head_content(head), head_content(plain_head)))
        return [kind + name for kind, found, right in parts for name in right if found[name] != right[name]]


def _decode(engine: Engine, ids: Sequence[int], each: Callable[[State, Any, np.ndarray], None] | None) -> Any:
    """One token a forward; the head takes every pair as soon as it is there. (state, head's state, last logits)."""
    state, head = engine.model.new_state(), engine.head
    pairs, logits = None if head is None else head.new_state(), None
    for token in ids:
        answer = engine.model.forward([token], state)
        logits = answer.logits[0].copy()
        if head is not None:
            head.note(pairs, state, answer.streams)
            head.absorb(pairs, state)
        if each is not None:
            each(state, pairs, logits)
    return state, pairs, logits


def record(engine: Engine, prompt: Sequence[int], tokens: Sequence[int] | int) -> Recording:
    """Decode `tokens` plainly behind `prompt`; a number of tokens: those that greedy decoding picks."""
    if isinstance(tokens, int):
        tokens = greedy(engine, prompt, tokens)
    found = Recording(engine, [*prompt, *tokens], len(prompt))

    def each(state: State, head: Any, logits: np.ndarray) -> None:
        if state.length >= found.prompt:
            found.logits.append(logits)
            found.states.append(digest(state.content()))
            if head is not None:
                found.heads.append(digest(head_content(head)))

    _decode(engine, found.ids, each)
    return found


def greedy(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    state, picked = engine.model.new_state(), []
    logits = [engine.model.forward(prompt[at : at + engine.limit], state) for at in range(0, len(prompt), engine.limit)]
    answer = logits[-1].logits[-1]
    for _ in range(count):
        picked.append(int(np.argmax(answer)))
        if len(picked) < count:
            answer = engine.model.forward(picked[-1:], state).logits[-1]
    return picked


# ---- the side with drafts ----------------------------------------------------------------------------------------


class Compared:
    """What has been compared so far."""

    tokens = verifies = 0


class Judge:
    """Compares a decoder, token by token and verify by verify, with a recording."""

    def __init__(self, recording: Recording, replay: str, *, absorb: bool) -> None:
        self.recording, self.replay, self._absorb = recording, replay, absorb
        self.trace: list[dict[str, Any]] = []
        self.decoder: Decoder

    def settled(self, entry: dict[str, Any]) -> None:
        """The decoder's trace: a verify has just settled. Absorbing here would hide that pairs may wait, so a run
        either always does it or never."""
        self.trace.append(entry)
        Compared.verifies += 1
        self.state(head=self._absorb)

    def logits(self, at: int, logits: np.ndarray) -> None:
        """Those behind the first `at` tokens behind the prompt."""
        Compared.tokens += 1
        right = self.recording.logits[at]
        if logits.tobytes() != right.tobytes():
            apart = float(np.abs(logits - right).max())
            raise AssertionError(f"{self.replay}: logits behind token {at} differ by up to {apart}")

    def state(self, head: bool) -> None:
        decoder, right = self.decoder, self.recording
        at = decoder.state.length - right.prompt
        same = digest(decoder.state.content()) == right.states[at]
        source = decoder.mtp if head else None
        if source is not None:
            assert source.warning is None, f"{self.replay}: {source.warning}"
            source.absorb(decoder.state)
            same = same and digest(head_content(source.state)) == right.heads[at]
        if not same:
            pairs = None if source is None else source.state
            names = right.differing(decoder.state.length, decoder.state, pairs)
            raise AssertionError(f"{self.replay}: state behind token {at} differs in {names}")

    def end(self) -> None:
        """After `finish`: state, head, n-gram history and the report's identities."""
        decoder = self.decoder
        self.state(head=True)
        if decoder.lookup is not None:
            fed = self.recording.ids[: decoder.state.length]
            assert decoder.lookup.length == len(fed), f"{self.replay}: the lookup has read another text"
            assert decoder.lookup.propose(5) == type(decoder.lookup)(fed).propose(5), self.replay
        report = decoder.report()
        assert report is None or report.identities() == [], f"{self.replay}: {report.identities()}"


def start(recording: Recording, options: Speculation, replay: str, *, make: Callable[..., Decoder] = Decoder,
          absorb: bool = False) -> tuple[Decoder, Judge]:  # fmt: skip
    """A decoder that a judge watches. FORCE modes draft from the recording."""
    engine, judge = recording.engine, Judge(recording, replay, absorb=absorb)
    judge.decoder = make(
        engine.model, engine.model.new_state(), options, engine=engine.name, vocab=engine.geometry.vocab,
        head=engine.head, vocabulary=engine.vocabulary, reference=recording.ids, trace=judge.settled,
    )  # fmt: skip
    return judge.decoder, judge


def read(decoder: Decoder, ids: Sequence[int], size: int) -> np.ndarray:
    """Prefill in pieces of `size`."""
    logits = [decoder.prefill(np.asarray(ids[at : at + size])) for at in range(0, len(ids), size)]
    return logits[-1]


def compare(recording: Recording, options: Speculation, replay: str = "", *, make: Callable[..., Decoder] = Decoder,
            count: int | None = None, absorb: bool = False,
            prepare: Callable[[Decoder], None] | None = None) -> SpeculationReport:  # fmt: skip
    """Decode the recording with drafts: one turn that feeds the first `count` tokens (all without one)."""
    replay = replay or f"{options}"
    decoder, judge = start(recording, options, replay, make=make, absorb=absorb)
    if prepare is not None:
        prepare(decoder)
    decoder.begin(recording.ids[: recording.prompt])
    judge.logits(0, read(decoder, recording.ids[: recording.prompt], recording.engine.limit))
    for at, token in enumerate(recording.tokens[:count], 1):
        judge.logits(at, decoder.feed(token))
    decoder.finish()
    judge.end()
    assert sum(entry["accepted"] for entry in judge.trace) + len(judge.trace) == len(recording.tokens[:count]), replay
    report = decoder.report()
    assert report is not None
    return report


# ---- random drafts, random turns ---------------------------------------------------------------------------------


class Fuzzed(Decoder):
    """Proposals of random source, length and truth instead of the sources' own; the head runs as always."""

    rng: np.random.Generator

    def _propose(self, token: int) -> Proposal:
        room = self.state.ctx - self.state.length - 1
        most = self.options.most
        kind, k = self.rng.integers(0, 5), min(room, int(self.rng.integers(1, max(5, most) + 1)))
        if k < 1 or kind == 0:
            return Proposal()
        if kind < 3 and self.mtp is not None:
            return self._draft(token, min(k, most))
        drafts = self._forced("lookup", None, k)
        if not drafts or self.lookup is None:
            return Proposal()
        self._tallies["lookup"].wrote(len(drafts))
        return Proposal("lookup", drafts, written=len(drafts))

    def _forced(self, source: str, mode: str | None, most: int) -> list[int]:
        assert self._reference is not None
        right = list(self._reference[self.state.length + 1 : self.state.length + 1 + most])
        wrong = self.rng.integers(0, self._vocab, len(right)).tolist()
        stands = self.rng.random() ** 0.3  # mostly near 1: long runs of right drafts
        return [r if self.rng.random() < stands else w for r, w in zip(right, wrong, strict=True)]


def fuzz(recording: Recording, seed: int, replay: str) -> int:
    """One random walk over the recording to its end; returns the tokens compared."""
    rng, before = np.random.default_rng(seed), Compared.tokens
    most = MOST_DRAFTS[recording.engine.name]
    options = Speculation(gate=False, drafts=int(rng.integers(1, most + 1)), most=most)
    replay = f"{replay}, fuzz seed {seed}"
    decoder, judge = start(recording, options, replay, make=Fuzzed, absorb=bool(rng.random() < 0.5))
    assert isinstance(decoder, Fuzzed)
    decoder.rng = rng
    if rng.random() < 0.3:  # nothing of an earlier sequence may be left
        decoder._trace = None
        read(decoder, rng.permutation(recording.ids[:30]).tolist(), recording.engine.limit)
        for token in recording.ids[30:40]:
            decoder.feed(token)
        decoder.reset()
        decoder._trace = judge.settled
    decoder.begin(recording.ids[: recording.prompt])
    limit, at = recording.engine.limit, 0
    judge.logits(0, read(decoder, recording.ids[: recording.prompt], int(rng.integers(1, limit + 1))))
    places: list[tuple[int, Place]] = []
    returns = 3
    while at < len(recording.tokens):
        for token in recording.tokens[at : at + int(rng.integers(1, 40))]:
            at += 1
            judge.logits(at, decoder.feed(token))
        decoder.finish()
        judge.end()
        if rng.random() < 0.5:
            places.append((at, decoder.copy()))
        if returns and places and rng.random() < 0.5:
            at, place = places[int(rng.integers(len(places)))]
            places = [(end, place) for end, place in places if end <= at]  # later ones lose K/V rows to drafts
            decoder.load(place)
            returns -= 1
        decoder.begin(recording.ids[: recording.prompt + at])
        if rng.random() < 0.3 and (more := recording.tokens[at : at + int(rng.integers(1, 12))]):
            at += len(more)
            judge.logits(at, read(decoder, more, int(rng.integers(1, limit + 1))))
    decoder.finish()
    judge.end()
    return Compared.tokens - before


# ---- what FORCE modes must count ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    tokens: int
    forwards: int
    verifies: int
    drafts: int
    accepted: int
    judged: int


def forced_counts(mode: str, depth: int, fed: int) -> Counts:
    """What a turn that feeds all `fed` tokens behind the prompt must count, drafts being cut where they end. Worked
    out on its own, from the meaning of the modes."""
    at = forwards = verifies = drafts = accepted = judged = 0
    while at < fed:
        k = min(depth, fed - at - 1)
        right = {"accept": k, "reject": 0, "mixed": k * (verifies % 2 == 0), "cycle": verifies % max(1, k)}
        stands = right[mode] if mode in right else min(k, int(mode.removeprefix("row")) - 1)
        forwards += 1
        verifies += k > 0
        drafts += k
        accepted += stands
        judged += stands + (stands < k)
        at += 1 + stands
    return Counts(fed, forwards, verifies, drafts, accepted, judged)


def counts(report: SpeculationReport, source: str) -> Counts:
    found = getattr(report, source)
    return Counts(report.tokens, report.forwards, found.verifies, found.drafts, found.accepted, found.judged)
