"""How commands end: the table of exceptions, closed and full stdouts, and tracebacks only when asked for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import typer

from coli.commands._errors import describe, printable
from coli.commands._signals import Terminated
from coli.errors import CheckFailed, ColiError, DeviceError, DoesNotFit, ModelError, NonFinite, ReadError, UsageError
from tests.conftest import FAKE, Coli, clean_env


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ColiError("a", "b", "c"), 1, "b: a (c)"), (ReadError("a"), 1, "a"), (NonFinite("a"), 1, "a"),
        (UsageError("a"), 2, "a"), (typer.BadParameter("a"), 2, "a"), (ModelError("a"), 3, "a"),
        (DoesNotFit("a"), 4, "a"), (MemoryError(), 4, "out of memory"), (DeviceError("a"), 5, "a"),
        (CheckFailed("a"), 6, "a"), (KeyboardInterrupt(), 130, "interrupted"), (Terminated(), 143, "terminated"),
        (FileNotFoundError(2, "No such file", "f"), 1, "f: No such file"), (ZeroDivisionError("x"), 1, "COLI_DEBUG=1"),
        (RecursionError("deep"), 1, "COLI_DEBUG=1"), (GeneratorExit(), 1, "GeneratorExit"),
    ],
)  # fmt: skip
def test_the_table(error: BaseException, code: int, line: str) -> None:
    found, said = describe(error)
    assert found == code and said is not None and line in said


def test_a_closed_pipe_is_quiet() -> None:
    assert describe(BrokenPipeError(32, "Broken pipe")) == (0, None)


def test_a_line_is_one_printable_line() -> None:
    assert printable("a\nb\tc \x1b[31m\x07 \udcff ü") == "a b c \\x1b[31m\\x07 \\udcff ü"


def test_an_unexpected_error_is_one_line_and_a_traceback_on_request(coli: Coli) -> None:
    done = coli("run", "x", "--quiet", fake=True, env={"FAKE_MODE": "bug"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("coli: unexpected ZeroDivisionError") and "COLI_DEBUG=1" in done.stderr
    done = coli("run", "x", "--quiet", fake=True, env={"FAKE_MODE": "bug", "COLI_DEBUG": "1"})
    assert done.returncode == 1 and "Traceback" in done.stderr and "closed\n" in done.stderr


def test_a_known_error_keeps_its_traceback_for_debugging_too(coli: Coli) -> None:
    assert "Traceback" not in coli("info", "nowhere").stderr
    assert "Traceback" in coli("info", "nowhere", env={"COLI_DEBUG": "1"}).stderr


def test_out_of_memory_is_4(coli: Coli) -> None:
    done = coli("run", "x", "--quiet", fake=True, env={"FAKE_MODE": "memory"})
    assert done.returncode == 4 and done.stderr.startswith("coli: out of memory")


def test_an_error_within_the_answer_keeps_the_text_so_far(coli: Coli) -> None:
    done = coli("run", "--raw", "one two three", "-q", fake=True, env={"FAKE_MODE": "break"})
    assert (done.returncode, done.stdout) == (1, "one two")
    assert done.stderr == "coli: layer 3: NaN in the logits (lower the temperature)\n"


@pytest.mark.parametrize("arguments", [["run", "hi"], ["env"], ["info"], ["--help"], ["--version"]])
def test_a_closed_stdout_is_one_line(arguments: list[str]) -> None:
    command = " ".join(f"'{word}'" for word in [*FAKE, *arguments])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True, env=clean_env(),
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "Bad file descriptor" in done.stderr


def test_a_closed_stdout_does_not_matter_to_output(tmp_path: Path) -> None:
    command = " ".join(f"'{word}'" for word in [*FAKE, "run", "--raw", "hi", "-o", "out.txt"])
    done = subprocess.run(["bash", "-c", f"{command} >&-"], stderr=subprocess.PIPE, env=clean_env(), cwd=tmp_path,
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert done.returncode == 0
    assert (tmp_path / "out.txt").read_text() == "hi\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["run", "hi", "-q"], ["run", "hi", "-q", "--json"], ["env"], ["--help"]])
def test_a_full_disk_is_one_line(coli: Coli, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = coli(*arguments, fake=True, stdout=full)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr


@pytest.mark.parametrize("arguments", [["run", "hi"], ["env"], ["--help"]])
def test_a_reader_that_left_is_no_error(arguments: list[str]) -> None:
    """`coli ... | true`: nothing on stderr but the notes, exit 0; an endless answer ends."""
    process = subprocess.Popen([*FAKE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               stdin=subprocess.DEVNULL, env=clean_env(FAKE_MODE="slow"))  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    talk = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 0
    assert "coli:" not in talk and "Traceback" not in talk and "Exception" not in talk


def test_a_closed_stderr_does_not_matter() -> None:
    command = " ".join(f"'{word}'" for word in [*FAKE, "run", "--raw", "hi"])
    done = subprocess.run(["bash", "-c", f"{command} 2>&-"], stdout=subprocess.PIPE, text=True, env=clean_env(),
                          stdin=subprocess.DEVNULL)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hi\n")


def test_an_ascii_locale_prints_utf8(coli: Coli) -> None:
    plain = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = coli("run", "--raw", "-", input="grüße ☕", fake=True, env=plain)
    assert done.stdout == "grüße ☕\n" and done.returncode == 0


def test_json_and_text_agree(coli: Coli) -> None:
    assert json.loads(coli("run", "--raw", "a ☕", "--json", fake=True).stdout)["text"] == "a ☕"
