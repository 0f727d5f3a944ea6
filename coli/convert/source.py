"""What is converted: an open checkpoint that passed its engine's check, its experts as float32 whatever their spelling.

Where an expert lies and what its bytes mean the expert store's own modules say (coli/experts/records.py,
coli/experts/forms.py). An expert is read alone, so memory holds a few experts, never a layer.
Invariant: every expert yielded is finite; a NaN or an infinity in one ends the conversion by name. Dense tensors pass
as they are, whoever loads them looks.
Guarded by tests/convert/test_source.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.experts.forms import NotFinite, floats
from coli.experts.records import Located, find, has_experts, trunk_layers
from coli.formats import ggml, sidecar
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import SCALE, block_size, dequantise, widen
from coli.formats.safetensors import Tensor
from coli.formats.strict import show
from coli.models import qwen36_geometry, qwen36_layout, qwen38_layout
from coli.models.layout import HEAD

CHUNK = 8 << 20
_DENSE = ("qwen3_5", "qwen3_5_text")
_LAYER = re.compile(r"layers\.\d+\.")
_DAMAGED = "the file is damaged: download it again"


def known(checkpoint: Checkpoint, family: str, g: Any) -> None:
    """Raise ModelError unless the checkpoint has exactly the tensors its engine knows."""
    layout: Any = qwen38_layout if family == "qwen38" else qwen36_layout
    layout.check(checkpoint, g)
    if any(name.startswith("mtp.") for name in checkpoint):
        layout.check_head(checkpoint, g)


class Source:
    """`family` is "qwen36" or "qwen38", `g` the engine's geometry; `prefixes` are those of the layers with experts,
    the draft head's last where there is one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        _refuse_converted(checkpoint)
        self.checkpoint = checkpoint
        config, where = checkpoint.config, checkpoint.folder
        kind = config.get("model_type")
        if kind in _DENSE:
            raise ModelError(f"{kind} is a dense model: it has no experts to convert", where,
                             "run it as it is; --trunk int8 halves its weights in memory")  # fmt: skip
        self.family = "qwen38" if kind in qwen38_layout.MODEL_TYPES else "qwen36"
        if self.family == "qwen36" and kind not in qwen36_geometry.MODEL_TYPES:
            types = (*qwen36_geometry.MODEL_TYPES, *qwen38_layout.MODEL_TYPES)
            raise ModelError(f"model_type {show(kind)} cannot be converted", where,
                             f"these can: {', '.join(t for t in types if t not in _DENSE)}")  # fmt: skip
        self.g: Any = (qwen38_layout if self.family == "qwen38" else qwen36_geometry).geometry(config, where)
        known(checkpoint, self.family, self.g)
        self.has_head = any(name.startswith("mtp.") for name in checkpoint)
        layers = (*trunk_layers(self.g), HEAD)
        self.prefixes = tuple(prefix for prefix in layers if has_experts(checkpoint, prefix))
        self._located = {prefix: find(checkpoint, self.g, prefix, None)[1] for prefix in self.prefixes}
        coded = any(t.dtype == "F8_E4M3" and name + SCALE in checkpoint for name, t in checkpoint.tensors.items())
        self._block = block_size(checkpoint.quantization, where) if coded else (0, 0)

    @classmethod
    def open(cls, path: Path) -> Source:
        """Raises ModelError."""
        checkpoint = Checkpoint.open(path)
        try:
            return cls(checkpoint)
        except BaseException:
            checkpoint.close()
            raise

    def close(self) -> None:
        self.checkpoint.close()

    @property
    def is_gguf(self) -> bool:
        return self.checkpoint.traits.gguf

    def files(self) -> set[Path]:
        """Every file that weights or sizes come from."""
        files = {tensor.path for tensor in self.checkpoint.tensors.values()}
        return files if self.is_gguf else files | {self.checkpoint.folder / "config.json"}

    # ---- experts -----------------------------------------------------------------------------------------------------

    def expert_bytes(self, prefix: str) -> int:
        """Bytes of a layer's routed experts in the source."""
        return sum(self.checkpoint[name].nbytes for name in self._groups[prefix, True])

    def expert(self, prefix: str, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float32 gate [I, H], up [I, H] and down [H, I]. Raises ReadError, or ModelError for NaN and infinity."""
        gate, up, down = (self._matrix(located, expert) for located in self._located[prefix])
        return gate, up, down

    def _matrix(self, located: Located, expert: int) -> np.ndarray:
        pieces = located.pieces(expert)
        raw = [np.empty(piece.nbytes, np.uint8) for piece in pieces]
        for piece, data in zip(pieces, raw, strict=True):
            self.checkpoint.read_into(piece.tensor, data.data, piece.start, piece.nbytes)
        try:
            return floats(located.matrix, raw)
        except NotFinite as error:
            tensor = pieces[error.piece].tensor
            raise ModelError(f"tensor {show(tensor.name)}, expert {expert} has NaN or infinity", tensor.path,
                             _DAMAGED) from None  # fmt: skip

    # ---- the other tensors -------------------------------------------------------------------------------------------

    def dense(self, group: str) -> list[str]:
        """Names of the tensors that are no routed experts, block scales left out, sorted. `group`: the prefix of a
        layer, HEAD for all of the draft head, "" for what belongs to no layer."""
        return sorted(name for name in self._groups[group, False] if not self._is_scale(name))

    @cached_property
    def _groups(self) -> defaultdict[tuple[str, bool], list[str]]:
        """Tensor names by (group, whether a routed expert's)."""
        groups: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
        for name in self.checkpoint:
            match = _LAYER.match(name)
            group = HEAD if name.startswith("mtp.") else match[0] if match else ""
            groups[group, ".mlp.experts." in name].append(name)
        return groups

    def _is_scale(self, name: str) -> bool:
        return name.endswith(SCALE) and name.removesuffix(SCALE) in self.checkpoint

    def scale(self, name: str) -> Tensor | None:
        """The block scale of an FP8 tensor."""
        return self.checkpoint.tensors.get(name + SCALE)

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """The stored rows of a tensor, [rows, k] in its storage type, a few megabytes at a time."""
        tensor = self.checkpoint[name]
        storage = tensor.stored()[0]
        rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        if not tensor.nbytes:
            return
        width = tensor.nbytes // rows
        step = max(1, CHUNK // width)
        if self.scale(name) is not None:
            step = max(1, step // self._block[0]) * self._block[0]
        for row in range(0, rows, step):
            raw = np.empty((min(step, rows - row), width), np.uint8)
            self.checkpoint.read_into(tensor, raw.reshape(-1).data, row * width, raw.nbytes)
            yield raw.view(storage)

    def values(self, name: str) -> Iterator[np.ndarray]:
        """The same as float32: decoded, scaled."""
        tensor, scale, row = self.checkpoint[name], self.scale(name), 0
        factors = None if scale is None else widen(self.checkpoint.load(scale), scale.dtype)
        for chunk in self.chunks(name):
            if tensor.dtype in ggml.QUANTISED:
                yield ggml.dequantize(tensor.dtype, chunk)
            elif factors is not None:
                yield dequantise(chunk, factors[row // self._block[0] :], self._block)
                row += len(chunk)
            else:
                yield widen(chunk, tensor.dtype)

    def whole(self, name: str) -> np.ndarray:
        """A small tensor as float32, in its shape."""
        return np.concatenate(list(self.values(name))).reshape(self.checkpoint[name].shape)


def _refuse_converted(checkpoint: Checkpoint) -> None:
    if checkpoint.meta or any(name.endswith(".merged_weight") for name in checkpoint):
        raise ModelError("is a converted container already: its experts are integers", checkpoint.folder,
                         "convert the checkpoint it was made from")  # fmt: skip
    if not any(".mlp.experts." in name for name in checkpoint) and sidecar.folders(checkpoint.folder):
        raise ModelError("has its experts as integers only, in a sidecar", checkpoint.folder,
                         "convert the checkpoint it was made from")  # fmt: skip
