"""What a pick costs the prompt lookup with 32,000 tokens behind it, against the 0.2 % of a decode step it may take.

    python -m tests.bench.lookup

A push and a proposal per pick, timed one by one over 4,000 picks, on three histories: tokens that never repeat (every
n-gram is new: the index grows the most), words of a small vocabulary (a match nearly always), and one token repeated.
The bar is 0.2 % of a real model's decode step; the fastest we know of takes 50 ms.
"""

from __future__ import annotations

import json
import random
import statistics
import time

from coli.speculation.lookup import Lookup

HISTORY, PICKS, DRAFTS = 32_000, 4_000, 5
STEP_S, SHARE = 0.050, 0.002


def texts() -> dict[str, list[int]]:
    rng = random.Random(0)
    size = HISTORY + PICKS
    return {
        "unrepeated": [rng.randrange(248_320) for _ in range(size)],
        "prose": [min(int(rng.paretovariate(0.7)), 5_000) for _ in range(size)],
        "periodic": [7] * size,
    }


def cost(text: list[int]) -> dict[str, float]:
    """Milliseconds for the history, microseconds of a pick: the median and the one in a hundred."""
    clock = time.perf_counter
    start = clock()
    lookup = Lookup(text[:HISTORY])
    built = clock() - start
    times = []
    for token in text[HISTORY:]:
        start = clock()
        lookup.push(token)
        lookup.propose(DRAFTS)
        times.append(clock() - start)
    times.sort()
    return {
        "history_ms": round(built * 1e3, 2),
        "pick_us": round(statistics.median(times) * 1e6, 2),
        "pick_p99_us": round(times[len(times) * 99 // 100] * 1e6, 2),
    }


def run() -> dict:
    found: dict = {name: cost(text) for name, text in texts().items()}
    worst = max(row["pick_p99_us"] for row in found.values())
    return found | {"allowed_us": round(STEP_S * SHARE * 1e6, 1), "ok": worst < STEP_S * SHARE * 1e6}


if __name__ == "__main__":
    print(json.dumps(run()))
