"""What the routed experts of a checkpoint will be in memory, settled before anything is allocated.

Idea: `plan_experts` asks every layer for its record (coli/experts/records.py), from the checkpoint's own tensors or
from a sidecar that has the bits asked for, and says in words what that is and what it costs. The plan's `nbytes` is
what the budget divides by; the store (coli/experts/store.py) is built from the same plan. Reads headers only. Guarded
by tests/formats/test_expert_forms.py, test_sidecar.py and tests/models/test_gguf_models.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coli.errors import ModelError
from coli.experts.forms import INTEGERS, REQUANTISED
from coli.experts.records import LayerExperts, Sizes, has_experts, layer_experts, layer_name, trunk_layers
from coli.formats import sidecar
from coli.formats.checkpoint import Checkpoint
from coli.report import size

MODES = ("stored", *REQUANTISED)


@dataclass(frozen=True)
class ExpertPlan:
    """Where the experts of some layers lie and what they will be, known before anything is allocated.

    `format`: words for the banner; `notes`: what a user must know about it."""

    layers: tuple[LayerExperts, ...]
    format: str
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one slot in every layer."""
        return sum(layer.record.nbytes for layer in self.layers)

    def files(self, experts: int) -> set[Path]:
        """Those that the experts of every layer lie in, `experts` of them."""
        return {piece.tensor.path for layer in self.layers for expert in range(experts)
                for located in layer.located for piece in located.pieces(expert)}  # fmt: skip


def plan_experts(
    checkpoint: Checkpoint, geometry: Sizes, layers: Sequence[str] | None = None, mode: str = "stored",
    activations: str = "int8",
) -> ExpertPlan:  # fmt: skip
    """Plan for the layers with these name prefixes, the trunk's by default. Raises ModelError."""
    if mode not in MODES:
        raise ValueError(f"experts may be {', '.join(MODES)}, not {mode}")
    prefixes = trunk_layers(geometry) if layers is None else tuple(layers)
    beside, notes = _beside(checkpoint, geometry, prefixes, mode)
    suffix = "f" if activations == "f32" else ""
    found = tuple(layer_experts(checkpoint, geometry, prefix, mode, beside, suffix) for prefix in prefixes)
    return ExpertPlan(found, _format(found), (*notes, *_notes(found, mode)))


def _beside(
    checkpoint: Checkpoint, geometry: Sizes, prefixes: Sequence[str], mode: str
) -> tuple[sidecar.Sidecar | None, list[str]]:
    """(the sidecar to take the experts from, notes): where one has the bits that are asked for, or where the
    checkpoint has no experts of its own."""
    own = all(has_experts(checkpoint, prefix) for prefix in prefixes)
    if own and (mode == "stored" or any(f"{p}mlp.experts.0.merged_weight" in checkpoint for p in prefixes)):
        return None, []
    wanted = {"int4": (4,), "int8": (8,)}[mode] if own else (4, 8) if mode == "int4" else (8, 4)
    folders = [folder for bits in wanted for folder in sidecar.folders(checkpoint.folder, bits)]
    notes: list[str] = []
    lacking: tuple[Path, str] | None = None  # the first sidecar that has not all of them, and what it has not
    for folder in sorted(folders, key=lambda folder: not sidecar.is_complete(folder)):
        if own and not sidecar.is_complete(folder):
            notes.append(f"{folder.name} is left alone: it is not complete, `coli convert` goes on where it stopped")
            continue
        beside = sidecar.open_sidecar(checkpoint, folder, geometry)
        missing = next((prefix for prefix in prefixes if not beside.holds(prefix)), None)
        if missing is None:
            return beside, notes
        lacking = lacking or (folder, layer_name(missing))
    if lacking is not None:
        folder, layer = lacking
        if not own:
            raise ModelError(f"the sidecar has no experts of {layer}, and the checkpoint has none at all", folder,
                             "download its missing files, or convert again")  # fmt: skip
        notes.append(f"{folder.name} has no experts of {layer}: the checkpoint's own are rounded")
    return None, notes


def _format(layers: Sequence[LayerExperts]) -> str:
    """"Q4_K, down Q6_K in 4 of 8 layers": the most common format, then who differs where."""
    if not layers:
        return "none"
    main = Counter(words for layer in layers for words in layer.words).most_common(1)[0][0]
    others = Counter(part for layer in layers for part in _parts(layer.words) if part[1] != main)
    text = main
    for (part, words), count in sorted(others.items()):
        text += f", {part} {words}" + (f" in {count} of {len(layers)} layers" if count < len(layers) else "")
    stored = {located.matrix.words for layer in layers for located in layer.located
              if main in REQUANTISED.values() and located.matrix.dtype not in INTEGERS}  # fmt: skip
    if stored:
        text += f" (from {', '.join(sorted(stored))})"
    source = next((layer.source for layer in layers if layer.source), "")
    return f"{text} ({source})" if source else text


def _parts(words: Sequence[str]) -> list[tuple[str, str]]:
    """(name, words) of the parts of a layer's experts; gate and up are one where they are alike."""
    gate, up, down = words
    inner = [("gate and up", gate)] if gate == up else [("gate", gate), ("up", up)]
    return [*inner, ("down", down)]


def _notes(layers: Sequence[LayerExperts], mode: str) -> list[str]:
    """What decoding and rounding cost; what a wish does not change."""
    notes = []
    matrices = [(located.matrix, kind) for layer in layers
                for located, kind in zip(layer.located, layer.kinds, strict=True)]  # fmt: skip
    decoded = sorted({m.words for m, kind in matrices if kind == "f32" and m.dtype != "F32"})
    if decoded:
        unlike = any(layer.kinds[0] == "f32" and layer.located[0].matrix.dtype != layer.located[1].matrix.dtype
                     for layer in layers)  # fmt: skip
        why = " (gate and up differ in type)" * unlike
        notes.append(f"experts of {', '.join(decoded)} are decoded to float32 as they are read, exactly{why}: "
                     f"{_growth(layers, 'f32')}")  # fmt: skip
    rounded = sorted({m.words for m, kind in matrices if kind in REQUANTISED and m.dtype not in INTEGERS})
    if rounded:
        notes.append(f"experts of {', '.join(rounded)} are rounded to {REQUANTISED[mode]} as they are read: "
                     f"{_growth(layers, mode)}")  # fmt: skip
    kept = sorted({m.words for m, _ in matrices if m.dtype in INTEGERS and not m.words.startswith(mode)})
    if mode != "stored" and kept:
        notes.append(f"experts are stored as {', '.join(kept)}, and stay so: --experts {mode} changes nothing")
    return notes


def _growth(layers: Sequence[LayerExperts], kind: str) -> str:
    """Bytes of the largest expert that has a part of this kind, in memory and in the file."""
    layer = max((layer for layer in layers if kind in layer.kinds), key=lambda layer: layer.record.nbytes)
    return f"{size(layer.record.nbytes)} of memory for an expert, {size(layer.stored)} in the file"
