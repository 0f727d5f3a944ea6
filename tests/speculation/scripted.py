"""A model and a draft head that know the text: the decoder on its own, without an engine.

`Text.decoder` decodes a text that is known beforehand; the head drafts its tokens, wrong where `wrong` says, and is as
sure of draft j as `p[j]` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from coli.speculation.decoder import Decoder
from coli.speculation.options import Speculation

VOCAB = 50


class State:
    """Only a length: the script needs no other memory."""

    def __init__(self, ctx: int) -> None:
        self.ctx, self.length, self._start = ctx, 0, 0

    def reset(self) -> None:
        self.length = 0

    def reserve(self, drafts: int) -> bool:
        return True

    def advance(self, rows: int) -> None:
        self._start, self.length = self.length, self.length + rows

    def keep(self, rows: int) -> None:
        self.length = self._start + rows


@dataclass
class Model:
    """The best token of every row is the text's next one, whatever was fed."""

    text: Sequence[int]
    rows: list[int] = field(default_factory=list)  # of every forward
    limit: int = 64

    def forward(self, tokens: Any, state: State, want: str = "last", undoable: bool = False) -> Any:
        self.rows.append(len(tokens))
        self.row_bytes = np.zeros(len(tokens), np.int64)
        logits = np.zeros((len(tokens), VOCAB), np.float32)
        for row in range(len(tokens)):
            at = state.length + row + 1
            logits[row, self.text[at] if at < len(self.text) else 0] = 1.0
        state.advance(len(tokens))
        return SimpleNamespace(logits=logits, streams=np.zeros((len(tokens), 1), np.float32))


@dataclass
class Head:
    """`wrong(position)`: whether the draft for that position is another token; `written` counts its drafts."""

    text: Sequence[int]
    p: Sequence[float]
    wrong: Callable[[int], bool]
    wiring: str = ""
    written: int = 0
    bytes_read: int = 0

    def new_state(self) -> Any:
        return SimpleNamespace(waiting=0, reset=lambda: None)

    def note(self, head: Any, trunk: State, streams: np.ndarray) -> None:
        """It knows the text without."""

    def absorb(self, head: Any, trunk: State) -> None:
        """Nothing waits."""

    def draft(self, head: Any, trunk: State, pick: int) -> tuple[int, float]:
        self._next = trunk.length + 1  # behind the pick
        return self.deeper(head, pick, 0)

    def deeper(self, head: Any, token: int, depth: int) -> tuple[int, float]:
        at = self._next + depth
        right = self.text[at] if at < len(self.text) else 0
        self.written += 1
        return (right + 1) % VOCAB if self.wrong(at) else right, self.p[depth]


class Text:
    """Random tokens without a repeat that a lookup could find; `prompt` of them are read, the rest fed."""

    def __init__(self, tokens: int = 60, prompt: int = 5) -> None:
        rng = np.random.default_rng(5)
        self.ids: list[int] = rng.integers(0, VOCAB, tokens).tolist()
        self.prompt = prompt

    @property
    def fed(self) -> int:
        return len(self.ids) - self.prompt

    def decoder(
        self, options: Speculation, *, engine: str = "qwen36", p: Sequence[float] = (1.0,) * 7,
        wrong: Callable[[int], bool] = lambda at: False, wiring: str = "", clock: Callable[[int], float] | None = None,
    ) -> Decoder:  # fmt: skip
        """One that has decoded the whole text greedily. `clock`: seconds of a forward by its rows, as the gate is told,
        drafts costing nothing."""
        model, head = Model(self.ids), Head(self.ids, p, wrong, wiring)
        state: Any = State(len(self.ids))
        decoder = Decoder(model, state, options, engine=engine, vocab=VOCAB, head=head, reference=self.ids)
        if clock is not None:
            gate, told = decoder.gate, decoder.gate.forward
            gate.forward = lambda rows, _: told(rows, clock(rows))  # type: ignore[method-assign]
            gate.first_cost = gate.draft_cost = lambda source, seconds: None  # type: ignore[method-assign]
        decoder.begin(self.ids[: self.prompt])
        decoder.prefill(np.asarray(self.ids[: self.prompt]))
        for at in range(self.prompt, len(self.ids)):
            logits = decoder.feed(self.ids[at])
            assert at + 1 == len(self.ids) or int(np.argmax(logits)) == self.ids[at + 1]
        decoder.finish()
        return decoder
