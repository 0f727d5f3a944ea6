"""Row 31: a token's logprob comes from the row that produced the pick, so drafts change no bit of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coli.logprobs import scored
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.speculation.options import Speculation

PROMPT = (5, 6, 7, 8) * 5


def tokens(engine, request, options, reference=()):
    session = Session(engine, options, reference=[*request.prompt_ids, *reference])
    found = [token for step in session.steps(request) for token in step.tokens]
    return found, session


@pytest.mark.parametrize("name", ["f32", "fp8", "moe fp8"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.1, seed=4, presence_penalty=1.0,
                                                           logit_bias=((9, 4.0),))])  # fmt: skip
def test_row_31_the_same_bits_with_drafts_and_without(engines, name, sampling):
    engine = engines[name]
    request = Request(PROMPT, 40, sampling, stop_ids=frozenset({-1}), logprobs=5)
    plain, session = tokens(engine, request, Speculation.off())
    answer = session.report.token_ids
    base = replace(Speculation.of(engine.settings), gate=False)
    for options in (replace(base, mtp=False, lookup_force="accept"), replace(base, drafts=3, mtp_force="cycle"), base):
        found, _ = tokens(engine, request, options, answer)
        assert found == plain
    assert len(plain) == 40 and tuple(token.id for token in plain) == answer
    for token in plain:
        assert len(token.top) == 5 and token.logprob < 0.0
        assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)
        assert token.id in dict(token.top) or token.logprob <= token.top[-1][1]


def test_they_are_the_models_own_and_sum_to_one(engines):
    """Whatever the request does with its logits: temperature, bias and penalties are no part of them."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 4, 300).astype(np.float32)
    logits[7] = -np.inf
    every = scored(logits, 3, 300)
    assert np.isclose(sum(np.exp(value) for _, value in every.top), 1.0, rtol=0, atol=1e-12)
    exact = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    assert all(np.isclose(value, exact[i], rtol=1e-12) for i, value in every.top if np.isfinite(exact[i]))
    assert every.logprob == dict(every.top)[3] and scored(logits, 3, 0).top == ()
    found, _ = tokens(engines["f32"], Request(PROMPT, 1, Sampling(temperature=0.5, seed=1), logprobs=2),
                      Speculation.off())  # fmt: skip
    greedy, _ = tokens(engines["f32"], Request(PROMPT, 1, Sampling(logit_bias=((9, 5.0),)), logprobs=2),
                       Speculation.off())  # fmt: skip
    assert found[0].top == greedy[0].top


def test_nobody_asked(engines):
    found, _ = tokens(engines["f32"], Request(PROMPT, 5, stop_ids=frozenset({-1})), Speculation.off())
    assert len(found) == 5 and all(token.logprob is None and token.top == () for token in found)


@pytest.mark.parametrize("options", [Speculation.off(), Speculation(gate=False, drafts=3)])
def test_a_constraint_and_a_bias_steer_every_pick(engines, options):
    """A mask of its own for every row, whether the row was a draft's or not."""
    engine = engines["f32"]

    class Parity:
        """Even tokens, then odd ones, in turn."""

        def __init__(self):
            self.taken = []

        def mask(self):
            return np.arange(engine.geometry.vocab) % 2 == len(self.taken) % 2

        def accept(self, token):
            self.taken.append(token)

        def admits(self, drafts):
            fitting = [token % 2 == (len(self.taken) + n) % 2 for n, token in enumerate(drafts)]
            return [*fitting, False].index(False)

    parity = Parity()
    request = Request(PROMPT, 12, Sampling(logit_bias=((44, 100.0), (43, -100.0))), stop_ids=frozenset({-1}),
                      constraint=parity)  # fmt: skip
    found, session = tokens(engine, request, options)
    assert list(session.report.token_ids) == parity.taken
    assert [token % 2 for token in parity.taken] == [0, 1] * 6
    assert parity.taken[0::2] == [44] * 6 and 43 not in parity.taken
