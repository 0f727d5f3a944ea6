"""What the numbers belong to: machine, versions, weights, settings, and how busy the machine was.

The weights are named by a SHA-256 over config.json and the headers of the safetensors files, or over those of a GGUF
(names, shapes, types and offsets, not the data): it tells two checkpoints of other geometry or format apart in no time,
not two trainings of one model.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from coli.formats.checkpoint import Checkpoint
from coli.program.cpu import usable_cpus
from coli.settings import TABLE, Settings

if TYPE_CHECKING:
    from coli.engine import Engine

_PACKAGES = ("coli", "numpy", "numba", "llvmlite")


def environment(engine: Engine, settings: Settings) -> dict[str, Any]:
    """The block as JSON values. `settings` are the user's, for this engine; `load` is the load average over 1, 5 and 15
    minutes."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": {"physical": psutil.cpu_count(logical=False), "logical": psutil.cpu_count(), "usable": usable_cpus()},
        "threads": engine.threads,
        "memory_bytes": psutil.virtual_memory().total,
        "load": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "model": {
            "name": engine.model_path.name, "engine": engine.name, "sha256": fingerprint(engine.model_path),
            "experts_in_memory": engine.cap, "context": engine.ctx,
        },
        "settings": given(settings),
    }  # fmt: skip


def lines(block: dict[str, Any]) -> list[str]:
    """The block for a person."""
    cores, model = block["cores"], block["model"]
    versions = ", ".join(f"{name} {number}" for name, number in block["versions"].items())
    load = " ".join(f"{value:.2f}" for value in block["load"])
    rows = {
        "model": f"{model['name']} ({model['engine']}), headers {model['sha256'][:12]}, "
                 f"{model['experts_in_memory']} experts a layer in memory, context {model['context']:,}",
        "machine": f"{block['cpu']}, {cores['physical']} cores ({cores['usable']} CPUs usable), {block['system']}",
        "run": f"{block['threads']} threads, load {load}, {block['date']}",
        "versions": versions,
        "settings": " ".join(f"{name}={value}" for name, value in block["settings"].items()),
    }  # fmt: skip
    return [f"{name}: {text}" for name, text in rows.items() if text]


def given(settings: Settings) -> dict[str, str]:
    """The settings that a flag or a variable set, by the variable's name; `settings` are an engine's."""
    chosen = {name: getattr(settings, name) for name in TABLE if settings.origin(name) != "default"}
    rows = {name: settings.row(name) for name, value in chosen.items() if value is not None}
    return {row.name: row.kind.show(chosen[name]) for name, row in rows.items() if row.serves(settings.engine)}


def cpu_model(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, as the system gives it."""
    try:
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def fingerprint(model: Path) -> str:
    """SHA-256 in hex over config.json and every safetensors header, or the headers of every part of a GGUF file, each
    behind its file name and length."""
    digest = hashlib.sha256()
    for path, data in _gguf_headers(model) if model.is_file() else _folder_headers(model):
        digest.update(f"{path.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _folder_headers(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """config.json, and of every safetensors file the JSON text behind the 8 bytes that hold its length; the open
    checked it."""
    yield folder / "config.json", (folder / "config.json").read_bytes()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            yield path, file.read(int.from_bytes(file.read(8), "little"))


def _gguf_headers(model: Path) -> Iterator[tuple[Path, bytes]]:
    """Of every part what stands before its first tensor's data."""
    ends: dict[Path, int] = {}
    with Checkpoint.open(model) as checkpoint:
        for tensor in checkpoint.tensors.values():
            ends[tensor.path] = min(tensor.offset, ends.get(tensor.path, tensor.offset))
    for path, end in sorted(ends.items()):
        with open(path, "rb") as file:
            yield path, file.read(end)
