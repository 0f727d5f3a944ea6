"""Reading ahead on the shipped model: how good the guesses are, and what they save on disks of several speeds.

    python -m tests.bench.prefetch [--caps 4,6,8,12] [--disks 0,2000,500,100] [--texts 6] [--tokens 120]

Each text of the evaluation set is fed token by token, as in decoding, to three engines in turn: reading ahead off, on
and auto. What makes disks differ is a delay: reads queue for a disk of so many MB/s (0: no delay, the page cache) with
0.1 ms a read besides. Nano computes 0.4 ms a token in 12 layers, so 500 MB/s are to it what a fast SSD is to a model of
a hundred times its size, and at 100 MB/s nothing but the disk counts. Reported for every cap and disk, tokens behind
the first quarter: tokens per second (of the median token), bytes and misses a token, the share of guesses used; and
once, over all, the share used by rank, one and two layers ahead. Wants a quiet machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch

import numpy as np

from coli.engine import Engine
from coli.experts.reader import ExpertReader
from coli.models.find import NANO
from coli.settings import load

MODES = ("off", "on", "auto")
LATENCY = 1e-4


@contextmanager
def disk(rate: float) -> Iterator[None]:
    """Experts come from a disk of `rate` bytes a second, one read behind the other; 0: as fast as they do."""
    real, lock, free = ExpertReader.read, Lock(), [0.0]

    def read(self: ExpertReader, path: Path, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            free[0] = max(free[0], time.perf_counter()) + sum(buffer.nbytes for buffer in buffers) / rate
            until = free[0] + LATENCY
        nbytes = real(self, path, buffers, offset)
        time.sleep(max(0.0, until - time.perf_counter()))
        return nbytes

    with patch.object(ExpertReader, "read", read) if rate else ExitStack():
        yield


class Arm:
    """One engine and what it took so far."""

    def __init__(self, mode: str, cap: int, threads: int, opened: ExitStack) -> None:
        flags = {"threads": threads, "cap": cap, "prefetch": mode, "mtp": False, "warm_start": False,
                 "usage_save": False, "ctx": 512}  # fmt: skip
        self.engine = opened.enter_context(Engine.open(load(flags, {})[0]))
        self.state = self.engine.model.new_state()
        self.seconds: list[float] = []  # of each token
        self.before = self.counts()

    def counts(self) -> np.ndarray:
        s = self.engine.store
        return np.array([s.bytes_read, s.misses, s.prefetched, s.prefetch_used])

    def run(self, ids: Sequence[int], count: bool) -> bytes:
        """Feed a text; the bytes of its last logits."""
        self.state.reset()
        seconds = []
        for token in ids:
            start = time.perf_counter()
            answer = self.engine.model.forward([token], self.state)
            seconds.append(time.perf_counter() - start)
        if count:
            self.seconds += seconds
        else:
            self.before = self.counts()
        return answer.logits.tobytes()

    def result(self) -> dict[str, float]:
        nbytes, misses, prefetched, used = (self.counts() - self.before).tolist()
        tokens = len(self.seconds)
        return {
            "tok_s": round(1 / statistics.median(self.seconds), 1), "mb_per_token": round(nbytes / tokens / 1e6, 3),
            "misses_per_token": round(misses / tokens, 2), "ahead_per_token": round(prefetched / tokens, 2),
            "used": round(used / prefetched, 3) if prefetched else 0.0,
        }  # fmt: skip


def compare(texts: list[list[int]], cap: int, rate: float, threads: int) -> tuple[dict[str, Any], np.ndarray]:
    """(what each mode took, guesses asked and used of mode `on`, by layers ahead and rank)."""
    with ExitStack() as opened, disk(rate):
        arms = {mode: Arm(mode, cap, threads, opened) for mode in MODES}
        for number, ids in enumerate(texts):
            last = {arm.run(ids, 4 * number >= len(texts)) for arm in arms.values()}
            assert len(last) == 1, "reading ahead changed the logits"
        score = arms["on"].engine.model.prefetch.score
        return {mode: arm.result() for mode, arm in arms.items()}, np.stack([score.asked, score.used])


def run(caps: Sequence[int], disks: Sequence[float], texts: int, tokens: int, threads: int) -> dict[str, Any]:
    lines = (NANO / "eval_chat.jsonl").read_text().splitlines()
    with Engine.open(load({"threads": 1, "usage_save": False}, {})[0]) as engine:
        encoded = [engine.tokenizer.encode(json.loads(line)["text"])[:tokens] for line in lines[:texts]]
    found: dict[str, Any] = {"tokens": sum(map(len, encoded)), "runs": []}
    total = np.zeros(())
    for cap in caps:
        for rate in disks:
            result, score = compare(encoded, cap, 1e6 * rate, threads)
            found["runs"].append({"cap": cap, "disk_mb_s": rate} | result)
            print(json.dumps(found["runs"][-1]), flush=True)
            total = total + score
    asked, used = total
    found["used_by_rank"] = np.round(used / np.maximum(1, asked), 3).tolist()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caps", default="4,6,8,12")
    parser.add_argument("--disks", default="0,2000,500,100")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    caps, disks = ([float(part) for part in text.split(",")] for text in (args.caps, args.disks))
    print(json.dumps(run([int(cap) for cap in caps], disks, args.texts, args.tokens, args.threads)))


if __name__ == "__main__":
    main()
