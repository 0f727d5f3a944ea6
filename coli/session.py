"""One sequence on an engine: prompt in, text pieces out, a report at the end.

A session owns the state and the loop: prefill in chunks, pick, stream, feed. Everything settles token by token: a
token's stop check, text and limit come before the next forward, and `cancel` is looked at between forwards and
between tokens. The first cause to end an answer wins: stop token, stop string, limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from coli import memory
from coli.engine import Engine
from coli.errors import PromptTooLong, UsageError
from coli.report import Experts, ModelFacts, RunReport, Timings, rate
from coli.sampling import Sampler, Sampling
from coli.speculation.decoder import Decoder, Trace
from coli.speculation.options import Speculation
from coli.state import State
from coli.stream import TextStream


@dataclass(frozen=True)
class Request:
    """What to answer. `max_tokens` None: up to the context; `stop_ids` None: the model's own."""

    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None


class _Turn:
    """One answer under way: what was picked, how it ends, and the moments the report needs (monotonic seconds)."""

    def __init__(self, request: Request, engine: Engine, limit: int) -> None:
        self.request, self.limit = request, limit
        self.sampler = Sampler(request.sampling, engine.geometry.vocab, request.prompt_ids)
        self.stream = TextStream(engine.tokenizer, request.stop)
        self.stops = engine.stop_ids if request.stop_ids is None else request.stop_ids
        self.ids: list[int] = []
        self.prompt_read = 0  # prompt tokens run
        self.reason = ""  # "stop", "length" or "error" once it has ended; cancelled without one
        self.start = time.perf_counter()
        self.prefilled = self.first = self.end = 0.0

    def pick(self, logits: np.ndarray) -> str:
        """Choose the next token; returns the text it lets out. The first cause to end the answer wins."""
        token = self.sampler.pick(logits)
        self.ids.append(token)
        self.end = time.perf_counter()
        self.first = self.first or self.end
        if token in self.stops:
            self.reason = "stop"
            return ""
        piece = self.stream.push(token)
        if self.stream.stopped:
            self.reason = "stop"
        elif len(self.ids) >= self.limit:
            self.reason = "length"
        return piece


class Session:
    """Answers requests one after another on its own state."""

    def __init__(
        self, engine: Engine, speculation: Speculation | None = None, *, trace: Trace | None = None,
        reference: Sequence[int] | None = None, state: State | None = None,
    ) -> None:  # fmt: skip
        """`speculation`: what to draft with, the settings' own by default; `trace` is given a record of every verify;
        `reference`: prompt and answer that the FORCE modes draft from; `state`: that of a session which answers at
        other times, to share its memory."""
        self.engine = engine
        self.state = engine.model.new_state() if state is None else state
        self.decoder = Decoder(
            engine.model, self.state, speculation or Speculation.of(engine.settings), engine=engine.name,
            vocab=engine.geometry.vocab, head=engine.head, vocabulary=engine.vocabulary, reference=reference,
            trace=trace,
        )  # fmt: skip
        self.last_logits: np.ndarray | None = None  # that the last token was picked from
        self.seed: int | None = None  # of the last answer's sampler; None when it was greedy
        self.report: RunReport | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """End the running answer soon, or the next one at once; safe from a signal handler."""
        self._cancelled = True

    def generate(self, request: Request) -> Iterator[str]:
        """Yield the answer's text in pieces; `report` is there when the iterator has ended, however it ended.

        One answer at a time on a state: ValueError while another's iterator has neither ended nor been closed."""
        if self.state.answering:
            raise ValueError("an answer is under way on this state: end or close its iterator first")
        turn = _Turn(request, self.engine, self._limit(request))
        self.state.answering, self.seed, self.report = True, turn.sampler.seed, None
        before, fed = self._expert_counts(), 0
        try:
            self.decoder.reset()
            self.decoder.begin(request.prompt_ids, most=turn.limit)
            logits = self._prefill(turn)
            turn.prefilled = time.perf_counter()
            while logits is not None and not self._cancelled:
                self.last_logits = logits.copy()  # the next forward, of whatever session, overwrites them
                yield from filter(None, [turn.pick(logits)])
                if turn.reason or self._cancelled:
                    break
                fed += 1
                self.engine.guard.tick()
                logits = self.decoder.feed(turn.ids[-1])
            yield from filter(None, [turn.stream.flush()])
        except Exception:
            turn.reason = "error"
            raise
        finally:
            self.decoder.finish(turn.ids[-1] if len(turn.ids) > fed else None)
            self._cancelled = self.state.answering = False
            self.report = self._report(turn, before)

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

    def _prefill(self, turn: _Turn) -> np.ndarray | None:
        """Logits after the prompt; None when cancelled on the way."""
        ids, size, logits = np.asarray(turn.request.prompt_ids, np.int64), self.engine.limit, None
        for at in range(0, len(ids), size):
            if self._cancelled:
                return None
            self.engine.guard.tick()
            logits = self.decoder.prefill(ids[at : at + size])
            turn.prompt_read = self.state.length
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
            token_ids=tuple(turn.ids),
            prompt_tokens=prompt,
            completion_tokens=answer,
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
        )
