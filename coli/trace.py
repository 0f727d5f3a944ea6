"""A run's forwards as a file (`--trace FILE`), and what other depths would have cost there (`coli bench --replay`).

Format: JSON lines, ASCII. The first is the header {"coli_trace": 1, "model", "engine", "threads", "speculation"};
every other is a forward, in order: the fields of `Record`, in the words of spec_decoding.md. Unknown fields are
ignored, so that later versions can add some. Lines are written at once: a killed run leaves whole lines.

Replay: a verify of k drafts brings E(k) = 1 + a1 + a1 a2 + ... tokens and takes T(k+1) + D(k) seconds. All three come
from the trace itself: a_j over the drafts that were judged, T(n) the mean of the forwards of n rows, D(k) the mean of
the times k drafts were written in. What the trace does not hold is extrapolated, and every row says what that was:

    T(n)  T(1) (1 + (n-1) rho) by the gate's rule for rho (section 5), over the whole trace instead of its last forwards
    a_j   the gate's priors
    D(k)  the line through the measured ones, in proportion where there is one only

A row for "all" mixes the sources as the trace did: the forwards that carried a source's drafts carry k of them (no
more than the source can), the plain ones stay plain. That answers for a trace as a whole, not for what a gate would do.

A writer that meets a full disk stops writing, and says so once, when it is closed: the answer is not lost for it.
Guarded by tests/speculation/test_trace.py.
"""

from __future__ import annotations

import json
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

from coli.errors import ColiError, UsageError
from coli.settings import MOST_DRAFTS
from coli.speculation.gate import LATER_PRIOR, MOST_RHO, PRIOR_WEIGHT, PRIORS, RHO_PRIOR
from coli.speculation.options import MOST_LOOKUP_DRAFTS, Speculation

MARK, VERSION = "coli_trace", 1
SOURCES = ("mtp", "lookup")
ALL = "all"
_LONGEST = 1e9  # seconds that a replay reckons with
MOST_WRITTEN = 9
_NO_TRACE = "give a file that `coli run --trace` wrote"


@dataclass(frozen=True)
class Record:
    """One forward: a verify, or a plain step (`source` None, `k` 0)."""

    position: int  # of the pick
    source: str | None
    k: int  # drafts carried
    written: int  # drafts written, at least k
    p: tuple[float, ...] | None  # how likely the source held each carried draft
    drafts: tuple[int, ...]  # those carried
    accepted: int
    judged: int
    seconds: float  # of the forward
    draft_seconds: float  # of writing the drafts
    bytes: int  # read from files for experts
    rejected_bytes: int  # of those, for rows that did not stand
    pick: int
    ended: bool  # the turn ended before its drafts were settled

    @classmethod
    def of(cls, value: object) -> Record:
        """The record of a JSON value. Raises ValueError with what is wrong."""
        if not isinstance(value, dict):
            raise ValueError("is no JSON object")
        missing = [field.name for field in fields(cls) if field.name not in value]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}")
        known = {field.name: value[field.name] for field in fields(cls)}
        for name in ("p", "drafts"):
            if isinstance(known[name], list):
                known[name] = tuple(known[name])
        record = cls(**known)
        wrong = next((text for text, holds in record._rules() if not holds), None)
        if wrong is not None:
            raise ValueError(f"breaks the rule: {wrong}")
        return record

    def _rules(self) -> Iterable[tuple[str, bool]]:
        whole = (self.position, self.k, self.written, self.accepted, self.judged, self.bytes, self.rejected_bytes,
                 self.pick)  # fmt: skip
        yield "counts, bytes and tokens are whole numbers from 0", all(map(_is_count, whole))
        yield "seconds are numbers, from a nanosecond on for the forward", (
            _is_number(self.seconds) and self.seconds >= 1e-9
            and _is_number(self.draft_seconds) and self.draft_seconds >= 0
        )
        yield "ended is true or false", isinstance(self.ended, bool)
        yield f"source is {', '.join(SOURCES)} or null, null without drafts", (
            self.source is None if self.k == 0 else isinstance(self.source, str) and self.source in SOURCES
        )
        yield "no more than 9 drafts are written", self.written <= MOST_WRITTEN
        yield "accepted <= judged <= k <= written, judged <= accepted + 1", (
            self.accepted <= self.judged <= min(self.k, self.accepted + 1) and self.k <= self.written
        )
        yield "rejected_bytes <= bytes", self.rejected_bytes <= self.bytes
        yield "drafts are k tokens", _are(self.drafts, self.k, _is_count)
        yield "p is null or k probabilities", self.p is None or _are(
            self.p, self.k, lambda p: _is_number(p) and 0 <= p <= 1
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_LONGEST <= value <= _LONGEST  # type: ignore[operator]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= 255


def _are(values: object, count: int, what: Any) -> bool:
    return isinstance(values, tuple) and len(values) == count and all(map(what, values))


# ---- writing ---------------------------------------------------------------------------------------------------------


class Writer:
    """A trace being written: `start` once, then call it with every record.

    Opening checks that `path` can be written and leaves what is in it until `start`: it comes before a model is loaded,
    which may fail. Raises UsageError."""

    def __init__(self, path: Path) -> None:
        self.path, self._failed, self._started = path, "", False
        try:
            self._file = open(path, "a", encoding="utf-8", newline="\n", buffering=1)  # noqa: SIM115 (see close)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot write: {reason}", f"--trace {path}",
                             "give a file in a folder you may write") from error  # fmt: skip

    def start(self, *, model: str, engine: str, threads: int, speculation: Speculation) -> None:
        """Begin the file anew, with what this run is."""
        if stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.truncate(0)
        self._started = True
        self._line({MARK: VERSION, "model": model, "engine": engine, "threads": threads,
                    "speculation": asdict(speculation)})  # fmt: skip

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Write one forward."""
        if not self._started:
            raise ValueError("a trace begins with start()")
        self._line(record)

    def _line(self, value: Mapping[str, Any]) -> None:
        if self._failed:
            return
        text = json.dumps(value, allow_nan=False)
        try:
            self._file.write(text + "\n")
        except OSError as error:
            self._failed = error.strerror or str(error)

    def close(self) -> None:
        """Raises ColiError when something could not be written, once."""
        try:
            self._file.close()
        except OSError as error:
            self._failed = self._failed or error.strerror or str(error)
        if self._failed:
            failed, self._failed = self._failed, ""
            raise ColiError(f"cannot write: {failed}", f"--trace {self.path}", "check the disk")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except ColiError:
            if error is None:
                raise


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """(header, forwards) of a trace. Raises UsageError, with the line, for anything else."""
    try:
        lines = path.read_bytes().split(b"\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path, _NO_TRACE) from error
    if lines.pop():
        raise _wrong(path, len(lines) + 1, "the line has no end: the file was cut")
    if not lines:
        raise UsageError("is empty", path, _NO_TRACE)
    header = _json(path, 1, lines[0])
    if not isinstance(header, dict) or type(header.get(MARK)) is not int:
        raise _wrong(path, 1, "is no header of a trace")
    if header[MARK] != VERSION:
        raise _wrong(path, 1, f"is a trace of version {header[MARK]}, this coli reads version {VERSION}")
    if not (_is_name(header.get("model")) and _is_name(header.get("engine")) and _is_count(header.get("threads"))):
        raise _wrong(path, 1, "model and engine are names, threads a number")
    if not 1 <= most(header) <= max(MOST_DRAFTS.values()):
        raise _wrong(path, 1, "speculation.most is no number of drafts that an engine has")
    records = []
    for number, line in enumerate(lines[1:], 2):
        try:
            records.append(Record.of(_json(path, number, line)))
        except ValueError as error:
            raise _wrong(path, number, str(error)) from error
    return header, records


def most(header: Mapping[str, Any]) -> int:
    """Drafts that the head of a trace's engine can write; 0 for a header that gives no number. Older traces, which say
    nothing, are qwen38's."""
    said = header.get("speculation")
    value = said.get("most", MOST_DRAFTS["qwen38"]) if isinstance(said, dict) else MOST_DRAFTS["qwen38"]
    return value if type(value) is int else 0


def _json(path: Path, number: int, line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise _wrong(path, number, "is not JSON") from error


def _wrong(path: Path, number: int, what: str) -> UsageError:
    return UsageError(what, f"{path}, line {number}", _NO_TRACE)


# ---- replaying -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayRow:
    """What verifies of `depth` drafts of `source` ("mtp", "lookup", "all") would have cost. `ratio`: the speed against
    no drafts, above 1 is faster. `extrapolated` names the figures that the trace does not hold: T(n) of n rows,
    a<j> the acceptance of draft j, D(k) the writing of k drafts; empty when all were measured."""

    source: str
    depth: int
    tokens_per_forward: float
    seconds_per_token: float
    ratio: float
    extrapolated: str


@dataclass(frozen=True)
class _Cost:
    """Tokens and seconds of an average forward, and the figures that were not measured."""

    tokens: float
    seconds: float
    guessed: tuple[str, ...] = ()


def replay(
    records: Sequence[Record], depths: Iterable[int] | None = None, head: int = MOST_DRAFTS["qwen38"]
) -> list[ReplayRow]:
    """Rows for each source the trace has drafts of, then for all its forwards together; none for an empty trace.

    `head`: drafts of it at most (`most` of the header). Depths that a source cannot have are left out of its rows."""
    if not records:
        return []
    limits = {"mtp": head, "lookup": MOST_LOOKUP_DRAFTS}
    times = _Times(records)
    depths = list(range(max(limits.values()) + 1) if depths is None else depths)
    sources = {name: _Source(name, [r for r in records if r.source == name]) for name in SOURCES}
    sources = {name: source for name, source in sources.items() if source.records}
    rows = [
        _row(name, depth, source.cost(depth, times), times)
        for name, source in sources.items()
        for depth in depths
        if depth <= limits[name]
    ]
    plain = sum(record.source is None for record in records)
    for depth in depths if sources else [0]:
        parts = [(plain, _Cost(1.0, times.plain))]
        parts += [(len(s.records), s.cost(min(depth, limits[name]), times)) for name, s in sources.items()]
        rows.append(_row(ALL, depth, _mixed(parts), times))
    return rows


def _mixed(parts: Sequence[tuple[int, _Cost]]) -> _Cost:
    """The average over so many forwards of each cost."""
    total = sum(count for count, _ in parts)
    guessed = dict.fromkeys(name for _, cost in parts for name in cost.guessed)
    return _Cost(
        sum(count * cost.tokens for count, cost in parts) / total,
        sum(count * cost.seconds for count, cost in parts) / total,
        tuple(guessed),
    )


def _row(source: str, depth: int, cost: _Cost, times: _Times) -> ReplayRow:
    each = cost.seconds / cost.tokens
    guessed = dict.fromkeys((*times.guessed, *cost.guessed))
    return ReplayRow(source, depth, cost.tokens, each, times.plain / each, ", ".join(guessed))


class _Times:
    """T(n). `plain` is T(1), `guessed` names it when no plain step was measured."""

    def __init__(self, records: Sequence[Record]) -> None:
        seconds: dict[int, list[float]] = defaultdict(list)
        for record in records:
            seconds[record.k + 1].append(record.seconds)
        self._means = {rows: fmean(values) for rows, values in seconds.items()}
        self.guessed = () if 1 in seconds else ("T(1)",)
        self._rho = RHO_PRIOR
        if 1 in seconds:
            self.plain = self._means[1]
            slopes = [
                min(max((value / self.plain - 1) / (rows - 1), 0.0), MOST_RHO)
                for rows, values in seconds.items() if rows > 1 for value in values
            ]  # fmt: skip
            self._rho = (PRIOR_WEIGHT * RHO_PRIOR + sum(slopes)) / (PRIOR_WEIGHT + len(slopes))
        else:
            rows = min(seconds)
            self.plain = self._means[rows] / (1 + (rows - 1) * RHO_PRIOR)

    def of(self, rows: int) -> tuple[float, tuple[str, ...]]:
        """(seconds, what was guessed)."""
        if rows == 1:
            return self.plain, self.guessed
        if rows in self._means:
            return self._means[rows], ()
        return self.plain * (1 + (rows - 1) * self._rho), (f"T({rows})",)


class _Source:
    """A source's verifies in the trace: its acceptance, and the time its drafts took."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name, self.records = name, records
        written: dict[int, list[float]] = defaultdict(list)
        for record in records:
            written[record.written].append(record.draft_seconds)
        self._written = {count: fmean(values) for count, values in written.items()}

    def cost(self, depth: int, times: _Times) -> _Cost:
        seconds, guessed = times.of(depth + 1)
        tokens, chance = 1.0, 1.0
        for j in range(1, depth + 1):
            accepted, unknown = self._acceptance(j)
            chance *= accepted
            tokens += chance
            guessed += unknown
        drafting, unknown = self._drafting(depth)
        return _Cost(tokens, seconds + drafting, guessed + unknown)

    def _acceptance(self, j: int) -> tuple[float, tuple[str, ...]]:
        judged = sum(record.judged >= j for record in self.records)
        if judged:
            return sum(record.accepted >= j for record in self.records) / judged, ()
        priors = PRIORS[self.name]
        return priors[j - 1] if j <= len(priors) else LATER_PRIOR, (f"a{j}",)

    def _drafting(self, k: int) -> tuple[float, tuple[str, ...]]:
        if k == 0 or not any(self._written.values()):  # a lookup's time is too short to be counted
            return 0.0, ()
        if k in self._written:
            return self._written[k], ()
        counts, seconds = list(self._written), list(self._written.values())
        if len(counts) == 1:
            return seconds[0] * k / counts[0], (f"D({k})",)
        middle, mean = fmean(counts), fmean(seconds)
        slope = sum((c - middle) * (s - mean) for c, s in zip(counts, seconds, strict=True))
        slope /= sum((c - middle) ** 2 for c in counts)
        return max(mean + (k - middle) * slope, 0.0), (f"D({k})",)
