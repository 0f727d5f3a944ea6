"""A multi-token-prediction head: one layer that drafts the token after next. What the heads of all engines share.

Row p of a head joins what the trunk left at position p (`streams`: qwen38's four residual streams, qwen36's row behind
the final norm) with the token at p+1, and scores the token at p+2. Deeper drafts take the head's own row instead of the
trunk's.

*Two parts, one program.* The first part takes n settled pairs as far as K and V (and index keys), which is all a row
that nothing is drafted from needs (the head has one layer). The second runs attention, MLP and scores for the last row
alone. `absorb` plays the first part, `draft` both: the last settled row is the first draft's, so its K and V stay.

*State.* Pairs wait in `HeadState.pending` until a draft is asked for or the buffer is full, so a step without a draft
costs a copy of one row. Row p is settled when the token at p+1 is in the trunk's state; deeper drafts write their rows
behind the settled ones, a tail that settled pairs overwrite. Invariant: after `absorb` the head's bytes are those of a
head that was fed pair by pair (tests/speculation/test_head.py, which also compares with the oracle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np

from coli.errors import ColiError, NonFinite
from coli.models.playing import Player
from coli.program.builder import STEP_FIRST, STEP_POS, STEP_ROWS
from coli.program.cache import Kernels
from coli.program.ops import Input, Weight, best_score, linear, listed
from coli.state import Snapshot, State, StateSpec

LIMIT = 32  # pairs taken at once, and the most that wait


@dataclass(frozen=True)
class HeadSnapshot:
    """A head's place in a sequence; K, V and index keys stay where they are until overwritten."""

    kv: Snapshot
    pending: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.pending.nbytes


class HeadState:
    """What the head keeps of one sequence: `kv` (rows settled so far: `kv.length`) and the rows that wait."""

    def __init__(self, spec: StateSpec, ctx: int, width: int) -> None:
        self.kv = State(spec, ctx)
        self.pending = np.zeros((min(LIMIT, ctx), width), np.float32)
        self.waiting = 0

    @property
    def end(self) -> int:
        """Position of the first row that was not noted yet."""
        return self.kv.length + self.waiting

    def reset(self) -> None:
        self.kv.reset()
        self.waiting = 0

    def copy(self) -> HeadSnapshot:
        return HeadSnapshot(self.kv.copy(), self.pending[: self.waiting].copy())

    def load(self, snapshot: HeadSnapshot) -> None:
        self.kv.load(snapshot.kv)
        self.waiting = len(snapshot.pending)
        self.pending[: self.waiting] = snapshot.pending


class Vocabulary(Protocol):
    """The tokens worth scoring: the first `count` of `ids`, whose address never changes (speculation/vocabulary.py)."""

    ids: np.ndarray
    count: int


class DraftHead:
    """The draft head of an open model.

    `writer` has written both parts but the scores: `settled` is the op where the first part ends, `mixed` the row that
    lm_head multiplies, `source` takes the trunk's rows and `own` holds the head's own row, `one` is the step block of
    the second part and `rope_draft` its angles, `begin(rows)` sets what else a call needs."""

    def __init__(self, writer: Any, spec: StateSpec, lm_head: Weight, kernels: Kernels, *,
                 wiring: str = "", vocabulary: Vocabulary | None = None, dump: BinaryIO | None = None,
                 dump_name: str = "") -> None:  # fmt: skip
        """`vocabulary`: the tokens to score, all without one; `dump`: where every draft's scores go as raw float32,
        `dump_name`: who asked for that."""
        g = writer.g
        self.geometry, self.ctx, self.wiring, self.store, self.spec = g, writer.ctx, wiring, writer.store, spec
        self._writer, self._dump_name = writer, dump_name
        w = writer
        p = w.program
        self._scores, self._vocabulary, self._dump = p.view(p.buffer(1, g.vocab)), vocabulary, dump
        self._count = p.buffer(1, dtype=np.int64)
        self._count[0] = g.vocab
        if vocabulary is None:
            linear(p, Input(w.mixed, g.hidden), lm_head, self._scores, step=w.one)
        else:
            listed(p, Input(w.mixed, g.hidden), lm_head, self._scores, vocabulary.ids, self._count, step=w.one)
        self._best = best_score(p, self._scores.array, self._count, None if vocabulary is None else vocabulary.ids)
        p.finish(kernels)
        self._player = Player(w)
        w.one[STEP_ROWS] = 1

    @property
    def workspace_bytes(self) -> int:
        return self._writer.program.nbytes

    @property
    def bytes_read(self) -> int:
        """File bytes of the head's experts, since it was opened."""
        return self.store.bytes_read

    @property
    def scores(self) -> np.ndarray:
        """float32 [tokens scored] of the last draft, overwritten by the next."""
        return self._scores.array[0, : self._count[0]]

    def new_state(self) -> HeadState:
        return HeadState(self.spec, self.ctx, self._writer.source.array.shape[1])

    def note(self, head: HeadState, trunk: State, streams: np.ndarray) -> None:
        """Rows [n, width] that the trunk left, which end at `trunk.length`. Raises ReadError.

        A row that does not follow the one noted before is an error: the head has lost the sequence."""
        self._check(head, trunk.length - len(streams))
        at = 0
        while at < len(streams):
            if head.waiting == len(head.pending):
                self._absorb(head, trunk, head.waiting)
            taken = min(len(streams) - at, len(head.pending) - head.waiting)
            head.pending[head.waiting : head.waiting + taken] = streams[at : at + taken]
            head.waiting += taken
            at += taken

    def _check(self, head: HeadState, position: int) -> None:
        if position != head.end:
            raise ColiError(f"rows from position {position} on, it had come to {head.end}", "mtp")

    def absorb(self, head: HeadState, trunk: State) -> None:
        """Settle every pair whose token is known: all but the last row's. Raises ReadError."""
        if head.waiting > 1:
            self._absorb(head, trunk, head.waiting - 1)

    def _absorb(self, head: HeadState, trunk: State, count: int) -> None:
        start = head.kv.length
        tokens = trunk.tokens[start + 1 : start + 1 + count]
        self._run(head, head.pending[:count], tokens, start, self._writer.settled)
        head.kv.append(tokens, undoable=False)
        rest = head.waiting - count
        head.pending[:rest] = head.pending[count : head.waiting].copy()
        head.waiting = rest

    def draft(self, head: HeadState, trunk: State, pick: int) -> tuple[int, float]:
        """(token, probability) expected after `pick`, which follows the trunk's last row; settles every waiting pair.

        Raises ReadError, NonFinite, and as `note` where rows were skipped."""
        self._check(head, trunk.length)
        count, start = head.waiting, head.kv.length
        tokens = np.append(trunk.tokens[start + 1 : start + count], pick)
        self._run(head, head.pending[:count], tokens, start, None)
        head.kv.append(tokens, undoable=False)
        head.waiting = 0
        return self._answer()

    def deeper(self, head: HeadState, token: int, depth: int) -> tuple[int, float]:
        """(token, probability) expected after `token`, the `depth`-th draft since `draft` (1 for the first), from the
        head's own row. Its row is a tail: nothing is settled. Raises ReadError, NonFinite."""
        self._run(head, self._writer.own.array[:1], np.array([token]), head.kv.length + depth - 1, None)
        return self._answer()

    def _answer(self) -> tuple[int, float]:
        if self._dump is not None:
            try:
                self._dump.write(self.scores.tobytes())
            except OSError as error:
                raise ColiError(f"cannot write {self._dump.name}: {error.strerror}", self._dump_name) from error
        return int(self._best.token[0]), float(self._best.p[0])

    def _run(self, head: HeadState, streams: np.ndarray, tokens: np.ndarray, start: int, end: int | None) -> None:
        w, rows, step, last = self._writer, len(tokens), self._writer.program.step, start + len(tokens) - 1
        if self._vocabulary is not None:
            self._count[0] = self._vocabulary.count
        w.source.array[:rows] = streams
        w.embedding.read(tokens)
        step[STEP_ROWS], step[STEP_POS], step[STEP_FIRST] = rows, start, rows - 1
        w.one[STEP_POS] = last
        w.begin(rows)
        w.fill_rope(start, rows)
        w.rope_draft[w.behind] = w.angles[rows + w.behind - 1]
        w.program.bind(head.kv)
        self._player.play(rows, end)
        if w.bad[0]:
            raise NonFinite(f"a value is not finite at position {start}..{last}", "mtp.layers.0",
                            "--no-mtp leaves the head out")  # fmt: skip
