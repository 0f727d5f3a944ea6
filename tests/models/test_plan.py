"""The plan: what it adds up, what gives way when memory is short, and that the engine loads exactly what it says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli import memory
from coli.errors import DoesNotFit, ModelError, UsageError
from coli.formats.checkpoint import Checkpoint
from coli.models.families import family_of
from coli.planning.plan import KEPT, Sequences, make_plan
from coli.planning.survey import Survey, survey
from coli.settings import load
from tests.models.bench_model import Opened
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36


def surveyed(folder, **flags) -> tuple[Survey, object]:
    with Checkpoint.open(folder) as checkpoint:
        family = family_of(checkpoint)
        resolved = load(flags, {})[0].resolve(family.name)
        geometry = family.geometry(checkpoint.config, checkpoint.config_path)
        family.check(checkpoint, geometry)
        return survey(checkpoint, family, geometry, resolved), resolved


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("plan"), tiny_config(max_position_embeddings=65_536), dtype="F32")


@settings(deadline=None, max_examples=80)
@given(budget=st.integers(100_000_000, 400_000_000), ctx=st.integers(1, 65_536), cap=st.none() | st.integers(1, 9),
       mtp_cap=st.none() | st.integers(1, 9), mtp=st.none() | st.booleans(), undo=st.sampled_from(["slots", "log"]),
       sequences=st.builds(Sequences, st.integers(1, 4), st.integers(0, 4), st.booleans()))  # fmt: skip
def test_a_plan_never_exceeds_its_budget_and_wastes_no_slot(folder, budget, ctx, cap, mtp_cap, mtp, undo, sequences):
    given_flags = {"ctx": ctx, "cap": cap, "mtp_cap": mtp_cap, "mtp": mtp, "undo": undo, "threads": 2}
    found, resolved = surveyed(folder, **given_flags)
    try:
        plan = make_plan(found, resolved, budget, sequences)
    except DoesNotFit as error:
        found_floor = re.search(r"at least ([\d.]+) ([MG]B), .* more \(", str(error))
        assert float(found_floor[1]) * {"MB": 1e6, "GB": 1e9}[found_floor[2]] >= 0.994 * budget  # three digits
        enough = float(re.search(r"give --ram ([\d.]+)", str(error))[1])
        assert make_plan(found, resolved, int(enough * 1e9), sequences).cap >= 1
        return
    assert plan.total <= budget and 1 <= plan.cap <= found.geometry.experts
    assert plan.cap <= (cap or 8) and (plan.head_cap == 0) != plan.head
    if plan.cap < min(cap or 8, 8) and not mtp_cap:
        assert plan.total + found.slot + plan.head * found.head.slot > budget
    assert make_plan(found, resolved, budget + 10_000_000, sequences).cap >= plan.cap


def test_what_would_fit_instead_does_fit(folder):
    found, resolved = surveyed(folder, ctx=65_536, threads=2, mtp=False)
    whole = make_plan(found, resolved, 1 << 40)
    budget = whole.terms.total - whole.terms.kv // 2
    with pytest.raises(DoesNotFit, match=r"or --ctx (\d+), which fits") as refused:
        make_plan(found, resolved, budget)
    shorter = int(re.search(r"--ctx (\d+)", str(refused.value))[1])
    assert make_plan(found, resolved.override(ctx=shorter), budget).ctx == shorter
    with pytest.raises(DoesNotFit):
        make_plan(found, resolved.override(ctx=2 * shorter), budget)


def test_nothing_is_promised_where_nothing_fits(folder):
    found, resolved = surveyed(folder)
    with pytest.raises(DoesNotFit) as refused:
        make_plan(found, resolved, 1_000_000)
    assert "which fits" not in str(refused.value)


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("flags", [{}, {"mtp": True, "cap": 3, "mtp_cap": 2}, {"mtp": False, "undo": "slots"},
                                   {"mtp": True, "trunk": "int8", "experts": "int4"}])  # fmt: skip
def test_the_engine_loads_what_the_plan_says(tmp_path, family, flags):
    if family == "qwen4_exp":
        write_tiny(tmp_path, dtype="BF16")
    else:
        write_tiny36(tmp_path, tiny36_config(family), dtype="BF16")
    found, resolved = surveyed(tmp_path, threads=2, ctx=256, **flags)
    plan = make_plan(found, resolved)
    with Opened(tmp_path, threads=2, ctx=256, **flags) as opened:
        engine = opened.engine
        assert (engine.plan.terms, engine.plan.cap, engine.plan.head_cap) == (plan.terms, plan.cap, plan.head_cap)
        assert (engine.head is not None) == plan.head
        assert engine.store.nbytes == plan.experts
        assert plan.head_experts == (engine.stores[1].nbytes if len(engine.stores) > 1 else 0)
        assert engine.terms.total + sum(store.nbytes for store in engine.stores) == plan.total
        undo = engine.terms.undo
        deepest = max(plan.settings.lookup_drafts, (plan.settings.drafts or 3) * plan.head)
        assert opened.state.reserve(deepest) and opened.state.recurrent.undo_bytes == undo


def test_terms_have_names_and_a_total():
    terms = memory.Terms(*range(1, 13), head=1000, head_kv=200, head_workspace=30, vocabulary=4)
    assert terms.total == sum(range(1, 13)) + 1234 == terms.without_head().total + terms.of_head
    assert terms.of_head == 1234
    names = {name for name in memory.NAMES if name not in ("experts", "head_experts")}
    assert names == set(memory.Terms.__dataclass_fields__)


def test_a_context_beyond_the_model_is_refused_and_the_default_is_cut(tmp_path):
    found, resolved = surveyed(write_tiny(tmp_path, dtype="F32"), ctx=513)
    with pytest.raises(UsageError, match="513 positions, the model was made for 512"):
        make_plan(found, resolved)
    assert make_plan(found, load({}, {})[0].resolve("qwen38")).ctx == 512


def test_a_head_that_is_demanded_and_not_there_is_named(tmp_path):
    found, resolved = surveyed(write_tiny(tmp_path, dtype="F32", mtp=False), mtp=True)
    with pytest.raises(ModelError, match="no draft head"):
        make_plan(found, resolved)
    found, resolved = surveyed(tmp_path)
    plan = make_plan(found, resolved)
    assert not plan.head and plan.head_cap == plan.head_experts == plan.terms.of_head == 0 and plan.no_head


def test_snapshots_count(folder):
    found, resolved = surveyed(folder, ctx=4096)
    plans = [make_plan(found, resolved, 1 << 40, Sequences(snapshots=n)) for n in (0, 1, 3)]
    one = plans[1].snapshot
    assert [plan.terms.snapshots for plan in plans] == [0, 2 * one, 4 * one], "one more while it is made"
    with Opened(folder, ctx=4096) as opened:
        state = opened.state
        opened.engine.model.forward([1, 2, 3], state)
        trunk = state.copy()
        head = opened.engine.head.new_state()
        head.waiting = len(head.pending)  # as many rows as can wait
        assert opened.engine.plan.snapshot == one
    assert one == trunk.nbytes - trunk.tokens.nbytes + head.copy().nbytes + 2 * 8 * 4096 + 4 * found.geometry.vocab


def test_what_a_sequence_needs_counts_once_a_slot(folder):
    found, resolved = surveyed(folder, ctx=4096, undo="slots")
    one, four = (make_plan(found, resolved, 1 << 40, Sequences.served(n)).terms for n in (1, 4))
    for name in ("kv", "recurrent", "undo", "lookup", "logits", "head_kv"):
        assert getattr(four, name) == 4 * getattr(one, name) > 0, name
    assert (KEPT + 1) * four.snapshots == (4 * KEPT + 1) * one.snapshots
    shared = ("process", "server", "tokenizer", "dense", "workspace", "reading", "head", "head_workspace", "vocabulary")
    assert all(getattr(four, name) == getattr(one, name) for name in shared)
    run = make_plan(found, resolved, 1 << 40).terms
    assert run.server == 0 and one.total - run.total == one.server + one.snapshots + run.lookup, "and predictions"
    assert one.server == memory.SERVER + found.tokens * memory.GRAMMAR_BYTES


def test_fewer_slots_are_proposed_where_the_context_is_short_already(folder):
    found, resolved = surveyed(folder, ctx=256, threads=2, mtp=True)
    budget = make_plan(found, resolved, 1 << 40, Sequences.served(4)).total
    with pytest.raises(DoesNotFit, match=r"or --slots (\d+), which fits") as refused:
        make_plan(found, resolved, budget, Sequences.served(16))
    fewer = int(re.search(r"--slots (\d+)", str(refused.value))[1])
    assert 4 <= fewer < 16 and make_plan(found, resolved, budget, Sequences.served(fewer)).cap >= 1
    with pytest.raises(DoesNotFit):
        make_plan(found, resolved, budget, Sequences.served(2 * fewer))
