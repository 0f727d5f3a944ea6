"""Tokens in, safe text out: whole characters only, and never a piece of a stop string.

Idea: two filters in a row, each holding back as little as it can.
  bytes -> characters   an incremental UTF-8 decoder. The bytes of an unfinished character wait; bytes that can never
                        become one give U+FFFD where Python's decoder puts it; what is unfinished at the end gives
                        U+FFFD once.
  characters -> text    the router. Each stop string is matched by a Knuth-Morris-Pratt automaton whose state is the
                        length of the longest suffix so far that begins that stop. The longest of these is all that
                        waits.

Which stop wins: the text is scanned character by character and the first stop to be *complete* ends it; when two are
complete at the same character, the longer one, which starts earlier. So the cut depends on the text alone, not on how
tokens or drafts split it, and never needs a token beyond the one that completes the stop. (With stops "bc" and "abcd"
the text "abcd" ends before "bc": nobody knows whether the d will come. Of "ab" and "abc", "ab" wins for that reason.)

Where an answer is sorted (`sorter`, coli/answer.py), stops count in its content alone: reasoning, calls and the
newlines that belong to their tags are not the text a client asked to be cut. What the sorter has not decided is held
back too.

Control tokens add nothing to the text, so a stop that is the spelling of one ("<|im_end|>") is matched by its id.

A token is *delivered* once all its characters are given out. Where a stop cuts the text, so are the tokens: those that
begin before the cut were delivered, the others never are. Ids, log-probabilities and usage end there too.

Invariant: the joined pieces, flush included, equal the whole text cut at its stop, however it was split; the delivered
tokens are those that begin before the cut (tests/text/test_text_stream.py, Hypothesis against a plain reference).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from coli.errors import UsageError


class Vocabulary(Protocol):
    """What a stream needs of a tokenizer."""

    special_ids: frozenset[int]

    def text_bytes(self, token_id: int, /) -> bytes: ...
    def token_id(self, token: str, /) -> int | None: ...


class _Stop:
    """One stop string as an automaton; `state` characters of it are matched."""

    def __init__(self, text: str) -> None:
        self.text, self.state = text, 0
        self._border = [0]  # _border[i]: length of the longest proper border of text[:i + 1]
        for character in text[1:]:
            self._border.append(self._next(self._border[-1], character))

    def _next(self, state: int, character: str) -> int:
        while state and self.text[state] != character:
            state = self._border[state - 1]
        return state + (self.text[state] == character)

    def step(self, character: str) -> int:
        self.state = self._next(self.state, character)
        return self.state


class Span(NamedTuple):
    """Text of the answer whose kind is known, and where it begins."""

    content: bool
    first: int
    text: str


class Sorter(Protocol):
    """What tells content from the rest (coli/answer.py)."""

    def follow(self, text: str, end: bool = False) -> tuple[list[Span], int]:
        """Takes more text; what became known, and the first character that is not."""


class TextStream:
    """The text of one answer. Push tokens in order, then flush once; `stopped` says that a stop string was met."""

    def __init__(self, tokenizer: Vocabulary, stop: Sequence[str] = (), sorter: Sorter | None = None) -> None:
        """Raises UsageError for an empty stop string. `stop` may be one string; without a `sorter` all is content."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UsageError("a stop string is empty", "stop", "leave it out")
        self._vocabulary = tokenizer
        self._stops = [_Stop(text) for text in stops]
        self._sorter = sorter if stops else None
        named = {tokenizer.token_id(text): text for text in stops}
        self._stop_ids = {i: text for i, text in named.items() if i in tokenizer.special_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may still become a stop, or belong to what is no content
        self._pieces: list[str] = []
        self._spans: deque[tuple[int, int]] = deque()  # characters of the tokens not delivered yet: first, end
        self._read = self._given = 0  # characters
        self.stop: str | None = None  # the stop string that ended the text
        self.delivered = 0  # tokens, counted from the first

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """The text that is now safe to show, often empty. Nothing comes after a stop."""
        if self.stopped:
            return ""
        if token_id in self._stop_ids:
            piece = self.flush()
            if not self.stopped:
                self.stop = self._stop_ids[token_id]
            return piece
        fresh = self._decoder.decode(self._vocabulary.text_bytes(token_id))
        first, self._read = self._read, self._read + len(fresh)
        unfinished = bool(self._decoder.getstate()[0])  # its bytes belong to the character that comes next
        self._spans.append((first, self._read + unfinished))
        return self._deliver(self._route(fresh))

    def flush(self) -> str:
        """The end of the answer: what was held back, through the same router. A second call gives nothing."""
        fresh = self._decoder.decode(b"", final=True)
        self._read += len(fresh)
        return self._deliver(self._route(fresh, end=True), end=not self.stopped)

    def _deliver(self, piece: str, *, end: bool = False) -> str:
        """Count the tokens that `piece` completes; at a stop those that begin before it."""
        self._given += len(piece)
        while self._spans:
            first, last = self._spans[0]
            if not (end or last <= self._given or (self.stopped and first < self._given)):
                break
            self._spans.popleft()
            self.delivered += 1
        return piece

    def _route(self, fresh: str, *, end: bool = False) -> str:
        if self.stopped:
            return ""
        self._held += fresh
        spans, known = [Span(True, self._read - len(fresh), fresh)], self._read
        if self._sorter is not None:
            spans, known = self._sorter.follow(fresh, end)
        for span in spans:
            cut = self._match(span)
            if cut is not None:
                return self._give(cut)
        if end:
            self._calm()
        return self._give(known - max((stop.state for stop in self._stops), default=0))

    def _match(self, span: Span) -> int | None:
        """Where the text is cut, if a stop is complete in this span."""
        if not span.content:
            self._calm()
            return None
        for place, character in enumerate(span.text, span.first + 1):
            complete = [stop.text for stop in self._stops if stop.step(character) == len(stop.text)]
            if complete:
                self.stop = max(complete, key=len)
                return place - len(self.stop)
        return None

    def _calm(self) -> None:
        for stop in self._stops:
            stop.state = 0

    def _give(self, end: int) -> str:
        """The text up to character `end`."""
        piece = self._held[: max(0, end - self._given)]
        self._held = self._held[len(piece) :]
        self._pieces.append(piece)
        return piece
