"""`coli chat` as a person has it, on a pseudo-terminal: the editor, Markdown, Ctrl-C, the history file."""

from __future__ import annotations

import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coli.commands._chat_loop import AGAIN
from coli.models.find import NANO
from tests.cli.chat_server import Script, serving
from tests.conftest import CLI, clean_env

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import Terminal

FOOTER, PROMPT = "/help", "> "  # the editor's last line, which stands once it listens; of plain lines
SLOW = (sys.executable, str(Path(__file__).with_name("slow_chat.py")))


@pytest.fixture
def script() -> Script:
    return Script(pieces=[{"content": "some **bold** words "}], pause=0.01)


@pytest.fixture
def start(tmp_path: Path, script: Script) -> Iterator[Callable[..., Terminal]]:
    """`start(*flags)` is a chat with a scripted server; `start(..., own=True)` with a slow engine of its own."""
    with ExitStack() as opened:

        def make(*flags: str, own: bool = False, **env: str) -> Terminal:
            home = {"XDG_DATA_HOME": str(tmp_path / "data")}
            if own:
                arguments = [*SLOW, "chat", "--model", str(NANO), *flags]
            else:
                arguments = [*CLI, "chat", "--url", opened.enter_context(serving(script)), *flags]
            terminal = opened.enter_context(Terminal(arguments, tmp_path, clean_env(**home, **env)))
            terminal.until(FOOTER)
            return terminal

        yield make


def test_a_turn_its_footer_and_ctrl_d(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.type("hello\r")
    shown = terminal.until("13 of 21 prompt tokens cached")
    assert "some bold words" in shown and "75.0% of 4 drafts accepted · 2.50 tokens/forward" in shown
    terminal.until(FOOTER)
    terminal.type("\x04")
    assert terminal.end() == 0 and terminal.cooked


def test_more_lines_than_one(start: Callable[..., Terminal], script: Script) -> None:
    terminal = start()
    terminal.type("one\x1b\rtwo\\\rthree\x1b[200~\nfour\nfive\x1b[201~\r")
    terminal.until("cached")
    assert script.asked[0]["messages"] == [{"role": "user", "content": "one\ntwo\nthree\nfour\nfive"}]


def test_reasoning_is_dimmed_and_stays_out_of_the_markdown(start: Callable[..., Terminal], script: Script) -> None:
    script.pieces = [{"reasoning_content": "*hm* "}, {"reasoning_content": "so\x1b[31m"}, {"content": "*yes*"}]
    terminal = start()
    terminal.type("hello\r")
    shown = terminal.until("cached")
    assert "*hm* so␛[31m\n" in shown and "*yes*" not in shown and b"\x1b[2m*hm* \x1b[0m" in terminal.raw


def test_ctrl_c_once_stops_the_answer_which_stays(start: Callable[..., Terminal], script: Script) -> None:
    script.endless = True
    terminal = start()
    terminal.type("hello\r")
    terminal.until("some bold words some bold")
    terminal.type("\x03")
    terminal.until("stopped")
    terminal.until(AGAIN)
    assert script.gone.wait(30)
    script.endless = False
    terminal.until(FOOTER)
    terminal.type("and?\r")
    terminal.until("cached")
    said = [message["role"] for message in script.asked[1]["messages"]]
    assert said == ["user", "assistant", "user"]
    assert script.asked[1]["messages"][1]["content"].startswith("some **bold** words some **bold**")


def test_ctrl_c_after_that_leaves(start: Callable[..., Terminal], script: Script) -> None:
    script.endless = True
    terminal = start()
    terminal.type("hello\r")
    terminal.until("words some")
    terminal.type("\x03")
    terminal.until(AGAIN)
    terminal.until(FOOTER)
    terminal.type("\x03")
    assert terminal.end() == 130 and terminal.cooked


def test_ctrl_c_at_the_prompt_once_empties_it_twice_leaves(start: Callable[..., Terminal], script: Script) -> None:
    terminal = start()
    terminal.type("half a question\x03")
    terminal.until(AGAIN)
    terminal.until(FOOTER)
    terminal.type("hello\r")
    terminal.until("cached")
    assert script.asked[0]["messages"] == [{"role": "user", "content": "hello"}]
    for _ in range(2):
        terminal.until(FOOTER)
        terminal.type("\x03")
    assert terminal.end() == 130 and terminal.cooked
    assert "Traceback" not in terminal.seen and "Warning" not in terminal.seen


def test_an_engine_of_its_own_stops_and_remembers(start: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = start(own=True)
    terminal.type("Tell me a story.\r")
    terminal.until("(Ctrl-C stops)")
    terminal.until("   ")  # the first words, and the rest of their line
    terminal.type("\x03")
    terminal.until("stopped")
    terminal.until(FOOTER)
    terminal.type("/save kept.json\r")
    terminal.until("saved 1 turn")
    terminal.until(FOOTER)
    terminal.type("\x03")
    terminal.until(AGAIN)
    terminal.type("\x03")
    assert terminal.end() == 130 and (tmp_path / "kept.json").exists()


def test_answers_go_through_tee_and_the_editor_stays(tmp_path: Path, script: Script) -> None:
    with serving(script) as url:
        command = f"{shlex.join([*CLI, 'chat', '--url', url])} | tee log"
        env = clean_env(XDG_DATA_HOME=str(tmp_path / "data"))
        with Terminal(["sh", "-c", command], tmp_path, env) as terminal:
            for _ in range(2):
                terminal.until(FOOTER)
                terminal.type("hello\r")
                terminal.until("cached")
            terminal.until(FOOTER)
            terminal.type("/quit\r")
            assert terminal.end() == 0
    assert (tmp_path / "log").read_text() == "some **bold** words \n" * 2


def test_sigterm_at_the_prompt(start: Callable[..., Terminal]) -> None:
    terminal = start()
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143 and "coli: terminated" in terminal.seen and terminal.cooked


def test_the_history_is_its_owners_alone_and_comes_back(start: Callable[..., Terminal], script: Script,
                                                        tmp_path: Path) -> None:  # fmt: skip
    file = tmp_path / "data" / "coli" / "chat_history"
    file.parent.mkdir(parents=True)
    file.write_text("")
    file.chmod(0o644)
    first = start()
    first.type("remember me\r")
    first.until("cached")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and "remember me" in file.read_text()
    second = start()
    second.type("\x1b[A\r")
    second.until("cached")
    assert script.asked[1]["messages"][0]["content"] == "remember me"


def test_a_history_that_cannot_be_kept_is_a_note(start: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    terminal = start()
    assert b"the history is not kept" in terminal.raw
    terminal.type("hello\r")
    terminal.until("cached")


def test_a_dumb_terminal_has_plain_lines(tmp_path: Path, script: Script) -> None:
    dumb = ["env", "TERM=dumb", *CLI]
    with serving(script) as url, Terminal([*dumb, "chat", "--url", url], tmp_path, clean_env()) as terminal:
        terminal.until(PROMPT)
        terminal.type("hello\n")
        terminal.until("some **bold** words")
        terminal.until(PROMPT)
        terminal.type("\x04")
        assert terminal.end() == 0 and b"\x1b" not in terminal.raw
