"""A reference answer in a JSON file, and how an answer of ours compares with it: `coli run --reference ref.json`.

The file is one object:
    prompt_ids    ids of the prompt, at least one
    full_ids      the prompt's ids and at least one more: the answer
    final_logits  optional: the logits that chose the last token, a number for every token of the vocabulary
Other names in it are left alone. The answer is generated greedily, exactly as many tokens, stop tokens off.
Everything about the file is checked when it is read, what needs the model (`fit`) when that is there; each fault is one
UsageError that names the file. Positions count the answer's tokens from 0.
Guarded by tests/cli/test_speculation.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coli.errors import UsageError
from coli.formats.strict import show

if TYPE_CHECKING:
    from coli.session import Request

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Reference:
    path: Path
    prompt_ids: tuple[int, ...]
    full_ids: tuple[int, ...]
    final_logits: Floats | None  # [vocabulary]

    @classmethod
    def load(cls, path: Path) -> Reference:
        """Raises UsageError for a file that cannot be read or is no reference."""
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise UsageError(f"cannot read: {error.strerror}", path, "give the JSON file of a reference") from error
        except (ValueError, RecursionError) as error:
            raise UsageError(f"is not JSON: {error}", path, "give the JSON file of a reference") from error
        if not isinstance(document, dict):
            raise UsageError(f"holds a {type(document).__name__}, not an object", path, _HINT)
        prompt, full = (_ids(document, name, path) for name in ("prompt_ids", "full_ids"))
        if full[: len(prompt)] != prompt:
            at = next((i for i, (a, b) in enumerate(zip(prompt, full, strict=False)) if a != b), len(full))
            raise UsageError(f"full_ids do not start with prompt_ids: they part at {at}", path, _HINT)
        if len(full) == len(prompt):
            raise UsageError("full_ids hold no token after the prompt", path, _HINT)
        return cls(path, prompt, full, _logits(document, path))

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.full_ids[len(self.prompt_ids) :]

    def request(self) -> Request:
        """The greedy answer of the same length."""
        from coli.session import Request

        return Request(self.prompt_ids, max_tokens=len(self.answer_ids), stop_ids=frozenset())

    def fit(self, vocab: int, ctx: int) -> None:
        """Raises UsageError when a model of `vocab` tokens and a context of `ctx` positions cannot answer it."""
        if max(self.full_ids) >= vocab:
            raise UsageError(f"token id {max(self.full_ids)} is outside the model's vocabulary of {vocab}", self.path,
                             "give the model that the reference is of")  # fmt: skip
        if self.final_logits is not None and len(self.final_logits) != vocab:
            raise UsageError(f"final_logits hold {len(self.final_logits)} numbers, the vocabulary has {vocab}",
                             self.path, "give the model that the reference is of")  # fmt: skip
        if len(self.full_ids) > ctx:
            raise UsageError(f"full_ids hold {len(self.full_ids):,} tokens, the context {ctx:,}", self.path,
                             "raise --ctx")  # fmt: skip


_HINT = "a reference has prompt_ids, full_ids and perhaps final_logits"


def _ids(document: dict[str, Any], name: str, path: Path) -> tuple[int, ...]:
    values = document.get(name)
    if not isinstance(values, list) or not values:
        raise UsageError(f"{name} must be a list of token ids", path, _HINT)
    wrong = next((at for at, value in enumerate(values) if type(value) is not int or value < 0), None)
    if wrong is not None:
        raise UsageError(f"{name}[{wrong}] is {show(repr(values[wrong]))}, not a token id", path, _HINT)
    return tuple(values)


def _logits(document: dict[str, Any], path: Path) -> Floats | None:
    values = document.get("final_logits")
    if values is None:
        return None
    if not isinstance(values, list):
        raise UsageError("final_logits must be a list of numbers", path, _HINT)
    wrong = next((at for at, value in enumerate(values) if not _is_finite(value)), None)
    if wrong is not None:
        raise UsageError(f"final_logits[{wrong}] is {show(repr(values[wrong]))}, not a finite number", path, _HINT)
    return np.asarray(values, np.float32)


def _is_finite(value: Any) -> bool:
    """Whether it is a number that float32 can hold."""
    top = float(np.finfo(np.float32).max)
    return type(value) in (int, float) and -top <= value <= top and not math.isnan(value)


# ---- comparing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """The first token that is another. `margin`: our logit of `got` minus that of `expected`."""

    position: int
    expected: int
    got: int
    margin: float


@dataclass(frozen=True)
class LogitDifference:
    """Our final logits against the reference's: absolute differences over the vocabulary."""

    largest: float
    mean: float
    argmax_equal: bool


@dataclass(frozen=True)
class Comparison:
    """`matched` of `tokens` before the first mismatch; `logits` is None where there is nothing to compare: the
    reference has none, or the text before the last token differs."""

    tokens: int
    matched: int
    mismatch: Mismatch | None
    logits: LogitDifference | None

    @property
    def same(self) -> bool:
        return self.matched == self.tokens and (self.logits is None or self.logits.argmax_equal)

    @property
    def failure(self) -> str:
        """The line that says what is not the same."""
        return self.lines()[0 if self.mismatch is not None else -1]

    def lines(self) -> list[str]:
        said = [f"{self.matched} of {self.tokens} tokens match"]
        if self.mismatch is not None:
            m = self.mismatch
            said.append(f"first mismatch at token {m.position} of the answer: expected {m.expected}, got {m.got}, "
                        f"logit margin {m.margin:.6g}")  # fmt: skip
        if self.logits is not None:
            best = "the same" if self.logits.argmax_equal else "another"
            said.append(f"final logits: largest difference {self.logits.largest:.6g}, mean {self.logits.mean:.6g}, "
                        f"{best} best token")  # fmt: skip
        return said

    def to_json(self) -> dict[str, Any]:
        return {"same": self.same, **asdict(self)}


def compare(
    reference: Reference, token_ids: Sequence[int], last_logits: Floats | None, logits_at: Callable[[int], Floats]
) -> Comparison:
    """`token_ids`: our answer, shorter when it was cancelled; `last_logits` chose its last token; `logits_at(position)`
    computes those that chose the token at a position, and is asked for a mismatch only."""
    expected = reference.answer_ids
    pairs = zip(expected, token_ids, strict=False)
    matched = next((at for at, (want, got) in enumerate(pairs) if want != got), min(len(expected), len(token_ids)))
    mismatch = None
    if matched < len(token_ids):
        logits = logits_at(matched)
        want, got = expected[matched], token_ids[matched]
        mismatch = Mismatch(matched, want, got, float(logits[got]) - float(logits[want]))
    comparable = len(token_ids) == len(expected) and matched >= len(expected) - 1
    difference = None
    if comparable and last_logits is not None and reference.final_logits is not None:
        difference = _difference(last_logits, reference.final_logits)
    return Comparison(len(expected), matched, mismatch, difference)


def _difference(ours: Floats, theirs: Floats) -> LogitDifference:
    apart = np.abs(ours.astype(np.float64) - theirs)
    return LogitDifference(float(apart.max()), float(apart.mean()), int(ours.argmax()) == int(theirs.argmax()))
