"""How an answer looks on a terminal: blocks that lose nothing, text that cannot steer it, Markdown set once."""

from __future__ import annotations

import io
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.commands._chat_markdown import Blocks, MarkdownWriter, _Console
from coli.commands._output import harmless

ANSWER = """# Title

A paragraph with <b>HTML</b> and <div>
more of it.

- one
- two

  still two

```python
def f():

    return "<x>"
```

1. first

2. second
"""


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def blocks_of(parts: list[str]) -> tuple[list[str], str]:
    blocks = Blocks()
    done = [block for part in parts for block in blocks.push(part)]
    return done, blocks.tail


@given(st.text("ab `~\n-#\t", max_size=60) | st.just(ANSWER), st.lists(st.integers(0, 400)))
def test_blocks_and_tail_are_the_text_however_it_was_cut(text: str, cuts: list[int]) -> None:
    done, tail = blocks_of(pieces(text, cuts))
    assert "".join(done) + tail == text
    assert (done, tail) == blocks_of([text])


def test_a_block_ends_at_an_empty_line_outside_fences_and_lists() -> None:
    done, tail = blocks_of([ANSWER])
    assert [block.split("\n")[0] for block in done] == ["# Title", "A paragraph with <b>HTML</b> and <div>", "- one",
                                                        "```python", "1. first"]  # fmt: skip
    assert tail == "2. second\n"


def test_nothing_steers_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9b\x7f\r\n\tc") == "a␛[2Jb␇\ufffd␡␍\n\tc"


@pytest.fixture
def screen() -> tuple[io.StringIO, _Console]:
    file = io.StringIO()
    return file, _Console(file=file, force_terminal=True, width=60, height=12, highlight=False, markup=False,
                          emoji=False, color_system=None)  # fmt: skip


def visible(written: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)


def test_markdown_is_set_whole_and_the_cursor_left_alone(screen: tuple[io.StringIO, _Console]) -> None:
    file, console = screen
    writer = MarkdownWriter(console)
    cut = random.Random(1)
    for part in pieces(ANSWER, [cut.randrange(400) for _ in range(80)]):
        writer.write(part)
    writer.close()
    words = visible(file.getvalue())
    for word in ("Title", "<b>HTML</b>", "<div>", "• one", "still two", "def f():", 'return "<x>"', "1 first", "2 sec"):
        assert word in words, word
    assert "```" not in words.rpartition("def f")[2] and "\x1b[?25l" not in file.getvalue()


def test_a_block_longer_than_the_screen_is_printed_once(
    screen: tuple[io.StringIO, _Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coli.commands._chat_markdown.REDRAW_S", 0.0)
    monkeypatch.setattr("coli.commands._chat_markdown.SHARE", 0)
    file, console = screen
    writer = MarkdownWriter(console)
    writer.write("```\n")
    for number in range(40):
        writer.write(f"line{number}x\n")
    drawn = visible(file.getvalue())
    assert drawn.count("line0x") < 40 and "line39x" in drawn
    file.seek(0)
    file.truncate()
    writer.close()  # draws the last screen once more, takes it away, prints all
    assert all(visible(file.getvalue()).count(f"line{number}x") == 1 for number in range(40 - console.height))
