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

from collections.abc import Sequence

import numpy as np

from coli.experts.store import ExpertStore
from coli.models.base import Embedding, Weights
from coli.models.blocks import code_bytes
from coli.models.deltanet import DeltaNet, block_floats, gdn_floats, state_widths
from coli.models.prefetch import prefetch_bytes
from coli.models.qwen38_blocks import Qwen38Blocks, row_floats, scratch_floats
from coli.models.qwen38_geometry import Geometry
from coli.program.builder import Program, StateCell
from coli.program.cpu import Team
from coli.program.ops import Input, linear, linears, rms_group
from coli.state import MAX_UNDOABLE, StateSpec


def state_spec(g: Geometry) -> StateSpec:
    """Sizes of the state (model_spec.md section 11)."""
    gdn = g.layer_types.count("gdn")
    rings = [(g.gdn_conv - 1, g.conv_channels)] * gdn
    rings += [((g.ple_conv - 1) * g.ngram_size, g.width)] * len(g.ple_layers)
    width, log_width = state_widths(g)
    return StateSpec(
        attention_layers=g.layers - gdn, kv_heads=g.kv_heads, head_dim=g.head_dim, index_dim=g.index_dim,
        index_ratio=g.index_ratio, recurrent_layers=gdn, recurrent_width=width, rings=tuple(rings),
        log_width=log_width,
    )


def workspace_bytes(g: Geometry, *, limit: int, ctx: int, threads: int, codes: int = 0) -> int:
    """Bytes of the program's buffers, computed ahead (tests/models/test_memory.py compares them with the real ones);
    `codes`: kinds of int8 codes beside integer weights."""
    limit = max(limit, MAX_UNDOABLE)
    row = row_floats(g, ctx) + gdn_floats(g) + len(g.ple_layers) * (g.ple_dim + 2)
    final = MAX_UNDOABLE * (3 * g.width + g.hc_lowrank + g.hidden + g.vocab)
    scratch = threads * (scratch_floats(g, ctx) + block_floats(g))
    ahead = prefetch_bytes(g, codes)
    return 4 * (limit * row + final + scratch) + 32 * g.experts + codes * code_bytes(g, limit) + ahead


class Writer(Qwen38Blocks):
    """Writes the program of the trunk: one method an idea, buffers shared by all layers."""

    def __init__(self, g: Geometry, weights: Weights, store: ExpertStore, team: Team, ctx: int, limit: int,
                 kept_ngrams: Sequence[bool]) -> None:
        """`kept_ngrams`, by PLE layer: its n-gram rows are in `e` when the program starts."""
        limit = max(limit, MAX_UNDOABLE)  # a verify is one call
        p = Program(limit)
        super().__init__(p, p.step, limit, g, weights, store, team, ctx, g.rope_theta)
        self.spec, self.streams = state_spec(g), self.s  # the draft head takes the residual as it is
        self.last = p.buffer(8, dtype=np.int64)  # step block of the rows whose logits are wanted
        self.embedding = Embedding(weights.checkpoint, limit)
        self.ids = np.arange(limit)  # row r of a call takes row r of `embedding.rows`
        self.kept_ngrams = kept_ngrams
        self.ngram_ops: dict[int, int] = {}  # op row -> PLE index
        self.deltanet = DeltaNet(self, self.spec)
        self.e = [self.rows(g.ple_dim) for _ in g.ple_layers]

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
            if kind == "gdn":
                self.deltanet.layer(f"layers.{layer}.linear_attn.", kinds[kind])
            else:
                self.attention(f"layers.{layer}.self_attn.", kinds[kind])
            kinds[kind] += 1
            self.leave(layer)
            self.enter(f"layers.{layer}.mlp_hyper_connection.")
            self.moe(f"layers.{layer}.mlp.", layer)
            self.leave(layer)
        self.head()
        return p

    # ---- hashed n-gram embedding (5b, PLE)
    def ple(self, layer: int, index: int) -> None:
        g, p, w = self.g, self.program, self.w
        name = f"layers.{layer}.ple."
        if not self.kept_ngrams[index]:
            self.ngram_ops[p.op("wait_ngrams", self.team.cut_cell, may_cut=True)] = index
        # m, n, x and y are free between sites: key in m, normed streams in n, value in x
        linears(p, Input(self.e[index], g.ple_dim), [
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
        wanted, self.out = p.view(p.buffer(MAX_UNDOABLE, g.width)), p.view(p.buffer(MAX_UNDOABLE, g.vocab))
        p.op("copy_rows", p.step, self.s.array, self.s.ld, wanted.array, wanted.ld, g.width)
        x = self.final("hyper_connection_mixer.", wanted, self.last, MAX_UNDOABLE)
        self.lm_head = w.matrix("embed_tokens.weight" if g.tied else "lm_head.weight")
        linear(p, Input(x, g.hidden), self.lm_head, self.out, step=self.last)

    def settle(self) -> Program:
        """The program that adds what stands in a log to S (coli/models/deltanet.py)."""
        return self.deltanet.settle()
