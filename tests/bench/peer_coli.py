"""coli's half of a round beside llama.cpp: `python -m tests.bench.peer_coli FILE [--threads 2] [--chunk 512]`.

Opens a checkpoint as `coli run` does, reads every expert into memory, warms up, and times what llama-bench times, on
tokens drawn at random, an own one for every row:
    decode    32 tokens, one forward each, on an empty sequence
    verify    1..6 rows as a verify runs them: logits of all rows, undoable, and all kept; the sizes in turn, on a
              sequence of a few dozen tokens, so that there is a verify before to settle
    rows      1..6 rows as llama-bench runs them: logits of the last row only, nothing to undo
    prefill   512 tokens on an empty sequence
Each is the median of its repeats, in seconds. `text` is how the model goes on after PROMPT, the likeliest token each
time, in hex. The one line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from coli.engine import Engine
from coli.settings import load
from coli.tokenizer import Tokenizer
from tests.bench.peer import DECODE, PREFILL, PROMPT, SIZES, WORDS

READ = 32  # experts read together


class Bench:
    """Forwards of random tokens on one sequence."""

    def __init__(self, engine: Engine) -> None:
        self.model, self.vocab = engine.model, engine.geometry.vocab
        self.state, self.rng = engine.model.new_state(), np.random.default_rng(3)

    def verify(self, rows: int) -> float:
        def run(ids: np.ndarray) -> None:
            self.model.forward(ids, self.state, want="all", undoable=True)
            self.state.keep(rows)

        return self._seconds(run, rows)

    def piece(self, rows: int) -> float:
        return self._seconds(lambda ids: self.model.forward(ids, self.state), rows)

    def decode(self) -> float:
        """Seconds of DECODE tokens."""
        self.state.reset()
        return sum(self.piece(1) for _ in range(DECODE))

    def prefill(self) -> float:
        self.state.reset()
        return self.piece(PREFILL)

    def sizes(self, timed: Callable[[int], float], repeats: int) -> list[float]:
        """Median seconds of every size."""
        seconds: dict[int, list[float]] = {rows: [] for rows in SIZES}
        for repeat in range(repeats):
            self.state.reset()
            timed(2)
            for rows in list(SIZES)[:: -1 if repeat % 2 else 1]:
                seconds[rows].append(timed(rows))
        return [statistics.median(seconds[rows]) for rows in SIZES]

    def text(self, tokenizer: Tokenizer) -> bytes:
        """The WORDS likeliest tokens after PROMPT."""
        self.state.reset()
        ids, out = tokenizer.encode(PROMPT), b""
        for _ in range(WORDS):
            ids = [int(self.model.forward(ids, self.state).logits[-1].argmax())]
            out += tokenizer.token_bytes(ids[0])
        return out

    def _seconds(self, run: Callable[[np.ndarray], Any], rows: int) -> float:
        ids = self.rng.integers(0, self.vocab, rows)
        start = time.perf_counter()
        run(ids)
        return time.perf_counter() - start


def measure(engine: Engine, repeats: int) -> dict[str, Any]:
    experts = engine.geometry.experts
    for layer in range(engine.geometry.layers):
        for first in range(0, experts, READ):
            engine.store.ensure(layer, range(first, min(first + READ, experts)))
    bench, missed = Bench(engine), engine.store.misses
    bench.decode(), bench.sizes(bench.verify, 2), bench.prefill()  # the pages of every buffer are there from here on
    slow = max(2, repeats // 8)
    found = {
        "decode": statistics.median(bench.decode() for _ in range(slow)),
        "verify": bench.sizes(bench.verify, repeats),
        "rows": bench.sizes(bench.piece, repeats),
        "prefill": statistics.median(bench.prefill() for _ in range(slow)),
        "text": bench.text(engine.tokenizer).hex(),
    }
    if engine.store.misses > missed:
        raise SystemExit(f"{engine.cap} of {experts} experts a layer fit: {engine.store.misses} misses")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens computed together")
    parser.add_argument("--repeats", type=int, default=24)
    args = parser.parse_args()
    flags = {"model": args.file, "threads": args.threads, "ctx": 1024, "prefill_chunk": args.chunk}
    with Engine.open(load(flags, {})[0]) as engine:
        found = measure(engine, args.repeats) | {"load": round(engine.load_s, 2), "cap": engine.cap}
        found["rss"] = psutil.Process().memory_info().rss
    print(json.dumps(found))


if __name__ == "__main__":
    main()
