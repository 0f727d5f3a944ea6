"""Where the routed experts of a layer lie in the files, and what a slot of the layer looks like.

Idea: a checkpoint spells experts in one of five ways; `find` settles which, and from then on an expert is three
`Located` matrices (gate [I, H], up [I, H], down [H, I]) whose bytes have a place. A layer's `ExpertRecord` follows from
their formats alone (coli/experts/forms.py), so layers of one file may differ: a Q4_K_M GGUF holds some of its down
matrices as Q6_K.

    fused        gate_up_proj [E, 2I, H], gate rows first, and down_proj [E, H, I]; block FP8 with `_scale_inv`
    stacked      gate_proj, up_proj [E, I, H] and down_proj (GGUF)
    one by one   E.gate_proj.weight, E.up_proj.weight, E.down_proj.weight; block FP8 with `_scale_inv`
    container    E.merged_weight and E.merged_weight.qs (coli/formats/container.py)
    sidecar      one by one, integer codes with `.qs` (coli/formats/sidecar.py)

A slot holds gate | up | down, then FP8's three scale matrices as float32, each part on a 64-byte boundary.
Invariant: a `Piece` never reaches outside its tensor; a checkpoint whose experts do not have the bytes of their format
is a ModelError here, at open. Guarded by tests/formats/test_experts.py, test_container.py and test_sidecar.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from coli.errors import ModelError
from coli.experts import forms
from coli.experts.forms import BYTES, INTEGERS, KINDS, PAIRS, PLANAR, Matrix, Raw
from coli.formats import container, ggml, sidecar
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import SCALE, block_size
from coli.formats.safetensors import Tensor
from coli.formats.sidecar import Sizes
from coli.formats.strict import AGAIN, show
from coli.kernels.blocked import BLOCKED

_ALIGN = 64


@dataclass(frozen=True)
class Part:
    """A matrix [n, k] in a slot: GEMV kind, byte offsets of the weight and of FP8's scales (0 without), FP8 block."""

    kind: str
    at: int
    scale_at: int
    block: tuple[int, int]
    n: int
    k: int
    nbytes: int  # of the weight

    @property
    def row_bytes(self) -> int:
        """Bytes from one weight row to the next; in N16 layouts a sixteenth of a block."""
        return self.nbytes // (self.n if self.kind in KINDS.values() else -(-self.n // 16) * 16)


@dataclass(frozen=True)
class ExpertRecord:
    """What a slot of one layer holds. `gate` and `up` multiply the same rows: of one kind, or both of block-quantised
    ones."""

    gate: Part
    up: Part
    down: Part
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """Bytes `start`..`start + nbytes` of a tensor."""

    tensor: Tensor
    start: int
    nbytes: int

    @property
    def place(self) -> tuple[str, int]:
        return str(self.tensor.path), self.tensor.offset + self.start


@dataclass(frozen=True)
class Fill:
    """Bytes `at`..`at + nbytes` of a slot and what `make` makes them of; `direct`: the one piece is read into place,
    and `make`, if any, looks at it there."""

    pieces: tuple[Piece, ...]
    at: int
    nbytes: int
    make: Callable[[Raw, np.ndarray], None] | None
    direct: bool = False


Where = Callable[[int], Piece]
"""The piece of an expert's number."""


@dataclass(frozen=True)
class Located:
    """A matrix of every expert of a layer: its format, its codes, and its scales where they are apart."""

    matrix: Matrix
    codes: Where
    scales: Where | None = None

    def pieces(self, expert: int) -> tuple[Piece, ...]:
        return (self.codes(expert),) if self.scales is None else (self.codes(expert), self.scales(expert))


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer. `source`: "" for the checkpoint's own tensors, else "container" or "sidecar"."""

    prefix: str
    located: tuple[Located, Located, Located]
    record: ExpertRecord
    kinds: tuple[str, str, str]  # without "f"
    source: str

    @property
    def stored(self) -> int:
        """Bytes of an expert in the file, without scales kept apart."""
        return sum(located.matrix.code_bytes for located in self.located)

    @property
    def words(self) -> tuple[str, ...]:
        """What gate, up and down are computed in, for the banner."""
        return tuple(_words(located.matrix, kind) for located, kind in zip(self.located, self.kinds, strict=True))

    def fills(self, expert: int) -> list[Fill]:
        found: list[Fill] = []
        parts = self.record.gate, self.record.up, self.record.down
        for located, part, kind in zip(self.located, parts, self.kinds, strict=True):
            pieces, m = located.pieces(expert), located.matrix
            if KINDS.get(m.dtype) != kind:
                found.append(Fill(pieces, part.at, part.nbytes, partial(forms.convert, m, kind)))
            elif kind != "fp8":
                found.append(Fill(pieces, part.at, part.nbytes, None, direct=True))
            else:
                scales = forms.weight_bytes(m, kind)[1]
                found.append(Fill(pieces[:1], part.at, part.nbytes, forms.check_codes, direct=True))
                found.append(Fill(pieces[1:], part.scale_at, scales, partial(forms.widen_scales, m)))
        return found


def _words(m: Matrix, kind: str) -> str:
    if m.dtype not in INTEGERS and kind in forms.REQUANTISED:
        return forms.REQUANTISED[kind]
    return f"{m.words} as f32" if kind == "f32" and m.dtype != "F32" else m.words


def trunk_layers(geometry: Sizes) -> tuple[str, ...]:
    """Name prefixes of the trunk's layers."""
    return tuple(f"layers.{layer}." for layer in range(geometry.layers))


def layer_name(prefix: str) -> str:
    """What a layer is called in messages."""
    return "the draft head" if prefix.startswith("mtp.") else prefix.rstrip(".").replace("layers.", "layer ")


def record_of(matrices: Sequence[Matrix], kinds: Sequence[str], suffix: str = "") -> ExpertRecord:
    """The slot for gate, up and down of these formats in these kinds."""
    sizes = [forms.weight_bytes(m, kind) for m, kind in zip(matrices, kinds, strict=True)]
    offsets, end = [], 0
    for nbytes in [weight for weight, _ in sizes] + [scales for _, scales in sizes]:
        offsets.append(end if nbytes else 0)
        end += -(-nbytes // _ALIGN) * _ALIGN
    gate, up, down = (
        Part(kind if kind in KINDS.values() else kind + suffix, offsets[i], offsets[i + 3],
             m.block if kind == "fp8" else (0, 0), m.n, m.k, sizes[i][0])
        for i, (m, kind) in enumerate(zip(matrices, kinds, strict=True))
    )  # fmt: skip
    return ExpertRecord(gate, up, down, end)


def layer_experts(checkpoint: Checkpoint, sizes: Sizes, prefix: str, mode: str = "stored",
                  beside: sidecar.Sidecar | None = None, suffix: str = "") -> LayerExperts:
    """The experts of the layer with this name prefix, from the sidecar `beside` where one is given. Raises
    ModelError."""
    source, located = find(checkpoint, sizes, prefix, beside)
    matrices = [entry.matrix for entry in located]
    gate, up, down = (forms.kind_of(m, mode) for m in matrices)
    same = gate == up and matrices[0].block == matrices[1].block
    if not same and not {gate, up} <= BLOCKED.keys():  # all of those take the same codes of x
        gate = up = "f32"
    kinds = gate, up, down
    return LayerExperts(prefix, located, record_of(matrices, kinds, suffix), kinds, source)


# ---- spellings ---------------------------------------------------------------------------------------------------

Found = tuple[Located, Located, Located]


def has_experts(checkpoint: Checkpoint, prefix: str) -> bool:
    """Whether the checkpoint's own files hold the routed experts of this layer."""
    p = f"{prefix}mlp.experts."
    names = ("gate_up_proj", "gate_proj", "0.merged_weight", "0.gate_proj.weight")
    return any(f"{p}{name}" in checkpoint for name in names)


def find(checkpoint: Checkpoint, sizes: Sizes, prefix: str, beside: sidecar.Sidecar | None) -> tuple[str, Found]:
    """(source, gate, up, down) of a layer."""
    p, tensors = f"{prefix}mlp.experts.", checkpoint.tensors
    if beside is not None:
        return "sidecar", _sidecar(beside, sizes, p)
    if f"{p}gate_up_proj" in tensors:
        return "", _fused(checkpoint, sizes, p)
    if f"{p}gate_proj" in tensors:
        return "", _stacked(checkpoint, sizes, p)
    if f"{p}0.merged_weight" in tensors:
        return "container", _container(checkpoint, sizes, p)
    return "", _one_by_one(checkpoint, sizes, p)


def _shapes(sizes: Sizes) -> tuple[tuple[str, int, int], ...]:
    inter, hidden = sizes.moe_inter, sizes.hidden
    return ("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)


def _matrix(checkpoint: Checkpoint, name: str, n: int, k: int) -> Matrix:
    """Format of a float, FP8 or ggml tensor (or of n rows of each of its experts)."""
    dtype = checkpoint[name].dtype
    if dtype == "F8_E4M3":
        block = block_size(checkpoint.quantization, checkpoint.folder)
        return Matrix(dtype, n, k, block=block, scale=checkpoint[name + SCALE].dtype)
    if dtype not in KINDS and dtype not in ggml.QUANTISED:
        raise ModelError(f"tensor {show(name)}: routed experts of dtype {dtype}", checkpoint.folder,
                         f"experts may be {', '.join(KINDS)}, or the block types of a GGUF")  # fmt: skip
    if k % ggml.SIZES[dtype][0]:
        raise ModelError(f"tensor {show(name)}: rows of {k} are no whole blocks of {dtype}", checkpoint.folder, AGAIN)
    return Matrix(dtype, n, k)


def _of_stack(tensor: Tensor, count: int, nbytes: int, first: int = 0) -> Where:
    """Expert e is e of `count` equal parts of the tensor; wanted are `nbytes` from byte `first` of it on."""
    size = tensor.nbytes // count
    if size * count != tensor.nbytes or first + nbytes > size:
        raise ModelError(f"tensor {show(tensor.name)}: {tensor.nbytes} bytes do not hold {count} experts of its format",
                         tensor.path, AGAIN)  # fmt: skip
    return lambda expert: Piece(tensor, expert * size + first, nbytes)


def _by_name(tensors: Mapping[str, Tensor], name: Callable[[int], str], total: int, nbytes: int, first: int = 0,
             dtypes: Sequence[str] = ()) -> Where:
    """Expert e has a tensor `name(e)` of `total` bytes; wanted are `nbytes` from byte `first` on."""

    def piece(expert: int) -> Piece:
        tensor = tensors.get(name(expert))
        if tensor is None:
            raise ModelError(f"tensor {show(name(expert))} is missing", next(iter(tensors.values())).path.parent, AGAIN)
        if tensor.nbytes != total or (dtypes and tensor.dtype not in dtypes):
            raise ModelError(f"tensor {show(tensor.name)}: {tensor.nbytes} bytes of {tensor.dtype}, the other experts "
                             f"have {total} of {' or '.join(dtypes) or 'theirs'}", tensor.path, AGAIN)  # fmt: skip
        return Piece(tensor, first, nbytes)

    return piece


def _scale_bytes(m: Matrix) -> int:
    return {"F32": 4}.get(m.scale or "F32", 2) * int(np.prod(m.scale_shape))


def _fused(checkpoint: Checkpoint, sizes: Sizes, p: str) -> Found:
    located = []
    for name, n, k in _shapes(sizes):
        tensor = f"{p}{'down' if name == 'down' else 'gate_up'}_proj"
        m, second = _matrix(checkpoint, tensor, n, k), name == "up"
        if m.block[0] and name != "down" and n % m.block[0]:
            raise ModelError(f"fused FP8 experts of {n} rows in blocks of {m.block[0]}: gate and up share a scale",
                             checkpoint.folder, "use a checkpoint that stores experts one by one")  # fmt: skip
        codes = _of_stack(checkpoint[tensor], sizes.experts, m.code_bytes, second * m.code_bytes)
        scales = None
        if m.block[0]:
            nbytes = _scale_bytes(m)
            scales = _of_stack(checkpoint[tensor + SCALE], sizes.experts, nbytes, second * nbytes)
        located.append(Located(m, codes, scales))
    return located[0], located[1], located[2]


def _stacked(checkpoint: Checkpoint, sizes: Sizes, p: str) -> Found:
    gate, up, down = (
        Located(m, _of_stack(checkpoint[f"{p}{name}_proj"], sizes.experts, m.code_bytes))
        for name, n, k in _shapes(sizes)
        for m in [_matrix(checkpoint, f"{p}{name}_proj", n, k)]
    )
    return gate, up, down


def _one_by_one(checkpoint: Checkpoint, sizes: Sizes, p: str) -> Found:
    located = []
    for name, n, k in _shapes(sizes):
        m = _matrix(checkpoint, f"{p}0.{name}_proj.weight", n, k)
        codes = _by_name(checkpoint.tensors, _named(p, f"{name}_proj.weight"), m.code_bytes, m.code_bytes)
        scales = None
        if m.block[0]:
            nbytes = _scale_bytes(m)
            scales = _by_name(checkpoint.tensors, _named(p, f"{name}_proj.weight{SCALE}"), nbytes, nbytes)
        located.append(Located(m, codes, scales))
    return located[0], located[1], located[2]


def _named(p: str, ending: str) -> Callable[[int], str]:
    return lambda expert: f"{p}{expert}.{ending}"


def _container(checkpoint: Checkpoint, sizes: Sizes, p: str) -> Found:
    codes, scales = checkpoint[f"{p}0.merged_weight"], checkpoint[f"{p}0.merged_weight.qs"]
    packings = container.packings(codes, scales, sizes.moe_inter, sizes.hidden, checkpoint.meta)
    matrices = [Matrix(PAIRS if packing.bits == 4 else BYTES, n, k, packing.group or k)
                for packing, (_, n, k) in zip(packings, _shapes(sizes), strict=True)]  # fmt: skip
    return _merged(checkpoint, p, sizes, matrices)


def _merged(checkpoint: Checkpoint, p: str, sizes: Sizes, matrices: Sequence[Matrix]) -> Found:
    total = sum(m.code_bytes for m in matrices), sum(_scale_bytes(m) for m in matrices)
    located, first, first_scale = [], 0, 0
    for m in matrices:
        located.append(Located(
            m,
            _by_name(checkpoint.tensors, _named(p, "merged_weight"), total[0], m.code_bytes, first, ("U8", "I8")),
            _by_name(checkpoint.tensors, _named(p, "merged_weight.qs"), total[1], _scale_bytes(m), first_scale,
                     ("F32",)),
        ))  # fmt: skip
        first, first_scale = first + m.code_bytes, first_scale + _scale_bytes(m)
    return _checked(located, sizes)


def _sidecar(beside: sidecar.Sidecar, sizes: Sizes, p: str) -> Found:
    located = []
    for name, n, k in _shapes(sizes):
        m = Matrix(PLANAR if beside.bits == 4 else BYTES, n, k, beside.group)
        codes = _named(p, f"{name}_proj.weight"), m.code_bytes, m.code_bytes
        scales = _named(p, f"{name}_proj.weight.qs"), _scale_bytes(m), _scale_bytes(m)
        located.append(Located(m, _by_name(beside.tensors, *codes, dtypes=("U8", "I8")),
                               _by_name(beside.tensors, *scales, dtypes=("F32",))))  # fmt: skip
    return _checked(located, sizes)


def _checked(located: list[Located], sizes: Sizes) -> Found:
    """Every expert of the layer has what its format needs: no table of the model's layout looks at these."""
    for expert in range(sizes.experts):
        for entry in located:
            entry.pieces(expert)
    return located[0], located[1], located[2]
