"""The multi-token-prediction head of Qwen3.8 (`mtp.*`): one trunk-style layer that drafts the token after next.

Row p of the head joins the trunk's four streams at position p with the token at p+1 and scores the token at p+2:

    x_j = fc_embedding(rms1(E[t_{p+1}])) + fc_hidden(norm(s_p)_j)      a sum, for each stream j
    x   = site(QSA attention), site(MoE), own final mixer, the trunk's lm_head            (model_spec.md 5c)

`wiring` is the one doubt about the norm of s_p: "b" has one statistic a stream, "a" one over all four. It can change
what is accepted, never what is emitted.

*Two parts, one program.* The first part takes n settled pairs as far as K, V and index keys, which is all a row that
nothing is drafted from needs (the head has one layer). The second runs attention, experts and scores for the last row
alone. `absorb` plays the first part, `draft` both: the last settled row is the first draft's, so its K and V stay.

*State.* Pairs wait in `HeadState.pending` until a draft is asked for or the buffer is full, so a step without a draft
costs a copy of one row. Row p is settled when the token at p+1 is in the trunk's state; deeper drafts write their rows
behind the settled ones, a tail that settled pairs overwrite. Invariant: after `absorb` the head's bytes are those of a
head that was fed pair by pair (tests/speculation/test_head.py, which also compares with the oracle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from coli.errors import ColiError, NonFinite
from coli.experts import ExpertStore, expert_record, stored_kind
from coli.formats.checkpoint import Checkpoint
from coli.models.base import Embedding, Weights
from coli.models.playing import Player
from coli.models.qwen38_blocks import Blocks, row_floats, scratch_floats
from coli.models.qwen38_geometry import Geometry
from coli.models.qwen38_layout import HEAD, check_head, head_bytes, head_rope_theta
from coli.program.builder import STEP_FIRST, STEP_POS, STEP_ROWS, Program, Rows
from coli.program.cache import Kernels
from coli.program.cpu import Team
from coli.program.ops import Input, Weight, best_score, linear, linears, listed, rms_group
from coli.state import Snapshot, State, StateSpec

LIMIT = 32  # pairs taken at once, and the most that wait


def head_spec(g: Geometry) -> StateSpec:
    """K, V and index keys of one attention layer."""
    return StateSpec(
        attention_layers=1, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=g.index_dim, index_ratio=g.index_ratio,
        recurrent_layers=0, recurrent_width=0, rings=(),
    )


def head_workspace_bytes(g: Geometry, *, ctx: int, threads: int) -> int:
    """Bytes of the head's buffers and of one state's waiting pairs, computed ahead."""
    limit = min(LIMIT, ctx)
    row = row_floats(g, ctx) + 3 * g.width + 3 * g.hidden + 2 * g.streams + 12
    final = 2 * g.width + g.hc_lowrank + g.hidden + g.vocab
    return 4 * (limit * row + final + threads * scratch_floats(g, ctx)) + 32 * g.experts


@dataclass(frozen=True)
class HeadPlan:
    """What the head will need, known before anything of it is allocated. Bytes; `slot`: one expert's."""

    dense: int
    kv: int
    workspace: int
    kind: str
    slot: int
    theta: float

    @property
    def nbytes(self) -> int:
        """All but the experts."""
        return self.dense + self.kv + self.workspace


def plan_head(checkpoint: Checkpoint, g: Geometry, *, ctx: int, threads: int, trunk_int8: bool) -> HeadPlan:
    """Check the head's tensors and size it. Raises ModelError for a checkpoint without a sound one."""
    check_head(checkpoint, g)
    kind, block = stored_kind(checkpoint, g, HEAD)
    return HeadPlan(
        dense=head_bytes(checkpoint, trunk_int8=trunk_int8), kv=ctx * head_spec(g).kv_bytes_per_token(),
        workspace=head_workspace_bytes(g, ctx=ctx, threads=threads), kind=kind,
        slot=expert_record(kind, g, block).nbytes,
        theta=head_rope_theta(checkpoint.config, g, checkpoint.folder / "config.json"),
    )


@dataclass(frozen=True)
class HeadSnapshot:
    """A head's place in a sequence; K, V and index keys stay where they are until overwritten."""

    kv: Snapshot
    pending: np.ndarray


class HeadState:
    """What the head keeps of one sequence: `kv` (rows settled so far: `kv.length`) and the streams that wait."""

    def __init__(self, spec: StateSpec, ctx: int, width: int) -> None:
        self.kv = State(spec, ctx)
        self.pending = np.zeros((min(LIMIT, ctx), width), np.float32)
        self.waiting = 0

    @property
    def end(self) -> int:
        """Position of the first row whose streams were not noted yet."""
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


class _Writer(Blocks):
    """Writes the head's program. `settled` is the op where its first part ends."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, wiring: str,
                 theta: float) -> None:
        limit = min(LIMIT, ctx)
        p = Program(limit)
        super().__init__(p, p.step, limit, g, weights, store, team, ctx, theta)
        self.rope_draft = p.buffer(g.index_ratio, 2, g.rotary_dim // 2)  # its last row: the angles of the draft's row
        self.one = p.buffer(8, dtype=np.int64)  # step block of the second part
        self.each = p.buffer(8, dtype=np.int64)  # step block that counts every stream as a row
        self.embedding = Embedding(weights.checkpoint, limit)
        self.source = self.rows(g.width)  # streams of the pairs
        self._pairs(wiring)
        self.remember(f"{HEAD}self_attn.", 0, 0)
        self.settled = p.here
        self._last_row()

    def _pairs(self, wiring: str) -> None:
        """Embedding and streams -> s, and into the attention's site."""
        g, p, w = self.g, self.program, self.w
        embedded, e, normed = self.rows(g.hidden), self.rows(g.hidden), self.rows(g.width)
        ids = np.arange(self.limit)
        p.op("embed", p.step, ids, self.embedding.rows, self.embedding.kind, embedded.array, embedded.ld, g.hidden, 1,
             barrier=False)
        group = g.hidden if wiring == "b" else g.width
        rms_group(p, self.source, w.norm("mtp.pre_fc_norm_hidden.weight"), normed, group, g.eps)
        rms_group(p, embedded, w.norm("mtp.pre_fc_norm_embedding.weight"), embedded, g.hidden, g.eps)
        linear(p, Input(embedded, g.hidden), w.matrix("mtp.fc_embedding.weight"), e, barrier=False)
        linear(p, Input(self._by_stream(normed), g.hidden), w.matrix("mtp.fc_hidden.weight"), self._by_stream(self.s),
               step=self.each)
        even = p.buffer(self.limit, g.streams)  # a gate of 2 sigmoid(0) = 1: every stream gets e as it is
        p.op("stream_inject", p.step, self.s.array, self.s.ld, e.array, e.ld, even, g.streams, g.hidden, g.streams,
             self.bad, 0)
        self.enter(f"{HEAD}attn_hyper_connection.")
        name = f"{HEAD}self_attn."
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(name + "k_proj.weight"), self.k), (w.matrix(name + "v_proj.weight"), self.v),
            (w.matrix(name + "indexer.index_qk_proj.weight"), self.qk),
        ])

    def _by_stream(self, rows: Rows) -> Rows:
        return self.program.view(rows.array.reshape(-1, self.g.hidden))

    def _last_row(self) -> None:
        """The last pair's row moves to the front and is all that is left of the layer."""
        g, p, w = self.g, self.program, self.w
        moved = (self.s, self.x, self.inject, self.qk)
        for i, rows in enumerate(moved):
            p.op("copy_rows", p.step, rows.array, rows.ld, rows.array, rows.ld, rows.array.shape[1],
                 barrier=i == len(moved) - 1)
        self.step, self.rope, name = self.one, self.rope_draft, f"{HEAD}self_attn."
        linear(p, Input(self.x, g.hidden), w.matrix(name + "q_proj.weight"), self.q, step=self.one)
        self.attention_prep(name, 0, g.heads, 0)
        self.attend(name, 0)
        self.leave(0)
        self.enter(f"{HEAD}mlp_hyper_connection.")
        self.moe(f"{HEAD}mlp.", 0)
        self.leave(0)
        self.mixed = self.final("mtp.hyper_connection_mixer.", self.s, self.one, 1)


class Qwen38Head:
    """The draft head of an open model."""

    def __init__(self, g: Geometry, weights: Weights, lm_head: Weight, store: ExpertStore, kernels: Kernels, team: Team,
                 *, ctx: int, wiring: str, theta: float, vocabulary: Vocabulary | None = None,
                 dump: BinaryIO | None = None) -> None:
        """`vocabulary`: the tokens to score, all without one; `dump`: where every draft's scores go as raw float32."""
        self.geometry, self.ctx, self.wiring, self.store = g, ctx, wiring, store
        self._writer = w = _Writer(g, weights, store, team, ctx, wiring, theta)
        self.spec = head_spec(g)
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
        return HeadState(self.spec, self.ctx, self.geometry.width)

    def note(self, head: HeadState, trunk: State, streams: np.ndarray) -> None:
        """Streams [n, width] of the trunk's last rows, which end at `trunk.length`. Raises ReadError.

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
        head's own streams. Its row is a tail: nothing is settled. Raises ReadError, NonFinite."""
        w = self._writer
        self._run(head, w.s.array[:1], np.array([token]), head.kv.length + depth - 1, None)
        return self._answer()

    def _answer(self) -> tuple[int, float]:
        if self._dump is not None:
            try:
                self._dump.write(self.scores.tobytes())
            except OSError as error:
                raise ColiError(f"cannot write {self._dump.name}: {error.strerror}", "Q38_MTP_DUMP") from error
        return int(self._best.token[0]), float(self._best.p[0])

    def _run(self, head: HeadState, streams: np.ndarray, tokens: np.ndarray, start: int, end: int | None) -> None:
        w, rows, step, last = self._writer, len(tokens), self._writer.program.step, start + len(tokens) - 1
        if self._vocabulary is not None:
            self._count[0] = self._vocabulary.count
        w.source.array[:rows] = streams
        w.embedding.read(tokens)
        step[STEP_ROWS], step[STEP_POS], step[STEP_FIRST] = rows, start, rows - 1
        w.each[STEP_ROWS] = rows * self.geometry.streams
        w.one[STEP_POS] = last
        w.fill_rope(start, rows)
        off = self.geometry.index_ratio - 1
        w.rope_draft[off] = w.angles[rows + off - 1]
        w.program.bind(head.kv)
        self._player.play(rows, end)
        if w.bad[0]:
            raise NonFinite(f"a value is not finite at position {start}..{last}", "mtp.layers.0",
                            "--no-mtp leaves the head out")  # fmt: skip
