"""What tests of the expert store share: what a slot must hold, from the checkpoint's views, and what is always true."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import widen
from coli.models import qwen38_layout
from tests.tiny import tiny_config, write_tiny

FOUR = tuple(f"layers.{layer}." for layer in range(4))
TWO = FOUR[:2]
EXPERTS = 16


def opened(folder, cap: int, threads: int = 3, **options) -> ExpertStore:
    checkpoint = Checkpoint.open(folder)
    g = qwen38_layout.geometry(checkpoint.config)
    qwen38_layout.check(checkpoint, g)
    return ExpertStore(checkpoint, g, cap, threads, **options)


def part(store: ExpertStore, layer: int, expert: int, name: str, suffix: str = "") -> np.ndarray:
    """Stored bytes of one matrix (or its scale) of an expert, straight from the views."""
    checkpoint, p = store._checkpoint, f"layers.{layer}.mlp.experts."
    if f"{p}gate_up_proj" not in checkpoint:
        return checkpoint.view(f"{p}{expert}.{name}_proj.weight{suffix}")
    if name == "down":
        return checkpoint.view(f"{p}down_proj{suffix}")[expert]
    both = checkpoint.view(f"{p}gate_up_proj{suffix}")[expert]
    half = len(both) // 2
    return both[:half] if name == "gate" else both[half:]


def expected_slot(store: ExpertStore, layer: int, expert: int) -> bytes:
    record = store.records[layer]
    out = np.zeros(record.nbytes, np.uint8)
    for name in ("gate", "up", "down"):
        raw = np.frombuffer(part(store, layer, expert, name).tobytes(), np.uint8)
        place = getattr(record, name)
        out[place.at : place.at + raw.size] = raw
        if place.kind == "fp8":
            scale = part(store, layer, expert, name, "_scale_inv")
            dtype = {"uint16": "BF16", "float16": "F16", "float32": "F32"}[scale.dtype.name]
            raw = np.frombuffer(widen(scale, dtype).tobytes(), np.uint8)
            out[place.scale_at : place.scale_at + raw.size] = raw
    return out.tobytes()


def small_checkpoint(folder: Path) -> Path:
    """Layers of 16 small experts, four of them at least."""
    config = tiny_config(num_experts=EXPERTS, moe_intermediate_size=4, shared_expert_intermediate_size=4)
    return write_tiny(folder, config, dtype="BF16")


class Contents:
    """What the slot of every expert must hold."""

    def __init__(self, folder: Path) -> None:
        store = opened(folder, 1)
        self._found = {(l, e): expected_slot(store, l, e) for l in range(len(store.layers)) for e in range(EXPERTS)}
        store.close()

    def __getitem__(self, place: tuple[int, int]) -> bytes:
        return self._found[place]


def step(store: ExpertStore, clock: int, wanted: dict[int, list[int]], **options) -> None:
    """A forward that uses these experts of these layers, in calls no larger than `cap`."""
    store.settle()
    for layer, ids in wanted.items():
        for at in range(0, len(ids), store.cap):
            some = ids[at : at + store.cap]
            store.ensure(layer, some, **options)
            assert store.table[layer, some].all()
            store.stamp[layer, some] = clock  # as the `group` kernel does
    store.count_uses(clock)


def check(store: ExpertStore, slots: Contents) -> None:
    """No slot is used twice, and what is resident has the file's bytes."""
    assert len(set(store.table[store.table != 0].tolist())) == np.count_nonzero(store.table)
    for pool in store._pools:
        owned = np.flatnonzero(pool._owner[: pool.taken] >= 0).tolist()
        flying = [load.slot for load in store._flying.values() if store._pool(load.layer) is pool]
        assert sorted([*owned, *pool._free, *flying]) == list(range(pool.taken))
        assert pool.taken <= pool.capacity == len(pool._owner) >= store.cap * pool.layers
        assert all(store.table.flat[pool._owner[slot]] == pool.bytes_of(slot).ctypes.data for slot in owned)
    for layer in range(len(store.layers)):
        for expert in store.resident(layer):
            assert store.slot(layer, expert).tobytes() == slots[layer, expert], (layer, expert)
