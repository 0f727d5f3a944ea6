"""Routed experts beside a checkpoint, quantised once: `<model>/experts-int4g64/` and its siblings.

Layout (what is read here, and what `coli convert` writes): a folder `experts-int4g<G>` or `experts-int8g<G>` (G inputs
share a scale; a multiple of 32) with index.json and layer files.

    index.json   {"format": "colibri.qwen38.experts-int4g64" for int4 groups of 64, else "coli.qwen38.experts-int4g<G>"
                  or "coli.qwen38.experts-int8g<G>"; "version": 1; "codes": "planar64-v8" (int4) | "int8";
                  "scales": "f32-per-<G>"; "geometry": {"hidden": H, "moe_inter": I, "experts": E, "layers": N};
                  "record_bytes": bytes of one expert; "layers": N (a list of layer numbers is read too);
                  "complete": true}                written last; complete other than true is refused
    layer-NNN.safetensors   the experts of trunk layer NNN (from 000), written as .part and renamed
    layer-mtp.safetensors   optional: those of the draft head, names mtp.layers.0.mlp.experts.E...

A layer file's data region starts on a 4096-byte boundary (the header is padded with spaces) and holds the records of
experts 0, 1, 2, ... one behind the other. A record is six tensors in this order, without gaps:

    <prefix>.layers.L.mlp.experts.E.gate_proj.weight   int4: U8 [I, H/2]   int8: I8 [I, H]      <prefix>: `model`,
                                    up_proj.weight     the same                             `model.language_model`
                                    down_proj.weight   int4: U8 [H, I/2]   int8: I8 [H, I]                or `mtp`
                                    gate_proj.weight.qs   F32 [I, ceil(H/G)]
                                    up_proj.weight.qs     the same
                                    down_proj.weight.qs   F32 [H, ceil(I/G)]

planar64-v8, whatever G: a row is blocks of 64 inputs in 32 bytes, byte k: low nibble = input k, high nibble = input
k + 32, code = v + 8, value = v * scale. The tail of a row whose length is no multiple of 64 is stored in pairs: byte
j: low = input 2j, high = input 2j + 1 of the tail, ceil(tail / 2) bytes (an odd one's last high nibble is 8, value 0).
Quantise int4: scale = max(absmax of the group, 1e-12) / 7, v = round half to even, clamped to -8..7.
int8: signed bytes, scale = max(absmax of the group, 1e-12) / 127, clamped to -127..127.

Reading takes tensors by name from every *.safetensors of the folder, so neither file names nor order matter to it.
Guarded by tests/formats/test_sidecar.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint, canonical
from coli.formats.safetensors import Tensor, header_of
from coli.formats.strict import AGAIN, read_object, show

INDEX = "index.json"
STEP = 4096  # where a layer file's data region may begin
VERSION = 1
_FOLDER = re.compile(r"experts-int([48])g([1-9]\d{0,4})")
CODES = {4: "planar64-v8", 8: "int8"}


class Sizes(Protocol):
    """What routed experts ask of an engine's geometry."""

    @property
    def hidden(self) -> int: ...
    @property
    def moe_inter(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def layers(self) -> int: ...


@dataclass(frozen=True)
class Sidecar:
    """An opened, complete sidecar; its files belong to the checkpoint. `tensors` by canonical name."""

    folder: Path
    bits: int
    group: int
    tensors: Mapping[str, Tensor]

    def holds(self, prefix: str) -> bool:
        """Whether the experts of the layer with this name prefix are in it."""
        return f"{prefix}mlp.experts.0.gate_proj.weight" in self.tensors


def folder_name(bits: int, group: int) -> str:
    return f"experts-int{bits}g{group}"


def format_name(bits: int, group: int) -> str:
    """What `format` in the index is."""
    return f"{'colibri' if (bits, group) == (4, 64) else 'coli'}.qwen38.{folder_name(bits, group)}"


def record_bytes(inter: int, hidden: int, bits: int, group: int) -> int:
    """Bytes of one expert, codes and scales."""
    rows = ((inter, hidden), (inter, hidden), (hidden, inter))
    return sum(n * (_row(k, bits) + 4 * -(-k // group)) for n, k in rows)


def _row(k: int, bits: int) -> int:
    return k if bits == 8 else k // 64 * 32 + (k % 64 + 1) // 2


def folders(model: Path, bits: int | None = None) -> list[Path]:
    """The sidecar folders beside a checkpoint, those of 64 inputs a group first, then finer ones."""
    if not model.is_dir():
        return []
    named = [(match, path) for path in model.iterdir() if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()]
    wanted = [(match, path) for match, path in named if bits in (None, int(match[1]))]
    return [path for _, path in sorted(wanted, key=lambda found: (found[0][2] != "64", int(found[0][2]), found[1]))]


def is_complete(folder: Path) -> bool:
    """Whether its index says so. Raises ModelError for one that cannot be read."""
    return (folder / INDEX).exists() and read_object(folder / INDEX, INDEX).get("complete") is True


def open_sidecar(checkpoint: Checkpoint, folder: Path, sizes: Sizes) -> Sidecar:
    """Read index and headers, once; no expert. Raises ModelError."""
    if folder in checkpoint.beside:
        return checkpoint.beside[folder]
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ModelError("not the folder of a sidecar", folder, "it is named experts-int4g64 or alike")
    bits, group = int(match[1]), int(match[2])
    _check_index(read_object(folder / INDEX, INDEX), folder / INDEX, bits, group, sizes)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in header_of(checkpoint.add_file(path), path).items():
            known = canonical(name) or name
            if known in tensors:
                raise ModelError(f"tensor {show(name)} is in two files, {tensors[known].path.name} and {path.name}",
                                 folder, "delete the older file, or convert again")  # fmt: skip
            tensors[known] = tensor
    found = checkpoint.beside[folder] = Sidecar(folder, bits, group, tensors)
    return found


def _check_index(index: dict[str, Any], where: Path, bits: int, group: int, sizes: Sizes) -> None:
    """The index describes what the reader expects, and all of it is there."""
    if index.get("complete") is not True:
        raise ModelError("the sidecar is not complete: its conversion was interrupted", where,
                         "run `coli convert` again, it goes on where it stopped")  # fmt: skip
    geometry = index.get("geometry")
    if not isinstance(geometry, dict):
        raise ModelError(f"geometry: {show(geometry)} is not an object", where, AGAIN)
    expected = {
        "format": format_name(bits, group), "version": VERSION, "codes": CODES[bits], "scales": f"f32-per-{group}",
        "record_bytes": record_bytes(sizes.moe_inter, sizes.hidden, bits, group),
    }  # fmt: skip
    found = {**{key: index.get(key) for key in expected}, **_named(geometry)}
    layers = index.get("layers")
    found["layers"] = len(layers) if isinstance(layers, list) else layers
    expected |= {"hidden": sizes.hidden, "moe_inter": sizes.moe_inter, "experts": sizes.experts,
                 "layers": sizes.layers}  # fmt: skip
    for key, value in found.items():
        if type(value) is not type(expected[key]) or value != expected[key]:
            raise ModelError(f"{key}: expected {show(expected[key])}, found {show(value)}", where,
                             "the sidecar belongs to another model or another version: convert again")  # fmt: skip


_SPELLINGS = {
    "hidden": ("hidden", "hidden_size"), "moe_inter": ("moe_inter", "moe_intermediate_size", "inter"),
    "experts": ("experts", "num_experts", "n_experts"),
}  # fmt: skip


def _named(geometry: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes a geometry names, in our words; other makers spell them their way."""
    return {key: geometry[name] for key, names in _SPELLINGS.items() for name in names if name in geometry}
