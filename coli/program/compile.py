"""Compile kernels with Numba and keep their object code: `python -m coli.program.compile FOLDER NAME...`.

Runs as a process of its own, so that a running engine never imports Numba (0.5 s and 100 MB it would keep), and so
that several can share the work. For each name it writes `FOLDER/NAME.ko` by rename, and prints the name when done.

File: one JSON line {"symbol", "sha256"}, then the object code. The object is taken from Numba's private
`_get_compiled_object`; pyproject pins the Numba versions this was tested with (tests/program/test_cache.py).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODULES = ("threads", "dispatch", "norm", "streams", "deltanet", "attention", "moe", "ple", "linear", "draft")


_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe")  # ELF, Mach-O


def tile_names() -> list[str]:
    """The tiles that `coli warmup` compiles: all but those of block-quantised kinds, of which a file uses a few out of
    many. They are compiled when such a file is opened first."""
    from coli.kernels.packing import LISTED_KINDS, TILE_KINDS, tile_name, tile_rows

    return [tile_name(kind, rows) for kind in TILE_KINDS + LISTED_KINDS for rows in tile_rows(kind)]


def signatures(tiles: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Name -> (Numba signature, Python function) of these tiles and of every kernel that is none."""
    from numba import types

    from coli.kernels.tiles import tile

    i64 = types.int64
    shapes = {"KERNELS": types.void(i64, i64, i64), "ENTRIES": i64(i64, i64)}
    gemv = types.void(*[i64] * 10)
    parts = [name.removeprefix("tile_").rsplit("_", 1) for name in tiles]
    found: dict[str, tuple[Any, Any]] = {
        name: (gemv, tile(kind, int(rows))) for name, (kind, rows) in zip(tiles, parts, strict=True)
    }
    for module in MODULES:
        content = importlib.import_module(f"coli.kernels.{module}")
        for table, signature in shapes.items():
            for name, function in getattr(content, table, {}).items():
                found[name] = (signature, function)
    return found


def build(name: str, table: dict[str, tuple[Any, Any]]) -> tuple[str, bytes]:
    """-> (symbol, object code) of one kernel.

    `forceinline` lets LLVM see that the kernel never raises and drop the error path, whose symbols of Numba's runtime
    nobody could resolve in a process without Numba."""
    from numba import cfunc

    signature, function = table[name]
    compiled: Any = cfunc(signature, error_model="numpy", forceinline=True)(function)
    return compiled._wrapper_name, compiled._library._get_compiled_object()


def write(folder: Path, name: str, symbol: str, code: bytes) -> None:
    head = json.dumps({"symbol": symbol, "sha256": hashlib.sha256(code).hexdigest()})
    part = folder / f"{name}.{os.getpid()}.part"
    part.write_bytes(head.encode() + b"\n" + code)
    os.replace(part, folder / f"{name}.ko")


def read(path: Path) -> tuple[str, bytes] | None:
    """The (symbol, object code) in a cache file; None when it is absent or damaged (then it is made again)."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        entry = json.loads(head)
        whole = hashlib.sha256(code).hexdigest() == entry["sha256"] and code[:4] in _MAGIC
        return (str(entry["symbol"]), code) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main(folder: str, names: list[str]) -> None:
    table = signatures([name for name in names if name.startswith("tile_")])
    for name in names:
        write(Path(folder), name, *build(name, table))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
