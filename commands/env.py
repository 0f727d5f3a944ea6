"""`coli env`: the table of variables with what a run would use now, and where each value comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coli.commands import _options

if TYPE_CHECKING:
    from coli.settings import Settings, Variable


def env(
    model: _options.Model = None,
    ctx: _options.Ctx = None,
    cap: _options.Cap = None,
    ram: _options.Ram = None,
    threads: _options.Threads = None,
    json: _options.Json = False,
) -> None:
    """List every variable: value and origin, default, range, engines, meaning."""
    from coli.commands._output import Output

    settings, warnings = _options.settings(model=model, ctx=ctx, cap=cap, ram=ram, threads=threads)
    out = Output(color=not settings.no_color)
    out.lines(warnings)
    rows = table(settings)
    if json:
        out.document(rows)
    else:
        out.text("\n".join(_text(row) for row in rows))


def table(settings: Settings) -> list[dict[str, Any]]:
    """One row a variable; `unset` says in words what a value of None means. A field that every engine has for itself
    has a row for each: which one acts is known when a model is open."""
    from coli.settings import TABLE

    return [
        {
            "name": row.name,
            "value": _show(row, value),
            "origin": origin,
            "default": _show(row, row.default),
            "unset": row.unset or None,
            "range": row.kind.range,
            "engines": list(row.engines),
            "flag": row.flag or None,
            "meaning": row.help,
        }
        for field, rows in TABLE.items() for row in rows
        for value, origin in [_given(settings, field, row)]
    ]  # fmt: skip


def _given(settings: Settings, field: str, row: Variable) -> tuple[Any, str]:
    """(what the row gives the field, where that comes from)."""
    if field in settings.flags:
        return getattr(settings, field), "flag"
    return (settings.given[row.name], "variable") if row.name in settings.given else (row.default, "default")


def _show(row: Variable, value: Any) -> str | None:
    return None if value is None else row.kind.show(value)


def _text(row: dict[str, Any]) -> str:
    flag = f", flag {row['flag']}" if row["flag"] else ""
    return (
        f"{row['name']} = {row['value'] or row['unset']}  ({row['origin']})\n"
        f"    {row['meaning']}\n"
        f"    default {row['default'] or row['unset']}; range {row['range']}; engines {', '.join(row['engines'])}{flag}"
    )
