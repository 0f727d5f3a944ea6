"""Routed experts: read from the checkpoint when a layer asks for them, kept in slots that all layers share.

Idea: what a slot holds is the layer's `ExpertRecord` (coli/experts/records.py): gate, up and down in the kinds the
kernels multiply, each part on a 64-byte boundary. Layers whose records have one size share one `Slots`
(coli/experts/slots.py) of `cap` slots a layer, so a layer that uses many experts gets more of them than one that uses
few. Kernels see two int64 arrays [layers, experts]: `table`, the address of an expert's slot or 0, and `stamp`, where
they write the step an expert was last used in, one clock over all layers. `ensure` makes experts resident and evicts
the ones used longest ago; all its misses are read together on a few threads (coli/experts/loads.py). `fill` and
`prefetch` read in the background what may be wanted later.

*Prompts.* A layer that asks for more experts in one forward than decoding does takes its own slots first, and what
others have beyond their share: a prompt that goes through all experts does not flush the other layers'.

*Background reads* land in slots that no kernel knows, and are announced by the calling thread alone, in `settle` and
`ensure`, while no kernel runs. One that is wanted before it has landed is waited for, not read again; one that fails is
forgotten, and the read that somebody waits for names what is wrong.

Invariants: a slot's address enters `table` only after every byte of it was read, converted and checked; an evicted
address leaves `table` before its slot is overwritten; the experts of one call never evict each other; a resident
expert has the file's codes and scales, so what is resident changes no bit of a result. Every size has slots for its
pinned experts and a whole call besides: no call waits for ever. Guarded by tests/formats/test_experts.py (bytes,
faults), test_experts_background.py and test_experts_pool.py (order, pins, shrinking; anything in any order).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from coli.errors import UsageError
from coli.experts.loads import Load, Loader, Reader, Why
from coli.experts.plan import ExpertPlan, plan_experts
from coli.experts.reader import ExpertReader
from coli.experts.records import ExpertRecord, LayerExperts, Sizes
from coli.experts.slots import Slots
from coli.formats.checkpoint import Checkpoint

Ahead = Callable[[], tuple[int, Sequence[int]] | None]
_MANY = 64  # experts a forward misses of one layer: more than any verify does


class ExpertStore:
    """The expert cache of one open checkpoint, which must have passed its engine's check. For one caller at a time.

    `cap`: slots a layer, on average, and the most experts of a call; `layers`: name prefixes of the layers it serves,
    the trunk's by default; `mode`: requantise; for `activations` "f32" quantised kinds end in f; `plan` says all three
    where it was made before; `reader`: how bytes come from the files. `records`: what a slot of each layer holds.
    `table`, `stamp`: int64 [layers, experts], see the module; `uses`, the same: forwards that used an expert.
    Counted are experts: `hits`, `misses`, `warmed` by `fill`, `prefetched`, and of those `prefetch_used`, chosen before
    they were evicted. `bytes_read`: file bytes, also in the background. `format`, `notes`: words.
    """

    def __init__(
        self, checkpoint: Checkpoint, geometry: Sizes, cap: int, threads: int, layers: Sequence[str] | None = None, *,
        mode: str = "stored", activations: str = "int8", plan: ExpertPlan | None = None, reader: Reader | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= cap <= geometry.experts:
            raise UsageError(f"{cap} expert slots a layer, the model has {geometry.experts} experts", "--cap",
                             f"give 1 to {geometry.experts}")  # fmt: skip
        self.geometry, self._checkpoint = geometry, checkpoint
        plan = plan or plan_experts(checkpoint, geometry, layers, mode, activations)
        self._own_reader: ExpertReader | None = None  # what is given, its giver closes
        if reader is None:
            reader = self._own_reader = ExpertReader(checkpoint)
        self._loader = Loader(plan.layers, reader, threads)
        self._begin(plan.layers, plan.format, list(plan.notes), geometry.experts, cap)

    def _begin(self, places: Sequence[LayerExperts], form: str, notes: list[str], experts: int, cap: int) -> None:
        self.cap, self.format, self.notes = cap, form, notes
        self.layers = tuple(layer.prefix for layer in places)
        self.records: list[ExpertRecord] = [layer.record for layer in places]
        self.hits = self.misses = self.bytes_read = self.warmed = self.prefetched = self.prefetch_used = 0
        shape = len(places), experts
        self.table, self.stamp, self.uses = (np.zeros(shape, np.int64) for _ in range(3))
        self._pinned, self._guessed = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._experts, self._now = experts, 0  # the step that runs, as far as is known
        self._missed = [(0, 0)] * len(places)  # (step, experts missed in it)
        self._flying: dict[int, Load] = {}
        sizes = [record.nbytes for record in self.records]
        flat = self.table.reshape(-1), self.stamp.reshape(-1), self._pinned.reshape(-1)
        self._pools = [Slots(size, sizes.count(size), cap * sizes.count(size), experts, *flat)
                       for size in dict.fromkeys(sizes)]  # fmt: skip
        of = {pool.nbytes: index for index, pool in enumerate(self._pools)}
        self._pool_of = [of[size] for size in sizes]  # by layer
        self._warm: list[list[Load]] = [[] for _ in self._pools]  # not yet known to have begun, the least wanted last

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, filled or not."""
        return sum(pool.capacity * pool.nbytes for pool in self._pools)

    @property
    def filled_bytes(self) -> int:
        """Bytes of the slots that memory was taken for, without those that reads under way will fill."""
        taken = sum(pool.taken * pool.nbytes for pool in self._pools)
        return taken - sum(load.target.nbytes for load in self._flying.values())

    def record_bytes(self) -> int:
        """Bytes of one slot in every layer."""
        return sum(record.nbytes for record in self.records)

    def resident(self, layer: int) -> set[int]:
        return set(np.flatnonzero(self.table[layer]).tolist())

    def slot(self, layer: int, expert: int) -> np.ndarray:
        """uint8 [nbytes of the layer's record], a resident expert's slot. Raises KeyError when it is not resident."""
        return self._pool(layer).held(self._key(layer, expert))

    def _pool(self, layer: int) -> Slots:
        return self._pools[self._pool_of[layer]]

    def _key(self, layer: int, expert: int) -> int:
        return layer * self._experts + expert

    # ---- what was used -----------------------------------------------------------------------------------------------

    def count_hits(self, count: int) -> None:
        self.hits += count

    def count_uses(self, clock: int) -> None:
        """The forward of this clock is over: count the experts it used."""
        used = self.stamp == clock
        self.uses += used
        if self.prefetched:
            used &= self._guessed
            self.prefetch_used += int(np.count_nonzero(used))
            self._guessed ^= used
        self._now = clock + 1

    # ---- what is wanted now ------------------------------------------------------------------------------------------

    def ensure(self, layer: int, ids: Sequence[int], ahead: Ahead | None = None, *, partly: bool = False) -> None:
        """Make the distinct experts `ids` (at most `cap`) of `layer` resident; `partly`: one of them at least, and
        the others are on their way.

        `ahead` is called while this call's reads are under way and says what to `prefetch`. Arriving experts get the
        newest stamp, so that a call before their first use does not evict them. Raises ReadError or ModelError (NaN or
        infinity in an expert); the experts that could be read are resident then, or, partly, on their way.
        """
        self.settle()
        row, stamp = self.table[layer], self.stamp[layer]
        wanted = [int(expert) for expert in ids]
        absent = [expert for expert in wanted if not row[expert]]
        if absent and (len(set(wanted)) != len(wanted) or len(wanted) > self.cap):
            raise ValueError(f"{len(wanted)} experts, {len(set(wanted))} distinct, for {self.cap} slots")
        self._now = max(self._now, int(stamp.max()))
        stamp[[expert for expert in wanted if row[expert]]] = self._now  # `ahead` takes no slot of this call
        keep = {self._key(layer, expert) for expert in wanted}
        loads = self._want(layer, absent, keep)
        if ahead is not None and (guess := ahead()) is not None:
            self.prefetch(*guess)
        if partly and self._wait_for_one(loads, row, wanted):
            return
        self._wait(loads)
        forgotten = [load.expert for load in loads if load.error is not None and load.why is not Why.WANTED]
        if forgotten:
            again = self._want(layer, forgotten, keep)
            self._wait(again)
            loads = [load for load in loads if load.expert not in forgotten] + again
        for load in loads:
            if load.error is not None:
                raise load.error

    def _want(self, layer: int, experts: Sequence[int], keep: Collection[int]) -> list[Load]:
        """Begin to read these absent experts, but those that are on their way."""
        flying = [load for expert in experts if (load := self._flying.get(self._key(layer, expert))) is not None]
        for load in flying:
            self._loader.hasten(load)
        under_way = {load.expert for load in flying}
        missing = [expert for expert in experts if expert not in under_way]
        slots = self._room(layer, len(missing), keep)
        loads = [self._load(layer, expert, slot, self._now, Why.WANTED)
                 for expert, slot in zip(missing, slots, strict=True)]  # fmt: skip
        self._loader.start(loads)
        self.misses += len(loads)
        return flying + loads

    def _load(self, layer: int, expert: int, slot: int, stamp: int, why: Why) -> Load:
        load = Load(layer, expert, slot, self._pool(layer).bytes_of(slot), stamp, why)
        self._flying[self._key(layer, expert)] = load
        return load

    def _room(self, layer: int, count: int, keep: Collection[int]) -> list[int]:
        """`count` slots for a layer: free ones, those of warm reads that have not begun, those of experts but `keep`,
        and at last those that reads under way will give up."""
        pool, crowds = self._pool(layer), self._crowds(layer, count)
        while (short := count - pool.free) > 0:
            if self._cancel_warm(self._pool_of[layer], short, keep):
                continue
            if crowds and pool.evict_fairly(short, keep, layer, self.cap):
                continue
            if pool.evict_oldest(short, layer, keep):
                continue
            self._land_next()
        return [pool.take() for _ in range(count)]

    def _crowds(self, layer: int, count: int) -> bool:
        """Whether a layer misses more experts in this step than decoding does."""
        step, missed = self._missed[layer]
        missed = count + (missed if step == self._now else 0)
        self._missed[layer] = self._now, missed
        return missed > min(self.cap, self._experts // 4, _MANY)

    def _cancel_warm(self, pool: int, count: int, keep: Collection[int]) -> int:
        """Free up to `count` slots of a pool by cancelling warm reads, the least wanted first; returns how many."""
        waiting, done = self._warm[pool], 0
        while waiting and done < count:
            load = waiting.pop()
            key = self._key(load.layer, load.expert)
            if key not in keep and self._loader.cancel(load):
                del self._flying[key]
                self._pools[pool].give(load.slot, written=False)
                done += 1
        return done

    # ---- what lands --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take in what background reads brought. No kernel may run."""
        while self._flying and (load := self._loader.next(wait=False)) is not None:
            self._land(load)

    def _wait(self, loads: Sequence[Load]) -> None:
        while any(load.left for load in loads):
            self._land_next()

    def _land_next(self) -> None:
        load = self._loader.next(wait=True) if self._flying else None
        if load is None:
            raise RuntimeError("waiting for a read that is not under way")
        self._land(load)

    def _wait_for_one(self, loads: Sequence[Load], row: np.ndarray, wanted: Sequence[int]) -> bool:
        """Whether one of `wanted` is resident and none of the loads has failed so far; waits until that is known."""
        while not row[wanted].any() and any(load.left for load in loads):
            load = self._loader.next(wait=True)
            assert load is not None
            self._land(load)
        return bool(row[wanted].any()) and all(load.error is None for load in loads)

    def _land(self, load: Load) -> None:
        """A read is over: its expert is resident, or its slot free again."""
        key = self._key(load.layer, load.expert)
        del self._flying[key]
        self.bytes_read += load.nbytes
        if load.error is not None:
            self._pool(load.layer).give(load.slot, written=True)
            return
        self.stamp[load.layer, load.expert] = load.stamp
        self._pool(load.layer).put(key, load.slot)
        self._guessed[load.layer, load.expert] = load.why is Why.GUESSED
        self.prefetched += load.why is Why.GUESSED
        self.warmed += load.why is Why.WARM

    # ---- what may be wanted later ------------------------------------------------------------------------------------

    def fill(self, pairs: Iterable[tuple[int, int]], pin: bool = False) -> int:
        """Begin to read (layer, expert) pairs in the background, the most wanted first, as far as there is room. Until
        they are used they go before all that was, the last of them first. `pin`: see there. Returns how many were
        begun."""
        pairs = list(pairs)
        if pin:
            self.pin(pairs)
        full: set[int] = set()
        begun = 0
        for layer, expert in pairs:
            index = self._pool_of[layer]
            if index in full or not self._absent(layer, expert):
                continue
            slot = self._spare(layer)
            if slot is None:
                full.add(index)
                continue
            begun += 1
            load = self._load(layer, expert, slot, -begun, Why.WARM)
            self._loader.start_later(load)
            self._warm[index].append(load)
        return begun

    def prefetch(self, layer: int, ids: Sequence[int]) -> int:
        """Begin to read in the background what is missing of `ids`, which a layer will probably want in this step, the
        surest first, but evict none of them and nothing that this step used. Returns how many were begun."""
        begun, keep = 0, {self._key(layer, expert) for expert in ids}
        for expert in ids:
            if not self._absent(layer, expert):
                continue
            slot = self._spare(layer, keep)
            if slot is None:
                break
            begun += 1
            self._loader.start_later(self._load(layer, int(expert), slot, self._now - 1, Why.GUESSED))
        return begun

    def _absent(self, layer: int, expert: int) -> bool:
        """Whether an expert is neither resident nor on its way."""
        return not self.table[layer, expert] and self._key(layer, expert) not in self._flying

    def _spare(self, layer: int, keep: Collection[int] = ()) -> int | None:
        """A slot for what nobody waits for."""
        pool = self._pool(layer)
        if not pool.free and not pool.evict_oldest(1, layer, keep, before=self._now):
            return None
        return pool.take()

    def pin(self, pairs: Iterable[tuple[int, int]]) -> int:
        """Never evict these (layer, expert) pairs, the most wanted first, once they are resident. At most half of the
        slots of a size are pinned, and a whole call fits besides. Returns how many were."""
        done = 0
        room = [self._pins(index) - self._count_pins(index) for index in range(len(self._pools))]
        for layer, expert in pairs:
            index = self._pool_of[layer]
            if room[index] > 0 and not self._pinned[layer, expert]:
                self._pinned[layer, expert] = True
                room[index] -= 1
                done += 1
        return done

    def _pins(self, index: int) -> int:
        """How many experts of a pool may be pinned."""
        capacity = self._pools[index].capacity
        return max(0, min(capacity // 2, capacity - self.cap))

    def _count_pins(self, index: int) -> int:
        return int(np.count_nonzero(self._pinned[np.array(self._pool_of) == index]))

    # ---- giving memory back ------------------------------------------------------------------------------------------

    def shrink(self, nbytes: int) -> int:
        """Give up slots of at least this many bytes for good, down to one slot a layer: slots never filled first, then
        the experts used longest ago, pinned ones last. Returns their bytes; `filled_bytes` says how many of them were
        memory of the process, which the system has back now. `cap` falls with them. No kernel may run."""
        self._calm()
        capacity, given = [pool.capacity for pool in self._pools], 0
        while given < nbytes:
            index = max((i for i, pool in enumerate(self._pools) if capacity[i] > pool.layers), default=None,
                        key=lambda i: capacity[i] / self._pools[i].layers)  # fmt: skip
            if index is None:
                break
            capacity[index] -= 1
            given += self._pools[index].nbytes
        if given:
            self.cap = min(self.cap, *(slots // p.layers for slots, p in zip(capacity, self._pools, strict=True)))
            for index, pool in enumerate(self._pools):
                if capacity[index] < pool.capacity:
                    pool.shrink(capacity[index])
                self._unpin(index)
        return given

    def _unpin(self, index: int) -> None:
        """Let go of the pins that are too many, those used longest ago first."""
        layers = np.flatnonzero(np.array(self._pool_of) == index)
        rows, experts = np.nonzero(self._pinned[layers])
        rows = layers[rows]
        surplus = max(0, len(rows) - self._pins(index))
        first = np.lexsort((self.stamp[rows, experts], self.table[rows, experts] != 0))[:surplus]
        self._pinned[rows[first], experts[first]] = False

    def _calm(self) -> None:
        """Nothing is on its way any more: reads that have not begun are cancelled, others waited for."""
        for key, load in reversed(list(self._flying.items())):
            if self._loader.cancel(load):
                del self._flying[key]
                self._pool(load.layer).give(load.slot, written=False)
        self._wait(list(self._flying.values()))
        self._warm = [[] for _ in self._pools]

    def close(self) -> None:
        """End the reading threads and empty the cache; its memory goes once no view of it is left."""
        self._calm()
        self._loader.close()
        if self._own_reader is not None:
            self._own_reader.close()
        self.table[:] = 0
        self._pools = []


class NoExperts(ExpertStore):
    """The store of a model without experts: nothing in it, nothing to read."""

    def __init__(self) -> None:
        self._begin((), "none", [], 0, 0)

    def close(self) -> None:
        """Nothing is open."""
