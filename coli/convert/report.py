"""What a conversion is asked, what it says while it runs, and what it leaves.

Errors are sums of squares, kept as float64 per kind of tensor and added in file order, so they come out the same
whatever thread computed them and however often the run was killed. Relative L2 error of a kind: sqrt(error / weight).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from coli.errors import UsageError
from coli.report import size

GROUPS = (0, 32, 64, 128)
BITS = (4, 8)
KINDS = ("gate", "up", "down")


@dataclass(frozen=True)
class Options:
    """How routed experts are stored: `ebits` a weight, one scale for `group` inputs (0: for a whole row)."""

    ebits: int = 4
    group: int = 64

    def __post_init__(self) -> None:
        for flag, value, known in (("--ebits", self.ebits, BITS), ("--group-size", self.group, GROUPS)):
            if value not in known:
                raise UsageError(f"{value} is not one of {', '.join(map(str, known))}", flag, "give one of them")

    @property
    def words(self) -> str:
        return f"int{self.ebits} " + (f"groups of {self.group}" if self.group else "rows")


@dataclass(frozen=True)
class Progress:
    """`done` of `total` bytes are written (kept files count); `label` is what is being written."""

    label: str
    done: int
    total: int


@dataclass
class Tally:
    """Sums of squares by kind of tensor: [of the error, of the weights]."""

    sums: dict[str, list[float]] = field(default_factory=dict)

    def compare(self, kind: str, exact: np.ndarray, stored: np.ndarray) -> None:
        """Count float32 `exact` against what was made of it."""
        self.add(kind, _squares(stored - exact), _squares(exact))

    def add(self, kind: str, error: float, weight: float) -> None:
        sums = self.sums.setdefault(kind, [0.0, 0.0])
        sums[0] += error
        sums[1] += weight

    def merge(self, sums: dict[str, list[float]]) -> None:
        for kind, (error, weight) in sums.items():
            self.add(kind, error, weight)

    def relative(self) -> dict[str, float]:
        """Relative L2 error by kind, and of gate, up and down together as "experts"."""
        sums = dict(self.sums)
        experts = [sums[kind] for kind in KINDS if kind in sums]
        if experts:
            sums["experts"] = [sum(pair[0] for pair in experts), sum(pair[1] for pair in experts)]
        order = (*KINDS, "experts", "dense")
        return {kind: math.sqrt(sums[kind][0] / sums[kind][1]) if sums[kind][1] else 0.0 for kind in order
                if kind in sums}  # fmt: skip


def _squares(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())  # a float32 square ends at 1.8e19


@dataclass(frozen=True)
class Report:
    """A finished conversion. `written` of its `files` are this run's, the others an earlier one's."""

    path: str
    format: str
    errors: dict[str, float]
    source_bytes: int
    stored_bytes: int
    files: int
    written: int
    written_bytes: int
    read_bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Megabytes of the source a second."""
        return self.read_bytes / self.seconds / 1e6 if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"mb_per_s": self.rate}

    def lines(self) -> list[str]:
        errors = ", ".join(f"{kind} {100 * value:.4g} %" for kind, value in self.errors.items())
        kept = self.files - self.written
        earlier = f", {kept if self.written else 'all'} kept from an earlier run" if kept else ""
        rows = {
            "format": self.format,
            "size": f"{size(self.source_bytes)} before, {size(self.stored_bytes)} after",
            "error": f"{errors} (relative L2)",
            "files": f"{self.files}{earlier}",
            "time": f"{self.seconds:.1f} s, {self.rate:.0f} MB/s read",
        }
        return [self.path, *(f"{name:<8}{value}" for name, value in rows.items())]
