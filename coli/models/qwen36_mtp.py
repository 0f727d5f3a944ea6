"""The draft head of the Qwen3.6 family (`mtp.*`) as a program; coli/models/head.py says what a head is.

    x = fc([rms(E[t_{p+1}], pre_fc_norm_embedding) ; rms(h_p, pre_fc_norm_hidden)])      the embedding comes first
    x += attention(rms(x)) ; x += mlp(rms(x)) ; y = rms(x, mtp.norm) ; scores = lm_head(y)    (model_spec.md 3c)

h_p is the trunk's row behind its final norm; a deeper draft takes the head's own y in its place. Attention is causal
over the head's own K and V, at the trunk's rotary base; row p is at position p.
"""

from __future__ import annotations

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Embedding, Weights
from coli.models.blocks import code_bytes
from coli.models.head import LIMIT
from coli.models.layout import HEAD
from coli.models.qwen36_blocks import Qwen36Blocks, row_floats, scratch_floats
from coli.models.qwen36_geometry import Geometry
from coli.models.qwen36_layout import head_mlp
from coli.program.builder import Program
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group
from coli.state import StateSpec


def head_spec(g: Geometry) -> StateSpec:
    """K and V of one attention layer."""
    return StateSpec(
        attention_layers=1, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=0, index_ratio=1, recurrent_layers=0,
        recurrent_width=0, rings=(),
    )


def head_workspace_bytes(g: Geometry, *, ctx: int, threads: int, codes: int) -> int:
    """Bytes of the head's buffers and of one state's waiting pairs, computed ahead; `codes`: kinds of int8 codes."""
    limit = min(LIMIT, ctx)
    row, final = row_floats(g) + 5 * g.hidden + 8, g.hidden + g.vocab
    return 4 * (limit * row + final + threads * scratch_floats(ctx)) + 32 * g.experts + codes * code_bytes(g, limit)


class HeadWriter(Qwen36Blocks):
    """Writes the head's program, all but the scores (coli/models/head.py)."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, wiring: str,
                 theta: float) -> None:
        limit = min(LIMIT, ctx)
        p = Program(limit)
        super().__init__(p, p.step, limit, g, weights, store, team, ctx, theta)
        self.rope_draft = p.buffer(1, 2, g.rotary_dim // 2)
        self.one = p.buffer(8, dtype=np.int64)  # step block of the second part
        self.embedding = Embedding(weights.checkpoint, limit)
        self.source = self.rows(g.hidden)
        self.mixed = self.own = p.view(p.buffer(1, g.hidden))
        self._pairs()
        self.settled = p.here
        self._last_row()

    def begin(self, rows: int) -> None:
        """A call needs nothing else."""

    def _pairs(self) -> None:
        """Embedding and trunk rows -> s, and K and V of them."""
        g, p, w, name = self.g, self.program, self.w, f"{HEAD}self_attn."
        embedded, both = self.rows(g.hidden), self.rows(2 * g.hidden)
        halves = p.view(both.array[:, : g.hidden]), p.view(both.array[:, g.hidden :])
        p.op("embed", p.step, np.arange(self.limit), self.embedding.rows, self.embedding.kind, embedded.array,
             embedded.ld, g.hidden, 1)
        rms_group(p, embedded, w.norm("mtp.pre_fc_norm_embedding.weight"), halves[0], g.hidden, g.eps, barrier=False)
        rms_group(p, self.source, w.norm("mtp.pre_fc_norm_hidden.weight"), halves[1], g.hidden, g.eps)
        linear(p, Input(both, 2 * g.hidden), w.matrix("mtp.fc.weight"), self.s)
        self.norm(f"{HEAD}input_layernorm.weight", self.s, self.x)
        linears(p, Input(self.x, g.hidden), [(w.matrix(name + "k_proj.weight"), self.k),
                                             (w.matrix(name + "v_proj.weight"), self.v)])  # fmt: skip
        self.attention_prep(name, 0, 0, g.kv_heads)

    def _last_row(self) -> None:
        """The last pair's row moves to the front and is all that is left of the layer."""
        g, p, w = self.g, self.program, self.w
        for rows in (self.s, self.x):
            p.op("copy_rows", p.step, rows.array, rows.ld, rows.array, rows.ld, g.hidden, barrier=rows is self.x)
        self.step, self.rope, name = self.one, self.rope_draft, f"{HEAD}self_attn."
        linear(p, Input(self.x, g.hidden), w.matrix(name + "q_proj.weight"), self.q, step=self.one)
        self.attention_prep(name, 0, g.heads, 0)
        self.attend_rows(name, 0)
        self.add(0)
        self.norm(f"{HEAD}post_attention_layernorm.weight", self.s, self.x)
        self.mlp(f"{HEAD}mlp.", head_mlp(g, w.checkpoint), 0)
        self.add(0)
        self.norm("mtp.norm.weight", self.s, self.mixed)
