"""Drafts never touch a distribution: rows 10 and 11 of the complaints, at 20,000 draws."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from coli.sampling import Sampler, Sampling
from coli.session import Request, Session
from coli.speculation.options import Speculation
from tests.speculation import harness
from tests.speculation.engines import open_tiny
from tests.tiny import tiny_config

DRAWS, TEMPERATURE = 20_000, 0.3
PROMPT = [3, 14, 15, 9, 26, 35]
CONFIG = tiny_config(
    num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], ple_layer_ids=[], vocab_size=40,
    eos_token_id=39,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with open_tiny(tmp_path_factory.mktemp("draws"), dict(config=CONFIG, dtype="F32", seed=40),
                   dict(ctx=32, threads=1)) as engine:  # fmt: skip
        yield engine


def probabilities(logits: np.ndarray) -> np.ndarray:
    scores = logits.astype(np.float64) / TEMPERATURE
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def fits(counts: np.ndarray, p: np.ndarray) -> bool:
    """A chi-square test at 0.1 %; tokens expected less than 5 times count as one. The quantile is Wilson and
    Hilferty's, good to 0.1 here."""
    expected = p * counts.sum()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    used = expected > 0
    free = int(used.sum()) - 1
    z = NormalDist().inv_cdf(0.999)
    limit = free * (1 - 2 / (9 * free) + z * (2 / (9 * free)) ** 0.5) ** 3
    return float(((seen - expected)[used] ** 2 / expected[used]).sum()) <= limit


def test_the_test_itself():
    rng, p = np.random.default_rng(0), np.array([0.5, 0.3, 0.15, 0.05])
    assert fits(rng.multinomial(DRAWS, p), p)
    assert not fits(rng.multinomial(DRAWS, [0.52, 0.28, 0.15, 0.05]), p)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["accept", "cycle"])
def test_row_10_drafts_bias_nothing(engine, mode):
    """The two tokens after the pick, drawn 20,000 times from the rows of a verify whose drafts are the likeliest tokens
    ("cycle": one of them made wrong): each must follow softmax(logits / T) of plain decoding."""
    model, pick = engine.model, 7

    def plain(ids):
        return probabilities(model.forward(ids, model.new_state()).logits[-1])

    first = plain([*PROMPT, pick])
    second_given = np.array([plain([*PROMPT, pick, token]) for token in range(40)])
    likely = [int(first.argmax()), int(second_given[first.argmax()].argmax())]
    assert 0.15 < first.max() < 0.9, "a draft that is sometimes right is the point of this test"
    options = Speculation(drafts=2, lookup=False, gate=False, mtp_force=mode)
    decoder, _ = harness.start(harness.Recording(engine, [*PROMPT, pick, *likely, 1, 1, 1], 6), options, "")
    decoder._trace = None
    harness.read(decoder, PROMPT, 16)
    place, counts = decoder.copy(), np.zeros((2, 40), np.int64)
    sampler = Sampler(Sampling(temperature=TEMPERATURE, seed=99), 40, tuple(PROMPT))
    for _ in range(DRAWS):
        token = sampler.pick(decoder.feed(pick))
        counts[0, token] += 1
        counts[1, sampler.pick(decoder.feed(token))] += 1
        decoder.finish()
        decoder.load(place)
    accepted = decoder.report().mtp.accepted
    assert sampler.draws == 2 * DRAWS == counts.sum()
    assert fits(counts[0], first)
    assert fits(counts[1], first @ second_given)
    assert accepted == counts[0, likely[0]] if mode == "accept" else 0 < accepted < counts[0, likely[0]]


def test_row_11_one_draw_a_token_and_the_same_text_with_any_drafts(engine, monkeypatch):
    """The generator moves once per emitted token and never for a draft, so a seed gives the same answer."""
    samplers = []

    def made(*args):
        samplers.append(Sampler(*args))
        return samplers[-1]

    monkeypatch.setattr("coli.session.Sampler", made)
    for seed in range(8):
        request = Request(tuple(PROMPT), 24, Sampling(temperature=1.3, top_p=0.95, seed=seed), stop_ids=frozenset())
        answers = set()
        for options in (Speculation.off(), Speculation(gate=False), Speculation(drafts=3, gate=False, lookup=False),
                        Speculation(drafts=0), Speculation(mtp=False, gate=False)):  # fmt: skip
            session = Session(engine, options)
            "".join(session.generate(request))
            sampler = samplers[-1]
            assert sampler.draws == len(session.report.token_ids) == 24 and session.seed == seed
            answers.add((session.report.token_ids, session.last_logits.tobytes(), repr(sampler.state())))
        assert len(answers) == 1, f"seed {seed}"
