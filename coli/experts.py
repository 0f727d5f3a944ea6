"""Routed experts: read from the checkpoint when a layer asks for them, kept in `cap` slots a layer.

Idea: a layer has one arena of `cap` equal slots in anonymous memory that is touched only as slots fill. An expert in a
slot is one `ExpertRecord`: gate [I, H] | up [I, H] | down [H, I] as the checkpoint stores them, then for FP8 the three
scale matrices as float32, each part on a 64-byte boundary. Kernels see two int64 arrays [layers, experts]: `table`, the
address of an expert's slot or 0, and `stamp`, where they write the step an expert was last used in. `ensure` makes
experts resident and evicts the ones used longest ago; all its misses are read together on a few threads, parts that
lie side by side in the file as one `preadv`.
Invariants: a slot's address enters `table` only after every byte of it was read and checked; an evicted address leaves
`table` before its slot is overwritten; the experts of one call never evict each other; a resident expert's bytes equal
those of the file. Guarded by tests/formats/test_experts.py (LRU against a model, bytes, faults).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from coli.errors import ColiError, DoesNotFit, ModelError, UsageError
from coli.formats.checkpoint import Checkpoint, read_error
from coli.formats.fp8 import SCALE, block_size, blocks, has_nan_code, widen
from coli.formats.readers import ReadPool
from coli.formats.safetensors import STORAGE, Tensor

if TYPE_CHECKING:
    from coli.models.qwen38_geometry import Geometry

KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E4M3": "fp8"}
_ITEM = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1}
_ALIGN = 64
_HUGE = 32 << 20  # arenas from this size ask for huge pages, which at most round their RSS up by 2 MiB


@dataclass(frozen=True)
class ExpertRecord:
    """Byte offsets of the parts inside a slot of `nbytes`; scale offsets and `block` (br, bc) are 0 unless "fp8"."""

    kind: str  # "f32", "f16", "bf16" or "fp8"
    gate: int
    up: int
    down: int
    gate_scale: int
    up_scale: int
    down_scale: int
    nbytes: int
    block: tuple[int, int]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a weight row."""
        return columns * _ITEM[self.kind]


@dataclass(frozen=True)
class _Part:
    """A piece of an expert: bytes `start`..`start + nbytes` of `tensor` go to byte `at` of the slot."""

    tensor: Tensor
    start: int
    nbytes: int
    at: int
    scale: bool = False


@dataclass
class _Miss:
    """An expert on its way into `slot`."""

    expert: int
    slot: int
    error: ColiError | None = None
    nbytes: int = 0


def expert_record(kind: str, geometry: Geometry, block: tuple[int, int] = (0, 0)) -> ExpertRecord:
    """The slot layout for experts of one kind; the memory plan asks this too."""
    item = _ITEM[kind]
    inter, hidden = geometry.moe_inter, geometry.hidden
    parts = [inter * hidden * item] * 3
    if kind == "fp8":
        shapes = blocks((inter, hidden), block), blocks((hidden, inter), block)
        parts += [4 * rows * columns for rows, columns in (shapes[0], shapes[0], shapes[1])]
    offsets, end = [], 0
    for nbytes in parts:
        offsets.append(end)
        end += -(-nbytes // _ALIGN) * _ALIGN
    gate, up, down, gate_scale, up_scale, down_scale = offsets if kind == "fp8" else [*offsets, 0, 0, 0]
    return ExpertRecord(kind, gate, up, down, gate_scale, up_scale, down_scale, end, block)


def trunk_layers(geometry: Geometry) -> tuple[str, ...]:
    """Name prefixes of the trunk's layers."""
    return tuple(f"layers.{layer}." for layer in range(geometry.layers))


def stored_kind(checkpoint: Checkpoint, geometry: Geometry, layer: str = "layers.0.") -> tuple[str, tuple[int, int]]:
    """(kind, FP8 block or (0, 0)) of the routed experts of the layer with this name prefix."""
    prefix = f"{layer}mlp.experts."
    fused = f"{prefix}gate_up_proj" in checkpoint
    dtype = checkpoint[f"{prefix}gate_up_proj" if fused else f"{prefix}0.gate_proj.weight"].dtype
    if dtype not in KINDS:
        raise ModelError(f"routed experts of dtype {dtype}", checkpoint.folder, f"experts may be {', '.join(KINDS)}")
    block = block_size(checkpoint.quantization, checkpoint.folder) if dtype == "F8_E4M3" else (0, 0)
    if fused and block[0] and geometry.moe_inter % block[0]:
        raise ModelError(f"fused FP8 experts of {geometry.moe_inter} rows in blocks of {block[0]}: gate and up share a "
                         "scale", checkpoint.folder, "use a checkpoint that stores experts one by one")  # fmt: skip
    return KINDS[dtype], block


class ExpertStore:
    """The expert cache of one open checkpoint, which must have passed `check`. For one caller at a time.

    `layers`: name prefixes of the layers it serves, the trunk's by default. `table`, `stamp`: int64 [layers, experts],
    see the module. `hits`, `misses`: experts; `bytes_read`: file bytes.
    """

    def __init__(
        self, checkpoint: Checkpoint, geometry: Geometry, cap: int, threads: int, layers: Sequence[str] | None = None
    ) -> None:
        if not 1 <= cap <= geometry.experts:
            raise UsageError(f"{cap} expert slots a layer, the model has {geometry.experts} experts", "--cap",
                             f"give 1 to {geometry.experts}")  # fmt: skip
        self.geometry, self.cap = geometry, cap
        self.layers = trunk_layers(geometry) if layers is None else tuple(layers)
        kind, block = stored_kind(checkpoint, geometry, self.layers[0])
        self.record = expert_record(kind, geometry, block)
        self.table = np.zeros((len(self.layers), geometry.experts), np.int64)
        self.stamp = np.zeros((len(self.layers), geometry.experts), np.int64)
        self.hits = self.misses = self.bytes_read = 0
        self._checkpoint = checkpoint
        self._pool = ReadPool(threads, "experts")
        self._slots: list[dict[int, int]] = [{} for _ in self.layers]
        self._free = [list(range(cap))[::-1] for _ in self.layers]
        self._arenas = [_arena(cap * self.record.nbytes) for _ in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, filled or not."""
        return len(self.layers) * self.cap * self.record.nbytes

    def resident(self, layer: int) -> set[int]:
        return set(self._slots[layer])

    def slot(self, layer: int, expert: int) -> np.ndarray:
        """uint8 [record.nbytes] view of a resident expert's slot. Raises KeyError when it is not resident."""
        first = self._slots[layer][expert] * self.record.nbytes
        return self._arenas[layer][first : first + self.record.nbytes]

    def count_hits(self, count: int) -> None:
        self.hits += count

    def ensure(self, layer: int, ids: Sequence[int]) -> None:
        """Make the distinct experts `ids` (at most `cap`) of `layer` resident.

        Arriving experts get the layer's newest stamp, so that a call before their first use does not evict them.
        Raises ReadError or ModelError (NaN in an expert); the experts that could be read are resident then.
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
                self.table[layer, miss.expert] = base + miss.slot * self.record.nbytes
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
            for run in _runs(self._parts(layer, miss.expert)):
                jobs += 1
                self._pool.submit(self._read, layer, miss, run, done)
        for _ in range(jobs):
            miss, error, nbytes = done.get()
            miss.error = miss.error or error
            miss.nbytes += nbytes

    def _read(self, layer: int, miss: _Miss, run: list[_Part], done: SimpleQueue) -> None:
        """Job: one contiguous range of the file into the slot; tried twice."""
        error: ColiError | None = None
        nbytes = 0
        try:
            nbytes = self._fill(layer, miss, run)
        except OSError as failed:
            error = read_error(failed, self._name(layer, miss), run[0].tensor.path)
        except ColiError as failed:
            error = failed
        except Exception as failed:
            error = ColiError(f"reading {self._name(layer, miss)} failed: {failed!r}", run[0].tensor.path)
        finally:
            done.put((miss, error, nbytes))

    def _fill(self, layer: int, miss: _Miss, run: list[_Part]) -> int:
        base = miss.slot * self.record.nbytes
        slot = self._arenas[layer][base : base + self.record.nbytes]
        targets = [np.empty(part.nbytes, np.uint8) if part.scale else slot[part.at : part.at + part.nbytes]
                   for part in run]  # fmt: skip
        offset = run[0].tensor.offset + run[0].start
        buffers = [target.data for target in targets]
        try:
            nbytes = self._checkpoint.preadv(run[0].tensor.path, buffers, offset)
        except OSError:
            nbytes = self._checkpoint.preadv(run[0].tensor.path, buffers, offset)
        for part, target in zip(run, targets, strict=True):
            bad = has_nan_code(target) if self.record.kind == "fp8" and not part.scale else False
            if part.scale:
                scale = widen(target.view(STORAGE[part.tensor.dtype]), part.tensor.dtype)
                bad = not np.isfinite(scale).all()
                slot[part.at : part.at + 4 * scale.size].view(np.float32)[:] = scale
            if bad:
                raise ModelError(f"{self._name(layer, miss)} has NaN or infinity in {part.tensor.name}",
                                 part.tensor.path, "the file is damaged: download it again")  # fmt: skip
        return nbytes

    def _name(self, layer: int, miss: _Miss) -> str:
        name = self.layers[layer]
        where = "the draft head" if name.startswith("mtp.") else name.rstrip(".").replace("layers.", "layer ")
        return f"expert {miss.expert} of {where}"

    def _parts(self, layer: int, expert: int) -> list[_Part]:
        """Where the parts of an expert lie and where they go."""
        prefix, record, tensors = f"{self.layers[layer]}mlp.experts.", self.record, self._checkpoint.tensors
        fused = tensors.get(f"{prefix}gate_up_proj")
        parts = []
        for suffix, scale in (("", False), (SCALE, True)) if record.kind == "fp8" else (("", False),):
            at = (record.gate_scale, record.up_scale, record.down_scale) if scale else (
                record.gate, record.up, record.down)  # fmt: skip
            if fused is not None:
                both, down = tensors[f"{prefix}gate_up_proj{suffix}"], tensors[f"{prefix}down_proj{suffix}"]
                size = both.nbytes // self.geometry.experts
                parts.append(_Part(both, expert * size, size // 2, at[0], scale))
                parts.append(_Part(both, expert * size + size // 2, size // 2, at[1], scale))
                size = down.nbytes // self.geometry.experts
                parts.append(_Part(down, expert * size, size, at[2], scale))
            else:
                for name, to in zip(("gate", "up", "down"), at, strict=True):
                    tensor = tensors[f"{prefix}{expert}.{name}_proj.weight{suffix}"]
                    parts.append(_Part(tensor, 0, tensor.nbytes, to, scale))
        return parts

    def close(self) -> None:
        """End the reading threads and empty the cache; the arenas go once no view of them is left."""
        self._pool.close()
        self.table[:] = 0
        self._slots = [{} for _ in self._slots]
        self._arenas = []


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


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Parts grouped into contiguous ranges of one file, in file order."""
    runs: list[list[_Part]] = []
    for part in sorted(parts, key=lambda p: (str(p.tensor.path), p.tensor.offset + p.start)):
        last = runs[-1][-1] if runs else None
        if (last is not None and last.tensor.path == part.tensor.path
                and last.tensor.offset + last.start + last.nbytes == part.tensor.offset + part.start):  # fmt: skip
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
