"""Qwen3.8-Flash-Next ready to run: a trunk whose program also waits for n-gram rows.

The rows of the n-gram tables are started before the step and put in place where the program stops for them
(coli/ngrams.py); small tables are in memory and there when it starts.
"""

from __future__ import annotations

import numpy as np

from coli.errors import ReadError
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.models.base import Weights
from coli.models.qwen38_geometry import Geometry
from coli.models.qwen38_program import Writer
from coli.models.trunk import Trunk
from coli.ngrams import NgramHash, NgramTable
from coli.program.cache import Kernels
from coli.program.cpu import Team
from coli.state import State


class Qwen38(Trunk):
    """See coli/models/trunk.py."""

    _writer: Writer

    def __init__(self, checkpoint: Checkpoint, g: Geometry, weights: Weights, store: ExpertStore, kernels: Kernels,
                 team: Team, *, ctx: int, limit: int, undo: str = "slots", prefetch: str = "auto") -> None:
        self._hashes = [NgramHash(g, i) for i in range(len(g.ple_layers))]
        self._tables = [NgramTable(checkpoint, g, layer) for layer in g.ple_layers]
        self._ngrams: list[np.ndarray] = []  # of the step under way: table rows by PLE layer
        writer = Writer(g, weights, store, team, ctx, limit, [table.kept for table in self._tables])
        super().__init__(writer, kernels, ctx=ctx, limit=limit, undo=undo, prefetch=prefetch)

    def _begin(self, ids: np.ndarray, state: State) -> None:
        """Hash the n-grams of the new rows and start reading their table rows, or put them in place."""
        if self._tables:
            back = self.geometry.ngram_size - 1
            before = state.tokens[max(0, state.length - back) : state.length]
            window = np.concatenate([self._hashes[0].empty_history()[len(before) :], before, ids])
            self._ngrams = [hashing.rows(window) for hashing in self._hashes]
            for numbers, table, e in zip(self._ngrams, self._tables, self._writer.e, strict=True):
                table.start(numbers)
                if table.kept:
                    e.array[: len(ids)] = table.wait()

    def _put(self, op: int, rows: int) -> None:
        index = self._writer.ngram_ops[op]
        table, e = self._tables[index], self._writer.e[index].array
        try:
            e[:rows] = table.wait()
        except ReadError:
            if not self._drafts:
                raise
            table.start(self._ngrams[index][:1])  # the pick's own row; drafts without theirs are no numbers
            e[0], e[1:rows] = table.wait()[0], np.nan

    def close(self) -> None:
        for table in self._tables:
            table.close()
