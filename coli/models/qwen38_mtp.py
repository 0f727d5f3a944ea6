"""The draft head of Qwen3.8 (`mtp.*`) as a program; coli/models/head.py says what a head is.

    x_j = fc_embedding(rms1(E[t_{p+1}])) + fc_hidden(norm(s_p)_j)      a sum, for each stream j of the trunk's row p
    x   = site(QSA attention), site(MoE), own final mixer, the trunk's lm_head            (model_spec.md 5c)

`wiring` is the one doubt about the norm of s_p: "b" has one statistic a stream, "a" one over all four. It can change
what is accepted, never what is emitted.
"""

from __future__ import annotations

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Embedding, Weights
from coli.models.blocks import code_bytes
from coli.models.head import LIMIT
from coli.models.layout import HEAD
from coli.models.qwen38_blocks import Qwen38Blocks, row_floats, scratch_floats
from coli.models.qwen38_geometry import Geometry
from coli.program.builder import STEP_ROWS, Program, Rows
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group
from coli.state import StateSpec


def head_spec(g: Geometry) -> StateSpec:
    """K, V and index keys of one attention layer."""
    return StateSpec(
        attention_layers=1, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=g.index_dim, index_ratio=g.index_ratio,
        recurrent_layers=0, recurrent_width=0, rings=(),
    )


def head_workspace_bytes(g: Geometry, *, ctx: int, threads: int, codes: int) -> int:
    """Bytes of the head's buffers and of one state's waiting pairs, computed ahead; `codes`: kinds of int8 codes."""
    limit = min(LIMIT, ctx)
    row = row_floats(g, ctx) + 3 * g.width + 3 * g.hidden + 2 * g.streams + 12
    final = 2 * g.width + g.hc_lowrank + g.hidden + g.vocab
    return 4 * (limit * row + final + threads * scratch_floats(g, ctx)) + 32 * g.experts + codes * code_bytes(g, limit)


class HeadWriter(Qwen38Blocks):
    """Writes the head's program, all but the scores (coli/models/head.py)."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, wiring: str,
                 theta: float) -> None:
        limit = min(LIMIT, ctx)
        p = Program(limit)
        super().__init__(p, p.step, limit, g, weights, store, team, ctx, theta)
        self.rope_draft = p.buffer(g.index_ratio, 2, g.rotary_dim // 2)  # its last row: the angles of the draft's row
        self.one = p.buffer(8, dtype=np.int64)  # step block of the second part
        self.each = p.buffer(8, dtype=np.int64)  # step block that counts every stream as a row
        self.embedding = Embedding(weights.checkpoint, limit)
        self.source, self.own = self.rows(g.width), self.s
        self._pairs(wiring)
        self.remember(f"{HEAD}self_attn.", 0, 0)
        self.settled = p.here
        self._last_row()

    def begin(self, rows: int) -> None:
        self.each[STEP_ROWS] = rows * self.g.streams

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
        products = [(w.matrix(name + "k_proj.weight"), self.k), (w.matrix(name + "v_proj.weight"), self.v)]
        linears(p, Input(self.x, g.hidden), products + self.index_products(name))

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
