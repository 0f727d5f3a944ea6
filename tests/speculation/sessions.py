"""Sessions of many turns on one state, and what each of their turns must be.

A `Turn` is a request with a history: repeat, continue, edit, go back to a pin, sample, ask for logprobs, stop, cancel.
`play` has it answered by a session with checkpoints and drafts, by one with checkpoints alone, and by a fresh one; all
steps (text, tokens, logprobs), the logits behind, the state and the head's state must be the same bytes.
`Ledger` is the rule of coli/prefix.py in tokens alone, written without looking at states: what a session may hold, and
so how much of a prompt it must not read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coli.engine import Engine
from coli.sampling import Sampling
from coli.session import Request, Session, Step
from coli.speculation.options import Speculation
from tests.speculation.harness import head_content

ROOM = 40  # checkpoints: none is ever evicted


@dataclass
class Ledger:
    """Token sequences whose checkpoint a session holds."""

    places: set[tuple[int, ...]] = field(default_factory=set)

    def cached(self, prompt: tuple[int, ...]) -> int:
        return max((len(p) for p in self.places if prompt[: len(p)] == p), default=0)

    def turn(self, request: Request, picked: tuple[int, ...], delivered: int, reason: str) -> None:
        """A turn that reused what it could, read its whole prompt, and picked these tokens."""
        prompt, cached = request.prompt_ids, self.cached(request.prompt_ids)
        if cached < len(prompt):
            self.places = {p for p in self.places if len(p) <= cached or _agree(p, prompt)}
            self.places |= {prompt[:mark] for mark in request.marks if cached < mark < len(prompt)} | {prompt}
        fed = picked[:-1]
        if fed:
            self.places = {p for p in self.places if len(p) <= len(prompt)}
        if reason in ("stop", "length") and len(fed) <= delivered:
            self.places.add(prompt + fed)


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


@dataclass(frozen=True)
class Turn:
    request: Request
    cancel_after: int | None = None  # steps


class Trio:
    """The three sides of a comparison."""

    def __init__(self, engine: Engine, drafting: Speculation) -> None:
        self.engine, self.ledger = engine, Ledger()
        self.warm = Session(engine, drafting, checkpoints=ROOM, pins=2)
        self.plain = Session(engine, replace(drafting, lookup=False, mtp=False), checkpoints=ROOM, pins=2)
        self.cold = Session(engine, replace(drafting, lookup=False))  # its head reads along: what it holds is compared
        self.turns = self.reused = self.drafted = 0

    def play(self, turn: Turn) -> tuple[int, ...]:
        """Play a turn on every side; returns the tokens of its answer."""
        request, cached = turn.request, self.ledger.cached(turn.request.prompt_ids)
        warm, plain, cold = (self._steps(one, turn) for one in (self.warm, self.plain, self.cold))
        assert warm == plain == cold
        sides = (self.warm, self.plain, self.cold)
        seen = [(one.report.token_ids, one.report.finish_reason, one.report.text, one.picked_ids,
                 one.last_logits.tobytes(), one.state.content()) for one in sides]  # fmt: skip
        assert seen[0] == seen[1] == seen[2]
        assert self.warm.report.cached_tokens == self.plain.report.cached_tokens == cached
        self._same_head()
        report = self.warm.report
        delivered = sum(len(step.tokens) for step in warm)
        self.ledger.turn(request, self.warm.picked_ids, delivered, report.finish_reason)
        self._kept()
        self.turns, self.reused = self.turns + 1, self.reused + cached
        sources = (report.speculation.mtp, report.speculation.lookup) if report.speculation is not None else ()
        self.drafted += sum(source.drafts for source in sources if source is not None)
        return report.token_ids

    def _steps(self, session: Session, turn: Turn) -> list[Step]:
        """Steps of the answer; a cancelled one is closed behind so many."""
        steps, found = session.steps(turn.request), []
        for step in steps:
            if step != Step():
                found.append(step)
            if turn.cancel_after is not None and len(found) >= turn.cancel_after:
                steps.close()
        return found

    def _same_head(self) -> None:
        heads = [one.decoder.mtp for one in (self.warm, self.cold)]
        if None in heads:
            return
        contents = []
        for one, session in zip(heads, (self.warm, self.cold), strict=True):
            one.absorb(session.state)
            contents.append(head_content(one.state))
        assert contents[0] == contents[1]

    def _kept(self) -> None:
        for session in (self.warm, self.plain):
            assert {tuple(one.tokens.tolist()) for one in session.prefixes.kept} == self.ledger.places


def random_session(trio: Trio, rng: np.random.Generator, turns: int) -> None:
    """Histories as people and agents make them, and worse."""
    vocab, ctx = trio.engine.geometry.vocab, trio.engine.ctx
    history = _tokens(rng, vocab, int(rng.integers(1, 24)))
    pinned: list[tuple[int, ...]] = []
    for _ in range(turns):
        kind = rng.choice(("repeat", "continue", "edit", "pin", "return", "shorter", "new"))
        if kind == "continue" or kind == "pin":
            history += _tokens(rng, vocab, int(rng.integers(1, 9)))
        elif kind == "edit":
            at = int(rng.integers(0, len(history)))
            history = history[:at] + _tokens(rng, vocab, int(rng.integers(1, 6)))
        elif kind == "return" and pinned:
            history = pinned[int(rng.integers(0, len(pinned)))]
        elif kind == "shorter":
            history = history[: int(rng.integers(1, len(history) + 1))]
        elif kind == "new" or len(history) > ctx - 24:
            history = _tokens(rng, vocab, int(rng.integers(1, 24)))
        history = history[: ctx - 24]
        turn = _turn(trio.engine, rng, history, pin=kind == "pin")
        if kind == "pin":
            pinned.append(history)
        history += trio.play(turn)


def _turn(engine: Engine, rng: np.random.Generator, prompt: tuple[int, ...], *, pin: bool) -> Turn:
    sampled = rng.random() < 0.4
    sampling = Sampling(temperature=float(rng.uniform(0.3, 1.5)), top_p=0.9, seed=int(rng.integers(1 << 30)),
                        repetition_penalty=1.2) if sampled else Sampling()  # fmt: skip
    request = Request(
        prompt, int(rng.integers(1, 14)), sampling,
        stop_ids=frozenset(int(i) for i in rng.integers(0, engine.geometry.vocab, 3)),
        stop=(chr(int(rng.integers(32, 127))),) if rng.random() < 0.3 else (),
        logprobs=int(rng.integers(0, 4)) if rng.random() < 0.4 else None,
        prediction=_tokens(rng, engine.geometry.vocab, 6) if rng.random() < 0.2 else (),
        marks=tuple(int(i) for i in rng.integers(1, len(prompt) + 1, 2)) if rng.random() < 0.5 else (),
        pins=(len(prompt),) if pin else (),
    )  # fmt: skip
    return Turn(request, int(rng.integers(1, 6)) if rng.random() < 0.15 else None)


def _tokens(rng: np.random.Generator, vocab: int, count: int) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(0, min(vocab, 40), count))  # few: repeats for the lookup
