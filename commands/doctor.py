"""`coli doctor`: what is wrong with a model or with this machine, and what to do about it. Nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from coli.commands import _options

if TYPE_CHECKING:
    from coli.doctor.finding import Finding, Report


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A checkpoint folder, a .gguf file or a Hugging Face id.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every header, and every file that has a checksum listed.")
    ] = False,
    json: _options.Json = False,
) -> None:
    """Check the model, the settings and this machine. Exit codes: 0 ok, 1 something is wrong, 2 no model."""
    from coli.commands._output import Output
    from coli.settings import load_sound

    settings, warnings, refused = load_sound({"model": model})
    out = Output(color=not settings.no_color)
    if settings.model is None:
        out.note(_options.NO_MODEL)
    from coli.doctor.examine import examine
    from coli.doctor.finding import Patient

    report = examine(Patient(settings, deep=deep, say=out.progress, refused=tuple(refused), warnings=tuple(warnings)))
    out.done()
    if json:
        out.document(report.to_json())
    else:
        out.text("\n".join([*map(_line, report.findings), _verdict(report)]))
    raise typer.Exit(report.exit_code)


def _line(finding: Finding) -> str:
    from coli.commands._errors import printable

    hint = f" ({finding.hint})" if finding.hint and finding.status != "ok" else ""
    return f"{finding.status:<6}{finding.check:<13}{printable(finding.what + hint)}"


def _verdict(report: Report) -> str:
    from coli.report import count

    skipped = f"; not possible: {', '.join(report.skipped)}" if report.skipped else ""
    return f"{count(report.count('error'), 'error')}, {count(report.count('warn'), 'warning')}{skipped}"
