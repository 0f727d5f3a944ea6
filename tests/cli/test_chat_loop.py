"""The loop of a chat, with scripted readers and partners: what stays in the conversation, what Ctrl-C counts for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coli.answer import Delta
from coli.commands._chat_loop import AGAIN, Chat
from coli.commands._output import Output
from coli.commands._signals import Terminated
from coli.conversation import Conversation, Turn, TurnFacts
from coli.errors import NonFinite, PromptTooLong

FACTS = TurnFacts("stop", 8, 4, 2, 1, 2, 1.5, 0.1, 0.5)
STOPPED = TurnFacts("cancelled", 8, 4, 1, 0, 0, None, 0.1, 0.0)


class Partner:
    """Answers "yes, QUESTION"; `stop` sends itself a signal after so many pieces and stops when it is told to."""

    def __init__(self) -> None:
        self.facts: TurnFacts | None = None
        self.say: Callable[[str], None] = lambda text: None
        self.asked: list[list[dict[str, str]]] = []
        self.stop: dict[str, tuple[int, int]] = {}  # question -> signal, pieces before it
        self.fail: dict[str, Exception] = {}
        self.late: list[str] = []  # questions whose answer sends a SIGINT when it is complete
        self.ends: dict[str, TurnFacts] = {}
        self._told = threading.Event()

    def answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        self.facts = None
        self._told.clear()
        return self._answer(conversation, question)

    def _answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        self.asked.append(conversation.messages(question))
        pieces = [Delta("reasoning", "hm"), Delta("content", "yes, "), Delta("content", question)]
        number, most = self.stop.get(question, (0, len(pieces)))
        yield from pieces[:most]
        if self._told.is_set():
            self._told.clear()
            self.facts = STOPPED
            return
        if number:
            os.kill(os.getpid(), number)
            assert self._told.wait(30)
            self._told.clear()
        if question in self.fail:
            raise self.fail[question]
        self.facts = self.ends.get(question, STOPPED if number else FACTS)
        if question in self.late:
            os.kill(os.getpid(), signal.SIGINT)
            assert self._told.wait(30)

    def cancel(self) -> None:
        self._told.set()

    def details(self) -> list[str]:
        return ["a detail"]

    def idle(self, conversation: Conversation) -> list[str]:
        return ["no effect"] if conversation.thinking is not None else []


class Reader:
    keys = ("a key",)

    def __init__(self, *inputs: str | type[BaseException]) -> None:
        self.inputs = list(inputs)
        self.waiting = ""  # the question after which a Ctrl-C waits
        self._last: str | None = None

    def interrupted(self) -> bool:
        waits, self.waiting = self.waiting == self._last, ""
        return waits

    def read(self) -> str | None:
        given = self.inputs.pop(0) if self.inputs else None
        if isinstance(given, type):
            raise given
        self._last = given
        return given


class View:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self) -> None:
        self.seen.append("begin")

    def show(self, delta: Delta) -> None:
        self.seen.append(delta.text)

    def end(self, turn: Turn, facts: Any) -> None:
        self.seen.append("end")

    def fail(self) -> None:
        self.seen.append("fail")

    def note(self, text: str) -> None:
        self.seen.append(text)


class Setting:
    """A chat of `inputs`."""

    def __init__(self, *inputs: str | type[BaseException], interactive: bool = True) -> None:
        self.partner, self.view, self.reader, self.conversation = Partner(), View(), Reader(*inputs), Conversation()
        self.chat = Chat(self.conversation, self.partner, self.reader, self.view, Output(), interactive=interactive)

    def run(self) -> int:
        return self.chat.run()

    @property
    def turns(self) -> list[Turn]:
        return self.chat.conversation.turns


def test_a_conversation_grows_turn_by_turn() -> None:
    setting = Setting("one", "//two")
    assert setting.run() == 0
    assert setting.turns == [Turn("one", "yes, one", "hm"), Turn("/two", "yes, /two", "hm")]
    assert [len(messages) for messages in setting.partner.asked] == [1, 3]
    assert setting.view.seen[:6] == ["begin", "hm", "yes, ", "one", "end", FACTS.line()]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_stopped_answer_stays_as_far_as_it_came(pieces: int) -> None:
    setting = Setting("one", "two")
    setting.partner.stop["one"] = (signal.SIGINT, pieces)
    assert setting.run() == 0
    said = ["hm", "yes, ", "one"][:pieces]
    assert setting.turns == [Turn("one", "".join(said[1:]), said[0]), Turn("two", "yes, two", "hm")]
    assert STOPPED.line() in setting.view.seen and "stopped" in STOPPED.line()


def test_a_question_that_was_stopped_before_its_answer_is_forgotten() -> None:
    setting = Setting("one", "two")
    setting.partner.stop["one"] = (signal.SIGINT, 0)
    assert setting.run() == 0 and [turn.question for turn in setting.turns] == ["two"]
    assert any("forgotten" in text for text in setting.view.seen)


def test_a_ctrl_c_behind_the_last_token_is_not_for_the_next_answer() -> None:
    """A stopped answer without text stays out of the conversation, whoever stopped it."""
    setting = Setting("one", "two", "three")
    setting.partner.late = ["one"]
    setting.partner.stop["two"] = (0, 0)
    setting.partner.ends["two"] = STOPPED
    assert setting.run() == 0
    assert setting.turns == [Turn("one", "yes, one", "hm"), Turn("three", "yes, three", "hm")]


def test_a_ctrl_c_between_a_question_and_its_answer_stops_it() -> None:
    setting = Setting("one", "two")
    setting.reader.waiting = "one"
    assert setting.run() == 0
    assert STOPPED.line() in setting.view.seen and len(setting.turns) == 2


def test_ctrl_c_twice_leaves_and_once_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting("one", KeyboardInterrupt, "two", KeyboardInterrupt, "/help", KeyboardInterrupt, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        setting.run()
    assert len(setting.turns) == 2 and capsys.readouterr().err.count(AGAIN) == 3


def test_ctrl_c_after_a_stopped_answer_leaves() -> None:
    setting = Setting("one", KeyboardInterrupt, "two")
    setting.partner.stop["one"] = (signal.SIGINT, 2)
    with pytest.raises(KeyboardInterrupt):
        setting.run()
    assert setting.turns == [Turn("one", "yes, ", "hm")]


@pytest.mark.parametrize(("number", "interactive", "code"), [(signal.SIGTERM, True, 143), (signal.SIGTERM, False, 143),
                                                             (signal.SIGINT, False, 130)])  # fmt: skip
def test_signals_that_leave_after_the_answer_so_far(number: int, interactive: bool, code: int) -> None:
    setting = Setting("one", "two", interactive=interactive)
    setting.partner.stop["one"] = (number, 2)
    assert setting.run() == code
    assert setting.turns == [Turn("one", "yes, ", "hm")] and "end" in setting.view.seen


def test_sigterm_is_heard_also_by_a_turn_that_fails() -> None:
    setting = Setting("one", "two")
    setting.partner.stop["one"], setting.partner.fail["one"] = (signal.SIGTERM, 2), NonFinite("x")
    with pytest.raises(Terminated):
        setting.run()
    assert setting.turns == [] and setting.view.seen[-1] == "fail"


def test_a_person_goes_on_after_a_turn_that_failed_as_if_it_had_not_been(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting("one", "two")
    setting.partner.fail["one"] = NonFinite("NaN\x1b[2J", "layer 3", "ask again")
    assert setting.run() == 0
    assert [turn.question for turn in setting.turns] == ["two"] and setting.view.seen[4] == "fail"
    assert "coli: layer 3: NaN\\x1b[2J (ask again)\n" in capsys.readouterr().err


@pytest.mark.parametrize("error", [NonFinite("x"), PromptTooLong("x"), ZeroDivisionError()])
def test_a_script_ends_with_the_error(error: Exception) -> None:
    setting = Setting("one", "two", interactive=False)
    setting.partner.fail["one"] = error
    with pytest.raises(type(error)):
        setting.run()
    assert setting.view.seen[-1] == "fail" and setting.turns == []


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting("/help", "/system be  kind", "one", "/think on", "/stats", "/reset", "/system", "/system -",
                      "/think", "/quit", "never")  # fmt: skip
    assert setting.run() == 0
    seen = setting.view.seen
    for line in ("system message: be kind", "thinking: on", "no effect", "a detail", "a key", "no system message",
                 "forgot 1 turn, the system message stays", f"last: {FACTS.line()}"):  # fmt: skip
        assert line in seen, line
    assert sum(line.startswith("/") for line in seen) == 8
    assert setting.turns == [] and setting.partner.asked[0][0] == {"role": "system", "content": "be  kind"}
    assert len(setting.partner.asked) == 1 and capsys.readouterr().err == ""


@pytest.mark.parametrize(("line", "words"), [("/bogus", "no such command"), ("/reset now", "takes nothing"),
                                             ("/think maybe", "on, off, auto"), ("/save", "/save FILE"),
                                             ("/load", "/load FILE"), ("/load /nowhere/x", "No such file"),
                                             ("/", "no such command"), ("/usr/bin/x", "//text")])  # fmt: skip
def test_a_wrong_command_is_told_and_costs_a_script_its_exit_code(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    for interactive, code in ((True, 0), (False, 2)):
        setting = Setting(line, "one", interactive=interactive)
        assert setting.run() == code and len(setting.turns) == 1
        said = capsys.readouterr().err
        assert said.startswith("coli: ") and words in said and said.count("\n") == 1


@pytest.mark.parametrize("name", ["/save {long}", "/load {long}", "/save a\0b", "/load a\0b", "/save ~\0/x",
                                  "/save /nowhere/x", "/save {fifo}", "/load {fifo}", "/load /dev/zero", "/load {big}",
                                  "/load {folder}", "/save {folder}", "/load {deep}"])  # fmt: skip
def test_a_file_that_is_none_is_a_note_and_the_chat_goes_on(
    tmp_path: Any, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coli.commands._chat_commands.MOST", 1 << 17)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "big").write_text(" " * (1 << 17) + "[]")
    (tmp_path / "deep").write_text("[" * 100_000)
    places = {name: tmp_path / name for name in ("fifo", "big", "deep")}
    line = name.format(long=tmp_path / ("x" * 300), folder=tmp_path, **places)
    for interactive, code in ((True, 0), (False, 2)):
        setting = Setting("one", line, "two", interactive=interactive)
        assert setting.run() == code and [turn.question for turn in setting.turns] == ["one", "two"]
        said = capsys.readouterr().err
        assert said.startswith("coli: ") and said.count("\n") == 1


def test_half_a_character_cannot_be_saved_and_ends_nothing(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    setting = Setting(f"/save {tmp_path / 'kept'}", "one", interactive=False)
    setting.conversation.turns.append(Turn("q", "\ud800"))
    assert setting.run() == 2 and len(setting.turns) == 2
    assert "cannot write" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_save_and_load(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "kept.json", tmp_path / "notes.txt"
    other.write_text("mine")
    setting = Setting("/system s", "one", f"/save {file}", "/reset", "two", f"/save {other}", f"/load {other}",
                      f"/load {file}", "three", f"/save {file}")  # fmt: skip
    assert setting.run() == 0
    assert [turn.question for turn in setting.turns] == ["one", "three"]
    assert Conversation.from_json(file.read_text(), file).turns == setting.turns
    assert f"saved 1 turn and the system message to {file}" in setting.view.seen
    assert other.read_text() == "mine" and capsys.readouterr().err.count(str(other)) == 2
