"""Where two prompts part (coli/marks.py), against encoding both of them whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coli.marks import parting
from coli.models.find import NANO
from coli.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(NANO)
TURNS = st.lists(st.text("ab \n.é\U0001f98a<think>", max_size=12), min_size=1, max_size=6)


def prompt(turns: list[str]) -> str:
    return "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns)


@settings(max_examples=150, deadline=None)
@given(TURNS, TURNS, TURNS)
def test_a_mark_is_the_length_of_the_common_ids(common: list[str], one: list[str], other: list[str]) -> None:
    text, second = prompt(common + one), prompt(common + other)
    ids, others = TOKENIZER.encode(text), TOKENIZER.encode(second)
    both = next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))
    assert parting(TOKENIZER.encode, ids, text, second) == both


def test_a_token_across_the_difference_belongs_to_neither() -> None:
    text, other = prompt(["x"]) + "<|im_start|>assistant\n\n\nY", prompt(["x"]) + "<|im_start|>assistant\nY"
    ids = TOKENIZER.encode(text)
    mark = parting(TOKENIZER.encode, ids, text, other)
    assert TOKENIZER.encode(other)[:mark] == ids[:mark] and TOKENIZER.encode(other)[mark] != ids[mark]
