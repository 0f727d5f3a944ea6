"""One sequence on an engine: prompt in, text pieces out, a report at the end.

A session owns the state and the loop: prefill in chunks, pick, stream, feed. Everything settles token by token: a
token's stop check, text and limit come before the next forward, and `cancel` is looked at between forwards and
between tokens. The first cause to end an answer wins: stop token, stop string, limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from coli import memory
from coli.engine import Engine
from coli.errors import PromptTooLong, UsageError
from coli.report import Experts, ModelFacts, RunReport, Timings, rate
from coli.sampling import Sampler, Sampling
from coli.stream import TextStream


@dataclass(frozen=True)
class Request:
    """What to answer. `max_tokens` None: up to the context; `stop_ids` None: the model's own."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None


@dataclass
class _Clock:
    """Seconds on the monotonic clock at the turns of one answer."""

    start: float = 0.0
    prefilled: float = 0.0
    first: float = 0.0
    end: float = 0.0


class Session:
    """Answers requests one after another on its own state."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state = engine.model.new_state()
        self.last_logits: np.ndarray | None = None  # that the last token was picked from
        self.report: RunReport | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the running answer soon; safe from a signal handler."""
        self._cancelled = True

    def generate(self, request: Request) -> Iterator[str]:
        """Yield the answer's text in pieces; `report` is there when the iterator has ended, however it ended."""
        limit = self._limit(request)
        self.state.reset()
        self._cancelled, self.report = False, None
        stream = TextStream(self.engine.tokenizer, request.stop)
        ids: list[int] = []
        clock = _Clock(start=time.perf_counter())
        before = self._expert_counts()
        reason = "cancelled"
        try:
            sampler = Sampler(request.sampling, self.engine.geometry.vocab, request.prompt_ids)
            logits = self._prefill(request.prompt_ids)
            clock.prefilled = clock.first = clock.end = time.perf_counter()
            if logits is not None:
                stops = self.engine.stop_ids if request.stop_ids is None else request.stop_ids
                for reason, piece in self._decode(logits, sampler, stream, stops, limit, ids, clock):
                    if piece:
                        yield piece
            tail = stream.flush()
            if tail:
                yield tail
        finally:
            clock.end = clock.end or time.perf_counter()
            self.report = self._report(request, ids, stream.text, reason or "cancelled", clock, before)

    def _limit(self, request: Request) -> int:
        """Tokens this answer may have."""
        if not request.prompt_ids:
            raise UsageError("the prompt has no tokens", "prompt", "give some text")
        room = self.engine.ctx - len(request.prompt_ids)
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {len(request.prompt_ids):,} tokens, the context holds {self.engine.ctx:,} and an "
                "answer needs at least one of them", "prompt", "shorten it or raise --ctx",
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UsageError(f"{request.max_tokens} tokens is no answer", "--max-tokens", "give at least 1")
        return room if request.max_tokens is None else min(room, request.max_tokens)

    def _prefill(self, prompt: tuple[int, ...]) -> np.ndarray | None:
        """Logits after the prompt; None when cancelled."""
        ids, size, logits = np.asarray(prompt, np.int64), self.engine.limit, None
        for at in range(0, len(ids), size):
            if self._cancelled:
                return None
            logits = self.engine.model.forward(ids[at : at + size], self.state).logits[-1]
        return logits

    def _decode(self, logits: np.ndarray, sampler: Sampler, stream: TextStream, stops: frozenset[int], limit: int,
                ids: list[int], clock: _Clock) -> Iterator[tuple[str, str]]:
        """Yield (reason so far: "" while running, piece) token by token."""
        while not self._cancelled:
            self.last_logits = logits
            token = sampler.pick(logits)
            ids.append(token)
            if len(ids) == 1:
                clock.first = time.perf_counter()
            clock.end = time.perf_counter()
            if token in stops:
                yield "stop", ""
                return
            piece = stream.push(token)
            reason = "stop" if stream.stopped else "length" if len(ids) >= limit else ""
            yield reason, piece
            if reason:
                return
            logits = self.engine.model.forward([token], self.state).logits[0]
        yield "cancelled", ""

    def _expert_counts(self) -> tuple[int, int, int]:
        store = self.engine.store
        return store.hits, store.misses, store.bytes_read

    def _report(self, request: Request, ids: list[int], text: str, reason: str, clock: _Clock,
                before: tuple[int, int, int]) -> RunReport:
        engine = self.engine
        prefill = (clock.prefilled or clock.end) - clock.start
        decode = clock.end - clock.first if ids else 0.0
        return RunReport(
            text=text, token_ids=tuple(ids), prompt_tokens=len(request.prompt_ids), completion_tokens=len(ids),
            finish_reason=reason,
            timings=Timings(
                load_s=engine.load_s, ttft_s=clock.first - clock.start if ids else 0.0, prefill_s=prefill,
                decode_s=decode, prefill_tok_s=rate(len(request.prompt_ids), prefill),
                decode_tok_s=rate(len(ids) - 1, decode) if ids else 0.0,
            ),
            peak_rss_bytes=memory.peak_rss(),
            experts=Experts(*(now - then for now, then in zip(self._expert_counts(), before, strict=True))),
            model=ModelFacts(str(engine.model_path), engine.name, engine.geometry_facts()),
        )
