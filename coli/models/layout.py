"""What the layouts of all engines share: the tensors of their common blocks, and whether a checkpoint has them.

Idea: an engine's `expected` is a table name -> shape of every tensor, `check_tensors` compares it with what was found
before a byte is allocated. Whoever loads afterwards needs no test of its own.
Spellings that a checkpoint may choose, all settled here: routed experts fused (`gate_up_proj` [E, 2I, H], gate rows
first), stacked (`gate_proj`, `up_proj` [E, I, H], as GGUF has them), one by one, packed by a container
(coli/formats/container.py), or left to a sidecar (coli/formats/sidecar.py).
Source of names and shapes: model_spec.md. Guarded by tests/models/test_layout.py, tests/models/test_qwen36_layout.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from coli.errors import ModelError
from coli.formats import ggml, sidecar
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import SCALE, pair_scales
from coli.formats.safetensors import Tensor
from coli.formats.strict import counted, listing
from coli.kernels.blocked import blocked_bytes
from coli.kernels.packing import packed_bytes

FLOATS = ("BF16", "F16", "F32")
HEAD, EMBEDDING = "mtp.layers.0.", "embed_tokens.weight"
Shape = tuple[int, ...]
ANY: Any = None  # the shape of a tensor whose bytes somebody else checks

_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.*)")


# ---- the tensors of common blocks ----------------------------------------------------------------------------------


def gdn(g: Any, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Gated DeltaNet with one projection for each of its inputs."""
    p, values = f"{prefix}linear_attn.", g.gdn_value_heads * g.gdn_value_dim
    yield f"{p}in_proj_qkv.weight", (g.conv_channels, g.hidden)
    yield f"{p}in_proj_z.weight", (values, g.hidden)
    yield f"{p}in_proj_a.weight", (g.gdn_value_heads, g.hidden)
    yield f"{p}in_proj_b.weight", (g.gdn_value_heads, g.hidden)
    yield from gdn_core(g, prefix)


def gdn_core(g: Any, prefix: str) -> Iterator[tuple[str, Shape]]:
    """The rest of it: what comes behind the inputs."""
    p, values = f"{prefix}linear_attn.", g.gdn_value_heads * g.gdn_value_dim
    yield f"{p}conv1d.weight", (g.conv_channels, 1, g.gdn_conv)
    yield f"{p}A_log", (g.gdn_value_heads,)
    yield f"{p}dt_bias", (g.gdn_value_heads,)
    yield f"{p}norm.weight", (g.gdn_value_dim,)
    yield f"{p}out_proj.weight", (g.hidden, values)


def attention(g: Any, prefix: str, query_width: int) -> Iterator[tuple[str, Shape]]:
    p = f"{prefix}self_attn."
    yield f"{p}q_proj.weight", (query_width, g.hidden)
    yield f"{p}k_proj.weight", (g.kv_heads * g.head_dim, g.hidden)
    yield f"{p}v_proj.weight", (g.kv_heads * g.head_dim, g.hidden)
    yield f"{p}o_proj.weight", (g.hidden, g.heads * g.head_dim)
    yield f"{p}q_norm.weight", (g.head_dim,)
    yield f"{p}k_norm.weight", (g.head_dim,)


def swiglu(g: Any, p: str, inter: int) -> Iterator[tuple[str, Shape]]:
    yield f"{p}gate_proj.weight", (inter, g.hidden)
    yield f"{p}up_proj.weight", (inter, g.hidden)
    yield f"{p}down_proj.weight", (g.hidden, inter)


def moe(g: Any, p: str, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    """Router, shared expert (where the model has one) and routed experts."""
    yield f"{p}gate.weight", (g.experts, g.hidden)
    if g.shared_inter:
        yield from swiglu(g, f"{p}shared_expert.", g.shared_inter)
        yield f"{p}shared_expert_gate.weight", (1, g.hidden)
    yield from _experts(g, f"{p}experts.", names)


def _experts(g: Any, p: str, names: Container[str]) -> Iterator[tuple[str, Shape]]:
    if f"{p}gate_up_proj" in names:
        yield f"{p}gate_up_proj", (g.experts, 2 * g.moe_inter, g.hidden)
        yield f"{p}down_proj", (g.experts, g.hidden, g.moe_inter)
    elif f"{p}gate_proj" in names:
        yield f"{p}gate_proj", (g.experts, g.moe_inter, g.hidden)
        yield f"{p}up_proj", (g.experts, g.moe_inter, g.hidden)
        yield f"{p}down_proj", (g.experts, g.hidden, g.moe_inter)
    elif f"{p}0.merged_weight" in names:  # their sizes say what they are: coli/experts/records.py
        for expert in range(g.experts):
            yield f"{p}{expert}.merged_weight", ANY
            yield f"{p}{expert}.merged_weight.qs", ANY
    else:
        for expert in range(g.experts):
            yield from swiglu(g, f"{p}{expert}.", g.moe_inter)


# ---- bytes in memory -------------------------------------------------------------------------------------------------


def use_of(name: str) -> str:
    """What a tensor is for: "dense", "experts", "table" (of n-grams) or "mtp" (the draft head's, its experts too)."""
    if name.startswith("mtp."):
        return "mtp"
    if ".mlp.experts." in name:
        return "experts"
    return "table" if ".ngram_embedding." in name else "dense"


def dense_formats(checkpoint: Checkpoint, g: Any, int8_rows: Callable[[str], bool]) -> Counter[str]:
    """Resident bytes of the trunk's dense weights by format: all but the embedding, whose rows are read one by one.
    `int8_rows` names those that are repacked."""
    return _formats(checkpoint, int8_rows, lambda name: use_of(name) == "dense" and (name != EMBEDDING or g.tied))


def head_formats(checkpoint: Checkpoint, int8_rows: Callable[[str], bool]) -> Counter[str]:
    """Resident bytes of the draft head's dense weights by format."""
    return _formats(checkpoint, int8_rows, lambda name: use_of(name) == "mtp" and ".mlp.experts." not in name)


def _formats(checkpoint: Checkpoint, int8_rows: Callable[[str], bool], wanted: Callable[[str], bool]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, tensor in checkpoint.tensors.items():
        if wanted(name):
            words, nbytes = _resident(tensor, int8_rows(name))
            found[words] += nbytes
    return found


def _resident(tensor: Tensor, int8: bool) -> tuple[str, int]:
    """(format, bytes) of a dense tensor in memory."""
    if len(tensor.shape) != 2:
        return tensor.dtype, tensor.nbytes
    n, k = tensor.shape
    if int8 and tensor.dtype in FLOATS:
        return "int8 rows", packed_bytes("int8", n, k)
    if tensor.dtype in ggml.NATIVE:
        return tensor.dtype, blocked_bytes(tensor.dtype.lower(), n, k)
    if tensor.dtype in ggml.DECODED:
        return f"F32 (from {tensor.dtype})", 4 * n * k
    return tensor.dtype, tensor.nbytes


# ---- the check -------------------------------------------------------------------------------------------------------


def check_tensors(
    checkpoint: Checkpoint, found: Mapping[str, Tensor], table: Mapping[str, Shape], scalars: Container[str] = (),
    integers: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Exactly the tensors of `table` were `found`, with its shapes, dtypes the kernels read, and the scales FP8 needs.

    `scalars`: names somebody else accounts for; `integers`: endings of names that hold int64. Raises ModelError."""
    table = _without_sidecar(checkpoint, table)
    elsewhere = {name for name in found if name in scalars}
    exempt = elsewhere | {t for t in table if ".ngram_embedding." in t}
    scales = pair_scales(found, checkpoint.quantization, exempt, checkpoint.folder)
    _names(checkpoint, table.keys() - found.keys(),
           found.keys() - table.keys() - {name + SCALE for name in scales} - elsewhere)
    wrong = [f"{name}: expected {list(shape)}, found {list(checkpoint[name].shape)}"
             for name, shape in table.items() if not _fits(checkpoint[name].shape, shape)]  # fmt: skip
    if wrong:
        raise ModelError(f"{counted(len(wrong), 'tensor')} of a wrong shape: {listing(wrong)}", checkpoint.folder,
                         "the configuration and the weights belong to different models")  # fmt: skip
    _dtypes(checkpoint, table, integers)
    _expert_kinds(checkpoint, table)


def head_tensors(checkpoint: Checkpoint, variable: str) -> dict[str, Tensor]:
    """The draft head's. Raises ModelError where there are none; `variable` demands a head."""
    head = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith("mtp.")}
    if not head:
        raise ModelError("the checkpoint has no draft head (no mtp.* tensors)", checkpoint.folder,
                         f"use a checkpoint with one, or leave out {variable}=1 (--mtp)")  # fmt: skip
    return head


def _without_sidecar(checkpoint: Checkpoint, table: Mapping[str, Shape]) -> dict[str, Shape]:
    """The table without the experts of layers that have none in the checkpoint itself but may have them in a sidecar
    (the expert store looks)."""
    if not sidecar.folders(checkpoint.folder):
        return dict(table)
    experts = {name: match[1] for name in table if (match := _EXPERT.fullmatch(name))}
    own = {prefix for name, prefix in experts.items() if name in checkpoint}
    left = set(experts.values()) - own
    return {name: shape for name, shape in table.items() if experts.get(name) not in left}


def _fits(found: Shape, wanted: Shape) -> bool:
    """Equal, but for dimensions of one that are left out: GGUF drops them. A matrix must not have one more, or one
    elsewhere: whoever reads rows and columns off its shape would read another matrix. A vector is flattened."""
    if wanted is ANY or found == wanted:
        return True
    squeezed = tuple(d for d in wanted if d != 1)
    if len(found) < len(wanted):
        return found == squeezed
    return len(wanted) == 1 and tuple(d for d in found if d != 1) == squeezed


def _names(checkpoint: Checkpoint, missing: set[str], unknown: set[str]) -> None:
    parts = [f"{counted(len(names), f'{kind} tensor')}: {listing(names)}"
             for kind, names in (("missing", missing), ("unknown", unknown)) if names]  # fmt: skip
    if parts:
        hint = "the download is incomplete" if missing and not unknown else "not a checkpoint this engine knows"
        raise ModelError("; ".join(parts), checkpoint.folder, hint)


def _dtypes(checkpoint: Checkpoint, table: Mapping[str, Shape], integers: tuple[str, ...]) -> None:
    wrong = []
    for name, shape in table.items():
        if shape is ANY:
            continue
        matrix = len(shape) > 1 and "conv1d" not in name
        allowed: tuple[str, ...] = (*FLOATS, "F8_E4M3", *ggml.NATIVE, *ggml.DECODED) if matrix else FLOATS
        if integers and name.endswith(integers):
            allowed = ("I64",)
        if checkpoint[name].dtype not in allowed:
            known = FLOATS if allowed[: len(FLOATS)] == FLOATS else allowed
            wrong.append(f"{name} is {checkpoint[name].dtype}, not {' or '.join(known)}")
    if wrong:
        raise ModelError(f"{counted(len(wrong), 'tensor')} of a dtype this engine does not read: {listing(wrong)}",
                         checkpoint.folder, "use the BF16 or the FP8 release of the model, or a GGUF")  # fmt: skip


def _expert_kinds(checkpoint: Checkpoint, table: Mapping[str, Shape]) -> None:
    """Experts stored one by one have one dtype in a layer, and an n-gram table has one: slots and rows have one
    size."""
    groups: dict[str, set[str]] = {}
    for name in table:
        match = _EXPERT.fullmatch(name)
        if match and table[name] is not ANY:
            part = "the routed experts of the draft head" if name.startswith("mtp.") else (
                f"the routed experts of layer {name.split('.')[1]}")  # fmt: skip
            groups.setdefault(part, set()).add(checkpoint[name].dtype)
        elif ".ngram_embedding." in name:
            groups.setdefault(f"the n-gram table of layer {name.split('.')[1]}", set()).add(checkpoint[name].dtype)
    for group, dtypes in groups.items():
        if len(dtypes) > 1:
            raise ModelError(f"{group} mix {' and '.join(sorted(dtypes))}", checkpoint.folder, "use one dtype")
