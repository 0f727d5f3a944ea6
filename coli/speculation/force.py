"""Drafts out of a reference answer, made wrong on purpose: the FORCE modes that tests and `coli run --reference` use.

Idea: with the answer known beforehand, every pattern of acceptance can be staged, whatever head and text would have
drafted. A wrong draft is another token of the vocabulary, never the right one, so a pattern happens exactly as long as
the picks are the reference's.

    accept   every draft is the reference's token
    mixed    every other verify's first draft is wrong, starting with the second verify
    cycle    the one wrong draft moves over the rows, verify by verify
    rowN     draft N is wrong, in every verify that has one
    reject   every draft is wrong

Guarded by tests/speculation/test_force.py.
"""

from __future__ import annotations

from collections.abc import Sequence


def forced(mode: str, verify_index: int, reference: Sequence[int], at: int, k: int, vocab: int) -> list[int]:
    """Up to `k` drafts expected after the pick at index `at` of `reference`, the ids of prompt and answer together.

    `verify_index` counts the source's verifies from 0. Fewer drafts where the reference ends, none behind it. Needs a
    vocabulary of two tokens and more. Raises ValueError for a mode that is none.
    """
    drafts = list(reference[at + 1 : at + 1 + k])
    for row in _wrong(mode, verify_index, len(drafts)):
        drafts[row] = (drafts[row] + 1) % vocab
    return drafts


def _wrong(mode: str, verify_index: int, count: int) -> range:
    """The rows of `count` drafts that `mode` makes wrong."""
    if mode == "accept":
        return range(0)
    if mode == "mixed":
        return range(min(count, verify_index % 2))
    if mode == "reject":
        return range(count)
    if mode == "cycle":
        row = verify_index % max(1, count)
    elif mode.startswith("row") and mode[3:].isdecimal() and int(mode[3:]) >= 1:
        row = int(mode[3:]) - 1
    else:
        raise ValueError(f"{mode!r} is no FORCE mode")
    return range(row, min(count, row + 1))
