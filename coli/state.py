"""Everything a sequence leaves behind, and how its last rows are taken back.

    K, V          [attention layers][kv heads][ctx][d]   rewound by `length`: rows past it are a stale tail
    raw, pooled   [attention layers][ctx | ctx/ratio][d]  index keys, rewound by `length` too
    S             [GDN layers][value heads][dv/64][dk][64] cannot be rewound: see below
    rings         conv inputs of GDN and PLE layers, addressed by position modulo their length; long enough that a
                  rejected row never overwrites one that a standing row still needs
    tokens        ids of all rows; the n-gram window is read from here

`keep(n)` after an undoable forward leaves exactly what n of its rows would have left. For S the *slots* variant: row
r of an undoable forward writes the state behind it to slot r, the last row to the live state (no extra copy is made,
kernels/deltanet.py); keeping n < rows swaps the live state with slot n-1: pointers change, nothing is recomputed.
Slots are allocated the first time a verify that deep runs; `reserve` either gives all it was asked for or leaves
everything as it was. Guarded by tests/models/test_undo.py.

Which arrays a model needs is in `StateSpec`; this module knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coli.errors import UsageError

MAX_UNDOABLE = 8


@dataclass(frozen=True)
class StateSpec:
    """Sizes of a model's state. Widths in float32 elements."""

    attention_layers: int
    kv_heads: int
    head_dim: int
    index_dim: int
    index_ratio: int
    recurrent_layers: int
    recurrent_width: int  # of S, one layer
    rings: tuple[tuple[int, int], ...]  # (rows kept, width) of each ring

    def ring_rows(self, kept: int) -> int:
        return kept + MAX_UNDOABLE

    def kv_bytes_per_token(self) -> int:
        """K, V, raw index keys and pooled keys of one token, all attention layers."""
        per_layer = 2 * self.kv_heads * self.head_dim + self.index_dim
        return 4 * self.attention_layers * per_layer + 4 * self.attention_layers * self.index_dim // self.index_ratio

    def recurrent_bytes(self) -> int:
        """S of all layers: the live state, and each undo slot."""
        return 4 * self.recurrent_layers * self.recurrent_width

    def ring_bytes(self) -> int:
        return sum(4 * self.ring_rows(kept) * width for kept, width in self.rings)


@dataclass(frozen=True)
class Snapshot:
    """A state at one length, apart from K/V and index keys (those stay in place until overwritten)."""

    length: int
    tokens: np.ndarray
    recurrent: np.ndarray
    rings: tuple[np.ndarray, ...]  # the kept rows, oldest first

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.recurrent.nbytes + sum(ring.nbytes for ring in self.rings)


class State:
    """The state of one sequence of at most `ctx` tokens."""

    def __init__(self, spec: StateSpec, ctx: int) -> None:
        self.spec, self.ctx = spec, ctx
        self.length = 0
        self.tokens = np.zeros(ctx, np.int64)
        # np.zeros of a large array is lazy: a page costs memory from its first write on
        kv = (spec.attention_layers, spec.kv_heads, ctx, spec.head_dim)
        self.k, self.v = np.zeros(kv, np.float32), np.zeros(kv, np.float32)
        self.raw = np.zeros((spec.attention_layers, ctx, spec.index_dim), np.float32)
        self.pooled = np.zeros((spec.attention_layers, ctx // spec.index_ratio + 1, spec.index_dim), np.float32)
        self.rings = [np.zeros((spec.ring_rows(kept), width), np.float32) for kept, width in spec.rings]
        self.live = self._recurrent()
        self.slots: list[np.ndarray] = []
        # what the DeltaNet kernel reads: addresses of the live state and of each slot
        self.cells = np.zeros(1 + MAX_UNDOABLE, np.int64)
        self._point()
        self._undo: tuple[int, int] | None = None  # (length before the last forward, its rows) while keep() may act

    def _recurrent(self) -> np.ndarray:
        return np.zeros(self.spec.recurrent_layers * self.spec.recurrent_width, np.float32)

    def _point(self) -> None:
        self.cells[0] = self.live.ctypes.data
        for i, slot in enumerate(self.slots):
            self.cells[1 + i] = slot.ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes allocated (address space; untouched pages cost no memory)."""
        arrays = [self.k, self.v, self.raw, self.pooled, self.live, *self.rings, *self.slots]
        return self.tokens.nbytes + sum(array.nbytes for array in arrays)

    def reserve(self, slots: int) -> bool:
        """Have at least `slots` undo slots; False, and nothing changed, when memory does not allow it."""
        fresh: list[np.ndarray] = []
        try:
            while len(self.slots) + len(fresh) < slots:
                fresh.append(self._recurrent())
        except MemoryError:
            return False
        self.slots += fresh
        self._point()
        return True

    def check_room(self, rows: int) -> None:
        if self.length + rows > self.ctx:
            raise UsageError(
                f"{self.length} tokens and {rows} more do not fit the context of {self.ctx}", "--ctx", "raise --ctx"
            )

    def append(self, tokens: np.ndarray, *, undoable: bool) -> None:
        """Account for rows a forward has just run."""
        rows = len(tokens)
        self._undo = (self.length, rows) if undoable else None
        self.tokens[self.length : self.length + rows] = tokens
        self.length += rows

    def keep(self, rows: int) -> None:
        """Leave what the first `rows` of the last undoable forward's rows left (at least 1: the pick stands)."""
        if self._undo is None:
            raise ValueError("keep() follows an undoable forward, once")
        before, count = self._undo
        if not 1 <= rows <= count:
            raise ValueError(f"keep({rows}) of {count} rows")
        if rows < count:
            self.live, self.slots[rows - 1] = self.slots[rows - 1], self.live
            self._point()
        self.length, self._undo = before + rows, None

    def reset(self) -> None:
        """Back to an empty sequence."""
        self.length, self._undo = 0, None
        self.live[:] = 0

    def _ring_index(self, which: int) -> np.ndarray:
        kept = self.spec.rings[which][0]
        return np.arange(self.length - kept, self.length) % self.spec.ring_rows(kept)

    def copy(self) -> Snapshot:
        rings = []
        for i, ring in enumerate(self.rings):
            rows = ring[self._ring_index(i)].copy()
            rows[: max(0, len(rows) - self.length)] = 0  # positions before the first token
            rings.append(rows)
        return Snapshot(self.length, self.tokens[: self.length].copy(), self.live.copy(), tuple(rings))

    def load(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this sequence whose K/V rows are still in place."""
        self.length, self._undo = snapshot.length, None
        self.tokens[: self.length] = snapshot.tokens
        self.live[:] = snapshot.recurrent
        for i, (ring, rows) in enumerate(zip(self.rings, snapshot.rings, strict=True)):
            ring[self._ring_index(i)] = rows

    def content(self) -> dict[str, bytes]:
        """Every byte that later rows can depend on: two states with equal content are the same state."""
        snap = self.copy()
        blocks = self.length // self.spec.index_ratio
        parts: dict[str, np.ndarray] = {
            "tokens": snap.tokens, "recurrent": snap.recurrent, "k": self.k[:, :, : self.length],
            "v": self.v[:, :, : self.length], "raw": self.raw[:, : self.length], "pooled": self.pooled[:, :blocks],
        }
        parts |= {f"ring{i}": ring for i, ring in enumerate(snap.rings)}
        return {name: array.tobytes() for name, array in parts.items()}
