"""The plan against the process: peak RSS lies within 3 % or 64 MiB of the plan's total, combination by combination.

Each case is a process of its own that opens a generated checkpoint, fills the context to its end and has drafts of the
depth asked for (its answer repeats the prompt, so that prompt lookup finds it), so that what the plan provides is used:
K and V of every position, every slot of the expert caches, the undo of the deepest verify. Checkpoints are large enough
that a term that is forgotten, or counted twice, is seen: dense weights, the expert cache, K and V of 8192 positions are
100 MB and more each where a case has them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

# One process: open, fill the context, print what was planned and what the kernel counted.
RUN = """
import json, sys
import numpy as np
from coli import memory
from coli.engine import Engine
from coli.planning.measured import measured
from coli.sampling import Sampler
from coli.session import Request, Session
from coli.settings import load
flags, tokens = json.loads(sys.argv[1])
with Engine.open(load(flags, {})[0]) as engine:
    prompt = np.random.default_rng(1).integers(0, engine.geometry.vocab, engine.ctx - tokens)
    said = iter(prompt.tolist())
    Sampler.pick = lambda sampler, logits: next(said)
    session = Session(engine)
    "".join(session.generate(Request(tuple(prompt.tolist()), max_tokens=tokens, stop_ids=frozenset())))
    print(json.dumps(measured(engine, session).to_json() | {
        "cap": engine.cap, "head": engine.head is not None, "length": session.state.length, "ctx": engine.ctx,
        "total": engine.plan.total,
    }))
"""
WIDE = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=4, head_dim=128, vocab_size=8192,
            linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
            max_position_embeddings=8192, num_hidden_layers=4)  # fmt: skip
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
    run = [sys.executable, "-c", RUN, json.dumps([flags, 32])]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["length"] >= ctx - 8 and seen["head"] == (drafts == "2")
    assert cap is None or seen["cap"] == (cap if cap != "all" else 24)
    assert seen["planned"] == seen["total"]
    assert (seen["terms"].get("undo", {"held": 0})["held"] > 0) == (drafts != "off"), "a verify took place"
    assert abs(seen["peak"] - seen["total"]) <= max(0.03 * seen["total"], 64 << 20), seen
    for term, row in seen["terms"].items():  # no buffer outgrows its own term either
        assert row["held"] <= 1.03 * row["planned"] + (64 << 20 if term == "process" else 65_536), (term, row)
