"""`coli convert` as a user has it: report, JSON, progress lines, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import CLI, Coli, clean_env
from tests.convert import reading
from tests.tiny import tiny_config, write_tiny
from tests.tiny36 import tiny36_config, write_tiny36


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny36_config("qwen3_5_moe_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    return write_tiny36(tmp_path_factory.mktemp("cli") / "moe", config, dtype="BF16")


def test_the_report(coli: Coli, moe: Path, tmp_path: Path) -> None:
    done = coli("convert", str(moe), "out")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "out" and lines[1] == "format  qwen36 container, experts int4 groups of 64"
    assert lines[2].startswith("size    ") and " before, " in lines[2]
    kinds = [part.strip().split()[0] for part in lines[3].removeprefix("error   ").split(",")]
    assert kinds == ["gate", "up", "down", "experts"] and lines[3].endswith("(relative L2)")
    assert lines[4] == "files   4" and "MB/s" in lines[5]
    assert done.stderr.splitlines()[:2] == ["the embedding and lm_head (0 %)", "layer 1 of 2 (17 %)"]
    again = coli("convert", str(moe), "out", "--quiet")
    assert again.stdout.splitlines()[4] == "files   4, all kept from an earlier run" and again.stderr == ""


def test_json(coli: Coli, moe: Path) -> None:
    done = coli("convert", str(moe), "out", "--ebits", "8", "--group-size", "0", "--json", "--quiet")
    document = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert document["format"] == "qwen36 container, experts int8 rows" and document["files"] == 4
    assert document["errors"]["experts"] < 0.01 and document["stored_bytes"] < document["source_bytes"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nowhere", "out"), 3, "no such folder"), (("{moe}", "{moe}"), 2, "is the source itself"),
        (("{moe}", "out", "--ebits", "3"), 2, "--ebits: 3 is not one of 4, 8"),
        (("{moe}", "out", "--group-size", "7"), 2, "--group-size"),
        (("{moe}",), 2, "OUT"), (("{moe}", ""), 2, "OUT"), (("{moe}", "/proc/nothing/out"), 1, "cannot write"),
    ],
)  # fmt: skip
def test_refusals(coli: Coli, moe: Path, tmp_path: Path, arguments: tuple, code: int, words: str) -> None:
    done = coli("convert", *(argument.format(moe=moe) for argument in arguments))
    assert done.returncode == code and words in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"),
                                                      (signal.SIGTERM, 143, "terminated")])  # fmt: skip
def test_a_signal_leaves_what_goes_on(tmp_path: Path, number: int, code: int, word: str) -> None:
    sizes = dict(hidden_size=256, moe_intermediate_size=256, num_experts=32, ple_layer_ids=[2])
    source = write_tiny(tmp_path / "m", tiny_config(**sizes), dtype="BF16", mtp=False)
    command = [*CLI, "convert", str(source), str(tmp_path / "out"), "--threads", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("experts of layer 2"):
            break
    process.send_signal(number)
    text, talk = process.communicate(timeout=30)
    assert process.returncode == code and text == ""
    assert talk.splitlines()[-2].endswith("stays, and the same command goes on from there")
    assert talk.splitlines()[-1] == f"coli: {word}"
    kept = len(list((tmp_path / "out").rglob("layer-*.safetensors")))
    assert 1 <= kept < 8 and not (tmp_path / "out" / "config.json").exists()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=clean_env(), check=True)
    report = json.loads(done.stdout)
    assert report["written"] == 17 - kept - 9 and report["files"] == 17
    subprocess.run([*command[:-3], str(tmp_path / "other")], capture_output=True, env=clean_env(), check=True)
    assert reading.bytes_of(tmp_path / "out") == reading.bytes_of(tmp_path / "other")


def test_on_a_terminal_a_bar_runs(moe: Path, tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    with open(main, "rb", buffering=0) as screen, subprocess.Popen(
        [*CLI, "convert", str(moe), str(tmp_path / "out")], stdout=subprocess.PIPE, stderr=terminal, text=True,
        env=clean_env(TERM="xterm", COLUMNS="120"),
    ) as process:  # fmt: skip
        os.close(terminal)
        seen = b""
        with suppress(OSError):  # what a pty says when its other end is closed
            while part := screen.read(65536):
                seen += part
        text, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and text.startswith(str(tmp_path))
    assert b"converting" in seen and b" kB" in seen and b"(0 %)" not in seen
