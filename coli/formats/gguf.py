"""A GGUF file, whole or split: its header walked by hand, its tensors as a `Checkpoint`.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little endian): magic, version, tensor count, key
count; keys (name, type, value); tensors (name, dimensions with the input first, type, offset); padding; data.
Idea: one pass over the mapped header that believes nothing. It keeps scalars; an array of numbers stays a view of the
file, an array of strings the offsets of its strings (`Strings` decodes one when it is asked for). So a vocabulary of
248,000 tokens with its merges opens in 0.1 s, where the `gguf` package's GGUFReader, which makes arrays of every
string, takes 11 s; that one also takes any count a file claims for true.
Split files: the first part is opened, the others are found by name; each says its own number, their count and the count
of all tensors.
Invariant: every failure is one ModelError that names the file; no loop runs longer than the file has bytes for it, nor
past the limits below. Guarded by tests/formats/test_gguf.py (also against GGUFReader) and test_fuzz.py.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, overload

import numpy as np

from coli.errors import ModelError
from coli.formats import ggml
from coli.formats.checkpoint import Checkpoint
from coli.formats.gguf_names import apply
from coli.formats.safetensors import DIM_LIMIT, Tensor, check_spans
from coli.formats.strict import AGAIN, counted, listing, show

KEY_LIMIT = 1 << 16  # keys of a file
TENSOR_LIMIT = 1 << 20
STRING_LIMIT = 1 << 22  # strings in all arrays of a file: a vocabulary and its merges are half a million
NAME_LIMIT = 1 << 16  # bytes of a key or a tensor's name
TEXT_LIMIT = 16 << 20  # bytes of a string value: a chat template is some 10 kB
READ_LIMIT = 256 << 20  # bytes of all names and string values
_DIMENSIONS = 4
_ALIGNMENT = 32

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_STRUCTS = {kind: struct.Struct("<" + letter) for kind, letter in _SCALARS.items()}
_U32, _U64, _COUNTS, _LIST = (struct.Struct("<" + letters) for letters in ("I", "Q", "QQ", "IQ"))
_PLACES = tuple(struct.Struct(f"<{rank}QIQ") for rank in range(_DIMENSIONS + 1))  # dimensions, type, offset

_FOREIGN = {
    b"vers": ("a Git LFS pointer, not the weights", "run `git lfs pull` in the file's folder"),
    b"FUGG": ("a GGUF file for big-endian machines", "convert it with gguf-convert-endian, or download another one"),
    b"lmgg": ("a GGML file, the format before GGUF", "download the model as GGUF"),
    b"tjgg": ("a GGJT file, a format before GGUF", "download the model as GGUF"),
}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


class Strings(Sequence[str]):
    """An array of strings that stays in the file; `starts` has where each begins and, for the end, one more."""

    def __init__(self, data: mmap.mmap, starts: array[int], key: str, path: Path) -> None:
        self._data, self._starts, self._key, self._path = data, starts, key, path

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """One string or a list of them. Raises ModelError for bytes that are no text."""
        if isinstance(index, slice):
            return [self._text(i) for i in range(*index.indices(len(self)))]
        return self._text(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)))

    def _text(self, index: int) -> str:
        try:
            return str(self._data[self._starts[index] : self._starts[index + 1] - 8], "utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{show(self._key)}[{index}] is not UTF-8 text", self._path, AGAIN) from None


@dataclass(frozen=True)
class Header:
    """What one file says of itself; `tensors` by the file's own names, shapes in Hugging Face's order."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def open_gguf(path: Path) -> Checkpoint:
    """The model in `path`, a single file or the first part of several. Raises ModelError."""
    checkpoint = Checkpoint(path)
    try:
        parts = _all_parts(checkpoint, _header(checkpoint, path))
        tensors: dict[str, Tensor] = {}
        for part in parts:
            twice = tensors.keys() & part.tensors.keys()
            if twice:
                what = f"{counted(len(twice), 'tensor')} also in an earlier part: {listing(twice)}"
                raise ModelError(what, part.path, AGAIN)
            tensors |= part.tensors
        apply(checkpoint, parts[0].metadata, tensors)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _header(checkpoint: Checkpoint, path: Path) -> Header:
    size = os.fstat(checkpoint.add_file(path)).st_size
    if size < 24:
        raise ModelError(f"{size} bytes are too short for a GGUF file", path, AGAIN)
    return read_header(checkpoint.mapped(path), path)


# ---- parts -----------------------------------------------------------------------------------------------------------


def is_part(name: str, whole: str) -> bool:
    """Whether a file of this name may be a part of the model that file `whole` begins."""
    mine, first = _PART.fullmatch(name), _PART.fullmatch(whole)
    return mine is not None and first is not None and mine.group(1, 3) == first.group(1, 3)


def _all_parts(checkpoint: Checkpoint, first: Header) -> list[Header]:
    """The headers of all parts of the model that `first` begins, itself in front."""
    number, count, total = _split(first)
    named = _PART.fullmatch(first.path.name)
    if number:
        start = f"{named[1]}-00001-of-{count:05}{named[4]}" if named else "the one named ...-00001-of-..."
        raise ModelError(f"part {number + 1} of {count}", first.path, f"give the first part: {show(start)}")
    if count == 1:
        return [first]
    if named is None or int(named[2]) != 1 or int(named[3]) != count:
        raise ModelError(f"part 1 of {count}, but its name does not say so", first.path,
                         f"name the parts NAME-00001-of-{count:05}.gguf to NAME-{count:05}-of-{count:05}.gguf, "
                         "all in one folder")  # fmt: skip
    paths = [first.path.with_name(f"{named[1]}-{i:05}-of-{count:05}{named[4]}") for i in range(2, count + 1)]
    missing = [other.name for other in paths if not other.is_file()]
    if missing:
        raise ModelError(f"of {count} parts {len(missing)} missing: {listing(missing)}", first.path,
                         "download the missing parts into the same folder")  # fmt: skip
    parts = [first]
    for i, path in enumerate(paths, 1):
        part = _header(checkpoint, path)
        if _split(part) != (i, count, total):
            said = "part {} of {} with {} tensors in all".format(*(_split(part)[0] + 1, *_split(part)[1:]))
            raise ModelError(f"expected part {i + 1} of {count} with {total} tensors in all, found {said}", path,
                             "the parts belong to different models: download them again")  # fmt: skip
        parts.append(part)
    found = sum(len(part.tensors) for part in parts)
    if found != total:
        raise ModelError(f"the parts hold {found} tensors, the first one says {total}", first.path, AGAIN)
    return parts


def _split(header: Header) -> tuple[int, int, int]:
    """(number from 0, count of parts, tensors of all parts); a whole file is part 0 of 1."""
    count = header.metadata.get("split.count", 1)
    number, total = header.metadata.get("split.no", 0), header.metadata.get("split.tensors.count", len(header.tensors))
    if not all(type(value) is int for value in (number, count, total)) or not 0 <= number < max(count, 1) <= 99999:
        raise ModelError(f"split.no {show(number)}, split.count {show(count)} and split.tensors.count {show(total)} "
                         "are no part of anything", header.path, AGAIN)  # fmt: skip
    return number, max(count, 1), total


# ---- one header ------------------------------------------------------------------------------------------------------


def read_header(data: mmap.mmap, path: Path) -> Header:
    """The checked header of the mapped file. Raises ModelError."""
    return _Walk(data, path).header()


class _Walk:
    """A position in the header that only moves on over bytes that are there."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.size = data, path, len(data)
        self.at = 0
        self.inside = "the counts"  # what a truncation cuts
        self.strings = 0  # in arrays, so far
        self.read = 0  # bytes of other text

    def header(self) -> Header:
        version = self._version()
        tensors, keys = self._take(_COUNTS)
        self._check_count(keys, KEY_LIMIT, 13, "keys")
        self._check_count(tensors, TENSOR_LIMIT, 24, "tensors")
        metadata = self._metadata(keys)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"general.alignment {show(alignment)} is not a power of two")
        places = self._places(tensors)
        base = self.at + -self.at % alignment if tensors else self.at
        found = {name: self._tensor(name, place, base, alignment) for name, place in places.items()}
        check_spans(list(found.values()), self.path, base, self.size, alignment)
        return Header(self.path, version, alignment, metadata, found)

    def _bad(self, what: str, hint: str = AGAIN) -> ModelError:
        return ModelError(what, self.path, hint)

    def _truncated(self) -> ModelError:
        return self._bad(f"truncated inside {self.inside}: the file has {self.size} bytes")

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        if self.at + form.size > self.size:
            raise self._truncated()
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def _text(self, what: str, limit: int) -> str:
        (length,) = self._take(_U64)
        if length > limit:
            raise self._bad(f"{what} claims {length} bytes, over the limit of {limit}")
        if self.at + length > self.size:
            raise self._truncated()
        self.at, self.read = self.at + length, self.read + length
        if self.read > READ_LIMIT:
            raise self._bad(f"names and texts of more than {READ_LIMIT} bytes")
        try:
            return str(self.data[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError:
            raise self._bad(f"{what} is not UTF-8 text") from None

    def _name(self, what: str) -> str:
        name = self._text(what, NAME_LIMIT)
        if not name:
            raise self._bad(f"{what} is empty")
        return name

    def _version(self) -> int:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self._bad(*_FOREIGN.get(magic, ("not a GGUF file", "give a .gguf file, or a checkpoint folder")))
        self.at = 4
        (version,) = self._take(_U32)
        if version & 0xFFFF == 0 and version:
            raise self._bad(*_FOREIGN[b"FUGG"])
        if version not in (2, 3):
            old = "convert the model again" if version < 2 else "it needs a newer coli"
            raise self._bad(f"GGUF version {version}, this reads 2 and 3", old)
        return version

    def _check_count(self, count: int, limit: int, least: int, what: str) -> None:
        """Refuse a count over `limit`, or of things (at least `least` bytes each) that the file has no room for."""
        room = (self.size - self.at) // least
        if count > min(limit, room):
            most = f"over the limit of {limit}" if count > limit else f"and has room for {room}"
            raise self._bad(f"the file claims {count} {what}, {most}")

    # ---- keys

    def _metadata(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in range(count):
            self.inside = f"key {index + 1} of {count}"
            key = self._name("the name of a key")
            if key in found:
                raise self._bad(f"key {show(key)} is listed twice")
            self.inside = f"key {show(key)}"
            found[key] = self._value(key, self._take(_U32)[0])
        return found

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(f"key {show(key)}", TEXT_LIMIT)
        if kind == _ARRAY:
            return self._array(key, *self._take(_LIST))
        if kind not in _STRUCTS:
            raise self._bad(f"key {show(key)} has the unknown type {kind}")
        return self._take(_STRUCTS[kind])[0]

    def _array(self, key: str, kind: int, count: int) -> np.ndarray | Strings:
        if kind == _STRING:
            return self._strings(key, count)
        if kind not in _SCALARS:
            what = "is an array of arrays" if kind == _ARRAY else f"is an array of the unknown type {kind}"
            raise self._bad(f"key {show(key)} {what}")
        storage = np.dtype("<" + _SCALARS[kind])
        if count * storage.itemsize > self.size - self.at:
            raise self._truncated()
        start, self.at = self.at, self.at + count * storage.itemsize
        return np.frombuffer(self.data, storage, count, start) if count else np.empty(0, storage)

    def _strings(self, key: str, count: int) -> Strings:
        self._check_count(count, STRING_LIMIT - self.strings, 8, f"strings in {show(key)}")
        self.strings += count
        starts = array("Q")
        add, length_at, data, at = starts.append, _U64.unpack_from, self.data, self.at
        try:
            for _ in range(count):
                (length,) = length_at(data, at)
                at += 8
                add(at)
                at += length
        except (struct.error, OverflowError, IndexError):  # beyond the end
            raise self._truncated() from None
        if at > self.size:
            raise self._truncated()
        add(at + 8)
        self.at = at
        return Strings(data, starts, key, self.path)

    # ---- tensors

    def _places(self, count: int) -> dict[str, tuple[int, ...]]:
        """name -> (dimensions as the file has them, input first; type; offset in the data)."""
        found: dict[str, tuple[int, ...]] = {}
        for index in range(count):
            self.inside = f"the entry of tensor {index + 1} of {count}"
            name = self._name("the name of a tensor")
            (rank,) = self._take(_U32)
            if rank > _DIMENSIONS:
                raise self._bad(f"tensor {show(name)} has {rank} dimensions, at most {_DIMENSIONS} are possible")
            if name in found:
                raise self._bad(f"tensor {show(name)} is listed twice")
            found[name] = self._take(_PLACES[rank])
        return found

    def _tensor(self, name: str, place: tuple[int, ...], base: int, alignment: int) -> Tensor:
        *dimensions, kind, offset = place
        shape = tuple(reversed(dimensions))
        dtype = ggml.IDS.get(kind)
        if dtype is None:
            raise self._bad(f"tensor {show(name)} has the unknown type {kind}", "a type that ggml has dropped, or one "
                            "that is newer than coli: download the model in another quantisation")  # fmt: skip
        if max(shape, default=0) >= DIM_LIMIT:
            raise self._bad(f"tensor {show(name)}: dimensions {dimensions} are absurd")
        width = shape[-1] if shape else 1
        if width % ggml.SIZES[dtype][0]:
            raise self._bad(f"tensor {show(name)}: rows of {width} are no whole blocks of {dtype}")
        if offset % alignment:
            raise self._bad(f"tensor {show(name)}: its offset {offset} is not aligned to {alignment} bytes")
        nbytes = prod(shape[:-1]) * ggml.row_bytes(dtype, width)
        if base + offset + nbytes > self.size:
            raise self._bad(f"tensor {show(name)}: truncated: its data ends at byte {base + offset + nbytes}, the file "
                            f"at {self.size}")  # fmt: skip
        return Tensor(name, dtype, shape, self.path, base + offset, nbytes)
