"""`coli env`: the table of variables with what a run would use now, and where each value comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coli.commands import _options

if TYPE_CHECKING:
    from coli.settings import Settings


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
    rows = list(map(_plain, table(settings)))
    if json:
        out.document(rows)
    else:
        out.text("\n".join(_text(row) for row in rows))


def table(settings: Settings) -> list[dict[str, Any]]:
    """One row a variable, values as the table's own objects."""
    from coli.settings import TABLE, Settings

    blank = Settings()
    return [
        {
            "name": row.name,
            "value": row.shown(getattr(settings, field)),
            "origin": settings.origin(field),
            "default": row.shown(getattr(blank, field)),
            "range": row.kind.range,
            "engines": row.engines,
            "flag": row.flag or None,
            "meaning": row.help,
        }
        for field, row in TABLE.items()
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "engines": list(row["engines"])}


def _text(row: dict[str, Any]) -> str:
    flag = f", flag {row['flag']}" if row["flag"] else ""
    return (
        f"{row['name']}={row['value']}  ({row['origin']})\n"
        f"    {row['meaning']}\n"
        f"    default {row['default']}; range {row['range']}; engines {', '.join(row['engines'])}{flag}"
    )
