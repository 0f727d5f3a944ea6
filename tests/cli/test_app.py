"""The door: start time, laziness, help, version, completion, and usage errors in one line."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from coli.commands._options import NO_MODEL
from tests.conftest import CLI, Coli, clean_env

COMMANDS = ("run", "chat", "serve", "info", "convert", "doctor", "env", "warmup", "bench")
HEAVY = ("numpy", "numba", "llvmlite", "tokenizers", "jinja2", "rich", "platformdirs", "coli.engine")


def test_help_is_there_within_its_bar() -> None:
    """design.md section 5: 0.2 s with a warm file cache; the best of five, since CI shares its cores."""
    best = 10.0
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([*CLI, "--help"], check=True, stdout=subprocess.DEVNULL, env=clean_env())
        best = min(best, time.perf_counter() - start)
    assert best <= 0.2


@pytest.mark.parametrize(("arguments", "heavy"), [(["--help"], HEAVY), (["run", "--help"], HEAVY),
                                                  (["bench", "--help"], HEAVY), (["env"], HEAVY),
                                                  (["chat", "--help"], (*HEAVY, "prompt_toolkit", "http.client")),
                                                  (["info"], ("numba", "llvmlite", "tokenizers", "rich"))])  # fmt: skip
def test_nothing_heavy_is_imported(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys; from coli.commands.app import main; code = main(sys.argv[1:]); "
        f"loaded = [name for name in {heavy!r} if name in sys.modules]; sys.exit(code or loaded or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=clean_env())
    assert done.returncode == 0 and done.stderr in ("", NO_MODEL + "\n"), done.stderr


def test_help_lists_every_command(coli: Coli) -> None:
    for arguments in (["--help"], ["-h"], []):
        done = coli(*arguments)
        assert done.returncode == 0 and done.stderr == ""
        assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(coli: Coli, command: str) -> None:
    done = coli(command, "--help")
    assert done.returncode == 0 and f"coli {command}" in done.stdout and done.stderr == ""


def test_version(coli: Coli) -> None:
    from importlib.metadata import version

    assert coli("--version").stdout == f"coli {version('coli')}\n"


def test_shell_completion(coli: Coli) -> None:
    shown = coli("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert shown.returncode == 0 and "_COLI_COMPLETE" in shown.stdout
    asked = {"_COLI_COMPLETE": "complete_bash", "COMP_WORDS": "coli wa", "COMP_CWORD": "1"}
    assert coli(env=asked).stdout.split() == ["warmup"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bogus"], "bogus"), (["run", "--bogus", "x"], "--bogus"), (["run", "x", "--max-tokens", "0"], "--max-tokens"),
        (["run", "x", "--ctx", "many"], "--ctx"), (["run", "x", "--ctx"], "--ctx"), (["env", "extra"], "extra"),
        (["run", "x", "--temp", "nan"], "--temp"), (["run", "x", "--top-p", "0"], "--top-p"),
        (["run", "x", "--top-k", "-1"], "--top-k"), (["run", "x", "--repetition-penalty", "0"], "--repetition-penalty"),
        (["run", "x", "--seed", "-1"], "--seed"), (["run", "x", "--threads", "0"], "--threads"),
        (["run", "x", "--ram", "0"], "--ram"), (["run", "x", "--stop", ""], "--stop"),
        (["run", "x", "--raw", "--system", "y"], "--system"), (["run", "x", "--raw", "--no-think"], "--think"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_and_2(coli: Coli, arguments: list[str], named: str) -> None:
    done = coli(*arguments, fake=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("coli: ") and done.stderr.count("\n") == 1 and named in done.stderr
