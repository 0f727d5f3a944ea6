"""qwen36's draft head: its numbers against the oracle's, its bytes whatever the order of work, and how it drafts."""

from __future__ import annotations

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import ModelError
from coli.settings import load
from coli.speculation.options import Speculation
from tests import oracle
from tests.models.bench_model import random_ids
from tests.speculation import harness
from tests.speculation.engines import open_tiny
from tests.speculation.harness import compare, greedy, head_content, record
from tests.tiny36 import (
    HEADED,
    copied36_config,
    copy_trunk_into_head36,
    every_matrix,
    odd36_config,
    tiny36_config,
    write_tiny36,
)

# "f32 rows" of model_spec.md section 0, times ten
TOLERANCE = {"qwen3_next": 7.4e-4, "qwen3_5_text": 1.3e-3, "qwen3_5_moe_text": 2.3e-3}

CASES = {family: (family, tiny36_config(family), {}) for family in HEADED} | {
    f"{family}, odd sizes": (family, odd36_config(family), {}) for family in HEADED
} | {
    f"{family}, fp8": (family, tiny36_config(family), dict(dtype="FP8", fp8=every_matrix, block=(32, 48)))
    for family in HEADED
} | {
    "trunk fused, head one by one": ("qwen3_5_moe_text", tiny36_config("qwen3_5_moe_text"),
                                     dict(per_expert=False, head_per_expert=True)),
    "trunk one by one, head fused": ("qwen3_next", tiny36_config("qwen3_next"),
                                     dict(per_expert=True, head_per_expert=False)),
    "trunk f32, head of a config that does not name it": (
        "qwen3_5_text", {k: v for k, v in tiny36_config("qwen3_5_text").items() if not k.startswith("mtp_")}, {}),
    "tied": ("qwen3_5_moe_text", tiny36_config("qwen3_5_moe_text", tie_word_embeddings=True), {}),
}  # fmt: skip


def opened(folder, **flags) -> Engine:
    return Engine.open(load({"model": str(folder), "threads": 2, "ctx": 96, "mtp": True} | flags, {})[0])


def fed(engine, ids, pieces, absorb=lambda at: False):
    """(trunk state, head's state) behind `ids`, run in these pieces."""
    state, pairs, at = engine.model.new_state(), engine.head.new_state(), 0
    for size in pieces:
        streams = engine.model.forward(ids[at : at + size], state, want="last").streams
        engine.head.note(pairs, state, streams)
        at += size
        if absorb(at):
            engine.head.absorb(pairs, state)
    assert at == len(ids)
    return state, pairs


@pytest.mark.parametrize(("family", "config", "form"), CASES.values(), ids=CASES.keys())
def test_scores_are_the_oracles_at_every_depth(tmp_path, family, config, form):
    """A prompt in pieces, pairs one by one and in batches, then seven drafts from the head's own rows."""
    folder = write_tiny36(tmp_path, config, seed=21, **form)
    trunk = oracle.load(folder)
    head, ids = oracle.head_of(trunk), random_ids(70, folder).tolist()
    hidden = trunk.forward(np.array(ids[:-1]))[1]
    scores, rows = head.rows(hidden, np.array(ids[1:]))
    own, row = scores[-1], rows[-1:]
    with opened(folder) as engine:
        state, pairs = fed(engine, ids[:-1], (33, 17, 1, 18))
        draft, p = engine.head.draft(pairs, state, ids[-1])
        for depth in range(1, 8):
            bar = TOLERANCE[family] * max(1.0, np.abs(own).max() / 5)
            assert np.abs(engine.head.scores - own).max() <= bar
            assert draft == own.argmax() and p == pytest.approx(_share(own), rel=3e-3)
            token = draft
            draft, p = engine.head.deeper(pairs, token, depth)
            own, row = head.rows(row, np.array([token]))
            own = own[0]


def _share(scores: np.ndarray) -> float:
    return float(1 / np.exp(scores.astype(np.float64) - scores.max()).sum())


@pytest.mark.parametrize("family", HEADED)
def test_pairs_settled_at_once_and_one_by_one_leave_the_same_bytes(tmp_path, family):
    """K, V, the row that waits, and the drafts and scores behind them."""
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=24, dtype="BF16")
    ids, seen = random_ids(70, folder).tolist(), []
    ways = (([1] * 69, lambda at: True), ([69], lambda at: False), ([7] * 9 + [6], lambda at: at % 3 == 0),
            ([1] * 69, lambda at: False))  # fmt: skip
    with opened(folder) as engine:
        for pieces, absorb in ways:
            state, pairs = fed(engine, ids[:-1], pieces, absorb)
            engine.head.absorb(pairs, state)
            content = head_content(pairs)
            drafts = [engine.head.draft(pairs, state, ids[-1])]
            scores = [engine.head.scores.tobytes()]
            for depth in range(1, 8):
                drafts.append(engine.head.deeper(pairs, drafts[-1][0], depth))
                scores.append(engine.head.scores.tobytes())
            seen.append((content, drafts, scores))
    assert all(way == seen[0] for way in seen[1:])


@pytest.mark.parametrize("family", HEADED)
@pytest.mark.parametrize("drafts", [1, 2, 5, 7])
def test_a_head_that_is_the_trunks_function_is_always_right(tmp_path, family, drafts):
    """Natural drafts, none forced: every one stands, at every depth."""
    form = dict(config=copied36_config(family), dtype="BF16", seed=26, change=copy_trunk_into_head36)
    with open_tiny(tmp_path, form, dict(mtp=True)) as engine:
        prompt = np.random.default_rng(3).integers(0, 256, 20).tolist()
        recording = record(engine, prompt, greedy(engine, prompt, 12 * (drafts + 1)))
        options = Speculation(drafts=drafts, most=7, strict=True, lookup=False, gate=False)
        report = compare(recording, options)
        assert report.mtp.drafts == report.mtp.accepted == report.mtp.judged == 12 * drafts
        assert report.forwards == report.mtp.verifies == 12


@pytest.mark.parametrize("family", HEADED)
def test_a_list_of_ids_scores_those_tokens_alone(tmp_path, family):
    """As the whole vocabulary's scores, bit for bit, at the places of the list."""
    folder = write_tiny36(tmp_path / "model", tiny36_config(family), seed=27, dtype="BF16")
    listed = [5, 9, 40, 41, 100, 200, 271]
    (tmp_path / "ids").write_text(" ".join(map(str, listed)))
    ids, scores = random_ids(30, folder).tolist(), []
    for flags in ({"mtp_vocab": 0}, {"mtp_vocab_ids": tmp_path / "ids"}):
        with opened(folder, **flags) as engine:
            state, pairs = fed(engine, ids[:-1], (29,))
            draft = engine.head.draft(pairs, state, ids[-1])[0]
            scores.append(engine.head.scores.copy())
    assert scores[1].tobytes() == scores[0][listed].tobytes() and draft == listed[int(scores[1].argmax())]


# ---- when there is one ---------------------------------------------------------------------------------------------


def test_it_is_read_only_when_asked_for(tmp_path):
    folder = write_tiny36(tmp_path, tiny36_config("qwen3_5_moe_text"), seed=28)
    with Engine.open(load({"model": str(folder), "threads": 1}, {})[0]) as engine:
        assert engine.head is None
    with Engine.open(load({"model": str(folder), "threads": 1}, {"Q36_MTP": "1"})[0]) as engine:
        assert engine.head is not None
    with Engine.open(load({"model": str(folder), "threads": 1}, {"Q38_MTP": "1"})[0]) as engine:
        assert engine.head is None


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_a_demanded_head_that_is_not_there_is_an_error(tmp_path, family):
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=28, mtp=False)
    with pytest.raises(ModelError, match="no draft head"):
        opened(folder)


def test_a_head_with_a_tensor_missing_is_an_error_only_where_it_is_asked_for(tmp_path):
    def crippled(weights):
        del weights["mtp.fc.weight"]

    folder = write_tiny36(tmp_path, tiny36_config("qwen3_5_text"), seed=28, change=crippled)
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight"):
        opened(folder)
    with Engine.open(load({"model": str(folder), "threads": 1}, {})[0]) as engine:
        assert engine.head is None


# ---- how it stops --------------------------------------------------------------------------------------------------


def test_a_head_whose_numbers_break_stops_and_the_answer_goes_on(tmp_path):
    form = dict(config=tiny36_config("qwen3_5_text"), dtype="F32", seed=22, change=_broken)
    with open_tiny(tmp_path, form, dict(mtp=True)) as engine:
        head, engine.head = engine.head, None
        ids = np.random.default_rng(2).integers(0, 272, 60).tolist()
        recording = record(engine, ids[:20], ids[20:])
        engine.head = head
        judge = _fed(recording)
        assert len(judge.warnings) == 1 and "not finite" in judge.warnings[0]


def _broken(weights: dict[str, np.ndarray]) -> None:
    """Finite weights, so that the load finds nothing; the products overflow."""
    weights["mtp.layers.0.mlp.gate_proj.weight"][:] = 1e30
    weights["mtp.layers.0.mlp.up_proj.weight"][:] = 1e30


def _fed(recording):
    options = Speculation(drafts=2, most=7, strict=True, lookup=False, gate=False)
    decoder, judge = harness.start(recording, options, "broken")
    judge.logits(0, harness.read(decoder, recording.ids[:20], 16))
    for at, token in enumerate(recording.tokens, 1):
        judge.logits(at, decoder.feed(token))
    decoder.finish()
    judge.state(head=False)
    return decoder.report()
