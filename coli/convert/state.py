"""Whose folder it is: `convert.json` names the source, the options and the files that are finished.

A folder is taken when it is new or empty, or when its convert.json names the same source files (name, size, time of
change) and the same options; anything else is refused before a byte is written. The folder is locked while a run holds
it (flock), so two runs never write one `.part`. The file holds no clock time: a resumed run ends in the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coli.convert.files import PART, publish, write_error, write_part, write_whole
from coli.convert.report import Options, Tally
from coli.errors import ModelError
from coli.formats.checkpoint import CONVERSION
from coli.formats.strict import listing, read_object

__all__ = ["NAME", "State", "fingerprint", "publish", "write_part"]

NAME = CONVERSION
FORMAT, VERSION = "coli.convert", 1
_AFRESH = "delete the folder to start afresh, or give another one"


def fingerprint(paths: Iterable[Path]) -> list[list[Any]]:
    """[name, bytes, nanosecond of the last change] of every source file."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(set(paths))]


def _words(document: dict[str, Any]) -> str:
    options = document.get("options")
    options = options if isinstance(options, dict) else {}
    return f"{document.get('output')}, --ebits {options.get('ebits')} --group-size {options.get('group')}"


def _files(found: Any, path: Path) -> dict[str, dict[str, Any]]:
    """The finished files of a convert.json. Raises ModelError for one that somebody else has had a hand in."""
    try:
        return {name: {"bytes": int(entry["bytes"]), "errors": {kind: [float(e), float(w)] for kind, (e, w) in
                                                                entry["errors"].items()}}
                for name, entry in found.items()}  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ModelError("does not say which files are finished", path, _AFRESH) from None


class State:
    """The taken folder `root`. `finished` says which files are whole, `record` adds one, `close` lets go."""

    def __init__(self, root: Path, source: list[list[Any]], options: Options, format: str) -> None:
        self.root = root
        self._wanted = {"format": FORMAT, "version": VERSION, "output": format, "options": asdict(options),
                        "source": source}  # fmt: skip
        self._files: dict[str, dict[str, Any]] = {}
        self.complete = False
        self.new = not root.exists()
        self._lock = self._take()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _take(self) -> int:
        if self.root.exists() and not self.root.is_dir():
            raise ModelError("exists and is not a folder", self.root, "give a folder that does not exist yet")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.root, os.O_RDONLY)
        except OSError as error:
            raise write_error(error, self.root) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ModelError("another conversion is writing here", self.root, "wait for it, or end it") from None
        return lock

    def _read(self) -> None:
        path = self.root / NAME
        if not path.exists():
            others = {entry.name for entry in self.root.iterdir()} - {NAME + PART}
            if others:
                raise ModelError(f"is not empty and no conversion of ours: it has {listing(others)}", self.root,
                                 "give a folder that does not exist yet")  # fmt: skip
            return
        found = read_object(path, NAME, hint=_AFRESH)
        if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
            raise ModelError("is not a conversion this version knows", path, _AFRESH)
        if found.get("output") != self._wanted["output"] or found.get("options") != self._wanted["options"]:
            raise ModelError(f"was begun as {_words(found)}, asked for is {_words(self._wanted)}", self.root, _AFRESH)
        if found.get("source") != self._wanted["source"]:
            raise ModelError("was begun from another source, or its files changed since", self.root, _AFRESH)
        self._files = _files(found.get("files"), path)
        self.complete = found.get("complete") is True

    # ---- files -------------------------------------------------------------------------------------------------------

    def finished(self, name: str) -> bool:
        """Whether `name` is whole: it has its name, and the size it was given with it."""
        path = self.root / name
        return name in self._files and path.is_file() and path.stat().st_size == self._files[name]["bytes"]

    def record(self, name: str, nbytes: int, tally: Tally) -> None:
        """`name` is about to be published with so many bytes."""
        self._files[name] = {"bytes": nbytes, "errors": tally.sums}
        self.save()

    def tally(self, names: Iterable[str]) -> Tally:
        """The errors of all files together."""
        total = Tally()
        for name in names:
            total.merge(self._files[name]["errors"])
        return total

    def nbytes(self, name: str) -> int:
        return self._files[name]["bytes"]

    def save(self) -> None:
        files = dict(sorted(self._files.items()))
        document = self._wanted | {"files": files, "complete": self.complete}
        write_whole(self.root / NAME, (json.dumps(document, indent=1) + "\n").encode())

    def sweep(self, names: Iterable[str]) -> None:
        """Remove what an interrupted run left of `names`."""
        for name in names:
            (self.root / (name + PART)).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)
