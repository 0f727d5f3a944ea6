"""Gated DeltaNet layers as ops (model_spec.md 1.5), for the trunk of every engine that has them.

    projections -> short convolution over q|k|v -> decay, beta, unit q and k -> recurrence on S -> gated norm -> out

A checkpoint may store the inputs one by one, or grouped by key head (qwen3_next: in_proj_qkvz, in_proj_ba). Grouped
ones are multiplied as they are and their *outputs* put in order by `gather`, so the weights stay in the file's mapping
whatever their type. Value heads come grouped (value head h belongs to key head h // r) or, from most GGUF files, tiled
(h % key heads): the recurrence is told, nothing is moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coli.kernels.packing import block_width
from coli.models.blocks import Blocks
from coli.program.builder import Program, Rows, StateCell
from coli.program.ops import Input, linear, linears
from coli.state import StateSpec

_ACTIVATION = {"silu": 0, "sigmoid": 1}


def gdn_floats(g: Any) -> int:
    """4-byte cells of a row, apart from prepared rows."""
    inner = g.gdn_value_heads * g.gdn_value_dim
    grouped = g.conv_channels + inner + 2 * g.gdn_value_heads + 4 if g.gdn_grouped else 0
    return 2 * (g.conv_channels + inner) + 4 * g.gdn_value_heads + 14 + grouped


def block_floats(g: Any) -> int:
    """A block of S (kernels/deltanet.py)."""
    return block_width(g.gdn_value_dim) * g.gdn_key_dim


def state_widths(g: Any) -> tuple[int, int]:
    """float32 of S of one layer, and of what a row adds to it (model_spec.md section 11, coli/recurrent.py)."""
    values = g.gdn_value_heads * g.gdn_value_dim
    return values * g.gdn_key_dim, values + g.gdn_key_heads * g.gdn_key_dim + g.gdn_value_heads


class DeltaNet:
    """Writes the DeltaNet layers of a trunk; all share one set of buffers."""

    def __init__(self, blocks: Blocks, spec: StateSpec) -> None:
        self.blocks, self.spec, self.g = blocks, spec, blocks.g
        g, p = self.g, blocks.program
        inner = g.gdn_value_heads * g.gdn_value_dim
        self.qkv, self.u = blocks.rows(g.conv_channels), blocks.rows(g.conv_channels)
        self.z, self.o = blocks.rows(inner), blocks.rows(inner)
        self.a, self.b = blocks.rows(g.gdn_value_heads), blocks.rows(g.gdn_value_heads)
        self.decay, self.beta = (p.buffer(p.limit, g.gdn_value_heads) for _ in range(2))
        self.shape = (g.gdn_key_heads, g.gdn_value_heads, g.gdn_key_dim, g.gdn_value_dim)
        self.block = p.buffer(blocks.team.threads, block_floats(g))  # a thread's copy of a block of S
        if g.gdn_grouped:
            self.qkvz, self.ba = blocks.rows(g.conv_channels + inner), blocks.rows(2 * g.gdn_value_heads)
            self.orders = _orders(g)

    def layer(self, name: str, index: int) -> None:
        """x -> y. `index`: the layer's place among the DeltaNet layers; what follows goes by `columns`."""
        g, p, w = self.g, self.blocks.program, self.blocks.w
        self._inputs(name)
        ring = StateCell(lambda state: state.rings[index].ctypes.data)
        p.op("conv_silu", p.step, self.qkv.array, self.qkv.ld, w.conv(name + "conv1d.weight"), ring,
             self.spec.ring_rows(g.gdn_conv - 1), self.u.array, self.u.ld, g.conv_channels, g.gdn_conv, 1, 0, 0)
        p.op("gdn_prep", p.step, self.u.array, self.u.ld, self.a.array, self.a.ld, self.b.array, self.b.ld,
             w.decay(name + "A_log"), w.vector(name + "dt_bias"), self.decay, self.beta, *self.shape)
        self._recurrence(p, index)
        p.op("gated_norm", p.step, self.o.array, self.o.ld, self.z.array, self.z.ld, w.vector(name + "norm.weight"),
             g.gdn_value_heads, g.gdn_value_dim, g.eps, _ACTIVATION[g.gate])
        linear(p, Input(self.o, g.gdn_value_heads * g.gdn_value_dim), w.matrix(name + "out_proj.weight"),
               self.blocks.y, barrier=False)

    def _inputs(self, name: str) -> None:
        """x -> qkv, z, a, b; no barrier behind qkv, the convolution goes by `columns`."""
        p, w, x = self.blocks.program, self.blocks.w, Input(self.blocks.x, self.g.hidden)
        if not self.g.gdn_grouped:
            parts = (("z", self.z), ("a", self.a), ("b", self.b), ("qkv", self.qkv))
            linears(p, x, [(w.matrix(f"{name}in_proj_{part}.weight"), rows) for part, rows in parts], barrier=False)
            return
        products = [(w.matrix(name + "in_proj_ba.weight"), self.ba)]
        gathered = [(self.ba, "b", self.b), (self.ba, "a", self.a)]
        if f"{name}in_proj_qkvz.weight" in w.checkpoint:
            products.append((w.matrix(name + "in_proj_qkvz.weight"), self.qkvz))
            gathered += [(self.qkvz, "z", self.z), (self.qkvz, "qkv", self.qkv)]
        else:
            products += [(w.matrix(f"{name}in_proj_{part}.weight"), rows)
                         for part, rows in (("z", self.z), ("qkv", self.qkv))]  # fmt: skip
        linears(p, x, products)
        for source, order, out in gathered:
            self._gather(source, self.orders[order], out)

    def _gather(self, source: Rows, order: np.ndarray, out: Rows) -> None:
        p = self.blocks.program
        p.op("gather", p.step, source.array, source.ld, order, out.array, out.ld, len(order), barrier=False)

    def _recurrence(self, p: Program, index: int) -> None:
        p.op("deltanet", p.step, self.u.array, self.u.ld, self.decay, self.beta,
             StateCell(lambda state: state.cells.ctypes.data), 4 * index * self.spec.recurrent_width, self.o.array,
             self.o.ld, *self.shape, int(self.blocks.w.checkpoint.traits.tiled), index * self.spec.log_layer_bytes(),
             self.spec.log_row_bytes(), self.block, self.block.strides[0])

    def settle(self) -> Program:
        """Only the recurrence, to be played over no rows: S takes in what stands in its log (coli/recurrent.py)."""
        p = Program(1)
        for index in range(self.spec.recurrent_layers):
            self._recurrence(p, index)
        return p


def _orders(g: Any) -> dict[str, np.ndarray]:
    """Where q|k|v, z, b and a lie in outputs that are grouped by key head (model_spec.md section 2b)."""
    r, dk, dv, keys = g.gdn_value_heads // g.gdn_key_heads, g.gdn_key_dim, g.gdn_value_dim, g.gdn_key_heads
    wide = np.arange(keys * (2 * dk + 2 * r * dv), dtype=np.int32).reshape(keys, -1)
    q, k, v, z = np.split(wide, np.cumsum([dk, dk, r * dv]), axis=1)
    b, a = np.split(np.arange(2 * g.gdn_value_heads, dtype=np.int32).reshape(keys, -1), 2, axis=1)
    parts = {"qkv": (q, k, v), "z": (z,), "b": (b,), "a": (a,)}
    return {name: np.concatenate([part.ravel() for part in pieces]) for name, pieces in parts.items()}
