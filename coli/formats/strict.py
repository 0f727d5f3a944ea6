"""JSON that may be hostile, and names that may be unprintable.

Idea: a checkpoint is somebody else's file. Whatever its JSON does (wrong encoding, endless nesting, a key
twice, a number of a million digits), the reader gets a dict or one `ModelError`, never another exception.
Names from such a file are quoted through `show` before they reach a message, so an error stays one line.
Guarded by tests/formats/test_safetensors.py (fuzz) and tests/formats/test_checkpoint.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coli.errors import ModelError

CONFIG_LIMIT = 64 << 20
AGAIN = "download the file again"


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(f"{show(key)} is listed twice")
            seen.add(key)
    return found


def show(name: object) -> str:
    """`name` as printable ASCII on one line, at most 200 characters."""
    text = json.dumps(str(name))[1:-1]
    return text if len(text) <= 200 else text[:200] + "..."


def listing(names: Iterable[str], limit: int = 4) -> str:
    """The first few names and how many more there are: "a, b and 7 more"."""
    names = sorted(names)
    more = len(names) - limit
    return ", ".join(map(show, names[:limit])) + (f" and {more} more" if more > 0 else "")


def counted(number: int, noun: str) -> str:
    """"1 tensor", "3 tensors"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parse_object(raw: bytes, where: object, what: str, *, unique: bool = False, hint: str = AGAIN) -> dict[str, Any]:
    """The JSON object in `raw` (UTF-8). `unique` refuses a key that occurs twice. Raises ModelError."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique if unique else None)
    except _DuplicateKey as error:
        raise ModelError(f"{what}: {error}", where, hint) from None
    except UnicodeDecodeError:
        raise ModelError(f"{what} is not UTF-8 text", where, hint) from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON: {show(error)}", where, hint) from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} is a JSON {type(value).__name__}, not an object", where, hint)
    return value


def read_object(path: Path, what: str, *, unique: bool = False, hint: str = AGAIN) -> dict[str, Any]:
    """The JSON object in the regular file `path`. Raises ModelError, also when it is missing or absurdly large."""
    try:
        if not path.is_file():
            raise ModelError(f"{what} is missing" if not path.exists() else f"{what} is not a file", path, hint)
        if path.stat().st_size > CONFIG_LIMIT:
            raise ModelError(f"{what} is larger than {CONFIG_LIMIT >> 20} MiB", path, hint)
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{what} cannot be read: {error.strerror}", path, "check the file's permissions") from None
    return parse_object(raw, path, what, unique=unique, hint=hint)
