"""`coli serve` under load, on nano: 32 clients for a minute against one client, and /metrics against both.

    python -m tests.bench.serve_load [--clients 32] [--seconds 60] [--slots 1]

A client asks for one streamed answer after the other, sampled, each to another prompt, on a connection of its own; told
429 it waits as long as Retry-After says. One client alone is measured half as long before and after the load.
Clients and server share the machine's two cores: the clients are one process, which reads an answer's frames once it is
there. The bars:
    errors       none but 429; every answer whole
    throughput   tokens a second of all clients at least 0.9 of the one client's
    counts       /metrics counted what the clients got: turns by finish reason, prompt, cached and answer tokens; and
                 the identities of tests/server/scrape.py hold
    times        mean time to the first token, and from the first to the last of an answer, as the clients saw them:
                 within a tenth or 15 ms (a stream is written every 20 ms); the median time to the first token lies in
                 the bucket of the server's median or in the one beside it
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.serve_client import Answer, Client
from tests.server.live import live
from tests.server.scrape import Scrape, broken

BAR, WITHIN, SLACK_S = 0.9, 0.1, 0.015
MOST = 160  # tokens of an answer
NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Irene", "Jonas", "Lucy", "Max", "Nina")
ANIMALS = ("fox", "bear", "owl", "goose", "rabbit", "squirrel", "duck", "hedgehog", "mouse", "cat", "horse", "wolf")
FORMS = ("Tell me a story about {} the {}.", "Write a short story about {} the {}.")


def prompts(seed: int) -> Iterator[tuple[int, str]]:
    """(seed of the answer, prompt) without an end."""
    rng = random.Random(seed)
    while True:
        text = rng.choice(FORMS).format(rng.choice(NAMES), rng.choice(ANIMALS))
        yield rng.randrange(1 << 30), text


async def one_client(port: int, seed: int, until: float, answers: list[Answer]) -> None:
    """Ask until then; the answers that began before are waited for."""
    async with Client(port) as client:
        for number, prompt in prompts(seed):
            while time.perf_counter() < until:
                answer = await client.chat(
                    model="nano", messages=[{"role": "user", "content": prompt}], seed=number, max_tokens=MOST,
                    stream=True, stream_options={"include_usage": True},
                )  # fmt: skip
                answers.append(answer)
                if answer.status != 429:
                    break
                await asyncio.sleep(answer.retry_after_s)
            if time.perf_counter() >= until:
                return


@dataclass(frozen=True)
class Phase:
    """What clients got in some time, and what /metrics counted meanwhile."""

    seconds: float
    answers: Sequence[Answer]
    counted: Scrape

    @property
    def served(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 200]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.served)

    @property
    def cpu_s(self) -> float:
        """Processor time of the server, which tells its own work from that of others on the machine."""
        return self.counted.samples["process_cpu_seconds_total", frozenset()]

    @property
    def tok_s(self) -> float:
        """Tokens a second, of answers that were whole before the time was over, and of what the others had by then."""
        end = min(answer.sent for answer in self.answers) + self.seconds
        return sum(_until(answer, end) for answer in self.served) / self.seconds


def _until(answer: Answer, end: float) -> float:
    """How many of an answer's tokens came before `end`, as if they came evenly."""
    first, last = answer.sent + answer.first_s, answer.sent + answer.last_s
    if last <= end:
        return answer.tokens
    return answer.tokens * max(0.0, end - first) / (last - first)


async def phase(port: int, clients: int, seconds: float, seeds: Iterator[int]) -> Phase:
    before = await scraped(port)
    answers: list[Answer] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(one_client(port, next(seeds), until, answers) for _ in range(clients)))
    return Phase(seconds, answers, await scraped(port) - before)


async def scraped(port: int) -> Scrape:
    async with Client(port) as client:
        return Scrape.of((await client.get("/metrics")).decode())


def count_faults(phase: Phase) -> list[str]:
    """What is wrong with the answers, and what /metrics counted otherwise than the clients."""
    served, seen = phase.served, phase.counted
    found = [answer.error for answer in phase.answers if answer.status != 429 and answer.error]
    reasons = Counter(answer.finish_reason for answer in served)
    counts = {
        **{f"turns that ended by {reason}": (seen("request_success_total", finished_reason=reason), reasons[reason])
           for reason in ("stop", "length", "cancelled", "error")},
        "prompt tokens": (seen("prompt_tokens_total"), sum(answer.prompt_tokens for answer in served)),
        "cached tokens": (seen("prefix_cache_hits_total"), sum(answer.cached_tokens for answer in served)),
        "answer tokens": (seen("generation_tokens_total"), phase.tokens),
        "first tokens": (seen("time_to_first_token_seconds_count"), len(served)),
    }  # fmt: skip
    found += [f"{words}: {counted:g} counted, {got} seen" for words, (counted, got) in counts.items() if counted != got]
    return found + [f"does not hold: {text}" for text in broken(seen)]


def time_faults(phase: Phase) -> list[str]:
    """Where the times of /metrics are not the clients'."""
    found = [f"{words}: {_ms(counted)} ms counted, {_ms(got)} ms seen" for words, counted, got in times(phase)
             if abs(counted - got) > max(WITHIN * got, SLACK_S)]  # fmt: skip
    return found + median_fault(phase)


def times(phase: Phase) -> list[tuple[str, float, float]]:
    """(what, the server's mean, the clients') in seconds."""
    served, seen = phase.served, phase.counted
    return [
        ("first token", seen.mean("time_to_first_token"), statistics.fmean(answer.first_s for answer in served)),
        ("first to last token", seen("inter_token_latency_seconds_sum") / len(served),
         statistics.fmean(answer.decode_s for answer in served)),
    ]  # fmt: skip


def median_fault(phase: Phase) -> list[str]:
    seen, name = statistics.median(answer.first_s for answer in phase.served), "time_to_first_token"
    ends = [0.0, *(end for end, _ in phase.counted.buckets(name))]
    at = ends.index(phase.counted.quantile(name, 0.5)[0])
    low, high = ends[max(0, at - 1)], ends[min(len(ends) - 1, at + 2)]
    return [] if low <= seen <= high else [f"median first token: {seen * 1e3:.1f} ms seen, not in {low}..{high} s"]


async def measure(port: int, clients: int, seconds: float) -> tuple[list[Phase], Phase]:
    """(one client before and after, all of them)."""
    seeds = itertools.count(1)
    await phase(port, 1, min(2.0, seconds), seeds)  # warms up
    before = await phase(port, 1, seconds / 2, seeds)
    load = await phase(port, clients, seconds, seeds)
    return [before, await phase(port, 1, seconds / 2, seeds)], load


def told(phase: Phase) -> dict[str, Any]:
    statuses = Counter(answer.status for answer in phase.answers)
    firsts = sorted(answer.first_s for answer in phase.served)
    return {
        "tok_s": round(phase.tok_s, 1), "server_cpu_us_per_token": round(phase.cpu_s / phase.tokens * 1e6),
        "answers": len(phase.served), "refused": statuses[429],
        "first_token_ms": {"p50": _ms(statistics.median(firsts)), "p99": _ms(firsts[len(firsts) * 99 // 100])},
        "means_ms": {words: {"server": _ms(counted), "clients": _ms(got)} for words, counted, got in times(phase)},
    }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def run(clients: int, seconds: float, slots: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="coli-load-") as folder, \
            live(Path(folder), "--slots", str(slots), "--model-id", "nano") as server:  # fmt: skip
        single, load = asyncio.run(measure(server.port, clients, seconds))
    alone = statistics.fmean(phase.tok_s for phase in single)
    wrong = {name: found[:20] for name, phase in (("before", single[0]), ("load", load), ("after", single[1]))
             if (found := count_faults(phase) + time_faults(phase))}  # fmt: skip
    ratio = load.tok_s / alone
    return {
        "clients": clients, "seconds": seconds, "slots": slots, "one": [told(phase) for phase in single],
        "load": told(load), "ratio": round(ratio, 3), "bar": BAR, "wrong": wrong, "ok": ratio >= BAR and not wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--slots", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(run(args.clients, args.seconds, args.slots)))


if __name__ == "__main__":
    main()
