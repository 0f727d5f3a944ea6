"""Everything a sequence leaves behind, and how its last rows are taken back.

    K, V          [attention layers][kv heads][ctx][d]   rewound by `length`: rows past it are a stale tail
    raw, pooled   [attention layers][ctx | ctx/ratio][d]  index keys, rewound by `length` too
    S             [GDN layers][value heads][dv/64][dk][64] cannot be rewound: coli/recurrent.py
    rings         conv inputs of GDN and PLE layers, addressed by position modulo their length; long enough that a
                  rejected row never overwrites one that a standing row still needs
    tokens        ids of all rows; the n-gram window is read from here

`keep(n)` after an undoable forward leaves exactly what n of its rows would have left; what does that for S, by slots or
by a log, is in coli/recurrent.py. Guarded by tests/models/test_undo.py.

Which arrays a model needs is in `StateSpec`; this module knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from coli.errors import UsageError
from coli.recurrent import MAX_UNDOABLE, Log, Recurrent, Slots


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
    log_width: int = 0  # of what a row adds to S, one layer: its delta, k and decay

    def ring_rows(self, kept: int) -> int:
        return kept + MAX_UNDOABLE

    def kv_bytes_per_token(self) -> int:
        """K, V, raw index keys and pooled keys of one token, all attention layers."""
        per_layer = 2 * self.kv_heads * self.head_dim + self.index_dim
        return 4 * self.attention_layers * per_layer + 4 * self.attention_layers * self.index_dim // self.index_ratio

    def recurrent_bytes(self) -> int:
        """S of all layers: the live state, and each undo slot."""
        return 4 * self.recurrent_layers * self.recurrent_width

    def log_row_bytes(self) -> int:
        """Distance between two rows of a layer's log: whole cache lines."""
        return -(-4 * self.log_width // 64) * 64

    def log_layer_bytes(self) -> int:
        """One layer's rows in one half of the log; the first row of a verify needs no place in it."""
        return (MAX_UNDOABLE - 1) * self.log_row_bytes()

    def undo_bytes(self, undo: str, rows: int) -> int:
        """What taking back up to `rows` rows needs beside the state."""
        if undo == "slots":
            return rows * self.recurrent_bytes()
        return 2 * self.recurrent_layers * self.log_layer_bytes() if rows else 0

    def snapshot_bytes(self, ctx: int) -> int:
        """A `Snapshot` of a whole context: S, the kept rows of every ring, the tokens."""
        return self.recurrent_bytes() + sum(4 * kept * width for kept, width in self.rings) + 8 * ctx

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


def _recurrent(spec: StateSpec, undo: str, settle: Callable[[Any], None] | None) -> Recurrent:
    floats = spec.recurrent_layers * spec.recurrent_width
    if undo not in ("slots", "log") or (undo == "log" and floats and not (settle and spec.log_width)):
        raise ValueError(f"undo={undo!r}: it is slots, or log, which needs `settle` and `log_width`")
    if undo == "slots" or settle is None:  # nothing recurrent: nothing to log
        return Slots(floats)
    return Log(floats, spec.recurrent_layers * spec.log_layer_bytes() // 4, settle)


class State:
    """The state of one sequence of at most `ctx` tokens.

    `undo`: how S's rows are taken back, "slots" or "log"; a log needs `settle` (coli/recurrent.py)."""

    def __init__(
        self, spec: StateSpec, ctx: int, *, undo: str = "slots", settle: Callable[[Any], None] | None = None
    ) -> None:
        self.spec, self.ctx = spec, ctx
        self.length = 0
        self.tokens = np.zeros(ctx, np.int64)
        # np.zeros of a large array is lazy: a page costs memory from its first write on
        kv = (spec.attention_layers, spec.kv_heads, ctx, spec.head_dim)
        self.k, self.v = np.zeros(kv, np.float32), np.zeros(kv, np.float32)
        self.raw = np.zeros((spec.attention_layers, ctx, spec.index_dim), np.float32)
        self.pooled = np.zeros((spec.attention_layers, ctx // spec.index_ratio + 1, spec.index_dim), np.float32)
        self.rings = [np.zeros((spec.ring_rows(kept), width), np.float32) for kept, width in spec.rings]
        self.recurrent = _recurrent(spec, undo, settle)
        self.cells = self.recurrent.cells  # what the DeltaNet kernel reads
        self.answering = False  # a session's answer is under way on it
        self._undo: tuple[int, int] | None = None  # (length before the last forward, its rows) while keep() may act

    @property
    def nbytes(self) -> int:
        """Bytes allocated (address space; untouched pages cost no memory)."""
        arrays: list[np.ndarray] = [self.tokens, self.k, self.v, self.raw, self.pooled, *self.rings]
        return self.recurrent.nbytes + sum(array.nbytes for array in arrays)

    def reserve(self, rows: int) -> bool:
        """Be ready to take back `rows` rows; False, and nothing changed, when memory does not allow it."""
        return self.recurrent.reserve(rows)

    def check_room(self, rows: int) -> None:
        if self.length + rows > self.ctx:
            raise UsageError(
                f"{self.length} tokens and {rows} more do not fit the context of {self.ctx}", "--ctx", "raise --ctx"
            )

    def append(self, tokens: np.ndarray, *, undoable: bool) -> None:
        """Account for rows a forward has just run."""
        rows = len(tokens)
        self._undo = (self.length, rows) if undoable else None
        self.recurrent.ran(rows, undoable)
        self.tokens[self.length : self.length + rows] = tokens
        self.length += rows

    def keep(self, rows: int) -> None:
        """Leave what the first `rows` of the last undoable forward's rows left (at least 1: the pick stands)."""
        if self._undo is None:
            raise ValueError("keep() follows an undoable forward, once")
        before, count = self._undo
        if not 1 <= rows <= count:
            raise ValueError(f"keep({rows}) of {count} rows")
        self.recurrent.keep(rows, count)
        self.length, self._undo = before + rows, None

    def reset(self) -> None:
        """Back to an empty sequence."""
        self.length, self._undo = 0, None
        self.recurrent.load(0.0)

    def _ring_index(self, which: int) -> np.ndarray:
        kept = self.spec.rings[which][0]
        return np.arange(self.length - kept, self.length) % self.spec.ring_rows(kept)

    def copy(self) -> Snapshot:
        rings = []
        for i, ring in enumerate(self.rings):
            rows = ring[self._ring_index(i)].copy()
            rows[: max(0, len(rows) - self.length)] = 0  # positions before the first token
            rings.append(rows)
        return Snapshot(self.length, self.tokens[: self.length].copy(), self.recurrent.copy(), tuple(rings))

    def load(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this sequence whose K/V rows are still in place."""
        self.length, self._undo = snapshot.length, None
        self.tokens[: self.length] = snapshot.tokens
        self.recurrent.load(snapshot.recurrent)
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
