"""Ctrl-C and SIGTERM: the answer so far stays, the report comes, the exit code tells; a second signal does not wait."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import FAKE, clean_env

CODES = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@contextmanager
def running(*arguments: str, mode: str, cwd: Path, answering: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of its answer (its engine open, and a moment passed)."""
    opened = cwd / "opened"
    process = subprocess.Popen(
        [*FAKE, "run", "hi", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=cwd, env=clean_env(FAKE_MODE=mode, FAKE_OPENED=str(opened)),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while answering and not opened.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_first_signal_ends_the_answer_with_its_report(tmp_path: Path, number: int, code: int) -> None:
    with running(mode="slow", cwd=tmp_path) as process:
        process.send_signal(number)
        text, talk = process.communicate(timeout=10)
    assert process.returncode == code
    assert text.startswith("ha ha ") and text.endswith("\n")
    assert "cancelled" in talk and "peak memory" in talk and "Traceback" not in talk and "coli:" not in talk


@pytest.mark.parametrize(("number", "code"), CODES)
def test_json_and_output_keep_the_text_so_far(tmp_path: Path, number: int, code: int) -> None:
    with running("--json", "-o", "out.json", mode="slow", cwd=tmp_path) as process:
        process.send_signal(number)
        process.communicate(timeout=10)
    document = json.loads((tmp_path / "out.json").read_text())
    assert process.returncode == code and document["finish_reason"] == "cancelled" and document["text"]


@pytest.mark.parametrize(("number", "code"), CODES)
def test_the_second_signal_leaves_at_once(tmp_path: Path, number: int, code: int) -> None:
    with running(mode="deaf", cwd=tmp_path) as process:
        process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=5)
    assert process.returncode == code


@pytest.mark.parametrize(("number", "code"), CODES)
def test_a_signal_while_loading_is_one_line(tmp_path: Path, number: int, code: int) -> None:
    with running("-q", mode="loading", cwd=tmp_path) as process:
        process.send_signal(number)
        text, talk = process.communicate(timeout=10)
    assert (process.returncode, text) == (code, "")
    assert talk in ("coli: interrupted\n", "coli: terminated\n")


def test_handlers_are_put_back() -> None:
    from coli.commands._signals import cancelling, terminable

    before = [signal.getsignal(number) for number, _ in CODES]
    with terminable(), cancelling(lambda: None) as caught:
        assert caught == []
    assert [signal.getsignal(number) for number, _ in CODES] == before
    assert signal.set_wakeup_fd(-1) == -1
