"""Which experts were used how often, from run to run: what to read first and what to keep.

Idea: a router has habits. The store counts, expert by expert, the forwards that used one (`ExpertStore.uses`); a run
ends by adding them to the history beside the model, and the next one reads the `hottest` experts in the background
while it is opened and pins those used clearly more than their share, so that a long prompt does not push them out.

File (text, coli/history.py), three numbers a line, in this order:

    -1 <layers> <experts>         of the model
    -2 <version> <engine>         version 1; the engine's number, ENGINES
    <layer> <expert> <count>      an expert used at least once, by the model's numbers; each once

An absent or empty file is an empty history. Another version, another engine's, another model's sizes and anything that
is not whole lines of this form are a ColiError with the file's name (and the line), and nothing here writes over it.
The form has no checksum: a file cut between two lines looks whole, which is why it is only ever replaced as a whole.

Decay: counts halve, rounded down, when an expert's mean count passes MEAN, so that a habit half as old counts twice and
what is no longer used is forgotten. With 8 of 256 experts chosen a layer that is every 16,000 forwards.
The draft head's experts are few and a cache of their own: they have no history.

Guarded by tests/models/test_usage.py (the form against a slow parser, every cut, two processes, 200 kills).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coli import history
from coli.errors import ColiError

if TYPE_CHECKING:
    from coli.settings import Settings

NAME = ".coli_usage"
VERSION, ENGINES = 1, {"qwen36": 36, "qwen38": 38}
MEAN = 1024  # of an expert's count, at most
PIN_SHARE, PIN_LEAST = 2, 32  # a pin has this many times its layer's mean, and so many uses that it is no accident
_VARIABLE = "COLI_USAGE"
_HINT = history.hint(_VARIABLE)
_FORM = re.compile(rb"-1 (\d{1,9}) (\d{1,9})\r?\n-2 (\d{1,9}) (\d{1,9})\r?\n((?:\d{1,9} \d{1,9} \d{1,10}\r?\n)*)")
_LONGEST = 33  # bytes of a line


@dataclass(frozen=True)
class Shape:
    """Whose experts a history counts: `rows` are the numbers of the layers that have some, of the model's `layers`."""

    engine: str
    layers: int
    experts: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, engine: str, geometry: Any, prefixes: Sequence[str]) -> Shape:
        """Of a model whose layers with these name prefixes ("layers.7.") have experts."""
        return cls(engine, geometry.layers, geometry.experts, tuple(int(prefix.split(".")[1]) for prefix in prefixes))

    def none(self) -> np.ndarray:
        return np.zeros((len(self.rows), self.experts), np.int64)


# ---- the file --------------------------------------------------------------------------------------------------------


def encode(counts: np.ndarray, shape: Shape) -> bytes:
    """The file of `counts` int64 [rows, experts]."""
    lines = [f"-1 {shape.layers} {shape.experts}", f"-2 {VERSION} {ENGINES[shape.engine]}"]
    at = np.argwhere(counts)
    for (row, expert), count in zip(at.tolist(), counts[at[:, 0], at[:, 1]].tolist(), strict=True):
        lines.append(f"{shape.rows[row]} {expert} {count}")
    return "\n".join([*lines, ""]).encode()


def decode(data: bytes, shape: Shape, path: Path) -> np.ndarray:
    """int64 [rows, experts] from a file's bytes. Raises ColiError."""
    if not data:
        return shape.none()
    found = _FORM.match(data)
    if found is None:
        raise ColiError("holds no expert history", path, _HINT)
    layers, experts, version, engine = map(int, found.groups()[:4])
    if version != VERSION:
        raise ColiError(f"is of version {version}, this coli reads version {VERSION}", path, _HINT)
    if engine != ENGINES[shape.engine]:
        owner = next((name for name, number in ENGINES.items() if number == engine), f"of number {engine}")
        raise ColiError(f"is of the engine {owner}, this model's is {shape.engine}", path, _HINT)
    if (layers, experts) != (shape.layers, shape.experts):
        raise ColiError(f"counts {layers} layers of {experts} experts, this model has {shape.layers} of "
                        f"{shape.experts}", path, _HINT)  # fmt: skip
    if found.end() != len(data):
        line = data.count(b"\n", 0, found.end()) + 1
        raise ColiError(f"is damaged: line {line} is no whole record", path, _HINT)
    return _counts(found[5], shape, path)


def _counts(records: bytes, shape: Shape, path: Path) -> np.ndarray:
    table = np.array(list(map(int, records.split())), np.int64).reshape(-1, 3)
    row_of = {layer: row for row, layer in enumerate(shape.rows)}
    rows = np.array([row_of.get(layer, -1) for layer in table[:, 0].tolist()], np.int64)
    key = rows * shape.experts + table[:, 1]
    wrong = (rows < 0) | (table[:, 1] >= shape.experts)
    wrong[np.setdiff1d(np.arange(len(key)), np.unique(key, return_index=True)[1])] = True  # named before
    if wrong.any():
        at = int(np.argmax(wrong))
        layer, expert = table[at, :2].tolist()
        raise ColiError(f"is damaged: line {at + 3} counts expert {expert} of layer {layer}, which the model has not "
                        "or which was counted before", path, _HINT)  # fmt: skip
    counts = shape.none()
    counts[rows, table[:, 1]] = table[:, 2]
    return counts


def load(path: Path, shape: Shape) -> np.ndarray:
    """The counts in a file. Raises ColiError."""
    return decode(history.read(path, _LONGEST * (shape.layers * shape.experts + 2), _VARIABLE), shape, path)


def faded(counts: np.ndarray) -> np.ndarray:
    """`counts` halved until an expert's mean is at most MEAN."""
    while counts.sum() > MEAN * counts.size:
        counts = counts >> 1
    return counts


# ---- the history -----------------------------------------------------------------------------------------------------


class Usage:
    """The history in `path` of a model's experts. `counts` int64 [rows, experts]: what the file held when it was last
    read or written. Raises ColiError for a file that is none."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.path, self.shape = path, shape
        self.counts = load(path, shape)
        self._saved = shape.none()  # uses of this run that the file has

    def hottest(self) -> list[tuple[int, int]]:
        """(row, expert) of the experts used at all, the most used first, the lower numbers first among equals."""
        return self._pairs(self.counts > 0)

    def pins(self) -> list[tuple[int, int]]:
        """Those of the hottest that are used clearly more than their layer's mean."""
        mean = self.counts.mean(axis=1, keepdims=True)
        return self._pairs((self.counts >= PIN_SHARE * mean) & (self.counts >= PIN_LEAST))

    def _pairs(self, mask: np.ndarray) -> list[tuple[int, int]]:
        at = np.flatnonzero(mask)
        best = at[np.argsort(-self.counts.ravel()[at], kind="stable")]
        return [divmod(index, self.shape.experts) for index in best.tolist()]

    def save(self, uses: np.ndarray) -> list[str]:
        """Add to the file what it lacks of `uses` [rows, experts], all that this run has counted; says why where that
        cannot be done, and nothing else is lost by it."""
        own = uses - self._saved
        if not own.any():
            return []
        try:
            with history.rewriting(self.path, _VARIABLE) as replace:
                counts = faded(load(self.path, self.shape) + own)
                replace(encode(counts, self.shape))
        except ColiError as error:
            return [f"{error}; which experts this run used is not saved"]
        self.counts, self._saved = counts, uses.copy()
        return []


def usage_file(model: Path, settings: Settings) -> Path:
    """Where the history of a model's experts is: `settings.usage`, or the default's place."""
    return settings.usage or history.beside(model, NAME, "usage")


def open_usage(settings: Settings, model: Path, shape: Shape) -> tuple[Usage | None, list[str]]:
    """(the history, None for a model without experts or a file that is none; notes)."""
    if not shape.rows:
        given = [name for name in ("usage", "warm_start") if settings.origin(name) != "default"]
        return None, [f"{settings.named(name)} has no effect: the model has no experts" for name in given]
    try:
        return Usage(usage_file(model, settings), shape), []
    except ColiError as error:
        return None, [f"{error}; this run starts without an expert history and will not save one"]
