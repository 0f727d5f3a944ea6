"""The shipped model's own head against its oracle: the drafts after each prompt, and what decoding with 1, 2 and 3 of
them costs and brings; and nano's real prompts through the exactness harness."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coli.engine import Engine
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from tests.speculation.harness import Recording, compare, fuzz, record

CASES = json.loads((Path(__file__).parents[1] / "data" / "nano_oracle" / "oracle.json").read_text())
SHORT = [name for name in CASES if name != "long"]


@pytest.fixture(scope="module")
def engine():
    with Engine.open(load({"threads": 2}, {})[0]) as engine:
        yield engine


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_counts_and_drafts_are_the_oracles(engine, name, depth):
    """The oracle writes no draft behind the answer's last token and counts that one as accepted too, so the engine is
    let go on for one token: then its last verify settles the same drafts."""
    case, trace = CASES[name], []
    greedy, expected = case["greedy_ids"], case["speculative"][str(depth)]
    session = Session(engine, Speculation(drafts=depth, lookup=False, gate=False), trace=trace.append)
    "".join(session.generate(Request(tuple(case["prompt_ids"]), len(greedy) + 1, stop_ids=frozenset())))
    assert list(session.report.token_ids[:-1]) == greedy
    found = session.report.speculation
    assert (found.mtp.verifies, found.mtp.drafts, found.mtp.accepted) == (
        expected["verify_steps"], expected["drafted"], expected["accepted"])  # fmt: skip
    assert trace[0]["drafts"] == case["mtp_drafts_after_prompt"][:depth]
    assert found.identities() == [] and not found.ended_mid_verify


@pytest.fixture(scope="module")
def recordings(engine) -> dict[str, Recording]:
    return {name: record(engine, CASES[name]["prompt_ids"], CASES[name]["greedy_ids"]) for name in SHORT}


WAYS = {
    "default": Speculation(), "by the gate": Speculation(drafts=0), "3, no gate": Speculation(drafts=3, gate=False),
    "per step": Speculation(drafts=3, pstep=True, lookup=False), "lookup": Speculation(mtp=False, gate=False),
    "cycle": Speculation(drafts=3, gate=False, mtp_force="cycle", lookup=False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_real_answers_are_plain_ones_byte_for_byte(engine, recordings, name):
    for way, options in WAYS.items():
        compare(recordings[name], options, f"nano, {name}, {way}", absorb=way == "by the gate")
    for seed in range(2):
        fuzz(recordings[name], seed, f"nano, {name}")


SAMPLINGS = {
    "greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=4),
    "filters and penalties": Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3, presence_penalty=1.0, seed=5),
}  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_sessions_answer_is_the_plain_one(engine, sampling):
    request = Request(tuple(CASES["rename"]["prompt_ids"]), 60, SAMPLINGS[sampling])
    answers = []
    for options in (Speculation.off(), Speculation(), Speculation(drafts=3, gate=False)):
        session = Session(engine, options)
        "".join(session.generate(request))
        report = session.report
        answers.append((report.token_ids, report.text, report.finish_reason, session.last_logits.tobytes()))
    assert answers[0] == answers[1] == answers[2]
