"""The blocks of a Qwen3.6-family layer as ops: a plain residual, attention, and experts or a dense MLP.

    s += mixer(rms(s, input_layernorm)) ;  s += mlp(rms(s, post_attention_layernorm))        (model_spec.md 2b)

The trunk (coli/models/qwen36_program.py) and the draft head (coli/models/qwen36_mtp.py) are both written with these.
"""

from __future__ import annotations

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Weights
from coli.models.blocks import Blocks, moe_floats
from coli.models.qwen36_geometry import Geometry
from coli.program.builder import Program, Rows
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group


def scratch_floats(ctx: int) -> int:
    """Attention scores of one thread: four heads by the whole context."""
    return (4 * ctx + 15) // 16 * 16


def row_floats(g: Geometry) -> int:
    """4-byte cells a `Qwen36Blocks` keeps for each of its rows, apart from prepared rows."""
    dense = 3 * g.dense_inter + 6 if g.dense_inter else 0
    attention = g.query_width + g.heads * g.head_dim + 2 * g.kv_heads * g.head_dim
    return 3 * g.hidden + attention + g.rotary_dim + dense + moe_floats(g) + 20


class Qwen36Blocks(Blocks):
    """Writes the blocks of these layers into `program`; all layers share its buffers."""

    g: Geometry

    def __init__(self, program: Program, step: np.ndarray, limit: int, g: Geometry, weights: Weights,
                 store: ExpertStore, team: Team, ctx: int, theta: float) -> None:
        super().__init__(program, step, limit, g, weights, store, team, ctx, theta)
        if g.dense_inter:
            self.dense_gate, self.dense_up = self.rows(g.dense_inter), self.rows(g.dense_inter)
            self.dense_act = self.rows(g.dense_inter)

    def norm(self, name: str, x: Rows, y: Rows, *, barrier: bool = True) -> None:
        """RMS norm over the hidden features."""
        g = self.g
        rms_group(self.program, x, self.w.norm(name), y, g.hidden, g.eps, step=self.step, barrier=barrier)

    def add(self, layer: int) -> None:
        """s += y. What made y goes by `columns` too: no barrier is between."""
        self.program.op("residual", self.step, self.s.array, self.s.ld, self.y.array, self.y.ld, self.g.hidden,
                        self.bad, layer)

    def attention(self, name: str, index: int) -> None:
        """x -> y over all rows before (1.6). `index`: the layer's place among the attention layers."""
        g, w = self.g, self.w
        products = [(w.matrix(f"{name}{part}_proj.weight"), rows)
                    for part, rows in (("q", self.q), ("k", self.k), ("v", self.v))]  # fmt: skip
        linears(self.program, Input(self.x, g.hidden), products, step=self.step)
        self.attention_prep(name, index, g.heads, g.kv_heads)
        self.attend_rows(name, index)

    def look(self, layer: str, x: Rows) -> None:
        self.norm(f"{layer}post_attention_layernorm.weight", self.s, x)

    def mlp(self, prefix: str, kind: str, experts: int) -> None:
        """x -> y. `experts`: the layer's place among those with experts."""
        if kind == "moe":
            self.moe(prefix, experts)
            return
        g, p, w = self.g, self.program, self.w
        linears(p, Input(self.x, g.hidden), [
            (w.matrix(prefix + "gate_proj.weight"), self.dense_gate),
            (w.matrix(prefix + "up_proj.weight"), self.dense_up),
        ], step=self.step)
        p.op("swiglu", self.step, self.dense_gate.pointers, self.dense_up.pointers, self.dense_act.pointers,
             g.dense_inter)
        linear(p, Input(self.dense_act, g.dense_inter), w.matrix(prefix + "down_proj.weight"), self.y, step=self.step,
               barrier=False)
