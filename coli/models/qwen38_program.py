"""Qwen3.8-Flash-Next (`qwen4_exp`), text: the math, written once as a program of ops.

A row carries four residual streams. Every block (Gated DeltaNet or QSA attention, then a mixture of experts) sits in
a *site*: the streams are normed, mixed into one block input by a low-rank gate, and the block's output is injected
back into each stream with its own weight. Some layers first add a hashed n-gram embedding (PLE). Formulas:
model_spec.md section 5b; every comment `(5b ...)` points there, `(1.x ...)` to its section 1.

One program serves prefill chunks, verifies and single steps: the same kernels in the same order, so a token's bits do
not depend on how the tokens came in (tests/models/test_qwen38.py: prefill = chunks = one by one, byte for byte).
The program stops for the host in two places only: n-gram rows (read from disk while the first layers run) and
experts that are not resident (coli/models/qwen38.py serves both).
"""

from __future__ import annotations

import numpy as np

from coli.experts import ExpertStore
from coli.kernels.packing import GRAIN
from coli.models.base import Embedding, Weights
from coli.models.qwen38_geometry import Geometry
from coli.program.builder import Program, Rows, StateCell
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group
from coli.state import MAX_UNDOABLE, StateSpec

_ACTIVATION = {"silu": 0, "sigmoid": 1}


def state_spec(g: Geometry) -> StateSpec:
    """Sizes of the state (model_spec.md section 11)."""
    gdn = g.layer_types.count("gdn")
    rings = [(g.gdn_conv - 1, g.conv_channels)] * gdn
    rings += [((g.ple_conv - 1) * g.ngram_size, g.width)] * len(g.ple_layers)
    return StateSpec(
        attention_layers=g.layers - gdn, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=g.index_dim,
        index_ratio=g.index_ratio, recurrent_layers=gdn,
        recurrent_width=g.gdn_value_heads * g.gdn_key_dim * g.gdn_value_dim, rings=tuple(rings),
    )


def workspace_bytes(g: Geometry, *, limit: int, ctx: int, threads: int) -> int:
    """Bytes of the program's buffers, computed ahead (tests/models/test_memory.py compares them with the real ones)."""
    inner, blocks = g.gdn_value_heads * g.gdn_value_dim, ctx // g.index_ratio + 1
    pair = 3 * g.moe_inter + g.hidden + 10  # floats: gate | up | activation | output, five pointers
    row = (
        3 * g.width + g.hc_lowrank + g.streams + 3 * g.hidden + 2 * (g.conv_channels + inner) + 4 * g.gdn_value_heads
        + 3 * g.heads * g.head_dim + 2 * g.kv_heads * g.head_dim + (g.index_heads + 1) * g.index_dim
        + (blocks + g.index_blocks if blocks > g.index_blocks else 2) + g.experts + 3 * g.shared_inter + g.ple_dim
        + g.rotary_dim + g.top_k * (pair + 3) + 55
    )
    final = MAX_UNDOABLE * (3 * g.width + g.hc_lowrank + g.hidden + g.vocab)
    scratch = threads * _scratch_floats(g, ctx)
    return 4 * (limit * row + final + scratch) + 32 * g.experts


def _scratch_floats(g: Geometry, ctx: int) -> int:
    """Attention scores of one thread: four heads by the most rows a token attends."""
    return (4 * min(ctx, (g.index_blocks + 1) * g.index_ratio) + 15) // 16 * 16


def _cache(part: str, index: int) -> StateCell:
    """Array `part` of the state (K, V or index keys), of attention layer `index`."""
    return StateCell(lambda state: getattr(state, part)[index].ctypes.data)


class Writer:
    """Writes the program: one method an idea, buffers shared by all layers."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, limit: int) -> None:
        self.g, self.w, self.store, self.team, self.ctx, self.spec = g, weights, store, team, ctx, state_spec(g)
        self.program = p = Program(limit)
        self.final = p.buffer(8, dtype=np.int64)  # step block of the rows whose logits are wanted
        self.embedding = Embedding(weights.checkpoint, limit)
        self.ids = np.arange(limit)  # row r of a call takes row r of `embedding.rows`
        self.bad = p.buffer(1, dtype=np.int64)
        self.clock = p.buffer(1, dtype=np.int64)
        self.used = p.buffer(1, dtype=np.int64)
        self.rope = p.buffer(limit + g.index_ratio - 1, 2, g.rotary_dim // 2)
        self.ngram_ops: dict[int, int] = {}  # op row -> PLE index
        self.expert_ops: dict[int, tuple[int, int]] = {}  # op row -> (layer, row of its `group`)
        self.s, self.n, self.m = p.rows(g.width), p.rows(g.width), p.rows(g.width)
        self.low, self.inject = p.rows(g.hc_lowrank), p.rows(g.streams)
        self.x, self.y = p.rows(g.hidden), p.rows(g.hidden)
        self._gdn_buffers()
        self._attention_buffers()
        self._expert_buffers()
        self.e = p.rows(g.ple_dim) if g.ple_layers else None

    def _gdn_buffers(self) -> None:
        g, p = self.g, self.program
        inner = g.gdn_value_heads * g.gdn_value_dim
        self.qkv, self.u = p.rows(g.conv_channels), p.rows(g.conv_channels)
        self.z, self.o = p.rows(inner), p.rows(inner)
        self.a, self.b = p.rows(g.gdn_value_heads), p.rows(g.gdn_value_heads)
        self.decay, self.beta = (p.buffer(p.limit, g.gdn_value_heads) for _ in range(2))

    def _attention_buffers(self) -> None:
        g, p = self.g, self.program
        self.q, self.heads = p.rows(g.heads * 2 * g.head_dim), p.rows(g.heads * g.head_dim)
        self.k, self.v = p.rows(g.kv_heads * g.head_dim), p.rows(g.kv_heads * g.head_dim)
        self.qk = p.rows((g.index_heads + 1) * g.index_dim)
        blocks = self.ctx // g.index_ratio + 1
        picking = blocks > g.index_blocks  # else every row attends all rows, and nothing is written here
        self.scores = p.buffer(p.limit, blocks if picking else 1)
        self.picks = p.buffer(p.limit, g.index_blocks if picking else 1, dtype=np.int32)
        self.counts = p.buffer(p.limit, dtype=np.int64)
        self.scratch_width = _scratch_floats(g, self.ctx)
        self.scratch = p.buffer(self.team.threads, self.scratch_width)

    def _expert_buffers(self) -> None:
        g, p = self.g, self.program
        self.logits, self.shared_gate = p.rows(g.experts), p.rows(1)
        self.chosen, self.share = p.buffer(p.limit, g.top_k, dtype=np.int64), p.buffer(p.limit, g.top_k)
        self.shared_up, self.shared_gated = p.rows(g.shared_inter), p.rows(g.shared_inter)
        self.shared_act, self.shared = p.rows(g.shared_inter), p.rows(g.hidden)
        pairs = p.limit * g.top_k
        self.gate_up, self.act = p.buffer(pairs, 2 * g.moe_inter), p.buffer(pairs, g.moe_inter)
        self.down = p.buffer(pairs, g.hidden)
        self.todo = p.buffer(g.experts, dtype=np.int64)
        self.groups = p.buffer(2 + 3 * g.experts, dtype=np.int64)
        self.lists = p.buffer(5, pairs, dtype=np.int64)

    # ---- the whole model
    def write(self) -> Program:
        g, p = self.g, self.program
        p.op("embed", p.step, self.ids, self.embedding.rows, self.embedding.kind, self.s.array, self.s.ld, g.hidden,
             g.streams)
        kinds = {"gdn": 0, "attention": 0}
        for layer, kind in enumerate(g.layer_types):
            if layer in g.ple_layers:
                self.ple(layer, g.ple_layers.index(layer))
            self.enter(f"layers.{layer}.attn_hyper_connection.")
            (self.gdn if kind == "gdn" else self.attention)(layer, kinds[kind])
            kinds[kind] += 1
            self.leave(layer)
            self.enter(f"layers.{layer}.mlp_hyper_connection.")
            self.moe(layer)
            self.leave(layer)
        self.head()
        return p

    # ---- gated residual streams (5b, Site)
    def enter(self, prefix: str) -> None:
        """Streams -> block input x (already normed) and injection weights."""
        g, p = self.g, self.program
        rms_group(p, self.s, self.w.norm(prefix + "hc_norm.weight"), self.n, g.hidden, g.eps)
        linears(p, Input(self.n, g.width), [
            (self.w.matrix(prefix + "input_mix_weight_down.weight"), self.low),
            (self.w.matrix(prefix + "block_inject_weight.weight"), self.inject),
        ])
        self.mix(prefix, self.n, self.low, self.m, self.x, p.step)

    def mix(self, prefix: str, n: Rows, low: Rows, m: Rows, x: Rows, step: np.ndarray) -> None:
        g, p = self.g, self.program
        p.op("silu_scaled", step, low.array, low.ld, g.hc_lowrank, 1.0 / g.streams)
        linear(p, Input(low, g.hc_lowrank), self.w.matrix(prefix + "input_mix_weight_up.weight"), m, step=step)
        p.op("stream_mix", step, m.array, m.ld, n.array, n.ld, x.array, x.ld, g.hidden, g.streams)

    def leave(self, layer: int) -> None:
        """Inject the block's output y into every stream."""
        g, p = self.g, self.program
        p.op("stream_inject", p.step, self.s.array, self.s.ld, self.y.array, self.y.ld, self.inject.array,
             self.inject.ld, g.hidden, g.streams, self.bad, layer)

    # ---- Gated DeltaNet (1.5)
    def gdn(self, layer: int, index: int) -> None:
        g, p, w = self.g, self.program, self.w
        name = f"layers.{layer}.linear_attn."
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(name + "in_proj_qkv.weight"), self.qkv), (w.matrix(name + "in_proj_z.weight"), self.z),
            (w.matrix(name + "in_proj_a.weight"), self.a),
            (w.matrix(name + "in_proj_b.weight"), self.b),
        ])
        ring = StateCell(lambda state: state.rings[index].ctypes.data)
        p.op("conv_silu", p.step, self.qkv.array, self.qkv.ld, w.conv(name + "conv1d.weight"), ring,
             self.spec.ring_rows(g.gdn_conv - 1), self.u.array, self.u.ld, g.conv_channels, g.gdn_conv, 1, 0, 0)
        heads = (g.gdn_key_heads, g.gdn_value_heads, g.gdn_key_dim, g.gdn_value_dim)
        p.op("gdn_prep", p.step, self.u.array, self.u.ld, self.a.array, self.a.ld, self.b.array, self.b.ld,
             -np.exp(w.vector(name + "A_log")), w.vector(name + "dt_bias"), self.decay, self.beta, *heads)
        offset = 4 * index * self.spec.recurrent_width
        p.op("deltanet", p.step, self.u.array, self.u.ld, self.decay, self.beta,
             StateCell(lambda state: state.cells.ctypes.data), offset, self.o.array, self.o.ld, *heads, 0)
        p.op("gated_norm", p.step, self.o.array, self.o.ld, self.z.array, self.z.ld, w.vector(name + "norm.weight"),
             g.gdn_value_heads, g.gdn_value_dim, g.eps, _ACTIVATION[g.gate])
        linear(p, Input(self.o, g.gdn_value_heads * g.gdn_value_dim), w.matrix(name + "out_proj.weight"), self.y)

    # ---- QSA attention (1.6 and 5b): gated attention over the rows an indexer picks
    def attention(self, layer: int, index: int) -> None:
        g, p, w = self.g, self.program, self.w
        name = f"layers.{layer}.self_attn."
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(name + "q_proj.weight"), self.q), (w.matrix(name + "k_proj.weight"), self.k),
            (w.matrix(name + "v_proj.weight"), self.v),
            (w.matrix(name + "indexer.index_qk_proj.weight"), self.qk),
        ])
        k, v, raw, pooled = (_cache(part, index) for part in ("k", "v", "raw", "pooled"))
        off = g.index_ratio - 1  # the rope table starts that many positions before the first row
        p.op("attention_prep", p.step, self.q.array, self.q.ld, self.k.array, self.k.ld, self.v.array, self.v.ld,
             w.norm(name + "q_norm.weight"), w.norm(name + "k_norm.weight"), g.eps, self.rope, off, k, v, self.ctx,
             g.heads, g.kv_heads, g.head_dim, g.rotary_dim, barrier=False)
        p.op("index_prep", p.step, self.qk.array, self.qk.ld, w.norm(name + "indexer.q_layernorm.weight"), g.eps,
             self.rope, off, raw, g.index_heads, g.index_dim, g.rotary_dim)
        p.op("block_keys", p.step, raw, pooled, w.norm(name + "indexer.k_layernorm.weight"), g.eps, self.rope, off,
             g.index_dim, g.rotary_dim, g.index_ratio)
        if self.ctx // g.index_ratio + 1 > g.index_blocks:
            p.op("index_scores", p.step, self.qk.array, self.qk.ld, pooled, self.scores, self.scores.shape[1],
                 g.index_heads, g.index_dim, g.index_ratio, g.index_blocks)
        p.op("index_pick", p.step, self.scores, self.scores.shape[1], self.picks, g.index_blocks, self.counts,
             g.index_ratio, g.index_blocks)
        p.op("attention", p.step, self.q.array, self.q.ld, k, v, self.ctx, self.picks, g.index_blocks, self.counts,
             g.index_ratio, self.heads.array, self.heads.ld, g.heads, g.kv_heads, g.head_dim, self.scratch,
             self.scratch_width)
        linear(p, Input(self.heads, g.heads * g.head_dim), w.matrix(name + "o_proj.weight"), self.y)

    # ---- mixture of experts (1.7)
    def moe(self, layer: int) -> None:
        g, p, w = self.g, self.program, self.w
        name = f"layers.{layer}.mlp."
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(name + "gate.weight"), self.logits),
            (w.matrix(name + "shared_expert_gate.weight"), self.shared_gate),
            (w.matrix(name + "shared_expert.gate_proj.weight"), self.shared_gated),
            (w.matrix(name + "shared_expert.up_proj.weight"), self.shared_up),
        ])
        p.op("swiglu", p.step, self.shared_gated.pointers, self.shared_up.pointers, self.shared_act.pointers,
             g.shared_inter, barrier=False)
        p.op("router", p.step, self.logits.array, self.logits.ld, g.experts, g.top_k, self.chosen, self.share,
             g.norm_topk)
        resident = self.store.table[layer]
        cut = self.team.cut_cell
        need = p.op("todo", p.step, self.chosen, g.top_k, resident, g.experts, self.todo, cut, may_cut=True)
        shared_down = w.matrix(name + "shared_expert.down_proj.weight")
        linear(p, Input(self.shared_act, g.shared_inter), shared_down, self.shared, barrier=False)
        group = self.experts(layer, resident)
        more = p.op("wave_end", self.todo, g.experts, cut, may_cut=True)
        self.expert_ops[need] = self.expert_ops[more] = (layer, group)
        p.op("combine", p.step, self.down, g.hidden, self.share, g.top_k, self.shared.array, self.shared.ld,
             self.shared_gate.array, self.shared_gate.ld, self.y.array, self.y.ld, g.hidden)

    def experts(self, layer: int, resident: np.ndarray) -> int:
        """The experts' own GEMVs, grouped by expert; returns the row of the `group` op."""
        g, p, record = self.g, self.program, self.store.record
        group = p.op("group", p.step, self.chosen, g.top_k, resident, self.store.stamp[layer], self.todo, self.clock,
                     self.groups, self.lists, self.lists.shape[1], self.x.array, self.x.array.strides[0], self.gate_up,
                     self.gate_up.strides[0], 4 * g.moe_inter, self.act, self.act.strides[0], self.down, g.experts,
                     self.used, self.down.strides[0])
        x, gate, up, act, down = self.lists
        into, out = (g.moe_inter, g.hidden), (g.hidden, g.moe_inter)
        common = (*record.block, p.tiles(record.kind), GRAIN)
        p.op("grouped", self.groups, record.gate, record.gate_scale, x, gate, *into, *common, barrier=False)
        p.op("grouped", self.groups, record.up, record.up_scale, x, up, *into, *common)
        p.op("swiglu", self.groups[1:], gate, up, act, g.moe_inter)
        p.op("grouped", self.groups, record.down, record.down_scale, act, down, *out, *common)
        return group

    # ---- hashed n-gram embedding (5b, PLE)
    def ple(self, layer: int, index: int) -> None:
        g, p, w = self.g, self.program, self.w
        assert self.e is not None
        name = f"layers.{layer}.ple."
        self.ngram_ops[p.op("wait_ngrams", self.team.cut_cell, may_cut=True)] = index
        # m, n, x and y are free between sites: key in m, normed streams in n, value in x
        linears(p, Input(self.e, g.ple_dim), [
            (w.matrix(name + "key_proj.weight"), self.m), (w.matrix(name + "value_proj.weight"), self.x),
        ])
        rms_group(p, self.m, w.norm(name + "norm_key.weight"), self.m, g.hidden, g.eps)
        rms_group(p, self.s, w.norm(name + "norm_query.weight"), self.n, g.hidden, g.eps)
        p.op("ple_gate", p.step, self.m.array, self.m.ld, self.n.array, self.n.ld, self.x.array, self.x.ld,
             self.m.array, self.m.ld, g.hidden, g.streams)
        rms_group(p, self.m, w.norm(name + "norm_conv.weight"), self.n, g.hidden, g.eps)
        at = g.layer_types.count("gdn") + index
        kept = (g.ple_conv - 1) * g.ngram_size
        p.op("conv_silu", p.step, self.n.array, self.n.ld, w.conv(name + "conv1d.weight"),
             StateCell(lambda state: state.rings[at].ctypes.data), self.spec.ring_rows(kept), self.s.array,
             self.s.ld, g.width, g.ple_conv, g.ngram_size, self.m.array, self.m.ld)

    # ---- final mixer and lm_head, for the wanted rows only
    def head(self) -> None:
        g, p, w = self.g, self.program, self.w

        def rows(width: int) -> Rows:
            return p.view(p.buffer(MAX_UNDOABLE, width))

        self.streams, n, low, m, x = rows(g.width), rows(g.width), rows(g.hc_lowrank), rows(g.width), rows(g.hidden)
        self.out = rows(g.vocab)
        prefix = "hyper_connection_mixer."
        p.op("copy_rows", p.step, self.s.array, self.s.ld, self.streams.array, self.streams.ld, g.width)
        rms_group(p, self.streams, w.norm(prefix + "hc_norm.weight"), n, g.hidden, g.eps, step=self.final)
        linear(p, Input(n, g.width), w.matrix(prefix + "input_mix_weight_down.weight"), low, step=self.final)
        self.mix(prefix, n, low, m, x, self.final)
        lm_head = w.matrix("embed_tokens.weight" if g.tied else "lm_head.weight")
        linear(p, Input(x, g.hidden), lm_head, self.out, step=self.final)
