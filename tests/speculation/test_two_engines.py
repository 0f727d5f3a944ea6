"""Where the rules of qwen36's head differ from qwen38's (spec_decoding.md sections 3, 5, 6): seven drafts, PMIN, who
wins a tie, its report lines. On a scripted model and head."""

from __future__ import annotations

import re
from typing import Any

import pytest

from coli.errors import UsageError
from coli.settings import load
from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation, idle
from coli.speculation.proposal import Proposal
from coli.trace import Record, most, replay
from tests.speculation.harness import counts, forced_counts
from tests.speculation.scripted import Text

DEPTHS = range(1, 8)


def seven(**changes: Any) -> Speculation:
    return Speculation(**{"lookup": False, "gate": False, "most": 7, "strict": True} | changes)


# ---- seven drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("mode", ["accept", "mixed", "cycle", "reject", *(f"row{row}" for row in range(1, 9))])
def test_forced_drafts_of_every_depth_are_counted_exactly(mode: str, depth: int) -> None:
    text = Text()
    report = text.decoder(seven(drafts=depth, mtp_force=mode)).report()
    assert report is not None and report.mtp is not None
    assert counts(report, "mtp") == forced_counts(mode, depth, text.fed)
    assert report.identities() == [] and len(report.mtp.by_position) == depth
    assert f", Q36_MTP_FORCE={mode}" in report.lines()[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_verify_has_a_row_for_the_pick_and_each_draft(depth: int) -> None:
    decoder = Text().decoder(seven(drafts=depth))
    assert max(decoder.model.rows[1:]) == depth + 1 <= 8  # type: ignore[attr-defined]


def test_a_depth_left_open_is_as_deep_as_the_engine_allows() -> None:
    assert max(Text().decoder(seven(drafts=0)).model.rows[1:]) == 8  # type: ignore[attr-defined]
    three = Speculation(lookup=False, gate=False, drafts=0)
    assert max(Text().decoder(three, engine="qwen38", wiring="b").model.rows[1:]) == 4  # type: ignore[attr-defined]


def test_the_gate_finds_depths_beyond_three() -> None:
    """Right drafts and rows that cost nothing: the deeper the better, once it is known that they stand."""
    report = Text(tokens=1000).decoder(seven(drafts=0, gate=True), clock=lambda rows: 1.0).report()
    assert report is not None and report.mtp is not None and report.gate is not None
    assert len(report.mtp.by_position) == 7 and report.mtp.by_position[6][0] > 30
    assert len(report.gate.acceptance) == 7 and report.identities() == []


def test_what_no_engine_can_do_is_refused() -> None:
    for wrong in (dict(drafts=8), dict(most=8), dict(pmin=1.5), dict(pmin=-0.1), dict(drafts=4, most=3)):
        with pytest.raises(UsageError):
            seven(**wrong)


def test_the_deepest_verify_sizes_the_undo_memory() -> None:
    of = lambda flags, engine: Speculation.of(load(flags, {})[0].resolve(engine)).deepest  # noqa: E731
    assert of({"drafts": "auto"}, "qwen38") == 5 and of({"drafts": "auto", "mtp": True}, "qwen36") == 7
    assert of({"mtp": True}, "qwen36") == 5 and of({"mtp": True, "lookup": False, "drafts": "6"}, "qwen36") == 6


# ---- PMIN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "written", "carried"),
    [
        ((0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9), 7, 7),
        ((0.9, 0.9, 0.4, 0.9, 0.9, 0.9, 0.9), 3, 2),  # the third is too unlikely, and nothing is written behind it
        ((0.9, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5), 7, 7),  # exactly as likely as asked
        ((0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9), 2, 1),
        ((0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9), 1, 1),  # the first is always kept
    ],
)
def test_the_head_stops_below_pmin(p: tuple[float, ...], written: int, carried: int) -> None:
    text = Text(prompt=5, tokens=5 + 1 + carried + 8)  # one whole verify, and room that does not cut it
    options = seven(drafts=7, pmin=0.5)
    decoder = text.decoder(options, p=p)
    assert decoder.model.rows[1] == 1 + carried  # type: ignore[attr-defined]
    report = decoder.report()
    assert report is not None and report.mtp is not None and report.identities() == []
    whole, rest = divmod(text.fed, 1 + carried)
    assert report.mtp.accepted == report.mtp.drafts == text.fed - report.forwards and report.forwards >= whole
    assert report.mtp.written >= written * (whole - (rest == 0))
    assert Text().decoder(seven(drafts=7), p=p).model.rows[1] == 8  # type: ignore[attr-defined]


def test_pmin_and_the_gates_own_trimming_go_together() -> None:
    report = Text(tokens=300).decoder(seven(drafts=5, gate=True, pstep=True, pmin=0.5), p=(0.9, 0.9, 0.9, 0.2, 1, 1, 1))
    found = report.report()
    assert found is not None and found.mtp is not None and found.identities() == []
    assert len(found.mtp.by_position) <= 3 and found.head_gated


# ---- who wins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copied", "drafted", "qwen38", "qwen36"),
    [  # (value, drafts) of both
        ((1.5, 2), (1.4, 3), "lookup", "lookup"),
        ((1.4, 5), (1.5, 1), "mtp", "mtp"),
        ((1.5, 3), (1.5, 2), "lookup", "lookup"),  # a tie, the copied one is longer
        ((1.5, 2), (1.5, 3), "mtp", "lookup"),  # the head's is longer, but not strictly better
        ((1.5, 2), (1.5, 2), "mtp", "lookup"),
        ((1.5, 2), (1.0, 0), "lookup", "lookup"),  # no drafts of the head
        ((1.0, 0), (1.5, 2), "mtp", "mtp"),
    ],
)
def test_the_choice_between_the_sources(
    monkeypatch: pytest.MonkeyPatch, copied: tuple[float, int], drafted: tuple[float, int], qwen38: str, qwen36: str
) -> None:
    monkeypatch.setattr(Decoder, "_look_up", lambda self, room: ([7] * copied[1], copied[1], copied[0]))
    monkeypatch.setattr(Decoder, "_depth", lambda self, room: (drafted[1], drafted[0]))
    monkeypatch.setattr(Decoder, "_draft", lambda self, token, depth: Proposal("mtp", [7] * depth, written=depth))
    for expected, options in ((qwen38, Speculation()), (qwen36, Speculation(most=7, strict=True))):
        decoder = Decoder.__new__(Decoder)
        decoder.options, decoder._most, decoder._shadow = options, None, None
        decoder.state = type("Place", (), {"ctx": 100, "length": 10})()  # type: ignore[assignment]
        decoder.gate = type("Gate", (), {"outdone": lambda self, source: None})()  # type: ignore[assignment]
        assert decoder._propose(1).source == expected


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_the_heads_line_has_the_gate_in_the_place_of_the_wiring() -> None:
    fixed = Text().decoder(seven(drafts=1)).report()
    assert fixed is not None
    assert fixed.lines()[0] == (
        "[qwen36 mtp] run: 1.96 tokens/forward (28 forwards per 55 tokens) | acceptance 100.0% (27/27 drafts) | "
        "gate off"
    )
    assert fixed.to_json()["mtp"]["wiring"] is None
    deep = Text().decoder(seven(drafts=5, mtp_force="row2")).report()
    assert deep is not None
    assert "| gate off, Q36_MTP_FORCE=row2 | fixed depth, by position: 1 100.0% " in deep.lines()[0]
    assert " 5 0.0% (0/" in deep.lines()[0] and " 6 " not in deep.lines()[0]


@pytest.mark.parametrize(("options", "said"), [
    (dict(drafts=0, gate=True), "| gate on, "), (dict(drafts=3, gate=True, pstep=True), "| gate on, "),
    (dict(drafts=3, gate=True), "| gate off |"), (dict(drafts=1, gate=True, pstep=True), "| gate off"),
    (dict(drafts=0), "| gate off |"),
])  # fmt: skip
def test_the_gate_is_on_where_it_has_a_say_in_the_heads_drafts(options: dict[str, Any], said: str) -> None:
    report = Text(tokens=300).decoder(seven(**options), clock=lambda rows: 1.0 + 0.1 * rows).report()
    assert report is not None and said in report.lines()[0] and report.lines()[0].startswith("[qwen36 mtp] run: ")
    auto = "depth by the gate, by position: " in report.lines()[0]
    assert auto == (options == dict(drafts=0, gate=True))
    assert bool(re.search(r" 7 [0-9.]+% ", report.lines()[0])) == (options["drafts"] == 0)
    names = [line.split("]")[0][1:] for line in report.lines()]
    assert ("qwen36 spec gate" in names) == ("gate on" in said) and "qwen36 expert reads" in names


def test_qwen38s_line_is_as_it_was() -> None:
    report = Text().decoder(Speculation(lookup=False, gate=False), engine="qwen38", wiring="b").report()
    assert report is not None
    assert report.lines()[0] == (
        "[qwen38 MTP] run: 2.89 tokens/forward (19 forwards per 55 tokens) | acceptance 100.0% (36/36 drafts) | "
        "wiring b | fixed depth, by position: 1 100.0% (18/18) 2 100.0% (18/18) 3 0.0% (0/0)"
    )


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"pmin": 0.5}, {}, "--pmin has no effect: the first draft is always kept"),
        ({"drafts": "2", "pmin": 0.5}, {}, None),
        ({"drafts": "3"}, {"Q36_MTP_FORCE": "row4"}, "Q36_MTP_FORCE has no effect: a verify has 3 drafts"),
        ({"drafts": "auto"}, {"Q36_MTP_FORCE": "row7"}, None),
        ({}, {"Q36_MTP_VOCAB_IDS": "ids", "Q36_MTP_VOCAB": "9"}, "Q36_MTP_VOCAB has no effect: the head scores the"),
        ({}, {"Q36_MTP_VOCAB_IDS": "ids", "Q36_MTP_DUMP": "d"}, "Q36_MTP_VOCAB_IDS has no effect: Q36_MTP_DUMP has"),
        ({"mtp_wiring": "a"}, {"Q38_MTP_CAP": "1"}, None),  # the engine's warning, not this one
        ({"pstep": True, "drafts": "7"}, {}, None),
    ],
)
def test_a_setting_of_the_head_that_cannot_act_is_said(
    flags: dict[str, Any], environ: dict[str, str], said: str | None
) -> None:
    names = {"pmin": "mtp_pmin", "pstep": "mtp_pstep"}
    flags = {names.get(name, name): value for name, value in flags.items()}
    lines = idle(load(flags, environ)[0].resolve("qwen36"), head=True)
    assert len(lines) == (said is not None) and all(line.startswith(said or "") for line in lines)


# ---- the trace -------------------------------------------------------------------------------------------------------


def test_a_replay_reaches_as_deep_as_the_traces_engine() -> None:
    value = {
        "position": 7, "source": "mtp", "k": 7, "written": 7, "p": None, "drafts": [5] * 7, "accepted": 7, "judged": 7,
        "seconds": 2.0, "draft_seconds": 0.7, "bytes": 0, "rejected_bytes": 0, "pick": 3, "ended": False,
    }  # fmt: skip
    records = [Record.of(value)]
    depths = {head: [row.depth for row in replay(records, head=head) if row.source == "mtp"] for head in (3, 7)}
    assert depths == {3: [0, 1, 2, 3], 7: [0, 1, 2, 3, 4, 5, 6, 7]}
    (row,) = [row for row in replay(records, head=7) if (row.source, row.depth) == ("mtp", 7)]
    assert row.tokens_per_forward == 8.0 and row.seconds_per_token == pytest.approx(2.7 / 8)
    assert most({"speculation": {"most": 7}}) == 7 and most({}) == most({"speculation": {}}) == 3
    assert most({"speculation": {"most": True}}) == 0
