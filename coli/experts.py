"""Routed experts: read from the checkpoint when a layer asks for them, kept in `cap` slots a layer.

Idea: a layer has one arena of `cap` equal slots in anonymous memory that is touched only as slots fill. What a slot
holds is the layer's `ExpertRecord` (coli/expert_records.py): gate, up and down in the kinds the kernels multiply, each
part on a 64-byte boundary. Kernels see two int64 arrays [layers, experts]: `table`, the address of an expert's slot or
0, and `stamp`, where they write the step an expert was last used in. `ensure` makes experts resident and evicts the
ones used longest ago; all its misses are read together on a few threads, pieces that lie side by side in the file as
one `preadv`, and a format that kernels do not read as it is stored is converted by the thread that read it.
Invariants: a slot's address enters `table` only after every byte of it was read, converted and checked; an evicted
address leaves `table` before its slot is overwritten; the experts of one call never evict each other; a resident
expert has the file's codes and scales. Guarded by tests/formats/test_experts.py (LRU against a model, bytes, faults).
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from coli.errors import ColiError, DoesNotFit, ModelError, UsageError
from coli.expert_forms import INTEGERS, REQUANTISED, NotFinite
from coli.expert_records import (
    ExpertRecord,
    Fill,
    LayerExperts,
    Part,
    Piece,
    Sizes,
    has_experts,
    layer_experts,
    trunk_layers,
)
from coli.formats import sidecar
from coli.formats.checkpoint import Checkpoint, read_error
from coli.formats.readers import ReadPool
from coli.report import size

__all__ = [
    "MODES", "ExpertPlan", "ExpertRecord", "ExpertStore", "NoExperts", "Part", "plan_experts", "trunk_layers",
]  # fmt: skip

MODES = ("stored", *REQUANTISED)
_T = TypeVar("_T")
_HUGE = 32 << 20  # arenas from this size ask for huge pages, which at most round their RSS up by 2 MiB


# ---- the plan --------------------------------------------------------------------------------------------------------


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
        lacking = lacking or (folder, _layer_name(missing))
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


# ---- the cache -------------------------------------------------------------------------------------------------------


@dataclass
class _Miss:
    """An expert on its way into `slot`."""

    expert: int
    slot: int
    error: ColiError | None = None
    nbytes: int = 0


class ExpertStore:
    """The expert cache of one open checkpoint, which must have passed its engine's check. For one caller at a time.

    `layers`: name prefixes of the layers it serves, the trunk's by default; `mode`, one of MODES: requantise; for
    `activations` "f32" quantised kinds end in f; `plan` says all three where it was made before. `records`: what a slot
    of each layer holds. `table`, `stamp`: int64 [layers, experts], see the module. `hits`, `misses`: experts;
    `bytes_read`: file bytes. `format`, `notes`: words.
    """

    def __init__(
        self, checkpoint: Checkpoint, geometry: Sizes, cap: int, threads: int, layers: Sequence[str] | None = None, *,
        mode: str = "stored", activations: str = "int8", plan: ExpertPlan | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= cap <= geometry.experts:
            raise UsageError(f"{cap} expert slots a layer, the model has {geometry.experts} experts", "--cap",
                             f"give 1 to {geometry.experts}")  # fmt: skip
        self.geometry, self.cap = geometry, cap
        plan = plan or plan_experts(checkpoint, geometry, layers, mode, activations)
        self._places = plan.layers
        self.layers = tuple(layer.prefix for layer in plan.layers)
        self.records: list[ExpertRecord] = [layer.record for layer in plan.layers]
        self.format = plan.format
        self.notes = list(plan.notes)
        self.table = np.zeros((len(self.layers), geometry.experts), np.int64)
        self.stamp = np.zeros((len(self.layers), geometry.experts), np.int64)
        self.hits = self.misses = self.bytes_read = 0
        self._checkpoint = checkpoint
        self._pool = ReadPool(threads, "experts")
        self._slots: list[dict[int, int]] = [{} for _ in self.layers]
        self._free = [list(range(cap))[::-1] for _ in self.layers]
        self._arenas = [_arena(cap * record.nbytes) for record in self.records]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, filled or not."""
        return self.cap * self.record_bytes()

    def record_bytes(self) -> int:
        """Bytes of one slot in every layer."""
        return sum(record.nbytes for record in self.records)

    def resident(self, layer: int) -> set[int]:
        return set(self._slots[layer])

    def slot(self, layer: int, expert: int) -> np.ndarray:
        """uint8 [nbytes of the layer's record], a resident expert's slot. Raises KeyError when it is not resident."""
        return self._memory(layer, self._slots[layer][expert])

    def _memory(self, layer: int, slot: int) -> np.ndarray:
        nbytes = self.records[layer].nbytes
        return self._arenas[layer][slot * nbytes : (slot + 1) * nbytes]

    def count_hits(self, count: int) -> None:
        self.hits += count

    def ensure(self, layer: int, ids: Sequence[int]) -> None:
        """Make the distinct experts `ids` (at most `cap`) of `layer` resident.

        Arriving experts get the layer's newest stamp, so that a call before their first use does not evict them.
        Raises ReadError or ModelError (NaN or infinity in an expert); the experts that could be read are resident then.
        """
        slots = self._slots[layer]
        wanted = [int(expert) for expert in ids]
        absent = [expert for expert in wanted if expert not in slots]
        if not absent:
            return
        if len(set(wanted)) != len(wanted) or len(wanted) > self.cap:
            raise ValueError(f"{len(wanted)} experts, {len(set(wanted))} distinct, for {self.cap} slots")
        self._evict(layer, len(absent) - len(self._free[layer]), set(wanted))
        misses = [_Miss(expert, self._free[layer].pop()) for expert in absent]
        self._read_all(layer, misses)
        newest = self.stamp[layer].max()
        base = self._arenas[layer].ctypes.data
        for miss in misses:
            if miss.error is None:
                slots[miss.expert] = miss.slot
                self.stamp[layer, miss.expert] = newest
                self.table[layer, miss.expert] = base + miss.slot * self.records[layer].nbytes
            else:
                self._free[layer].append(miss.slot)
            self.bytes_read += miss.nbytes
        self.misses += len(misses)
        for miss in misses:
            if miss.error is not None:
                raise miss.error

    def _evict(self, layer: int, count: int, keep: set[int]) -> None:
        """Free the slots of the `count` experts used longest ago (ties: lower number first), never one of `keep`."""
        if count <= 0:
            return
        slots, stamp = self._slots[layer], self.stamp[layer]
        order = sorted((int(stamp[expert]), expert) for expert in slots if expert not in keep)
        for _, expert in order[:count]:
            self.table[layer, expert] = 0
            self._free[layer].append(slots.pop(expert))

    def _read_all(self, layer: int, misses: list[_Miss]) -> None:
        """Read every miss into its slot, together; each miss carries its first error and the bytes it took."""
        done: SimpleQueue[tuple[_Miss, ColiError | None, int]] = SimpleQueue()
        jobs = 0
        for miss in misses:
            for fills in _jobs(self._places[layer].fills(miss.expert)):
                jobs += 1
                self._pool.submit(self._read, layer, miss, fills, done)
        for _ in range(jobs):
            miss, error, nbytes = done.get()
            miss.error = miss.error or error
            miss.nbytes += nbytes

    def _read(self, layer: int, miss: _Miss, fills: list[Fill], done: SimpleQueue) -> None:
        """Job: some parts of an expert from the file into its slot; what fails is tried twice."""
        error: ColiError | None = None
        nbytes = 0
        path = fills[0].pieces[0].tensor.path
        try:
            nbytes = self._fill(layer, miss, fills)
        except OSError as failed:
            error = read_error(failed, self._name(layer, miss), path)
        except ColiError as failed:
            error = failed
        except Exception as failed:
            error = ColiError(f"reading {self._name(layer, miss)} failed: {failed!r}", path)
        finally:
            done.put((miss, error, nbytes))

    def _fill(self, layer: int, miss: _Miss, fills: list[Fill]) -> int:
        slot = self._memory(layer, miss.slot)
        targets = [slot[fill.at : fill.at + fill.nbytes] for fill in fills]
        raws = [[target] if fill.direct else [np.empty(piece.nbytes, np.uint8) for piece in fill.pieces]
                for fill, target in zip(fills, targets, strict=True)]  # fmt: skip
        reads = [(piece, buffer) for fill, raw in zip(fills, raws, strict=True)
                 for piece, buffer in zip(fill.pieces, raw, strict=True)]  # fmt: skip
        nbytes = sum(self._read_run(run) for run in _runs(reads))
        for fill, raw, target in zip(fills, raws, targets, strict=True):
            try:
                if fill.make is not None:
                    fill.make(raw, target)
            except NotFinite as bad:
                tensor = fill.pieces[bad.piece].tensor
                raise ModelError(f"{self._name(layer, miss)} has NaN or infinity in {tensor.name}", tensor.path,
                                 "the file is damaged: download it again") from None  # fmt: skip
        return nbytes

    def _read_run(self, run: list[tuple[Piece, np.ndarray]]) -> int:
        tensor, offset = run[0][0].tensor, run[0][0].tensor.offset + run[0][0].start
        buffers = [buffer.data for _, buffer in run]
        try:
            return self._checkpoint.preadv(tensor.path, buffers, offset)
        except OSError:
            return self._checkpoint.preadv(tensor.path, buffers, offset)

    def _name(self, layer: int, miss: _Miss) -> str:
        return f"expert {miss.expert} of {_layer_name(self.layers[layer])}"

    def close(self) -> None:
        """End the reading threads and empty the cache; the arenas go once no view of them is left."""
        self._pool.close()
        self.table[:] = 0
        self._slots = [{} for _ in self._slots]
        self._arenas = []


class NoExperts(ExpertStore):
    """The store of a model without experts: nothing in it, nothing to read."""

    def __init__(self) -> None:
        self.cap = self.hits = self.misses = self.bytes_read = 0
        self.layers, self.records, self.format, self.notes = (), [], "none", []
        self.table = self.stamp = np.zeros((0, 0), np.int64)
        self._slots, self._arenas = [], []

    def close(self) -> None:
        """Nothing is open."""


def _layer_name(prefix: str) -> str:
    return "the draft head" if prefix.startswith("mtp.") else prefix.rstrip(".").replace("layers.", "layer ")


def _arena(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] of page-aligned, private, zero memory that costs nothing until it is written."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise DoesNotFit(f"no address space for {nbytes} bytes of expert slots: {error}", "--cap",
                         "give fewer slots") from None  # fmt: skip
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: only speed differs
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _jobs(fills: list[Fill]) -> list[list[Fill]]:
    """Fills by job: what lies side by side is read at once. Where a fill needs pieces from several places, an expert is
    one job."""
    if any(len(fill.pieces) > 1 for fill in fills):
        return [fills]
    return [[fill for _, fill in run] for run in _runs([(fill.pieces[0], fill) for fill in fills])]


def _runs(items: list[tuple[Piece, _T]]) -> list[list[tuple[Piece, _T]]]:
    """Pieces grouped into contiguous ranges of one file, in file order."""
    runs: list[list[tuple[Piece, _T]]] = []
    end: tuple[str, int] | None = None
    for item in sorted(items, key=lambda item: item[0].place):
        piece, (path, offset) = item[0], item[0].place
        if (path, offset) == end:
            runs[-1].append(item)
        else:
            runs.append([item])
        end = path, offset + piece.nbytes
    return runs
