"""Where the lines of a chat come from: a person at a terminal, or a pipe.

`read` gives the next input, None at the end, and raises KeyboardInterrupt for a Ctrl-C.
At a terminal prompt_toolkit reads: Enter sends, Alt-Enter, or a backslash before Enter, begins a new line, a paste
keeps its lines, arrows walk the history. It draws on stdout, or on stderr where stdout is no terminal
(`coli chat | tee log`). From anywhere else each line is an input, and empty ones are none.

The history file holds what was typed, readable by its owner alone, also where an older one was not. A history that
cannot be kept is one note, and the chat goes on without it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from coli.commands._signals import Terminated
from coli.errors import UsageError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

Note = Callable[[str], None]
PROMPT = "> "
KEYS = (
    "Enter sends; Alt-Enter, or \\ before Enter, begins a new line; the arrow keys walk the history",
    "Ctrl-C stops an answer, twice leaves; Ctrl-D leaves; //text sends text that begins with a slash",
)
FOOTER = "Enter sends · Alt-Enter new line · /help"


def history_file() -> Path:
    """Where typed inputs are kept."""
    from platformdirs import user_data_path

    return user_data_path("coli", appauthor=False) / "chat_history"


def person() -> bool:
    """Whether somebody sits at stdin."""
    return _tty(sys.stdin)


def at_terminal() -> bool:
    """Whether a person can be given an editor: stdin, and stdout or stderr, are terminals that can move a cursor."""
    return os.environ.get("TERM") != "dumb" and person() and (_tty(sys.stdout) or _tty(sys.stderr))


class Interrupts:
    """Ctrl-C outside of answers, where an exception at any place would lose the chat: it waits for the next input to be
    read. A context, within which `cancelling` may stand."""

    def __init__(self) -> None:
        self.reading = False  # it need not wait
        self._waiting = False

    def __enter__(self) -> Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self.reading:
            self.reading = False
            raise KeyboardInterrupt
        self._waiting = True

    def take(self) -> bool:
        """Whether one waited."""
        waited, self._waiting = self._waiting, False
        return waited


class Lines:
    """Inputs from a pipe or a file. `ask`: is given the prompt before each."""

    keys: tuple[str, ...] = ()

    def __init__(self, interrupts: Interrupts, ask: Callable[[str], None] | None) -> None:
        self._interrupts, self._ask = interrupts, ask
        self.interrupted = interrupts.take
        self._number = 0

    def read(self) -> str | None:
        """Raises UsageError for a line that is no UTF-8."""
        from coli.tokenizer import decode_prompt

        while line := self._line():
            text = decode_prompt(line, f"line {self._number} of stdin").strip()
            if text:
                return text
        return None

    def _line(self) -> bytes:
        if sys.stdin is None:
            return b""
        if self._ask is not None:
            self._ask(PROMPT)
        self._number += 1
        self._interrupts.reading = True
        try:
            if self._interrupts.take():
                raise KeyboardInterrupt
            return sys.stdin.buffer.readline()
        except OSError as error:
            raise UsageError(f"cannot read: {error.strerror}", "stdin", "give it a pipe or a file") from error
        finally:
            self._interrupts.reading = False


class Editor:
    """Inputs of a person. `words` are completed.

    The event loop under it reports exceptions of signal handlers and goes on, so both signals are told to the editor,
    which ends by itself."""

    keys: tuple[str, ...] = KEYS

    def __init__(self, interrupts: Interrupts, note: Note, words: Iterable[str]) -> None:
        self._interrupts = interrupts
        self.interrupted = interrupts.take
        self._session = _session(_history(history_file(), note), list(words))
        self._terminated = False

    def read(self) -> str | None:
        while True:
            with self._terminable():
                try:
                    text = self._session.prompt(pre_run=self._begin)
                except EOFError:
                    return None
            if self._interrupts.take():
                raise KeyboardInterrupt
            if text.strip():
                return text.strip()

    def _begin(self) -> None:
        """It listens from here on; what came before is for it."""
        if self._interrupts.take() or self._terminated:
            self._end()

    @contextmanager
    def _terminable(self) -> Iterator[None]:
        """SIGTERM raises Terminated when the editor has left the terminal as it was."""
        before = signal.getsignal(signal.SIGTERM)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._terminated:
                raise Terminated

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._terminated = True
        loop = self._session.app.loop
        if loop is not None:
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        app = self._session.app
        if app.is_running and app.future is not None and not app.future.done():
            app.exit(exception=KeyboardInterrupt())


def _session(history: History, words: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        PROMPT, multiline=True, prompt_continuation="  ", history=history, key_bindings=keys,
        bottom_toolbar=FOOTER, output=create_output(stdout=sys.stdout if _tty(sys.stdout) else sys.stderr),
        completer=WordCompleter(words, sentence=True), complete_while_typing=False,
    )  # fmt: skip


def _history(file: Path, note: Note) -> History:
    """The history in `file`; one in memory, and a note, where the file cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                note(f"the history is not kept: {file}: {error.strerror}")

    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        file.chmod(0o600)
    except OSError as error:
        note(f"the history is not kept: {file}: {error.strerror}")
        return InMemoryHistory()
    return Kept(str(file))


def _tty(stream: Any) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
