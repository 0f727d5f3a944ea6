"""Conversations: what a model is told, what a file keeps, what is refused; the figures of a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.conversation import Conversation, Totals, Turn, TurnFacts
from coli.errors import UsageError

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
FACTS = TurnFacts("stop", 30, 20, 9, 6, 8, 2.25, 0.5, 2.0)


def conversation(system: str | None = None, *turns: Turn) -> Conversation:
    made = Conversation(system)
    made.turns += turns
    return made


def test_messages_are_the_system_message_the_turns_and_the_question() -> None:
    made = conversation("be kind", Turn("q1", "a1", "because"), Turn("q2", "a2"))
    assert made.messages("q3") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1", "reasoning_content": "because"},
        {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"},
        {"role": "user", "content": "q3"},
    ]  # fmt: skip
    assert Conversation().messages() == []


@given(st.none() | TEXT, st.sampled_from([None, True, False]), st.lists(st.builds(Turn, TEXT, TEXT, TEXT)))
def test_a_saved_conversation_comes_back(system: str | None, thinking: bool | None, turns: list[Turn]) -> None:
    made = conversation(system, *turns)
    made.thinking = thinking
    again = Conversation.from_json(made.to_json(), "file")
    assert (again.system, again.thinking, again.turns) == (system, thinking, turns)


def test_a_bare_list_of_messages_is_read() -> None:
    messages = conversation("s", Turn("q", "a")).messages()
    assert Conversation.from_json(json.dumps(messages), "file").messages() == messages


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ("{", "saved conversation"), ("[" * 100_000, "saved conversation"), ("7", "messages"), ("{}", "messages"),
        ({"messages": {}}, "messages"), ([USER], "in turn"), ([ASSISTANT, USER], "in turn"),
        ([USER, USER], "in turn"), ([USER, ASSISTANT, {"role": "system", "content": "s"}], "in turn"),
        ([{"role": "tool", "content": "t"}, ASSISTANT], "in turn"), ([USER, {"role": "assistant"}], "message 2"),
        ([USER, {**ASSISTANT, "content": [{"type": "text"}]}], "message 2"), (["hi", ASSISTANT], "message 1"),
        ([{**USER, "content": "\ud800"}, ASSISTANT], "message 1"), ({"thinking": 1, "messages": []}, "thinking"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_by_name(document: Any, word: str) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(UsageError, match=word) as refused:
        Conversation.from_json(text, "file.json")
    assert refused.value.where == "file.json"


def test_a_footer_names_speed_drafts_and_reuse() -> None:
    assert FACTS.line() == (
        "9 tokens · 4.0 tok/s · first after 0.50 s · 75.0% of 8 drafts accepted · 2.25 tokens/forward · "
        "20 of 30 prompt tokens cached"
    )
    plain = TurnFacts("length", 1, 0, 1, 0, 0, None, 0.1, 0.0)
    assert plain.line() == (
        "1 token · 0.0 tok/s · first after 0.10 s · no drafts · 0 of 1 prompt token cached · the token limit ended it"
    )


def test_totals_are_sums_and_rates_of_sums() -> None:
    other = TurnFacts("stop", 10, 0, 5, 0, 2, None, 0.1, 1.0)
    totals = Totals().plus(FACTS).plus(other)
    assert totals == Totals(2, 40, 20, 14, 6, 10, 12, 3.0)
    figures = "14 tokens, 4.0 tok/s, 60.0% of 10 drafts accepted, 20 of 40 prompt tokens cached"
    assert totals.line() == f"2 answers: {figures}"
