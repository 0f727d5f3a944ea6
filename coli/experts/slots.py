"""Memory for experts of one size: equal slots, which of them holds what, and which goes next.

Idea: one arena in anonymous memory that costs nothing until a slot is written, shared by all layers whose experts have
this size. An expert of the store is a `key`, layer * experts + number, into the store's flat arrays: `table`, the
address of its slot or 0, `stamp`, the step it was last used in (kernels write it), `pinned`. Slots are taken from the
lowest up, so what was never written lies at the end and giving memory back is cutting there.

Who goes: the one whose layer has run most often since without it. Layers take turns, so a stamp of the step before is
as good in a layer that is still to run as one of this step in a layer that has run; plain least-recently-used throws
out what is wanted next (nano with 6 of 16 experts a layer: 30.3 misses a token, this order 25.7). Stamps only grow, so
experts once sorted stay a list of victims in order: an entry counts while its expert still has that stamp, and whatever
is not on it is newer. The list holds a 64th of the slots (until it is used up it may be a turn behind) and is made anew
in some 0.02 us a slot.
Invariants: a slot has one owner or none; the owner of a slot is the only key whose address it is. Guarded by
tests/formats/test_experts_pool.py, against a model.
"""

from __future__ import annotations

import mmap
import sys
from bisect import insort
from collections.abc import Collection
from contextlib import suppress

import numpy as np

from coli.errors import DoesNotFit

_HUGE = 32 << 20  # arenas from this size ask for huge pages, which at most round their RSS up by 2 MiB
_NOBODY = -1


class Slots:
    """`capacity` slots of `nbytes` for `layers` layers of `experts` experts each. `taken`: slots that memory was taken
    for, the lowest ones. `table`, `stamp`, `pinned`: the store's, flat."""

    def __init__(self, nbytes: int, layers: int, capacity: int, experts: int, table: np.ndarray, stamp: np.ndarray,
                 pinned: np.ndarray) -> None:  # fmt: skip
        self.nbytes, self.layers, self.capacity, self.taken = nbytes, layers, capacity, 0
        self._experts, self._table, self._stamp, self._pinned = experts, table, stamp, pinned
        self._owner = np.full(capacity, _NOBODY, np.int64)
        self._free: list[int] = []  # below `taken`
        self._victims: list[tuple[int, int]] = []  # (stamp, key), the oldest last
        self._memory = _map(capacity * nbytes)
        self._arena = np.frombuffer(self._memory, np.uint8)
        self._base = self._arena.ctypes.data

    @property
    def free(self) -> int:
        return len(self._free) + self.capacity - self.taken

    def bytes_of(self, slot: int) -> np.ndarray:
        """uint8 [nbytes]."""
        return self._arena[slot * self.nbytes : (slot + 1) * self.nbytes]

    def held(self, key: int) -> np.ndarray:
        """uint8 [nbytes], the slot of a resident expert. Raises KeyError."""
        if not self._table[key]:
            raise KeyError(key)
        return self.bytes_of(self._slot(key))

    def _slot(self, key: int) -> int:
        return (int(self._table[key]) - self._base) // self.nbytes

    def take(self) -> int:
        """A free slot, for the caller to fill."""
        if self._free:
            return self._free.pop()
        self.taken += 1
        return self.taken - 1

    def give(self, slot: int, *, written: bool) -> None:
        """A slot taken in vain; the last one is as new where nothing was written into it."""
        if slot == self.taken - 1 and not written:
            self.taken -= 1
        else:
            self._free.append(slot)

    def put(self, key: int, slot: int) -> None:
        """The slot holds this expert from now on, which has its stamp."""
        self._owner[slot] = key
        self._table[key] = self._base + slot * self.nbytes
        entry = int(self._stamp[key]), key
        if self._victims and entry < self._victims[0]:  # read in the background: nobody has used it yet
            insort(self._victims, entry, key=_newest_first)

    # ---- who goes ----------------------------------------------------------------------------------------------------

    def _evict(self, key: int) -> None:
        slot = self._slot(key)
        self._table[key] = 0
        self._owner[slot] = _NOBODY
        self._free.append(slot)

    def evict_oldest(self, count: int, layer: int, keep: Collection[int] = (), before: int | None = None) -> int:
        """Evict up to `count` unpinned experts but those of `keep`, in the turn of this layer; `before`: only those
        whose layer has run since that step without them. Returns how many."""
        for done in range(count):
            key = self._next_victim(layer, keep, before)
            if key is None:
                return done
            self._evict(key)
        return count

    def _next_victim(self, layer: int, keep: Collection[int], before: int | None) -> int | None:
        for fresh in (False, True):
            if fresh:
                oldest = self._oldest(self._owners(), layer, keep, 1 + self.capacity // 64)
                self._victims = list(zip(self._stamp[oldest].tolist(), oldest.tolist(), strict=True))[::-1]
            while self._victims:
                stamp, key = self._victims[-1]
                stays = not self._table[key] or self._stamp[key] != stamp or self._pinned[key] or key in keep
                if not stays and before is not None and stamp + (key // self._experts > layer) >= before:
                    return None  # and so are all others
                self._victims.pop()
                if not stays:
                    return key
        return None

    def evict_fairly(self, count: int, keep: Collection[int], layer: int, share: int) -> int:
        """Like `evict_oldest`, for a layer that wants many: what it has beyond its share goes first, then what others
        have beyond theirs."""
        owners = self._owners()
        layers = owners // self._experts
        over = np.bincount(layers, minlength=len(self._table) // self._experts) - share
        own = self._oldest(owners[layers == layer], layer, keep, min(count, max(0, int(over[layer]) + count)))
        rest = self._oldest(owners[(over[layers] > 0) & (layers != layer)], layer, keep, count - len(own))
        for key in (*own.tolist(), *rest.tolist()):
            self._evict(key)
        return len(own) + len(rest)

    def _owners(self) -> np.ndarray:
        owners = self._owner[: self.taken]
        return owners[owners != _NOBODY]

    def _oldest(self, keys: np.ndarray, layer: int, keep: Collection[int], count: int) -> np.ndarray:
        """The first `count` to go in the turn of this layer, in order."""
        keys = keys[~self._pinned[keys]]
        if keep:
            keys = keys[~np.isin(keys, list(keep))]
        order = (self._stamp[keys] + (keys // self._experts > layer)) * len(self._table) + keys
        first = np.argpartition(order, count)[:count] if count < len(keys) else np.arange(len(keys))
        return keys[first[np.argsort(order[first])]]

    # ---- giving memory back ------------------------------------------------------------------------------------------

    def shrink(self, capacity: int) -> None:
        """Keep this many slots: slots never written go first, then the experts used longest ago, pinned ones last. No
        slot may be on its way to be filled, no kernel may run."""
        owners = self._owners()
        order = np.lexsort((owners, self._stamp[owners], self._pinned[owners]))
        for key in owners[order][: max(0, len(owners) - capacity)].tolist():
            self._evict(key)
        empty = np.flatnonzero(self._owner[:capacity] == _NOBODY).tolist()
        for slot in (np.flatnonzero(self._owner[capacity:] != _NOBODY) + capacity).tolist():
            into = empty.pop()
            self.bytes_of(into)[:] = self.bytes_of(slot)
            self.put(int(self._owner[slot]), into)
        self._owner = self._owner[:capacity].copy()
        self.capacity, self.taken = capacity, min(self.taken, capacity)
        self._free = np.flatnonzero(self._owner[: self.taken] == _NOBODY).tolist()[::-1]
        self._victims = []
        self._release(capacity * self.nbytes)

    def _release(self, start: int) -> None:
        """Return the pages from this byte on to the system."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        advice = getattr(mmap, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", None)
        if advice is not None and first < len(self._memory):
            self._memory.madvise(advice, first, len(self._memory) - first)


def _newest_first(entry: tuple[int, int]) -> tuple[int, int]:
    return -entry[0], -entry[1]


def _map(nbytes: int) -> mmap.mmap:
    """Page-aligned, private, zero memory that costs nothing until it is written."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise DoesNotFit(f"no address space for {nbytes} bytes of expert slots: {error}", "--cap",
                         "give fewer slots") from None  # fmt: skip
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only speed differs
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
