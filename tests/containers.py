"""Containers and sidecars for tests: experts quantised and packed by this file's own few lines.

Idea: everything is done one value at a time in plain NumPy, from the layouts' words (formats.md) and not from the
reader, so the two cannot share a mistake. `Packed` keeps codes and scales, which is what tests compare slots with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny import ITEM, header_bytes, store, write_safetensors, write_text_files
from tests.tiny36 import layer_kinds, tiny36_weights

ITEM.update({"U8": 1, "I8": 1, "I32": 4})
PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Packed:
    """codes int8 [n, k], scales float32 [n, ceil(k / group)]; group 0: one scale a row."""

    codes: np.ndarray
    scales: np.ndarray
    group: int

    @property
    def values(self) -> np.ndarray:
        """float32 [n, k]."""
        step = self.group or self.codes.shape[1]
        return self.codes * np.repeat(self.scales, step, axis=1)[:, : self.codes.shape[1]]


def quantise(w: np.ndarray, bits: int, group: int) -> Packed:
    n, k = w.shape
    step, top = group or k, {4: 7, 8: 127}[bits]
    codes, scales = np.zeros((n, k), np.int8), np.zeros((n, -(-k // step)), np.float32)
    for at in range(0, k, step):
        part = w[:, at : at + step]
        scale = np.maximum(np.abs(part).max(axis=1), np.float32(1e-12)) / np.float32(top)
        codes[:, at : at + step] = np.clip(np.round(part / scale[:, None]), -top, top)
        scales[:, at // step] = scale
    return Packed(codes, scales, group)


def pairs(codes: np.ndarray) -> bytes:
    """Two's-complement nibbles: input 2j low, input 2j + 1 high."""
    flat = codes.reshape(-1).tolist()
    return bytes((low & 15) | (high & 15) << 4 for low, high in zip(flat[::2], flat[1::2], strict=True))


def planar(codes: np.ndarray) -> np.ndarray:
    """planar64-v8, uint8 [n, bytes of a row]."""
    rows = []
    for row in (codes.astype(int) + 8).tolist():
        whole, out = len(row) // 64 * 64, []
        for at in range(0, whole, 64):
            out += [row[at + j] | row[at + j + 32] << 4 for j in range(32)]
        tail = row[whole:] + [8] * (len(row) % 2)
        rows.append(out + [tail[j] | tail[j + 1] << 4 for j in range(0, len(tail), 2)])
    return np.array(rows, np.uint8)


def experts_of(weights: Mapping[str, np.ndarray], prefix: str) -> list[dict[str, np.ndarray]]:
    """gate, up and down of every expert of a layer, from fused float32 weights."""
    both, down = weights[f"{prefix}mlp.experts.gate_up_proj"], weights[f"{prefix}mlp.experts.down_proj"]
    half = both.shape[1] // 2
    return [{"gate": b[:half], "up": b[half:], "down": d} for b, d in zip(both, down, strict=True)]


def split(weights: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """(what is no routed expert, name prefixes of the layers that have some)."""
    rest = {name: values for name, values in weights.items() if ".mlp.experts." not in name}
    return rest, [name.removesuffix("mlp.experts.down_proj") for name in weights if name.endswith("experts.down_proj")]


# ---- qwen36 container --------------------------------------------------------------------------------------------


def meta_of(config: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """qwen36_meta.json of a tiny36 config."""
    c, plain = config, config["model_type"] == "qwen3_moe"
    rope = c.get("rope_parameters", c)
    meta = dict(
        model_type=c["model_type"], hidden=c["hidden_size"], n_layers=c["num_hidden_layers"], n_active=2,
        layer_types=layer_kinds(c), num_experts=c["num_experts"], topk=c["num_experts_per_tok"],
        moe_inter=c["moe_intermediate_size"], shared_inter=c.get("shared_expert_intermediate_size", 0),
        rms_eps=c["rms_norm_eps"], ebits=4, scoring_func="softmax", n_group=1, topk_group=1, norm_topk_prob=True,
        attn_output_gate=not plain, rope_theta=rope["rope_theta"], zero_centered_norms=not plain,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0), q_heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"], head_dim=c["head_dim"], expert_gs=0, expert_down_bits=4, expert_down_gs=0,
        dn_vheads=c.get("linear_num_value_heads", 0), dn_kheads=c.get("linear_num_key_heads", 0),
        dn_kdim=c.get("linear_key_head_dim", 0), dn_vdim=c.get("linear_value_head_dim", 0),
        dn_convk=c.get("linear_conv_kernel_dim", 0),
    )  # fmt: skip
    return meta | overrides


def merged(expert: Mapping[str, Packed], bits: Mapping[str, int]) -> tuple[bytes, np.ndarray]:
    """(merged_weight, its .qs) of one expert."""
    codes = b"".join(pairs(expert[p].codes) if bits[p] == 4 else expert[p].codes.tobytes() for p in PARTS)
    return codes, np.concatenate([expert[p].scales.reshape(-1) for p in PARTS])


def write_container(
    folder: Path, config: Mapping[str, Any], *, bits: int = 4, down_bits: int | None = None, group: int = 0,
    down_group: int | None = None, mtp: bool = True, head: str = "packed", seed: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, list[dict[str, Packed]]]:  # fmt: skip
    """Write a container of tiny36 weights; returns every layer's experts by name prefix.

    `head`: the draft head's experts "packed" like a layer's or "plain". `meta` replaces keys of qwen36_meta.json, where
    None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny36_weights(config, seed, mtp)
    each = {"gate": bits, "up": bits, "down": down_bits or bits}
    groups = {"gate": group, "up": group, "down": group if down_group is None else down_group}
    dense, prefixes = split(weights)
    files: dict[str, dict[str, tuple[str, np.ndarray]]] = {}
    for name, values in dense.items():
        files.setdefault(_file(name), {})[_name(name)] = store(values, "F16")
    made: dict[str, list[dict[str, Packed]]] = {}
    for prefix in prefixes:
        if prefix.startswith("mtp.") and head == "plain":
            for part in ("gate_up_proj", "down_proj"):
                name = f"{prefix}mlp.experts.{part}"
                files[_file(prefix)][name] = store(weights[name], "F16")
            continue
        made[prefix] = [{p: quantise(w, each[p], groups[p]) for p, w in expert.items()}
                        for expert in experts_of(weights, prefix)]  # fmt: skip
        for number, expert in enumerate(made[prefix]):
            name, (codes, scales) = _name(f"{prefix}mlp.experts.{number}.merged_weight"), merged(expert, each)
            files[_file(prefix)][name] = "U8", np.frombuffer(codes, np.uint8)
            files[_file(prefix)][f"{name}.qs"] = "F32", scales
    for file, tensors in files.items():
        write_safetensors(folder / file, tensors)
    vision = {"patch_embed.weight": store(np.ones((2, 3), np.float32), "F32")}
    write_safetensors(folder / "model-vision.safetensors", vision)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    said = meta_of(config, ebits=bits, expert_down_bits=each["down"], expert_gs=group, expert_down_gs=groups["down"])
    said = {key: value for key, value in (said | dict(meta or {})).items() if value is not None}
    (folder / "qwen36_meta.json").write_text(json.dumps(said))
    write_text_files(folder, config["vocab_size"])
    return made


def _file(name: str) -> str:
    if name.startswith("mtp."):
        return "model-mtp.safetensors"
    return f"model-{int(name.split('.')[1]):05d}.safetensors" if name.startswith("layers.") else (
        "model-globals.safetensors")  # fmt: skip


def _name(name: str) -> str:
    return name if name.startswith(("mtp.", "lm_head.")) else f"model.{name}"


# ---- sidecar -----------------------------------------------------------------------------------------------------


def write_sidecar(
    model: Path, weights: Mapping[str, np.ndarray], *, bits: int = 4, group: int = 64, head: bool = True,
    index: Mapping[str, Any] | None = None, prefix: str = "model.",
) -> dict[str, list[dict[str, Packed]]]:  # fmt: skip
    """Write experts-int<bits>g<group> into a model's folder, from fused float32 weights; returns every layer's experts.
    `index` replaces keys of index.json."""
    folder = model / f"experts-int{bits}g{group}"
    folder.mkdir()
    made: dict[str, list[dict[str, Packed]]] = {}
    prefixes = [p for p in split(weights)[1] if head or not p.startswith("mtp.")]
    size = 0
    for layer in prefixes:
        made[layer] = [{p: quantise(w, bits, group) for p, w in expert.items()}
                       for expert in experts_of(weights, layer)]  # fmt: skip
        tensors: dict[str, tuple[str, np.ndarray]] = {}
        for number, expert in enumerate(made[layer]):
            stem = f"{'' if layer.startswith('mtp.') else prefix}{layer}mlp.experts.{number}."
            tensors |= {f"{stem}{p}_proj.weight": ("U8", planar(expert[p].codes)) if bits == 4
                        else ("I8", expert[p].codes) for p in PARTS}  # fmt: skip
            tensors |= {f"{stem}{p}_proj.weight.qs": ("F32", expert[p].scales) for p in PARTS}
            size = sum(tensors[f"{stem}{p}_proj.weight{end}"][1].nbytes for p in PARTS for end in ("", ".qs"))
        name = "layer-mtp" if layer.startswith("mtp.") else f"layer-{int(layer.split('.')[1]):03d}"
        _write_records(folder / f"{name}.safetensors", tensors)
    layers = sum(not p.startswith("mtp.") for p in prefixes)
    inter, hidden = experts_of(weights, prefixes[0])[0]["gate"].shape
    maker = "colibri" if (bits, group) == (4, 64) else "coli"
    text = dict(
        format=f"{maker}.qwen38.experts-int{bits}g{group}", version=1, codes="planar64-v8" if bits == 4 else "int8",
        scales=f"f32-per-{group}", record_bytes=size, layers=layers, complete=True,
        geometry=dict(hidden=hidden, moe_inter=inter, experts=len(made[prefixes[0]]), layers=layers),
    )  # fmt: skip
    (folder / "index.json").write_text(json.dumps(text | dict(index or {})))
    return made


def _write_records(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """In this order, data from a 4096-byte boundary on."""
    head, _ = header_bytes({name: (dtype, array.shape) for name, (dtype, array) in tensors.items()})
    text = head[8:] + b" " * (-len(head) % 4096)
    body = b"".join(np.ascontiguousarray(array).tobytes() for _, array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
