"""The survey of a checkpoint, kept: what was read of 130 headers once is not read again while the files are the same.

Idea: one JSON file a model (its path and what of the settings a survey depends on name it) in the user's cache folder
holds a survey and the `stamp` it is true for: name, size, inode and times (the inode's own too, which nobody can set)
of every file that opening looks at and of coli's own sources that made the survey, and the bytes of the configs.
Another stamp is another survey, computed and kept in its place. The stamp is taken before and after computing: what
changed meanwhile is not kept.
A cache is never needed: one that is missing, damaged, of another version or unwritable costs time and nothing else.
Only the MOST files used last stay. Guarded by tests/models/test_header_cache.py, timed by tests/bench/plan_speed.py.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import coli.kernels
from coli.errors import ColiError
from coli.formats import container, sidecar
from coli.formats.checkpoint import CONVERSION, INDEX, Checkpoint
from coli.formats.imagined import imagine, is_bare
from coli.models.families import family_named, identify
from coli.planning.survey import HeadSurvey, Survey, survey
from coli.settings import ENGINES, Settings

FOLDER = "headers"  # in the cache folder
MOST = 64  # surveys kept
LIMIT = 1 << 20  # bytes of one; a real model's has some 5,000
_ASKED = ("trunk", "experts", "act")  # settings that a survey depends on
_ROOT = Path(__file__).parents[1]
_SOURCES = (_ROOT, *(_ROOT / room for room in ("experts", "formats", "models", "planning")),
            *map(Path, coli.kernels.__path__))  # fmt: skip
_CONFIGS = ("config.json", container.MARK, sidecar.INDEX)  # their bytes count, whatever their times
_LISTS = (INDEX, CONVERSION, "tokenizer.json")
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


def surveyed(path: Path, settings: Settings, weights: str | None = None) -> Survey:
    """The survey of the checkpoint at `path`, checked, from the cache where that is possible; of a model that is not
    there (coli/formats/imagined.py) from its config, in the format `weights`. Raises ModelError and UsageError."""
    path = Path(path)
    if weights is not None or is_bare(path):
        return _survey(imagine(path, weights), settings)
    home = folder(settings)
    entry = None if home is None else home / f"{_name(path, settings)}.json"
    before = _stamp(path)
    if entry is not None and before and (found := _read(entry, before, path)) is not None:
        return found
    with Checkpoint.open(path) as checkpoint:
        made = _survey(checkpoint, settings)
        config = dict(checkpoint.config)
    if entry is not None and before and before == _stamp(path):
        _write(entry, before, made, config)
    return made


def folder(settings: Settings) -> Path | None:
    """Where surveys are kept; None where the system has no such place."""
    if settings.cache_dir is not None:
        return settings.cache_dir / FOLDER
    import platformdirs

    with contextlib.suppress(OSError, RuntimeError):
        return Path(platformdirs.user_cache_dir("coli")) / FOLDER
    return None


def _survey(checkpoint: Checkpoint, settings: Settings) -> Survey:
    family, geometry = identify(checkpoint)
    return survey(checkpoint, family, geometry, settings.resolve(family.name))


# ---- what a survey is of ---------------------------------------------------------------------------------------------


def _name(path: Path, settings: Settings) -> str:
    """Which engine reads the settings is known after opening, so their values for all of them are in the name."""
    asked = [str(settings.read(name, engine)) for engine in ENGINES for name in _ASKED]
    return _digest([os.fsencode(os.path.realpath(path)), *map(str.encode, asked)])


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _stamp(path: Path) -> str:
    """What `path` holds and what reads it, as one word; "" where that cannot be said."""
    try:
        sources = [found for folder in _SOURCES for found in _entries(folder, lambda name: name.endswith(".py"))]
        return _digest([*sources, *_files(path)]) if sources else ""  # none: packed away, of who knows what version
    except OSError:
        return ""


def _files(path: Path) -> Iterator[bytes]:
    """What opening looks at: a GGUF file and the parts it may be split into; a folder's weights and small JSON files,
    and those of the sidecars in it."""
    if not path.is_dir():
        from coli.formats.gguf import is_part  # large, and a folder has no use for it

        yield from _entries(path.parent, lambda name: name == path.name or is_part(name, path.name))
        return
    for name in ("", *(folder.name for folder in sidecar.folders(path))):
        yield name.encode()
        yield from _entries(path / name, lambda name: name in _CONFIGS + _LISTS or name.lower().endswith(_WEIGHTS))


def _entries(folder: Path, wanted: Callable[[str], bool]) -> Iterator[bytes]:
    """Every file of a folder that is wanted, by name: what its inode says, and a config's bytes."""
    for name in sorted(filter(wanted, os.listdir(folder))):
        found = os.stat(f"{folder}{os.sep}{name}")
        times = found.st_mtime_ns, found.st_ctime_ns
        yield repr((name, found.st_size, *times, found.st_ino, found.st_dev)).encode()
        if name in _CONFIGS:
            yield _small(f"{folder}{os.sep}{name}")


def _small(path: str | Path) -> bytes:
    """The bytes of a regular file of at most LIMIT. Raises OSError for another, and never waits for a pipe."""
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise OSError(errno.EFBIG, "too large", path)
    return data


# ---- the file --------------------------------------------------------------------------------------------------------


def _read(entry: Path, stamp: str, path: Path) -> Survey | None:
    """The survey in a file of the cache, None for whatever is not one of this stamp."""
    try:
        record = json.loads(_small(entry))
        text = json.dumps(record["survey"])
        if record["stamp"] != stamp or record["sum"] != _digest([text.encode()]):
            return None
        found = _built(record["survey"], path)
        os.utime(entry)  # it was used: others go first
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ColiError):
        return None
    return found


def _write(entry: Path, stamp: str, made: Survey, config: Mapping[str, Any]) -> None:
    """Keep a survey, whole or not at all; what cannot be kept is not."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        plain = _plain(made, config)
        record = {"stamp": stamp, "sum": _digest([json.dumps(plain).encode()]), "survey": plain}
        text = json.dumps(record)
        if len(text) > LIMIT:
            return
        import tempfile

        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(suffix=".part", dir=entry.parent)
        try:
            with open(handle, "w") as file:
                file.write(text)
            os.replace(part, entry)
        except BaseException:
            os.unlink(part)
            raise
        _trim(entry.parent)


def _trim(home: Path) -> None:
    """Keep the files that were used last."""
    files = sorted(os.scandir(home), key=lambda file: -file.stat().st_mtime_ns)
    for file in files[MOST:]:
        os.unlink(file)


def _plain(made: Survey, config: Mapping[str, Any]) -> dict[str, Any]:
    """A survey in JSON's types. The config stands for the geometry, which is read from it again."""
    head = None if made.head is None else _fields(made.head, "experts")
    return _fields(made, "experts", "geometry", "path") | {"head": head, "config": dict(config)}


def _fields(value: Any, *left_out: str) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in left_out}


def _built(plain: dict[str, Any], path: Path) -> Survey:
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in plain.items()}
    geometry = family_named(values["engine"]).geometry(values.pop("config"), path)
    head = values.pop("head")
    return Survey(path=path, geometry=geometry, head=None if head is None else HeadSurvey(**head), **values)
