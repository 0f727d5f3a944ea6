"""Rows as text: cells for a person, Markdown, CSV, JSON lines. Tables are lists of records with the same keys, so a
replayed trace goes through the same doors as a benchmark.

`document` is the public shape: the one JSON line that every form but CSV ends with.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coli.bench.summary import Contest, Row, Spread
from coli.report import size
from coli.trace import Record as TraceRecord
from coli.trace import ReplayRow

Record = Mapping[str, Any]
NOTHING = "–"
ENOUGH = 5  # forwards that a T(n) in the table is the median of, at least
DIGITS = 6  # of a number in JSON


# ---- rows as records -------------------------------------------------------------------------------------------------


def cells(row: Row) -> dict[str, str]:
    """The columns of the table for a person; narrow enough for a terminal of 80."""
    return {
        "prompt": row.prompt,
        "arm": row.arm,
        "tok/s": NOTHING if row.speed is None else _speed(row.speed),
        f"x {row.baseline}": NOTHING if row.ratio is None or row.arm == row.baseline else f"{row.ratio.median:.2f}",
        "tokens / forward": NOTHING if row.tokens_per_forward is None else f"{row.tokens_per_forward:.2f}",
        "hits, %": _acceptance(row.acceptance) or NOTHING,
        "T(n) / T(1)": _times(row) or NOTHING,
        "read / token": NOTHING if row.bytes_per_token is None else size(round(row.bytes_per_token)),
        "same": _same(row),
    }


def record(row: Row) -> dict[str, Any]:
    """The row as JSON values."""
    return {
        "kind": "row",
        "prompt": row.prompt,
        "arm": row.arm,
        "tok_s": None if row.speed is None else asdict(row.speed),
        "baseline": row.baseline,
        "ratio": None if row.ratio is None else asdict(row.ratio),
        "tokens": row.tokens,
        "tokens_per_forward": row.tokens_per_forward,
        "acceptance": {name: list(shares) for name, shares in row.acceptance.items()},
        "rows": [asdict(time) for time in row.rows],
        "bytes_per_token": row.bytes_per_token,
        "same_output": row.same,
        "compared": row.compared,
        "difference": None if row.difference is None else asdict(row.difference),
        "samples": {"tok_s": list(row.speeds), "ratio": list(row.ratios)},
    }


def flat(row: Row) -> dict[str, Any]:
    """The row as plain columns: lists are numbers with blanks between them, what is missing is empty."""
    value = record(row)
    speed, ratio = value["tok_s"] or {}, value["ratio"] or {}
    return {
        **{name: value[name] for name in ("prompt", "arm", "baseline", "tokens")},
        "repeats": len(row.speeds),
        **{f"tok_s_{name}": speed.get(name) for name in Spread.__dataclass_fields__},
        **{f"ratio_{name}": ratio.get(name) for name in Spread.__dataclass_fields__},
        "tokens_per_forward": row.tokens_per_forward,
        **{f"{name}_acceptance": _numbers(row.acceptance.get(name, ())) for name in ("mtp", "lookup")},
        "rows": " ".join(f"{time.rows}:{time.ratio:.4f}" for time in row.rows),
        "bytes_per_token": row.bytes_per_token,
        "same_output": None if row.same is None else int(row.same),
    }


def document(
    rows: Sequence[Row], contests: Sequence[Contest], environment: Record, *, complete: bool
) -> dict[str, Any]:
    """Everything as one JSON value; `complete` is false when the measuring was cut short."""
    return {
        "kind": "bench",
        "complete": complete,
        "same_output": all(row.difference is None for row in rows),
        "rows": [record(row) for row in rows],
        "auto": [asdict(contest) for contest in contests],
        "environment": dict(environment),
    }


def difference(row: Row) -> str:
    """One line on the first token that is another one."""
    found = row.difference
    assert found is not None, "asked of a row that has one"
    when = "the warm-up" if found.repeat < 0 else f"repeat {found.repeat + 1}"
    return (
        f"{row.prompt}, arm {row.arm}, {when}: token {found.position + 1} of the answer is {_token(found.token)}, "
        f"arm {row.baseline} has {_token(found.expected)}"
    )


def contest(found: Contest) -> str:
    """One line on how good the gate's choice was."""
    return f"auto on {found.prompt}: {found.ratio:.2f}x the fastest other arm ({found.best})"


# ---- a replayed trace ------------------------------------------------------------------------------------------------


def replayed(header: Record, forwards: Sequence[TraceRecord]) -> list[str]:
    """What the trace is, for a person."""
    drafted = sum(forward.k > 0 for forward in forwards)
    return [
        f"trace: {header.get('model')} ({header.get('engine')}), {header.get('threads')} threads, "
        f"{len(forwards):,} forwards, {drafted:,} of them with drafts"
    ]


def replay_cells(row: ReplayRow) -> dict[str, str]:
    """The columns of the table for a person."""
    return {
        "source": row.source,
        "drafts": str(row.depth),
        "tokens / forward": f"{row.tokens_per_forward:.2f}",
        "ms / token": f"{1000 * row.seconds_per_token:.3g}",
        "x plain": f"{row.ratio:.2f}",
        "extrapolated": row.extrapolated or NOTHING,
    }


# ---- records as text -------------------------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """A table in GitHub's form; empty for no records."""
    if not records:
        return ""
    lines = [list(records[0]), ["---"] * len(records[0]), *([_text(v) for v in row.values()] for row in records)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def comma_separated(records: Sequence[Record]) -> str:
    """RFC 4180 with plain line ends, the names first; empty for no records."""
    if not records:
        return ""
    place = io.StringIO()
    writer = csv.DictWriter(place, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _text(value) for key, value in row.items()} for row in records)
    return place.getvalue()


def json_lines(records: Sequence[Record]) -> str:
    """One JSON value a line; numbers have six digits, more than any timing has."""
    return "\n".join(json.dumps(_short(row), ensure_ascii=False, allow_nan=False) for row in records)


# ---- single cells ----------------------------------------------------------------------------------------------------


def _speed(value: Spread) -> str:
    """`855 (830..901)`: median and extremes, to about three digits."""
    digits = 0 if value.median >= 100 else 1 if value.median >= 10 else 2
    median, low, high = (f"{number:.{digits}f}" for number in (value.median, value.low, value.high))
    return f"{median} ({low}..{high})"


def _acceptance(shares: Mapping[str, Sequence[float]]) -> str:
    """`mtp 97 83, lookup 91 88 70`: accepted drafts of every source by position, in percent."""
    return ", ".join(f"{name} {' '.join(f'{100 * share:.0f}' for share in parts)}" for name, parts in shares.items())


def _times(row: Row) -> str:
    """`2:1.21 3:1.52`: only of forwards that ran often enough for their median to mean something."""
    return " ".join(f"{time.rows}:{time.ratio:.2f}" for time in row.rows if time.forwards >= ENOUGH)


def _same(row: Row) -> str:
    return NOTHING if row.same is None else "yes" if row.same else "NO"


def _short(value: Any) -> Any:
    """`value` with every float rounded to DIGITS."""
    if isinstance(value, Mapping):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _token(token: int | None) -> str:
    return "missing" if token is None else str(token)
