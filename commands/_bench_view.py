"""A benchmark on a terminal: the table and the bars, drawn by rich into text.

Off a terminal the table is as wide as it must be, since a line that is cut or wrapped helps nobody in a file.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from coli.bench import render

if TYPE_CHECKING:
    from coli.bench.render import Record
    from coli.bench.summary import Row

_WIDE, _BAR = 400, 40
_LEFT = ("prompt", "arm", "source", "extrapolated")
_WHOLE = ("prompt", "arm", "tok/s")  # columns that are never broken


def result(
    form: str, records: Sequence[Record], document: Record, *, before: Sequence[str] = (), after: Sequence[str] = (),
    bars: Sequence[Row] = (), color: bool = False,
) -> str:  # fmt: skip
    """The whole of stdout in this form ("table", "md", "csv", "json", "jsonl"). `before` and `after` are lines for a
    person; `document` is the last line, but for csv."""
    last = render.json_lines([document])
    if form == "csv":
        return render.comma_separated(records)
    if form == "json":
        return last
    if form == "jsonl":
        return "\n".join([render.json_lines(records), last] if records else [last])
    if form == "md":
        parts = [_bullets(before), render.markdown(records), _bullets(after), last]
    else:
        grid = text(table(records), color=color) if records else ""
        parts = ["\n".join(before), grid, "\n".join(after), text(chart(bars), color=color) if bars else "", last]
    return "\n\n".join(part for part in parts if part)


def table(records: Sequence[Record]) -> Table:
    """Records as a table, with a gap wherever the first column changes. A narrow terminal breaks cells between words.
    """
    grid = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
    names = list(records[0])
    for name in names:
        words = " ".join([name, *(_cell(row[name]) for row in records)]).split()
        grid.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=name in _WHOLE,
                        min_width=max(map(len, words)))  # fmt: skip
    for row, following in zip(records, [*records[1:], None], strict=True):
        ends = following is not None and row[names[0]] != following[names[0]]
        grid.add_row(*(Text(_cell(value)) for value in row.values()), end_section=ends)
    return grid


def chart(rows: Sequence[Row]) -> Group:
    """A bar an arm, as long as its median speed; one scale for all prompts."""
    most = max((row.speed.median for row in rows if row.speed is not None), default=0.0)
    grid = Table.grid(padding=(0, 1))
    prompt = None
    for row in rows:
        if row.speed is not None:
            name = "" if row.prompt == prompt else row.prompt
            prompt = row.prompt
            grid.add_row(Text(name), Text(row.arm), Bar(most, 0, row.speed.median, width=_BAR),
                         Text(f"{row.speed.median:.1f} tok/s"))  # fmt: skip
    return Group(Text("decoding, median tok/s"), grid)


def text(*parts: Any, color: bool) -> str:
    """The parts as they look on this stdout, without trailing blanks."""
    console = Console(file=io.StringIO(), width=_width(), force_terminal=color and sys.stdout.isatty(),
                      no_color=not color, highlight=False, legacy_windows=False)  # fmt: skip
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return _WIDE


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
