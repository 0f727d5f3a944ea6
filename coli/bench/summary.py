"""Samples to rows: medians, pair-by-pair ratios, what drafting did, and whether the output was the same.

A row is one arm on one prompt. Speeds are summed up by median and quartiles. The ratio to the baseline is the median of
the ratios of *the same repeat*: both of a pair ran within moments of each other, so a slow minute divides out.
Counts (tokens, forwards, drafts) are summed over the timed repeats before they are divided. T(n)/T(1) divides the
median time of the arm's forwards of n rows by the median of all arms' plain steps on the same prompt.
Same output: every answer, warm-up included, has the token ids of the baseline's first answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coli.bench.measure import Sample
from coli.speculation.report import SourceReport


@dataclass(frozen=True)
class Spread:
    """Five numbers of a sample, in its unit."""

    median: float
    low: float
    quarter: float
    three_quarters: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Median, extremes and quartiles (linear between the sorted values); None of nothing."""
    if not values:
        return None
    v = sorted(values)
    quartiles = statistics.quantiles(v, n=4, method="inclusive") if len(v) > 1 else [v[0]] * 3
    return Spread(statistics.median(v), v[0], quartiles[0], quartiles[2], v[-1])


@dataclass(frozen=True)
class RowTime:
    """Forwards of `rows` rows took `ratio` times a plain step; there were `forwards` of them."""

    rows: int
    ratio: float
    forwards: int


@dataclass(frozen=True)
class Difference:
    """The first answer of an arm that left the baseline's: the repeat (-1 is the warm-up) and the token's position in
    the answer; None for a token that one of the two does not have."""

    repeat: int
    position: int
    token: int | None
    expected: int | None


@dataclass(frozen=True)
class Row:
    """One arm on one prompt. Speeds are tokens per second of decoding, in the order of the repeats; `ratios` are
    against `baseline`; `acceptance` is accepted over carried drafts by source and position."""

    prompt: str
    arm: str
    baseline: str
    speeds: tuple[float, ...]
    speed: Spread | None
    ratios: tuple[float, ...]
    ratio: Spread | None
    tokens: int  # of one answer
    tokens_per_forward: float | None
    acceptance: dict[str, tuple[float, ...]]
    rows: tuple[RowTime, ...]
    bytes_per_token: float | None  # file bytes of experts, the prompt's included
    compared: int  # answers whose output was compared
    difference: Difference | None

    @property
    def same(self) -> bool | None:
        """Whether every answer was the baseline's; None when there was nothing to compare with."""
        return self.difference is None if self.compared else None


@dataclass(frozen=True)
class Contest:
    """`auto` against the fastest other arm of a prompt, pair by pair."""

    prompt: str
    best: str
    ratio: float


def summarise(samples: Iterable[Sample], baseline: str) -> list[Row]:
    """One row a prompt and arm, in the order of their first samples."""
    taken = list(samples)
    keys = dict.fromkeys((sample.prompt, sample.arm) for sample in taken)
    return [_row(taken, prompt, arm, baseline) for prompt, arm in keys]


def speeds(samples: Iterable[Sample], prompt: str, arm: str) -> dict[int, float]:
    """Tokens per second of the timed repeats; an answer of one token was not decoded and has none."""
    mine = (s for s in samples if (s.prompt, s.arm) == (prompt, arm) and s.repeat >= 0)
    return {s.repeat: s.report.timings.decode_tok_s for s in mine if s.report.timings.decode_tok_s > 0}


def paired(mine: dict[int, float], other: dict[int, float]) -> tuple[float, ...]:
    """mine/other of every repeat that both have."""
    return tuple(mine[repeat] / other[repeat] for repeat in sorted(mine) if repeat in other)


def contests(rows: Sequence[Row], arm: str = "auto") -> list[Contest]:
    """`arm` against the fastest of the others, for every prompt where both ran."""
    found = []
    for mine in (row for row in rows if row.arm == arm and row.speed):
        others = [row for row in rows if row.prompt == mine.prompt and row.arm != arm and row.speed]
        if others:
            best = max(others, key=lambda row: row.speed.median if row.speed else 0.0)
            pairs = [a / b for a, b in zip(mine.speeds, best.speeds, strict=False)]
            found.append(Contest(mine.prompt, best.arm, statistics.median(pairs)))
    return found


def _row(samples: list[Sample], prompt: str, arm: str, baseline: str) -> Row:
    mine = [s for s in samples if (s.prompt, s.arm) == (prompt, arm)]
    timed = [s for s in mine if s.repeat >= 0]
    speed = speeds(samples, prompt, arm)
    ratios = paired(speed, speeds(samples, prompt, baseline))
    expected = _expected(samples, prompt, baseline)
    forwards = [forward for s in timed for forward in s.forwards]
    sources = [source for s in timed if s.report.speculation is not None for source in s.report.speculation.sources]
    tokens = sum(s.report.completion_tokens for s in timed)
    return Row(
        prompt, arm, baseline,
        speeds=tuple(speed.values()),
        speed=spread(list(speed.values())),
        ratios=ratios,
        ratio=spread(ratios),
        tokens=len(mine[0].report.token_ids),
        tokens_per_forward=1 + sum(s.accepted for s in sources) / len(forwards) if forwards else None,
        acceptance=_acceptance(sources),
        rows=row_times(forwards, [f for s in samples if s.prompt == prompt and s.repeat >= 0 for f in s.forwards]),
        bytes_per_token=sum(s.report.experts.bytes_read for s in timed) / tokens if tokens else None,
        compared=0 if expected is None else len(mine),
        difference=None if expected is None else _difference(mine, expected),
    )  # fmt: skip


def row_times(mine: Sequence[tuple[int, float]], every: Sequence[tuple[int, float]]) -> tuple[RowTime, ...]:
    """T(n)/T(1) for every n > 1 among the (rows, seconds) of `mine`, T(1) being the plain steps' of `every`."""
    plain = [seconds for rows, seconds in every if rows == 1]
    times: dict[int, list[float]] = {}
    for rows, seconds in mine:
        times.setdefault(rows, []).append(seconds)
    return tuple(
        RowTime(rows, statistics.median(times[rows]) / statistics.median(plain), len(times[rows]))
        for rows in sorted(times)
        if rows > 1 and plain
    )


def _acceptance(sources: Iterable[SourceReport]) -> dict[str, tuple[float, ...]]:
    """Accepted over carried drafts by position, of every source that carried one."""
    counts: dict[str, list[list[int]]] = {}
    for source in sources:
        _add(counts.setdefault(source.name, []), source)
    return {name: tuple(hits / carried for carried, hits in sums) for name, sums in counts.items() if sums}


def _add(sums: list[list[int]], source: SourceReport) -> None:
    for place, (carried, hits) in enumerate(source.by_position):
        if carried:
            sums += [[0, 0] for _ in range(place + 1 - len(sums))]
            sums[place][0] += carried
            sums[place][1] += hits


def _expected(samples: list[Sample], prompt: str, baseline: str) -> tuple[int, ...] | None:
    return next((s.report.token_ids for s in samples if (s.prompt, s.arm) == (prompt, baseline)), None)


def _difference(mine: list[Sample], expected: tuple[int, ...]) -> Difference | None:
    for sample in mine:
        got = sample.report.token_ids
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
                      min(len(got), len(expected)))  # fmt: skip
            return Difference(sample.repeat, at, *(ids[at] if at < len(ids) else None for ids in (got, expected)))
    return None
