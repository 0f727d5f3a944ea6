"""One sequence on an engine: prompt in, text pieces out, a report at the end.

A session owns the state and the loop: find what of the prompt is there already, prefill the rest in chunks, pick,
stream, feed. Everything settles token by token: a token's stop check, text and limit come before the next forward, and
`cancel` is looked at between forwards and between tokens. The first cause to end an answer wins: stop token, stop
string, limit.

`steps` gives the turn out in pieces of one forward at most, so that several sessions of an engine can take turns: what
a step computes is consumed before it ends, for the next session's forward overwrites the model's buffers.

With `checkpoints` a session continues from what it holds (coli/prefix.py). Only what was delivered is made reusable: an
answer that was cancelled, failed, or was cut inside by a stop string leaves the checkpoints of its prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

import numpy as np

from coli import memory
from coli.answer import Form
from coli.engine import Engine
from coli.errors import PromptTooLong, UsageError
from coli.logprobs import Scored, scored
from coli.prefix import Checkpoint, Prefixes
from coli.report import Experts, ModelFacts, RunReport, Timings, rate
from coli.sampling import Sampler, Sampling
from coli.speculation.decoder import Decoder, Trace
from coli.speculation.options import Speculation
from coli.state import State
from coli.stream import TextStream


class Constraint(Protocol):
    """Which tokens may come next (coli/grammar.py). It follows the answer of one request."""

    def mask(self) -> np.ndarray | None:
        """bool [vocab], True for those that may; None: all."""

    def accept(self, token: int) -> None:
        """`token` was picked."""

    def admits(self, drafts: Sequence[int]) -> int:
        """How many of these, from the first on, could be picked next."""


@dataclass(frozen=True)
class Request:
    """What to answer. `max_tokens` None: up to the context; `stop_ids` None: the model's own.

    `logprobs`: alternatives told beside every token's own, None for none of both. `prediction`: what may be said, for
    the lookup to copy from. `speculation`: this turn's, None for the session's. `marks`: lengths of the prompt at which
    to keep a checkpoint besides its end; `pins`: those of them, or the whole length, whose checkpoint is to stay;
    `shared`: the one that other conversations begin with as well, 0 for none. `form`: what is content in this answer,
    where alone stop strings count; None: all is."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    constraint: Constraint | None = None
    speculation: Speculation | None = None
    marks: tuple[int, ...] = ()
    pins: tuple[int, ...] = ()
    shared: int = 0
    form: Form | None = None


class Step(NamedTuple):
    """What one token, or one chunk of the prompt, let out. `tokens`: those whose text is complete with it; the stop
    token that ends an answer is none of them."""

    text: str = ""
    tokens: tuple[Scored, ...] = ()


class _Turn:
    """One answer under way: what was picked, how it ends, and the moments the report needs (monotonic seconds)."""

    def __init__(self, request: Request, engine: Engine, limit: int) -> None:
        self.request, self.limit = request, limit
        self.sampler = Sampler(request.sampling, engine.geometry.vocab, request.prompt_ids)
        sorter = None if request.form is None else request.form.router()
        self.stream = TextStream(engine.tokenizer, request.stop, sorter)
        self.stops = engine.stop_ids if request.stop_ids is None else request.stop_ids
        self.ids: list[int] = []
        self._waiting: list[Scored] = []  # picked, not delivered
        self.delivered = 0
        self.cached = self.prompt_read = 0  # prompt tokens that were there, and that were run
        self.reason = ""  # "stop", "length" or "error" once it has ended; cancelled without one
        self.start = time.perf_counter()
        self.prefilled = self.first = self.end = 0.0

    def pick(self, logits: np.ndarray) -> Step:
        """Choose the next token; returns what it lets out. The first cause to end the answer wins."""
        request = self.request
        allowed = None if request.constraint is None else request.constraint.mask()
        token = self.sampler.pick(logits, allowed)
        self.ids.append(token)
        self.end = time.perf_counter()
        self.first = self.first or self.end
        if token in self.stops:
            self.reason = "stop"
            return Step()
        if request.constraint is not None:
            request.constraint.accept(token)
        self._waiting.append(Scored(token) if request.logprobs is None else scored(logits, token, request.logprobs))
        piece = self.stream.push(token)
        if self.stream.stopped:
            self.reason = "stop"
        elif len(self.ids) >= self.limit:
            self.reason = "length"
        return self._step(piece)

    def flush(self) -> Step:
        """What was held back until the end."""
        return self._step(self.stream.flush())

    def _step(self, piece: str) -> Step:
        fresh = self.stream.delivered - self.delivered
        self.delivered += fresh
        tokens, self._waiting = tuple(self._waiting[:fresh]), self._waiting[fresh:]
        return Step(piece, tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The answer's: those delivered, and the stop token that ended it."""
        ended = self.ids[-1:] if self.reason == "stop" and not self.stream.stopped else []
        return (*self.ids[: self.delivered], *ended)


class Session:
    """Answers requests one after another on its own state."""

    def __init__(
        self, engine: Engine, speculation: Speculation | None = None, *, trace: Trace | None = None,
        reference: Sequence[int] | None = None, state: State | None = None, checkpoints: int = 0, pins: int = 0,
    ) -> None:  # fmt: skip
        """`speculation`: what to draft with, the settings' own by default; `trace` is given a record of every verify;
        `reference`: prompt and answer that the FORCE modes draft from; `state`: that of a session which answers at
        other times, to share its memory; `checkpoints`, `pins`: states that may be kept for later prompts, of a whole
        context each (coli/prefix.py)."""
        self.engine = engine
        self.state = engine.model.new_state() if state is None else state
        self.options = speculation or Speculation.of(engine.settings)
        self.decoder = Decoder(
            engine.model, self.state, self.options, engine=engine.name,
            vocab=engine.geometry.vocab, head=engine.head, vocabulary=engine.vocabulary, reference=reference,
            trace=trace,
        )  # fmt: skip
        self.prefixes = Prefixes((checkpoints + pins) * engine.plan.snapshot, pins)
        self.decoder.on_write = self.prefixes.written
        self._here: Checkpoint | None = None  # the state stands at this one
        self.last_logits: np.ndarray | None = None  # that the last token was picked from
        self.picked_ids: tuple[int, ...] = ()  # of the last answer, with those that a stop string cut off
        self.seed: int | None = None  # of the last answer's sampler; None when it was greedy
        self.report: RunReport | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the answer under way soon, or the next one at once; safe from a signal handler. A caller whose cancel may
        come late, behind the end of the answer it is for, calls `forget` before the next."""
        self._cancelled = True

    def forget(self) -> None:
        """No cancel is pending: what came too late is not for the next answer."""
        self._cancelled = False

    def reusable(self, prompt_ids: Sequence[int]) -> int:
        """Tokens of this prompt that need not be read again."""
        found = self.prefixes.find(prompt_ids)
        return 0 if found is None else found.length

    def generate(self, request: Request) -> Iterator[str]:
        """Yield the answer's text in pieces; `report` is there when the iterator has ended, however it ended.

        One answer at a time on a state: ValueError while another's iterator has neither ended nor been closed."""
        with closing(self.steps(request)) as steps:
            yield from (step.text for step in steps if step.text)

    def steps(self, request: Request) -> Generator[Step, None, None]:
        """The same, step by step: each `next` runs one forward at most. Closing the iterator cancels the answer."""
        if self.state.answering:
            raise ValueError("an answer is under way on this state: end or close its iterator first")
        turn = _Turn(request, self.engine, self._limit(request))
        self.state.answering, self.seed, self.report = True, turn.sampler.seed, None
        before, fed = self._expert_counts(), 0
        try:
            logits = yield from self._prefill(turn)
            turn.prefilled = time.perf_counter()
            while logits is not None and not self._cancelled:
                self.last_logits = logits.copy()  # the next forward, of whatever session, overwrites them
                yield turn.pick(self.last_logits)
                if turn.reason or self._cancelled:
                    break
                fed, self._here = fed + 1, None
                self.engine.guard.tick()
                logits = self.decoder.feed(turn.ids[-1])
            yield turn.flush()
        except Exception:
            turn.reason = "error"
            raise
        finally:
            self.decoder.finish(turn.ids[-1] if len(turn.ids) > fed else None)
            self._cancelled = self.state.answering = False
            self.picked_ids = tuple(turn.ids)
            if turn.reason in ("stop", "length") and fed <= turn.delivered:
                self._keep(self.last_logits)
            self.report = self._report(turn, before)

    def _resume(self, prompt: np.ndarray) -> np.ndarray | None:
        """Put the state where the deepest checkpoint of `prompt` is, or at its beginning; the logits there."""
        found = self.prefixes.find(prompt)
        if found is None:
            self._here = None
            self.decoder.reset()
            return None
        if found is not self._here:
            self.decoder.load(found.place)
            self._here = found
        self.prefixes.use(found)
        return found.logits

    def _keep(self, logits: np.ndarray | None, *, pin: bool = False, share: bool = False) -> None:
        """A checkpoint where the state stands."""
        if not self.prefixes.budget or logits is None:
            return
        try:
            self._here = Checkpoint(self.decoder.copy(), logits.copy())
        except MemoryError:
            self.engine.say("no memory for a checkpoint: a later prompt will be read again")
            return
        self.prefixes.keep(self._here, pin=pin, share=share)

    def _limit(self, request: Request) -> int:
        """Tokens this answer may have. Raises UsageError for a prompt without tokens and PromptTooLong."""
        if not request.prompt_ids:
            raise UsageError("the prompt has no tokens", "prompt", "give some text")
        room = self.engine.ctx - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids):,} tokens, the context holds {self.engine.ctx:,} and an "
                "answer needs at least one of them", "prompt", "shorten it or raise --ctx",
            )  # fmt: skip
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UsageError(f"{request.max_tokens} tokens is no answer", "--max-tokens", "give at least 1")
        return room if request.max_tokens is None else min(room, request.max_tokens)

    def _prefill(self, turn: _Turn) -> Generator[Step, None, np.ndarray | None]:
        """Read the prompt; returns the logits after it, None when cancelled on the way."""
        request, self.last_logits = turn.request, None
        ids = np.asarray(request.prompt_ids, np.int64)
        logits = self._resume(ids)
        turn.cached = at = self.state.length
        self.decoder.begin(request.prompt_ids, most=turn.limit, options=request.speculation,
                           prediction=request.prediction,
                           admits=None if request.constraint is None else request.constraint.admits)  # fmt: skip
        ends = sorted({len(ids), *(mark for mark in request.marks if at < mark < len(ids))})
        for length in {*request.pins, request.shared}:
            if (known := self.prefixes.at(ids, length)) is not None:
                self.prefixes.use(known, pin=length in request.pins, share=length == request.shared)
        while at < len(ids):
            if self._cancelled:
                return None
            self.engine.guard.tick()
            self._here, end = None, next(end for end in ends if end > at)
            logits = self.decoder.prefill(ids[at : min(at + self.engine.limit, end)])
            at = self.state.length
            turn.prompt_read = at - turn.cached
            if at == end:
                self._keep(logits, pin=end in request.pins, share=end == request.shared)
            if at < len(ids):
                yield Step()
        return logits

    def _expert_counts(self) -> list[int]:
        """Those of the report's `Experts`, since the engine was opened."""
        return [sum(getattr(store, field.name) for store in self.engine.stores) for field in fields(Experts)]

    def _report(self, turn: _Turn, before: list[int]) -> RunReport:
        engine, prompt, answer = self.engine, len(turn.request.prompt_ids), len(turn.ids)
        prefill = (turn.prefilled or time.perf_counter()) - turn.start
        decode = turn.end - turn.first
        return RunReport(
            text=turn.stream.text,
            token_ids=turn.token_ids,
            prompt_tokens=prompt,
            cached_tokens=turn.cached,
            completion_tokens=len(turn.token_ids),
            finish_reason=turn.reason or "cancelled",
            timings=Timings(
                load_s=engine.load_s,
                ttft_s=turn.first - turn.start if answer else 0.0,
                prefill_s=prefill,
                decode_s=decode,
                prefill_tok_s=rate(turn.prompt_read, prefill),
                decode_tok_s=rate(max(0, answer - 1), decode),
            ),
            peak_rss_bytes=memory.peak_rss(),
            experts=Experts(*(now - then for now, then in zip(self._expert_counts(), before, strict=True))),
            model=ModelFacts(str(engine.model_path), engine.name, engine.geometry_facts()),
            speculation=self.decoder.report(),
            stop=turn.stream.stop,
        )
