"""What slots hold: a GGUF's blocks repacked, types that differ from layer to layer, types without a kernel, and experts
rounded on request. Every slot is taken apart again and compared with the file's values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from coli.errors import ModelError
from coli.experts.plan import plan_experts
from coli.experts.records import Part
from coli.experts.store import ExpertStore
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import dequantise, widen
from coli.formats.ggml import DECODED, NATIVE
from coli.formats.safetensors import Tensor
from coli.kernels.blocked import decode as decode_blocked
from coli.kernels.blocked import unpack_blocks
from coli.kernels.packing import Packed, pack_int4, pack_int8, unpack
from coli.models.qwen36_geometry import geometry as qwen36_geometry
from coli.models.qwen38_layout import geometry
from tests.gguf_blocks import decode, encode
from tests.gguf_files import write_gguf
from tests.tiny import bf16, tiny_config, write_tiny
from tests.tiny36 import block36_config, tiny36_weights


@dataclass(frozen=True)
class Small:
    """A geometry. 256 inputs hold a block of every ggml type."""

    hidden: int = 256
    moe_inter: int = 256
    experts: int = 5
    layers: int = 2


Stack = dict[str, tuple[str, np.ndarray]]
"""gate_proj, up_proj (or gate_up_proj) and down_proj of a layer: dtype and stored array [E, n, ...]"""


def gguf(folder: Path, layers: list[Stack], g: Small) -> Checkpoint:
    """A checkpoint of stacked experts, its file written here: the GGUF reader is somebody else's test."""
    path = folder / "stacked.gguf"
    checkpoint, body = Checkpoint(path), b""
    for number, stack in enumerate(layers):
        for name, (dtype, data) in stack.items():
            full = f"layers.{number}.mlp.experts.{name}"
            body += b"\xaa" * (-len(body) % 32)
            k = g.moe_inter if name.startswith("down") else g.hidden
            checkpoint.tensors[full] = Tensor(full, dtype, (*data.shape[:2], k), path, len(body), data.nbytes)
            body += np.ascontiguousarray(data).tobytes()
    path.write_bytes(body)
    checkpoint.add_file(path)
    return checkpoint


def stored(values: np.ndarray, dtype: str) -> tuple[str, np.ndarray]:
    return dtype, bf16(values) if dtype == "BF16" else encode(values, dtype)


def drawn(g: Small, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"gate_proj": (g.moe_inter, g.hidden), "up_proj": (g.moe_inter, g.hidden),
              "down_proj": (g.hidden, g.moe_inter)}  # fmt: skip
    return {name: rng.standard_normal((g.experts, *shape)).astype(np.float32) for name, shape in shapes.items()}


def opened(folder: Path, layers: list[Stack], g: Small, cap: int | None = None, **options: str) -> ExpertStore:
    g = replace(g, layers=len(layers))
    return ExpertStore(gguf(folder, layers, g), g, cap or g.experts, 2, **options)


def bytes_of(store: ExpertStore, layer: int, expert: int, part: Part) -> np.ndarray:
    return store.slot(layer, expert)[part.at : part.at + part.nbytes]


def values_in(store: ExpertStore, layer: int, expert: int, name: str) -> np.ndarray:
    """float32 of a matrix, read back out of its slot."""
    part = getattr(store.records[layer], name.removesuffix("_proj"))
    data = bytes_of(store, layer, expert, part)
    if part.kind in ("f32", "f16", "bf16"):
        dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[part.kind]
        return widen(data.view(dtype), part.kind.upper()).reshape(part.n, part.k)
    kind = part.kind.removesuffix("f")
    if kind in ("int4", "int8"):
        codes, scales = unpack(Packed(kind, data, part.n, part.k))
        return codes * (np.repeat(scales, 64, axis=1)[:, : part.k] if kind == "int4" else scales[:, None])
    return decode_blocked(kind, unpack_blocks(kind, data, part.n, part.k))


@pytest.mark.parametrize("dtype", [*NATIVE, "F32", "F16", "BF16"])
@pytest.mark.parametrize("activations", ["int8", "f32"])
def test_slots_hold_the_blocks_of_the_file(tmp_path, dtype, activations):
    g = Small(moe_inter=288, hidden=320) if dtype in ("Q8_0", "Q4_0", "Q5_1", "F16") else Small()
    stack = {name: stored(w, dtype) for name, w in drawn(g).items()}
    store = opened(tmp_path, [stack, stack], g, activations=activations)
    native = dtype in NATIVE
    kind = dtype.lower() + "f" * (native and activations == "f32")
    assert {p.kind for r in store.records for p in (r.gate, r.up, r.down)} == {kind}
    store.ensure(1, [4, 0])
    for expert in (0, 4):
        for name, (_, data) in stack.items():
            part = getattr(store.records[1], name.removesuffix("_proj"))
            mine = bytes_of(store, 1, expert, part)
            back = unpack_blocks(kind, mine, part.n, part.k) if native else mine
            assert back.tobytes() == data[expert].tobytes()
    assert store.bytes_read == 2 * sum(data[0].nbytes for _, data in stack.values())
    assert store.format == (dtype if native else dtype.lower()) and not store.notes
    assert store.records[0].nbytes == sum(data[0].nbytes for _, data in stack.values())
    assert store.record_bytes() == 2 * store.records[0].nbytes == plan_experts(store._checkpoint, store.geometry).nbytes
    store.close()


def test_fused_gate_and_up_of_a_gguf(tmp_path):
    g, w = Small(), drawn(Small())
    both = np.concatenate([w["gate_proj"], w["up_proj"]], axis=1)
    stack = {"gate_up_proj": stored(both, "Q4_K"), "down_proj": stored(w["down_proj"], "Q6_K")}
    store = opened(tmp_path, [stack], Small(layers=1))
    store.ensure(0, [3])
    wanted = decode(stack["gate_up_proj"][1][3], "Q4_K")
    assert values_in(store, 0, 3, "gate_proj").tobytes() == wanted[: g.moe_inter].tobytes()
    assert values_in(store, 0, 3, "up_proj").tobytes() == wanted[g.moe_inter :].tobytes()
    assert store.format == "Q4_K, down Q6_K"
    store.close()


def test_types_may_differ_from_layer_to_layer(tmp_path):
    g, w = Small(layers=4), drawn(Small())
    downs = ("Q6_K", "Q4_K", "Q4_K", "Q6_K")
    layers = [{name: stored(v, down if name == "down_proj" else "Q4_K") for name, v in w.items()} for down in downs]
    store = opened(tmp_path, layers, g)
    assert store.format == "Q4_K, down Q6_K in 2 of 4 layers"
    assert [r.down.kind for r in store.records] == ["q6_k", "q4_k", "q4_k", "q6_k"]
    sizes = [sum(data[0].nbytes for _, data in stack.values()) for stack in layers]
    assert [r.nbytes for r in store.records] == sizes and sizes[0] > sizes[1]
    assert store.record_bytes() == sum(sizes) and store.nbytes == g.experts * sum(sizes)
    for layer in range(4):
        store.ensure(layer, range(g.experts))
        for expert in range(g.experts):
            for name, (dtype, data) in layers[layer].items():
                assert values_in(store, layer, expert, name).tobytes() == decode(data[expert], dtype).tobytes()
    store.close()


def test_layers_share_slots_where_their_experts_have_one_size(tmp_path):
    """Three layers of small experts and one of large ones, two slots each; memory given back comes from both."""
    g, w = Small(layers=4), drawn(Small())
    downs = ("Q4_K", "Q6_K", "Q4_K", "Q4_K")
    layers = [{name: stored(v, down if name == "down_proj" else "Q4_K") for name, v in w.items()} for down in downs]
    store = opened(tmp_path, layers, g, cap=2)
    small, large = (store.records[i].nbytes for i in (0, 1))
    assert small < large and store.nbytes == 6 * small + 2 * large
    for ids in ([0, 1], [2, 3], [3, 1]):
        for layer in (0, 1):
            store.ensure(layer, ids)
            for expert in ids:
                data = layers[layer]["down_proj"][1][expert]
                assert values_in(store, layer, expert, "down_proj").tobytes() == decode(data, downs[layer]).tobytes()
    assert store.resident(0) >= {1, 2, 3} and store.resident(1) == {1, 3}
    assert store.filled_bytes == (len(store.resident(0)) * small + 2 * large)
    assert store.shrink(3 * small + large) == 3 * small + large and store.cap == 1
    assert store.nbytes == 3 * small + large and len(store.resident(1)) == 1
    store.close()


@pytest.mark.parametrize("dtype", ["Q2_K", "Q3_K"])
def test_a_type_without_a_kernel_is_decoded_exactly_and_said(tmp_path, dtype):
    assert dtype in DECODED
    g, w = Small(), drawn(Small())
    stack = {name: stored(v, "Q6_K" if name == "down_proj" else dtype) for name, v in w.items()}
    store = opened(tmp_path, [stack, stack], g)
    assert [p.kind for p in (store.records[0].gate, store.records[0].up, store.records[0].down)] == [
        "f32", "f32", "q6_k"]  # fmt: skip
    store.ensure(0, [1, 2])
    for name, (kind, data) in stack.items():
        assert values_in(store, 0, 2, name).tobytes() == decode(data[2], kind).tobytes()
    (note,) = store.notes
    assert f"experts of {dtype} are decoded to float32" in note and "of memory for an expert" in note
    assert store.format == f"{dtype} as f32, down Q6_K"
    store.close()


@pytest.mark.parametrize(("up", "kinds"), [("Q5_K", ("q4_k", "q5_k")), ("F16", ("f32", "f32"))])
def test_gate_and_up_of_two_types(tmp_path, up, kinds):
    """Two types that multiply the same codes stay as they are; else both are decoded, and a note says why."""
    g, w = Small(layers=1), drawn(Small())
    stack = {"gate_proj": stored(w["gate_proj"], "Q4_K"), "up_proj": stored(w["up_proj"], up),
             "down_proj": stored(w["down_proj"], "Q4_K")}  # fmt: skip
    store = opened(tmp_path, [stack], g)
    assert (store.records[0].gate.kind, store.records[0].up.kind) == kinds
    store.ensure(0, [0])
    for name, (dtype, data) in stack.items():
        right = data[0].astype(np.float32) if dtype == "F16" else decode(data[0], dtype)
        assert values_in(store, 0, 0, name).tobytes() == right.tobytes()
    assert ["gate and up differ" in note for note in store.notes] == [True] * (kinds[0] == "f32")
    store.close()


# ---- rounded on request ------------------------------------------------------------------------------------------

PACK = {"int4": pack_int4, "int8": pack_int8}


@pytest.mark.parametrize("mode", ["int4", "int8"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q2_K"])
def test_any_form_is_rounded_to_what_was_asked(tmp_path, dtype, mode):
    g = Small(moe_inter=288, hidden=320) if dtype in ("F32", "Q8_0") else Small()
    stack = {name: stored(w, dtype) for name, w in drawn(g).items()}
    store = opened(tmp_path, [stack], g, mode=mode)
    store.ensure(0, [1])
    for name, (_, data) in stack.items():
        part = getattr(store.records[0], name.removesuffix("_proj"))
        exact = widen(data[1], dtype) if dtype in ("F32", "F16", "BF16") else decode(data[1], dtype)
        assert part.kind == mode
        assert bytes_of(store, 0, 1, part).tobytes() == PACK[mode](exact).data.tobytes()
    assert store.format.startswith({"int4": "int4 groups of 64 (from ", "int8": "int8 rows (from "}[mode])
    assert "are rounded to int" in store.notes[0]
    assert plan_experts(store._checkpoint, store.geometry, mode=mode).nbytes == store.record_bytes()
    store.close()


@pytest.mark.parametrize("fused", [False, True])
def test_fp8_blocks_are_rounded_through_their_scales(tmp_path, fused):
    folder = write_tiny(tmp_path, dtype="FP8", per_expert=not fused, block=(16, 48), scale_dtype="F32")
    checkpoint = Checkpoint.open(folder)
    g = geometry(checkpoint.config)
    store = ExpertStore(checkpoint, g, 3, 2, mode="int8")
    store.ensure(2, [7])
    p, codes = "layers.2.mlp.experts.", []
    if fused:
        codes = [checkpoint.view(f"{p}{n}{s}")[7] for n in ("gate_up_proj", "down_proj") for s in ("", "_scale_inv")]
        up = dequantise(codes[0], codes[1], (16, 48))[g.moe_inter :]
        down = dequantise(codes[2], codes[3], (16, 48))
    else:
        up, down = (dequantise(checkpoint.view(f"{p}7.{n}_proj.weight"),
                               checkpoint.view(f"{p}7.{n}_proj.weight_scale_inv"), (16, 48))
                    for n in ("up", "down"))  # fmt: skip
    record = store.records[2]
    assert bytes_of(store, 2, 7, record.up).tobytes() == pack_int8(up).data.tobytes()
    assert bytes_of(store, 2, 7, record.down).tobytes() == pack_int8(down).data.tobytes()
    assert store.format == "int8 rows (from FP8)"
    store.close()
    checkpoint.close()


# ---- damage ------------------------------------------------------------------------------------------------------

# where a float16 of a block's first row lies
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
          "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "Q2_K": [80, 82]}  # fmt: skip


@pytest.mark.parametrize("raw", [b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize(("dtype", "at"), [(d, at) for d, places in HALVES.items() for at in places])
def test_a_scale_that_is_not_finite_names_expert_and_tensor(tmp_path, dtype, at, raw):
    stack = {name: stored(w, dtype) for name, w in drawn(Small()).items()}
    store = opened(tmp_path, [stack], Small(layers=1))
    tensor = store._checkpoint["layers.0.mlp.experts.down_proj"]
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset + 3 * tensor.nbytes // 5 + at)
        file.write(raw)
    store.ensure(0, [2])
    with pytest.raises(ModelError, match=r"expert 3 of layer 0 has NaN or infinity in layers.0.mlp.experts.down_proj"):
        store.ensure(0, [3, 4])
    assert store.resident(0) == {2, 4} and store.table[0, 3] == 0
    store.close()


@pytest.mark.parametrize("mode", ["int4", "int8"])
def test_nothing_that_is_not_finite_is_rounded_away(tmp_path, mode):
    values = drawn(Small())
    values["up_proj"][2, 5, 7] = np.nan
    values["up_proj"][3, 5, 7] = np.inf
    store = opened(tmp_path, [{name: ("F32", w) for name, w in values.items()}], Small(layers=1), mode=mode)
    store.ensure(0, [1])
    for expert in (2, 3):
        with pytest.raises(ModelError, match=rf"expert {expert} of layer 0 has NaN or infinity.*up_proj"):
            store.ensure(0, [expert])
    store.close()


def test_files_that_hold_something_else_are_refused_at_once(tmp_path):
    g, w = Small(layers=1), drawn(Small())
    stack = {name: stored(v, "Q4_K") for name, v in w.items()}
    checkpoint = gguf(tmp_path, [stack], g)
    down = checkpoint.tensors["layers.0.mlp.experts.down_proj"]
    for changes, message in (
        ({"nbytes": down.nbytes - 144}, "do not hold 5 experts"), ({"dtype": "I32"}, "dtype I32"),
        ({"dtype": "Q8_K"}, "Q8_K"),
    ):  # fmt: skip
        fields = {name: getattr(down, name) for name in ("name", "dtype", "shape", "path", "offset", "nbytes")}
        checkpoint.tensors[down.name] = Tensor(**fields | changes)
        with pytest.raises(ModelError, match=message):
            plan_experts(checkpoint, g)
    with pytest.raises(ModelError, match="no whole blocks of Q4_K"):
        checkpoint.tensors[down.name] = down
        plan_experts(checkpoint, Small(layers=1, moe_inter=128))
    with pytest.raises(ValueError, match="not int2"):
        plan_experts(checkpoint, g, mode="int2")


def test_one_by_one_experts_of_two_sizes_are_found_when_they_are_read(tmp_path):
    """The layout check refuses them at open; a store that is asked all the same reads nothing wrong."""
    folder = write_tiny(tmp_path, tiny_config(), dtype="F16", per_expert=True)
    checkpoint = Checkpoint.open(folder)
    name = "layers.0.mlp.experts.3.up_proj.weight"
    t = checkpoint.tensors[name]
    checkpoint.tensors[name] = Tensor(t.name, "F32", t.shape, t.path, t.offset, 2 * t.nbytes)
    store = ExpertStore(checkpoint, geometry(checkpoint.config), 3, 2)
    store.ensure(0, [2])
    with pytest.raises(ModelError, match=r"3.up_proj.weight"):
        store.ensure(0, [3])
    store.close()


def test_a_real_gguf_file_of_mixed_types(tmp_path):
    """Through the reader: what its tensors hold is what the slots hold, in every layer and in the draft head."""
    config = block36_config("qwen3_5_moe_text")
    types = {"blk.1.ffn_down_exps.weight": "Q6_K", "ffn_down_exps.weight": "Q5_K", "": "Q4_K"}
    path = write_gguf(tmp_path / "mixed.gguf", config, tiny36_weights(config), types=types)
    with Checkpoint.open(path) as checkpoint:
        g = qwen36_geometry(checkpoint.config)
        store = ExpertStore(checkpoint, g, 3, 2)
        assert store.format == "Q4_K, down Q5_K in 3 of 4 layers, down Q6_K in 1 of 4 layers"
        for layer in range(g.layers):
            store.ensure(layer, [5, 2])
            for name in ("gate_proj", "up_proj", "down_proj"):
                part = getattr(store.records[layer], name.removesuffix("_proj"))
                back = unpack_blocks(part.kind, bytes_of(store, layer, 5, part), part.n, part.k)
                assert back.tobytes() == checkpoint.view(f"layers.{layer}.mlp.experts.{name}")[5].tobytes()
        store.close()
        assert plan_experts(checkpoint, g, ("mtp.layers.0.",)).format == "Q4_K, down Q5_K"
