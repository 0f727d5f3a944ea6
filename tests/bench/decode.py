"""A full decode step of a generated model with Qwen3.8-Flash-Next's real per-layer geometry, against the memory's rate.

    python -m tests.bench.decode [--folder DIR] [--layers 4] [--threads 2] [--rival] [--trunk-int8]

Writes the checkpoint once (3 GB on disk, experts sparse; --folder keeps it), makes every expert resident, then times
single-token steps and reports bytes per second of what a step must touch: all dense weights but the embedding, the
chosen experts, and the DeltaNet states read and written. `--rival` adds the rate beside a process that burns one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from coli import memory
from coli.engine import Engine
from coli.settings import load
from tests.bench import gemv
from tests.big_checkpoint import write_real_geometry


def step_bytes(engine: Engine) -> int:
    """Bytes one decode step has to move through memory."""
    g = engine.geometry
    experts = g.top_k * engine.store.record_bytes()
    return engine.weights.nbytes + experts + 2 * engine.model.spec.recurrent_bytes()


def everything_resident(engine: Engine) -> None:
    for layer in range(engine.geometry.layers):
        for first in range(0, engine.geometry.experts, 32):
            engine.store.ensure(layer, range(first, min(first + 32, engine.geometry.experts)))


def steps_per_second(engine: Engine, steps: int, seed: int) -> float:
    """Median over `steps` single tokens on a fresh state."""
    state, ids = engine.model.new_state(), np.random.default_rng(seed).integers(0, engine.geometry.vocab, steps + 3)
    seconds = []
    for token in ids:
        start = time.perf_counter()
        engine.model.forward([token], state)
        seconds.append(time.perf_counter() - start)
    return 1 / statistics.median(seconds[3:])


def run(
    folder: Path, layers: int = 4, threads: int = 2, rival: bool = False, trunk_int8: bool = False, steps: int = 40
) -> dict:
    if not (folder / "config.json").exists():
        write_real_geometry(folder, layers=layers)
    before = psutil.Process().memory_info().rss
    flags = {"model": str(folder), "threads": threads, "ctx": 512, "prefill_chunk": 16}
    flags["trunk"] = "int8" if trunk_int8 else "stored"
    with Engine.open(load(flags, {})[0]) as engine:
        everything_resident(engine)
        team, pool = gemv.Team(threads), gemv.make_pool()
        pool[:] = 1
        rates, ceilings = [], []
        for turn in range(5):
            ceilings.append(gemv.read_ceiling(team, pool))
            rates.append(steps_per_second(engine, steps // 5, turn))
        rate, ceiling = statistics.median(rates), statistics.median(ceilings)
        moved = step_bytes(engine)
        out = {
            "layers": layers, "threads": threads, "trunk_int8": trunk_int8, "cap": engine.cap,
            "steps_per_s": round(rate, 2), "step_gb": round(moved / 1e9, 3),
            "gb_per_s": round(moved * rate / 1e9, 2), "ceiling_gb_per_s": round(ceiling / 1e9, 2),
            "of_ceiling": round(moved * rate / ceiling, 3), "misses": engine.store.misses,
            "rss_gb": round((psutil.Process().memory_info().rss - before) / 1e9, 2),
            "plan_gb": round((engine.terms.total - memory.PROCESS + engine.store.nbytes + pool.nbytes) / 1e9, 2),
        }
        if rival:
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                time.sleep(0.5)
                out["beside_rival"] = round(steps_per_second(engine, steps, 9) / rate, 3)
            finally:
                burner.kill()
                burner.wait()
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--trunk-int8", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coli-bench-") as temporary:
        folder = args.folder or Path(temporary)
        print(json.dumps(run(folder, args.layers, args.threads, args.rival, args.trunk_int8)))


if __name__ == "__main__":
    main()
