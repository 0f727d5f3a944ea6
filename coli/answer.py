"""An answer's text, sorted while it streams: reasoning, content, tool calls.

Idea: one small machine between TextStream (UTF-8, stop strings) and whoever speaks to the client. It reads text in any
pieces and gives deltas. What may still become a tag is held back, and nothing else: the longest end of the text that
could begin one, with the newlines before it that would belong to it.

    start      of a prompt that says nothing of reasoning ("none"): a leading <think> opens it, anything else is content
    reasoning  up to </think>
    content    with tools: up to <tool_call>
    call       held whole up to its end (coli/tools.py), then one delta

Where the answer begins is read from the rendered prompt's tail (coli.chat.reasoning_state). The newlines a template
writes around its tags belong to the tags: one after <think> (when the answer writes it), one before </think>, two after
it, and any around a call. A call that is malformed, unfinished or of an unknown tool is content, all of it, and what
follows its opening tag is read again as content. Inside reasoning nothing is a call, outside it a late tag is text.

Invariant: the deltas joined do not depend on how the text was cut, and every character but the tags, their newlines and
the calls comes out (tests/text/test_answer.py: 1,000 random byte streams in random steps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from coli import tools as calls
from coli.chat import Reasoning
from coli.stream import Span
from coli.tools import ToolCall

Kind = Literal["reasoning", "content", "tool_call"]
THINK, END_THINK = "<think>", "</think>"
_ANY = 1 << 60  # newlines


class Delta(NamedTuple):
    """A piece of the answer. A "tool_call" has its `call` and no text, the others have text."""

    kind: Kind
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Form:
    """What an answer is made of: where it begins, and the tools whose calls are none of its text."""

    start: Reasoning
    tools: tuple[Mapping[str, Any], ...] = ()

    def router(self) -> AnswerRouter:
        return AnswerRouter(self.start, self.tools)


class AnswerRouter:
    """Sorts one answer. Push text in order, then flush once."""

    def __init__(self, start: Reasoning, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`start`: where the answer begins; `tools`: without any, `<tool_call>` is plain text."""
        self._schemas = calls.functions(tools)
        self._read = {"none": self._start, "open": self._reasoning, "closed": self._content}[start]
        self._text = ""  # not yet given out, but for a call's
        self._skip = 0  # newlines to drop before anything else
        self._call: list[str] = []  # pieces after <tool_call>
        self._before = ""  # newlines in front of it
        self._at = self._call_at = 0  # the character that self._text, and those newlines, begin with
        self._deltas: list[Delta] = []
        self._spans: list[Span] = []  # of the latest push

    @property
    def in_reasoning(self) -> bool:
        """Whether the text that comes next is reasoning, as far as is known."""
        return self._read == self._reasoning

    def push(self, text: str) -> list[Delta]:
        """What is now known, often nothing."""
        return self._run(text, False)

    def flush(self) -> list[Delta]:
        """The end of the answer: what was held back. A second call gives nothing."""
        return self._run("", True)

    def follow(self, text: str, end: bool = False) -> tuple[list[Span], int]:
        """`push`, and at the end `flush`, for who cuts the text as it came (coli/stream.py): what became known, and the
        first character that is not."""
        self._spans = []
        self._run(text, False)
        if end:
            self._run("", True)
        return self._spans, self._call_at if self._read in (self._opened, self._in_call) else self._at

    def _drop(self, count: int) -> None:
        self._text, self._at = self._text[count:], self._at + count

    def _run(self, text: str, final: bool) -> list[Delta]:
        self._text += text
        while self._text or final:
            if self._skip and self._text:
                rest = self._text.lstrip("\n")
                dropped = min(self._skip, len(self._text) - len(rest))
                self._drop(dropped)
                self._skip = self._skip - dropped if not rest else 0
                continue
            if not self._read(final):
                break
        deltas, self._deltas = self._deltas, []
        return deltas

    # ---- states: read self._text, True when another state has the next word ----

    def _start(self, final: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._drop(len(self._text) - len(text) + len(THINK))
            self._skip, self._read = 1, self._reasoning
            return True
        if not final and THINK.startswith(text):
            return False
        self._read = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        end = self._text.find(END_THINK)
        if end >= 0:
            self._give("reasoning", self._text[:end].removesuffix("\n"))
            self._drop(end + len(END_THINK))
            self._skip, self._read = 2, self._content
            return True
        held = 0 if final else max(_overlap(self._text, tag) for tag in (END_THINK, "\n" + END_THINK))
        self._give_all_but("reasoning", held)
        return False

    def _content(self, final: bool) -> bool:
        start = self._text.find(calls.OPEN) if self._schemas else -1
        if start >= 0:
            text = self._text[:start].rstrip("\n")
            self._give("content", text)
            self._before, self._call, self._call_at = self._text[len(text) : start], [], self._at + len(text)
            self._drop(start + len(calls.OPEN))
            self._read = self._opened
            return True
        held = 0
        if self._schemas and not final:
            held = _overlap(self._text, calls.OPEN)
            whole = self._text[: len(self._text) - held]
            held += len(whole) - len(whole.rstrip("\n"))
        self._give_all_but("content", held)
        return False

    def _opened(self, final: bool) -> bool:
        text = self._text.lstrip()
        if not final and calls.may_become(text):
            return False
        if not calls.begins(text):
            return self._no_call(self._text)
        self._read = self._in_call
        return True

    def _in_call(self, final: bool) -> bool:
        end = self._text.find(calls.CLOSE)
        if end < 0 and not final:
            edge = max(0, len(self._text) - len(calls.CLOSE) + 1)
            self._call.append(self._text[:edge])  # joined once, at the end: a call may hold a whole file
            self._drop(edge)
            return False
        body = "".join(self._call) + (self._text if end < 0 else self._text[:end])
        if end < 0:
            return self._no_call(body)
        rest = self._text[end + len(calls.CLOSE) :]
        if not calls.complete(body):  # the tag is part of a value
            self._call = [body, calls.CLOSE]
            self._drop(len(self._text) - len(rest))
            return True
        call = calls.parse(body, self._schemas)
        if call is None:
            return self._no_call(body + calls.CLOSE + rest)
        self._deltas.append(Delta("tool_call", "", call))
        self._drop(len(self._text) - len(rest))
        self._spans.append(Span(False, self._call_at, ""))
        self._skip, self._read = _ANY, self._content
        return True

    def _no_call(self, text: str) -> bool:
        """`<tool_call>` was content, and so is `text` unless it holds another."""
        opened = self._before + calls.OPEN
        self._at = self._call_at
        self._give("content", opened)
        self._at += len(opened)
        self._text, self._read = text, self._content
        return True

    def _give_all_but(self, kind: Kind, held: int) -> None:
        edge = len(self._text) - held
        self._give(kind, self._text[:edge])
        self._drop(edge)

    def _give(self, kind: Kind, text: str) -> None:
        """`text` is what stands at self._at."""
        if not text:
            return
        self._spans.append(Span(kind == "content", self._at, text))
        if self._deltas and self._deltas[-1].kind == kind:
            text = self._deltas.pop().text + text
        self._deltas.append(Delta(kind, text))


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `tag`."""
    most = min(len(text), len(tag) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(tag[:size])), 0)
