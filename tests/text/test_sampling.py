"""The sampler against plain references: which tokens stay, with which probability, and what a draw costs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coli.errors import NonFinite, UsageError
from coli.sampling import Sampler, Sampling, draw, ranked


def some_logits(vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def reference(logits: np.ndarray, sampling: Sampling) -> list[tuple[int, float]]:
    """(id, probability) of the kept tokens in ranking order: sorts everything, one filter after the other."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    top = float(logits[order[0]])
    kept = [(i, math.exp((float(logits[i]) - top) / sampling.temperature)) for i in order]
    kept = [(i, p) for i, p in kept if p > 0]
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, before, nucleus = math.fsum(p for _, p in kept), 0.0, []
    for i, p in kept:
        if before / total >= sampling.top_p:
            break
        nucleus.append((i, p))
        before += p
    kept = [(i, p) for i, p in nucleus if p / nucleus[0][1] >= sampling.min_p]
    total = math.fsum(p for _, p in kept)
    return [(i, p / total) for i, p in kept]


def near_a_cut(logits: np.ndarray, sampling: Sampling) -> bool:
    """Whether rounding alone decides what a filter keeps."""
    full = reference(logits, replace(sampling, top_p=1.0, min_p=0.0))
    masses = np.cumsum([p for _, p in full])
    ratios = np.array([p / full[0][1] for _, p in full])
    return bool((abs(masses - sampling.top_p) < 1e-9).any() or (abs(ratios - sampling.min_p) < 1e-9).any())


filters = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 300, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.99, 0.8, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1.0, 0.3, 0.01, 1e-6]),
)


@settings(max_examples=250, deadline=None)
@given(
    filters,
    st.sampled_from([1, 2, 7, 255, 700]),
    st.integers(0, 99),
    st.sampled_from([0.0, 0.01, 3.0, 20.0]),
    st.booleans(),
)
def test_what_is_kept_and_where_a_draw_lands(
    sampling: Sampling, vocab: int, seed: int, spread: float, ties: bool
) -> None:
    logits = some_logits(vocab, seed, spread)
    logits = np.round(logits * 2) / 2 if ties else logits
    logits[some_logits(vocab, seed + 1) > 5] = -np.inf
    assume(np.isfinite(logits.max()))
    assume(sampling.top_p == 1.0 and sampling.min_p in (0.0, 1.0) or not near_a_cut(logits, sampling))
    kept = reference(logits, sampling)
    edges = np.cumsum([p for _, p in kept])
    best = float(logits.max())
    assert draw(logits, best, sampling, 0.0) == kept[0][0]
    if kept[-1][1] > 1e-12:
        assert draw(logits, best, sampling, 1 - 2**-53) == kept[-1][0]
    for u in np.random.default_rng(seed).random(20):
        if abs(edges - u).min() > 1e-9:
            assert draw(logits, best, sampling, float(u)) == kept[int(np.searchsorted(edges, u))][0]


@settings(deadline=None)
@given(st.sampled_from([5, 64, 4000, 20_000]), st.integers(1, 5000), st.integers(0, 50), st.booleans())
def test_ranking_equals_a_full_sort(vocab: int, count: int, seed: int, ties: bool) -> None:
    scores = some_logits(vocab, seed)
    scores = np.round(scores) if ties else scores
    assert ranked(scores, count).tolist() == np.lexsort((np.arange(vocab), -scores))[:count].tolist()


def chi_square_limit(freedom: int) -> float:
    """The value passed by chance once in 100,000 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.6, seed=2),
        Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.05, seed=3),
    ],
)
def test_20000_draws_follow_the_softmax(sampling: Sampling) -> None:
    logits = some_logits(48, seed=4, spread=1.0)
    sampler = Sampler(sampling, 48)
    counts = np.bincount([sampler.pick(logits) for _ in range(20_000)], minlength=48)
    assert sampler.draws == 20_000
    expected = np.zeros(48)
    for token, p in reference(logits, sampling):
        expected[token] = 20_000 * p
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def penalised(logits: np.ndarray, sampling: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    """Penalties by the book, one token at a time."""
    out = []
    for token, logit in enumerate(logits.tolist()):
        if token in prompt or token in answer:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        out.append(
            logit - sampling.frequency_penalty * answer.count(token) - sampling.presence_penalty * (token in answer)
        )
    return out


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 19), max_size=30),
    st.sampled_from([1.0, 1.3, 0.7]),
    st.sampled_from([0.0, 1.0, -0.5]),
    st.sampled_from([0.0, 0.4, -0.3]),
    st.integers(0, 99),
)
def test_penalties_see_the_prompt_and_every_emitted_token(
    prompt: list[int], repetition: float, presence: float, frequency: float, seed: int
) -> None:
    sampling = Sampling(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    sampler = Sampler(sampling, 20, prompt)
    answer: list[int] = []
    for step in range(90):  # more than the history's first room
        logits = some_logits(20, seed * 100 + step)
        before = logits.copy()
        expected = np.array(penalised(logits, sampling, prompt, answer), np.float32)
        assert sampler.pick(logits) == int(expected.argmax())
        assert (logits == before).all()
        answer.append(sampler.emitted[-1])
    assert sampler.emitted == answer and sampler.draws == 0


def test_history_grows_past_its_first_room() -> None:
    sampler = Sampler(Sampling(presence_penalty=2.0), 1000, [3])
    assert [sampler.pick(np.zeros(1000, np.float32)) for _ in range(1000)] == list(range(1000))


def test_greedy_takes_the_lowest_id_and_draws_nothing() -> None:
    sampler = Sampler(Sampling(top_k=3, top_p=0.5, min_p=0.5), 5)
    assert sampler.pick(np.array([0, 2, 1, 2, 2], np.float32)) == 1
    assert sampler.draws == 0 and sampler.seed is None


def test_equal_seeds_give_equal_answers_and_no_seed_is_reported() -> None:
    rows = [some_logits(500, i) for i in range(50)]
    first = Sampler(Sampling(temperature=1.0, repetition_penalty=1.2), 500, [1])
    assert first.seed is not None and 0 <= first.seed < 1 << 53
    answer = [first.pick(row) for row in rows]
    again = Sampler(replace(first.sampling, seed=first.seed), 500, [1])
    assert [again.pick(row) for row in rows] == answer
    other = Sampler(replace(first.sampling, seed=first.seed + 1), 500, [1])
    assert [other.pick(row) for row in rows] != answer
    assert first.draws == len(rows)


@pytest.mark.parametrize(
    "sampling", [Sampling(frequency_penalty=0.5), Sampling(temperature=1.0, presence_penalty=1.0, seed=5)]
)
def test_restore_goes_back_exactly(sampling: Sampling) -> None:
    rows = [some_logits(60, i) for i in range(20)]
    sampler = Sampler(sampling, 60, [4, 5])
    for row in rows[:7]:
        sampler.pick(row)
    state = sampler.state()
    rest = [sampler.pick(row) for row in rows[7:]]
    end = sampler.draws
    for one in (sampler, Sampler(sampling, 60, [4, 5])):
        one.restore(state)
        assert [one.pick(row) for row in rows[7:]] == rest and one.draws == end
    assert len(state.emitted) == 7


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(repetition_penalty=1.1), Sampling(temperature=1.0, seed=1)])
@pytest.mark.parametrize("bad", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], [-math.inf] * 3])
def test_broken_logits_are_named_and_leave_no_trace(sampling: Sampling, bad: list[float]) -> None:
    sampler = Sampler(sampling, 3, [1])
    before = sampler.state()
    with pytest.raises(NonFinite, match="token 0 of the answer: the logit of token"):
        sampler.pick(np.array(bad, np.float32))
    assert sampler.state() == before
    assert sampler.pick(np.array([-math.inf, 1, -math.inf], np.float32)) == 1


def test_a_draw_on_an_edge_belongs_to_the_next_token() -> None:
    logits, sampling = np.zeros(4, np.float32), Sampling(temperature=1.0)
    assert [draw(logits, 0.0, sampling, u) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]


def test_the_smallest_temperature_is_greedy_without_warnings() -> None:
    sampler = Sampler(Sampling(temperature=5e-324, seed=0), 100)
    logits = some_logits(100)
    assert {sampler.pick(logits) for _ in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("top_k", -1),
        ("top_k", 1.0), ("top_k", True), ("repetition_penalty", 0.0), ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", None), ("seed", -1),
        ("seed", 1 << 64), ("seed", 0.5), ("temperature", True),
    ],
)  # fmt: skip
def test_bad_settings_name_the_field_and_its_range(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is .* from|{name} is .* above"):
        Sampling(**{name: value})


def test_wrong_prompt_and_shape() -> None:
    with pytest.raises(UsageError, match="token id 9 .* vocabulary of 8"):
        Sampler(Sampling(), 8, [1, 9])
    with pytest.raises(ValueError, match="shape"):
        Sampler(Sampling(), 8).pick(np.zeros(9, np.float32))


@settings(max_examples=100, deadline=None)
@given(filters, st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 49), st.floats(-100, 100)), max_size=4))
def test_bias_and_mask_come_first(sampling, seed, biases):
    """As if the logits had been other ones: a token out of question has no logit, and the caller's are left alone."""
    logits, rng = some_logits(50, seed), np.random.default_rng(seed)
    allowed = rng.random(50) < 0.5
    allowed[int(rng.integers(50))] = True
    other = logits.copy()
    for token, bias in biases:
        other[token] += np.float32(bias)
    other[~allowed] = -np.inf
    before = logits.tobytes()
    asked = replace(sampling, seed=seed, logit_bias=tuple(biases), presence_penalty=0.5)
    steered = Sampler(asked, 50, [1, 2])
    plain = Sampler(replace(asked, logit_bias=()), 50, [1, 2])
    for _ in range(5):
        assert steered.pick(logits, allowed) == plain.pick(other)
        assert allowed[steered.emitted[-1]] and logits.tobytes() == before


@pytest.mark.parametrize("bias", [((-1, 1.0),), ((1, 101.0),), ((1, float("nan")),), ((True, 1.0),), ((1, "1"),)])
def test_a_bad_bias_is_named(bias):
    with pytest.raises(UsageError, match="logit_bias"):
        Sampling(logit_bias=bias)


def test_a_bias_outside_the_vocabulary_is_named():
    with pytest.raises(UsageError, match="token 50"):
        Sampler(Sampling(logit_bias=((50, 1.0),)), 50)
