"""How a chat looks: the answer on stdout, everything about it on stderr.

    PlainView      stdout is no terminal that can be drawn on: the answer as it is, its reasoning on stderr
    JsonView       one document an answer, on one line
    MarkdownView   a terminal: Markdown set by rich, the reasoning dimmed before it

Each is told `begin`, `show` for every delta, then `end` or `fail`, and says notes without breaking the answer.
Guarded by tests/cli/test_chat.py and tests/cli/test_chat_pty.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from coli.commands._output import Output, harmless

if TYPE_CHECKING:
    from coli.answer import Delta
    from coli.commands._chat_markdown import MarkdownWriter
    from coli.conversation import Turn, TurnFacts

_READING = "reading the prompt (Ctrl-C stops)"


class View(Protocol):
    """See the module's note."""

    def begin(self) -> None: ...
    def show(self, delta: Delta) -> None: ...
    def end(self, turn: Turn, facts: TurnFacts | None) -> None: ...
    def fail(self) -> None: ...
    def note(self, text: str) -> None: ...


def view(out: Output, *, as_json: bool, color: bool) -> View:
    """The one for where stdout goes."""
    if as_json:
        return JsonView(out)
    drawable = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return MarkdownView(out, color=color) if drawable else PlainView(out)


class PlainView:
    def __init__(self, out: Output) -> None:
        self._out = out
        self._thinking = False

    def begin(self) -> None:
        if self._out.terminal:
            self._out.progress(_READING)

    def show(self, delta: Delta) -> None:
        if delta.kind == "reasoning":
            self._thinking = True
            self._out.aside(delta.text)
        else:
            self._stop_thinking()
            self._out.piece(delta.text)

    def end(self, turn: Turn, facts: TurnFacts | None) -> None:
        self._stop_thinking()
        self._out.done()
        self._out.text(turn.content, streamed=True)

    def fail(self) -> None:
        self._stop_thinking()
        self._out.done()
        self._out.end_line()

    def note(self, text: str) -> None:
        self._stop_thinking()
        self._out.note(text)

    def _stop_thinking(self) -> None:
        """The reasoning's last line ends."""
        if self._thinking:
            self._out.aside("\n")
            self._thinking = False


class JsonView:
    """`{"role", "content", "reasoning_content", "facts"}`; facts are null where the answer was broken off."""

    def __init__(self, out: Output) -> None:
        self._out = out

    def begin(self) -> None:
        """There is nothing to show before the end."""

    def show(self, delta: Delta) -> None:
        """Nor in between."""

    def end(self, turn: Turn, facts: TurnFacts | None) -> None:
        message = {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}
        self._out.document({**message, "facts": None if facts is None else asdict(facts)})

    def fail(self) -> None:
        """The error says it."""

    def note(self, text: str) -> None:
        self._out.note(text)


class MarkdownView:
    def __init__(self, out: Output, *, color: bool) -> None:
        from coli.commands._chat_markdown import console

        self._out = out
        self._console = console(color=color)
        self._writer: MarkdownWriter | None = None
        self._open = False  # the reasoning's last line has no end yet

    def begin(self) -> None:
        from coli.commands._chat_markdown import MarkdownWriter

        self._writer = MarkdownWriter(self._console)
        if self._out.terminal:
            self._out.progress(_READING)

    def show(self, delta: Delta) -> None:
        self._out.done()
        if delta.kind == "reasoning":
            self._console.out(harmless(delta.text), style="dim", highlight=False, end="")
            self._open = True
        elif self._writer is not None:
            self._end_line()
            self._writer.write(delta.text)

    def end(self, turn: Turn, facts: TurnFacts | None) -> None:
        self.fail()

    def fail(self) -> None:
        self._out.done()
        self._end_line()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def note(self, text: str) -> None:
        """Above the block that is being drawn, where both are on the screen."""
        self._end_line()
        if self._writer is not None and self._out.terminal and not self._out.quiet:
            self._out.done()
            self._console.print(text, style="dim")
        else:
            self._out.note(text)

    def _end_line(self) -> None:
        if self._open:
            self._console.print()
            self._open = False
