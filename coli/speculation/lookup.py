"""Prompt lookup: guess that what followed the last few tokens before will follow them again.

Idea (spec_decoding.md section 3): for n from 4 down to 2 find the most recent earlier start i < len - n whose n tokens
equal the last n of the history (prompt and picks), and propose what stood from i + n on. The longest n wins over a more
recent, shorter one.
The copy may run into the suffix itself and, at the end of the history, on into what it has just proposed: a match q
tokens back says that the text has period q here, and a period shorter than the proposal goes round. "go go go" yields
"go" as often as it is asked for.

Layout: one dict per n from an n-gram to the position after its latest occurrence. An n-gram is one int of 32 bits a
token, and the three are the low bits of the same int, which a push shifts by one token. Before any token stand four
that no vocabulary has, so a short history needs no case of its own. A push asks the dicts before it writes the suffix
into them: what it finds is an *earlier* occurrence, and `propose` only copies. Cost per push and proposal: about 1 us
whatever the length (tests/bench/lookup.py, 32,000 tokens); memory: 0.3 kB a token where no n-gram repeats.
Invariant: equal to a literal scan of the rule on every prefix of every sequence; guarded by
tests/speculation/test_lookup.py.
"""

from __future__ import annotations

from collections.abc import Iterable

TOKEN_BYTES = 300  # of index for each token, where no n-gram repeats (tests/bench/lookup.py)
_BITS = 32
_PAIR, _TRIPLE, _QUAD = ((1 << _BITS * n) - 1 for n in (2, 3, 4))


class Lookup:
    """History of one session and its index. Token ids lie in 0 .. 2^32 - 2.

    Only fed tokens are pushed, never drafts. Before them may stand tokens `aside`, which are no part of the sequence
    and only copied from: a prediction of what will be said. A gap in the fed positions leaves the history unknown: from
    there on nothing is proposed until the next `reset`.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.reset(tokens)

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self._history) - self.aside

    @property
    def nbytes(self) -> int:
        """Bytes of the index, reckoned."""
        return len(self._history) * TOKEN_BYTES

    def reset(self, tokens: Iterable[int] = (), aside: Iterable[int] = ()) -> None:
        """Start from `tokens`: a new prompt, or the tokens of a restored state; `aside` stands before them."""
        self._history: list[int] = []
        self._pairs: dict[int, int] = {}
        self._triples: dict[int, int] = {}
        self._quads: dict[int, int] = {}
        self._last = _QUAD  # the last four tokens, the newest in the low bits
        self._match: int | None = None  # position after the earlier occurrence of the longest known suffix
        self._gap = False
        self.aside = 0
        for token in aside:
            self.push(token)
        self.aside = len(self._history)
        for token in tokens:
            self.push(token)

    def push(self, token: int, position: int | None = None) -> None:
        """Append a fed token. `position`, where given, is where it was fed: anything but `length` is a gap."""
        history = self._history
        if position is not None and position != len(history) - self.aside:
            self._gap = True
        history.append(token)
        end = len(history)
        self._last = quad = (self._last << _BITS | token) & _QUAD
        triple, pair = quad & _TRIPLE, quad & _PAIR
        match = self._quads.get(quad)
        if match is None:
            match = self._triples.get(triple)
            if match is None:
                match = self._pairs.get(pair)
        self._match = match
        self._quads[quad] = self._triples[triple] = self._pairs[pair] = end

    def propose(self, k: int) -> list[int]:
        """The `k` tokens expected next, or none when the last two tokens are new together."""
        start = self._match
        if start is None or k <= 0 or self._gap:
            return []
        copy = self._history[start : start + k]
        for known in range(k - len(copy)):
            copy.append(copy[known])
        return copy
