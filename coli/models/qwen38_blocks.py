"""The blocks of a Qwen3.8 layer as ops: the gated residual site, and QSA attention with its indexer.

The trunk (coli/models/qwen38_program.py) and the draft head (coli/models/qwen38_mtp.py) are both written with these.
Formulas: model_spec.md sections 1 and 5b; comments name the part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Weights
from coli.models.blocks import Blocks, moe_floats
from coli.models.qwen38_geometry import Geometry
from coli.program.builder import Program, Rows
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group


def scratch_floats(g: Geometry, ctx: int) -> int:
    """Attention scores of one thread: four heads by the most rows a token attends."""
    return (4 * min(ctx, (g.index_blocks + 1) * g.index_ratio) + 15) // 16 * 16


def row_floats(g: Geometry, ctx: int) -> int:
    """4-byte cells a `Qwen38Blocks` keeps for each of its rows, apart from prepared rows."""
    blocks = ctx // g.index_ratio + 1
    return (
        3 * g.width + g.hc_lowrank + g.streams + 2 * g.hidden + 3 * g.heads * g.head_dim + 2 * g.kv_heads * g.head_dim
        + (g.index_heads + 1) * g.index_dim + (blocks + g.index_blocks if blocks > g.index_blocks else 2)
        + g.rotary_dim + moe_floats(g) + 30
    )  # fmt: skip


class Qwen38Blocks(Blocks):
    """Writes the blocks of Qwen3.8 layers into `program`; all layers share its buffers."""

    g: Geometry

    def __init__(self, program: Program, step: np.ndarray, limit: int, g: Geometry, weights: Weights,
                 store: ExpertStore, team: Team, ctx: int, theta: float) -> None:
        super().__init__(program, step, limit, g, weights, store, team, ctx, theta, behind=g.index_ratio - 1)
        self.n, self.m = self.rows(g.width), self.rows(g.width)
        self.low, self.inject = self.rows(g.hc_lowrank), self.rows(g.streams)
        self._index_buffers()

    @property
    def scratch_floats(self) -> int:
        return scratch_floats(self.g, self.ctx)

    def _index_buffers(self) -> None:
        g, p = self.g, self.program
        self.qk = self.rows((g.index_heads + 1) * g.index_dim)
        blocks = self.ctx // g.index_ratio + 1
        self.picking = blocks > g.index_blocks  # else every row attends all rows, and nothing is written here
        self.scores = p.buffer(self.limit, blocks if self.picking else 1)
        self.picks = p.buffer(self.limit, g.index_blocks if self.picking else 1, dtype=np.int32)

    # ---- gated residual streams (5b, Site)
    def enter(self, prefix: str) -> None:
        """Streams -> block input x (already normed) and injection weights."""
        g, p = self.g, self.program
        rms_group(p, self.s, self.w.norm(prefix + "hc_norm.weight"), self.n, g.hidden, g.eps, step=self.step)
        normed = Input(self.n, g.width)
        self.narrow(prefix, normed, self.low, self.step, barrier=False)
        linear(p, normed, self.w.matrix(prefix + "block_inject_weight.weight"), self.inject, step=self.step)
        self.mix(prefix, self.n, self.low, self.m, self.x, self.step)

    def look(self, layer: str, x: Rows) -> None:
        g, prefix = self.g, f"{layer}mlp_hyper_connection."
        rms_group(self.program, self.s, self.w.norm(prefix + "hc_norm.weight"), self.n, g.hidden, g.eps, step=self.step)
        self.narrow(prefix, Input(self.n, g.width), self.low, self.step)
        self.mix(prefix, self.n, self.low, self.m, x, self.step)

    def narrow(self, prefix: str, normed: Input, low: Rows, step: np.ndarray, *, barrier: bool = True) -> None:
        g, p = self.g, self.program
        weight = self.w.matrix(prefix + "input_mix_weight_down.weight")
        linear(p, normed, weight, low, step=step, barrier=False)
        p.op("silu_scaled", step, low.array, low.ld, g.hc_lowrank, 1.0 / g.streams, barrier=barrier)

    def mix(self, prefix: str, n: Rows, low: Rows, m: Rows, x: Rows, step: np.ndarray) -> None:
        g, p = self.g, self.program
        linear(p, Input(low, g.hc_lowrank), self.w.matrix(prefix + "input_mix_weight_up.weight"), m, step=step)
        p.op("stream_mix", step, m.array, m.ld, n.array, n.ld, x.array, x.ld, g.hidden, g.streams)

    def leave(self, layer: int) -> None:
        """Inject the block's output y into every stream. What made y goes by `columns` too: no barrier is between."""
        g = self.g
        self.program.op("stream_inject", self.step, self.s.array, self.s.ld, self.y.array, self.y.ld,
                        self.inject.array, self.inject.ld, g.hidden, g.streams, self.bad, layer)

    # ---- QSA attention (1.6 and 5b): gated attention over the rows an indexer picks
    def attention(self, name: str, index: int) -> None:
        """x -> y. `index`: the layer's place among the state's attention layers."""
        w = self.w
        products = [(w.matrix(f"{name}{part}_proj.weight"), rows)
                    for part, rows in (("q", self.q), ("k", self.k), ("v", self.v))]  # fmt: skip
        linears(self.program, Input(self.x, self.g.hidden), products + self.index_products(name), step=self.step)
        self.remember(name, index, self.g.heads)
        self.attend(name, index)

    def index_products(self, name: str) -> list[tuple[Any, Rows]]:
        """The indexer's projections into qk; GGUF keeps queries and key apart."""
        g, w, name = self.g, self.w, name + "indexer."
        if f"{name}index_qk_proj.weight" in w.checkpoint:
            return [(w.matrix(name + "index_qk_proj.weight"), self.qk)]
        queries = g.index_heads * g.index_dim
        return [(w.matrix(name + "q_proj.weight"), self.program.view(self.qk.array[:, :queries])),
                (w.matrix(name + "k_proj.weight"), self.program.view(self.qk.array[:, queries:]))]  # fmt: skip

    def remember(self, name: str, index: int, queries: int) -> None:
        """k, v and the index keys of the rows into the caches; normed and rotated with them go `queries` heads of q
        and the index queries."""
        g, p, w = self.g, self.program, self.w
        raw, pooled = self.cache("raw", index), self.cache("pooled", index)
        self.attention_prep(name, index, queries, g.kv_heads, barrier=False)
        p.op("index_prep", self.step, self.qk.array, self.qk.ld, w.norm(name + "indexer.q_layernorm.weight"), g.eps,
             self.rope, self.behind, raw, g.index_heads, g.index_dim, g.rotary_dim)
        p.op("block_keys", self.step, raw, pooled, w.norm(name + "indexer.k_layernorm.weight"), g.eps, self.rope,
             self.behind, g.index_dim, g.rotary_dim, g.index_ratio)

    def attend(self, name: str, index: int) -> None:
        """Pick blocks with the index queries, attend their rows, project to y."""
        g, p = self.g, self.program
        if self.picking:
            p.op("index_scores", self.step, self.qk.array, self.qk.ld, self.cache("pooled", index), self.scores,
                 self.scores.shape[1], g.index_heads, g.index_dim, g.index_ratio, g.index_blocks)
        p.op("index_pick", self.step, self.scores, self.scores.shape[1], self.picks, g.index_blocks, self.counts,
             g.index_ratio, g.index_blocks)
        self.attend_rows(name, index, self.picks, g.index_blocks, g.index_ratio)

    # ---- final mixer
    def final(self, prefix: str, streams: Rows, step: np.ndarray, rows: int) -> Rows:
        """Streams -> the rows lm_head multiplies."""
        g, p, w = self.g, self.program, self.w

        def fresh(width: int) -> Rows:
            return p.view(p.buffer(rows, width))

        n, low, m, x = fresh(g.width), fresh(g.hc_lowrank), fresh(g.width), fresh(g.hidden)
        rms_group(p, streams, w.norm(prefix + "hc_norm.weight"), n, g.hidden, g.eps, step=step)
        self.narrow(prefix, Input(n, g.width), low, step)
        self.mix(prefix, n, low, m, x, step)
        return x
