"""Slots that layers share: who goes first, who stays, memory given back, and that no order of events breaks it."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import ReadError
from coli.experts.reader import ExpertReader
from coli.experts.store import NoExperts
from coli.formats.checkpoint import Checkpoint
from tests.formats.expert_bytes import (
    EXPERTS,
    FOUR,
    TWO,
    Contents,
    check,
    expected_slot,
    opened,
    small_checkpoint,
    step,
)
from tests.tiny import tiny_config, write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def slots(folder) -> Contents:
    return Contents(folder)


# ---- who goes first ----------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 15), min_size=1, max_size=3)), max_size=40)


@settings(deadline=None, max_examples=60)
@given(cap=st.integers(3, 6), steps=STEPS)
def test_least_recently_used_goes_first_whatever_its_layer(folder, slots, cap, steps):
    store = opened(folder, cap, threads=2, layers=FOUR)
    used = np.zeros(store.table.shape, np.int64)
    for clock, (layer, ids) in enumerate(steps, 1):
        before, absent = store.table != 0, [e for e in ids if not store.table[layer, e]]
        misses = store.misses
        step(store, clock, {layer: sorted(ids)})
        assert store.misses - misses == len(absent)
        after = store.table != 0
        gone = before & ~after
        assert gone.sum() == max(0, before.sum() + len(absent) - store._pools[0].capacity)
        stayed = before & after
        stayed[layer, list(ids)] = False
        assert not gone.any() or not stayed.any() or used[gone].max() <= used[stayed].min() + 1
        used[layer, list(ids)] = clock
    check(store, slots)
    store.close()
    store._checkpoint.close()


def test_a_layer_that_uses_many_experts_gets_more_slots(folder):
    store = opened(folder, 4, layers=TWO)
    for clock in range(1, 40):
        step(store, clock, {0: [clock % 6], 1: [0]})
    assert store.resident(0) == set(range(6)) and store.misses == 7
    assert store.uses[0, :7].tolist() == [6, 7, 7, 7, 6, 6, 0] and store.uses[1, 0] == store.uses[1].sum() == 39
    store.close()


@pytest.mark.parametrize("cap", [1, 2, 4, 7])
def test_a_prompt_does_not_flush_other_layers(folder, slots, cap):
    """It goes through all experts of every layer, in waves; every layer keeps about its share."""
    store = opened(folder, cap)
    layers = range(len(store.layers))
    for clock in range(1, 4):
        step(store, clock, {layer: list(range(EXPERTS)) for layer in layers})
    assert all(abs(len(store.resident(layer)) - cap) <= 1 for layer in layers)
    assert sum(len(store.resident(layer)) for layer in layers) == cap * len(layers)
    check(store, slots)
    store.close()


def test_what_a_crowding_layer_takes_from_whom(folder):
    """Layer 0 has 3 of its 4 slots and wants 2: one of its own goes and one of layer 1, which has 5."""
    store = opened(folder, 4, layers=TWO)
    step(store, 1, {1: [0, 1, 2, 3], 0: [3]})
    step(store, 2, {1: [4], 0: [1, 2]})
    assert store._pools[0].evict_fairly(2, (), 0, store.cap) == 2
    assert store.resident(0) == {1, 2} and store.resident(1) == {1, 2, 3, 4}
    store.close()


def test_experts_of_one_call_never_evict_each_other(folder, slots):
    """Not even where all that is resident was used in this step."""
    store = opened(folder, 5, layers=TWO)
    step(store, 5, {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]})
    store._now = 5
    for ids in ([9], [1, 10]):
        store.ensure(0, ids)
        assert store.resident(0) >= set(ids)
    store.close()
    store = opened(folder, 3, layers=TWO)  # and a layer that takes its own slots
    for layer, ids in ((0, [0, 1, 2]), (1, [0, 1, 2]), (0, [0, 3, 4])):
        store.ensure(layer, ids)
        assert store.resident(layer) == set(ids)
    check(store, slots)
    store.close()


def test_pinned_experts_stay(folder, slots):
    store = opened(folder, 3, layers=TWO)
    assert store.fill([(0, 1), (0, 2), (1, 3), (1, 4)], pin=True) == 4
    store._wait(list(store._flying.values()))  # a warm read that has not begun gives its slot up
    assert store.pin([(1, 5)]) == 0  # half of six slots are
    for clock in range(1, 30):
        step(store, clock, {layer: [(clock * 5 + i) % 16 for i in range(3)] for layer in (0, 1)})
        assert store.resident(0) >= {1, 2} and 3 in store.resident(1)
    store.prefetch(0, range(16))
    store._wait(list(store._flying.values()))
    assert store.resident(0) >= {1, 2} and 3 in store.resident(1)
    check(store, slots)
    store.close()


def test_one_layer_alone_pins_nothing_as_a_call_may_want_all_slots(folder):
    store = opened(folder, 4, layers=TWO[:1])
    assert store.pin([(0, 1)]) == 0
    store.close()


# ---- giving memory back ------------------------------------------------------------------------------------------


def rss() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def test_memory_given_back_is_the_systems(tmp_path):
    config = tiny_config(num_experts=16, moe_intermediate_size=256, ple_layer_ids=[], num_hidden_layers=4,
                         layer_types=["linear_attention"] * 3 + ["full_attention"])  # fmt: skip
    store = opened(write_tiny(tmp_path, config, mtp=False), cap=12)
    for layer in range(4):
        store.ensure(layer, range(9))
    before, filled, each = rss(), store.filled_bytes, store.records[0].nbytes
    assert filled == 36 * each and store.nbytes == 48 * each
    assert store.shrink(12 * each - 5) == 12 * each  # what was never filled
    assert store.filled_bytes == filled and store.cap == 9 and sum(map(len, map(store.resident, range(4)))) == 36
    store.stamp[:, 4:9] = 1
    assert store.shrink(16 * each) == 16 * each
    assert store.filled_bytes == store.nbytes == 20 * each and store.cap == 5
    assert all(store.resident(layer) == {4, 5, 6, 7, 8} for layer in range(4))
    assert all(store.slot(l, e).tobytes() == expected_slot(store, l, e) for l in range(4) for e in store.resident(l))
    assert abs(before - rss() - 16 * each) < 1 << 20
    assert store.shrink(1 << 40) == 16 * each and store.cap == 1 and store.nbytes == 4 * each
    assert store.shrink(1) == 0
    for layer in range(4):
        store.ensure(layer, [layer])
        assert store.slot(layer, layer).tobytes() == expected_slot(store, layer, layer)
    store.close()


def test_pins_go_last_and_fewer_remain(folder, slots):
    store = opened(folder, 4, layers=TWO)
    store.pin([(0, 0), (0, 1), (1, 0), (1, 1)])
    step(store, 1, {0: [0, 1], 1: [0, 1]})
    step(store, 2, {0: [8, 9], 1: [8, 9]})
    store.shrink(4 * store.records[0].nbytes)
    assert store.resident(0) == store.resident(1) == {0, 1}
    assert np.count_nonzero(store._pinned) == 2  # of four slots
    step(store, 3, {0: [4, 5], 1: [4, 5]})
    check(store, slots)
    store.close()


def test_a_model_without_experts_has_a_store_too():
    store = NoExperts()
    store.settle()
    store.count_uses(3)
    assert store.shrink(100) == store.nbytes == store.filled_bytes == store.record_bytes() == store.cap == 0
    assert store.fill([]) == store.pin([]) == 0 and store.uses.size == 0
    store.close()


# ---- anything in any order ---------------------------------------------------------------------------------------


class Unsteady:
    """A reader that lets other threads go first now and then, and fails now and then."""

    def __init__(self, checkpoint: Checkpoint, seed: int) -> None:
        self._reader, self._random, self.bad = ExpertReader(checkpoint), Random(seed), 0.0

    def read(self, path, buffers, offset) -> int:
        Event().wait(self._random.choice((0, 0, 1e-5, 3e-4)))
        if self._random.random() < self.bad:
            buffers[0][: len(buffers[0]) // 2] = bytes(len(buffers[0]) // 2)
            raise OSError(errno.EIO, "Input/output error")
        return self._reader.read(path, buffers, offset)


LAYER = st.integers(0, 3)
SOME = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True)
PAIRS = st.lists(st.tuples(LAYER, st.integers(0, EXPERTS - 1)), max_size=20)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ensure"), LAYER, SOME, st.one_of(st.none(), st.tuples(LAYER, SOME))),
        st.tuples(st.just("partly"), LAYER, SOME),
        st.tuples(st.just("fill"), PAIRS, st.booleans()),
        st.tuples(st.just("prefetch"), LAYER, SOME),
        st.tuples(st.just("pin"), PAIRS),
        st.tuples(st.just("shrink"), st.integers(0, 12)),
        st.tuples(st.just("bad"), st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        st.just(("settle",)),
        st.just(("forward",)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=120)
@given(cap=st.sampled_from([1, 2, 5, EXPERTS]), threads=st.integers(1, 4), events=EVENTS, seed=st.integers(0, 99))
def test_whatever_happens_slots_hold_the_files_bytes(folder, slots, cap, threads, events, seed):
    checkpoint = Checkpoint.open(folder)
    reader = Unsteady(checkpoint, seed)
    store = opened(folder, cap, threads, layers=FOUR, reader=reader)
    clock, record = 1, store.records[0].nbytes
    for what, *values in events:
        pinned = (store.table != 0) & store._pinned
        if what == "ensure":
            layer, ids, guess = values
            ids = ids[: store.cap]
            try:
                store.ensure(layer, ids, ahead=lambda guess=guess: guess)
                assert store.table[layer, ids].all()
            except ReadError:
                assert reader.bad
            used = [expert for expert in ids if store.table[layer, expert]]
            assert all(store.slot(layer, e).tobytes() == slots[layer, e] for e in used)
            store.stamp[layer, used] = clock
        elif what == "partly":
            layer, ids = values[0], values[1][: store.cap]
            try:
                store.ensure(layer, ids, partly=True)
                assert store.table[layer, ids].any()
            except ReadError:
                assert reader.bad
            store.stamp[layer, [expert for expert in ids if store.table[layer, expert]]] = clock
        elif what == "fill":
            store.fill(values[0], pin=values[1])
        elif what == "prefetch":
            store.prefetch(*values)
        elif what == "pin":
            store.pin(values[0])
        elif what == "shrink":
            before = store.nbytes
            given = store.shrink(values[0] * record)
            assert store.nbytes == before - given and (given >= values[0] * record or store.cap == 1)
            pinned[:] = False
        elif what == "bad":
            reader.bad = values[0]
        elif what == "settle":
            store.settle()
        else:
            store.count_uses(clock)
            clock += 1
        assert (store.table[pinned] != 0).all()
        assert np.count_nonzero(store._pinned) <= store._pools[0].capacity // 2
        check(store, slots)
    reader.bad = 0.0
    for layer in range(4):
        store.ensure(layer, range(store.cap))
    check(store, slots)
    store.close()
    store._checkpoint.close()
    checkpoint.close()


def test_partly_comes_back_with_the_first_and_the_others_come_later(folder, slots):
    """Two reads are held back: the call does not wait for them, the next ones do, and nothing is read twice."""
    checkpoint, held, begun = Checkpoint.open(folder), {5: Event(), 6: Event()}, []

    class Held(ExpertReader):
        def read(self, path, buffers, offset):
            begun.append(offset)
            done = super().read(path, buffers, offset)
            for expert, event in held.items():
                if buffers[0][:64].tobytes() in slots[0, expert]:
                    assert event.wait(60)
            return done

    reader = Held(checkpoint)
    store = opened(folder, cap=4, threads=8, layers=FOUR, reader=reader)
    store.ensure(0, [4, 5, 6], partly=True)
    assert store.resident(0) == {4}
    store.ensure(0, [4, 5, 6], partly=True)
    assert store.resident(0) == {4}, "one is there: no reason to wait"
    held[6].set()
    store.ensure(0, [5, 6], partly=True)
    assert store.resident(0) == {4, 6}
    held[5].set()
    store.ensure(0, [5])
    assert store.resident(0) == {4, 5, 6} and store.misses == 3 and len(begun) == len(set(begun))
    check(store, slots)
    store.close()
    reader.close()
    checkpoint.close()
