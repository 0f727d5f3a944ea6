"""The files of a checkpoint: are they all there, and is each what its header says?

Idea: `Checkpoint.open` stops at the first fault, which is right for who wants to run; who wants to repair needs all of
them. So a folder that does not open, and any under --deep, is read again file by file, and then the headers are held
against each other and against the index: what is missing, cut, listed twice, misplaced, not listed.
Invariant: a folder with a fault here is one that `Checkpoint.open` refuses, and the other way round (a warning is
neither). Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from coli.doctor.finding import ERROR, Finding, Patient, error, ok, warn
from coli.errors import ModelError
from coli.formats import container, gguf
from coli.formats.checkpoint import INDEX, Checkpoint, canonical, gaps, safetensors_files, weight_map
from coli.formats.safetensors import open_file, read_header
from coli.formats.strict import AGAIN, counted, listing, show
from coli.report import size

_ONE = "keep one model's files in a folder, no older copy"
_UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload", "*.partial")
Homes = dict[str, list[str]]
"""tensor name -> the files that have it"""


def files(patient: Patient) -> Iterator[Finding]:
    """Opens the checkpoint; without success, or under --deep, says all that is wrong with its files."""
    path, refusal = patient.path, None
    assert path is not None
    try:
        patient.checkpoint = Checkpoint.open(path)
    except ModelError as fault:
        refusal = fault
    found: list[Finding] = []
    if refusal is not None or patient.deep:
        patient.say("reading every header")
        found = list(_folder(path) if path.is_dir() else _parts(path))
    yield from found
    if not any(finding.status == ERROR for finding in found):
        if refusal is not None and not _of_config(path):
            yield error(f"{refusal.where}: {refusal.what}", refusal.hint)
        elif patient.checkpoint is None:
            yield ok("every header is sound; config.json is not")
        else:
            yield _whole(patient.checkpoint)


def _whole(checkpoint: Checkpoint) -> Finding:
    tensors = [*checkpoint.tensors.values(), *checkpoint.ignored]
    paths = {tensor.path for tensor in tensors}
    nbytes = sum(path.stat().st_size for path in paths)
    what = f"{counted(len(paths), 'file')}, {counted(len(tensors), 'tensor')}, {size(nbytes)}, as their headers say"
    return ok(what, files=len(paths), tensors=len(tensors), bytes=nbytes)


def _of_config(path: Path) -> bool:
    """Whether what is wrong is a folder's config.json, which has a check of its own."""
    if not path.is_dir():
        return False
    try:
        Checkpoint(path).read_config()
    except ModelError:
        return True
    return False


# ---- a folder --------------------------------------------------------------------------------------------------------


def _folder(folder: Path) -> Iterator[Finding]:
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    placed: dict[str, str] | None = None
    try:
        if (folder / INDEX).exists():
            placed = weight_map(folder / INDEX)
        elif not there:
            safetensors_files(folder)  # knows what else may be there in their place
    except ModelError as fault:
        yield error(f"{fault.where}: {fault.what}", fault.hint)
    wanted = there if placed is None else sorted(set(placed.values()))
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        yield error(f"of {counted(len(wanted), 'file')} {len(missing)} missing: {listing(missing, 20)}",
                    "download the missing files into this folder", missing=missing)  # fmt: skip
    for what in gaps(wanted):  # where there is an index, it decides what there is to be
        yield (error if placed is None else warn)(f"the numbering has a gap: {what}",
                                                  "download all of them into this folder")  # fmt: skip
    homes: Homes = {}
    for name in wanted:
        if name not in missing:
            yield from _header(folder / name, homes)
    yield from _twice(homes)
    if placed is not None:
        unread = set(wanted).difference(*homes.values())
        yield from _against_index(placed, homes, unread)
        yield from _unlisted(there, wanted)


def _header(path: Path, homes: Homes) -> Iterator[Finding]:
    """Adds a file's tensors to `homes`, or says what is wrong with it."""
    try:
        for name in read_header(path):
            homes.setdefault(name, []).append(path.name)
    except ModelError as fault:
        yield error(f"{show(path.name)}: {fault.what}", fault.hint, file=path.name)


def _twice(homes: Homes) -> Iterator[Finding]:
    """Names in several files, one finding for all that the same files share; names in two spellings."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for name, files in homes.items():
        if len(files) > 1:
            shared.setdefault(tuple(files), []).append(name)
    for both, names in shared.items():
        yield error(f"{counted(len(names), 'tensor')} both in {' and in '.join(map(show, both))}: {listing(names)}",
                    _ONE, files=list(both), tensors=len(names))  # fmt: skip
    spelt: dict[str, str] = {}
    for name, where in homes.items():
        known = canonical(name) if where != [container.VISION] else None
        if known is not None and spelt.setdefault(known, name) != name:
            yield error(f"{show(spelt[known])} and {show(name)} are the same tensor twice", "keep one spelling")


def _against_index(placed: dict[str, str], homes: Homes, unread: set[str]) -> Iterator[Finding]:
    """`unread`: files whose tensors nobody could see."""
    wrong = [name for name, file in placed.items() if file not in unread and file not in homes.get(name, ())]
    if wrong:
        yield error(f"the index misplaces {counted(len(wrong), 'tensor')}: {listing(wrong)}",
                    f"{INDEX} is not of these files: download it again", tensors=len(wrong))  # fmt: skip
    extra = homes.keys() - placed.keys()
    if extra:
        yield error(f"the index leaves out {counted(len(extra), 'tensor')}: {listing(extra)}",
                    f"{INDEX} is not of these files: download it again", tensors=len(extra))  # fmt: skip


def _unlisted(there: Iterable[str], wanted: Iterable[str]) -> Iterator[Finding]:
    extra = sorted(set(there) - set(wanted))
    if extra:
        yield warn(f"the index does not name {listing(extra)}: never read", "delete what belongs to another download",
                   unlisted=extra)  # fmt: skip


# ---- GGUF ------------------------------------------------------------------------------------------------------------

_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def parts(path: Path) -> list[Path]:
    """All files of a GGUF model by their names, whether they are there or not."""
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    return [path.with_name(f"{named[1]}-{i:05}-of-{named[2]}{named[3]}") for i in range(1, int(named[2]) + 1)]


def _parts(path: Path) -> Iterator[Finding]:
    paths = parts(path)
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        yield error(f"of {counted(len(paths), 'part')} {len(missing)} missing: {listing(missing, 20)}",
                    "download the missing parts into the same folder", missing=missing)  # fmt: skip
    homes: Homes = {}
    for part in (part for part in paths if part.name not in missing):
        try:
            for name in _names(part):
                homes.setdefault(name, []).append(part.name)
        except ModelError as fault:
            yield error(f"{show(part.name)}: {fault.what}", fault.hint, file=part.name)
    yield from _twice(homes)


def _names(path: Path) -> Iterable[str]:
    """The tensors of one part. Raises ModelError."""
    fd = open_file(path)
    try:
        if os.fstat(fd).st_size < 24:
            raise ModelError("too short for a GGUF file", path, AGAIN)
        return gguf.read_header(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), path).tensors.keys()
    finally:
        os.close(fd)


# ---- what downloads leave --------------------------------------------------------------------------------------------


def leftovers(patient: Patient) -> Iterator[Finding]:
    """Files that somebody is writing, or gave up writing."""
    assert patient.path is not None
    folder = patient.path if patient.path.is_dir() else patient.path.parent
    places = [folder, folder / ".cache" / "huggingface" / "download"]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    found = chain.from_iterable(place.glob(form) for place in places for form in _UNFINISHED)
    names = sorted(f"{path.name} ({size(path.stat().st_size)})" for path in found if path.is_file())
    if names:
        yield warn(f"unfinished files: {listing(names)}", "finish the download or conversion, or delete them",
                   files=names)  # fmt: skip
    else:
        yield ok("no unfinished files", files=[])
