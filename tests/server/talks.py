"""Conversations as people and agents make them, and worse, turn by turn (tests/server/sessions.py plays them).

A talk has a history; each turn repeats it, goes on, edits it at a token or a message, pins it or returns to what was
pinned, cuts it or begins anew, and asks for something random besides. What it does depends on its dice and on answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tests.server.asking import STOPS, TOKENIZER, VOCAB
from tests.server.frames import Answer

Ask = Mapping[str, Any]  # the body of a request, without the model
Leave = Literal["headers", "tokens"]


@dataclass(frozen=True)
class Turn:
    """`leave`: when the client does, having seen the headers or some tokens."""

    ask: Ask
    leave: Leave | None = None


class Heard(NamedTuple):
    """A turn's answer, and its tokens as far as they were delivered."""

    answer: Answer
    ids: tuple[int, ...]


STORY = tuple(TOKENIZER.encode(
    "Once upon a time there was a small fox who lived in a little house at the edge of the wood. Every morning the fox "
    "looked out of the window and said: one, two, three, four. Kate likes brown. Olga likes green. Victor likes gold. "
    "Which color does Kate like? Kate likes brown. caf\u00e9, na\u00efve, \U0001f98a and \u4f60\u597d are words too. "
    "On a windy day there was nothing left to eat, and the fox went to look for a piece of bread."
))  # fmt: skip
SAYINGS = ("Tell me a short story about a fox.", "Which month comes after January?", "Count from one to ten.", "Hi!",
           "Kate likes brown. Olga likes green. Which color does Olga like?", "Why is the sky blue? " * 12,
           "Name two jobs.", "na\u00efve \U0001f98a?")  # fmt: skip
SYSTEMS = ("You are Nano, a tiny language model.", "You are a friendly assistant that answers in simple English.")
KINDS = ("repeat", "continue", "continue", "edit", "pin", "return", "shorter", "new")
STOP_STRINGS = ("e", ".", " the", "was", "ox ", "<|im_end|>", "\n\n", "zzz")
MOST = 400  # tokens of a history


class Talk:
    """How a session goes on: the history in the form of its requests, and what the `last` answer was."""

    history: Any

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.pinned = dice, []
        self.last: Heard | None = None
        self.history = self._new()

    def options(self) -> dict[str, Any]:
        """What may be asked for besides the text."""
        dice, asked = self.dice, {"max_tokens": self.dice.randint(1, 16), "temperature": 0.0}
        more: dict[str, Any] = asked
        if dice.random() < 0.4:
            more |= {"temperature": round(dice.uniform(0.3, 1.5), 2), "seed": dice.randrange(1 << 30), **dice.choice((
                {}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.05}, {"repetition_penalty": 1.2},
                {"presence_penalty": 0.5, "frequency_penalty": 0.5}))}  # fmt: skip
        if dice.random() < 0.2:
            more["logit_bias"] = {str(max(STOPS)): dice.uniform(2.0, 9.0)}  # ends early, at any row
        if dice.random() < 0.45:
            more["stop"] = self._stops()
        if dice.random() < 0.2:
            more["speculative"] = {"max_drafts": dice.randint(0, 3)}
        return more

    def _stops(self) -> list[str]:
        """Strings that nano often says, or a piece of what it has just said, from any row to any other."""
        said = self.last.answer.text() if self.last is not None else ""
        if said and self.dice.random() < 0.7:
            start = self.dice.randrange(len(said))
            piece = said[start : start + self.dice.randint(1, 7)]
            if "\ufffd" not in piece:
                return [piece]
        return self.dice.sample(STOP_STRINGS, self.dice.randint(1, 3))

    def leave(self) -> Literal["headers", "tokens"] | None:
        return self.dice.choice(("headers", "tokens")) if self.dice.random() < 0.12 else None


class TextTalk(Talk):
    """Of /v1/completions, in tokens."""

    def _new(self) -> tuple[int, ...]:
        return self._tokens(300 if self.dice.random() < 0.2 else 24)

    def _tokens(self, most: int) -> tuple[int, ...]:
        dice, count = self.dice, self.dice.randint(1, most)
        if dice.random() < 0.15:  # any bytes, control tokens too
            return tuple(dice.randrange(10, VOCAB - 4) for _ in range(count)) + ((min(STOPS),) if count % 3 else ())
        start = dice.randrange(len(STORY))
        return (STORY[start:] + STORY)[:count]

    def next(self) -> Turn:
        dice, kind = self.dice, self.dice.choice(KINDS)
        self.history += self.last.ids if self.last is not None and kind in ("continue", "pin") else ()
        match kind:
            case "continue" | "pin":
                self.history += self._tokens(8)
            case "edit":
                self.history = self.history[: dice.randrange(len(self.history))] + self._tokens(5)
            case "return" if self.pinned:
                self.history = dice.choice(self.pinned)
            case "shorter":
                self.history = self.history[: dice.randint(1, len(self.history))]
            case "new":
                self.history = self._new()
        if len(self.history) > MOST:
            self.history = self._new()
        ask = {"prompt": list(self.history), **self.options()}
        if dice.random() < 0.35:
            ask["logprobs"] = dice.randint(0, 5)
        if kind == "pin":
            self.pinned.append(self.history)
            ask["pin"] = True
        return Turn(ask, self.leave())


class ChatTalk(Talk):
    """Of /v1/chat/completions, in messages."""

    def _new(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.dice.choice(SYSTEMS)}] if self.dice.random() < 0.6 else []
        return [*system, self._user()]

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.dice.choice(SAYINGS)}

    def _reply(self) -> dict[str, Any]:
        """The last answer as clients send it back."""
        if self.last is None:
            return {"role": "assistant", "content": "Yes."}
        answer, message = self.last.answer, {"role": "assistant", "content": self.last.answer.text()}
        return {**message, "reasoning_content": answer.text("reasoning")} if answer.text("reasoning") else message

    def next(self) -> Turn:
        dice, kind = self.dice, self.dice.choice((*KINDS, "prefix"))
        said = [number for number, message in enumerate(self.history) if message["role"] == "user"]
        match kind:
            case "continue" | "pin":
                self.history = [*self.history, self._reply(), self._user()]
            case "edit":
                self.history = [*self.history[: dice.choice(said)], self._user()]
            case "return" if self.pinned:
                self.history = dice.choice(self.pinned)
            case "shorter":
                self.history = self.history[: dice.choice(said) + 1]
            case "new":
                self.history = self._new()
        if len(self.history) > 9:
            self.history = self._new()
        ask: dict[str, Any] = {"messages": self.history, **self.options()}
        if kind == "prefix":  # the answer goes on with the beginning of one
            ask["messages"] = [*self.history, {"role": "assistant", "content": dice.choice(("The", "Yes, ", "1, 2,"))}]
        elif dice.random() < 0.25:
            ask["enable_thinking"] = dice.random() < 0.7
        if dice.random() < 0.35:
            ask |= {"logprobs": True, "top_logprobs": dice.randint(0, 5)}
        if dice.random() < 0.25:
            ask["prediction"] = {"type": "content", "content": dice.choice((*SAYINGS, "Kate likes brown."))}
        if kind == "pin":
            self.pinned.append(self.history)
            ask["pin"] = True
        return Turn(ask, self.leave())
