"""`coli bench` as a user has it, on a scripted engine: forms, plots, exit codes, what is checked before loading."""

from __future__ import annotations

import csv
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import clean_env

FAKE = (sys.executable, str(Path(__file__).parent / "fake_bench.py"), "bench")
FEW = ("--task", "story", "--repeat", "2", "--arms", "off,1,3")


def bench(*arguments: str, mode: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run([*FAKE, *arguments], env=clean_env(FAKE_MODE=mode), **options)


def last(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The document that stdout ends with."""
    return json.loads(done.stdout.splitlines()[-1])


def test_the_table_its_environment_and_the_document() -> None:
    done = bench(*FEW)
    assert done.returncode == 0, done.stderr
    assert "200 (200..200)" in done.stdout and " 4.00 " in done.stdout and "versions: " in done.stdout
    value = last(done)
    assert [(row["prompt"], row["arm"], row["ratio"]["median"]) for row in value["rows"]] == [
        ("story", "off", 1.0), ("story", "1", 2.0), ("story", "3", 4.0)
    ]  # fmt: skip
    assert value["complete"] and value["same_output"] and value["rows"][2]["compared"] == 3
    environment = value["environment"]
    assert environment["threads"] == 2 and len(environment["model"]["sha256"]) == 64
    assert environment["versions"].keys() == {"python", "coli", "numpy", "numba", "llvmlite"}
    assert "the banner" in done.stderr and "warming up story" in done.stderr and "measuring story" in done.stderr
    assert "█" not in done.stdout and bench(*FEW, "-q").stderr == ""


def test_every_task_is_measured_when_none_is_named_and_own_prompts_alone_when_given(tmp_path: Path) -> None:
    def prompts(*arguments: str) -> list[str]:
        rows = last(bench("--output", "json", "--repeat", "1", "--arms", "off", *arguments))["rows"]
        return [row["prompt"] for row in rows]

    (tmp_path / "f").write_text("from a file\n")
    assert prompts() == ["chat", "story", "code", "rename", "repeat", "json", "prose"]
    assert prompts("--prompt", "words", "--prompt-file", str(tmp_path / "f")) == ["prompt 1", "prompt 2"]
    assert prompts("--prompt", "words", "--task", "json") == ["json", "prompt"]


def test_markdown() -> None:
    lines = bench(*FEW, "--output", "md").stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5 and table[1].startswith("| --- |") and len({line.count("|") for line in table}) == 1
    assert lines[0].startswith("- model: ") and json.loads(lines[-1])["kind"] == "bench"


def test_csv_and_json_lines_stay_readable_by_machines() -> None:
    rows = list(csv.DictReader(bench(*FEW, "--output", "csv").stdout.splitlines()))
    assert [(row["arm"], row["tok_s_median"], row["same_output"]) for row in rows] == [
        ("off", "100", "1"), ("1", "200", "1"), ("3", "400", "1")
    ]  # fmt: skip
    values = [json.loads(line) for line in bench(*FEW, "--output", "jsonl").stdout.splitlines()]
    assert [value["kind"] for value in values] == ["row"] * 3 + ["bench"]
    (line,) = bench(*FEW, "--output", "json").stdout.splitlines()
    assert json.loads(line)["rows"] == [value for value in values if value["kind"] == "row"]


def test_without_off_the_first_arm_is_what_the_others_are_held_against() -> None:
    done = bench("--task", "story", "--repeat", "1", "--arms", "1,3")
    assert "x 1" in done.stdout and "ratios are against arm 1" in done.stderr
    assert [row["ratio"]["median"] for row in last(done)["rows"]] == [1.0, 2.0]


def test_a_model_without_a_head_runs_the_other_arms() -> None:
    done = bench("--task", "story", "--repeat", "1", mode="no head")
    assert done.returncode == 0 and "without an MTP head: 1, 2, 3, mtp+lookup" in done.stderr
    assert [row["arm"] for row in last(done)["rows"]] == ["off", "auto", "lookup"]


def test_a_difference_is_shown_and_ends_with_6() -> None:
    done = bench(*FEW, mode="differ")
    assert done.returncode == 6
    said = "token 3 of the answer is 4, arm off has 3"
    assert " NO" in done.stdout and done.stdout.count(said) == 1 and done.stderr.count(said) == 1
    value = last(done)
    assert not value["same_output"] and [row["same_output"] for row in value["rows"]] == [True, True, False]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_shows_what_was_measured(number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [*FAKE, "--task", "story", "--arms", "off,1"], env=clean_env(FAKE_MODE="slow"), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    while not process.stderr.readline().startswith("measuring"):
        assert process.poll() is None
    time.sleep(1.5)  # an answer takes a second: one is there, another under way
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    value = json.loads(said.splitlines()[-1])
    assert process.returncode == code and not value["complete"]
    assert set(value["rows"][0]["samples"]["tok_s"]) == {100.0}


def test_bars_on_a_terminal_or_when_asked() -> None:
    assert "█" in bench(*FEW, "--plot", "-").stdout
    master, slave = pty.openpty()
    done = subprocess.Popen([*FAKE, *FEW, "-q"], env=clean_env(TERM="xterm", FAKE_MODE=""), stdout=slave)
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 65536):
            shown += data
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(master)
    assert done.wait(30) == 0 and "█" in shown.decode()


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_the_picture_is_written(tmp_path: Path, name: str) -> None:
    done = bench(*FEW, "--plot", str(tmp_path / name))
    assert done.returncode == 0 and (tmp_path / name).stat().st_size > 1000 and f"picture in {tmp_path}" in done.stderr


def forward(k: int, accepted: int, seconds: float) -> dict[str, Any]:
    """A line of a trace."""
    return {
        "position": 1, "source": "mtp" if k else None, "k": k, "written": k, "p": None, "drafts": [7] * k,
        "accepted": accepted, "judged": min(k, accepted + 1), "seconds": seconds, "draft_seconds": 0.0, "bytes": 0,
        "rejected_bytes": 0, "pick": 5, "ended": False,
    }  # fmt: skip


def test_a_trace_is_replayed_without_a_model(tmp_path: Path) -> None:
    """T(1) = 1 s and T(2) = 1.25 s; half of the first drafts stand: 1.5 tokens in 1.25 s."""
    trace = tmp_path / "trace"
    lines = [{"coli_trace": 1, "model": "m", "engine": "qwen38", "threads": 2, "speculation": {}},
             forward(0, 0, 1.0), forward(1, 1, 1.25), forward(1, 0, 1.25)]  # fmt: skip
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = bench("--replay", str(trace))
    assert done.returncode == 0 and done.stderr == ""
    assert "trace: m (qwen38), 2 threads, 3 forwards, 2 of them with drafts" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:2] == ["mtp", "1"]]
    assert line.split() == ["mtp", "1", "1.50", "833", "1.20", "–"]
    value = last(done)
    assert value["kind"] == "replay" and value["forwards"] == 3 and value["header"]["model"] == "m"
    rows = list(csv.DictReader(bench("--replay", str(trace), "--output", "csv").stdout.splitlines()))
    assert [float(row["ratio"]) for row in rows if (row["source"], row["depth"]) == ("mtp", "1")] == [1.2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--arms", "off,8"], "--arms"), (["--task", "poem"], "--task"), (["--prompt", " "], "--prompt"),
        (["--prompt-file", "none"], "--prompt-file none"), (["--repeat", "0"], "--repeat"),
        (["--max-tokens", "1"], "--max-tokens"), (["--seed", "-1"], "--seed"), (["--output", "xml"], "--output"),
        (["--temp", "-1"], "--temp"), (["--temp", "nan"], "--temp"),
        (["--plot", "a.gif"], "--plot a.gif"), (["--plot", "none/a.svg"], "--plot none/a.svg"),
        (["--plot", "-", "--output", "csv"], "--plot -"), (["--replay", "none"], "none"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_before_loading(tmp_path: Path, arguments: list[str], named: str) -> None:
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and named in done.stderr
    assert done.stderr.count("\n") == 1 and "banner" not in done.stderr


def test_an_arm_that_is_too_deep_for_the_engine_is_named_once_it_is_known() -> None:
    done = bench(*FEW[:-1], "off,5")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.endswith(
        "coli: --arms: the model's engine drafts 3 at most, not 5 (give depths of 1..3)\n"
    )


def test_a_forced_mode_has_no_reference_to_draft_from() -> None:
    done = subprocess.run([*FAKE, *FEW], env=clean_env(Q38_MTP_FORCE="accept"), capture_output=True, text=True)
    assert done.returncode == 2 and "Q38_MTP_FORCE" in done.stderr and "banner" not in done.stderr


def test_without_matplotlib_the_command_that_brings_it_is_named_before_loading(tmp_path: Path) -> None:
    done = bench(*FEW, "--plot", str(tmp_path / "a.svg"), mode="no plot")
    assert done.returncode == 2 and 'pip install "coli[plot]"' in done.stderr and "banner" not in done.stderr
