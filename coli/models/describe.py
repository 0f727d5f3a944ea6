"""What a checkpoint is, from its headers alone: format, bytes by use and by type, what is quantised how, draft head.

Idea: names and dtypes tell all of it, so one function serves every engine and every format; the geometry is asked only
for the number and the size of the experts. Nothing is judged here: whether a checkpoint loads is its family's `check`.
A sidecar is part of the model where the checkpoint has no routed experts of its own, as the expert store takes it then;
beside experts of the checkpoint it is only named.
Guarded by tests/models/test_describe.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from coli.formats import container, ggml, sidecar
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import SCALE
from coli.formats.safetensors import Tensor
from coli.models.layout import HEAD, use_of
from coli.report import count

FLOATS = ("F64", *ggml.FLOATS)
_SCALES = (SCALE, ".qs", "weight_scale")


class _Seen(NamedTuple):
    """What is described: an open checkpoint with its geometry, the sidecar its experts are in, the tensors of both."""

    checkpoint: Checkpoint
    geometry: Any
    beside: sidecar.Sidecar | None
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Description:
    """Sizes are bytes in the files: `dense`, `experts`, `table` and `mtp` together are the model, `ignored` is vision.
    `types`: dtype -> (tensors, bytes) of the model. `expert_record`: an expert of the trunk with its scales. `head`:
    the draft head in words, None without one."""

    engine: str
    model_type: str
    architecture: str
    format: str
    quantisation: str
    head: str | None
    types: dict[str, tuple[int, int]]
    dense: int
    experts: int
    table: int
    mtp: int
    ignored: int
    expert_record: int

    @property
    def nbytes(self) -> int:
        return self.dense + self.experts + self.table + self.mtp


def describe(checkpoint: Checkpoint, geometry: Any, engine: str) -> Description:
    """Describe an open checkpoint whose geometry this engine read. Raises ModelError for a container's expert of an
    impossible size and for a sidecar that cannot be read."""
    beside = _sidecar_of(checkpoint, geometry)
    tensors = checkpoint.tensors | dict(beside.tensors if beside else {})
    seen = _Seen(checkpoint, geometry, beside, tensors)
    sums = dict.fromkeys(("dense", "experts", "table", "mtp"), 0)
    types: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        sums[use_of(name)] += tensor.nbytes
        number, nbytes = types.get(tensor.dtype, (0, 0))
        types[tensor.dtype] = number + 1, nbytes + tensor.nbytes
    layers = {name.split(".")[1] for name in tensors if use_of(name) == "experts"}
    return Description(
        engine=engine, model_type=str(checkpoint.config.get("model_type")), architecture=_architecture(checkpoint),
        format=_format(seen), quantisation=_quantisation(seen), head=_head(seen),
        types=types, **sums, ignored=sum(tensor.nbytes for tensor in checkpoint.ignored),
        expert_record=sums["experts"] // (len(layers) * geometry.experts) if layers else 0,
    )  # fmt: skip


def _sidecar_of(checkpoint: Checkpoint, geometry: Any) -> sidecar.Sidecar | None:
    """The sidecar with the experts of a checkpoint that has none of its own, the one of most bits; None without."""
    if not geometry.experts or any(use_of(name) == "experts" for name in checkpoint.tensors):
        return None
    folders = (folder for bits in (8, 4) for folder in sidecar.folders(checkpoint.folder, bits))
    whole = next((folder for folder in folders if sidecar.is_complete(folder)), None)
    return None if whole is None else sidecar.open_sidecar(checkpoint, whole, geometry)


def _architecture(checkpoint: Checkpoint) -> str:
    if checkpoint.traits.gguf:
        return str(checkpoint.metadata.get("general.architecture", ""))
    named = checkpoint.raw_config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _format(seen: _Seen) -> str:
    checkpoint = seen.checkpoint
    kind = "GGUF" if checkpoint.traits.gguf else "int4/int8 container" if checkpoint.meta else "safetensors"
    files = {tensor.path for tensor in (*checkpoint.tensors.values(), *checkpoint.ignored)}
    return f"{kind}, {count(len(files), 'file')}" + (f", and {seen.beside.folder.name}" if seen.beside else "")


# ---- what is quantised -----------------------------------------------------------------------------------------------


def _quantisation(seen: _Seen) -> str:
    groups = {use: _matrices(seen, use) for use in ("dense", "experts", "table")}
    words = {use: _words(seen, found) for use, found in groups.items() if found}
    dtypes = {tensor.dtype for found in groups.values() for tensor in found.values()}
    if dtypes <= {*FLOATS}:
        text = f"none ({', '.join(sorted(dtypes))})"
    else:
        names = {"dense": "dense", "experts": "experts", "table": "n-gram table"}
        text = "; ".join(f"{names[use]} {what}" for use, what in words.items())
    decoded = sorted(dtypes & {*ggml.DECODED})
    if decoded:
        text += f"; {', '.join(decoded)} decoded to float32 when loaded"
    return text + "".join(f"; beside it {what}" for what in _sidecars(seen))


def _sidecars(seen: _Seen) -> Iterable[str]:
    """Those that are not the model's own."""
    for folder in sidecar.folders(seen.checkpoint.folder):
        if seen.beside is None or folder != seen.beside.folder:
            yield f"{folder.name}{'' if sidecar.is_complete(folder) else ', not complete'}"


def _matrices(seen: _Seen, use: str) -> dict[str, Tensor]:
    """The weights of this use that are multiplied or looked up, their scales and all vectors left out."""
    return {
        name: tensor for name, tensor in seen.tensors.items()
        if use_of(name) == use and not name.endswith(_SCALES) and "conv1d" not in name
        and (len(tensor.shape) > 1 or name.endswith("merged_weight"))
    }  # fmt: skip


def _words(seen: _Seen, tensors: Mapping[str, Tensor]) -> str:
    """The kinds of these weights, those of most bytes first."""
    weights: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = tensor.dtype
        if name.endswith("merged_weight"):
            kind = _packed(seen.checkpoint, seen.geometry, name)
        elif seen.beside is not None and name in seen.beside.tensors:
            kind = _packing(container.Packing(seen.beside.bits, seen.beside.group))
        elif kind == "F8_E4M3":
            kind = "FP8" + _blocks(seen.checkpoint.quantization)
        weights[kind] = weights.get(kind, 0) + tensor.nbytes
    return ", ".join(sorted(weights, key=lambda kind: -weights[kind]))


def _packed(checkpoint: Checkpoint, geometry: Any, name: str) -> str:
    codes, scales = checkpoint[name], checkpoint[f"{name}.qs"]
    gate, _, down = container.packings(codes, scales, geometry.moe_inter, geometry.hidden, checkpoint.meta)
    one_group = not down.group and geometry.moe_inter <= gate.group  # a row of down is no longer than a group
    alike = gate.bits == down.bits and (gate.group == down.group or one_group)
    return _packing(gate) if alike else f"{_packing(gate)} (down {_packing(down)})"


def _packing(packing: container.Packing) -> str:
    return f"int{packing.bits} " + (f"groups of {packing.group}" if packing.group else "rows")


def _blocks(quantization: Mapping[str, Any]) -> str:
    block = quantization.get("weight_block_size")
    return f" in blocks of {block[0]}x{block[1]}" if isinstance(block, list) and len(block) == 2 else ""


# ---- the draft head --------------------------------------------------------------------------------------------------


def _head(seen: _Seen) -> str | None:
    names = [name for name in seen.tensors if name.startswith("mtp.")]
    if not names:
        return None
    layers = {name.split(".")[2] for name in names if name.startswith("mtp.layers.")}
    return ", ".join([count(len(layers), "layer"), _form(seen), _words(seen, _matrices(seen, "mtp"))])


def _form(seen: _Seen) -> str:
    """What the head's layer ends in, and how routed experts are stored."""
    forms = {"gate_up_proj": "fused", "gate_proj": "stacked", "0.merged_weight": "packed",
             "0.gate_proj.weight": "one by one"}  # fmt: skip
    found = next((form for name, form in forms.items() if f"{HEAD}mlp.experts.{name}" in seen.tensors), None)
    if found is not None:
        return f"experts {found}"
    return "dense MLP" if f"{HEAD}mlp.gate_proj.weight" in seen.tensors else "experts missing"
