"""A plan for people: what the model is, a column of terms for every budget, what to do. rich draws the bars alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from coli.memory import NAMES
from coli.report import count, size

_BAR = 40
_NONE = "–"
_Row = dict[str, Any]  # a plan of the document


def text(document: dict[str, Any], *, plot: bool, color: bool) -> str:
    """The whole of stdout."""
    parts = [_facts(document), _table(document), _words(document["plans"])]
    if plot:
        parts.append(_bars(document["plans"], color=color))
    return "\n\n".join("\n".join(part) for part in parts if part)


# ---- what does not depend on the budget ------------------------------------------------------------------------------


def _facts(document: dict[str, Any]) -> list[str]:
    model = document["model"]
    weights = "in the format it names" if model["imagined"] == "config" else f"as {model['imagined']}"
    imagined = f", imagined from its config {weights}" if model["imagined"] else ""
    rows = {
        "model": f"{model['path']} ({size(model['bytes'])}{imagined}), engine {model['engine']}",
        "weights": f"dense {_formats(document['dense'])}",
        "experts": _experts(document["experts"]),
        "context": _context(document["context"], document["slots"]),
        "undo": _undo(document["undo"], document["snapshots"]),
        "draft head": _head(document["head"]),
        "speeds": _machine(document["machine"], document["threads"]),
        "budget": _budget(document),
    }
    return [f"{name:<12}{value}" for name, value in rows.items()]


def _formats(sizes: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sizes.items())
    return f"{size(sum(sizes.values()))}: {parts}" if len(sizes) > 1 else parts


def _experts(experts: dict[str, Any] | None) -> str:
    if experts is None:
        return "none"
    return (f"{experts['format']}, one is {size(experts['record_bytes'])}; {experts['count']:,} in "
            f"{count(experts['layers'], 'layer')} of {experts['a_layer']}, {size(experts['bytes'])}; a token uses "
            f"{experts['used']} a layer")  # fmt: skip


def _context(context: dict[str, Any], slots: int) -> str:
    head = f" and {size(context['head_token_bytes'])} of the draft head" if context["head_token_bytes"] else ""
    return (f"{context['positions']:,} of at most {context['most_positions']:,} positions, "
            f"{size(context['token_bytes'])} each{head}; "
            f"recurrent state {size(context['recurrent_bytes'])}{f', in {slots} slots' if slots > 1 else ''}")


def _undo(undo: dict[str, Any], snapshots: int) -> str:
    drafts = undo["drafts"]
    verify = f"{size(undo['bytes'])} for a verify of {count(drafts, 'draft')}" if drafts else "no drafts"
    way = "a log" if undo["kind"] == "log" else f"slots of {size(undo['slot_bytes'])}"
    kept = f", {snapshots} of them kept" if snapshots else ""
    return f"by {way}, {verify}; a snapshot of a prefix or a pin is {size(undo['snapshot_bytes'])}{kept}"


def _head(head: dict[str, Any]) -> str:
    if not head["loaded"]:
        return head["why"].removeprefix("no draft head: ")
    experts = f"; experts {head['format']}, one is {size(head['record_bytes'])}" if head["record_bytes"] else ""
    return f"dense {_formats(head['dense'])}{experts}"


def _machine(machine: dict[str, Any], threads: int) -> str:
    parts = []
    if (memory := machine["memory"]) is not None:
        by = count(memory["threads"], "thread")
        parts.append(f"memory {size(memory['bytes_per_s'])}/s by {by} ({memory['date']})")
    if (disk := machine["disk"]) is not None:
        cached = "" if disk["direct"] else ", not past the page cache"
        parts.append(f"disk {size(disk['bytes_per_s'])}/s in reads of {size(disk['record'])} ({disk['date']}{cached})")
    return "; ".join(parts) or f"not measured with {count(threads, 'thread')}: coli plan --probe does"


def _budget(document: dict[str, Any]) -> str:
    machine, rows = document["machine"], document["plans"]
    group = f" (control group {machine['limited_by']})" if machine["limited_by"] is not None else ""
    free = f"the {size(machine['available_bytes'])} that are free{group}"
    named = ", ".join(size(row["budget_bytes"]) for row in rows)
    origin = rows[0]["origin"]
    return f"{named}, 0.88 of {free}" if origin == "default" else (
        f"{named} from {'--ram' if origin == 'flag' else 'RAM_GB'}, beside {free}")  # fmt: skip


# ---- the table -------------------------------------------------------------------------------------------------------


def _table(document: dict[str, Any]) -> list[str]:
    """A row a term, a column a budget."""
    plans = document["plans"]
    lines = [["budget", *(size(row["budget_bytes"]) for row in plans)]]
    for label, cell in _rows(document):
        cells = [cell(row) for row in plans]
        if any(cells):
            lines.append([label, *(cell or _NONE for cell in cells)])
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [f"{name:<{first}}" + "".join(f"  {cell:>{wide}}" for cell, wide in zip(cells, others, strict=True))
            for name, *cells in lines]  # fmt: skip


def _rows(document: dict[str, Any]) -> Iterator[tuple[str, Callable[[_Row], str]]]:
    """(label, the cell of a plan); "" is nothing to say, and a row of that alone is left out."""
    for name, words in NAMES.items():
        yield words, partial(_term, name)
    yield "total", lambda row: _size(row["total_bytes"])
    yield "left of the budget", lambda row: size(row["left_bytes"]) if row["fits"] else ""
    yield "missing", lambda row: _size(row["missing_bytes"])
    if (experts := document["experts"]) is not None:
        yield f"experts a layer, of {experts['a_layer']}", lambda row: str(row["cap"] or "")
        yield "draft head's experts", lambda row: str(row["head_cap"] or "")
        yield "share in memory", lambda row: f"{row['residency']:.0%}" if row["fits"] else ""
        yield "disk read a token", lambda row: _between(row["token_bytes"]["disk"], size) if row["fits"] else ""
    yield "memory read a token", lambda row: _between(row["token_bytes"]["memory"], size) if row["fits"] else ""
    yield "tok/s without drafts", _speed
    yield "bound by", lambda row: row["prediction"]["bottleneck"] if row["prediction"] else ""


def _term(name: str, row: _Row) -> str:
    return _size(row["terms"][name])


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else ""


def _speed(row: _Row) -> str:
    found = row["prediction"]
    return _between((found["low"], found["high"]), _number) if found else ""


def _between(ends: Sequence[float], words: Callable[[Any], str]) -> str:
    """A range in words, one number where both ends read the same."""
    return " to ".join(dict.fromkeys(map(words, ends)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


# ---- words and bars --------------------------------------------------------------------------------------------------


def _words(plans: Sequence[_Row]) -> list[str]:
    """Warnings and actions, each once, with the budgets that it is about where those are not all."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in plans:
        mine = [("warning", text) for text in row["warnings"]] + [("to do", text) for text in row["actions"]]
        if not row["fits"]:
            mine = [("does not fit", f"{row['why']} ({row['hint']})")]
        for words in mine:
            said.setdefault(words, []).append(size(row["budget_bytes"]))
    return [f"{kind}: {'' if len(budgets) == len(plans) else ', '.join(budgets) + ': '}{text}"
            for (kind, text), budgets in sorted(said.items(), key=lambda item: _ORDER.index(item[0][0]))]  # fmt: skip


_ORDER = ("does not fit", "warning", "to do")


def _bars(plans: Sequence[_Row], *, color: bool) -> list[str]:
    """Two bars a budget: the share of experts in memory, and the range of tok/s on one scale for all."""
    from rich.bar import Bar
    from rich.table import Table

    from coli.commands._bench_view import text

    grid = Table.grid(padding=(0, 1))
    fastest = max((row["prediction"]["high"] for row in plans if row["prediction"]), default=0.0)
    for row in (row for row in plans if row["fits"]):
        grid.add_row(size(row["budget_bytes"]), "in memory", Bar(1.0, 0, row["residency"], width=_BAR),
                     f"{row['residency']:.0%}")  # fmt: skip
        if (found := row["prediction"]) is not None:
            grid.add_row("", "tok/s", Bar(fastest, found["low"], found["high"], width=_BAR), _speed(row))
    return [text(grid, color=color)]
