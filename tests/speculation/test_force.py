"""The FORCE modes stage the pattern their words say, and a wrong draft is never the right one."""

from __future__ import annotations

import pytest

from coli.settings import TABLE
from coli.speculation.force import forced

VOCAB = 10
REFERENCE = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 9]


def pattern(mode: str, verify: int, *, at: int = 2, k: int = 3) -> str:
    """One letter a draft: r right, w wrong."""
    drafts = forced(mode, verify, REFERENCE, at, k, VOCAB)
    assert all(0 <= draft < VOCAB for draft in drafts)
    return "".join("r" if draft == right else "w" for draft, right in zip(drafts, REFERENCE[at + 1 :], strict=False))


@pytest.mark.parametrize(
    ("mode", "patterns"),
    [
        ("accept", ["rrr", "rrr", "rrr", "rrr"]),
        ("mixed", ["rrr", "wrr", "rrr", "wrr"]),
        ("cycle", ["wrr", "rwr", "rrw", "wrr"]),
        ("reject", ["www", "www", "www", "www"]),
        ("row1", ["wrr", "wrr", "wrr", "wrr"]),
        ("row3", ["rrw", "rrw", "rrw", "rrw"]),
        ("row4", ["rrr", "rrr", "rrr", "rrr"]),
    ],
)
def test_each_mode_stages_its_pattern(mode: str, patterns: list[str]) -> None:
    assert [pattern(mode, verify) for verify in range(4)] == patterns


def test_drafts_are_the_tokens_after_the_pick() -> None:
    assert forced("accept", 0, REFERENCE, 4, 3, VOCAB) == [9, 2, 6]
    assert forced("accept", 0, REFERENCE, 0, 5, VOCAB) == [1, 4, 1, 5, 9]


@pytest.mark.parametrize("mode", TABLE["mtp_force"][0].kind.words)  # type: ignore[attr-defined]
def test_the_end_of_the_reference_gives_fewer_drafts_and_none_behind_it(mode: str) -> None:
    last = len(REFERENCE) - 1
    for verify in range(5):
        assert len(forced(mode, verify, REFERENCE, last - 2, 5, VOCAB)) == 2
        assert forced(mode, verify, REFERENCE, last, 5, VOCAB) == []
        assert forced(mode, verify, REFERENCE, last + 7, 5, VOCAB) == []
        assert forced(mode, verify, REFERENCE, 0, 0, VOCAB) == []


def test_the_cycle_stays_within_a_short_proposal() -> None:
    assert [pattern("cycle", verify, at=len(REFERENCE) - 3) for verify in range(3)] == ["wr", "rw", "wr"]


def test_a_wrong_token_is_another_one_even_at_the_end_of_the_vocabulary() -> None:
    assert forced("reject", 0, [0, 1, 1, 1], 0, 3, 2) == [0, 0, 0]
    assert forced("reject", 0, [0, VOCAB - 1, 0], 0, 2, VOCAB) == [0, 1]


@pytest.mark.parametrize("mode", ["", "row", "row0", "row-1", "rowx", "all"])
def test_a_word_that_is_no_mode_is_refused(mode: str) -> None:
    with pytest.raises(ValueError, match="no FORCE mode"):
        forced(mode, 0, REFERENCE, 0, 3, VOCAB)
