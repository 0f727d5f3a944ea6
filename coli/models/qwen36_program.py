"""The trunk of engine qwen36 as a program: one layer loop for qwen3_5_moe, qwen3_5, qwen3_next and qwen3_moe.

A row has one residual. Every layer is a mixer (Gated DeltaNet or attention) and an MLP (experts or dense); which, the
geometry says layer by layer. Behind the last layer all rows are normed (`streams`, what the draft head takes), and the
wanted ones multiplied by lm_head. Formulas: model_spec.md sections 1 to 4.

One program serves prefill chunks, verifies and single steps: the same kernels in the same order, so a token's bits do
not depend on how the tokens came in (tests/models/test_qwen36.py: prefill = chunks = one by one, byte for byte).
"""

from __future__ import annotations

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Embedding, Weights
from coli.models.blocks import code_bytes
from coli.models.deltanet import DeltaNet, block_floats, gdn_floats, state_widths
from coli.models.prefetch import prefetch_bytes
from coli.models.qwen36_blocks import Qwen36Blocks, row_floats, scratch_floats
from coli.models.qwen36_geometry import Geometry
from coli.program.builder import Program
from coli.program.cpu import Team
from coli.program.ops import Input, linear
from coli.state import MAX_UNDOABLE, StateSpec


def state_spec(g: Geometry) -> StateSpec:
    """Sizes of the state (model_spec.md section 11)."""
    gdn = g.layer_types.count("gdn")
    width, log_width = state_widths(g) if gdn else (0, 0)
    return StateSpec(
        attention_layers=g.layers - gdn, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=0, index_ratio=1,
        recurrent_layers=gdn, recurrent_width=width, rings=((g.gdn_conv - 1, g.conv_channels),) * gdn,
        log_width=log_width,
    )  # fmt: skip


def workspace_bytes(g: Geometry, *, limit: int, ctx: int, threads: int, codes: int = 0) -> int:
    """Bytes of the program's buffers, computed ahead (tests/models/test_memory.py compares them with the real ones);
    `codes`: kinds of int8 codes beside integer weights."""
    limit, gdn = max(limit, MAX_UNDOABLE), "gdn" in g.layer_types
    row = row_floats(g) + g.hidden + 2 + (gdn_floats(g) if gdn else 0)
    final = MAX_UNDOABLE * (g.hidden + g.vocab)
    scratch = threads * (scratch_floats(ctx) + (block_floats(g) if gdn else 0))
    ahead = prefetch_bytes(g, codes)
    return 4 * (limit * row + final + scratch) + 32 * g.experts + codes * code_bytes(g, limit) + ahead


class Writer(Qwen36Blocks):
    """Writes the program of the trunk; buffers are shared by all layers."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, limit: int) -> None:
        limit = max(limit, MAX_UNDOABLE)  # a verify is one call
        p = Program(limit)
        super().__init__(p, p.step, limit, g, weights, store, team, ctx, g.rope_theta)
        self.spec = state_spec(g)
        self.last = p.buffer(8, dtype=np.int64)  # step block of the rows whose logits are wanted
        self.embedding = Embedding(weights.checkpoint, limit)
        self.ids = np.arange(limit)  # row r of a call takes row r of `embedding.rows`
        self.deltanet = DeltaNet(self, self.spec) if "gdn" in g.layer_types else None
        self.streams = self.rows(g.hidden)

    def write(self) -> Program:
        g, p = self.g, self.program
        p.op("embed", p.step, self.ids, self.embedding.rows, self.embedding.kind, self.s.array, self.s.ld, g.hidden, 1)
        kinds = {"gdn": 0, "attention": 0, "moe": 0, "dense": 0}
        for layer, (mixer, mlp) in enumerate(zip(g.layer_types, g.mlp_types, strict=True)):
            prefix = f"layers.{layer}."
            self.norm(f"{prefix}input_layernorm.weight", self.s, self.x)
            if mixer == "gdn":
                assert self.deltanet is not None
                self.deltanet.layer(f"{prefix}linear_attn.", kinds[mixer])
            else:
                self.attention(f"{prefix}self_attn.", kinds[mixer])
            self.add(layer)
            self.norm(f"{prefix}post_attention_layernorm.weight", self.s, self.x)
            self.mlp(f"{prefix}mlp.", mlp, kinds[mlp])
            self.add(layer)
            kinds[mixer] += 1
            kinds[mlp] += 1
        self._head()
        return p

    def _head(self) -> None:
        """Final norm of all rows, lm_head of the wanted ones."""
        g, p, w = self.g, self.program, self.w
        wanted, self.out = p.view(p.buffer(MAX_UNDOABLE, g.hidden)), p.view(p.buffer(MAX_UNDOABLE, g.vocab))
        self.norm("norm.weight", self.s, self.streams)
        p.op("copy_rows", p.step, self.streams.array, self.streams.ld, wanted.array, wanted.ld, g.hidden)
        self.lm_head = w.matrix("embed_tokens.weight" if g.tied else "lm_head.weight")
        linear(p, Input(wanted, g.hidden), self.lm_head, self.out, step=self.last)

    def settle(self) -> Program:
        """The program that adds what stands in a log to S (coli/models/deltanet.py)."""
        return Program(1) if self.deltanet is None else self.deltanet.settle()
