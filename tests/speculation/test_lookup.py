"""Prompt lookup against a literal scan of the rule of spec_decoding.md section 3, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coli.speculation.lookup import Lookup


def literal(history: list[int], k: int) -> list[int]:
    """The rule as it is written: every n, every start, the latest first; the copy appends what it proposes."""
    size = len(history)
    for n in (4, 3, 2):
        if n > size - 1:
            continue
        for i in range(size - n - 1, -1, -1):
            if history[i : i + n] == history[size - n :]:
                text = list(history)
                for j in range(k):
                    text.append(text[i + n + j])
                return text[size:]
    return []


tiny_text = st.integers(1, 4).flatmap(lambda letters: st.lists(st.integers(0, letters - 1), max_size=60))
periodic = st.builds(
    lambda head, period, times, tail: head + period * times + tail,
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(1, 8),
    st.lists(st.integers(0, 3), max_size=3),
)


@hypothesis_settings(max_examples=300, deadline=None)
@given(tiny_text | periodic, st.integers(1, 5))
def test_every_prefix_gets_the_proposal_of_the_rule(text, k):
    lookup = Lookup()
    for length, token in enumerate(text, 1):
        lookup.push(token)
        assert lookup.length == length
        assert lookup.propose(k) == literal(text[:length], k)


@hypothesis_settings(max_examples=100, deadline=None)
@given(tiny_text | periodic, tiny_text, st.data())
def test_a_reset_is_a_fresh_history(text, other, data):
    cut = data.draw(st.integers(0, len(text)))
    lookup = Lookup(other)
    lookup.reset(text[:cut])
    assert lookup.length == cut
    for length in range(cut, len(other) + cut):
        lookup.push(other[length - cut])
        assert lookup.propose(5) == literal(text[:cut] + other[: length - cut + 1], 5)


def test_nothing_is_proposed_for_a_history_without_an_earlier_pair():
    for text in ([], [7], [7, 7], [7, 8], [1, 2, 3, 4, 5], [1, 2, 1]):
        assert Lookup(text).propose(5) == []
    assert Lookup([7, 7, 7]).propose(0) == []


def test_token_zero_is_a_token_like_any_other():
    """Before the text stands nothing, not zeros: [0, 0] is no repetition of what was never there."""
    assert Lookup([0, 0]).propose(3) == []
    assert Lookup([0, 0, 0]).propose(3) == [0, 0, 0]
    assert Lookup([5, 6, 0, 5, 6]).propose(3) == [0, 5, 6]


def test_the_longest_suffix_wins_over_a_more_recent_one():
    assert Lookup([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]).propose(1) == [50]
    assert Lookup([2, 3, 4, 50, 9, 3, 4, 60, 2, 3, 4]).propose(1) == [50]


def test_of_equal_suffixes_the_most_recent_wins():
    assert Lookup([1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 1, 2, 3, 4]).propose(2) == [60, 1]


def test_a_fifth_equal_token_does_not_count():
    assert Lookup([0, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4, 60, 0, 1, 2, 3, 4]).propose(1) == [60]


@pytest.mark.parametrize("period", [[7], [7, 8], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_periodic_text_gets_full_proposals(period, k):
    """Complaint row 1's prompts: one token x 48, two tokens x 24, and longer ones."""
    text = period * 48
    assert Lookup(text).propose(k) == (period * 5)[:k]


def test_big_token_ids_stay_apart():
    high = 2**32 - 2
    assert Lookup([high, high, 3, high, high]).propose(1) == [3]
    assert Lookup([248_319, 0, 9, 0, 248_319]).propose(1) == []


def test_a_gap_in_the_fed_positions_disables_it_until_the_next_reset_or_restore():
    lookup = Lookup([1, 2, 3])
    lookup.push(1, 3)
    lookup.push(2, 4)
    assert lookup.propose(2) == [3, 1]
    lookup.push(1, 9)
    lookup.push(2, 6)
    assert lookup.propose(2) == []
    lookup.reset([4, 4, 4])
    assert lookup.propose(2) == [4, 4]


def test_a_proposal_is_the_callers_own_list():
    lookup = Lookup([1, 2, 1, 2])
    lookup.propose(3).clear()
    assert lookup.propose(3) == [1, 2, 1]


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.integers(1, 5))
def test_what_stands_aside_is_copied_from_and_is_no_part_of_the_sequence(aside, tokens, k):
    """A prediction: proposals are those of one text, positions those of the sequence."""
    lookup = Lookup()
    lookup.reset(tokens[:5], aside=aside)
    for position, token in enumerate(tokens[5:], 5):
        lookup.push(token, position)
    assert lookup.length == len(tokens) and lookup.propose(k) == Lookup([*aside, *tokens]).propose(k)
    lookup.reset(tokens)
    assert lookup.propose(k) == Lookup(tokens).propose(k)
