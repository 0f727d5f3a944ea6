"""What a sequence keeps so that the next prompt need not be read again: exact checkpoints of its state.

K/V and index keys rewind by their length. The recurrent state does not: it can only be put back where it was copied.
So a checkpoint is a `Place` (S, conv rings, n-gram window, the draft head's state and its waiting rows) with the logits
after it, and a prompt is continued from the deepest checkpoint whose tokens it begins with. Nothing is guessed: where
the prompt parts from the tokens of a checkpoint, that one is no use, and a shorter one is.

Where checkpoints are made (coli/session.py): at the end of the prompt, at the end of the answer, and at the prompt's
`marks`, where later prompts are likely to part from it: behind the system message, and where the template stops
rendering the history as it will next time (templates drop earlier thinking).

A checkpoint's rows of K/V stay where they are, shared with all that came after. It is valid only while they hold:
`written` is told of every row before it is written and drops the checkpoints whose rows become others. A prompt that
writes the very same tokens leaves the same bytes (a row does not depend on the chunk it came in), so those stand;
drafts never do. Hence a checkpoint that is there is right, pinned or not (complaint row 36).

Memory: `budget` bytes. The least recently used goes first; after the others the latest that other conversations begin
with (`shared`), pins last. Of pins at most `pins` are kept, the most recently used ones. Guarded by
tests/speculation/test_prefix.py: any history of requests gives the states of cold runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coli.speculation.decoder import Place


@dataclass(eq=False)
class Checkpoint:
    """A place with the logits that came out of it [vocab]."""

    place: Place
    logits: np.ndarray
    pinned: bool = False
    shared: bool = False
    used: int = 0  # when, by the clock of its `Prefixes`

    @property
    def length(self) -> int:
        return self.place.trunk.length

    @property
    def tokens(self) -> np.ndarray:
        return self.place.trunk.tokens

    @property
    def nbytes(self) -> int:
        return self.place.nbytes + self.logits.nbytes


class Prefixes:
    """The checkpoints of one sequence."""

    def __init__(self, budget: int, pins: int) -> None:
        self.budget, self.pins = budget, pins
        self.kept: list[Checkpoint] = []
        self._clock = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.kept)

    @property
    def pinned(self) -> int:
        return sum(one.pinned for one in self.kept)

    def find(self, prompt: Sequence[int] | np.ndarray) -> Checkpoint | None:
        """The deepest that `prompt` begins with."""
        ids = np.asarray(prompt, np.int64)
        fitting = [one for one in self.kept
                   if one.length <= len(ids) and np.array_equal(one.tokens, ids[: one.length])]  # fmt: skip
        return max(fitting, key=lambda one: one.length, default=None)

    def at(self, prompt: np.ndarray, length: int) -> Checkpoint | None:
        """The checkpoint of exactly the first `length` tokens."""
        found = self.find(prompt[:length])
        return found if found is not None and found.length == length else None

    def use(self, one: Checkpoint, *, pin: bool = False, share: bool = False) -> None:
        """It was of use just now; `pin` and `share` make it stay longer."""
        self._clock += 1
        one.used, one.pinned = self._clock, one.pinned or (pin and self.pins > 0)
        if share:
            for other in self.kept:
                other.shared = other is one
        self._make_room()

    def keep(self, one: Checkpoint, *, pin: bool = False, share: bool = False) -> None:
        """Add one made where the sequence stands now; one that is there at this length gives it its place and rank."""
        for other in self.kept:
            if other.length == one.length:
                one.pinned, one.shared = other.pinned, other.shared
        self.kept = [other for other in self.kept if other.length != one.length] + [one]
        self.use(one, pin=pin, share=share)

    def written(self, first: int, tokens: Sequence[int], stand: bool) -> None:
        """Rows from `first` on are about to be overwritten with `tokens`; `stand`: these are no drafts."""
        ids = np.asarray(tokens, np.int64)
        self.kept = [one for one in self.kept if one.length <= first or (stand and _same(one, first, ids))]

    def _make_room(self) -> None:
        pins = sorted((one for one in self.kept if one.pinned), key=lambda one: one.used)
        for one in pins[: max(0, len(pins) - self.pins)]:
            one.pinned = False
        while self.kept and self.nbytes > self.budget:
            self.kept.remove(min(self.kept, key=lambda one: (one.pinned, one.shared, one.used)))


def _same(one: Checkpoint, first: int, ids: np.ndarray) -> bool:
    """Whether the rows from `first` on become what they are. Those before are the sequence's own as they are."""
    mine = one.tokens[first : first + len(ids)]
    return np.array_equal(mine, ids[: len(mine)])
