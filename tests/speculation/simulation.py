"""A machine with a simulated clock for the gate: known times per row count, known acceptance, no engine.

`Machine.step` plays one step of a decoder with one source and reports it to the gate the way a decoder does; its sums
are the truth the gate's choices are judged by.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coli.speculation.gate import Gate


def line(slope: float, base: float = 1.0) -> Callable[[int], float]:
    """Seconds of a forward of n rows: `base` for one, `slope` of it more for each further row."""
    return lambda rows: base * (1.0 + slope * (rows - 1))


def true_values(
    acceptance: Sequence[float], times: Callable[[int], float], most: int, first: float = 0.0, extra: float = 0.0
) -> list[float]:
    """value(k) for k = 0..most, from the true numbers."""
    values = [1.0]
    for k in range(1, most + 1):
        tokens = chance = 1.0
        for a in acceptance[:k]:
            chance *= a
            tokens += chance
        values.append(tokens * times(1) / (times(k + 1) + first + (k - 1) * extra))
    return values


@dataclass
class Machine:
    times: Callable[[int], float]
    acceptance: Sequence[float]
    gate: Gate = field(default_factory=Gate)
    source: str = "mtp"
    most: int = 3
    first: float = 0.0
    extra: float = 0.0
    noise: float = 0.0  # standard deviation of a time
    hiccups: float = 0.0  # share of forwards that take ten times as long
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.clear()

    def clear(self) -> None:
        """Forget the sums; the gate remembers."""
        self.seconds, self.tokens, self.forwards, self.accepted = 0.0, 0, 0, 0
        self.depths: list[int] = []

    def _noisy(self, seconds: float) -> float:
        return seconds * max(0.5, self.rng.gauss(1.0, self.noise))

    def step(self, proposed: int | None = None) -> int:
        """One forward; the depth the gate chose."""
        k, _ = self.gate.pick(self.source, self.most if proposed is None else proposed)
        if k and self.first:
            self.gate.first_cost(self.source, self._noisy(self.first))
        if self.extra:
            for _ in range(k - 1):
                self.gate.draft_cost(self.source, self._noisy(self.extra))
        hiccup = 10.0 if self.rng.random() < self.hiccups else 1.0
        self.gate.forward(k + 1, self._noisy(self.times(k + 1)) * hiccup)
        accepted = 0
        while accepted < k and self.rng.random() < self.acceptance[accepted]:
            accepted += 1
        if k:
            self.gate.result(self.source, min(k, accepted + 1), accepted)
            self.seconds += self.first + (k - 1) * self.extra
        self.seconds += self.times(k + 1)
        self.tokens += 1 + accepted
        self.accepted += accepted
        self.forwards += 1
        self.depths.append(k)
        return k

    def run(self, steps: int) -> list[int]:
        return [self.step() for _ in range(steps)]

    def value(self) -> float:
        """Tokens per plain step's time over what was run since `clear`."""
        return self.tokens * self.times(1) / self.seconds
