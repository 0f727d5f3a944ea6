"""The expert cache: bytes are the file's, and a failed read leaves no trace. Who goes first, and what is read in the
background: test_experts_pool.py and test_experts_background.py."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from coli.errors import ModelError, ReadError, UsageError
from coli.experts.plan import plan_experts
from coli.experts.store import ExpertStore
from tests.formats.expert_bytes import expected_slot, opened, part
from tests.tiny import odd_config, tiny_config, write_tiny

FORMS = {
    "f32 fused": dict(dtype="F32"),
    "bf16 fused": dict(dtype="BF16"),
    "f16 one by one": dict(dtype="F16", per_expert=True, shards=3),
    "fp8 one by one": dict(dtype="FP8"),
    "fp8, partial blocks, f32 scales": dict(dtype="FP8", block=(20, 24), scale_dtype="F32"),
    "fp8 fused": dict(dtype="FP8", per_expert=False, block=(16, 48)),
    "odd sizes": dict(dtype="BF16", config=odd_config()),
    "odd sizes, fp8": dict(dtype="FP8", config=odd_config(), block=(5, 7), scale_dtype="F16", shards=2),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_slots_hold_the_bytes_of_the_file(tmp_path, form):
    store = opened(write_tiny(tmp_path, **form), cap=4)
    record, g, total = store.records[0], store.geometry, 0
    parts = record.gate, record.up, record.down
    assert all(p.at % 64 == 0 and p.scale_at % 64 == 0 for p in parts) and record.nbytes % 64 == 0
    assert store.records == [record] * g.layers
    assert [p.row_bytes * p.n for p in parts] == [p.nbytes for p in parts]
    assert store.record_bytes() == plan_experts(store._checkpoint, g).nbytes == g.layers * record.nbytes
    for layer in (0, g.layers - 1):
        ids = [g.experts - 1, 0, 3]
        store.ensure(layer, ids)
        for expert in ids:
            address = int(store.table[layer, expert])
            assert address % 64 == 0 and address == store.slot(layer, expert).ctypes.data
            assert store.slot(layer, expert).tobytes() == expected_slot(store, layer, expert)
            total += sum(part(store, layer, expert, n, s).nbytes for n in ("gate", "up", "down")
                         for s in (["", "_scale_inv"] if record.gate.kind == "fp8" else [""]))  # fmt: skip
        assert np.flatnonzero(store.table[layer]).tolist() == sorted(ids)
    assert (store.hits, store.misses, store.bytes_read) == (0, 6, total)
    store.count_hits(5)
    assert store.hits == 5
    assert store.nbytes == g.layers * 4 * record.nbytes
    store.close()
    assert not store.table.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny_config(num_experts=12, moe_intermediate_size=4, shared_expert_intermediate_size=4)
    return write_tiny(tmp_path_factory.mktemp("experts"), config, dtype="BF16")


TWO = ("layers.0.", "layers.1.")


def test_an_expert_just_read_is_not_the_next_to_go(folder):
    store = opened(folder, cap=3, layers=TWO)
    store.ensure(0, [1, 2, 3])
    store.ensure(1, [1, 2, 3])
    store.stamp[0, [1, 2, 3]], store.stamp[1, [1, 2, 3]] = [7, 9, 8], 20
    store.ensure(0, [4])
    assert store.resident(0) == {2, 3, 4} and store.stamp[0, 4] == 9
    store.ensure(0, [5])
    assert store.resident(0) == {2, 4, 5}
    store.close()


def test_memory_is_taken_as_slots_fill(tmp_path):
    """6 of 12 slots filled: the arena's resident pages are the filled half, give or take a page."""
    config = tiny_config(num_experts=16, moe_intermediate_size=256, ple_layer_ids=[], num_hidden_layers=4,
                         layer_types=["linear_attention"] * 3 + ["full_attention"])  # fmt: skip
    store = opened(write_tiny(tmp_path, config, mtp=False), cap=12)

    def rss() -> int:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) << 10

    before = rss()
    for layer in range(4):
        store.ensure(layer, range(6))
    grown = rss() - before
    assert abs(grown - store.nbytes / 2) < 1 << 20, (grown, store.nbytes)
    store.close()


def test_misuse(folder):
    with pytest.raises(UsageError):
        opened(folder, cap=0)
    with pytest.raises(UsageError):
        opened(folder, cap=13)
    store = opened(folder, cap=3)
    for ids in ([1, 1], [1, 2, 3, 4]):
        with pytest.raises(ValueError):
            store.ensure(0, ids)
    assert store.resident(0) == set()
    store.close()


def faulty(monkeypatch, fails: int, layer_bytes: range) -> list[int]:
    """Make the first `fails` reads inside `layer_bytes` fail; returns the offsets that failed."""
    real, failed = os.preadv, []

    def preadv(fd, buffers, offset):
        if offset in layer_bytes and len(failed) < fails:
            failed.append(offset)
            real(fd, [buffers[0][: len(buffers[0]) // 2]], offset)
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return failed


def where(store: ExpertStore, layer: int, expert: int) -> range:
    tensor = store._checkpoint[f"layers.{layer}.mlp.experts.gate_up_proj"]
    size = tensor.nbytes // store.geometry.experts
    return range(tensor.offset + expert * size, tensor.offset + (expert + 1) * size)


def test_one_failure_is_retried(folder, monkeypatch):
    store = opened(folder, cap=3)
    failed = faulty(monkeypatch, 1, where(store, 1, 2))
    store.ensure(1, [2, 3])
    assert len(failed) == 1 and store.slot(1, 2).tobytes() == expected_slot(store, 1, 2)
    store.close()


def test_two_failures_name_the_expert_and_leave_it_absent(folder, monkeypatch):
    store = opened(folder, cap=3, layers=TWO)
    store.ensure(1, [5, 6, 7])
    store.ensure(0, [5, 6, 7])
    store.stamp[0, [5, 6, 7]] = 1
    with monkeypatch.context() as patch:
        faulty(patch, 2, where(store, 1, 2))
        with pytest.raises(ReadError, match=r"model.safetensors: cannot read expert 2 of layer 1.*errno 5"):
            store.ensure(1, [2, 3])
    assert store.table[1, 2] == 0 and store.resident(1) == {3, 7}
    assert store.slot(1, 3).tobytes() == expected_slot(store, 1, 3)
    store.ensure(1, [2, 4])  # one into the slot of the failed read
    assert store.resident(1) >= {2, 4} and len(store.resident(1)) == len(store.resident(0)) == 3
    assert store.slot(1, 2).tobytes() == expected_slot(store, 1, 2)
    store.close()


def test_a_file_that_shrank_is_a_read_error(tmp_path):
    store = opened(write_tiny(tmp_path, dtype="F32"), cap=3)
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(ReadError, match="expert 1 of layer 3.*unexpected end"):
        store.ensure(3, [1])
    assert not store.table.any()
    store.close()


@pytest.mark.parametrize(("suffix", "raw"), [("", b"\x7f"), ("", b"\xff"), ("_scale_inv", b"\x80\x7f"),
                                             ("_scale_inv", b"\xc0\x7f")])  # fmt: skip
@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_nan_in_an_expert_names_it(tmp_path, suffix, raw, name):
    folder = write_tiny(tmp_path, tiny_config(num_hidden_layers=1, layer_types=["linear_attention"], ple_layer_ids=[]),
                        dtype="FP8", mtp=False)  # fmt: skip
    store = opened(folder, cap=3)
    tensor = store._checkpoint[f"layers.0.mlp.experts.6.{name}_proj.weight{suffix}"]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + tensor.nbytes - len(raw))
        file.write(raw)
    store.ensure(0, [5])
    with pytest.raises(ModelError, match="expert 6 of layer 0"):
        store.ensure(0, [6])
    assert store.resident(0) == {5} and store.table[0, 6] == 0
    store.close()


def test_fused_fp8_whose_halves_share_a_scale_is_refused(tmp_path):
    folder = write_tiny(tmp_path, dtype="FP8", per_expert=False)
    with pytest.raises(ModelError, match="share a scale"):
        opened(folder, cap=3)
