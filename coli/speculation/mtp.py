"""Drafts from the model's own head (spec_decoding.md section 3): what it is fed, how it drafts, when it stops.

The head follows the trunk row by row: `note` hands it the streams of every row that stands, and it settles them when it
next drafts. A draft is the head's best token, with the head's own estimate that it is right.

A head that cannot go on (rows were skipped, an expert cannot be read, a value is not finite) stops for this sequence
and says so once in `warning`; the answer goes on without drafts of its. Guarded by tests/speculation/test_head.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from coli.errors import ColiError
from coli.state import State

# Rows that wait, above which they come from plain steps: settling them is the price of having a head at all, not of the
# next draft. Were it in the draft's, a gate that has declined for a while would never find drafting worth it again.
MANY = 8


class Head(Protocol):
    """A draft head of a model (coli/models/head.py). `draft` and `deeper` give (token, probability); `wiring` is "" for
    a head that has no choice of one."""

    wiring: str

    @property
    def bytes_read(self) -> int: ...
    def new_state(self) -> Any: ...
    def note(self, head: Any, trunk: State, streams: np.ndarray) -> None: ...
    def absorb(self, head: Any, trunk: State) -> None: ...
    def draft(self, head: Any, trunk: State, pick: int) -> tuple[int, float]: ...
    def deeper(self, head: Any, token: int, depth: int) -> tuple[int, float]: ...


@dataclass(frozen=True)
class Written:
    """Drafts with the head's estimates; seconds of catching up with plain steps, then until the first draft was there,
    then of those behind it together."""

    tokens: list[int]
    p: list[float]
    behind_s: float
    first_s: float
    deeper_s: float
    bytes: int  # read for the head's experts


@dataclass(frozen=True)
class HeadPlace:
    """Where a head stood: its own snapshot, and why it had stopped, if it had."""

    state: Any
    warning: str | None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class MtpSource:
    """The head's side of one sequence."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.state = head.new_state()
        self.warning: str | None = None  # why it stopped

    def reset(self) -> None:
        self.state.reset()
        self.warning = None

    def copy(self) -> HeadPlace:
        return HeadPlace(self.state.copy(), self.warning)

    def load(self, place: HeadPlace) -> None:
        self.state.load(place.state)
        self.warning = place.warning

    def note(self, trunk: State, streams: np.ndarray) -> None:
        """The trunk's last rows stand; these are their streams."""
        self._guarded(lambda: self._head.note(self.state, trunk, streams))

    def absorb(self, trunk: State) -> None:
        """Settle what can be, so that equal sequences have equal bytes."""
        self._guarded(lambda: self._head.absorb(self.state, trunk))

    def write(
        self, trunk: State, pick: int, count: int, *, forced: Sequence[int] | None = None,
        more: Callable[[list[float]], bool] | None = None,
    ) -> Written | None:  # fmt: skip
        """Up to `count` >= 1 drafts to follow `pick`; None when the head has stopped. `forced`: what the drafts must be
        whatever the head says; `more(p)` is asked before each draft behind the first."""
        return self._guarded(lambda: self._write(trunk, pick, count, forced, more))

    def _write(self, trunk: State, pick: int, count: int, forced: Sequence[int] | None,
               more: Callable[[list[float]], bool] | None) -> Written:  # fmt: skip
        begun, read = time.perf_counter(), self._head.bytes_read
        if self.state.waiting > MANY:
            self._head.absorb(self.state, trunk)
        start = time.perf_counter()
        token, p = self._head.draft(self.state, trunk, pick)
        first = time.perf_counter()
        tokens, estimates = [token if forced is None else forced[0]], [p]
        while len(tokens) < count and (more is None or more(estimates)):
            token, p = self._head.deeper(self.state, tokens[-1], len(tokens))
            tokens.append(token if forced is None else forced[len(tokens)])
            estimates.append(p)
        return Written(
            tokens, estimates, start - begun, first - start, time.perf_counter() - first, self._head.bytes_read - read
        )

    def _guarded(self, work: Callable[[], Any]) -> Any:
        if self.warning is not None:
            return None
        try:
            return work()
        except ColiError as error:
            self.warning = f"the draft head stopped: {error}"
        return None
