"""`coli warmup`: compile every kernel that any model can need now, so that no later run waits for it."""

from __future__ import annotations

from coli.commands import _options


def warmup(
    json: _options.Json = False,
    quiet: _options.Quiet = False,
) -> None:
    """Compile the kernels ahead and keep them in the cache folder."""
    from dataclasses import asdict

    from coli.commands._output import Output

    settings, warnings = _options.settings()
    out = Output(quiet=quiet, color=not settings.no_color)
    out.lines(warnings)
    from coli.program import cache

    report = cache.warmup(settings, on_progress=out.progress)
    out.done()
    if json:
        out.document(asdict(report))
    else:
        done = f"{report.compiled} kernels compiled, {report.reused} already there, {report.seconds:.1f} s"
        out.text(f"{done}: {report.folder}")
