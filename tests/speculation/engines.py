"""The engines that the exactness tests share: tiny checkpoints in every form, opened in every way."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from coli.engine import Engine
from coli.settings import load
from tests.speculation.harness import Recording, fuzz, random_tokens, record
from tests.tiny import odd_config, write_tiny

CTX = 128
WALKS = 12

# How the tiny checkpoints are written, and the flags they are opened with: every weight kind, expert caches that hold
# one expert (waves) and all, prefill in ones and in odd pieces, both ways to undo, both wirings,
# heads that score a list.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "f32": (dict(dtype="F32", seed=10), dict(cap=8, undo="slots")),
    "bf16, one expert": (dict(dtype="BF16", seed=11), dict(cap=1, undo="slots")),
    "fp8": (dict(dtype="FP8", dense="FP8", block=(32, 48), seed=12), dict(prefill_chunk=7, mtp_vocab=50, undo="slots")),
    "int8 trunk, log": (dict(dtype="BF16", seed=13), dict(trunk_int8=True, undo="log", mtp_vocab=60)),
    "int8 trunk, f32 activations": (dict(dtype="FP8", seed=14), dict(trunk_int8=True, act="f32", cap=3, mtp_cap=1)),
    "odd, log": (dict(config=odd_config(), dtype="BF16", seed=15), dict(undo="log", prefill_chunk=5)),
    "prefill in ones": (dict(dtype="F32", seed=16), dict(prefill_chunk=1, undo="slots", threads=1)),
    "wiring a, log, one thread": (dict(dtype="BF16", seed=17),
                                  dict(mtp_wiring="a", undo="log", threads=1, mtp_vocab=30)),
}  # fmt: skip

# Tokens to compare in `make test`, more than 100,000 together; the slow ones read experts from files all the time.
QUOTAS = {name: 3_000 if name in ("bf16, one expert", "int8 trunk, f32 activations") else 16_000 for name in ENGINES}


def open_tiny(folder: Path, form: dict[str, Any], flags: dict[str, Any]) -> Engine:
    """Write a tiny checkpoint and open it. COLI_CACHE counts: the sanitizers keep their kernels apart."""
    write_tiny(folder, **form)
    environ = {name: os.environ[name] for name in ("COLI_CACHE",) if name in os.environ}
    return Engine.open(load({"model": str(folder), "threads": 2, "ctx": CTX} | flags, environ)[0])


class Engines:
    """The engines of `ENGINES`, each opened once, and the recordings made on them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._opened, self._closing = folder, {}, ExitStack()
        self._recorded: dict[tuple[str, int, int], Recording] = {}

    def __getitem__(self, name: str) -> Engine:
        if name not in self._opened:
            engine = open_tiny(self._folder / str(len(self._opened)), *ENGINES[name])
            self._opened[name] = self._closing.enter_context(engine)
        return self._opened[name]

    def recording(self, name: str, seed: int, prompt: int = 20) -> Recording:
        """Random tokens to the end of the context."""
        key = (name, seed, prompt)
        if key not in self._recorded:
            engine = self[name]
            ids = random_tokens(np.random.default_rng(seed), engine.geometry.vocab, engine.ctx)
            self._recorded[key] = record(engine, ids[:prompt], ids[prompt:])
        return self._recorded[key]

    def close(self) -> None:
        self._closing.close()

    def walk(self, name: str, tokens: int, first: int = 0) -> int:
        """Compare at least that many tokens on one engine in random walks, `WALKS` over each recording."""
        done = 0
        for number in itertools.count(first):
            self.last = number
            recording = self.recording(name, number, prompt=1 + 7 * number % 40)
            for seed in range(WALKS * number, WALKS * (number + 1)):
                done += fuzz(recording, seed, f"engine {name!r}, recording {number}")
                if done >= tokens:
                    return done
            del self._recorded[name, number, recording.prompt]
        raise AssertionError("unreachable")
