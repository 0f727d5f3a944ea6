"""A trunk ready to run: rows in, logits out, and the host's part of a step, the same for every engine.

The math is a program that an engine's `Writer` wrote. Here its inputs are filled in, it is played, and where it stops
the host acts: missing experts are read (coli/models/playing.py), an engine with more to fetch says so in `_begin` and
`_put`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coli.errors import DoesNotFit, NonFinite, UsageError
from coli.models.base import Rows as Answer
from coli.models.playing import Player
from coli.models.prefetch import Prefetch
from coli.program.builder import STEP_FIRST, STEP_POS, STEP_ROWS, STEP_UNDO
from coli.program.cache import Kernels
from coli.program.ops import Weight
from coli.recurrent import Recurrent
from coli.state import MAX_UNDOABLE, State


class Trunk:
    """The model ready to run. `limit`: rows of one program call (the prefill chunk).

    `writer` has written nothing yet: `write()` gives the program, `settle()` the one of coli/recurrent.py, `out` are
    the logits, `streams` what the draft head wants of every row. `prefetch`: "auto", "on" or "off"."""

    def __init__(
        self, writer: Any, kernels: Kernels, *, ctx: int, limit: int, undo: str, prefetch: str = "auto"
    ) -> None:
        self.geometry, self.ctx, self.limit, self.undo = writer.g, ctx, limit, undo
        self.team, self.store, self.spec = writer.team, writer.store, writer.spec
        self._writer = writer
        self._program = writer.write()
        end, more = self._program.here, prefetch != "off" and self.store.layers
        self.prefetch = Prefetch(writer, auto=prefetch == "auto") if more else None
        self._program.finish(kernels)
        self._settling = writer.settle().finish(kernels)
        self.player = Player(writer, self._put, end=end, prefetch=self.prefetch)
        self._drafts = False  # whether the rows behind the first of the step under way are guesses

    @property
    def workspace_bytes(self) -> int:
        return self._program.nbytes

    @property
    def row_bytes(self) -> np.ndarray:
        """File bytes each row of the last forward (of at most 8) was the first to need, of experts."""
        return self.player.row_bytes

    @property
    def lm_head(self) -> Weight:
        return self._writer.lm_head

    def new_state(self) -> State:
        return State(self.spec, self.ctx, undo=self.undo, settle=self._settle)

    def _settle(self, recurrent: Recurrent) -> None:
        """Play the recurrence over no rows: what stands in the log is added to S."""
        self._settling.bind(recurrent)
        self.team.play(self._settling)

    def forward(
        self, tokens: Sequence[int] | np.ndarray, state: State, want: str = "last", undoable: bool = False
    ) -> Answer:
        """Append rows to `state`; logits of the last row, or of all (`want`="all").

        Undoable forwards carry at most 8 rows; `state.keep(n)` may follow them. Of these, rows from the first that is
        not finite on are left out of the answer: plain decoding might never come to them. After an error the state is
        that of an empty sequence."""
        ids = np.asarray(tokens, np.int64)
        self._check(ids, state, undoable)
        size = MAX_UNDOABLE if want == "all" else self.limit
        answers: list[Answer] = []
        try:
            for at in range(0, len(ids), size):
                piece = ids[at : at + size]
                last = at + size >= len(ids)
                first = 0 if want == "all" else len(piece) - 1 if last else len(piece)
                answer = self._step(piece, state, first, undoable)
                if want == "all" and len(ids) > size:  # the next piece overwrites the buffers
                    answer = Answer(answer.logits.copy(), answer.streams.copy())
                answers.append(answer)
        except BaseException:
            state.reset()
            raise
        if want == "last" or len(answers) == 1:
            return answers[-1]
        return Answer(*(np.concatenate(part) for part in zip(*((a.logits, a.streams) for a in answers), strict=True)))

    def _check(self, ids: np.ndarray, state: State, undoable: bool) -> None:
        if not len(ids):
            raise UsageError("no tokens to run", "prompt", "give at least one token")
        outside = ids[(ids < 0) | (ids >= self.geometry.vocab)]
        if len(outside):
            raise UsageError(f"token id {outside[0]} is outside the vocabulary of {self.geometry.vocab}", "prompt")
        state.check_room(len(ids))
        if undoable:
            if len(ids) > MAX_UNDOABLE:
                raise ValueError(f"{len(ids)} undoable rows, at most {MAX_UNDOABLE}")
            if not state.reserve(len(ids) - 1):
                raise DoesNotFit("no memory for the undo slots of this verify", "state", "use fewer drafts")

    def _step(self, ids: np.ndarray, state: State, first: int, undoable: bool) -> Answer:
        w, program, rows = self._writer, self._program, len(ids)
        program.step[STEP_ROWS], program.step[STEP_POS] = rows, state.length
        program.step[STEP_FIRST], program.step[STEP_UNDO] = first, undoable
        w.last[STEP_ROWS] = rows - first
        w.embedding.read(ids)
        self._begin(ids, state)
        w.fill_rope(state.length, rows)
        program.bind(state)
        self._drafts = undoable and rows > 1
        self.player.play(rows, drafts=self._drafts)
        finite = self._finite(rows) if w.bad[0] else rows
        if finite < rows and not (undoable and finite):
            raise NonFinite(f"a value is not finite at position {state.length}..{state.length + rows - 1}",
                            f"layer {w.bad[0] - 1}", "the weights or this prompt overflow float32")
        state.append(ids, undoable=undoable)
        return Answer(w.out.array[: finite - first], w.streams.array[:finite])

    def _finite(self, rows: int) -> int:
        """How many leading rows hold numbers only: what is not finite stays so in the residual."""
        good = np.isfinite(self._writer.s.array[:rows]).all(axis=1)
        return rows if good.all() else int(np.argmin(good))

    def _begin(self, ids: np.ndarray, state: State) -> None:
        """Start reading what these rows will need besides experts."""

    def _put(self, op: int, rows: int) -> None:
        """The program waits at `op` for what `_begin` started."""

    def close(self) -> None:
        """Let go of what `_begin` reads with."""
