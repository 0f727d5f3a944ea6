"""The engines that the exactness tests share: tiny checkpoints in every form, opened in every way."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.engine import Engine
from coli.settings import load
from tests.containers import write_container, write_sidecar
from tests.gguf_files import write_gguf
from tests.speculation.harness import Recording, fuzz, random_tokens, record
from tests.tiny import odd_config, tiny_config, tiny_weights, write_tiny
from tests.tiny36 import (
    FAMILIES,
    block36_config,
    every_matrix,
    odd36_config,
    tiny36_config,
    tiny36_weights,
    write_tiny36,
)

CTX = 128
WALKS = 12

# How the tiny checkpoints are written, and the flags they are opened with: every weight kind, expert caches that hold
# one expert (waves) and all, prefill in ones and in odd pieces, both ways to undo, both wirings,
# heads that score a list.
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "f32": (dict(dtype="F32", seed=10), dict(cap=8, undo="slots")),
    "bf16, one expert": (dict(dtype="BF16", seed=11), dict(cap=1, undo="slots")),
    "fp8": (dict(dtype="FP8", dense="FP8", block=(32, 48), seed=12), dict(prefill_chunk=7, mtp_vocab=50, undo="slots")),
    "int8 trunk, log": (dict(dtype="BF16", seed=13), dict(trunk="int8", undo="log", mtp_vocab=60)),
    "int8 trunk, f32 activations": (dict(dtype="FP8", seed=14), dict(trunk="int8", act="f32", cap=3, mtp_cap=1)),
    "odd, log": (dict(config=odd_config(), dtype="BF16", seed=15), dict(undo="log", prefill_chunk=5)),
    "prefill in ones": (dict(dtype="F32", seed=16), dict(prefill_chunk=1, undo="slots", threads=1)),
    "wiring a, log, one thread": (dict(dtype="BF16", seed=17),
                                  dict(mtp_wiring="a", undo="log", threads=1, mtp_vocab=30)),
}  # fmt: skip

# Tokens to compare in `make test`, more than 100,000 together; the slow ones read experts from files all the time.
QUOTAS = {name: 3_000 if name in ("bf16, one expert", "int8 trunk, f32 activations") else 16_000 for name in ENGINES}


MOE, DENSE, NEXT, CODER = "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen3_moe"

# The same of engine qwen36: its four families, one of them without a head.
ENGINES36: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe f32": (dict(config=tiny36_config(MOE), dtype="F32", seed=60), dict(mtp=True, cap=8, undo="slots")),
    "moe bf16, one expert": (dict(config=tiny36_config(MOE), dtype="BF16", seed=61),
                             dict(mtp=True, cap=1, mtp_cap=1)),
    "moe fp8": (dict(config=tiny36_config(MOE), dtype="FP8", block=(32, 48), seed=62),
                dict(mtp=True, prefill_chunk=7, mtp_vocab=50, undo="slots")),
    "moe odd, log": (dict(config=odd36_config(MOE), dtype="BF16", seed=63), dict(mtp=True, prefill_chunk=5)),
    "next bf16, log": (dict(config=tiny36_config(NEXT), dtype="BF16", seed=64), dict(mtp=True, mtp_vocab=60)),
    "next odd fp8, slots": (dict(config=odd36_config(NEXT), dtype="FP8", fp8=every_matrix, block=(16, 24), seed=65),
                            dict(mtp=True, undo="slots", prefill_chunk=1, threads=1)),
    "dense bf16": (dict(config=tiny36_config(DENSE), dtype="BF16", seed=66), dict(mtp=True, undo="slots")),
    "dense int8 trunk, log": (dict(config=tiny36_config(DENSE), dtype="BF16", seed=67),
                              dict(mtp=True, trunk="int8", mtp_vocab=60)),
    "dense odd int8 trunk, f32 activations": (dict(config=odd36_config(DENSE), dtype="BF16", seed=68),
                                              dict(mtp=True, trunk="int8", act="f32")),
    "coder bf16, two experts": (dict(config=tiny36_config(CODER, mlp_only_layers=[1]), dtype="BF16", seed=69),
                                dict(cap=2)),
    "coder odd fp8": (dict(config=odd36_config(CODER), dtype="FP8", block=(16, 24), seed=70), dict(prefill_chunk=9)),
}  # fmt: skip
HEADED36 = [name for name in ENGINES36 if not name.startswith("coder")]

QUOTAS36 = {name: 2_000 if "expert" in name else 11_000 for name in ENGINES36}


_TWO = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
_MEDIUM = {"": "Q4_K", "blk.0.ffn_down_exps.weight": "Q6_K", "attn_v.weight": "Q6_K", "nextn.eh_proj.weight": "Q6_K",
           "output.weight": "Q6_K"}  # fmt: skip

# Both engines on what others made of the releases (`types` a GGUF's, `container`, `sidecar`), and on what `convert`
# makes of folders and GGUF files.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gguf q4_k and q6_k": (dict(config=block36_config(MOE, **_TWO), types=_MEDIUM, seed=80),
                           dict(mtp=True, cap=8, mtp_vocab=50)),
    "gguf q8_0, one expert": (dict(config=tiny36_config(NEXT), types="Q8_0", seed=81),
                              dict(mtp=True, cap=1, mtp_cap=1)),
    "gguf four streams": (dict(config=tiny_config(), types={"": "Q5_0", "_exps.weight": "IQ4_NL"}, seed=82),
                          dict(cap=8, mtp_vocab=50)),
    "container int4": (dict(config=tiny36_config(MOE, moe_intermediate_size=64), seed=83,
                            container=dict(bits=4, group=64)), dict(mtp=True, cap=8, undo="slots")),
    "container int8 rows": (dict(config=tiny36_config(NEXT), seed=84, container=dict(bits=8)),
                            dict(mtp=True, cap=3, trunk="int8")),
    "sidecar int4": (dict(config=tiny_config(moe_intermediate_size=64), dtype="BF16", seed=85, sidecar={}),
                     dict(experts="int4", cap=8)),
    "converted, fp8 to int8": (dict(config=tiny36_config(MOE), dtype="FP8", block=(32, 48), seed=86,
                                    convert=Options(8, 32)), dict(mtp=True, cap=8)),
    "converted, gguf to int4": (dict(config=block36_config(NEXT, **_TWO), types="Q8_0", seed=87,
                                     convert=Options(4, 64)), dict(mtp=True, cap=1, mtp_cap=1)),
    "converted, sidecar alone": (dict(config=tiny_config(), dtype="BF16", seed=88, convert=Options(8, 32)),
                                 dict(cap=8, mtp_vocab=50)),
}  # fmt: skip

QUOTAS_FILES = {name: 1_000 if "expert" in name or "converted" in name else 2_000 for name in FILES}
EVERY = ENGINES | ENGINES36 | FILES


def write_model(folder: Path, form: dict[str, Any]) -> Path:
    """Write a tiny checkpoint of either engine; returns what --model takes."""
    if "convert" in form:
        source = write_model(folder / "source", {key: value for key, value in form.items() if key != "convert"})
        convert(source, folder / "converted", form["convert"])
        return folder / "converted"
    form = dict(form)
    config, seed = form.get("config") or tiny_config(), form.get("seed", 0)
    hybrid = config["model_type"] in FAMILIES
    types, container, beside = (form.pop(key, None) for key in ("types", "container", "sidecar"))
    weights = tiny36_weights if hybrid else tiny_weights
    if types is not None:
        folder.mkdir(parents=True)
        return write_gguf(folder / "model.gguf", config, weights(config, seed), types=types)
    if container is not None:
        write_container(folder, config, seed=seed, **container)
        return folder
    (write_tiny36 if hybrid else write_tiny)(folder, **form)
    if beside is not None:
        write_sidecar(folder, weights(config, seed), **beside)
    return folder


def open_tiny(folder: Path, form: dict[str, Any], flags: dict[str, Any]) -> Engine:
    """Write a tiny checkpoint and open it."""
    return open_model(write_model(folder, form), flags)


def open_model(model: Path, flags: dict[str, Any]) -> Engine:
    """COLI_CACHE counts: the sanitizers keep their kernels apart."""
    environ = {name: os.environ[name] for name in ("COLI_CACHE",) if name in os.environ}
    return Engine.open(load({"model": str(model), "threads": 2, "ctx": CTX} | flags, environ)[0])


class Engines:
    """The engines of the three tables, each opened once, and the recordings made on them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._opened, self._closing = folder, {}, ExitStack()
        self._recorded: dict[tuple[str, int, int], Recording] = {}

    def __getitem__(self, name: str) -> Engine:
        if name not in self._opened:
            engine = open_tiny(self._folder / str(len(self._opened)), *EVERY[name])
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

    def repeating(self, name: str, period: int = 7) -> Recording:
        """A text that repeats itself to the end of the context."""
        engine = self[name]
        ids = (list(range(30, 30 + period)) * engine.ctx)[: engine.ctx]
        return record(engine, ids[:20], ids[20:])

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
