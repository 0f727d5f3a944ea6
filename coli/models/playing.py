"""Playing a program that may stop for experts: the host's part of a step, the same for the trunk and the draft head.

Where a layer waits for experts the host reads them, and asks meanwhile which ones the next layer will want
(coli/models/prefetch.py). Those that are there are computed with while the others come: n experts take the disk's time
for n and the computing of the last. Reads in the background end at any time; they count for the forward in which the
store takes them in, so that the bytes of all forwards are the bytes read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from coli.errors import ColiError
from coli.models.blocks import Blocks
from coli.models.prefetch import Prefetch
from coli.state import MAX_UNDOABLE

NEED_EXPERTS, MORE_WAVES, NEED_NGRAMS = 1, 2, 3  # kernels/dispatch.py


class Player:
    """Plays the program `blocks` wrote. `row_bytes` [8]: file bytes of experts read during the last call, shared out
    among its rows by how many missing experts each was the first to choose; `waited`: seconds it waited for experts."""

    def __init__(self, blocks: Blocks, ngrams: Callable[[int, int], None] | None = None, *, end: int | None = None,
                 prefetch: Prefetch | None = None) -> None:  # fmt: skip
        """`ngrams(op, rows)` puts n-gram rows in place where the program waits for them; `end`: the op behind those
        of a whole call, where the program goes on with others."""
        self.blocks, self.program, self.team, self.store = blocks, blocks.program, blocks.team, blocks.store
        self.row_bytes = np.zeros(MAX_UNDOABLE, np.int64)
        self.waited = 0.0
        self.prefetch = prefetch
        self.on_wait: Callable[[], object] | None = None  # called before experts are read; may shrink the store
        self._ngrams, self._end = ngrams, end
        self._first = np.zeros(MAX_UNDOABLE, np.int64)  # missing experts that this row was the first to choose
        self._asked: set[tuple[int, int]] = set()  # experts that this call waited for, by layer

    def play(self, rows: int, end: int | None = None, *, drafts: bool = False) -> None:
        """Play up to op `end` (a whole call without one) with whatever the buffers hold. Raises ReadError.

        `drafts`: rows behind the first are guesses, and an expert that only they chose may be unreadable: their values
        are not finite then, and plain decoding, which may never come to them, decides."""
        blocks, program, cut = self.blocks, self.program, self.team.cut_cell
        end = (len(program.table) if self._end is None else self._end) if end is None else end
        blocks.bad[0] = blocks.used[0] = 0
        blocks.clock[0] += 1
        misses, read = self.store.misses, self.store.bytes_read
        self._begin()
        at = self.team.play(program, 0, end)
        while at < end:
            reason, op = int(cut[0]), at - 1
            if reason == NEED_NGRAMS and self._ngrams is not None:
                self._ngrams(op, rows)
            elif reason in (NEED_EXPERTS, MORE_WAVES):
                layer, group = blocks.expert_ops[op]
                self._fetch(layer, rows, drafts)
                at = group if reason == MORE_WAVES else at
            else:
                raise ColiError(f"the program stopped at op {op} for no known reason ({reason})", "player")
            at = self.team.play(program, at, end)
        self.store.count_hits(int(blocks.used[0]) - (self.store.misses - misses))
        self._account(rows, read)

    def _begin(self) -> None:
        self._first[:], self.waited = 0, 0.0
        self._asked.clear()
        if self.prefetch is not None:
            self.prefetch.begin()
        self.store.settle()

    def _account(self, rows: int, read: int) -> None:
        """A call is over. `read`: bytes read before it."""
        clock = int(self.blocks.clock[0])
        self.store.count_uses(clock)
        if self.prefetch is not None and rows <= MAX_UNDOABLE:
            self.prefetch.judge(clock, self.waited)
        self.row_bytes[:] = 0
        if (nbytes := self.store.bytes_read - read) and rows <= MAX_UNDOABLE:
            self.row_bytes[:] = nbytes * self._first // max(1, self._first.sum())
            self.row_bytes[0] += nbytes - self.row_bytes.sum()

    def _fetch(self, layer: int, rows: int, drafts: bool) -> None:
        """Make experts of this wave resident: one at least of those still to do, while the others are read. When more
        are to do than fit together, the resident ones go first and nothing is read for them."""
        if self.on_wait is not None:
            self.on_wait()
        table = self.store.table[layer]
        needed = np.flatnonzero(self.blocks.todo)
        partly = len(needed) <= self.store.cap
        if not partly:
            if np.any(table[needed]):
                return
            needed = needed[: self.store.cap]
        absent = needed[table[needed] == 0]
        fresh = [expert for expert in absent.tolist() if (layer, expert) not in self._asked]
        self._asked.update((layer, expert) for expert in fresh)
        few = rows <= MAX_UNDOABLE
        ahead = partial(self.prefetch.ahead, layer, rows) if few and fresh and self.prefetch is not None else None
        start = perf_counter()
        try:
            self.store.ensure(layer, needed.tolist(), ahead, partly=partly)
        except ColiError:
            if not (drafts and self._go_without(layer, needed, rows)):
                raise
        self.waited += perf_counter() - start
        if few:
            chosen = self.blocks.chosen[:rows]
            for expert in fresh:
                self._first[int(np.argmax(np.any(chosen == expert, axis=1)))] += 1

    def _go_without(self, layer: int, needed: np.ndarray, rows: int) -> bool:
        """Some of `needed` could not be read: wait for all others, and see whether rows that are guesses may do
        without these."""
        try:
            self.store.ensure(layer, needed.tolist())
        except ColiError:
            return self._spoil(needed[self.store.table[layer, needed] == 0], rows)
        return True

    def _spoil(self, unreadable: np.ndarray, rows: int) -> bool:
        """Let rows that chose an expert which cannot be read go through another one, with a weight that is no number;
        False where the first row is among them."""
        blocks = self.blocks
        hit = np.isin(blocks.chosen[:rows], unreadable)
        if hit[0].any():
            return False
        instead = blocks.chosen[0, 0]
        blocks.chosen[:rows][hit], blocks.share[:rows][hit] = instead, np.nan
        blocks.todo[unreadable] = 0
        blocks.todo[instead] = np.count_nonzero(blocks.chosen[:rows] == instead)  # `group` takes all pairs or none
        return True
