"""`coli run` on a scripted engine: prompts, streams, files and reports."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from coli.commands._options import NO_MODEL
from tests.conftest import FAKE, Coli, clean_env


def answer(coli: Coli, *arguments: str | bytes, **options: object) -> str:
    """What a raw prompt came out as: the scripted engine says it back."""
    done = coli("run", "--raw", "-q", *arguments, fake=True, **options)
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout


def test_words_are_joined_and_the_text_ends_its_line(coli: Coli) -> None:
    assert answer(coli, "one", "two  three") == "one two  three\n"
    assert answer(coli, "ends itself\n") == "ends itself\n"


def test_stdin_is_the_prompt(coli: Coli) -> None:
    assert answer(coli, input="piped\n") == "piped\n"
    assert answer(coli, "-", input="dashed") == "dashed\n"
    assert answer(coli, "words", input="and a pipe") == "words\n\nand a pipe\n"
    assert answer(coli, "5", "-", "3") == "5 - 3\n"


def test_a_file_joins_in(coli: Coli, tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("from a file")
    assert answer(coli, "--file", "f.txt") == "from a file\n"
    assert answer(coli, "sum up:", "--file", "f.txt") == "sum up:\n\nfrom a file\n"
    assert answer(coli, "-", "--file", "f.txt", input="stdin") == "from a file\n\nstdin\n"


def test_the_template_gets_system_thinking_and_effort_and_no_last_newline(coli: Coli) -> None:
    done = coli("run", "--system", "be kind", "--no-think", "--effort", "low", "-q", fake=True, input="hi\n")
    assert done.stdout == "system=be kind user=hi thinking=False effort=low\n"
    done = coli("run", "hi", "--think", "-q", fake=True)
    assert done.stdout == "user=hi thinking=True effort=None\n"


def test_a_model_without_template(coli: Coli) -> None:
    done = coli("run", "hi", fake=True, env={"FAKE_MODE": "no template"})
    assert done.stdout == "hi\n" and "no chat template" in done.stderr
    done = coli("run", "hi", "--system", "x", fake=True, env={"FAKE_MODE": "no template"})
    assert done.returncode == 2 and "--system" in done.stderr


@pytest.mark.parametrize("arguments", [[""], ["", " "], ["-"], []])
def test_an_empty_prompt_is_a_usage_error_with_an_example(coli: Coli, arguments: list[str]) -> None:
    done = coli("run", *arguments, fake=True)
    assert done.returncode == 2 and "empty" in done.stderr and 'coli run "' in done.stderr


@pytest.mark.parametrize("how", ["argument", "file", "stdin"])
def test_a_prompt_that_is_not_utf8_is_refused_before_loading(coli: Coli, tmp_path: Path, how: str) -> None:
    bad = b"caf\xe9 au lait"
    (tmp_path / "f").write_bytes(bad)
    arguments: dict[str, list[str | bytes]] = {"argument": [bad], "file": ["--file", "f"], "stdin": ["-"]}
    options = {"input": bad} if how == "stdin" else {}
    done = coli("run", *arguments[how], fake=True, text=False, env={"FAKE_OPENED": str(tmp_path / "opened")}, **options)
    said = done.stderr.decode()  # type: ignore[attr-defined]
    assert done.returncode == 2 and "not UTF-8: byte 0xe9 at offset 3" in said
    assert not (tmp_path / "opened").exists()


def test_a_missing_file_is_a_usage_error(coli: Coli) -> None:
    done = coli("run", "--file", "none.txt", fake=True)
    assert done.returncode == 2 and "--file none.txt: cannot read: No such file" in done.stderr


def test_stderr_has_notes_banner_and_report_and_quiet_has_none(coli: Coli) -> None:
    done = coli("run", "hi", fake=True, env={"COLI_TREADS": "1"})
    lines = done.stderr.splitlines()
    assert lines[0].startswith("COLI_TREADS is no variable")
    assert lines[1:5] == ["compiling 0/3", NO_MODEL, "a note of the engine", "the banner"]
    assert "first token 0.10 s" in lines[5] and "experts 7 hits, 1 miss" in lines[6] and len(lines) == 7
    assert coli("run", "hi", "--quiet", fake=True, env={"COLI_TREADS": "1"}).stderr == ""


def test_a_named_model_gets_no_note_about_the_shipped_one(coli: Coli) -> None:
    assert NO_MODEL not in coli("run", "hi", "--model", "x", fake=True).stderr
    assert NO_MODEL not in coli("run", "hi", fake=True, env={"COLI_MODEL": "x"}).stderr


def test_json_is_one_document(coli: Coli) -> None:
    done = coli("run", "--raw", "a b", "--json", fake=True)
    document = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and document["text"] == "a b" and document["speculation"] is None
    assert "the banner" in done.stderr


def test_output_takes_the_result(coli: Coli, tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    assert answer(coli, "some words", "--output", "out.txt") == ""
    assert target.read_text() == "some words\n"
    target.chmod(0o640)
    (tmp_path / "link").symlink_to("out.txt")
    assert answer(coli, "hi", "--json", "-o", "link") == ""
    assert json.loads(target.read_text())["text"] == "hi"
    assert (tmp_path / "link").is_symlink() and target.stat().st_mode & 0o777 == 0o640
    assert answer(coli, "to a device", "-o", "/dev/null") == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out.txt"]


@pytest.mark.parametrize("target", [".", "none/out.txt", "file/out.txt", "x" * 300])
def test_an_unwritable_output_is_refused_before_loading(coli: Coli, tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    done = coli("run", "hi", "--output", target, fake=True, env={"FAKE_OPENED": str(tmp_path / "opened")})
    assert done.returncode == 2 and "--output" in done.stderr
    assert not (tmp_path / "opened").exists()


def test_an_old_output_survives_an_error(coli: Coli, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    done = coli("run", "a b c", "-o", "out", fake=True, env={"FAKE_MODE": "break"})
    assert done.returncode == 1 and (tmp_path / "out").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def on_terminal(*arguments: str, **env: str) -> tuple[int, str]:
    """Run with stdin, stdout and stderr on a pseudo terminal; returns (exit code, everything on the screen)."""
    master, slave = pty.openpty()
    process = subprocess.Popen([*FAKE, *arguments], stdin=slave, stdout=slave, stderr=slave, env=clean_env(**env))
    os.close(slave)
    screen = b""
    while True:
        try:
            got = os.read(master, 4096)
        except OSError:  # EIO: the last writer has gone
            break
        if not got:
            break
        screen += got
    os.close(master)
    return process.wait(20), screen.decode()


def test_a_terminal_sees_progress_in_place_and_dimmed_talk() -> None:
    code, screen = on_terminal("run", "--raw", "hello there", TERM="xterm")
    assert code == 0
    assert "\r\x1b[Kcompiling 0/3\r\x1b[Kcompiling 1/3" in screen and "\x1b[2mthe banner\x1b[0m" in screen
    assert "hello there\r\n" in screen


def test_no_color_and_dumb_terminals() -> None:
    assert "\x1b[2m" not in on_terminal("run", "hi", TERM="xterm", NO_COLOR="1")[1]
    assert "\x1b" not in on_terminal("run", "hi", TERM="dumb")[1]


def test_no_prompt_on_a_terminal_is_a_usage_error() -> None:
    code, screen = on_terminal("run", TERM="xterm")
    assert code == 2 and "no prompt" in screen and 'coli run "' in screen


def test_an_error_on_a_terminal_begins_its_own_line() -> None:
    assert "\r\ncoli: layer 3" in on_terminal("run", "--raw", "a b c", TERM="xterm", FAKE_MODE="break")[1]


def test_what_happens_meanwhile_is_said_when_it_happens(coli: Coli) -> None:
    done = coli("run", "--raw", "a b c", fake=True, env={"FAKE_MODE": "scarce"})
    assert done.stdout == "a b c\n" and done.returncode == 0
    said = done.stderr.splitlines()
    assert said.count("memory runs short") == 1 and said.index("the banner") < said.index("memory runs short")
    quiet = coli("run", "--raw", "a b c", "--quiet", fake=True, env={"FAKE_MODE": "scarce"})
    assert (quiet.stdout, quiet.stderr) == ("a b c\n", "")
    screen = on_terminal("run", "--raw", "a b c", TERM="dumb", FAKE_MODE="scarce")[1]
    assert "\r\na\r\nmemory runs short\r\n b c\r\n" in screen
