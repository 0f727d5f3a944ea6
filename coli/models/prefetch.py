"""Reading ahead: which experts the next layer will probably choose, found out while this layer's are being read.

Idea: where a program stops for a layer's experts, the streams lack only that layer's experts and the next mixer. The
next layer's router over them as they are mostly says what it will say later (of nano's choices 86 in 100, 81 two layers
on; tests/bench/prefetch.py measures it). So behind the trunk's program stand, for every layer with experts, the few ops
that lead from the streams to its choice: site or norm, and router, with the layer's own weights. The host plays them
once this layer's reads are under way, and what is not resident is read behind those. Where the next layer wants
nothing, the one behind it is asked.

*What it may touch.* The ops write only what is free while a layer waits for experts: y, the router's logits, a site's
own scratch, and a choice of their own. Nothing a later op reads depends on them, and an expert is the same bits whoever
had it read: tokens never change (tests/models/test_prefetch.py compares logits and state, byte for byte).

*What pays* (`auto`). An expert read ahead and then used saves waiting for it, but no more of that than the computing in
between; one read in vain takes as much of the disk. Two rules follow. `Score`: a rank of the router's choice of which
less than half is used afterwards is left out, for its reads cost more than they can save. `Trial`: whether the rest
pays depends on the disk, on how long a layer computes, and on what guesses evict, so it is measured: some forwards run
with it and some without, and the way that waits less for an expert is kept. Both try again what they left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coli.kernels.packing import prepared_row_bytes
from coli.models.blocks import Blocks
from coli.program.ops import Input, linear
from coli.state import MAX_UNDOABLE

REACH = 2  # layers ahead that are asked, at most
PAYS = 0.5  # share of a rank that must be used
ENOUGH = 32  # experts of a rank before its share counts
WINDOW = 512  # experts of a rank after which old ones count half
AGAIN = 64  # forwards between tries of the ranks left out
TURN = 16  # forwards in a row that run one way
MEAN = 4  # turns whose mean is compared
SELDOM = 8  # turns of the better way for one of the other


def prefetch_bytes(g: Any, codes: int) -> int:
    """Bytes a `Prefetch` adds to a program, at most; `codes`: kinds of int8 codes beside integer weights."""
    if not g.experts:
        return 0
    row = prepared_row_bytes("q8_0", -(-g.hidden // 32) * 32)
    return MAX_UNDOABLE * (12 * g.top_k + codes * row) + 96 * (1 + codes)


class Score:
    """How many experts of each rank, by layers ahead, were read ahead and then used, old ones counting less."""

    def __init__(self, ranks: int) -> None:
        self.asked = np.zeros((REACH, ranks))
        self.used = np.zeros((REACH, ranks))

    def add(self, step: int, ranks: np.ndarray, used: np.ndarray) -> None:
        np.add.at(self.asked[step], ranks, 1)
        np.add.at(self.used[step], ranks, used)
        if (full := self.asked[step] >= WINDOW).any():
            self.asked[step][full] /= 2
            self.used[step][full] /= 2

    def paying(self, step: int) -> np.ndarray:
        """bool [ranks]; a rank pays until enough of it were asked for."""
        asked, used = self.asked[step], self.used[step]
        return (asked < ENOUGH) | (used >= PAYS * asked)


class Trial:
    """With or without: turns of forwards both ways, and what an expert cost in each. `on`: this turn's way; `cost`:
    seconds waited for an expert, a mean of the last turns."""

    def __init__(self) -> None:
        self.on = False
        self.cost: dict[bool, float] = {True: 0.0, False: 0.0}
        self._tries = {True: 0, False: -1}  # the first turn fills an empty cache and says nothing
        self._since = 0  # turns since the other way was tried
        self._forwards, self._seconds, self._experts = 0, 0.0, 0

    def add(self, seconds: float, experts: int) -> None:
        """A forward waited so long and used so many experts."""
        self._forwards += 1
        self._seconds += seconds
        self._experts += experts
        if self._forwards == TURN:
            self._turn(self._seconds / max(1, self._experts))
            self._forwards, self._seconds, self._experts = 0, 0.0, 0

    def _turn(self, cost: float) -> None:
        self._tries[self.on] += 1
        if tries := self._tries[self.on]:
            self.cost[self.on] += (cost - self.cost[self.on]) / min(tries, MEAN)
        if min(self._tries.values()) < 2:
            self.on = self._tries[True] <= self._tries[False]
            return
        better = self.cost[True] <= self.cost[False]
        self._since = self._since + 1 if self.on == better else 0
        self.on = better if self._since < SELDOM else not better


class Prefetch:
    """Writes its ops behind those of the trunk that `blocks` wrote, which must not be finished yet."""

    def __init__(self, blocks: Blocks, *, auto: bool) -> None:
        """`auto`: what does not pay is left out; else everything is read ahead, whatever comes of it."""
        self._blocks, self._store, self._team = blocks, blocks.store, blocks.team
        self.auto, self.score, self.trial = auto, Score(blocks.g.top_k), Trial()
        p, g = blocks.program, blocks.g
        self.choice = p.buffer(MAX_UNDOABLE, g.top_k, dtype=np.int64)
        self._share = p.buffer(MAX_UNDOABLE, g.top_k)
        self._ranks, self._all = np.arange(g.top_k), np.ones(g.top_k, bool)
        self._x = p.view(blocks.y.array[:MAX_UNDOABLE])
        self._ops = [self._write(layer) for layer in self._store.layers]
        self._asked: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # this forward: layers ahead, layer, ids, ranks
        self._forwards = 0

    def _write(self, layer: str) -> tuple[int, int]:
        """First row and end of the ops that choose for the layer of this name prefix."""
        b, p, g = self._blocks, self._blocks.program, self._blocks.g
        start = p.here
        b.look(layer, self._x)
        linear(p, Input(self._x, g.hidden), b.w.matrix(f"{layer}mlp.gate.weight"), b.logits, step=b.step)
        p.op("router", b.step, b.logits.array, b.logits.ld, g.experts, g.top_k, self.choice, self._share, g.norm_topk)
        return start, p.here

    def begin(self) -> None:
        """A forward starts. One that failed says nothing about what it asked for."""
        self._asked.clear()

    def ahead(self, layer: int, rows: int) -> tuple[int, list[int]] | None:
        """(layer, its likely experts), surest first, where some of them are worth reading ahead while `layer` waits for
        its own; at most 8 rows. Those that are there are named too, not to be evicted for the others."""
        if self.auto and not self.trial.on:
            return None
        for step in range(min(REACH, len(self._ops) - 1 - layer)):
            again = not self.auto or self._forwards % AGAIN == 0
            pays = self._all if again else self.score.paying(step)
            if not pays.any():
                continue
            target = layer + 1 + step
            ids, ranks = self._look(target, rows)
            there = self._store.table[target, ids] != 0
            worth = pays[ranks] & ~there
            if worth.any():
                self._asked.append((step, target, ids[worth], ranks[worth]))
                return target, ids[worth | there].tolist()
        return None

    def _look(self, layer: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(experts the router of `layer` would choose now, their best ranks), best ranks first."""
        self._team.play(self._blocks.program, *self._ops[layer])
        if rows == 1:
            return self.choice[0], self._ranks
        ids, first = np.unique(self.choice[:rows].T, return_index=True)  # all rows' first choices, then their second
        order = np.argsort(first)
        return ids[order], first[order] // rows

    def judge(self, clock: int, seconds: float) -> None:
        """The forward of this clock is over, it waited so long for experts: which of those asked for did it use?"""
        self._forwards += 1
        for step, layer, ids, ranks in self._asked:
            self.score.add(step, ranks, self._store.stamp[layer, ids] == clock)
        self.trial.add(seconds, int(self._blocks.used[0]))
