"""Damage for file readers: seeded mutations of bytes, of integer fields and of JSON.

Idea: most damage at random ends in the first check that sees it. So fields get values that checks are written for
(0, one more, powers of two and their neighbours, the file's size), pieces are copied whole, and a case has one to three
mutations; the tests count what was refused and for how many reasons, which shows that they reach far.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

ABSURD = sorted({value for bits in (0, 1, 4, 7, 8, 12, 15, 16, 20, 22, 24, 31, 32, 40, 47, 61, 62, 63, 64)
                 for value in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)})  # fmt: skip


def mutated(rng: random.Random, content: bytes, end: int, fields: Sequence[int]) -> bytes:
    """`content` with damage in its first `end` bytes; `fields` are offsets of integers there."""
    out = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_BYTES)(rng, out, min(end, len(out)), fields)
    return bytes(out)


def _flip(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    for _ in range(rng.randint(1, 8) if end else 0):
        out[rng.randrange(end)] ^= 1 << rng.randrange(8)


def _replace(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    at, length = rng.randrange(end + 1), rng.randint(1, 12)
    out[at : at + length] = rng.choice((rng.randbytes(length), bytes(length), b"\xff" * length))[: len(out) - at]


def _insert(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    at = rng.randrange(end + 1)
    out[at:at] = rng.randbytes(rng.randint(1, 16))


def _delete(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    at = rng.randrange(end + 1)
    del out[at : at + rng.randint(1, 16)]


def _cut(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    del out[rng.randrange(end + 1 if rng.random() < 0.5 else len(out) + 1) :]


def _copy(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    """A piece between two fields again, somewhere else: keys and tensors twice, counts one too few."""
    start, to = rng.choice(fields), rng.choice(fields)
    out[to:to] = out[start : start + rng.randint(1, 80)]


def _field(rng: random.Random, out: bytearray, end: int, fields: Sequence[int]) -> None:
    at = rng.choice(fields) if rng.random() < 0.8 else rng.randrange(end + 1)
    width = rng.choice((1, 2, 4, 4, 8, 8, 8))
    old = int.from_bytes(out[at : at + width], "little")
    near = (len(out), len(out) - at, old + 1, old - 1, old * 2, old // 2)
    value = rng.choice((rng.choice(ABSURD), rng.choice(near)))
    out[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")[: len(out) - at]


_BYTES = (_flip, _replace, _insert, _delete, _cut, _copy, _field, _field, _field)

ODD: list[Any] = [None, True, False, -1, 0, 1, 2, 7, 1.5, 1e300, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**30, "",
                  "F32", "BF16", "I64", "x" * 300, "\ud800", "\n", [], [0], [0, 8], [1 << 62] * 2, {}, {"a": 1},
                  [[]]]  # fmt: skip


def mutated_json(rng: random.Random, value: Any) -> Any:
    """`value` with one to three of its parts replaced, removed, copied or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        inner, place = _somewhere(rng, value)
        if inner is None:
            return rng.choice(ODD)
        action = rng.randrange(5)
        if action == 0:
            inner[place] = rng.choice(ODD)
        elif action == 1:
            del inner[place]
        elif action == 2 and type(inner[place]) is int:
            inner[place] = rng.choice((inner[place] + 1, inner[place] - 1, -inner[place], rng.choice(ABSURD)))
        elif isinstance(inner, dict):
            name = rng.choice((f"{place}x", "", "\ud800", "model.layers.0.x", str(place)[:-1], "a\n", "__metadata__"))
            inner[name] = inner[place] if action == 3 else inner.pop(place)
        else:
            inner.insert(rng.randrange(len(inner) + 1), rng.choice(ODD))
    return value


def _somewhere(rng: random.Random, value: Any) -> tuple[Any, Any]:
    """A container inside `value` and one of its keys or indices."""
    if not isinstance(value, dict | list) or not value:
        return None, None
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    below = _somewhere(rng, value[place]) if rng.random() < 0.7 else (None, None)
    return (value, place) if below[0] is None else below
