"""Checksums that a download brought along, and whether the files still have them.

Where they are listed, all of it beside the model and none of it asked of a network:

    .cache/huggingface/download/NAME.metadata   of `hf download --local-dir`, three lines: commit, ETag, second of the
                                                download. The ETag of a large file is its SHA-256 in hex, of a small one
                                                the id that Git gives it (SHA-1, "blob <size>" and a zero byte in front)
    a link into ../../blobs/                    the hub's cache: the file's name there is the same ETag
    SHA256SUMS, *.sha256                        lines of sha256sum, either form; a bare sum in NAME.sha256 is of NAME

Idea: listing is quick, so it is always done; `--deep` reads the files, once each however many places list them. A text
file that was changed after its download is somebody's edit (a warning); anything else that differs is an error.
A listed file that is not there is no fault here: nobody downloads all of a repository.
Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coli.doctor.files import parts
from coli.doctor.finding import Finding, Patient, error, ok, warn
from coli.experts.page_cache import drop
from coli.formats.strict import counted, listing, show
from coli.report import size

_BLOCK = 4 << 20
_LIST_LIMIT = 16 << 20  # bytes of a list
_SUM = re.compile(r"\\?([0-9a-fA-F]{64}) [ *](.+)")
_BSD = re.compile(r"SHA256 ?\((.+)\) ?= ?([0-9a-fA-F]{64})")
_KINDS = {64: "sha256", 40: "git"}  # by the digits of an ETag
_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class Listed:
    """`path` should have this digest, says `source`; `time`: when it was downloaded, in seconds, where that is told."""

    path: Path
    kind: str
    digest: str
    source: str
    time: float | None = None


def checksums(patient: Patient) -> Iterator[Finding]:
    """The findings: one a file that differs, one for the rest."""
    assert patient.path is not None
    found = listed(patient.path)
    by_file: dict[Path, list[Listed]] = {}
    for entry in found:
        by_file.setdefault(entry.path, []).append(entry)
    sources = sorted({entry.source for entry in found})
    facts: dict[str, Any] = {"listed": len(by_file), "sources": sources}
    if not by_file:
        yield ok("none came with these files", **facts)
        return
    words = f"{counted(len(by_file), 'file')} listed in {listing(sources)}"
    if not patient.deep:
        yield ok(f"{words}; --deep reads and compares them", **facts)
        return
    wrong = list(_compared(by_file, patient.say))
    yield from wrong
    same = len(by_file) - len({finding.facts["file"] for finding in wrong})
    yield ok(f"{words}: {same} as they should be", **facts, same=same)


def _compared(by_file: dict[Path, list[Listed]], say: Callable[[str], None]) -> Iterator[Finding]:
    total, done = sum(path.stat().st_size for path in by_file), 0
    for path, entries in by_file.items():
        def progress(nbytes: int, path: Path = path, before: int = done) -> None:
            say(f"checksums: {size(before + nbytes)} of {size(total)}, {show(path.name)}")

        try:
            digests = digest(path, {entry.kind for entry in entries}, progress)
        except OSError as fault:
            yield error(f"cannot read {path}: {fault.strerror} (errno {fault.errno})", "check the disk", file=str(path))
        else:
            yield from (_differs(entry, digests[entry.kind]) for entry in entries
                        if digests[entry.kind] != entry.digest)  # fmt: skip
        done += path.stat().st_size


def _differs(entry: Listed, found: str) -> Finding:
    facts = {"file": str(entry.path), "kind": entry.kind, "expected": entry.digest, "found": found,
             "source": entry.source}  # fmt: skip
    edited = entry.time is not None and entry.path.stat().st_mtime > entry.time + 1
    if edited and entry.path.suffix not in _WEIGHTS:
        return warn(f"{show(entry.path.name)} was changed after its download",
                    "download it again unless you changed it", **facts)  # fmt: skip
    what = f"{show(entry.path.name)} has the {entry.kind} {found[:12]}..., {entry.source} says {entry.digest[:12]}..."
    return error(what, "the file is damaged: download it again", **facts)


def digest(path: Path, kinds: set[str], progress: Callable[[int], None] = lambda nbytes: None) -> dict[str, str]:
    """The digests of a file, read once; the page cache is given back as it goes. Raises OSError."""
    nbytes = path.stat().st_size
    sums = {"sha256": hashlib.sha256(), "git": hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)}
    buffer, done = memoryview(bytearray(_BLOCK)), 0
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(buffer):
            for kind in kinds:
                sums[kind].update(buffer[:got])
            drop(file.fileno(), done, got)
            done += got
            progress(done)
    return {kind: sums[kind].hexdigest() for kind in kinds}


# ---- where they are listed -------------------------------------------------------------------------------------------


def listed(model: Path) -> list[Listed]:
    """What is listed of the files of a model that are there: a folder's, or the parts of a GGUF file."""
    folder = model if model.is_dir() else model.parent
    found = [*_metadata(folder), *_links(folder), *_sums(folder)]
    own = None if model.is_dir() else set(parts(model))
    return [entry for entry in found if entry.path.is_file() and (own is None or entry.path in own)]


def _metadata(folder: Path) -> Iterator[Listed]:
    home = folder / ".cache" / "huggingface" / "download"
    for path in sorted(home.rglob("*.metadata")):
        name = path.relative_to(home).as_posix().removesuffix(".metadata")
        lines = _text(path).splitlines()
        if len(lines) >= 3 and (kind := _kind(lines[1])):
            time = None
            with suppress(ValueError):
                time = float(lines[2])
            yield Listed(folder / name, kind, lines[1].lower(), "the download's metadata", time)


def _links(folder: Path) -> Iterator[Listed]:
    """Files that are links to a blob of the hub's cache."""
    if folder.parent.name != "snapshots":
        return
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        target = Path(os.readlink(path))
        if target.parent.name == "blobs" and (kind := _kind(target.name)):
            yield Listed(path, kind, target.name.lower(), "the hub's cache")


def _sums(folder: Path) -> Iterator[Listed]:
    for path in sorted({*folder.glob("SHA256SUMS*"), *folder.glob("*.sha256")}):
        lines = _text(path).splitlines()
        for line in filter(None, map(str.strip, lines)):
            name, sha = _line(line, path)
            plain = Path(name)
            if sha and name and not plain.is_absolute() and ".." not in plain.parts:
                yield Listed(folder / plain, "sha256", sha.lower(), path.name)


def _line(line: str, path: Path) -> tuple[str, str]:
    """(file, sum) of a line; two empty texts for any other."""
    if match := _SUM.fullmatch(line):
        return match[2], match[1]
    if match := _BSD.fullmatch(line):
        return match[1], match[2]
    if path.suffix == ".sha256" and _kind(line) == "sha256":
        return path.name.removesuffix(".sha256"), line
    return "", ""


def _kind(etag: str) -> str:
    return _KINDS.get(len(etag), "") if re.fullmatch(r"[0-9a-fA-F]+", etag) else ""


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_LIST_LIMIT)
    except OSError:
        return ""  # what cannot be read lists nothing
