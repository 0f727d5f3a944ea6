"""The blocks of a Qwen3.8 layer as ops: the gated residual site, QSA attention, the mixture of experts.

The trunk (coli/models/qwen38_program.py) and the draft head (coli/models/qwen38_mtp.py) are both written with these.
A `Blocks` owns the buffers its ops work in, for `limit` rows, and the step block that says how many rows a call has;
several may write into one program. Formulas: model_spec.md sections 1 and 5b; comments name the part.
"""

from __future__ import annotations

import numpy as np

from coli.experts import ExpertStore
from coli.kernels.packing import GRAIN
from coli.models.base import Weights
from coli.models.qwen38_geometry import Geometry
from coli.program.builder import Program, Rows, StateCell
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group


def scratch_floats(g: Geometry, ctx: int) -> int:
    """Attention scores of one thread: four heads by the most rows a token attends."""
    return (4 * min(ctx, (g.index_blocks + 1) * g.index_ratio) + 15) // 16 * 16


def row_floats(g: Geometry, ctx: int) -> int:
    """4-byte cells a `Blocks` keeps for each of its rows."""
    blocks = ctx // g.index_ratio + 1
    pair = 3 * g.moe_inter + g.hidden + 10  # gate | up | activation | output, five pointers
    return (
        3 * g.width + g.hc_lowrank + g.streams + 2 * g.hidden + 3 * g.heads * g.head_dim + 2 * g.kv_heads * g.head_dim
        + (g.index_heads + 1) * g.index_dim + (blocks + g.index_blocks if blocks > g.index_blocks else 2) + g.experts
        + 3 * g.shared_inter + g.hidden + g.rotary_dim + g.top_k * (pair + 3) + 41
    )


class Blocks:
    """Writes the blocks of layers into `program`; all layers of one `Blocks` share its buffers.

    `step`: the step block of these ops. `theta`: base of the rotary positions. `store.table[i]`, `store.stamp[i]`
    belong to the i-th layer with experts."""

    def __init__(self, program: Program, step: np.ndarray, limit: int, g: Geometry, weights: Weights,
                 store: ExpertStore, team: Team, ctx: int, theta: float) -> None:
        self.program, self.step, self.limit = program, step, limit
        self.g, self.w, self.store, self.team, self.ctx = g, weights, store, team, ctx
        p = program
        self.bad, self.clock, self.used = (p.buffer(1, dtype=np.int64) for _ in range(3))
        half = g.rotary_dim // 2
        self.rope = self.angles = p.buffer(limit + g.index_ratio - 1, 2, half)
        self._freqs = (1.0 / theta ** (np.arange(half) / half)).astype(np.float32)
        self.expert_ops: dict[int, tuple[int, int]] = {}  # op row -> (layer, row of its `group`)
        self.s, self.n, self.m = self.rows(g.width), self.rows(g.width), self.rows(g.width)
        self.low, self.inject = self.rows(g.hc_lowrank), self.rows(g.streams)
        self.x, self.y = self.rows(g.hidden), self.rows(g.hidden)
        self._attention_buffers()
        self._expert_buffers()

    def rows(self, width: int) -> Rows:
        """float32 [limit, width]."""
        return self.program.view(self.program.buffer(self.limit, width))

    def fill_rope(self, pos: int, rows: int) -> None:
        """cos | sin of every row's position, and of the few before it where an index block may begin."""
        off = self.g.index_ratio - 1
        angle = np.arange(pos - off, pos + rows, dtype=np.float32)[:, None] * self._freqs
        np.cos(angle, out=self.angles[: rows + off, 0])
        np.sin(angle, out=self.angles[: rows + off, 1])

    def _attention_buffers(self) -> None:
        g, p = self.g, self.program
        self.q, self.heads = self.rows(g.heads * 2 * g.head_dim), self.rows(g.heads * g.head_dim)
        self.k, self.v = self.rows(g.kv_heads * g.head_dim), self.rows(g.kv_heads * g.head_dim)
        self.qk = self.rows((g.index_heads + 1) * g.index_dim)
        blocks = self.ctx // g.index_ratio + 1
        self.picking = blocks > g.index_blocks  # else every row attends all rows, and nothing is written here
        self.scores = p.buffer(self.limit, blocks if self.picking else 1)
        self.picks = p.buffer(self.limit, g.index_blocks if self.picking else 1, dtype=np.int32)
        self.counts = p.buffer(self.limit, dtype=np.int64)
        self.scratch_width = scratch_floats(g, self.ctx)
        self.scratch = p.buffer(self.team.threads, self.scratch_width)

    def _expert_buffers(self) -> None:
        g, p = self.g, self.program
        self.logits, self.shared_gate = self.rows(g.experts), self.rows(1)
        self.chosen, self.share = p.buffer(self.limit, g.top_k, dtype=np.int64), p.buffer(self.limit, g.top_k)
        self.shared_up, self.shared_gated = self.rows(g.shared_inter), self.rows(g.shared_inter)
        self.shared_act, self.shared = self.rows(g.shared_inter), self.rows(g.hidden)
        pairs = self.limit * g.top_k
        self.gate_up, self.act = p.buffer(pairs, 2 * g.moe_inter), p.buffer(pairs, g.moe_inter)
        self.down = p.buffer(pairs, g.hidden)
        self.todo = p.buffer(g.experts, dtype=np.int64)
        self.groups = p.buffer(2 + 3 * g.experts, dtype=np.int64)
        self.lists = p.buffer(5, pairs, dtype=np.int64)

    # ---- gated residual streams (5b, Site)
    def enter(self, prefix: str) -> None:
        """Streams -> block input x (already normed) and injection weights."""
        g, p = self.g, self.program
        rms_group(p, self.s, self.w.norm(prefix + "hc_norm.weight"), self.n, g.hidden, g.eps, step=self.step)
        normed = Input(self.n, g.width)
        self.narrow(prefix, normed, self.low, self.step, barrier=False)
        linear(p, normed, self.w.matrix(prefix + "block_inject_weight.weight"), self.inject, step=self.step)
        self.mix(prefix, self.n, self.low, self.m, self.x, self.step)

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
        w, weights = self.w, [(f"{part}_proj", rows) for part, rows in (("q", self.q), ("k", self.k), ("v", self.v))]
        weights.append(("indexer.index_qk_proj", self.qk))
        linears(self.program, Input(self.x, self.g.hidden),
                [(w.matrix(f"{name}{part}.weight"), rows) for part, rows in weights], step=self.step)
        self.remember(name, index, self.g.heads)
        self.attend(name, index)

    def cache(self, part: str, index: int) -> StateCell:
        """Array `part` of the state (K, V or index keys), of attention layer `index`."""
        return StateCell(lambda state: getattr(state, part)[index].ctypes.data)

    def remember(self, name: str, index: int, queries: int) -> None:
        """k, v and the index keys of the rows into the caches; normed and rotated with them go `queries` heads of q
        and the index queries."""
        g, p, w = self.g, self.program, self.w
        raw, pooled = self.cache("raw", index), self.cache("pooled", index)
        off = g.index_ratio - 1  # the rope table starts that many positions before the first row
        self.attention_prep(name, index, queries, g.kv_heads, barrier=False)
        p.op("index_prep", self.step, self.qk.array, self.qk.ld, w.norm(name + "indexer.q_layernorm.weight"), g.eps,
             self.rope, off, raw, g.index_heads, g.index_dim, g.rotary_dim)
        p.op("block_keys", self.step, raw, pooled, w.norm(name + "indexer.k_layernorm.weight"), g.eps, self.rope, off,
             g.index_dim, g.rotary_dim, g.index_ratio)

    def attention_prep(self, name: str, index: int, queries: int, keys: int, *, barrier: bool = True) -> None:
        """Norm and rotate that many heads of q, in place, and of k, into the cache with v."""
        g, w = self.g, self.w
        self.program.op(
            "attention_prep", self.step, self.q.array, self.q.ld, self.k.array, self.k.ld, self.v.array, self.v.ld,
            w.norm(name + "q_norm.weight"), w.norm(name + "k_norm.weight"), g.eps, self.rope, g.index_ratio - 1,
            self.cache("k", index), self.cache("v", index), self.ctx, queries, keys, g.head_dim, g.rotary_dim,
            barrier=barrier,
        )

    def attend(self, name: str, index: int) -> None:
        """Pick blocks with the index queries, attend their rows, project to y."""
        g, p, w = self.g, self.program, self.w
        if self.picking:
            p.op("index_scores", self.step, self.qk.array, self.qk.ld, self.cache("pooled", index), self.scores,
                 self.scores.shape[1], g.index_heads, g.index_dim, g.index_ratio, g.index_blocks)
        p.op("index_pick", self.step, self.scores, self.scores.shape[1], self.picks, g.index_blocks, self.counts,
             g.index_ratio, g.index_blocks)
        p.op("attention", self.step, self.q.array, self.q.ld, self.cache("k", index), self.cache("v", index), self.ctx,
             self.picks, g.index_blocks, self.counts, g.index_ratio, self.heads.array, self.heads.ld, g.heads,
             g.kv_heads, g.head_dim, self.scratch, self.scratch_width)
        linear(p, Input(self.heads, g.heads * g.head_dim), w.matrix(name + "o_proj.weight"), self.y, step=self.step,
               barrier=False)

    # ---- mixture of experts (1.7)
    def moe(self, name: str, layer: int) -> None:
        """x -> y. `layer`: the row of the store's tables."""
        g, p, w = self.g, self.program, self.w
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(name + "gate.weight"), self.logits),
            (w.matrix(name + "shared_expert_gate.weight"), self.shared_gate),
            (w.matrix(name + "shared_expert.gate_proj.weight"), self.shared_gated),
            (w.matrix(name + "shared_expert.up_proj.weight"), self.shared_up),
        ], step=self.step)
        p.op("swiglu", self.step, self.shared_gated.pointers, self.shared_up.pointers, self.shared_act.pointers,
             g.shared_inter, barrier=False)
        p.op("router", self.step, self.logits.array, self.logits.ld, g.experts, g.top_k, self.chosen, self.share,
             g.norm_topk)
        resident, cut = self.store.table[layer], self.team.cut_cell
        need = p.op("todo", self.step, self.chosen, g.top_k, resident, g.experts, self.todo, cut, may_cut=True)
        shared_down = w.matrix(name + "shared_expert.down_proj.weight")
        linear(p, Input(self.shared_act, g.shared_inter), shared_down, self.shared, step=self.step, barrier=False)
        group, end = self.experts(layer, resident)
        self.expert_ops[need] = self.expert_ops[end] = (layer, group)
        p.op("combine", self.step, self.down, g.hidden, self.share, g.top_k, self.shared.array, self.shared.ld,
             self.shared_gate.array, self.shared_gate.ld, self.y.array, self.y.ld, g.hidden, barrier=False)

    def experts(self, layer: int, resident: np.ndarray) -> tuple[int, int]:
        """The experts' own GEMVs, grouped by expert; returns the row of the `group` op, and of the last, which cuts
        while experts are left to do."""
        g, p, record = self.g, self.program, self.store.record
        group = p.op("group", self.step, self.chosen, g.top_k, resident, self.store.stamp[layer], self.todo,
                     self.clock, self.groups, self.lists, self.lists.shape[1], self.x.array, self.x.array.strides[0],
                     self.gate_up, self.gate_up.strides[0], 4 * g.moe_inter, self.act, self.act.strides[0], self.down,
                     g.experts, self.used, self.down.strides[0], self.team.cut_cell)
        x, gate, up, act, down = self.lists
        into, out = (g.moe_inter, g.hidden), (g.hidden, g.moe_inter)
        common = (*record.block, p.tiles(record.kind), GRAIN)
        p.op("gated", self.groups, record.gate, record.gate_scale, x, gate, *into, *common, record.up, record.up_scale,
             up, act, record.row_bytes(g.hidden))
        end = p.op("grouped", self.groups, record.down, record.down_scale, act, down, *out, *common,
                   record.row_bytes(g.moe_inter), may_cut=True)
        return group, end

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
