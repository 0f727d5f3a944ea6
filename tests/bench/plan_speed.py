"""Seconds of `coli plan` on a checkpoint of 185 GB: 130 shards, 65,000 tensors, of which only headers are written.

    python -m tests.bench.plan_speed [FOLDER] [--release] [--runs 5]

The checkpoint is Qwen3.8-Flash-Next FP8 with experts one by one, 20 layers of experts 2.4 times as wide, which is as
many bytes as the release with fewer names; `--release` writes the release's own 48 layers and 150,000 names. All else
is real: shapes, scales, the n-gram table, the head, the index. Files are holes but for headers and hash constants.
Timed is the whole process, from start to exit: without a header cache with the checkpoint's files in the page cache
(`warm`) and out of it (`cold`; Python's own files stay), and with the header cache: medians, the worst of each, and
what of it was spent on a CPU, which is what another process beside it adds little to. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from coli.formats.imagined import imagine
from coli.models.families import family_of
from coli.models.qwen38_layout import constants
from coli.models.qwen38_layout import geometry as geometry_of
from tests.tiny import ITEM, header_bytes

CONFIG = Path(__file__).parents[1] / "configs" / "qwen3.8-flash-next-fp8.json"
SHARDS = 130
BARS = {"cold_s": 1.5, "warm_s": 1.5, "cached_s": 0.4}


def write_sparse(folder: Path, release: bool = False) -> tuple[int, int]:
    """Write the checkpoint; (tensors, bytes that the files claim)."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads(CONFIG.read_text())
    if not release:
        text = raw["text_config"]
        text |= {"num_hidden_layers": 20, "layer_types": text["layer_types"][:20], "moe_intermediate_size": 1536}
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    specs = _specs(folder)
    total = sum(nbytes for _, _, nbytes in specs.values())
    numbers = constants(geometry_of(raw["text_config"]))
    placed: dict[str, str] = {}
    for shard, names in _shards(specs, total):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        head, offsets = header_bytes({_name(name): specs[name][:2] for name in names})
        with open(folder / file, "wb") as handle:
            handle.write(head)
            for name in names:
                if name in numbers:
                    handle.seek(offsets[_name(name)])
                    handle.write(np.ascontiguousarray(numbers[name]).tobytes())
            handle.truncate(len(head) + sum(specs[name][2] for name in names))
        placed |= dict.fromkeys(map(_name, names), file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1)
    )
    return len(specs), total


def _specs(folder: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """name -> (dtype, shape, bytes) of every tensor of the config in `folder`, experts one by one."""
    checkpoint = imagine(folder)
    g = family_of(checkpoint).geometry(checkpoint.config, checkpoint.config_path)
    inter, hidden = g.moe_inter, g.hidden
    parts = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".mlp.experts." not in name:
            found[name] = tensor.dtype, tensor.shape
        elif name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for expert in range(g.experts):
                for part, (n, k) in parts.items():
                    found[f"{stem}{expert}.{part}.weight"] = "F8_E4M3", (n, k)
                    found[f"{stem}{expert}.{part}.weight_scale_inv"] = "BF16", (n // 128, k // 128)
    return {name: (*spec, int(np.prod(spec[1], dtype=object)) * ITEM[spec[0]]) for name, spec in found.items()}


def _shards(specs: dict[str, Any], total: int) -> Iterator[tuple[int, list[str]]]:
    """SHARDS runs of names of about as many bytes each."""
    ends = np.cumsum([nbytes for _, _, nbytes in specs.values()])
    numbers = np.minimum((ends - 1) * SHARDS // total, SHARDS - 1)
    for shard, run in groupby(zip(numbers.tolist(), specs, strict=True), key=lambda item: item[0]):
        yield shard, [name for _, name in run]


def _name(name: str) -> str:
    return name if name.startswith(("lm_head.", "mtp.")) else f"model.language_model.{name}"


def forget(folder: Path) -> None:
    """Put the checkpoint's files out of the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(folder: Path, cache: Path) -> tuple[float, float]:
    """(seconds, of them on a CPU) of one process, which must succeed."""
    command = [str(Path(sys.executable).with_name("coli")), "plan", str(folder), "--ram", "64"]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"COLI_CACHE": str(cache)})
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(folder: Path, release: bool, runs: int) -> dict[str, Any]:
    tensors, nbytes = write_sparse(folder, release)
    cache = folder.with_name(f"{folder.name}-cache")
    times: dict[str, list[tuple[float, float]]] = {"cold_s": [], "warm_s": [], "cached_s": []}
    try:
        seconds(folder, cache)  # Python's files are in the page cache from here on
        for _ in range(runs):
            for kind in times:
                if kind != "cached_s":
                    shutil.rmtree(cache / "headers", ignore_errors=True)
                if kind == "cold_s":
                    forget(folder)
                times[kind].append(seconds(folder, cache))
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    found: dict[str, Any] = {"tensors": tensors, "gigabytes": round(nbytes / 1e9, 1), "shards": SHARDS}
    for kind, values in times.items():
        found[kind] = round(statistics.median(took for took, _ in values), 3)
        found[kind.replace("_s", "_worst_s")] = round(max(took for took, _ in values), 3)
        found[kind.replace("_s", "_cpu_s")] = round(statistics.median(cpu for _, cpu in values), 3)
    return found | ({} if release else {"met": all(found[kind] <= bar for kind, bar in BARS.items())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--release", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coli-plan-") as temporary:
        found = run(args.folder or Path(temporary) / "model", args.release, args.runs)
    print(json.dumps(found))
    sys.exit(not found["met"])


if __name__ == "__main__":
    main()
