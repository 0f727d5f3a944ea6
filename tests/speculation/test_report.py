"""The report: the lines of spec_decoding.md section 6 letter by letter, the document's keys, and the counters'
identities on random runs (complaint rows 21 to 23, 30)."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from coli.speculation.report import (
    DOUBT_AFTER,
    GateReport,
    SourceReport,
    SpeculationReport,
    VocabularyReport,
    acceptance_warning,
)
from coli.speculation.tally import Tally

MTP = SourceReport(
    "mtp", verifies=35, drafts=70, written=70, accepted=63, judged=64, by_position=((35, 34), (35, 29)),
    judged_by_position=((35, 34), (29, 29)),
)  # fmt: skip
LOOKUP = SourceReport("lookup", verifies=64, drafts=67, written=90, accepted=57, judged=60, declined=32, probes=5)
GATE = GateReport(
    t1_s=0.2431, rows=((2, 1.31), (3, 1.62)), rho=0.31, draft_s=0.0098, first_s=0.004,
    acceptance=(0.97, 0.83, 0.5, 0.5, 0.5), decided=True,
)  # fmt: skip
VOCABULARY = VocabularyReport(size=16204.4, inside=97, picks=99, appended=2, rebuilds=1, total=248320)


def report(**changes: Any) -> SpeculationReport:
    whole: dict[str, Any] = {
        "engine": "qwen38", "tokens": 99, "forwards": 36, "mtp": MTP, "lookup": None, "gate": None, "gate_on": True,
        "fixed_depth": 2, "wiring": "b", "mtp_force": None, "lookup_force": None, "ended_mid_verify": False,
        "expert_bytes": 9_900_000, "rejected_rows": 7, "rejected_bytes": 420_000, "vocabulary": None,
    }  # fmt: skip
    return SpeculationReport(**{**whole, **changes})


def test_a_gate_is_read_back_from_what_was_told() -> None:
    for gate in (GATE, replace(GATE, t1_s=None, rows=())):
        told = json.loads(json.dumps(gate.to_json()))
        assert GateReport.of({"on": True, **told}).line() == gate.line()


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_the_heads_line_is_the_laws() -> None:
    assert report().lines()[0] == (
        "[qwen38 MTP] run: 2.75 tokens/forward (36 forwards per 99 tokens) | acceptance 90.0% (63/70 drafts) | "
        "wiring b | fixed depth, by position: 1 97.1% (34/35) 2 82.9% (29/35) 3 0.0% (0/0)"
    )


def test_the_lookups_line_is_the_laws() -> None:
    alone = report(engine="qwen36", tokens=159, forwards=102, mtp=None, lookup=LOOKUP)
    assert alone.lines()[0] == (
        "[qwen36 lookup] run: 1.56 tokens/forward (102 forwards per 159 tokens) | acceptance 85.1% (57/67 drafts in 64 "
        "verifies) | gate on, 32 declined, 5 probes"
    )


def test_the_gates_line_is_the_laws_and_only_there_when_it_decided() -> None:
    line = (
        "[qwen38 spec gate] run: T(1) 243.1 ms, rows 2:1.31 3:1.62, rho 0.31, 9.8 ms per extra draft, acceptance by "
        "position 0.97 0.83 0.50 0.50 0.50"
    )
    assert report(gate=GATE).lines()[1] == line
    assert not any("spec gate" in line for line in report(gate=replace(GATE, decided=False)).lines())
    blank = report(gate=replace(GATE, t1_s=None, rows=())).lines()[1]
    assert "run: T(1) not measured, rho 0.31, " in blank


def test_depth_one_has_no_positions_and_the_gates_depth_says_so() -> None:
    assert report(fixed_depth=1).lines()[0].endswith("(63/70 drafts) | wiring b")
    assert "| depth by the gate, by position: 1 97.1%" in report(fixed_depth=0).lines()[0]
    assert "| fixed depth, by position: 1 97.1%" in report(fixed_depth=0, gate_on=False).lines()[0]


def test_force_and_the_end_of_the_run_are_said() -> None:
    both = report(lookup=LOOKUP, gate_on=False, mtp_force="mixed", lookup_force="row2", ended_mid_verify=True)
    mtp, lookup = both.lines("turn 7")[:2]
    assert "[qwen38 MTP] turn 7: " in mtp and "| wiring b, Q38_MTP_FORCE=mixed | fixed depth" in mtp
    assert mtp.endswith("3 0.0% (0/0) | ended mid-verify")
    assert lookup.endswith("| gate off, COLI_LOOKUP_FORCE=row2 | ended mid-verify")


def test_the_draft_list_the_reads_and_the_warnings_follow() -> None:
    lines = report(vocabulary=VOCABULARY, warnings=("the head is odd",)).lines()
    assert lines[1:] == [
        "[qwen38 draft list] run: 16,204 of 248,320 tokens on average | picks inside 98.0% (97/99) | 2 ids appended, "
        "1 rebuild",
        "[qwen38 expert reads] run: 100 kB per emitted token | 420 kB in 7 rejected rows (60.0 kB each)",
        "the head is odd",
    ]


def test_a_source_that_never_drafted_has_its_line_and_one_that_is_off_has_none() -> None:
    idle = report(tokens=5, forwards=5, mtp=SourceReport("mtp"), lookup=SourceReport("lookup"), rejected_rows=0,
                  rejected_bytes=0)  # fmt: skip
    mtp, lookup, reads = idle.lines()
    assert "1.00 tokens/forward (5 forwards per 5 tokens) | acceptance 0.0% (0/0 drafts) |" in mtp
    assert "by position: 1 0.0% (0/0) 2 0.0% (0/0) 3 0.0% (0/0)" in mtp
    assert "acceptance 0.0% (0/0 drafts in 0 verifies) | gate on, 0 declined, 0 probes" in lookup
    assert reads.endswith("| 0 B in 0 rejected rows")
    assert report(tokens=0, forwards=0, mtp=None).lines() == []


def test_an_answer_of_one_token_divides_nothing_by_zero() -> None:
    none = report(tokens=0, forwards=0, mtp=SourceReport("mtp"), expert_bytes=0, rejected_rows=0, rejected_bytes=0)
    assert "0.00 tokens/forward (0 forwards per 0 tokens)" in none.lines()[0]
    assert none.to_json()["bytes_per_token"] == 0.0 and none.identities() == []


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_document_has_exactly_the_public_keys() -> None:
    document = report(lookup=LOOKUP, gate=GATE, vocabulary=VOCABULARY).to_json()
    assert list(document) == ["tokens", "forwards", "mtp", "lookup", "gate", "ended_mid_verify", "bytes_per_token",
                              "rejected", "draft_list", "warnings"]  # fmt: skip
    counters = ["drafts", "accepted", "judged", "written", "trimmed", "verifies", "declined", "probes", "by_position"]
    assert list(document["mtp"]) == [*counters, "wiring", "depth", "force"]
    assert list(document["lookup"]) == [*counters, "force"]
    assert document["mtp"]["by_position"] == [{"drafts": 35, "accepted": 34, "judged": 35},
                                              {"drafts": 35, "accepted": 29, "judged": 29}]  # fmt: skip
    assert (document["lookup"]["written"], document["lookup"]["trimmed"]) == (90, 23)
    gate = document["gate"]
    assert gate["on"] is True and gate["t1_ms"] == pytest.approx(243.1) and gate["draft_ms"] == pytest.approx(9.8)
    assert gate["rows"] == {"2": 1.31, "3": 1.62} and gate["rho"] == 0.31
    assert document["bytes_per_token"] == 100_000 and document["rejected"] == {"rows": 7, "bytes": 420_000}
    assert document["mtp"]["depth"] == 2 and report(fixed_depth=0).to_json()["mtp"]["depth"] == "auto"
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_what_is_off_is_null() -> None:
    document = report(mtp=None).to_json()
    assert [document[name] for name in ("mtp", "lookup", "gate", "draft_list")] == [None] * 4


# ---- identities ------------------------------------------------------------------------------------------------------


def random_run(seed: int) -> SpeculationReport:
    """A run as a decoder has it: plain steps and verifies of both sources, the last one perhaps not settled."""
    rng = random.Random(seed)
    tallies = {"mtp": Tally("mtp"), "lookup": Tally("lookup")}
    tokens = forwards = undone = 0
    for _ in range(steps := rng.randrange(1, 60)):
        forwards, tokens = forwards + 1, tokens + 1
        name = rng.choice(["mtp", "lookup", None])
        if name is None:
            continue
        written = rng.randrange(1, 4 if name == "mtp" else 6)
        carried = rng.randrange(0, written + 1)
        tallies[name].wrote(written)
        if carried:
            accepted = rng.randrange(0, carried + 1)
            ended = forwards == steps and rng.random() < 0.5
            tallies[name].settled(carried, accepted, accepted + (accepted < carried and not ended))
            tokens, undone = tokens + accepted, undone + carried - accepted
    mtp, lookup = (tally.report(rng.randrange(9), rng.randrange(9)) for tally in tallies.values())
    return report(tokens=tokens, forwards=forwards, mtp=mtp, lookup=lookup, rejected_rows=undone,
                  expert_bytes=undone * 100, rejected_bytes=undone * 10)  # fmt: skip


def test_every_identity_holds_on_a_thousand_random_runs() -> None:
    for seed in range(1000):
        run = random_run(seed)
        assert run.identities() == [], f"seed {seed}"
        for source in run.sources:
            row = source.to_json()
            assert sum(place["accepted"] for place in row["by_position"]) == row["accepted"]
            carried = sum(place["drafts"] for place in row["by_position"])
            assert carried == row["drafts"] == row["written"] - row["trimmed"]
            assert sum(place["judged"] for place in row["by_position"]) == row["judged"]


@pytest.mark.parametrize("changes", [
    {"tokens": 100}, {"forwards": 34}, {"rejected_rows": 8}, {"rejected_bytes": 10**9},
    {"mtp": replace(MTP, accepted=62)}, {"mtp": replace(MTP, drafts=69)}, {"mtp": replace(MTP, verifies=34)},
    {"mtp": replace(MTP, written=69)}, {"mtp": replace(MTP, judged=62)}, {"mtp": replace(MTP, judged=99)},
    {"mtp": replace(MTP, by_position=((35, 29), (35, 34)))}, {"mtp": replace(MTP, by_position=((35, 36), (35, 27)))},
    {"mtp": replace(MTP, judged=70, judged_by_position=((35, 34), (35, 29)))},
])  # fmt: skip
def test_a_counter_that_is_off_breaks_an_identity(changes: dict[str, Any]) -> None:
    assert report().identities() == []
    assert report(**changes).identities() != []


# ---- doubts ----------------------------------------------------------------------------------------------------------


def test_a_head_whose_drafts_almost_never_stand_is_doubted_after_enough_of_them() -> None:
    line = acceptance_warning(1000, 12)
    assert line is not None and "almost never accepted (1.2% (12/1000))" in line and "another checkpoint" in line
    assert acceptance_warning(DOUBT_AFTER, 0) is not None
    assert acceptance_warning(DOUBT_AFTER - 1, 0) is None and acceptance_warning(1000, 200) is None
    assert acceptance_warning(0, 0) is None
