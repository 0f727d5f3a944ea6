"""An answer on a terminal: Markdown that is set while it grows.

Idea: finished blocks (paragraphs, lists, fenced code) are printed once and for all; only the block that still grows is
redrawn, and of it the last lines that the screen holds, so a long answer never flickers or repeats itself. A block ends
at an empty line outside a fence whose next line begins in the first column.
Text is never lost: HTML stands as text, and control characters, which could steer the terminal, as their pictures.
Invariant: blocks and tail joined are the text, however it was cut (tests/cli/test_chat_view.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from coli.commands._output import harmless

_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
REDRAW_S = 0.1  # at least so far apart, and
SHARE = 10  # at least so many times what the last one took


class Blocks:
    """Text in pieces, out in blocks. `tail` is what is not finished."""

    def __init__(self) -> None:
        self.tail = ""
        self._seen = 0  # characters of the tail in lines that were looked at
        self._fence = ""  # that is open
        self._empty = False  # the last line was, outside a fence

    def push(self, text: str) -> Iterator[str]:
        """The blocks that are finished with it."""
        self.tail += text
        while (block := self._next()) is not None:
            yield block

    def _next(self) -> str | None:
        while self._seen < len(self.tail):
            if self._empty and not self.tail[self._seen].isspace():
                block, self.tail = self.tail[: self._seen], self.tail[self._seen :]
                self._seen, self._empty = 0, False
                return block
            end = self.tail.find("\n", self._seen) + 1
            if not end:
                return None
            self._look(self.tail[self._seen : end])
            self._seen = end
        return None

    def _look(self, line: str) -> None:
        fence = _FENCE.match(line)
        mark = fence.group(1) if fence else ""
        if self._fence:
            if mark.startswith(self._fence) and line.strip() == mark:
                self._fence = ""
        else:
            self._fence = mark
            self._empty = not line.strip()


class _Markdown(Markdown):
    """rich's, but HTML is text: it would be left out."""

    def __init__(self, text: str) -> None:
        super().__init__("")
        parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
        self.markup, self.parsed = text, parser.parse(text)


class _Tail:
    """The last lines of a block, as many as the screen holds."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_Markdown(self._text), options.update(height=None), pad=False)
        for number, line in enumerate(lines[-max(1, console.height - 2) :]):
            if number:
                yield Segment.line()
            yield from line


class _Console(Console):
    """A console that leaves the cursor alone: a process that is ended in the middle cannot bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return False


class MarkdownWriter:
    """Sets one answer. `write` its pieces, then `close`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._blocks = Blocks()
        self._live: Live | None = None
        self._first = True
        self._drawn = self._cost = 0.0

    def write(self, text: str) -> None:
        for block in self._blocks.push(harmless(text)):
            self._print(block)
        now = time.monotonic()
        if now - self._drawn >= max(REDRAW_S, SHARE * self._cost):
            self._redraw()
            self._drawn = time.monotonic()
            self._cost = self._drawn - now

    def close(self) -> None:
        """Take the growing block away and print it for good."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._blocks.tail)
        self._blocks = Blocks()

    def _print(self, block: str) -> None:
        if block.strip():
            if not self._first:
                self._console.print()
            self._console.print(_Markdown(block))
            self._first = False

    def _redraw(self) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                              redirect_stderr=False, vertical_overflow="crop")  # fmt: skip
            self._live.start()
        self._live.update(_Tail(self._blocks.tail), refresh=True)


def console(*, color: bool) -> Console:
    """The terminal on stdout."""
    return _Console(highlight=False, markup=False, emoji=False, no_color=not color)
