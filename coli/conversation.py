"""A conversation, and what is known about each of its turns: the part of `coli chat` that needs neither a terminal nor
a model.

Idea: a conversation is a system message and turns, each a question with its answer. A question is asked first and
answered or taken back after, so between turns the messages are always pairs, and whatever went wrong in a turn leaves
the conversation as it was before. An answer that was stopped is an answer: what the user saw is what the model sees.
Who answers is a `Partner`: the engine of this process (`coli.own_engine`) or a server (`coli.client`).

A saved conversation is a JSON object whose `messages` are those of OpenAI's chat API, the reasoning of an answer as
`reasoning_content`; such a list alone is read as well.
Invariant: `from_json(to_json())` is the same conversation (tests/text/test_conversation.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from coli.errors import UsageError
from coli.report import count, rate
from coli.sampling import Wished

if TYPE_CHECKING:
    from coli.answer import Delta

_HINT = "give a file that /save wrote"
_ENDINGS = {"length": "the token limit ended it", "cancelled": "stopped"}


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    content: str
    reasoning: str = ""

    def messages(self) -> list[dict[str, str]]:
        answer = {"role": "assistant", "content": self.content}
        if self.reasoning:
            answer["reasoning_content"] = self.reasoning
        return [{"role": "user", "content": self.question}, answer]


class Conversation:
    """The turns so far, the system message before them, and whether the model thinks first (None: its template's)."""

    def __init__(self, system: str | None = None, thinking: bool | None = None) -> None:
        self.system, self.thinking = system, thinking
        self.turns: list[Turn] = []

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """All of it as the messages of a chat, `question` as the last of them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns = [message for turn in self.turns for message in turn.messages()]
        return [*system, *turns, *([] if question is None else [{"role": "user", "content": question}])]

    def to_json(self) -> str:
        return json.dumps({"thinking": self.thinking, "messages": self.messages()}, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: object) -> Conversation:
        """Raises UsageError, which names `where` and the message, for anything else than a conversation."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"is no saved conversation: {error}", where, _HINT) from None
        document = {"messages": document} if isinstance(document, list) else document
        if not isinstance(document, dict) or not isinstance(document.get("messages"), list):
            raise UsageError("is no saved conversation: it has no list of messages", where, _HINT)
        thinking = document.get("thinking")
        if thinking is not None and not isinstance(thinking, bool):
            raise UsageError(f"thinking is {thinking!r}, not true, false or null", where, _HINT)
        system, turns = _read(document["messages"], where)
        conversation = cls(system, thinking)
        conversation.turns = turns
        return conversation


def _read(messages: list[Any], where: object) -> tuple[str | None, list[Turn]]:
    """(system message, turns) of a list of messages."""
    texts = [_text(message, number, where) for number, message in enumerate(messages, 1)]
    system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
    if len(texts) % 2 or any(role != ("user", "assistant")[at % 2] for at, (role, _, _) in enumerate(texts)):
        raise UsageError("its messages are not questions and answers in turn, a system message first", where, _HINT)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return system, [Turn(question, content, reasoning) for (_, question, _), (_, content, reasoning) in pairs]


def _text(message: Any, number: int, where: object) -> tuple[str, str, str]:
    """(role, content, reasoning) of one message."""
    fields: Mapping[str, Any] = message if isinstance(message, dict) else {}
    role, content, reasoning = fields.get("role"), fields.get("content"), fields.get("reasoning_content") or ""
    if not (isinstance(role, str) and isinstance(content, str) and isinstance(reasoning, str)):
        raise UsageError(f"message {number} has no role and content of text", where, _HINT)
    for text in (content, reasoning):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"message {number} has half a character (a lone surrogate)", where, _HINT) from None
    return role, content, reasoning


# ---- who answers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes(Wished):
    """How answers are made. None: what the model itself proposes, or its template, or what the context holds."""

    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    effort: str | None = None


class Partner(Protocol):
    """Who answers, one question at a time."""

    facts: TurnFacts | None  # of the last answer, once its iterator ended; None where that broke it off
    say: Callable[[str], None]  # is given what happens meanwhile

    def answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        """The answer in pieces; closing the iterator ends it. It is under way from this call on, before the first
        piece is asked for. Raises a ColiError."""

    def cancel(self) -> None:
        """End the answer under way soon, never the next one; safe from any thread."""

    def details(self) -> list[str]:
        """What else there is to say of the last answer."""

    def idle(self, conversation: Conversation) -> list[str]:
        """Wishes that have no effect on this model, as far as is known."""


@dataclass(frozen=True)
class TurnFacts:
    """What one answer cost. Seconds; `carried`, `accepted`: drafts; `per_forward` None: not known."""

    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted: int
    carried: int
    per_forward: float | None
    ttft_s: float
    decode_s: float

    @property
    def tok_s(self) -> float:
        """Decode tokens a second; the first token is the prompt's."""
        return rate(max(0, self.completion_tokens - 1), self.decode_s)

    def line(self) -> str:
        """The footer of an answer."""
        parts = [
            count(self.completion_tokens, "token"), f"{self.tok_s:.1f} tok/s", f"first after {self.ttft_s:.2f} s",
            _drafts(self.accepted, self.carried),
        ]  # fmt: skip
        if self.per_forward is not None:
            parts.append(f"{self.per_forward:.2f} tokens/forward")
        parts.append(f"{self.cached_tokens:,} of {count(self.prompt_tokens, 'prompt token')} cached")
        return " · ".join([*parts, *filter(None, [_ENDINGS.get(self.finish_reason, "")])])


def _drafts(accepted: int, carried: int) -> str:
    return f"{100 * accepted / carried:.1f}% of {count(carried, 'draft')} accepted" if carried else "no drafts"


@dataclass(frozen=True)
class Totals:
    """The sum over a chat's answers."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted: int = 0
    carried: int = 0
    decoded: int = 0  # tokens after each answer's first
    decode_s: float = 0.0

    def plus(self, facts: TurnFacts) -> Totals:
        return replace(
            self, answers=self.answers + 1, prompt_tokens=self.prompt_tokens + facts.prompt_tokens,
            cached_tokens=self.cached_tokens + facts.cached_tokens,
            completion_tokens=self.completion_tokens + facts.completion_tokens,
            accepted=self.accepted + facts.accepted, carried=self.carried + facts.carried,
            decoded=self.decoded + max(0, facts.completion_tokens - 1), decode_s=self.decode_s + facts.decode_s,
        )  # fmt: skip

    def line(self) -> str:
        return (
            f"{count(self.answers, 'answer')}: {count(self.completion_tokens, 'token')}, "
            f"{rate(self.decoded, self.decode_s):.1f} tok/s, {_drafts(self.accepted, self.carried)}, "
            f"{self.cached_tokens:,} of {count(self.prompt_tokens, 'prompt token')} cached"
        )
