"""Memory keeps its word: the terms against what is allocated, and against what the process really holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from coli import memory
from coli.errors import DoesNotFit
from coli.models import qwen38_program
from coli.report import size
from coli.settings import load
from tests.big_checkpoint import write_real_geometry
from tests.gguf_files import write_gguf
from tests.models.bench_model import Opened
from tests.tiny import odd_config, tiny_config, write_tiny
from tests.tiny36 import FAMILIES, HEADED, block36_config, tiny36_config, tiny36_weights

# One process: open, run a prompt and some tokens, print what the engine planned and what the kernel counted.
RUN = """
import json, sys
import numpy as np
from coli import memory
from coli.engine import Engine
from coli.session import Request, Session
from coli.settings import load
flags, prompt, tokens = json.loads(sys.argv[1])
with Engine.open(load(flags, {})[0]) as engine:
    ids, session = np.random.default_rng(1).integers(0, engine.geometry.vocab, prompt), Session(engine)
    "".join(session.generate(Request(tuple(ids.tolist()), max_tokens=tokens, stop_ids=frozenset())))
    state, per_token = session.state, engine.model.spec.kv_bytes_per_token()
    per_token += engine.head.spec.kv_bytes_per_token() if engine.head else 0
    nbytes = sum(store.nbytes for store in engine.stores)
    filled = sum(len(s.resident(i)) * record.nbytes for s in engine.stores for i, record in enumerate(s.records))
    print(json.dumps({
        "planned": engine.terms.total + nbytes, "unfilled": nbytes - filled,
        "undo_unused": engine.terms.undo - state.recurrent.undo_bytes,
        "kv_unused": (engine.ctx - state.length) * per_token,
        "peak": memory.peak_rss(), "cap": engine.cap, "finite": bool(np.isfinite(session.last_logits).all()),
    }))
"""


def _run(prompt: int, tokens: int, **flags) -> dict:
    job = json.dumps([flags | {"threads": 2}, prompt, tokens])
    done = subprocess.run([sys.executable, "-c", RUN, job], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _check(seen: dict) -> None:
    """Peak RSS lies within 3 % or 64 MiB of the plan, less the slots and positions this run had no use for."""
    used = seen["planned"] - seen["unfilled"] - seen["kv_unused"] - seen["undo_unused"]
    assert seen["finite"]
    assert abs(seen["peak"] - used) <= max(0.03 * used, 64 << 20), seen


@pytest.mark.parametrize("ctx", [64, 4096])
@pytest.mark.parametrize("odd", [False, True])
def test_the_workspace_is_what_was_computed(tmp_path, ctx, odd):
    folder = write_tiny(tmp_path, odd_config() if odd else tiny_config(max_position_embeddings=8192), dtype="F32")
    ctx = min(ctx, 256) if odd else ctx
    with Opened(folder, ctx=ctx, threads=3) as opened:
        engine = opened.engine
        computed = qwen38_program.workspace_bytes(engine.geometry, limit=engine.limit, ctx=engine.ctx, threads=3)
        assert abs(computed - engine.model.workspace_bytes) <= 0.03 * engine.model.workspace_bytes + 4096
        spec = engine.model.spec
        state = opened.state
        kv = state.k.nbytes + state.v.nbytes + state.raw.nbytes + state.pooled.nbytes
        assert abs(kv - ctx * spec.kv_bytes_per_token()) <= 8 * spec.attention_layers * spec.index_dim
        assert state.recurrent.live.nbytes == spec.recurrent_bytes()
        assert sum(ring.nbytes for ring in state.rings) == spec.ring_bytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("types", ["F32", "Q8_0"])
def test_the_other_engines_workspace_is_what_was_computed(tmp_path, family, types):
    """Integer weights want int8 codes of every row besides."""
    config = (tiny36_config if types == "F32" else block36_config)(family)
    path = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config, 0, family in HEADED), types=types)
    with Opened(path, ctx=256, threads=3, mtp=family in HEADED) as opened:
        engine = opened.engine
        computed, used = engine.terms.workspace, engine.model.workspace_bytes
        assert used - 4096 <= computed <= 1.03 * used + 4096
        if engine.head is not None:
            head = engine.terms.head + engine.terms.head_workspace
            dense = sum(t.nbytes for name, t in engine.checkpoint.tensors.items()
                        if name.startswith("mtp.") and ".mlp.experts." not in name)  # fmt: skip
            assert engine.head.workspace_bytes - 4096 <= head - dense <= 1.25 * engine.head.workspace_bytes + 16384
        weights = sum(engine.weights.kinds.values())
        assert weights <= engine.terms.dense + engine.terms.head <= weights + 65536


def test_the_shipped_model_holds_what_was_planned():
    _check(_run(300, 40))


@pytest.mark.slow
@pytest.mark.parametrize("cap, trunk", [(4, "stored"), (24, "stored"), (4, "int8")])
def test_the_real_geometry_loads_runs_and_holds_what_was_planned(tmp_path_factory, cap, trunk):
    """Qwen3.8-Flash-Next FP8, per layer as released (4 of 48 layers; experts and n-gram table sparse): 64 GB of
    files, a few of them resident."""
    folder = tmp_path_factory.getbasetemp() / "real-geometry"
    if not folder.exists():
        write_real_geometry(folder, layers=4)
    seen = _run(24, 8, model=str(folder), cap=cap, ctx=1024, prefill_chunk=24, trunk=trunk)
    assert seen["cap"] == cap
    _check(seen)


def test_the_peak_is_our_own_and_not_that_of_who_started_us():
    ballast = b"x" * (300 << 20)
    code = "from coli import memory; print(memory.peak_rss())"
    small = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert small < len(ballast) // 2


def test_a_budget_sizes_the_cache_and_a_budget_below_the_floor_is_refused(tmp_path):
    folder = write_tiny(tmp_path, dtype="F32")
    with Opened(folder, page_cache="keep", mtp=False) as opened:
        engine = opened.engine
        layer_slots = engine.store.record_bytes()
        floor = engine.terms.total
    for slots in (1, 3):
        ram = (floor + slots * layer_slots + layer_slots / 2) / 1e9
        with Opened(folder, page_cache="keep", mtp=False, ram=ram) as opened:
            assert opened.engine.cap == slots
    with pytest.raises(DoesNotFit) as refused:
        Opened(folder, page_cache="keep", mtp=False, ram=(floor + layer_slots / 2) / 1e9)
    assert f"the budget is {size(floor + layer_slots // 2)}" in str(refused.value)
    assert f"at least {size(floor + layer_slots)}" in str(refused.value)


def test_a_cap_beyond_the_budget_is_lowered_and_said(tmp_path):
    folder = write_tiny(tmp_path, dtype="F32")
    with Opened(folder, page_cache="keep") as opened:
        engine = opened.engine
        budget = (engine.terms.total + 2.5 * sum(s.nbytes // s.cap for s in engine.stores)) / 1e9
    with Opened(folder, page_cache="keep", ram=budget, cap=7) as opened:
        assert opened.engine.cap == 2 == opened.engine.stores[1].cap
        assert any("--cap 7" in note for note in opened.engine.notes)


def test_the_default_budget_leaves_room():
    assert 0 < memory.default_budget() <= 0.88 * memory.available() * 1.2
    assert load({"ram": 1.5}, {})[0].ram == 1_500_000_000


def test_a_budget_too_small_for_the_head_runs_without_it_and_says_so(tmp_path):
    folder = write_tiny(tmp_path, dtype="F32")
    with Opened(folder, page_cache="keep", mtp=False) as opened:
        without = opened.engine.terms.total + opened.engine.store.nbytes // opened.engine.store.cap
    budget = (without + 4096) / 1e9
    with Opened(folder, page_cache="keep", ram=budget) as opened:
        assert opened.engine.head is None and "budget" in opened.engine.head_line
        assert opened.engine.terms.of_head == 0
    with pytest.raises(DoesNotFit) as refused:
        Opened(folder, page_cache="keep", ram=budget, mtp=True)
    assert "draft head" in str(refused.value)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("mtp_cap", [None, 3])
def test_the_head_holds_what_was_planned(tmp_path, odd, mtp_cap):
    folder = write_tiny(tmp_path, odd_config() if odd else tiny_config(), dtype="F32")
    with Opened(folder, ctx=128, threads=3, mtp_cap=mtp_cap) as opened:
        engine, head = opened.engine, opened.engine.head
        state, store = head.new_state(), engine.stores[1]
        kv = state.kv.k.nbytes + state.kv.v.nbytes + state.kv.raw.nbytes + state.kv.pooled.nbytes
        tensors = engine.checkpoint.tensors.items()
        dense = sum(t.nbytes for name, t in tensors if name.startswith("mtp.") and "experts" not in name)
        held = dense + kv + head.workspace_bytes + state.pending.nbytes
        planned = engine.terms.of_head - engine.terms.vocabulary
        assert abs(held - planned) <= 0.05 * held + 4096
        assert store.cap == (mtp_cap or engine.cap)
        alone = opened.state.nbytes
    with Opened(folder, ctx=128, threads=3, mtp=False) as opened:
        assert opened.engine.terms.of_head == 0 and opened.state.nbytes == alone
