"""Logits to one token: penalties, temperature, filters, one draw.

Order, always the same:
  0. bias, mask   l + bias of a token the caller favours; -inf for tokens that a grammar does not allow here
  1. penalties    on every token already seen, logit l:
                    repetition r  l/r if l > 0 else l*r   over prompt and answer  (CTRL, arXiv 1909.05858; transformers)
                    frequency f   l - f*count             over the answer only    (OpenAI's API reference; vLLM)
                    presence p    l - p                   over the answer only
  2. temperature  l/T. T = 0 is greedy: the highest logit, the lowest id on a tie, no draw, and the rest is skipped
  3. top_k        exactly the k first tokens of the ranking (logit descending, then id ascending)
  4. top_p        of what is left: a token stays while the tokens before it hold less than top_p of the mass
  5. min_p        of what is left: a token stays while its probability is at least min_p times the best one's
  6. one draw     u in [0, 1): the first token in the ranking whose cumulative probability exceeds u

Idea: each filter keeps a *prefix of the ranking*, so only the head of the ranking is ever sorted. `ranked` finds it
without sorting the vocabulary, and the head grows only while the answer could lie outside it. Weights are float64,
summed in ranking order, so equal logits and seed give equal tokens. The mass of the whole vocabulary is needed only
where no top_k cut it off, and is then summed in id order.

A request owns its generator (PCG64) and pays one draw per token it emits, none for drafts or greedy picks: tokens
settled out of a verify are drawn as plain decoding draws them.

Invariants: the caller's logits are never written; `draws` equals the tokens picked; the picks of a distribution pass a
chi-square test and the kept set equals a reference that sorts everything (tests/text/test_sampling.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.errors import NonFinite, UsageError

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# field -> lowest, highest, whether the lowest itself is allowed
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


@dataclass(frozen=True)
class Wished:
    """What a person or a client may say of the sampling; None leaves it open. What asks for more inherits from it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Sampling:
    """How a request picks its tokens. The defaults are greedy, without penalties. Raises UsageError for a bad value."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a random one, see Sampler.seed
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, -100 to 100), added to its logit

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias:
            if type(token) is not int or token < 0 or not _is_real(bias) or abs(bias) > 100:
                raise UsageError(f"logit_bias of {token!r} is {bias!r}, give a token id and a number from -100 to 100",
                                 "logit_bias")  # fmt: skip
        for name, (low, high, closed) in _RANGES.items():
            value = getattr(self, name)
            if not _is_real(value) or not (low <= value <= high) or (value == low and not closed):
                bounds = f"from {low:g} to {high:g}" if closed else f"above {low:g}, up to {high:g}"
                raise UsageError(f"{name} is {value!r}, it must be a number {bounds}", name)
        for name, limit in (("top_k", 1 << 31), ("seed", 1 << 64)):
            value = getattr(self, name)
            if not (name == "seed" and value is None) and (type(value) is not int or not 0 <= value < limit):
                raise UsageError(f"{name} is {value!r}, it must be a whole number from 0 to {limit - 1}", name)

    @classmethod
    def wished(cls, wishes: Wished, own: Mapping[str, Any]) -> Sampling:
        """What `wishes` has under these names, None being no wish; else a checkpoint's `own`
        (coli.chat.checkpoint_sampling), else its probabilities as they are."""
        given = {field.name: getattr(wishes, field.name, None) for field in fields(cls)}
        given = {name: value for name, value in given.items() if value is not None}
        return cls(**{"temperature": 1.0, **own, **given})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class SamplerState:
    """A sampler between two picks: what it emitted and where its generator stands."""

    emitted: tuple[int, ...]
    draws: int
    generator: Mapping[str, Any] | None


class Sampler:
    """Picks the tokens of one request, in order. Not for use by two threads at once."""

    def __init__(self, sampling: Sampling, vocab: int, prompt_ids: tuple[int, ...] | list[int] = ()) -> None:
        """`vocab`: rows of the logits. Raises UsageError for a prompt id outside of it."""
        self.sampling, self.vocab, self.prompt_ids = sampling, vocab, tuple(prompt_ids)
        wrong = next((token for token in self.prompt_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise UsageError(f"token id {wrong} of the prompt is outside the model's vocabulary of {vocab}")
        self.draws = 0
        self.emitted: list[int] = []
        self.seed: int | None = None  # the seed in use, None when greedy
        if not sampling.greedy:
            self.seed = int.from_bytes(os.urandom(6)) if sampling.seed is None else sampling.seed  # 48 bits: JSON safe
            self._generator = np.random.Generator(np.random.PCG64(self.seed))
        self._history = _History(vocab, self.prompt_ids) if sampling.penalised else None
        wrong = next((token for token, _ in sampling.logit_bias if token >= vocab), None)
        if wrong is not None:
            raise UsageError(f"logit_bias names token {wrong}, the vocabulary ends at {vocab - 1}", "logit_bias")
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)

    def pick(self, logits: Floats, allowed: NDArray[np.bool_] | None = None) -> int:
        """The next token from float32 logits [vocab], which are left as they are; it joins the history. `allowed`
        [vocab]: the others are out of question.

        Raises NonFinite when the logits, penalties applied, hold a NaN or their maximum is infinite; nothing is drawn
        or recorded then. -inf for single tokens is fine: it bans them.
        """
        if logits.shape != (self.vocab,):
            raise ValueError(f"logits have shape {logits.shape}, the sampler was made for ({self.vocab},)")
        scores = self._steered(logits, allowed)
        if self._history is not None:
            scores = self._history.penalise(scores, self.sampling)
        best = int(np.argmax(scores))  # numpy lets a NaN win, and the lowest id on a tie
        if not math.isfinite(scores[best]):
            raise NonFinite(f"the logit of token {best} is {scores[best]}", f"token {len(self.emitted)} of the answer",
                            "the model's numbers broke before sampling")  # fmt: skip
        token = best if self.sampling.greedy else self._draw(scores, float(scores[best]))
        self.emitted.append(token)
        if self._history is not None:
            self._history.add(token)
        return token

    def _steered(self, logits: Floats, allowed: NDArray[np.bool_] | None) -> Floats:
        """Step 0, on a copy where there is anything to do."""
        if allowed is None and not len(self._biased):
            return logits
        scores = logits.copy()
        np.add.at(scores, self._biased, self._biases)
        if allowed is not None:
            scores[~allowed] = -np.inf
        return scores

    def state(self) -> SamplerState:
        """A copy to go back to with `restore`."""
        generator = None if self.sampling.greedy else self._generator.bit_generator.state
        return SamplerState(tuple(self.emitted), self.draws, generator)

    def restore(self, state: SamplerState) -> None:
        """Goes back to a state of a sampler with the same settings and prompt."""
        self.emitted, self.draws = list(state.emitted), state.draws
        if state.generator is not None:
            self._generator.bit_generator.state = dict(state.generator)
        if self._history is not None:
            self._history = _History(self.vocab, self.prompt_ids)
            for token in self.emitted:
                self._history.add(token)

    def _draw(self, scores: Floats, best: float) -> int:
        u = float(self._generator.random())
        self.draws += 1
        return draw(scores, best, self.sampling, u)


def draw(scores: Floats, best: float, sampling: Sampling, u: float) -> int:
    """Steps 2 to 6 for one u in [0, 1). `scores` [V] float32, `best` their maximum, temperature above 0."""
    size = min(sampling.top_k or len(scores), len(scores))
    temperature, top_p = sampling.temperature, sampling.top_p
    floor = max(sampling.min_p, np.finfo(np.float64).tiny)  # a weight of zero is never kept
    whole = None if sampling.top_k else float(_weights(scores, best, temperature).sum())
    width = size if sampling.top_k else min(size, 512)
    while True:
        ids = ranked(scores, width)
        weights = _weights(scores[ids], best, temperature)
        mass = np.cumsum(weights)
        total = float(mass[-1]) if whole is None else whole
        kept = int(np.searchsorted(-weights, -floor, side="right"))
        if top_p < 1.0:
            kept = min(kept, int(np.searchsorted(mass, top_p * total)) + 1)
        decided = kept < width or width == size
        if decided:
            total = float(mass[kept - 1])
        if decided or (top_p == 1.0 and sampling.min_p == 0.0 and u * total < mass[-1]):
            # rounding may put u * total on the last sum itself, so the last kept token is the end
            return int(ids[min(int(np.searchsorted(mass, u * total, side="right")), kept - 1)])
        width = min(size, width * 16)


def ranked(scores: Floats, count: int) -> Ids:
    """The ids of the `count` highest scores [V] (no NaN), highest first, the lower id first on a tie.

    Everything below a safe lower bound of the count-th score is dropped before the sort, which sorts one whole number a
    token, (score, id): faster than an indirect sort, and no two are equal.
    """
    rows = 64  # the maxima of 64-element columns: the count-th highest of them is such a bound, at one pass over V
    columns = len(scores) // rows
    if count >= len(scores):
        ids = np.arange(len(scores))
    else:
        heads = scores[: rows * columns].reshape(rows, columns).max(axis=0) if count * 4 <= columns else scores
        ids = np.flatnonzero(scores >= np.partition(heads, len(heads) - count)[len(heads) - count])
    bits = (scores[ids] + np.float32(0)).view(np.uint32)  # -0 becomes 0
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(
        np.uint64
    )  # IEEE 754 order, highest first
    keys = np.sort((falling << np.uint64(32)) | ids.astype(np.uint64))
    return (keys[:count] & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _weights(scores: Floats, best: float, temperature: float) -> NDArray[np.float64]:
    """Unnormalised probabilities, the best one's is 1."""
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, weight 0
        return np.exp((scores.astype(np.float64) - best) / temperature)


class _History:
    """The tokens seen, each once, in an array that grows, and how often the answer holds each."""

    def __init__(self, vocab: int, prompt_ids: tuple[int, ...]) -> None:
        first = np.unique(np.array(prompt_ids, np.int64))
        self._counts = np.zeros(vocab, np.int32)  # in the answer
        self._known = np.zeros(vocab, np.bool_)
        self._known[first] = True
        self._ids = np.resize(first, len(first) + 64)
        self._size = len(first)
        self._scores = np.empty(vocab, np.float32)

    def add(self, token: int) -> None:
        self._counts[token] += 1
        if not self._known[token]:
            if self._size == len(self._ids):
                self._ids = np.resize(self._ids, 2 * self._size)
            self._known[token] = True
            self._ids[self._size] = token
            self._size += 1

    def penalise(self, logits: Floats, sampling: Sampling) -> Floats:
        """A copy of the logits with step 1 applied, valid until the next call."""
        np.copyto(self._scores, logits)
        ids = self._ids[: self._size]
        seen, counts = logits[ids].astype(np.float64), self._counts[ids]
        rate = sampling.repetition_penalty
        seen = np.where(seen > 0, seen / rate, seen * rate)
        seen -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        with np.errstate(over="ignore"):  # an overflow to infinity is caught by the caller
            self._scores[ids] = seen
        return self._scores


def _is_real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
