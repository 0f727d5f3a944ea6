"""The blocks that layers of every Qwen engine are made of, as ops: attention over cached rows, the mixture of experts.

A `Blocks` owns the buffers its ops work in, for `limit` rows, and the step block that says how many rows a call has;
several may write into one program. A block takes its input from `x` and leaves its output in `y`; what joins them to
the residual is the engine's own (coli/models/qwen38_blocks.py, coli/models/qwen36_blocks.py). Gated DeltaNet, which a
draft head has not, is in coli/models/deltanet.py. Formulas: model_spec.md section 1; comments name the part.

`behind`: rope rows kept before the first row of a call (the index blocks of qwen38 begin up to that far back).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coli.experts.records import ExpertRecord
from coli.experts.store import ExpertStore
from coli.kernels.packing import GRAIN, prepared_row_bytes
from coli.models.base import Weights
from coli.program.builder import Program, Rows, StateCell
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, prepare_op, quantized


def moe_floats(g: Any) -> int:
    """4-byte cells of a row that the mixture of experts needs, apart from prepared rows."""
    if not g.experts:
        return 0
    pair = 2 * g.moe_inter + g.hidden + 10  # gate | up, output, five pointers
    shared = 3 * g.shared_inter + g.hidden + 9 if g.shared_inter else 0
    return g.experts + 2 + shared + g.top_k * (pair + 3)


def code_bytes(g: Any, limit: int) -> int:
    """Bytes of the int8 codes that rows need beside integer weights, at most: one copy of each kind of row."""
    inner = g.gdn_value_heads * g.gdn_value_dim
    widths = [g.hidden, inner, g.heads * g.head_dim, g.shared_inter, g.dense_inter, g.hidden]
    if g.width > g.hidden:
        widths += [g.width, g.hc_lowrank, g.ple_dim]
    row = sum(prepared_row_bytes("q8_0", -(-width // 32) * 32) for width in widths)
    return limit * (row + g.top_k * prepared_row_bytes("q8_0", -(-g.moe_inter // 32) * 32))


class Blocks:
    """Writes the blocks of layers into `program`; all layers of one `Blocks` share its buffers.

    `step`: the step block of these ops. `theta`: base of the rotary positions. `store.table[i]`, `store.stamp[i]`,
    `store.records[i]` belong to the i-th layer with experts."""

    def __init__(self, program: Program, step: np.ndarray, limit: int, g: Any, weights: Weights, store: ExpertStore,
                 team: Team, ctx: int, theta: float, *, behind: int = 0) -> None:
        self.program, self.step, self.limit, self.behind = program, step, limit, behind
        self.g, self.w, self.store, self.team, self.ctx = g, weights, store, team, ctx
        p = program
        self.bad, self.clock, self.used = (p.buffer(1, dtype=np.int64) for _ in range(3))
        half = g.rotary_dim // 2
        self.rope = self.angles = p.buffer(limit + behind, 2, half)
        self._freqs = (1.0 / theta ** (np.arange(half) / half)).astype(np.float32)
        self.expert_ops: dict[int, tuple[int, int]] = {}  # op row -> (layer, row of its `group`)
        self.s = self.rows(g.width)
        self.x, self.y = self.rows(g.hidden), self.rows(g.hidden)
        self._attention_buffers()
        if g.experts:
            self._expert_buffers()

    def rows(self, width: int) -> Rows:
        """float32 [limit, width]."""
        return self.program.view(self.program.buffer(self.limit, width))

    def fill_rope(self, pos: int, rows: int) -> None:
        """cos | sin of every row's position, and of the `behind` positions before."""
        angle = np.arange(pos - self.behind, pos + rows, dtype=np.float32)[:, None] * self._freqs
        np.cos(angle, out=self.angles[: rows + self.behind, 0])
        np.sin(angle, out=self.angles[: rows + self.behind, 1])

    def look(self, layer: str, x: Rows) -> None:
        """What the experts of the layer with this name prefix would take, were the streams to stay as they are: an
        engine's own way from `s` to the input of an MLP, over scratch that is free while a layer waits for experts."""
        raise NotImplementedError

    # ---- attention over cached rows (1.6)
    @property
    def query_width(self) -> int:
        return self.g.heads * self.g.head_dim * (2 if self.g.output_gate else 1)

    @property
    def scratch_floats(self) -> int:
        """Attention scores of one thread: four heads by the most rows a token attends."""
        return (4 * self.ctx + 15) // 16 * 16

    def _attention_buffers(self) -> None:
        g, p = self.g, self.program
        self.q, self.heads = self.rows(self.query_width), self.rows(g.heads * g.head_dim)
        self.k, self.v = self.rows(g.kv_heads * g.head_dim), self.rows(g.kv_heads * g.head_dim)
        self.counts = p.buffer(self.limit, dtype=np.int64)
        self.counts[:] = -1  # every row attends all rows before it
        self.scratch = p.buffer(self.team.threads, self.scratch_floats)

    def cache(self, part: str, index: int) -> StateCell:
        """Array `part` of the state (K, V or index keys), of attention layer `index`."""
        return StateCell(lambda state: getattr(state, part)[index].ctypes.data)

    def attention_prep(self, name: str, index: int, queries: int, keys: int, *, barrier: bool = True) -> None:
        """Norm and rotate that many heads of q, in place, and of k, into the cache with v."""
        g, w = self.g, self.w
        self.program.op(
            "attention_prep", self.step, self.q.array, self.q.ld, self.k.array, self.k.ld, self.v.array, self.v.ld,
            w.norm(name + "q_norm.weight"), w.norm(name + "k_norm.weight"), g.eps, self.rope, self.behind,
            self.cache("k", index), self.cache("v", index), self.ctx, queries, keys, g.head_dim, g.rotary_dim,
            g.output_gate, barrier=barrier,
        )

    def attend_rows(self, name: str, index: int, picks: Any = 0, budget: int = 0, ratio: int = 1) -> None:
        """Attend the rows `counts` and `picks` say, project to y; what follows goes by `columns`."""
        g, p = self.g, self.program
        p.op("attention", self.step, self.q.array, self.q.ld, self.cache("k", index), self.cache("v", index), self.ctx,
             picks, budget, self.counts, ratio, self.heads.array, self.heads.ld, g.heads, g.kv_heads, g.head_dim,
             self.scratch, self.scratch.shape[1], g.output_gate)
        linear(p, Input(self.heads, g.heads * g.head_dim), self.w.matrix(name + "o_proj.weight"), self.y,
               step=self.step, barrier=False)

    # ---- mixture of experts (1.7)
    def _expert_buffers(self) -> None:
        g, p = self.g, self.program
        self.logits = self.rows(g.experts)
        self.chosen, self.share = p.buffer(self.limit, g.top_k, dtype=np.int64), p.buffer(self.limit, g.top_k)
        if g.shared_inter:
            self.shared_gate, self.shared = self.rows(1), self.rows(g.hidden)
            self.shared_gated, self.shared_up = self.rows(g.shared_inter), self.rows(g.shared_inter)
            self.shared_act = self.rows(g.shared_inter)
        pairs = self.limit * g.top_k
        self.gate_up, self.down = p.buffer(pairs, 2 * g.moe_inter), p.buffer(pairs, g.hidden)
        widest = max((prepared_row_bytes(record.down.kind, g.moe_inter) for record in self.store.records), default=0)
        # what down multiplies where it takes int8 codes; without one nothing follows the addresses `group` writes
        self.act = p.buffer(pairs if widest else 1, max(widest, 64), dtype=np.uint8)
        self.todo = p.buffer(g.experts, dtype=np.int64)
        self.groups = p.buffer(2 + 3 * g.experts, dtype=np.int64)
        self.lists = p.buffer(5, pairs, dtype=np.int64)

    def moe(self, name: str, layer: int) -> None:
        """x -> y. `layer`: the row of the store's tables."""
        g, p, w = self.g, self.program, self.w
        x = Input(self.x, g.hidden)
        products = [(w.matrix(name + "gate.weight"), self.logits)]
        if g.shared_inter:
            products += [
                (w.matrix(name + "shared_expert_gate.weight"), self.shared_gate),
                (w.matrix(name + "shared_expert.gate_proj.weight"), self.shared_gated),
                (w.matrix(name + "shared_expert.up_proj.weight"), self.shared_up),
            ]
        linears(p, x, products, step=self.step)
        if g.shared_inter:
            p.op("swiglu", self.step, self.shared_gated.pointers, self.shared_up.pointers, self.shared_act.pointers,
                 g.shared_inter, barrier=False)
        p.op("router", self.step, self.logits.array, self.logits.ld, g.experts, g.top_k, self.chosen, self.share,
             g.norm_topk)
        resident, cut = self.store.table[layer], self.team.cut_cell
        need = p.op("todo", self.step, self.chosen, g.top_k, resident, g.experts, self.todo, cut, may_cut=True)
        shared: tuple[Any, ...] = (0, 0, 0, 0)
        if g.shared_inter:
            shared_down = w.matrix(name + "shared_expert.down_proj.weight")
            linear(p, Input(self.shared_act, g.shared_inter), shared_down, self.shared, step=self.step, barrier=False)
            shared = self.shared.array, self.shared.ld, self.shared_gate.array, self.shared_gate.ld
        group, end = self._experts(layer, x, resident)
        self.expert_ops[need] = self.expert_ops[end] = (layer, group)
        p.op("combine", self.step, self.down, g.hidden, self.share, g.top_k, *shared, self.y.array, self.y.ld, g.hidden,
             barrier=False)

    def _experts(self, layer: int, x: Input, resident: np.ndarray) -> tuple[int, int]:
        """The experts' own GEMVs, grouped by expert; returns the row of the `group` op, and of the last, which cuts
        while experts are left to do. Lists: x | gate | up | codes of the gated rows | output."""
        g, p, record = self.g, self.program, self.store.records[layer]
        rows = quantized(p, x, record.gate.kind, self.step)  # one behind the other, as far apart as the first two
        group = p.op("group", self.step, self.chosen, g.top_k, resident, self.store.stamp[layer], self.todo,
                     self.clock, self.groups, self.lists, self.lists.shape[1], int(rows[0]), int(rows[1] - rows[0]),
                     self.gate_up, self.gate_up.strides[0], 4 * g.moe_inter, self.act, self.act.strides[0], self.down,
                     g.experts, self.used, self.down.strides[0], self.team.cut_cell)
        x_list, gate, up, act, down = self.lists
        p.op("gated", self.groups, record.gate.at, record.gate.scale_at, x_list, gate, g.moe_inter, g.hidden,
             *record.gate.block, p.tiles(record.gate.kind), GRAIN, record.up.at, record.up.scale_at, up, gate,
             record.gate.row_bytes, p.tiles(record.up.kind), record.up.row_bytes)
        end = self._down(record, gate, act, down)
        return group, end

    def _down(self, record: ExpertRecord, gated: np.ndarray, codes: np.ndarray, out: np.ndarray) -> int:
        g, p, part = self.g, self.program, record.down
        source = gated
        if prepared_row_bytes(part.kind, g.moe_inter):
            prepare_op(p, part.kind, self.groups[1:2], gated, codes, g.moe_inter)
            source = codes
        return p.op("grouped", self.groups, part.at, part.scale_at, source, out, g.hidden, g.moe_inter, *part.block,
                    p.tiles(part.kind), GRAIN, part.row_bytes, may_cut=True)
