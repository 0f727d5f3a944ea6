"""Decode from disk: bytes of experts read per second against what the disk gives for reads of the same size.

    python -m tests.bench.streaming [--folder DIR] [--rounds 5] [--steps 24] [--threads 2] [--layers 12] [--experts 64]
                                    [--cap 12] [--prefetch auto|on|off] [--arms direct dropped "direct, trunk int8"]

Writes once (--folder keeps it) a checkpoint with Qwen3.8-Flash-Next's real geometry per layer in FP8, cut to 12 layers
of 64 experts, with a small vocabulary (the output head is a twelfth of a whole model's step, but would be most of this
one's) and no n-gram table: 5.7 GB. Its embeddings are 16 times larger than the rest, so that a layer changes the
streams as little as a trained one does: four in five experts read ahead are used, as with nano (86 in 100). Few slots a
layer, so a step reads most of what it needs; the page cache is emptied before each measurement and holds nothing of the
experts during it. Three arms: direct reads, which is what --page-cache drop and auto come to where the file system has
them; reads that are dropped afterwards, where it has none; and direct reads beside a trunk in int8, which computes for
a shorter time between them. Wants a quiet machine: a rival for the CPUs costs decode far more than plain reads.

The bar: rate of decode, by the clock of whole steps, over the best of four kinds of plain reads, each the median of
measurements in between: records in file order and in random order, with the kernel's reading ahead and without it, by
as many threads as the engine reads with, into memory of their own. `useful` leaves out what was read ahead in vain.
`reading` is the rate while a read is under way, over the same. Three shares of the time say where steps wait: a read
under way, kernels running, and neither (Python's). The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import numpy as np

from coli.engine import Engine
from coli.experts import reader as expert_reader
from coli.experts.page_cache import cached, declare_random, drop
from coli.formats.checkpoint import Checkpoint
from coli.formats.readers import reading_threads
from coli.settings import load
from tests.big_checkpoint import write_real_geometry

GEOMETRY = dict(vocab_size=4096, eos_token_id=4000, ple_layer_ids=[])
SECTOR, HUGE = 4096, 2 << 20
BAR = 0.85  # of the best plain reads
Record = tuple[Path, int, int]


def emptied(files: Sequence[Path]) -> None:
    """Nothing of these files is in the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        drop(fd, 0, os.fstat(fd).st_size)
        os.close(fd)


def records(engine: Engine) -> list[Record]:
    """(file, offset, bytes) of every expert's codes, in file order."""
    found = []
    for layer in engine.plan.survey.experts.layers:
        for expert in range(engine.geometry.experts):
            pieces = [located.codes(expert) for located in layer.located]
            first = min(pieces, key=lambda piece: piece.place)
            found.append((first.tensor.path, first.tensor.offset + first.start, sum(p.nbytes for p in pieces)))
    return sorted(found)


def huge(nbytes: int) -> memoryview:
    """Memory in huge pages, where there are some: what a disk likes best to read into."""
    memory = mmap.mmap(-1, nbytes + HUGE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE
    array[start : start + nbytes] = 1
    return memoryview(array[start : start + nbytes])


def steady(folder: Path) -> None:
    """Multiply the embeddings by 16: bfloat16's exponent is in bits 7 to 14."""
    with Checkpoint.open(folder) as checkpoint:
        tensor = checkpoint["embed_tokens.weight"]
        larger = checkpoint.load(tensor).view(np.uint16) + np.uint16(4 << 7)
    with open(tensor.path, "r+b") as file:
        file.seek(tensor.offset)
        file.write(larger.tobytes())


class Plain:
    """Reads of records by some threads, as a disk's benchmark does them."""

    def __init__(self, wanted: Sequence[Record], threads: int) -> None:
        self.records, self.threads = wanted, threads
        self.files = sorted({path for path, _, _ in wanted})
        size = max(nbytes for _, _, nbytes in wanted) + 2 * SECTOR
        self._buffers = [huge(size) for _ in range(threads)]

    def rate(self, nbytes: int, seed: int, *, direct: bool, ahead: bool, scattered: bool) -> float:
        """Bytes a second for some `nbytes` of records, from a start that differs with `seed`."""
        emptied(self.files)
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        fds = {path: os.open(path, flags) for path in self.files}
        for fd in () if ahead else fds.values():
            declare_random(fd)
        count = min(len(self.records), max(1, nbytes // self.records[0][2]))
        rng = np.random.default_rng(seed)
        at = int(rng.integers(len(self.records)))
        order = [self.records[(at + i) % len(self.records)] for i in range(count)]
        if scattered:
            order = [self.records[i] for i in rng.choice(len(self.records), count, replace=False)]
        source, lock = iter(order), threading.Lock()

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    record = next(source, None)
                if record is None:
                    return
                path, offset, length = record
                start = offset // SECTOR * SECTOR if direct else offset
                end = -(-(offset + length) // SECTOR) * SECTOR if direct else offset + length
                got = os.preadv(fds[path], [buffer[: end - start]], start)
                assert got >= offset + length - start, "a short read"

        team = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        start = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        seconds = time.perf_counter() - start
        for fd in fds.values():
            os.close(fd)
        return sum(length for _, _, length in order) / seconds


class Clock:
    """When a read was under way and when kernels ran, within what is measured."""

    def __init__(self) -> None:
        self.reads: list[tuple[float, float]] = []
        self.kernels: list[tuple[float, float]] = []

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        preadv, play = os.preadv, engine.team.play

        def read(*args):
            start = time.perf_counter()
            try:
                return preadv(*args)
            finally:
                self.reads.append((start, time.perf_counter()))

        def played(*args):
            start = time.perf_counter()
            try:
                return play(*args)
            finally:
                self.kernels.append((start, time.perf_counter()))

        os.preadv, engine.team.play = read, played
        try:
            yield
        finally:
            os.preadv = preadv
            del engine.team.play

    def shares(self, seconds: float) -> tuple[float, float, float]:
        """(reading, computing, neither) of so many seconds; the first two may overlap."""
        either = union(self.reads + self.kernels)
        return union(self.reads) / seconds, union(self.kernels) / seconds, 1 - either / seconds


def union(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by spans that may overlap."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Decode:
    """An engine whose steps are measured."""

    def __init__(self, folder: Path, cap: int, threads: int, **flags: object) -> None:
        settings = {"model": str(folder), "cap": cap, "threads": threads, "ctx": 512, "prefill_chunk": 16, "mtp": False,
                    "usage_save": False, "warm_start": False}  # fmt: skip
        self.engine = Engine.open(load(settings | flags, {})[0])
        self.state = self.engine.model.new_state()
        self.rng = np.random.default_rng(1)
        self.stored = max(layer.stored for layer in self.engine.plan.survey.experts.layers)  # bytes of an expert

    def steps(self, count: int) -> None:
        for token in self.rng.integers(2, 4000, count):
            if self.state.length + 1 >= self.engine.ctx:
                self.state.reset()
            self.engine.model.forward([int(token)], self.state)

    def rate(self, files: Sequence[Path], count: int) -> tuple[float, float, tuple[float, float, float]]:
        """(bytes of experts read a second, those that were used, shares of the time)."""
        emptied(files)
        clock, store = Clock(), self.engine.store
        before, vain = store.bytes_read, store.prefetched - store.prefetch_used
        with clock.watching(self.engine):
            start = time.perf_counter()
            self.steps(count)
            seconds = time.perf_counter() - start
        read, vain = store.bytes_read - before, store.prefetched - store.prefetch_used - vain
        return read / seconds, (read - vain * self.stored) / seconds, clock.shares(seconds)


KINDS = [dict(scattered=scattered, ahead=ahead) for scattered in (False, True) for ahead in (False, True)]
ARMS = {"direct": {}, "dropped": {}, "direct, trunk int8": {"trunk": "int8"}}


def compare(folder: Path, arm: str, *, rounds: int, steps: int, threads: int, cap: int,
            prefetch: str) -> dict[str, object]:  # fmt: skip
    direct = arm != "dropped"
    with without_direct_reads() if not direct else nullcontext():
        decode = Decode(folder, cap, threads, prefetch=prefetch, **ARMS[arm])
    with decode.engine as engine:
        plain = Plain(records(engine), reading_threads(threads))
        decode.steps(8)
        before = engine.store.bytes_read
        decode.steps(8)
        nbytes = max(1 << 28, (engine.store.bytes_read - before) * steps // 8)
        rates: dict[str, list[float]] = {}
        decoded, useful, shares = [], [], []
        for turn, kind in itertools.product(range(rounds), KINDS[::2] if direct else KINDS):
            name = ("random order" if kind["scattered"] else "file order") + ", read ahead" * kind["ahead"]
            rates.setdefault(name, []).append(plain.rate(nbytes, turn, direct=direct, **kind) / 1e9)
            rate, used, share = decode.rate(plain.files, steps)
            decoded.append(rate / 1e9)
            useful.append(used / 1e9)
            shares.append(share)
        best = max(rates, key=lambda name: median(rates[name]))
        reading, computing, neither = (round(median(values), 3) for values in zip(*shares, strict=True))
        while_reading = median([rate / share[0] for rate, share in zip(decoded, shares, strict=True)])
        store = engine.store
        return {
            "prefetch": prefetch, "record_mb": round(plain.records[0][2] / 1e6, 3),
            "decode_gb_s": round(median(decoded), 3),
            "plain_gb_s": {name: round(median(values), 3) for name, values in rates.items()}, "best": best,
            "ratio": round(median(decoded) / median(rates[best]), 3),
            "met": median(decoded) >= BAR * median(rates[best]),
            "useful": round(median(useful) / median(rates[best]), 3),
            "reading": round(while_reading / median(rates[best]), 3),
            "shares": {"reading": reading, "computing": computing, "neither": neither},
            "misses_a_step": round(store.misses / max(1, engine.model.player.blocks.clock[0]), 1),
            "prefetched": store.prefetched, "prefetch_used": store.prefetch_used,
            "cached_mb": round(sum(cached(engine.checkpoint.mapped(path)) for path in plain.files) / 1e6, 1),
            "released_gb": round(engine.reader.released_bytes / 1e9, 2), "notes": engine.notes,
        }  # fmt: skip


@contextmanager
def without_direct_reads() -> Iterator[None]:
    """As on a file system that has none."""
    flag, expert_reader._O_DIRECT = expert_reader._O_DIRECT, 0
    try:
        yield
    finally:
        expert_reader._O_DIRECT = flag


def run(folder: Path, *, rounds: int = 5, steps: int = 24, threads: int = 2, layers: int = 12, experts: int = 64,
        cap: int = 12, prefetch: str = "auto", arms: Sequence[str] = tuple(ARMS)) -> dict[str, object]:  # fmt: skip
    if not (folder / "config.json").exists():
        write_real_geometry(folder, layers, sparse=False, num_experts=experts, **GEOMETRY)
        steady(folder)
    found: dict[str, object] = {}
    for arm in arms:
        found[arm] = compare(folder, arm, rounds=rounds, steps=steps, threads=threads, cap=cap, prefetch=prefetch)
        print(json.dumps({arm: found[arm]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--cap", type=int, default=12)
    parser.add_argument("--prefetch", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    args = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="coli-bench-") as temporary:
        found = run(args.pop("folder") or Path(temporary), **args)
    print(json.dumps(found))
    sys.exit(not all(arm["met"] for arm in found.values()))


if __name__ == "__main__":
    main()
