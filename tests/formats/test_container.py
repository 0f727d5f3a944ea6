"""The qwen36 container: recognised by its files, believed only where meta, config and bytes agree."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coli.errors import ModelError
from coli.experts.plan import plan_experts
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.formats.container import merged_config
from coli.kernels.blocked import decode as decode_blocked
from coli.kernels.blocked import unpack_blocks
from coli.kernels.packing import Packed as N16
from coli.kernels.packing import unpack
from coli.models.qwen36_geometry import geometry
from tests.containers import PARTS, Packed, meta_of, write_container
from tests.tiny import write_safetensors
from tests.tiny36 import HEAD, tiny36_config

CONFIG = tiny36_config("qwen3_5_moe_text", hidden_size=160, moe_intermediate_size=96)


def opened(folder, cap: int = 3, **options) -> ExpertStore:
    checkpoint = Checkpoint.open(folder)
    return ExpertStore(checkpoint, geometry(checkpoint.config), cap, 2, **options)


def codes_in(store: ExpertStore, layer: int, expert: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(codes, one scale for every input) read back out of a slot; for float32 slots the values and ones."""
    part = getattr(store.records[layer], name)
    data, kind = store.slot(layer, expert)[part.at : part.at + part.nbytes], part.kind.removesuffix("f")
    if part.kind == "f32":
        return data.view(np.float32).reshape(part.n, part.k), np.ones((part.n, part.k), np.float32)
    if kind in ("int4", "int8"):
        codes, scales = unpack(N16(kind, data, part.n, part.k))
        wide = np.repeat(scales, 64, axis=1)[:, : part.k] if kind == "int4" else scales[:, None]
        return codes, np.broadcast_to(wide, codes.shape)
    raw = unpack_blocks(kind, data, part.n, part.k).reshape(part.n, part.k // 32, -1)
    scales = np.repeat(np.ascontiguousarray(raw[..., :4]).view(np.float32)[..., 0], 32, axis=1)
    values = decode_blocked(kind, raw.reshape(part.n, -1))
    return np.round(values / scales).astype(np.int8), scales


def same(store: ExpertStore, layer: int, expert: int, wanted: dict[str, Packed]) -> None:
    for name in PARTS:
        codes, scales = codes_in(store, layer, expert, name)
        if codes.dtype == np.float32:
            assert codes.tobytes() == wanted[name].values.tobytes()
            continue
        step = wanted[name].group or codes.shape[1]
        assert (codes == wanted[name].codes).all()
        assert (scales == np.repeat(wanted[name].scales, step, axis=1)[:, : codes.shape[1]]).all()


FORMS = {
    "int4 rows": (dict(), "int4", "int4 rows (container)"),
    "int4 groups of 64": (dict(group=64), "int4", "int4 groups of 64 (container)"),
    "int4 groups of 128": (dict(group=128), "int4", "int4 groups of 128, down int4 rows (container)"),
    "int4 groups of 32": (dict(group=32), "g4_32", "int4 groups of 32 (container)"),
    "int4 groups of 96": (dict(group=96), "g4_32", "int4 groups of 96, down int4 rows (container)"),
    "int4 groups of 16": (dict(group=16), "f32", "int4 groups of 16 as f32 (container)"),
    "int8 rows": (dict(bits=8), "int8", "int8 rows (container)"),
    "int8 groups of 64": (dict(bits=8, group=64), "g8_32", "int8 groups of 64 (container)"),
    "int8 groups of 16": (dict(bits=8, group=16), "f32", "int8 groups of 16 as f32 (container)"),
    "int4, int8 down": (dict(down_bits=8), "int4", "int4 rows, down int8 rows (container)"),
    "int4 of 64, int8 down of 32": (
        dict(group=64, down_bits=8, down_group=32), "int4", "int4 groups of 64, down int8 groups of 32 (container)"),
}  # fmt: skip


SILENT = dict.fromkeys(("ebits", "expert_gs", "expert_down_bits", "expert_down_gs"))
CASES = {
    f"{name}, meta {says}": (*form, {} if says == "says" else SILENT)
    for name, form in FORMS.items() for says in ("says", "silent")
    if says == "says" or not (form[0].get("down_group") or form[0].get("group") == 96)  # those need the meta
}  # fmt: skip


@pytest.mark.parametrize(("form", "kind", "words", "meta"), CASES.values(), ids=CASES.keys())
def test_slots_hold_codes_and_scales_of_the_file(tmp_path, form, kind, words, meta):
    made = write_container(tmp_path, CONFIG, meta=meta, **form)
    store = opened(tmp_path)
    assert store.format == words and store.records[0].gate.kind == kind
    assert bool(store.notes) == (kind == "f32")
    for layer in (0, 7):
        store.ensure(layer, [7, 2])
        for expert in (2, 7):
            same(store, layer, expert, made[f"layers.{layer}."][expert])
    one = made["layers.0."][0]
    size = sum(p.codes.size * (8 if name == "down" and form.get("down_bits") else form.get("bits", 4)) // 8
               + p.scales.nbytes for name, p in one.items())  # fmt: skip
    assert (store.misses, store.bytes_read) == (4, 4 * size)
    store.close()


def test_float_activations_have_kinds_of_their_own(tmp_path):
    write_container(tmp_path, CONFIG, group=32, down_bits=8)
    store = opened(tmp_path, activations="f32")
    assert (store.records[0].gate.kind, store.records[0].down.kind) == ("g4_32f", "g8_32f")
    store.close()


@pytest.mark.parametrize("odd", [dict(hidden_size=52, moe_intermediate_size=22), dict(moe_intermediate_size=8)])
@pytest.mark.parametrize("bits", [4, 8])
def test_sizes_that_are_no_whole_blocks(tmp_path, odd, bits):
    made = write_container(tmp_path, tiny36_config("qwen3_5_moe_text", **odd), bits=bits)
    store = opened(tmp_path)
    store.ensure(3, [5])
    same(store, 3, 5, made["layers.3."][5])
    assert store.records[3].gate.kind == f"int{bits}"
    store.close()


@pytest.mark.parametrize("head", ["packed", "plain"])
def test_the_draft_head(tmp_path, head):
    made = write_container(tmp_path, CONFIG, head=head, group=64)
    store = opened(tmp_path, layers=(HEAD,))
    store.ensure(0, [4])
    if head == "packed":
        same(store, 0, 4, made[HEAD][4])
        assert store.format == "int4 groups of 64 (container)"
    else:
        assert store.format == "f16"
        both = store._checkpoint.view(f"{HEAD}mlp.experts.gate_up_proj")[4]
        assert store.slot(0, 4)[: both.nbytes].tobytes() == both.tobytes()
    store.close()


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_integers_are_not_rounded_again(tmp_path, mode):
    made = write_container(tmp_path, CONFIG, group=64)
    store = opened(tmp_path, mode=mode)
    store.ensure(0, [1])
    same(store, 0, 1, made["layers.0."][1])
    assert bool(store.notes) == (mode == "int8")
    assert all("stay so" in note for note in store.notes)
    store.close()


def test_the_vision_file_is_left_out(tmp_path):
    write_container(tmp_path, CONFIG)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [t.name for t in checkpoint.ignored] == ["patch_embed.weight"]
        assert "patch_embed.weight" not in checkpoint and checkpoint.meta["topk"] == 3


# ---- meta and config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def test_meta_and_config_of_every_family_agree(tmp_path, family):
    write_container(tmp_path, tiny36_config(family), mtp=family != "qwen3_moe")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert geometry(checkpoint.config) == geometry(tiny36_config(family))


def test_what_the_config_lacks_comes_from_the_meta():
    config = {k: v for k, v in CONFIG.items() if k not in ("layer_types", "rope_parameters", "head_dim", "num_experts")}
    full = merged_config(config, meta_of(CONFIG), "meta")
    assert geometry(full) == geometry(CONFIG)
    assert merged_config(CONFIG, {}, "meta") == CONFIG


CHANGES = {
    "hidden": 128, "n_layers": 7, "num_experts": 9, "topk": 2, "moe_inter": 64, "shared_inter": 47, "rms_eps": 1e-5,
    "q_heads": 8, "kv_heads": 1, "head_dim": 16, "dn_vheads": 2, "dn_kheads": 1, "dn_kdim": 8, "dn_vdim": 32,
    "dn_convk": 3, "rope_theta": 1e7, "partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 8,
    "attn_output_gate": False, "zero_centered_norms": False, "scoring_func": "sigmoid", "n_group": 4, "topk_group": 2,
    "ebits": 2, "expert_gs": -1, "expert_down_gs": "64",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), CHANGES.items(), ids=CHANGES.keys())
def test_a_meta_of_another_model_is_refused_by_its_key(tmp_path, key, value):
    write_container(tmp_path, CONFIG, meta={key: value})
    with pytest.raises(ModelError, match=rf"qwen36_meta.json: {key}: "):
        Checkpoint.open(tmp_path)


def test_a_meta_that_is_no_object_is_refused(tmp_path):
    write_container(tmp_path, CONFIG)
    (tmp_path / "qwen36_meta.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"qwen36_meta.json is a JSON list"):
        Checkpoint.open(tmp_path)


SAID = {
    "bits": (dict(ebits=8), "4 bits a weight and 4 of down by its size"),
    "bits of down": (dict(expert_down_bits=8), "4 bits a weight and 4 of down by its size"),
    "groups": (dict(expert_gs=64), "scales fit no group size.*says groups of 64"),
    "groups of down": (dict(expert_down_gs=32), "scales fit no group size"),
}


@pytest.mark.parametrize(("meta", "message"), SAID.values(), ids=SAID.keys())
def test_experts_of_another_form_than_the_meta_says_are_refused(tmp_path, meta, message):
    write_container(tmp_path, CONFIG, meta=meta)
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


# ---- damage ------------------------------------------------------------------------------------------------------


def changed(folder, layer: int, change) -> None:
    """Rewrite a layer's file; `change` gets its tensors as stored."""
    path = folder / f"model-{layer:05d}.safetensors"
    with Checkpoint.open(folder) as checkpoint:
        found = {t.name: (t.dtype, checkpoint.load(t)) for t in checkpoint.tensors.values() if t.path == path}
    change(found)
    write_safetensors(path, found)


def test_an_expert_of_other_bytes_is_refused_at_open_by_name(tmp_path):
    write_container(tmp_path, CONFIG)
    name = "model.layers.5.mlp.experts.6.merged_weight"
    for change in (
        lambda t: t.update({name: ("U8", t[name][1][:-1])}), lambda t: t.pop(name),
        lambda t: t.update({name + ".qs": ("F32", t[name + ".qs"][1][:-1])}), lambda t: t.pop(name + ".qs"),
        lambda t: t.update({name + ".qs": ("I32", t[name + ".qs"][1].view(np.int32))}),
    ):  # fmt: skip
        (tmp_path / "model-00005.safetensors").unlink(missing_ok=True)
        write_container(tmp_path, CONFIG)
        changed(tmp_path, 5, change)
        with pytest.raises(ModelError, match=r"layers.5.mlp.experts.6.merged_weight"):
            opened(tmp_path)


def test_sizes_that_fit_nothing_are_refused(tmp_path):
    write_container(tmp_path, CONFIG)
    config = json.loads((tmp_path / "config.json").read_text())
    for folder, hidden in (("a", 160), ("b", 158)):
        copy = tmp_path / folder
        write_container(copy, CONFIG, meta=dict(hidden=None, moe_inter=None))
        (copy / "config.json").write_text(json.dumps(config | dict(hidden_size=hidden, moe_intermediate_size=95)))
        with pytest.raises(ModelError, match="are no int4 or int8 expert"):
            opened(copy)


def test_int4_rows_of_an_odd_length_are_refused(tmp_path):
    config = tiny36_config("qwen3_5_moe_text", moe_intermediate_size=23)
    write_container(tmp_path, config)
    with pytest.raises(ModelError, match="odd number of inputs"):
        opened(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_names_the_expert(tmp_path, value):
    write_container(tmp_path, CONFIG)
    name = "model.layers.2.mlp.experts.3.merged_weight.qs"
    changed(tmp_path, 2, lambda tensors: tensors[name][1].__setitem__(-1, value))
    store = opened(tmp_path)
    store.ensure(2, [2])
    with pytest.raises(ModelError, match=r"expert 3 of layer 2 has NaN or infinity in .*merged_weight.qs"):
        store.ensure(2, [3])
    assert store.resident(2) == {2}
    store.close()


def test_a_silent_meta_and_scales_of_no_power_of_two(tmp_path):
    write_container(tmp_path, CONFIG, group=48, meta=SILENT)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ModelError, match="scales fit no group size"):
        plan_experts(checkpoint, geometry(checkpoint.config))
    checkpoint.close()
