"""`coli plan --slots` against a real `coli serve`: its peak memory lies within 3 % or 64 MiB of what was planned.

Every slot answers a conversation of its own that grows until its context is full and it keeps as many prefixes as were
planned for; the kernel's own mark of the server's process is compared. What a slot needs for itself is seen one by one
in tests/models/test_plan_reality.py; here it is the whole, and what HTTP takes.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from coli.planning.plan import KEPT
from coli.server.options import ServeOptions
from tests.models.test_plan_reality import MODELS
from tests.server.live import Live, live

CASES = {"nano": (None, 2048, 4), "qwen38": (4, 512, 3)}  # experts kept a layer, context, slots


def flags_of(name: str) -> list[str]:
    cap, ctx, slots = CASES[name]
    return ["--ctx", str(ctx), "--threads", "2", "--slots", str(slots), *(["--cap", str(cap)] if cap else [])]


def converse(server: Live, number: int, vocab: int, ctx: int) -> int:
    """Fill a slot: turn upon turn, each of which leaves two states, the last one at the context's end."""
    ids = np.random.default_rng(number).integers(0, vocab, ctx).tolist()
    cached = 0
    for prompt in [*range(ctx - 24 * KEPT, ctx - 32, 24), ctx - 24]:
        body = {"prompt": ids[:prompt], "max_tokens": ctx - prompt if prompt == ctx - 24 else 2,
                "logit_bias": {str(ids[prompt]): 100.0}, "temperature": 0, "logprobs": 5}  # fmt: skip
        reply = server.post("/v1/completions", {"model": "served", **body})
        assert reply.status == 200, reply.body
        cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def held_to_a_grammar(server: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
    reply = server.post("/v1/chat/completions", {"model": "served", "max_tokens": 8, **body})
    assert reply.status == 200, reply.body


def peak(server: Live) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_server_takes_what_was_planned(coli, tmp_path, name):
    flags, (_, ctx, slots) = flags_of(name), CASES[name]
    model = [] if name == "nano" else [str(MODELS[name](tmp_path / "model"))]
    document = json.loads(coli("plan", *model, *flags, "--json").stdout)
    (row,) = document["plans"]
    assert (document["slots"], document["snapshots"], document["server"]) == (slots, slots * KEPT, True)
    with live(tmp_path, *flags, "--model-id", "served", model=model[0] if model else None) as server:
        with ThreadPoolExecutor(slots) as clients:
            turns = [clients.submit(converse, server, number, 250, ctx) for number in range(slots)]
            cached = [turn.result() for turn in turns]
        held_to_a_grammar(server)
        found, held = peak(server), server.get("/metrics").body.decode()
    assert all(cached), "a slot's conversation was read again"
    assert abs(found - row["total_bytes"]) <= max(0.03 * row["total_bytes"], 64 << 20), (found, row["terms"], held)


def test_a_servers_defaults_are_what_the_plan_counts_on():
    options = ServeOptions()
    assert options.checkpoints + options.pins == KEPT
