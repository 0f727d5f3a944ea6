"""An answer sorted while it streams is the whole text sorted by plain rules, however it was cut (complaint F 53)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import pytest

from coli.answer import AnswerRouter, Delta
from coli.chat import ChatTemplate, Reasoning, reasoning_state
from coli.models.find import NANO
from coli.stream import TextStream
from coli.tokenizer import Tokenizer
from coli.tools import functions, parse

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"n": 6}}\n</tool_call>'
Part = tuple[str, str]  # kind, and text or the call

# what random answers are made of: tags whole, torn and misplaced, calls good and bad, bytes that are no UTF-8
PIECES = [
    b"<think>", b"</think>", b"\n</think>\n\n", b"<tool_call>", b"</tool_call>", b"<function=f>", b"</function>",
    b"<parameter=n>", b"</parameter>", CALL.encode(), HERMES.encode(), CALL.replace("f>", "g>").encode(),
    CALL.replace("5", "</tool_call>").encode(), HERMES.replace("}}", "}").encode(), CALL[:40].encode(),
    HERMES[:-20].encode(), b"<tool_call>{", b"}", b"\n", b"\n", b"\n\n\n", b" ", b"<", b"</", b"<t", b"<tool_",
    b"</thi", b"a", b"text", "ё中👩‍👩‍👧".encode(), b"\xff", b"\xf0\x9f", b"STOP", b"ST",
]  # fmt: skip


class Pieces:
    """A vocabulary whose token i is the i-th run of bytes."""

    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def text_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def token_id(self, token: str) -> None:
        return None


def cut(whole: bytes, rng: random.Random) -> list[bytes]:
    most, pieces = rng.choice([1, 2, 5, 30, 1000]), []
    while whole:
        size = rng.randint(1, most)
        pieces.append(whole[:size])
        whole = whole[size:]
    return pieces


def routed(texts: Iterable[str], start: Reasoning, tools: list) -> Iterator[Delta]:
    router = AnswerRouter(start, tools)
    for text in texts:
        yield from router.push(text)
    yield from router.flush()
    assert router.flush() == []


def joined(deltas: Iterable[Delta]) -> list[Part]:
    """Neighbours of one kind as one, calls without their random ids."""
    parts: list[Part] = []
    for delta in deltas:
        assert (delta.call is not None) == (delta.kind == "tool_call") == (not delta.text)
        parts.append((delta.kind, delta.text if delta.call is None else f"{delta.call.name} {delta.call.arguments}"))
    groups = groupby(parts, key=lambda part: part[0])
    return [one for kind, group in groups
            for one in (group if kind == "tool_call" else [(kind, "".join(text for _, text in group))])]  # fmt: skip


def reference(text: str, start: Reasoning, tools: list) -> list[Part]:
    """The same from the whole text, by regular expressions."""
    parts: list[Part] = []
    opening = re.match(r"\s*<think>\n?", text) if start == "none" else None
    if start == "open" or opening:
        thought, closing, text = text[opening.end() if opening else 0 :].partition("</think>")
        parts.append(("reasoning", thought.removesuffix("\n") if closing else thought))
        text = re.sub(r"\A\n{1,2}", "", text)
    at = given = 0
    call = re.compile(r"<tool_call>(\s*<function=.*?</function>\s*|\s*\{.*?\}\s*)</tool_call>\n*", re.DOTALL)
    while tools and (at := text.find("<tool_call>", at)) >= 0:
        found = call.match(text, at)
        read = found and parse(found[1], functions(tools))
        if found and read:
            parts += [("content", text[given:at].rstrip("\n")), ("tool_call", f"{read.name} {read.arguments}")]
            at = given = found.end()
        else:
            at += 1
    parts.append(("content", text[given:]))
    return [part for part in parts if part[1]]


def test_a_thousand_random_streams_in_random_steps() -> None:
    rng, seen = random.Random(5), set()
    for _ in range(1000):
        whole = b"".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        start, tools = rng.choice(["open", "closed", "none"]), rng.choice([TOOLS, TOOLS, []])
        stops = rng.choice([(), ("STOP",), ("STOP", "</parameter>\n<")])
        pieces = cut(whole, rng)
        stream = TextStream(Pieces(pieces), stops)
        texts = [*(stream.push(token) for token in range(len(pieces))), stream.flush()]
        parts = joined(routed(texts, start, tools))
        at_once = TextStream(Pieces([whole]), stops)
        assert parts == joined(routed([at_once.push(0), at_once.flush()], start, tools))
        assert parts == joined(routed([stream.text], start, tools)) == reference(stream.text, start, tools), stream.text
        seen |= {kind for kind, _ in parts}
    assert seen == {"reasoning", "content", "tool_call"}


@pytest.mark.parametrize(
    ("start", "text", "parts"),
    [
        ("open", "why\n</think>\n\nso", [("reasoning", "why"), ("content", "so")]),
        ("open", "\nwhy\n\n</think>\n\n\nso", [("reasoning", "\nwhy\n"), ("content", "\nso")]),
        ("open", "why</think>so", [("reasoning", "why"), ("content", "so")]),
        ("open", "why\n", [("reasoning", "why\n")]),
        ("open", "a </thin", [("reasoning", "a </thin")]),
        ("open", f"a{CALL}", [("reasoning", f"a{CALL}")]),
        ("open", "</think>", []),
        ("closed", "\nso</think>", [("content", "\nso</think>")]),
        ("closed", "<think>so", [("content", "<think>so")]),
        ("none", "<think>\nwhy\n</think>\n\nso", [("reasoning", "why"), ("content", "so")]),
        ("none", "\n<think>\n\n</think>\n\nso", [("content", "so")]),
        ("none", "so <think>why</think>", [("content", "so <think>why</think>")]),
        ("none", "\n <thin", [("content", "\n <thin")]),
        ("none", "", []),
        ("closed", f"so\n\n{CALL}\n{HERMES}\n",
         [("content", "so"), ("tool_call", 'f {"n": 5}'), ("tool_call", 'f {"n": 6}')]),
        ("closed", f"{CALL}\nand\n", [("tool_call", 'f {"n": 5}'), ("content", "and\n")]),
        ("closed", f"so\n{CALL[:-3]}", [("content", f"so\n{CALL[:-3]}")]),
        ("closed", f"<tool_call> is a tag\n\n{CALL}",
         [("content", "<tool_call> is a tag"), ("tool_call", 'f {"n": 5}')]),
        ("closed", f'<tool_call>\n{{"name": f}}\n</tool_call>\n{CALL}',
         [("content", '<tool_call>\n{"name": f}\n</tool_call>'), ("tool_call", 'f {"n": 5}')]),
        ("closed", f"<tool_call>\n{CALL}", [("content", "<tool_call>"), ("tool_call", 'f {"n": 5}')]),
        ("closed", CALL.replace("5", "\n</tool_call>\n"), [("tool_call", 'f {"n": "\\n</tool_call>\\n"}')]),
    ],
)  # fmt: skip
def test_where_the_parts_begin_and_end(start: Reasoning, text: str, parts: list[Part]) -> None:
    assert joined(routed([text], start, TOOLS)) == joined(routed(text, start, TOOLS)) == parts


def test_without_tools_a_call_is_text() -> None:
    assert joined(routed(CALL, "closed", [])) == [("content", CALL)]


def test_only_what_may_become_a_tag_is_held() -> None:
    router = AnswerRouter("open", TOOLS)
    steps = [("a <", "a "), ("b", "<b"), ("\n", ""), ("\n</", "\n"), ("think", ""), ("x", "\n</thinkx")]
    assert [("".join(d.text for d in router.push(text))) for text, _ in steps] == [given for _, given in steps]
    assert router.in_reasoning and router.push("\n</think>") == [] and not router.in_reasoning
    steps = [("\n", ""), ("\n", ""), ("\n", ""), ("a", "\na"), ("\n\n", ""), ("<tool", ""), ("s>", "\n\n<tools>"),
             ("\n<tool_call>", ""), ("\n <fun", ""), ("k", "\n<tool_call>\n <funk")]  # fmt: skip
    assert [("".join(d.text for d in router.push(text))) for text, _ in steps] == [given for _, given in steps]
    assert router.push(CALL[:-1]) == [] and [delta.kind for delta in router.push(">more")] == ["tool_call", "content"]


def test_content_without_tools_is_never_held() -> None:
    router = AnswerRouter("closed")
    assert all(router.push(text) == [Delta("content", text)] for text in ("\n", "<tool_", "</think"))


@pytest.mark.parametrize("thinking", [True, False])
def test_nanos_own_template_comes_apart_again(thinking: bool) -> None:
    """What it renders of an answer with reasoning, read from where its prompt ends."""
    chat = ChatTemplate.load(NANO, Tokenizer.load(NANO))
    assert chat is not None
    ask = {"role": "user", "content": "Why?"}
    answer = {"role": "assistant", "reasoning_content": "Think\nhard." if thinking else "", "content": " So.\n"}
    prompt = chat.render([ask], thinking=thinking)
    whole = chat.render([ask, answer], add_generation_prompt=False)
    assert whole.startswith(prompt)
    text = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    expected = [("reasoning", "Think\nhard.")] * thinking + [("content", " So.\n")]
    assert joined(routed(text, reasoning_state(prompt), TOOLS)) == expected


def stopped(pieces: list[bytes], stop: str, start: str, tools: bool) -> tuple[str, bool]:
    stream = TextStream(Pieces(pieces), [stop], AnswerRouter(start, TOOLS if tools else ()))
    return "".join([*(stream.push(i) for i in range(len(pieces))), stream.flush()]), stream.stopped


@pytest.mark.parametrize(
    ("start", "text", "stop", "left"),
    [
        ("open", "so\n\nhm\n</think>\n\none\n\ntwo", "\n\n", "so\n\nhm\n</think>\n\none"),
        ("open", "hm</think>\n\n\none", "\n", "hm</think>\n\n"),  # two belong to the tag, the third is the answer's
        ("none", "\n<think>a b</think>c b", "b", "\n<think>a b</think>c "),
        ("none", "x <think>a b</think>c", "b", "x <think>a "),  # a late tag is text
        ("closed", "<think>a b", "b", "<think>a "),
        ("closed", f"a\n{CALL}\n\n5", "5", f"a\n{CALL}\n\n"),
        ("closed", f"a\n{CALL}\n\n5", "\n", f"a\n{CALL}\n\n5"),
        ("closed", "a\n<tool_call>\nb</tool_call>\n\nb", "b", "a\n<tool_call>\n"),  # no call
        ("closed", "a<tool_b", "b", "a<tool_"),
        ("closed", f"<tool_{HERMES}6", "6", f"<tool_{HERMES}"),
        ("open", "never closed b", "b", "never closed b"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_stop_counts_in_what_the_client_reads(start: str, text: str, stop: str, left: str, size: int) -> None:
    raw = text.encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert stopped(pieces, stop, start, True) == (left, left != text)


def test_without_tools_a_stop_counts_in_a_call() -> None:
    assert stopped([b"<tool_call>b"], "b", "closed", False) == ("<tool_call>", True)


def test_random_answers_are_cut_in_their_content_alone() -> None:
    """Served is what the whole answer's content is up to its first stop, and no more is ever shown."""
    dice, cut = random.Random(3), 0
    parts = ["<tool_call>", "</tool_call>", CALL, HERMES, "<function=f>\n", "</function>\n", "<think>", "</think>",
             "\n", "\n\n", " ", "a", "b", "#", "##", "hello", "<", "<tool", "{}"]  # fmt: skip
    for _ in range(3000):
        whole = "".join(dice.choice(parts) for _ in range(dice.randint(1, 9)))
        start, tools = dice.choice(["open", "closed", "none"]), dice.choice([(), TOOLS])
        stops = dice.sample(["#", "##", "b", "a\n", "hello", "o#"], dice.randint(1, 2))
        stream = TextStream(Pieces([c.encode() for c in whole]), stops, AnswerRouter(start, tools))
        text = "".join([*(stream.push(i) for i in range(len(whole))), stream.flush()])
        assert whole.startswith(text) and (stream.stopped or text == whole)
        shown, every = sorted_text(text, start, tools), sorted_text(whole, start, tools)
        assert not any(stop in piece for stop in stops for kind, piece in shown if kind == "content")
        if stream.stopped:
            cut += 1
            assert stream.stop in "".join(piece for kind, piece in every if kind == "content")
        else:
            assert not any(stop in piece for stop in stops for kind, piece in every if kind == "content")
    assert cut > 500


def sorted_text(text: str, start: Reasoning, tools: Sequence[Any]) -> list[Part]:
    """Kinds and texts; neighbours are joined, so a stop that a call stands in the middle of is none."""
    router = AnswerRouter(start, tools)
    deltas = router.push(text) + router.flush()
    return [(delta.kind, delta.text) for delta in deltas]
