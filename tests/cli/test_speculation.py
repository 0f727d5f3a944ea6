"""`coli run` about drafts: settings and flags, the trace, `--check` and `--reference`, on a scripted engine and on the
shipped model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import coli.check as checking
from coli.check import Difference, check
from coli.errors import UsageError
from coli.reference import Reference, compare
from coli.sampling import Sampling
from coli.session import Request
from coli.settings import TABLE, VARIABLES, load
from coli.speculation.options import Speculation
from tests.conftest import FAKE, Coli, clean_env

DATA = Path(__file__).parents[1] / "data" / "nano_oracle"
CASES = json.loads((DATA / "oracle.json").read_text())
FLAGS = ("--mtp", "--no-mtp", "--drafts", "--mtp-vocab", "--mtp-vocab-ids", "--pmin", "--trunk", "--experts",
         "--pstep", "--no-pstep", "--lookup", "--no-lookup", "--lookup-drafts", "--gate", "--no-gate", "--trace",
         "--check", "--reference")  # fmt: skip


def rows(path: Path) -> list[dict[str, Any]]:
    header, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert header["coli_trace"] == 1
    return records


def write_reference(path: Path, case: dict[str, Any], **changes: Any) -> Path:
    full = case["prompt_ids"] + case["greedy_ids"]
    path.write_text(json.dumps({"prompt_ids": case["prompt_ids"], "full_ids": full, **changes}))
    return path


# ---- settings and flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("Q38_MTP", "0", "mtp", False), ("Q38_MTP", "1", "mtp", True), ("Q38_MTP_DRAFTS", "auto", "drafts", 0),
        ("Q38_MTP_DRAFTS", "0", "drafts", 0), ("Q38_MTP_DRAFTS", "3", "drafts", 3),
        ("Q38_MTP_VOCAB", "0", "mtp_vocab", 0), ("Q38_MTP_WIRING", "a", "mtp_wiring", "a"),
        ("Q38_MTP_CAP", "4", "mtp_cap", 4), ("Q38_MTP_PSTEP", "1", "mtp_pstep", True),
        ("Q38_MTP_FORCE", "row8", "mtp_force", "row8"), ("COLI_LOOKUP_FORCE", "cycle", "lookup_force", "cycle"),
        ("Q38_MTP_DUMP", "/tmp/d", "mtp_dump", Path("/tmp/d")), ("COLI_LOOKUP", "0", "lookup", False),
        ("COLI_LOOKUP_DRAFTS", "1", "lookup_drafts", 1), ("COLI_SPEC_GATE", "0", "gate", False),
        ("COLI_VOCAB_USAGE", "/tmp/v", "vocab_usage", Path("/tmp/v")), ("USAGE_SAVE", "0", "usage_save", False),
        ("COLI_USAGE", "/tmp/u", "usage", Path("/tmp/u")),
    ],
)  # fmt: skip
def test_values_of_variables(name: str, text: str, field: str, value: object) -> None:
    assert getattr(load({}, {name: text})[0], field) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Q38_MTP_DRAFTS", "4"), ("Q38_MTP_DRAFTS", "-1"), ("Q38_MTP_DRAFTS", "AUTO"), ("Q38_MTP_DRAFTS", ""),
        ("COLI_LOOKUP_DRAFTS", "0"), ("COLI_LOOKUP_DRAFTS", "6"), ("COLI_LOOKUP_DRAFTS", "auto"),
        ("Q38_MTP_WIRING", "c"), ("Q38_MTP_CAP", "0"), ("Q38_MTP_VOCAB", "-1"), ("Q38_MTP_FORCE", "row9"),
        ("Q38_MTP_FORCE", "row0"), ("COLI_LOOKUP_FORCE", "1"), ("COLI_VOCAB_USAGE", ""), ("Q38_MTP", "auto"),
    ],
)  # fmt: skip
def test_bad_values_name_the_variable_and_its_range(name: str, text: str) -> None:
    row = next(row for row in VARIABLES if row.name == name)
    with pytest.raises(UsageError) as caught:
        load({}, {name: text})
    assert caught.value.where == name and row.kind.range in caught.value.hint


def test_the_depths_other_word_is_shown_and_a_choice_lists_its_words() -> None:
    drafts, force, (act,) = TABLE["drafts"], TABLE["mtp_force"], TABLE["act"]
    assert [row.kind.show(0) for row in drafts] == ["auto"] * 2
    assert [row.kind.range for row in drafts] == ["0..3 or auto", "0..7 or auto"]
    assert all(row.kind.range.startswith("accept, mixed, cycle, reject, row1, ") for row in force)
    assert all(row.kind.range.endswith("row7 or row8") for row in force) and act.kind.range == "int8 or f32"


def test_defaults_are_the_laws() -> None:
    settings, _ = load({}, {})
    assert Speculation.of(settings) == Speculation(mtp=True, drafts=2, lookup_drafts=5)
    assert (settings.mtp, settings.mtp_vocab, settings.mtp_wiring) == (None, 16000, "b")
    other = Speculation.of(settings.resolve("qwen36"))
    assert other == Speculation(mtp=False, drafts=1, pstep=True, most=7, strict=True)


def test_help_has_every_flag(coli: Coli) -> None:
    text = coli("run", "--help").stdout
    assert all(f" {flag}" in text or f"/{flag}" in text for flag in FLAGS)


@pytest.mark.parametrize(("flag", "value"), [("--drafts", "8"), ("--drafts", "many"), ("--lookup-drafts", "6"),
                                             ("--mtp-vocab", "-1"), ("--pmin", "1.5"), ("--trunk", "int4"),
                                             ("--experts", "q4")])  # fmt: skip
def test_a_flag_out_of_range_is_named(coli: Coli, flag: str, value: str) -> None:
    done = coli("run", "hi", flag, value, fake=True)
    assert done.returncode == 2 and done.stderr.startswith(f"coli: {flag}: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["Q38_MTP_FORCE", "Q36_MTP_FORCE", "COLI_LOOKUP_FORCE"])
def test_a_force_variable_without_a_reference_is_refused_before_loading(coli: Coli, tmp_path: Path, name: str) -> None:
    done = coli("run", "hi", fake=True, env={name: "mixed", "FAKE_OPENED": str(tmp_path / "opened")})
    assert done.returncode == 2 and f"coli: {name}: only acts with --reference" in done.stderr
    assert not (tmp_path / "opened").exists()


# ---- the trace -------------------------------------------------------------------------------------------------------


def test_the_trace_has_one_line_a_forward(coli: Coli, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("old\n" * 9)
    done = coli("run", "--raw", "-q", "a b c", "--trace", "trace", fake=True)
    assert done.returncode == 0 and done.stdout == "a b c\n"
    assert [row["position"] for row in rows(tmp_path / "trace")] == [1, 2, 3]


@pytest.mark.parametrize("target", [".", "none/trace", "file/trace"])
def test_a_trace_that_cannot_be_written_is_refused_before_loading(coli: Coli, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    done = coli("run", "hi", "--trace", target, fake=True, env={"FAKE_OPENED": str(tmp_path / "opened")})
    assert done.returncode == 2 and f"coli: --trace {target}: " in done.stderr
    assert not (tmp_path / "opened").exists()


def test_a_full_disk_under_the_trace_is_an_error_with_its_name(coli: Coli) -> None:
    done = coli("run", "--raw", "-q", "a b", "--trace", "/dev/full", fake=True)
    assert done.returncode == 1 and "--trace /dev/full: cannot write: No space left" in done.stderr
    assert done.stderr.count("\n") == 1


# ---- --check ---------------------------------------------------------------------------------------------------------


def test_a_check_that_holds_says_what_it_compared(coli: Coli) -> None:
    done = coli("run", "--raw", "a b c", "--check", fake=True, env={"FAKE_MODE": "same"})
    assert done.returncode == 0 and done.stdout == "a b c\n"
    assert done.stderr.endswith("check: 3 tokens and the last logits are those of plain decoding\n")
    done = coli("run", "--raw", "-q", "a b c", "--check", "--json", fake=True, env={"FAKE_MODE": "same"})
    assert json.loads(done.stdout)["check"] == {"tokens": 3, "difference": None} and done.stderr == ""


def test_another_token_is_exit_6_with_position_both_tokens_and_margin(coli: Coli) -> None:
    done = coli("run", "--raw", "-q", "a b c", "--check", "--json", fake=True, env={"FAKE_MODE": "lossy"})
    assert done.returncode == 6
    assert done.stderr == "coli: --check: token 1 of the answer is 7, plain decoding has 1, logit margin 3\n"
    assert json.loads(done.stdout)["check"]["difference"] == {
        "position": 1, "token": 7, "plain_token": 1, "margin": 3.0, "logits_differ": False,
    }  # fmt: skip


def test_other_last_logits_are_exit_6_and_the_answer_is_there(coli: Coli) -> None:
    done = coli("run", "--raw", "-q", "a b c", "--check", fake=True, env={"FAKE_MODE": "blurred"})
    assert done.returncode == 6 and done.stdout == "a b c\n"
    assert "the logits that chose token 2 of the answer (2) are not plain decoding's, logit margin 0.5" in done.stderr


def test_a_cancelled_answer_is_checked_as_far_as_it_went() -> None:
    process = subprocess.Popen([*FAKE, "run", "--raw", "x", "--check"], stdin=subprocess.DEVNULL, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=clean_env(FAKE_MODE="slow"))  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(3) == "ha "
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "tokens and the last logits are those of plain decoding" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("ids", "shift", "verdict"),
    [
        ((2, 1, 3), 0, None),
        ((), 0, None),
        ((2, 1, 3), 1, Difference(2, 3, 3, 1.0, True)),
        ((2, 0, 3), 0, Difference(1, 0, 1, 1.0, False)),
        ((2, 1, 3, 1), 0, Difference(3, 1, None, None, False)),
    ],
)
def test_the_check_replays_the_seed_that_was_drawn_and_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, ids: tuple[int, ...], shift: int, verdict: Difference | None
) -> None:
    asked: list[tuple[int | None, int]] = []
    logits = np.arange(4, dtype=np.float32)

    def replay(_engine: Any, request: Request, tokens: int) -> tuple[tuple[int, ...], Any]:
        asked.append((request.sampling.seed, tokens))
        return (2, 1, 3)[:tokens], logits

    monkeypatch.setattr(checking, "replay", replay)
    engine = cast(Any, None)
    request = Request((1,), sampling=Sampling(temperature=1.0))
    assert check(engine, request, ids, logits + np.float32(shift), 77) == verdict
    assert asked[:1] == [(77, len(ids))][: len(ids)]


def test_an_answer_behind_the_end_of_plain_decoding_is_named() -> None:
    assert str(Difference(3, 9, None, None, False)) == "token 3 of the answer is 9, plain decoding ended before it"


# ---- --reference -----------------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"prompt_ids": [97, 32, 98], "full_ids": [97, 32, 98, 0, 1]}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"prompt_ids": []}, "prompt_ids must be a list"), ({"prompt_ids": None}, "prompt_ids must be a list"),
        ({"prompt_ids": [97, True]}, "prompt_ids[1] is True"), ({"prompt_ids": [-1]}, "prompt_ids[0] is -1"),
        ({"full_ids": "ab"}, "full_ids must be a list"), ({"full_ids": [97, 32, 98]}, "no token after the prompt"),
        ({"full_ids": [97, 33, 98, 0]}, "they part at 1"), ({"full_ids": [97, 32]}, "they part at 2"),
        ({"full_ids": [97, 32, 98, 1.0]}, "full_ids[3] is 1.0"), ({"final_logits": 3}, "final_logits must be a list"),
        ({"final_logits": [0.5, "1"]}, "final_logits[1] is '1'"), ({"final_logits": [1e39]}, "final_logits[0]"),
        ({"final_logits": [float("nan")]}, "final_logits[0] is nan"),
        ({"final_logits": [10**400]}, "not a finite number"), ({"final_logits": [True]}, "final_logits[0] is True"),
    ],
)  # fmt: skip
def test_every_fault_of_a_reference_is_named(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    path = tmp_path / "ref.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(UsageError) as caught:
        Reference.load(path)
    assert caught.value.where == str(path) and fault in caught.value.what and caught.value.hint


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{", b"[" * 100_000])
def test_a_file_that_is_no_reference_is_refused_before_loading(coli: Coli, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ref.json").write_bytes(content)
    done = coli("run", "--reference", "ref.json", fake=True, env={"FAKE_OPENED": str(tmp_path / "opened")})
    assert done.returncode == 2 and done.stderr.startswith("coli: ref.json: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "opened").exists()


def test_what_the_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ref.json"
    path.write_text(json.dumps({**GOOD, "final_logits": [0.0] * 300}))
    reference = Reference.load(path)
    reference.fit(vocab=300, ctx=5)
    for vocab, ctx, fault in ((90, 5, "token id 98"), (299, 5, "final_logits hold 300"), (300, 4, "the context 4")):
        with pytest.raises(UsageError, match=fault):
            reference.fit(vocab, ctx)


@pytest.mark.parametrize(
    "arguments",
    [["a prompt"], ["--file", "f"], ["--raw"], ["--system", "x"], ["--think"], ["--no-think"], ["--effort", "low"],
     ["--max-tokens", "3"], ["--stop", "x"], ["--temp", "1"], ["--seed", "1"]],
)  # fmt: skip
def test_a_reference_takes_nothing_that_says_otherwise(coli: Coli, arguments: list[str]) -> None:
    done = coli("run", "--reference", "ref.json", *arguments, fake=True)
    assert done.returncode == 2 and done.stderr.startswith("coli: --reference: ") and done.stderr.count("\n") == 1


def test_a_mismatch_on_the_scripted_engine_has_its_margin(coli: Coli, tmp_path: Path) -> None:
    # the prompt is "a b", so the answer has two words: tokens 0 and 1
    (tmp_path / "ref.json").write_text(json.dumps({**GOOD, "full_ids": [97, 32, 98, 0, 4]}))
    done = coli("run", "-q", "--reference", "ref.json", fake=True, env={"FAKE_MODE": "same"})
    assert done.returncode == 6
    assert done.stdout == (
        "1 of 2 tokens match\nfirst mismatch at token 1 of the answer: expected 4, got 1, logit margin 1.5\n"
    )
    assert done.stderr == "coli: ref.json: the answer is another: 1 of 2 tokens match\n"


def test_final_logits_of_another_best_token_are_a_difference(tmp_path: Path) -> None:
    reference = Reference(tmp_path, (1,), (1, 2, 3), np.array([0, 1, 2, 5], np.float32))
    ours = np.array([0, 1, 6, 5], np.float32)
    same = compare(reference, (2, 3), reference.final_logits, cast(Any, None))
    assert same.same and same.logits is not None and same.logits.largest == 0.0
    other = compare(reference, (2, 3), ours, cast(Any, None))
    assert not other.same and other.matched == 2 and other.logits is not None
    assert (other.logits.largest, other.logits.mean) == (4.0, 1.0)
    assert "largest difference 4, mean 1, another best token" in other.lines()[-1]


def test_logits_behind_another_text_are_not_compared(tmp_path: Path) -> None:
    logits = np.array([0, 1, 2, 5], np.float32)
    reference = Reference(tmp_path, (1,), (1, 2, 3), logits)
    early = compare(reference, (0, 3), logits, lambda position: logits)
    assert early.logits is None and early.mismatch is not None and early.mismatch.margin == -2.0
    short = compare(reference, (2,), logits, cast(Any, None))  # cancelled
    assert (short.matched, short.mismatch, short.logits, short.same) == (1, None, None, False)


# ---- the shipped model -----------------------------------------------------------------------------------------------


def final_logits(name: str) -> list[float]:
    return [float(value) for value in np.load(DATA / f"{name}.npz")["final_logits"]]


@pytest.mark.parametrize("name", ["capital", "code"])
def test_the_oracles_answer_is_ours_and_its_logits_are_close(coli: Coli, tmp_path: Path, name: str) -> None:
    write_reference(tmp_path / "ref.json", CASES[name], final_logits=final_logits(name))
    done = coli("run", "--reference", "ref.json", "--json", "--check", "-q")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    tokens = len(CASES[name]["greedy_ids"])
    assert document["reference"]["matched"] == document["reference"]["tokens"] == tokens
    assert document["reference"]["logits"]["largest"] < 1e-3 and document["reference"]["same"] is True
    assert document["check"] == {"tokens": tokens, "difference": None}


def test_a_reference_with_a_token_changed_is_exit_6(coli: Coli, tmp_path: Path) -> None:
    case = CASES["capital"]
    wrong = case["prompt_ids"] + [*case["greedy_ids"][:3], 5, *case["greedy_ids"][4:]]
    write_reference(tmp_path / "ref.json", case, full_ids=wrong)
    done = coli("run", "--reference", "ref.json", "-q")
    assert done.returncode == 6 and done.stdout.startswith("3 of 9 tokens match\nfirst mismatch at token 3 ")
    margin = float(done.stdout.split()[-1])
    assert margin >= case["margins"][3] - 1e-3  # the runner-up is nearer than any other token


@pytest.mark.parametrize(
    ("environ", "flags", "patterns"),
    [
        ({"Q38_MTP_FORCE": "accept"}, ["--no-lookup", "--drafts", "3"], {3}),
        ({"Q38_MTP_FORCE": "mixed"}, ["--no-lookup"], {0, 2}),
        ({"Q38_MTP_FORCE": "cycle"}, ["--no-lookup", "--drafts", "3"], {0, 1, 2}),
        ({"Q38_MTP_FORCE": "row2"}, ["--no-lookup", "--drafts", "3"], {1}),
        ({"Q38_MTP_FORCE": "reject"}, ["--no-lookup"], {0}),
        ({"COLI_LOOKUP_FORCE": "cycle"}, ["--no-mtp", "--no-gate"], {0, 1, 2, 3, 4}),
    ],
)
def test_the_force_modes_act_on_a_reference_and_change_nothing(
    coli: Coli, tmp_path: Path, environ: dict[str, str], flags: list[str], patterns: set[int]
) -> None:
    case = CASES["prime"]
    write_reference(tmp_path / "ref.json", case)
    done = coli("run", "--reference", "ref.json", "--check", "--json", "--trace", "trace", *flags, env=environ)
    assert done.returncode == 0, done.stderr
    ((name, mode),) = environ.items()
    assert f", {name}={mode}" in done.stderr
    verifies = [row for row in rows(tmp_path / "trace") if row["source"]]
    source = "lookup" if name == "COLI_LOOKUP_FORCE" else "mtp"
    assert {row["source"] for row in verifies} == {source}
    most = max(row["k"] for row in verifies)
    assert {row["accepted"] for row in verifies if row["k"] == most and not row["ended"]} == patterns
    said = json.loads(done.stdout)["speculation"]
    assert said[source]["accepted"] == sum(row["accepted"] for row in verifies)
    assert said["tokens"] == len(case["greedy_ids"]) - 1 == said["forwards"] + said[source]["accepted"]


def test_the_trace_and_the_report_tell_the_same(coli: Coli, tmp_path: Path) -> None:
    done = coli("run", "Tell me a short story about a fox.", "--json", "--trace", "trace", "--check")
    assert done.returncode == 0, done.stderr
    document, trace = json.loads(done.stdout), rows(tmp_path / "trace")
    said = document["speculation"]
    assert len(trace) == said["forwards"] and said["tokens"] == document["completion_tokens"] - 1
    for source in ("mtp", "lookup"):
        mine = [row for row in trace if row["source"] == source]
        assert said[source]["verifies"] == len(mine)
        for key, name in (("k", "drafts"), ("accepted", "accepted"), ("judged", "judged")):
            assert said[source][name] == sum(row[key] for row in mine)
    assert said["ended_mid_verify"] == (trace[-1]["ended"] and trace[-1]["accepted"] < trace[-1]["k"])
    assert said["rejected"]["rows"] == sum(row["k"] - row["accepted"] for row in trace)
    assert sum(row["accepted"] + 1 for row in trace) == said["tokens"]
    positions = [row["position"] for row in trace]
    assert positions[0] == document["prompt_tokens"]
    assert all(b - a == row["accepted"] + 1 for a, b, row in zip(positions, positions[1:], trace, strict=False))


@pytest.mark.parametrize("flags", [["--drafts", "1"], ["--drafts", "auto"], ["--pstep"], ["--no-gate"], ["--no-mtp"],
                                   ["--mtp-vocab", "0"], ["--temp", "0.8", "--drafts", "3"]])  # fmt: skip
def test_every_way_to_draft_passes_its_check(coli: Coli, flags: list[str]) -> None:
    done = coli("run", "Name three colours.", "--check", "--max-tokens", "40", *flags)
    assert done.returncode == 0 and "are those of plain decoding" in done.stderr.splitlines()[-1], done.stderr
    assert ("[qwen38 MTP] run: " in done.stderr) == ("--no-mtp" not in flags) and "[qwen38 lookup] run: " in done.stderr


def test_without_sources_there_is_nothing_to_report(coli: Coli) -> None:
    done = coli("run", "hi", "--no-mtp", "--no-lookup", "--json", "--max-tokens", "4")
    assert done.returncode == 0 and json.loads(done.stdout)["speculation"] is None and "[qwen38 " not in done.stderr
