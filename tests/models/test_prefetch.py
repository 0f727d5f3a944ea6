"""Reading ahead changes what is read and nothing else; what it guesses, how that is scored, and when it is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coli.models.find import NANO
from coli.models.prefetch import AGAIN, ENOUGH, SELDOM, TURN, Prefetch, Score, Trial, prefetch_bytes
from coli.speculation.options import Speculation
from tests import oracle
from tests.models.bench_model import Opened, random_ids
from tests.speculation.engines import EVERY, open_model, write_model
from tests.speculation.harness import compare, random_tokens, record
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

# Routers in bf16, f32, FP8 and Q4_K beside int8 trunks; layers without experts in between; both engines.
FORMS = ["bf16, one expert", "int8 trunk, log", "odd, log", "moe fp8", "next bf16, log", "coder bf16, two experts",
         "gguf q4_k and q6_k", "container int8 rows"]  # fmt: skip
NANO_PROMPT = list(range(60, 120))


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_model(tmp_path_factory.mktemp("model") / "m", EVERY[request.param][0])


@pytest.mark.parametrize("cap", [1, 4])
def test_logits_and_states_are_the_same_with_it_and_without(model: tuple[str, Path], cap: int) -> None:
    name, path = model
    flags = EVERY[name][1] | {"cap": cap}
    with open_model(path, flags | {"prefetch": "off"}) as engine:
        ids = random_tokens(np.random.default_rng(cap), engine.geometry.vocab, 90)
        right = record(engine, ids[:20], ids[20:])
        assert engine.model.prefetch is None and engine.store.prefetched == 0
    for mode in ("on", "auto"):
        with open_model(path, flags | {"prefetch": mode}) as engine:
            plain = record(engine, ids[:20], ids[20:])
            assert [row.tobytes() for row in plain.logits] == [row.tobytes() for row in right.logits]
            assert plain.states == right.states and plain.heads == right.heads
            for depth in (1, 3):
                options = Speculation(mtp=depth > 1, drafts=depth, gate=False, lookup_force="mixed")
                compare(replace(right, engine=engine), options)
            assert engine.store.prefetch_used <= engine.store.prefetched
            if cap == 4:
                assert engine.store.prefetch_used > 0


# ---- what is guessed ---------------------------------------------------------------------------------------------


def seen(engine: object, ids: list[int], state: object) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(layer asked about, streams of the rows then, the choice) of every look of one forward."""
    prefetch, looks = engine.model.prefetch, []
    look = prefetch._look

    def watched(layer: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        streams = prefetch._blocks.s.array[:rows].copy()
        found = look(layer, rows)
        looks.append((layer, streams, prefetch.choice[:rows].copy()))
        return found

    prefetch._look = watched
    engine.model.forward(ids, state, want="all")
    prefetch._look = look
    return looks


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_look_is_the_layers_own_router_over_the_streams_as_they_are(tmp_path: Path, hybrid: bool) -> None:
    if hybrid:
        write_tiny36(tmp_path, tiny36_config("qwen3_5_moe_text"), dtype="F32", seed=3)
    else:
        write_tiny(tmp_path, dtype="F32", seed=3)
    model = oracle.load(tmp_path, np.float64)
    with Opened(tmp_path, cap=1, prefetch="on", mtp=False) as opened:
        looks = []
        for count in (1, 5, 2, 8):
            looks += seen(opened.engine, random_ids(count, tmp_path, count).tolist(), opened.state)
        assert {layer for layer, _, _ in looks} == set(range(1, opened.engine.geometry.layers))
        assert {len(choice) for _, _, choice in looks} == {1, 5, 2, 8}
        for layer, streams, choice in looks:
            prefix, streams = f"{model.p}layers.{layer}.", streams.astype(np.float64)
            if hybrid:
                x = model.normed(f"{prefix}post_attention_layernorm", streams)
            else:
                x = model.mix(f"{prefix}mlp_hyper_connection.", streams)[0]
            scores = oracle.ops.linear(x, model.W(f"{prefix}mlp.gate.weight"))
            best = np.argsort(-scores, axis=1, kind="stable")[:, : choice.shape[1]]
            assert np.array_equal(choice, best)


def test_choices_of_several_rows_come_by_rank(tmp_path: Path) -> None:
    write_tiny(tmp_path, dtype="BF16", seed=4)
    with Opened(tmp_path, prefetch="on") as opened:
        opened.engine.model.forward([5], opened.state)
        prefetch = opened.engine.model.prefetch
        prefetch._team = type("Silent", (), {"play": lambda *_: 0})()
        prefetch.choice[:2] = [[4, 1, 2], [1, 7, 0]]
        ids, ranks = prefetch._look(3, 2)
        assert ids.tolist() == [4, 1, 7, 2, 0] and ranks.tolist() == [0, 0, 1, 2, 2]


def test_the_layer_behind_is_asked_where_the_next_has_all(tmp_path: Path) -> None:
    write_tiny(tmp_path, dtype="BF16", seed=4)
    with Opened(tmp_path, prefetch="on") as opened:
        opened.engine.model.forward([5], opened.state)
        prefetch, store = opened.engine.model.prefetch, opened.engine.store
        store.table[:] = 64
        assert prefetch.ahead(2, 1) is None
        store.table[4, :] = 0
        layer, ids = prefetch.ahead(2, 1)
        assert layer == 4 and ids == prefetch.choice[0].tolist()
        store.table[3, 0::2] = 0
        layer, ids = prefetch.ahead(2, 1)
        assert layer == 3 and ids == prefetch.choice[0].tolist()  # those that are there too: they must stay
        assert prefetch.ahead(opened.engine.geometry.layers - 1, 1) is None
        store.table[:] = 0


def test_nothing_is_asked_while_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, dtype="BF16", seed=4)
    with Opened(tmp_path, cap=8, prefetch="on") as opened:
        for layer in range(opened.engine.geometry.layers):
            opened.engine.store.ensure(layer, range(8))
        monkeypatch.setattr(Prefetch, "ahead", lambda *_: pytest.fail("asked"))
        opened.engine.model.forward([5], opened.state)
        assert opened.engine.model.player.waited == 0.0


def test_the_ops_need_the_bytes_that_are_planned(model: tuple[str, Path]) -> None:
    name, path = model
    with open_model(path, EVERY[name][1] | {"prefetch": "off"}) as engine:
        without, g, weights = engine.model.workspace_bytes, engine.geometry, engine.weights.nbytes
    with open_model(path, EVERY[name][1] | {"prefetch": "on"}) as engine:
        codes = engine.plan.survey.codes
        added = engine.model.workspace_bytes - without
        assert prefetch_bytes(g, 0) <= added <= prefetch_bytes(g, codes)
        assert engine.weights.nbytes == weights  # the layers' own, not a second time


def test_nano_is_guessed_well_and_waits_less() -> None:
    """What reading ahead is for: of the guesses most are used, and few experts are waited for from the beginning."""
    found = {}
    for mode in ("off", "on"):
        with Opened(NANO, cap=8, prefetch=mode, mtp=False, warm_start=False, usage_save=False) as opened:
            engine, state = opened.engine, opened.state
            engine.model.forward(NANO_PROMPT, state)
            before, logits = engine.store.misses, []
            for token in NANO_PROMPT:
                logits.append(engine.model.forward([token], state).logits.tobytes())
            store = engine.store
            found[mode] = store.misses - before, store.prefetched, store.prefetch_used, logits
    assert found["on"][3] == found["off"][3]
    assert found["off"][1] == 0 and found["on"][2] > 0.6 * found["on"][1]
    assert found["on"][0] < 0.7 * found["off"][0]


def test_a_forward_that_failed_is_no_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path, dtype="BF16", seed=4)
    with Opened(tmp_path, cap=4, prefetch="on") as opened:
        prefetch, store, real = opened.engine.model.prefetch, opened.engine.store, opened.engine.store.ensure

        def failing(layer: int, ids: list[int], ahead: object = None, **_: object) -> None:
            real(layer, ids, ahead)
            if layer == 3:
                raise RuntimeError("here")

        monkeypatch.setattr(store, "ensure", failing)
        with pytest.raises(RuntimeError):
            opened.engine.model.forward([5], opened.state)
        assert prefetch._asked and prefetch.score.asked.sum() == 0
        monkeypatch.setattr(store, "ensure", real)
        opened.engine.model.forward([5], opened.state)
        assert prefetch.score.asked.sum() == sum(len(ids) for _, _, ids, _ in prefetch._asked)


# ---- what pays ---------------------------------------------------------------------------------------------------


def test_a_rank_is_left_out_below_one_in_two_and_old_experts_fade() -> None:
    score, ranks = Score(3), np.arange(3)
    for number in range(ENOUGH):
        assert score.paying(0).all()
        score.add(0, ranks, np.array([True, number % 2 == 0, number % 3 == 0]))
    assert score.paying(0).tolist() == [True, True, False] and score.paying(1).all()
    for _ in range(4 * ENOUGH):
        score.add(0, ranks, np.array([True, True, True]))
    assert score.paying(0).all()
    for _ in range(10_000):
        score.add(0, ranks, np.array([True, True, False]))
    assert score.asked.max() < 10_000 / 8 and score.paying(0).tolist() == [True, True, False]


def test_ranks_left_out_are_tried_again(tmp_path: Path) -> None:
    write_tiny(tmp_path, dtype="BF16", seed=4)
    with Opened(tmp_path, cap=8, prefetch="auto") as opened:
        opened.engine.model.forward([5], opened.state)
        prefetch, asked = opened.engine.model.prefetch, []
        prefetch.trial.on = True
        opened.engine.store.table[:] = 0
        prefetch.score.asked[:] = 100  # and none of them used
        for _ in range(2 * AGAIN):
            asked.append(prefetch.ahead(0, 1) is not None)
            prefetch.begin()
            prefetch._forwards += 1
        assert sum(asked) == 2


def share_on(trial: Trial, forwards: int, cost: dict[bool, float]) -> float:
    """Of so many forwards, how many ran with it, where an expert costs this much with it and without."""
    ran = 0
    for _ in range(forwards):
        ran += trial.on
        trial.add(10 * cost[trial.on], 10)
    return ran / forwards


@pytest.mark.parametrize("first", [True, False])
def test_the_way_that_waits_less_is_kept_and_the_other_tried_again(first: bool) -> None:
    trial = Trial()
    costs = {first: 1e-4, not first: 3e-4}, {first: 3e-4, not first: 1e-4}
    trial.add(1e9, 1)
    share_on(trial, TURN - 1, costs[0])  # an empty cache
    assert share_on(trial, 4 * TURN, costs[0]) == 0.5
    seldom = 1 / (SELDOM + 1)
    for cost, kept in (*zip(costs, (first, not first), strict=True), (costs[0], first)):
        share_on(trial, 16 * SELDOM * TURN, cost)  # until it has noticed
        share = share_on(trial, 9 * (SELDOM + 1) * TURN, cost)
        assert share == pytest.approx(1 - seldom if kept else seldom, abs=0.02)


def test_forwards_without_experts_to_wait_for_cost_nothing() -> None:
    trial = Trial()
    for _ in range(10 * TURN):
        trial.add(0.0, 0)
    assert trial.cost == {True: 0.0, False: 0.0} and trial.on


def test_auto_reads_nothing_ahead_in_a_turn_without(tmp_path: Path) -> None:
    write_tiny(tmp_path, tiny_config(), dtype="BF16", seed=4)
    with Opened(tmp_path, cap=3, prefetch="auto") as opened:
        prefetch = opened.engine.model.prefetch
        for number, token in enumerate(random_ids(5 * TURN, tmp_path)):
            turn = number // TURN
            opened.engine.model.forward([int(token)], opened.state)
            assert turn not in (2, 4) or not prefetch._asked  # the first fills the cache, then with and without
        assert min(prefetch.trial.cost.values()) > 0 and prefetch.score.asked.sum() > 0
