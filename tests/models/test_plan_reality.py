"""The plan against the process: peak RSS lies within 3 % or 64 MiB of the plan's total, combination by combination.

Each case is a process of its own that opens a generated checkpoint, fills the context to its end and has drafts of the
depth asked for (its answer repeats the prompt, so that prompt lookup finds it), so that what the plan provides is used:
K and V of every position, every slot of the expert caches, the undo of the deepest verify. Checkpoints are large enough
that a term that is forgotten, or counted twice, is seen: dense weights, the expert cache, K and V of 8192 positions are
100 MB and more each where a case has them. With several slots all of them answer in turn, and keep as many prefixes as
were planned for; undo, prefixes and recurrent state of "recurrent" are 100 MB and more then. The same of a server's
process: tests/server/test_memory.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coli.planning.plan import KEPT
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

# One process: open, fill every slot's context, print what was planned and what the kernel counted.
RUN = """
import json, sys
import numpy as np
from coli import memory
from coli.engine import Engine
from collections import defaultdict
from coli.planning.measured import measured
from coli.planning.plan import KEPT
from coli.sampling import Sampler
from coli.session import Request, Session
from coli.settings import load
flags, tokens, slots = json.loads(sys.argv[1])
kept = KEPT if slots > 1 else 0
with Engine.open(load(flags, {})[0], slots=slots, snapshots=slots * kept) as engine:
    prompt = np.random.default_rng(1).integers(0, engine.geometry.vocab, engine.ctx - tokens).tolist()
    said = defaultdict(lambda: iter(prompt))
    Sampler.pick = lambda sampler, *_: next(said[sampler])
    sessions = [Session(engine, checkpoints=kept) for _ in range(slots)]
    marks = tuple(range(len(prompt) - 16 * kept, len(prompt), 16))  # at the end: a chunk stops at a mark
    request = Request(tuple(prompt), max_tokens=tokens, stop_ids=frozenset(), marks=marks)
    turns = [session.steps(request) for session in sessions]
    while turns:
        turns = [turn for turn in turns if next(turn, None) is not None]
    print(json.dumps(measured(engine, *sessions).to_json() | {
        "cap": engine.cap, "head": engine.head is not None, "length": min(s.state.length for s in sessions),
        "ctx": engine.ctx, "total": engine.plan.total, "kept": [len(s.prefixes.kept) for s in sessions if s.prefixes],
    }))
"""
WIDE = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128, vocab_size=8192,
            linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
            max_position_embeddings=8192, num_hidden_layers=4)  # fmt: skip
STATEFUL = dict(linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
                linear_num_value_heads=64)  # fmt: skip
TYPES = dict(layer_types=["linear_attention", "full_attention"] * 2)
MIXTURE = dict(num_experts=24, num_experts_per_tok=4, moe_intermediate_size=768)
SECTIONS = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[6, 5, 5],
                mrope_interleaved=True)  # fmt: skip
DRAFTS = {
    "off": {"mtp": False, "lookup": False}, "2": {"mtp": True, "drafts": 2, "lookup": False},
    "lookup": {"mtp": False, "lookup": True, "lookup_drafts": 5, "gate": False},
}  # fmt: skip
MODELS = {
    "qwen38": lambda path: write_tiny(path, tiny_config(**WIDE, **TYPES, **MIXTURE, ple_layer_ids=[2],
                                                        ple_embed_dim=512, rope_parameters=SECTIONS,
                                                        indexer_budget=512, indexer_head_dim=64), dtype="BF16"),
    "qwen36": lambda path: write_tiny36(path, tiny36_config("qwen3_5_moe_text", **WIDE, **TYPES, **MIXTURE,
                                                            rope_parameters=SECTIONS), dtype="BF16"),
    "recurrent": lambda path: write_tiny36(path, tiny36_config(
        "qwen3_5_moe_text", **WIDE | STATEFUL, **TYPES, **MIXTURE, rope_parameters=SECTIONS), dtype="BF16"),
    "dense": lambda path: write_tiny36(path, tiny36_config("qwen3_5_text", **WIDE, **TYPES, intermediate_size=4096,
                                                           rope_parameters=SECTIONS), dtype="BF16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints by name, written when first asked for."""
    found = {}

    def make(name: str) -> str | None:
        if name != "nano" and name not in found:
            found[name] = str(MODELS[name](tmp_path_factory.mktemp(name)))
        return found.get(name)

    return make


def judge(seen):
    """The process held what was planned, and no buffer outgrew its own term either."""
    assert seen["planned"] == seen["total"]
    assert abs(seen["peak"] - seen["total"]) <= max(0.03 * seen["total"], 64 << 20), seen
    for term, row in seen["terms"].items():
        assert row["held"] <= 1.03 * row["planned"] + (64 << 20 if term == "process" else 65_536), (term, row)


def in_a_process(flags, tokens=32, slots=1):
    run = [sys.executable, "-c", RUN, json.dumps([flags, tokens, slots])]
    return json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


def cases():
    for ctx in (512, 8192):
        for drafts in DRAFTS:
            yield "nano", None, ctx, drafts
            yield "dense", None, ctx, drafts
            for name in ("qwen38", "qwen36"):
                for cap in (1, 4, "all"):
                    yield name, cap, ctx, drafts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cap", "ctx", "drafts"), list(cases()))
def test_peak_memory_is_what_was_planned(made, name, cap, ctx, drafts):
    model, ctx = made(name), min(ctx, 2048) if name == "nano" else ctx  # nano was made for 2048 positions
    # each chunk of a prompt reads every expert again where few are kept: long chunks for the long prompt
    flags = {"ctx": ctx, "threads": 2, "prefill_chunk": 512 if ctx > 2048 else 128, **DRAFTS[drafts]}
    flags |= {"model": model} if model else {}
    flags |= {} if cap in (None, "all") else {"cap": cap}
    seen = in_a_process(flags)
    assert seen["length"] >= ctx - 8 and seen["head"] == (drafts == "2")
    assert cap is None or seen["cap"] == (cap if cap != "all" else 24)
    assert (seen["terms"].get("undo", {"held": 0})["held"] > 0) == (drafts != "off"), "a verify took place"
    judge(seen)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cap", "ctx", "slots"), [("nano", None, 2048, 4),
                                                           ("recurrent", 4, 512, 4)])  # fmt: skip
def test_slots_and_their_prefixes_take_what_was_planned(made, name, cap, ctx, slots):
    model = made(name)
    flags = {"ctx": ctx, "threads": 2, "prefill_chunk": 512, "undo": "slots", **DRAFTS["lookup"]}
    flags |= {"model": model, "cap": cap} if model else {}
    seen = in_a_process(flags, slots=slots)
    assert seen["length"] >= ctx - 8 and seen["kept"] == slots * [KEPT]
    judge(seen)
    terms = seen["terms"]
    for term in ("kv", "recurrent", "undo", "snapshots"):
        assert terms[term]["held"] > 0.8 * terms[term]["planned"], (term, terms[term])
