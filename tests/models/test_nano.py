"""The shipped checkpoint against its own oracle: greedy ids of every prompt, logits within float32's reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from coli.engine import Engine
from coli.session import Request, Session
from coli.settings import load

ORACLE = Path(__file__).parents[1] / "data" / "nano_oracle"
CASES = json.loads((ORACLE / "oracle.json").read_text())
# float32 arithmetic on both sides; model_spec.md section 0 saw up to 2.3e-4 between float32 runs of one model
TOLERANCE = 2.3e-4


@pytest.fixture(scope="module")
def session():
    with Engine.open(load({"threads": 2}, {})[0]) as engine:
        yield Session(engine)


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_and_logits(session, name):
    case, arrays = CASES[name], np.load(ORACLE / f"{name}.npz")
    greedy = case["greedy_ids"]
    prompt = tuple(case["prompt_ids"])
    answer = session.engine.model.forward(prompt, _fresh(session))
    assert np.abs(answer.logits[-1] - arrays["prompt_last_logits"]).max() <= TOLERANCE
    assert np.abs(answer.streams[-1] - arrays["streams_last"]).max() <= 10 * TOLERANCE
    "".join(session.generate(Request(prompt, max_tokens=len(greedy))))
    assert list(session.report.token_ids) == greedy
    assert np.abs(session.last_logits - arrays["final_logits"]).max() <= TOLERANCE


def _fresh(session):
    session.state.reset()
    return session.state


def test_the_prompt_top_five_of_every_position(session):
    case, arrays = CASES["long"], np.load(ORACLE / "long.npz")
    logits, state = [], _fresh(session)
    for at in range(0, len(case["prompt_ids"]), 8):
        logits.append(session.engine.model.forward(case["prompt_ids"][at : at + 8], state, want="all").logits.copy())
    logits = np.concatenate(logits)
    ids = arrays["prompt_top5_ids"]
    assert np.abs(np.take_along_axis(logits, ids, 1) - arrays["prompt_top5_logits"]).max() <= TOLERANCE
