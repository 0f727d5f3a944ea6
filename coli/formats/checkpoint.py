"""A checkpoint, Hugging Face folder or GGUF file, as tensors by canonical name. This file reads the folder: config.json
and one or many safetensors files; coli/formats/gguf.py fills the same class from GGUF.

Idea: opening reads headers only (130 files with 150,000 tensors in about a second) and settles every question of
spelling; after it a tensor has one name, one place and one descriptor. Nothing is loaded: `view` maps a tensor,
`read_into` copies bytes of it, and both may be called for a 185 GB folder.
Names: `model.language_model.X` and `model.X` become `X`; `lm_head.weight` and `mtp.*` stay; `model.visual.*` and
`visual.*` are left out. Two spellings of one name are an error, as is a tensor in two files.
A quantised tensor is its bytes, uint8 [..., row bytes]; what else a GGUF changes in the weights its `traits` say.
Invariant: every failure at open is one ModelError, every failed read afterwards one ReadError with the errno.
Guarded by tests/formats/test_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coli.errors import ModelError, ReadError
from coli.formats import container
from coli.formats.safetensors import Tensor, header_of, open_file, read_ahead
from coli.formats.strict import AGAIN, counted, listing, read_object, show

INDEX = "model.safetensors.index.json"
CONVERSION = "convert.json"  # coli/convert/state.py
_PREFIXES = ("model.language_model.", "model.")
_IGNORED = ("model.visual.", "visual.")
_NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
_NESTED = ("text_config", "vision_config", "audio_config", "quantization_config")
_BATCH = 512  # buffers of one preadv; Linux takes 1024 (IOV_MAX)


def canonical(name: str) -> str | None:
    """The engine's name of a checkpoint tensor; None for one that belongs to the vision tower."""
    if name.startswith(_IGNORED):
        return None
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


@dataclass(frozen=True)
class Traits:
    """What a converter has done to the weights, beyond their dtype; nothing for a Hugging Face folder."""

    gguf: bool = False
    norms_folded: bool = False  # every norm multiplies by w as stored, none by 1 + w
    decay_ready: bool = False  # A_log holds -exp(A_log)
    tiled: bool = False  # DeltaNet's value head h belongs to key head h mod key heads, not h // (values per key)


class Checkpoint:
    """An open checkpoint folder or GGUF file; `folder` is its path either way.

    `tensors` maps canonical names to places, `ignored` holds what was left out by name; `config` is the text
    config flattened over the top level, `raw_config` the file as it is, `quantization` its quantization_config or {}.
    Of a GGUF file, `config` is made from `metadata` (its keys and values), and `constants` are the arrays among those
    that a folder has as tensors, by canonical name. `meta` is a container's qwen36_meta.json, {} without one; `beside`
    holds what was opened beside the checkpoint (coli/formats/sidecar.py), by folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw_config: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.quantization: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.ignored: list[Tensor] = []
        self.traits = Traits()
        self.metadata: Mapping[str, Any] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.meta: dict[str, Any] = {}
        self.beside: dict[Path, Any] = {}
        self._fds: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a folder or a `.gguf` file, reading every header and no weight. Raises ModelError."""
        path = Path(path)
        if path.suffix.lower() == ".gguf" and not path.is_dir():
            from coli.formats.gguf import open_gguf  # it needs this module

            return open_gguf(path)
        checkpoint = cls(path)
        try:
            checkpoint.read_config()
            with _uncollected():
                checkpoint._read_headers()
        except BaseException:
            checkpoint.close()
            raise
        return checkpoint

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(f"tensor {show(name)} is missing", self.folder, AGAIN) from None

    @property
    def config_path(self) -> Path:
        """Where the configuration was read."""
        return self.folder if self.traits.gguf else self.folder / "config.json"

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor but the ignored ones."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    # ---- opening -------------------------------------------------------------------------------------------------

    def read_config(self) -> None:
        """Read a folder's config.json, and a container's meta beside it, alone. Raises ModelError."""
        if not self.folder.is_dir():
            what = "not a folder" if self.folder.exists() else "no such folder"
            raise ModelError(what, self.folder, "give the folder that holds config.json and the .safetensors files")
        if not (self.folder / "config.json").exists():
            _refuse_gguf(self.folder)
            _refuse_unfinished(self.folder)
        hint = "give the folder of a Hugging Face checkpoint: config.json beside the .safetensors files"
        self.raw_config = read_object(self.folder / "config.json", "config.json", hint=hint)
        self.config, self.quantization = flatten(self.raw_config, self.folder / "config.json")
        self.meta = container.read_meta(self.folder)
        self.config = container.merged_config(self.config, self.meta, self.folder / container.MARK)

    def _read_headers(self) -> None:
        index = self.folder / INDEX
        placed = weight_map(index) if index.exists() else None
        files = _listed_files(self.folder, placed) if placed is not None else safetensors_files(self.folder)
        homes: dict[str, Tensor] = {}
        located: dict[str, str] = {}
        for file in files:
            read_ahead(self.add_file(self.folder / file))
        for file in files:
            path = self.folder / file
            found = header_of(self._fds[path], path)
            if twice := found.keys() & homes.keys():
                raise ModelError(f"tensor {show(min(twice))} is in two files, {located[min(twice)]} and {file}",
                                 self.folder, "keep one model's files in a folder, no older copy")  # fmt: skip
            homes |= found
            located |= dict.fromkeys(found, file)
        if placed is not None:
            _check_index(placed, located, index)
        self._name(homes)

    def _name(self, homes: dict[str, Tensor]) -> None:
        for name, tensor in homes.items():
            known = None if self.meta and tensor.path.name == container.VISION else canonical(name)
            if known is None:
                self.ignored.append(tensor)
            elif known in self.tensors:
                raise ModelError(f"{show(self.tensors[known].name)} and {show(name)} are the same tensor twice",
                                 self.folder, "keep one spelling")  # fmt: skip
            else:
                self.tensors[known] = tensor

    # ---- reading -------------------------------------------------------------------------------------------------

    def view(self, tensor: Tensor | str) -> np.ndarray:
        """Read-only array over the mapped file, shape kept: BF16 as uint16, F8 as uint8, a quantised tensor as uint8
        [..., row bytes], the rest as they are.

        A tensor that the file does not align to its item size, or whose rows lie apart, is copied instead: the result
        is always aligned and contiguous.
        """
        tensor = self[tensor] if isinstance(tensor, str) else tensor
        storage, shape = tensor.stored()
        if not tensor.nbytes:
            return np.empty(shape, storage)
        data = self.mapped(tensor.path)
        if tensor.pitch:
            array = np.ndarray(shape, storage, data, tensor.offset, (tensor.pitch, storage.itemsize))
        else:
            array = np.frombuffer(data, storage, tensor.nbytes // storage.itemsize, tensor.offset).reshape(shape)
        if tensor.pitch or not array.flags.aligned:
            array = array.copy()
            array.flags.writeable = False
        return array

    def load(self, tensor: Tensor | str) -> np.ndarray:
        """Like `view`, in memory of its own. Raises ReadError."""
        tensor = self[tensor] if isinstance(tensor, str) else tensor
        storage, shape = tensor.stored()
        array = np.empty(shape, storage)
        if tensor.nbytes:
            self.read_into(tensor, array.reshape(-1).view(np.uint8).data)
        return array

    def read_into(self, tensor: Tensor, buffer: memoryview, start: int = 0, nbytes: int | None = None) -> None:
        """Fill `buffer` (bytes, at least `nbytes` of them) from byte `start` of `tensor`. Raises ReadError."""
        nbytes = tensor.nbytes - start if nbytes is None else nbytes
        if start < 0 or nbytes < 0 or start + nbytes > tensor.nbytes:
            raise ValueError(f"bytes {start}..{start + nbytes} are outside {tensor.name} ({tensor.nbytes} bytes)")
        try:
            for offset, length in _pieces(tensor, start, nbytes):
                self.preadv(tensor.path, [buffer[:length]], offset)
                buffer = buffer[length:]
        except OSError as error:
            raise read_error(error, f"tensor {show(tensor.name)}", tensor.path) from error

    def preadv(self, path: Path, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill all `buffers` from one contiguous range of `path`; returns its length. Raises OSError, also at an early
        end of the file (the file shrank since it was opened)."""
        return fill(self._descriptor(path), buffers, offset)

    def add_file(self, path: Path) -> int:
        """Open `path`, to be closed with the checkpoint; its descriptor. Raises ModelError."""
        fd = self._fds[path] = open_file(path)
        return fd

    def mapped(self, path: Path) -> mmap.mmap:
        """The read-only mapping of an open file. Raises ReadError."""
        if path not in self._maps:
            try:
                self._maps[path] = mmap.mmap(self._descriptor(path), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise read_error(error, "the file", path) from error
        return self._maps[path]

    def fd(self, tensor: Tensor) -> int:
        """The open descriptor of the tensor's file."""
        return self._descriptor(tensor.path)

    def _descriptor(self, path: Path) -> int:
        try:
            return self._fds[path]
        except KeyError:
            raise ValueError(f"{path}: the checkpoint is closed") from None

    def close(self) -> None:
        """Close every file. Views stay valid: they keep their mapping alive."""
        self._maps.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: half a million new objects would start dozens, a quarter of an open's time, and
    none of those objects is garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _pieces(tensor: Tensor, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset in the file, length) of a range of a tensor's bytes: one, or one for every row of columns."""
    if not tensor.pitch or not nbytes:
        yield tensor.offset + start, nbytes
        return
    row = tensor.nbytes // tensor.shape[0]
    while nbytes:
        index, at = divmod(start, row)
        length = min(row - at, nbytes)
        yield tensor.offset + index * tensor.pitch + at, length
        start, nbytes = start + length, nbytes - length


def _refuse_gguf(folder: Path) -> None:
    """The error for a folder that holds GGUF files where safetensors were looked for: it says which file to give."""
    later = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf|mmproj.*", re.IGNORECASE)
    names = [path.name for path in folder.glob("*") if path.suffix.lower() == ".gguf"]
    names = [name for name in names if not later.fullmatch(name)]
    if names:
        raise ModelError("a folder of GGUF files", folder, f"give the file itself: {listing(names)}")


def _refuse_unfinished(folder: Path) -> None:
    """The error for what an interrupted `coli convert` left: its config.json comes last."""
    if (folder / CONVERSION).exists():
        raise ModelError("a conversion that has not come to its end", folder,
                         "give the same `coli convert` again: it goes on where it stopped")  # fmt: skip


def fill(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill all `buffers` from one contiguous range of a file; returns its length. Raises OSError, also at an early end
    of the file."""
    total = 0
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        got = os.preadv(fd, pending[:_BATCH], offset + total)
        if got == 0:
            raise OSError(0, "unexpected end of file")
        total += got
        while pending and got >= pending[0].nbytes:
            got -= pending.pop(0).nbytes
        if got:
            pending[0] = pending[0][got:]
    return total


def read_error(error: OSError, what: str, path: object) -> ReadError:
    """The ReadError for a failed read of `what` in `path`."""
    return ReadError(f"cannot read {what}: {error.strerror} (errno {error.errno})", path, "check the disk and the file")


def flatten(raw: dict[str, Any], where: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """(text config over the top level's scalars, quantization_config or {}) of a config.json."""
    text = {} if raw.get("text_config") is None else raw["text_config"]
    quantization = raw.get("quantization_config")
    if quantization is None and isinstance(text, dict):
        quantization = text.get("quantization_config")
    quantization = {} if quantization is None else quantization
    for name, value in (("text_config", text), ("quantization_config", quantization)):
        if not isinstance(value, dict):
            raise ModelError(f"{name} is not an object", where, AGAIN)
    flat = {**{key: value for key, value in raw.items() if key not in _NESTED}, **text}
    flat.pop("quantization_config", None)
    return flat, quantization


def weight_map(index: Path) -> dict[str, str]:
    """name -> file of an index, with files that are plain names in the same folder."""
    placed = read_object(index, "index", unique=True).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError("weight_map is missing or empty", index, AGAIN)
    known: set[str] = set()  # thousands of names share a file
    for file in placed.values():
        if isinstance(file, str) and file in known:
            continue
        plain = isinstance(file, str) and file.endswith(".safetensors") and "\0" not in file
        if plain and Path(file).name == file:
            known.add(file)
        else:
            raise ModelError(f"weight_map names {show(file)}, which is not a .safetensors file of this folder", index,
                             AGAIN)  # fmt: skip
    return placed


def _listed_files(folder: Path, placed: dict[str, str]) -> list[str]:
    files = sorted(set(placed.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise ModelError(f"of {counted(len(files), 'file')} {len(missing)} missing: {listing(missing)}", folder,
                         "download the missing files")  # fmt: skip
    return files


def _check_index(placed: dict[str, str], located: dict[str, str], index: Path) -> None:
    """The files hold what the index says. Both map name -> file."""
    if placed == located:
        return
    wrong = {name for name, file in placed.items() if located.get(name) != file}
    if wrong:
        raise ModelError(f"the index misplaces {counted(len(wrong), 'tensor')}: {listing(wrong)}", index, AGAIN)
    extra = located.keys() - placed.keys()
    if extra:
        raise ModelError(f"the index leaves out {counted(len(extra), 'tensor')}: {listing(extra)}", index, AGAIN)


def safetensors_files(folder: Path) -> list[str]:
    """Every .safetensors file of a folder without an index. Raises ModelError for none, or a gap in numbered names."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        _refuse_gguf(folder)
        others = [kind for kind in ("*.bin", "*.pt", "*.pth") if any(folder.glob(kind))]
        what = f"no .safetensors file, only {others[0]}" if others else "no .safetensors file"
        raise ModelError(what, folder, "download the checkpoint's .safetensors files into this folder")
    for what in gaps(files):
        raise ModelError(what, folder, "download all of them into this folder")
    return files


def gaps(files: Iterable[str]) -> Iterator[str]:
    """What is missing among numbered names, such as model-00001-of-00003.safetensors, in words for every series."""
    groups: dict[tuple[str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, files)):
        groups.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (stem, total), numbers in groups.items():
        count, first = int(total), 0 if 0 in numbers else 1
        absent = count - sum(first <= number < first + count for number in numbers)
        if absent > 0:
            wanted = (n for n in range(first, first + len(numbers) + 3) if n not in numbers and n < first + count)
            names = [f"{stem}-{n:0{len(total)}d}-of-{total}.safetensors"
                     for n, _ in zip(wanted, range(3), strict=False)]  # fmt: skip
            more = f" and {absent - len(names)} more" if absent > len(names) else ""
            yield f"of {count} split files {absent} missing: {', '.join(map(show, names))}{more}"
