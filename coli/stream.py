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

In a *passage* (reasoning, a tool call) no stop counts: what stands there is not the text a client sees, and the
newlines behind it are the template's. A stop that is complete before an opening tag is ends the answer there.

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


class Passage(NamedTuple):
    """From `opening` to `closing`, and so many newlines behind. `begun`: the answer begins inside it; `leading`:
    nothing but blanks may stand before it."""

    opening: str
    closing: str
    newlines: int
    begun: bool = False
    leading: bool = False


class _Quiet:
    """Whether a character belongs to a passage."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._openings = [(_Stop(one.opening), one) for one in passages]
        self._inside = next((one for one in passages if one.begun), None)
        self._closing = _Stop(self._inside.closing) if self._inside is not None else None
        self._newlines = self._dark = 0  # still to skip; characters so far that are no blanks

    def step(self, character: str) -> bool:
        self._dark += not character.isspace()
        if self._closing is not None and self._inside is not None:
            if self._closing.step(character) == len(self._closing.text):
                self._newlines, self._inside, self._closing = self._inside.newlines, None, None
            return True
        if self._newlines and character == "\n":
            self._newlines -= 1
            return True
        self._newlines = 0
        for opening, one in self._openings:
            if opening.step(character) == len(opening.text):
                opening.state = 0
                if not (one.leading and self._dark > len(opening.text)):
                    self._inside, self._closing = one, _Stop(one.closing)
        return self._inside is not None


class TextStream:
    """The text of one answer. Push tokens in order, then flush once; `stopped` says that a stop string was met."""

    def __init__(self, tokenizer: Vocabulary, stop: Sequence[str] = (), quiet: Sequence[Passage] = ()) -> None:
        """Raises UsageError for an empty stop string. `stop` may be one string; `quiet`: where none counts."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise UsageError("a stop string is empty", "stop", "leave it out")
        self._vocabulary = tokenizer
        self._stops = [_Stop(text) for text in stops]
        self._quiet = _Quiet(quiet)
        named = {tokenizer.token_id(text): text for text in stops}
        self._stop_ids = {i: text for i, text in named.items() if i in tokenizer.special_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may still become a stop
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
        piece = self._route(fresh)
        if self.stopped:
            return self._deliver(piece)
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.state = 0
        self._pieces.append(held)
        return self._deliver(piece + held, end=True)

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

    def _route(self, fresh: str) -> str:
        if self.stopped or not fresh:
            return ""
        pending = self._held + fresh
        for place, character in enumerate(fresh, len(self._held) + 1):
            if self._quiet.step(character):
                for stop in self._stops:
                    stop.state = 0
                continue
            complete = [stop.text for stop in self._stops if stop.step(character) == len(stop.text)]
            if complete:
                self.stop = max(complete, key=len)
                return self._give(pending[: place - len(self.stop)], "")
        waiting = max((stop.state for stop in self._stops), default=0)
        return self._give(pending[: len(pending) - waiting], pending[len(pending) - waiting :])

    def _give(self, piece: str, held: str) -> str:
        self._held = held
        self._pieces.append(piece)
        return piece
