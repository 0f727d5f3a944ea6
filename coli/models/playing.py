"""Playing a program that may stop for experts: the host's part of a step, the same for the trunk and the draft head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coli.errors import ColiError
from coli.models.qwen38_blocks import Blocks
from coli.state import MAX_UNDOABLE

NEED_EXPERTS, MORE_WAVES, NEED_NGRAMS = 1, 2, 3  # kernels/dispatch.py


class Player:
    """Plays the program `blocks` wrote. `row_bytes` [8]: file bytes of the experts that were read because this row of
    the last call was the first to choose them."""

    def __init__(self, blocks: Blocks, ngrams: Callable[[int, int], None] | None = None) -> None:
        """`ngrams(op, rows)` puts n-gram rows in place where the program waits for them."""
        self.blocks, self.program, self.team, self.store = blocks, blocks.program, blocks.team, blocks.store
        self.row_bytes = np.zeros(MAX_UNDOABLE, np.int64)
        self._ngrams = ngrams

    def play(self, rows: int, end: int | None = None, *, drafts: bool = False) -> None:
        """Play up to op `end` (all without one) with whatever the buffers hold. Raises ReadError.

        `drafts`: rows behind the first are guesses, and an expert that only they chose may be unreadable: their values
        are not finite then, and plain decoding, which may never come to them, decides."""
        blocks, program, cut = self.blocks, self.program, self.team.cut_cell
        end = len(program.table) if end is None else end
        blocks.bad[0] = blocks.used[0] = 0
        blocks.clock[0] += 1
        self.row_bytes[:] = 0
        misses = self.store.misses
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

    def _fetch(self, layer: int, rows: int, drafts: bool) -> None:
        """Make this wave's experts resident: all that are still to do, or as many as the cache holds. When those do
        not fit together, the resident ones go first and nothing is read for them."""
        table = self.store.table[layer]
        needed = np.flatnonzero(self.blocks.todo)
        if len(needed) > self.store.cap:
            if np.any(table[needed]):
                return
            needed = needed[: self.store.cap]
        absent, before = needed[table[needed] == 0], self.store.bytes_read
        try:
            self.store.ensure(layer, needed.tolist())
        except ColiError:
            if not (drafts and self._spoil(absent[table[absent] == 0], rows)):
                raise
        if rows <= MAX_UNDOABLE:
            chosen = self.blocks.chosen[:rows]
            for expert in absent.tolist():
                row = int(np.argmax(np.any(chosen == expert, axis=1)))
                self.row_bytes[row] += (self.store.bytes_read - before) // len(absent)

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
