"""Experts read in the background: announced by the calling thread alone, waited for, hastened, cancelled, forgotten."""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Event, Thread

import pytest

from coli.errors import ReadError
from coli.experts.reader import ExpertReader
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from tests.formats.expert_bytes import EXPERTS, TWO, Contents, check, opened, small_checkpoint, step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("background"))


@pytest.fixture(scope="module")
def slots(folder) -> Contents:
    return Contents(folder)


class Gate:
    """A reader whose reads wait for `open`; `read_at`: file offsets in order; `failing`: so many reads fail."""

    def __init__(self, folder: Path) -> None:
        self._reader = ExpertReader(Checkpoint.open(folder))
        self.open, self.begun = Event(), Event()
        self.read_at: list[int] = []
        self.failing = 0

    def read(self, path, buffers, offset) -> int:
        self.read_at.append(offset)
        self.begun.set()
        assert self.open.wait(60)
        if self.failing > 0:
            self.failing -= 1
            raise OSError(errno.EIO, "Input/output error")
        return self._reader.read(path, buffers, offset)


@pytest.fixture
def gated(folder):
    gate = Gate(folder)
    stores = []

    def opener(cap: int, **options) -> ExpertStore:
        stores.append(opened(folder, cap, threads=1, reader=gate, **options))
        return stores[-1]

    yield gate, opener
    gate.open.set()
    for store in stores:
        store.close()


def through(gate: Gate, store: ExpertStore, layer: int, ids: list[int]) -> None:
    """`ensure` while background reads stand still, which go on once it has begun to wait."""
    waits, next_ = Event(), store._loader.next

    def watched(*, wait: bool):
        if wait:
            waits.set()
        return next_(wait=wait)

    store._loader.next = watched
    thread = Thread(target=store.ensure, args=(layer, ids))
    thread.start()
    assert waits.wait(60)
    gate.open.set()
    thread.join(60)
    assert not thread.is_alive()
    store._loader.next = next_


def test_background_reads_are_announced_by_settle_alone(gated, slots):
    gate, opener = gated
    store = opener(4)
    assert store.fill([(0, 3), (1, 2), (0, 3), (1, 5)]) == 3
    gate.open.set()
    store._loader._pool.close()  # all reads are over
    assert not store.table.any() and store.bytes_read == 0
    store.settle()
    assert store.resident(0) == {3} and store.resident(1) == {2, 5}
    assert (store.warmed, store.misses, store.prefetched) == (3, 0, 0) and store.bytes_read > 0
    assert (store.stamp <= 0).all()
    check(store, slots)


def test_a_read_under_way_is_waited_for_and_one_in_the_queue_hastened(gated, slots):
    gate, opener = gated
    store = opener(4)
    store.fill([(0, 1), (0, 2), (0, 3), (1, 4)])
    assert gate.begun.wait(60)
    through(gate, store, 1, [4, 5])
    assert store.resident(1) == {4, 5} and store.misses == 1
    store._calm()
    assert len(set(gate.read_at)) == len(gate.read_at)  # nothing was read twice
    tensors = [store._checkpoint[f"layers.1.mlp.experts.{name}_proj"] for name in ("gate_up", "down")]
    of_layer_1 = [any(t.offset <= offset < t.offset + t.nbytes for t in tensors) for offset in gate.read_at]
    # right behind the one that had begun, two reads each; the others may have been cancelled before they began
    assert of_layer_1[:6] == [False] * 2 + [True] * 4 and not any(of_layer_1[6:])
    check(store, slots)


def test_who_waits_takes_the_slots_of_reads_that_have_not_begun(gated, slots):
    """The least wanted first; a read that has begun ends, and then its expert may go."""
    gate, opener = gated
    store = opener(1, layers=TWO)
    assert store.fill([(0, 1), (0, 2), (0, 3)]) == 2  # two slots there are
    assert gate.begun.wait(60)
    through(gate, store, 1, [7])
    assert store.resident(1) == {7} and store.resident(0) == {1} and store.warmed == 1
    gate.open.clear(), gate.begun.clear()
    store.count_uses(1)
    assert store.prefetch(0, [5]) == 1  # in the place of the other one, used longer ago
    assert gate.begun.wait(60) and store.resident(0) == set()
    store.stamp[1, 7] = 9
    through(gate, store, 0, [6])
    assert store.resident(0) | store.resident(1) in ({5, 6}, {6, 7}) and store.resident(0) >= {6}
    check(store, slots)


def test_a_read_that_is_waited_for_is_not_cancelled(gated, slots):
    gate, opener = gated
    store = opener(2, layers=TWO[:1])
    store.fill([(0, 1), (0, 2)])
    assert gate.begun.wait(60)
    through(gate, store, 0, [2, 3])
    assert store.resident(0) == {2, 3} and store.misses == 1
    check(store, slots)


def test_of_warm_experts_the_least_wanted_goes_first(folder):
    store = opened(folder, 2, layers=TWO)
    store.fill([(0, 9), (1, 3), (0, 2), (1, 8), (0, 5)])
    store._wait(list(store._flying.values()))
    for clock, (expert, left) in enumerate([(10, {(0, 9), (1, 3), (0, 2)}), (11, {(0, 9), (1, 3)}), (12, {(0, 9)})], 1):
        step(store, clock, {1: [expert]})
        assert {(l, e) for l in (0, 1) for e in store.resident(l) if e < 10} == left
    store.close()


def test_a_background_read_that_fails_is_forgotten(gated, slots):
    gate, opener = gated
    store = opener(2)
    gate.open.set()
    gate.failing = 1
    store.fill([(0, 1)])
    store._wait(list(store._flying.values()))
    assert not store.table.any() and store._pools[0].free == store._pools[0].capacity and store.warmed == 0
    store.ensure(0, [1])
    assert store.resident(0) == {1}
    gate.open.clear(), gate.begun.clear()
    store.prefetch(1, [1])
    assert gate.begun.wait(60)
    gate.failing = 1  # the read under way, not the one that follows it
    through(gate, store, 1, [1])
    assert store.resident(1) == {1}
    gate.open.clear(), gate.begun.clear()
    store.prefetch(1, [2])
    assert gate.begun.wait(60)
    gate.failing = 9
    gate.open.set()
    with pytest.raises(ReadError, match="expert 2 of layer 1"):
        store.ensure(1, [2])
    gate.failing = 0
    store.ensure(1, [2])
    check(store, slots)


def test_what_is_prefetched_takes_no_slot_of_this_step(folder, slots):
    store = opened(folder, 2, layers=TWO)
    step(store, 1, {0: [0, 1], 1: [2, 3]})
    store.ensure(0, [1, 4], ahead=lambda: (1, [5, 6, 7]))
    store._wait(list(store._flying.values()))
    assert store.resident(0) == {1, 4} and store.resident(1) == {5, 6}  # 2 and 3 were older, 7 found no room
    store.stamp[0, [1, 4]] = 2
    store.ensure(1, [5])
    store.stamp[1, 5] = 2
    store.count_uses(2)
    assert (store.prefetched, store.prefetch_used, store.misses) == (2, 1, 5)
    assert store.uses[1, 5] == 1 and store.uses[1, 6] == 0
    step(store, 3, {1: [6]})
    assert store.prefetch_used == 2
    step(store, 4, {1: [6]})
    assert store.prefetch_used == 2
    check(store, slots)
    store.close()


def test_a_prefetch_that_went_unused_does_not_count(folder):
    store = opened(folder, 1, layers=TWO)
    step(store, 1, {0: [0], 1: [0]})
    store.ensure(0, [0], ahead=lambda: (1, [9]))
    store._wait(list(store._flying.values()))
    store.stamp[0, 0] = 2
    assert store.resident(1) == {9}
    store.ensure(1, [3])
    store.stamp[1, 3] = 2
    store.count_uses(2)
    assert (store.prefetched, store.prefetch_used) == (1, 0)
    step(store, 3, {1: [9]})
    assert (store.prefetched, store.prefetch_used) == (1, 0)  # read again, for who waited
    store.close()


def test_slots_of_reads_that_have_not_begun_hold_no_memory(gated):
    """What they will take counts as to come; where they never begin, it never does."""
    gate, opener = gated
    store = opener(EXPERTS)
    store.fill([(l, e) for l in range(4) for e in range(EXPERTS)])
    assert store.filled_bytes == 0
    assert gate.begun.wait(60)
    gate.open.set()
    store._calm()
    landed = sum(len(store.resident(layer)) for layer in range(4))
    assert 1 <= landed < 60 and store.filled_bytes == landed * store.records[0].nbytes


def test_closing_does_not_wait_for_reads_that_have_not_begun(gated):
    gate, opener = gated
    store = opener(16)
    assert store.fill([(l, e) for l in range(4) for e in range(16)]) == 64
    assert gate.begun.wait(60)
    gate.open.set()
    store.close()
    assert len(gate.read_at) < 60 and not store.table.any() and store.nbytes == 0
