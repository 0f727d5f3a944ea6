"""Sidecars: used where asked for or needed, exact to the code, and refused when they belong to something else."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from coli.errors import ModelError
from coli.experts.plan import plan_experts
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.formats.sidecar import folders, open_sidecar, record_bytes
from coli.models.qwen38_layout import HEAD, geometry
from tests.containers import write_sidecar
from tests.formats.test_container import same
from tests.tiny import odd_config, store, tiny_config, tiny_weights, write_folder, write_tiny

CONFIG = tiny_config(hidden_size=160, moe_intermediate_size=96, num_hidden_layers=2, ple_layer_ids=[],
                     layer_types=["linear_attention", "full_attention"])  # fmt: skip


def bare(folder, config=CONFIG):
    """A checkpoint without routed experts."""
    weights = {n: w for n, w in tiny_weights(config).items() if ".mlp.experts." not in n}
    named = {n if n.startswith(("mtp.", "lm_head.")) else f"model.{n}": store(w, "BF16") for n, w in weights.items()}
    return write_folder(folder, config, named)


def opened(folder, **options) -> ExpertStore:
    checkpoint = Checkpoint.open(folder)
    return ExpertStore(checkpoint, geometry(checkpoint.config), 3, 2, **options)


@pytest.mark.parametrize(
    ("bits", "group", "kind"),
    [(4, 64, "int4"), (4, 128, "int4"), (4, 32, "g4_32"), (8, 64, "g8_32"), (8, 32, "g8_32"), (8, 128, "g8_32")],
)
def test_slots_hold_codes_and_scales_of_the_sidecar(tmp_path, bits, group, kind):
    write_tiny(tmp_path, CONFIG, dtype="BF16")
    made = write_sidecar(tmp_path, tiny_weights(CONFIG), bits=bits, group=group)
    for layers, prefixes in ((None, ("layers.0.", "layers.1.")), ((HEAD,), (HEAD,))):
        store = opened(tmp_path, mode=f"int{bits}", layers=layers)
        assert store.records[0].gate.kind == kind and not store.notes
        assert store.format == f"int{bits} groups of {group} (sidecar)"
        for layer, prefix in enumerate(prefixes):
            store.ensure(layer, [6, 1])
            for expert in (1, 6):
                same(store, layer, expert, made[prefix][expert])
        assert store.bytes_read == 2 * len(prefixes) * record_bytes(96, 160, bits, group)
        store.close()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_rows_with_tails(tmp_path, bits, prefix):
    """52 and 23 inputs: a tail, and an odd one."""
    config = odd_config(ple_layer_ids=[])
    write_tiny(tmp_path, config, dtype="F16")
    made = write_sidecar(tmp_path, tiny_weights(config), bits=bits, prefix=prefix)
    store = opened(tmp_path, mode=f"int{bits}")
    store.ensure(2, [0, 6])
    for expert in (0, 6):
        same(store, 2, expert, made["layers.2."][expert])
    store.close()


def test_a_record_is_read_at_once(tmp_path, monkeypatch):
    write_tiny(tmp_path, CONFIG)
    write_sidecar(tmp_path, tiny_weights(CONFIG))
    store, reads = opened(tmp_path, mode="int4"), []
    real = Checkpoint.preadv
    monkeypatch.setattr(Checkpoint, "preadv", lambda self, path, buffers, offset: (
        reads.append((offset, len(buffers))), real(self, path, buffers, offset))[1])  # fmt: skip
    store.ensure(0, [2])
    assert [count for _, count in reads] == [6]
    first = store._checkpoint.beside[tmp_path / "experts-int4g64"].tensors["layers.0.mlp.experts.0.gate_proj.weight"]
    assert first.offset % 4096 == 0 and reads[0][0] == first.offset + 2 * record_bytes(96, 160, 4, 64)
    store.close()


def test_the_checkpoints_own_experts_come_first_unless_int4_is_asked_for(tmp_path):
    write_tiny(tmp_path, CONFIG, dtype="BF16")
    write_sidecar(tmp_path, tiny_weights(CONFIG))
    assert opened(tmp_path).format == "bf16"
    assert opened(tmp_path, mode="int8").format == "int8 rows (from bf16)"
    assert opened(tmp_path, mode="int4").format == "int4 groups of 64 (sidecar)"


def test_experts_that_are_only_in_a_sidecar_come_from_it_in_any_mode(tmp_path):
    folder = bare(tmp_path / "m")
    with pytest.raises(ModelError, match=r"layers.0.mlp.experts.0.gate_proj.weight is missing"):
        opened(folder)
    made = write_sidecar(folder, tiny_weights(CONFIG))
    for mode in ("stored", "int4", "int8"):
        store = opened(folder, mode=mode)
        assert store.format == "int4 groups of 64 (sidecar)" and bool(store.notes) == (mode == "int8")
        store.ensure(1, [3])
        same(store, 1, 3, made["layers.1."][3])
        store.close()
    write_sidecar(folder, tiny_weights(CONFIG), bits=8)
    assert opened(folder).format == "int8 groups of 64 (sidecar)"
    assert opened(folder, mode="int4").format == "int4 groups of 64 (sidecar)"


def test_groups_of_64_come_first(tmp_path):
    write_tiny(tmp_path, CONFIG)
    for group in (128, 32, 64):
        write_sidecar(tmp_path, tiny_weights(CONFIG), group=group)
    assert [f.name for f in folders(tmp_path, 4)] == ["experts-int4g64", "experts-int4g32", "experts-int4g128"]
    assert opened(tmp_path, mode="int4").format == "int4 groups of 64 (sidecar)"


def test_a_sidecar_that_is_not_complete(tmp_path):
    """Left alone where the experts can be rounded, refused where it is all there is."""
    write_tiny(tmp_path / "a", CONFIG, dtype="BF16")
    for index in (dict(complete=False), dict(complete="yes"), dict(complete=None)):
        write_sidecar(tmp_path / "a", tiny_weights(CONFIG), index=index)
        store = opened(tmp_path / "a", mode="int4")
        assert store.format == "int4 groups of 64 (from bf16)"
        assert any("experts-int4g64 is left alone: it is not complete" in note for note in store.notes)
        store.close()
        shutil.rmtree(tmp_path / "a" / "experts-int4g64")
    folder = bare(tmp_path / "b")
    write_sidecar(folder, tiny_weights(CONFIG), index=dict(complete=False))
    with pytest.raises(ModelError, match=r"index.json: the sidecar is not complete.*coli convert"):
        opened(folder)
    (folder / "experts-int4g64" / "index.json").unlink()
    with pytest.raises(ModelError, match=r"index.json is missing"):
        opened(folder)


def test_a_head_that_is_not_in_the_sidecar_is_rounded_from_the_checkpoint(tmp_path):
    write_tiny(tmp_path, CONFIG, dtype="BF16")
    write_sidecar(tmp_path, tiny_weights(CONFIG), head=False)
    assert opened(tmp_path, mode="int4").format == "int4 groups of 64 (sidecar)"
    head = opened(tmp_path, mode="int4", layers=(HEAD,))
    assert head.format == "int4 groups of 64 (from bf16)"
    assert "experts-int4g64 has no experts of the draft head: the checkpoint's own are rounded" in head.notes


def test_a_layer_that_is_not_in_the_sidecar_is_said(tmp_path):
    """Rounded where the checkpoint has it, named where the sidecar is all there is."""
    write_tiny(tmp_path / "a", CONFIG, dtype="BF16")
    for folder in (tmp_path / "a", bare(tmp_path / "b")):
        write_sidecar(folder, tiny_weights(CONFIG))
        (folder / "experts-int4g64" / "layer-001.safetensors").unlink()
    store = opened(tmp_path / "a", mode="int4")
    assert store.format == "int4 groups of 64 (from bf16)"
    assert "experts-int4g64 has no experts of layer 1: the checkpoint's own are rounded" in store.notes
    with pytest.raises(ModelError, match=r"experts-int4g64: the sidecar has no experts of layer 1, and"):
        opened(tmp_path / "b")


def test_the_sizes_may_be_spelled_as_others_do(tmp_path):
    write_tiny(tmp_path, CONFIG)
    sizes = dict(hidden_size=160, moe_intermediate_size=96, num_experts=8)
    write_sidecar(tmp_path, tiny_weights(CONFIG), index=dict(geometry=sizes, layers=[0, 1]))
    assert opened(tmp_path, mode="int4").format == "int4 groups of 64 (sidecar)"


# ---- damage ------------------------------------------------------------------------------------------------------

WRONG = {
    "format": "coli.qwen38.experts-int4g64", "version": 2, "codes": "planar64", "scales": "f32-per-32",
    "record_bytes": 1, "layers": 3, "geometry": 7,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG.items(), ids=WRONG.keys())
def test_an_index_of_something_else_is_refused_by_its_key(tmp_path, key, value):
    write_tiny(tmp_path, CONFIG)
    write_sidecar(tmp_path, tiny_weights(CONFIG), index={key: value})
    with pytest.raises(ModelError, match=rf"index.json: {key}: "):
        opened(tmp_path, mode="int4")


@pytest.mark.parametrize(("key", "value"), dict(hidden=64, moe_inter=32, experts=9, layers=[0]).items())
def test_a_sidecar_of_another_model_is_refused(tmp_path, key, value):
    write_tiny(tmp_path, CONFIG)
    sizes = dict(hidden=160, moe_inter=96, experts=8)
    index = dict(layers=value) if key == "layers" else dict(geometry=sizes | {key: value})
    write_sidecar(tmp_path, tiny_weights(CONFIG), index=index)
    with pytest.raises(ModelError, match=rf"{key}: expected .*belongs to another model"):
        opened(tmp_path, mode="int4")


def test_a_missing_expert_is_found_at_open(tmp_path):
    write_tiny(tmp_path, CONFIG)
    weights = tiny_weights(CONFIG)
    write_sidecar(tmp_path, weights)
    short = {n: w[:7] if ".mlp.experts." in n and "layers.1." in n else w for n, w in weights.items()}
    write_sidecar(tmp_path / "experts-int4g64", short)
    inner = tmp_path / "experts-int4g64" / "experts-int4g64" / "layer-001.safetensors"
    inner.rename(tmp_path / "experts-int4g64" / "layer-001.safetensors")
    with pytest.raises(ModelError, match=r"layers.1.mlp.experts.7.gate_proj.weight is missing"):
        opened(tmp_path, mode="int4")


def test_a_layer_in_two_files_is_refused(tmp_path):
    write_tiny(tmp_path, CONFIG)
    write_sidecar(tmp_path, tiny_weights(CONFIG))
    folder = tmp_path / "experts-int4g64"
    shutil.copy(folder / "layer-000.safetensors", folder / "layer-0.safetensors")
    with pytest.raises(ModelError, match="is in two files"):
        opened(tmp_path, mode="int4")


def test_a_scale_that_is_not_finite_names_the_expert(tmp_path):
    write_tiny(tmp_path, CONFIG)
    write_sidecar(tmp_path, tiny_weights(CONFIG))
    store = opened(tmp_path, mode="int4")
    tensor = store._checkpoint.beside[tmp_path / "experts-int4g64"].tensors["layers.1.mlp.experts.4.up_proj.weight.qs"]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ModelError, match=r"expert 4 of layer 1 has NaN or infinity in .*up_proj.weight.qs"):
        store.ensure(1, [4])
    store.close()


def test_files_are_opened_once_and_closed_with_the_checkpoint(tmp_path):
    write_tiny(tmp_path, CONFIG)
    write_sidecar(tmp_path, tiny_weights(CONFIG))
    checkpoint = Checkpoint.open(tmp_path)
    g = geometry(checkpoint.config)
    first = open_sidecar(checkpoint, tmp_path / "experts-int4g64", g)
    plan_experts(checkpoint, g, mode="int4")
    assert open_sidecar(checkpoint, tmp_path / "experts-int4g64", g) is first
    descriptors = set(checkpoint._fds.values())
    assert len(descriptors) == len(checkpoint._fds) == 1 + 3
    checkpoint.close()
    assert not checkpoint._fds


def test_what_only_looks_like_a_sidecar_is_none(tmp_path):
    write_tiny(tmp_path, CONFIG)
    for name in ("experts-int4g0", "experts-int3g64", "experts-int4g64.part", "experts-int4"):
        (tmp_path / name).mkdir()
    (tmp_path / "experts-int8g64").write_text("a file")
    assert folders(tmp_path) == [] and folders(tmp_path / "config.json") == []
    with Checkpoint.open(tmp_path) as checkpoint, pytest.raises(ModelError, match="not the folder of a sidecar"):
        open_sidecar(checkpoint, tmp_path / "experts-int4", geometry(checkpoint.config))
