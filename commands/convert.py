"""`coli convert`: a checkpoint's routed experts as int4 or int8, in a folder that coli runs from.

On a terminal a bar runs, elsewhere every file is a line. Ctrl-C leaves what is finished; the same command goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coli.commands import _options
from coli.errors import UsageError

if TYPE_CHECKING:
    from coli.commands._output import Output
    from coli.convert.report import Progress

_THREADS = 2  # one quantises while the other reads; more help on fast disks


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A bf16 or FP8 checkpoint folder, or a .gguf file.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder; for Qwen3.8 SRC itself will do.")],
    ebits: Annotated[int, typer.Option("--ebits", metavar="4|8", help="Bits of a routed expert's weight.")] = 4,
    group_size: Annotated[
        int, typer.Option("--group-size", metavar="N", help="Inputs that share a scale: 32, 64, 128, or 0 for a row.")
    ] = 64,
    threads: Annotated[
        int, typer.Option("--threads", metavar="N", min=1, max=256, help="Threads that quantise.")
    ] = _THREADS,
    json: _options.Json = False,
    quiet: _options.Quiet = False,
) -> None:
    """Convert a model's routed experts to integers, once. Given again after an interruption it goes on."""
    from coli.commands._output import Output
    from coli.commands._signals import Terminated

    settings, warnings = _options.settings()
    out_lines = Output(quiet=quiet, color=not settings.no_color)
    out_lines.lines(warnings)
    from coli.convert.convert import convert as run
    from coli.convert.report import Options
    from coli.models.find import find

    if not out.strip():
        raise UsageError("names no folder", "OUT", "give the folder to write")
    options = Options(ebits, group_size)
    path = find(source)
    try:
        with _shown(out_lines) as show:
            report = run(path, Path(out), options, threads=threads, on_progress=show)
    except (KeyboardInterrupt, Terminated):
        out_lines.note(f"stopped; what is finished in {out} stays, and the same command goes on from there")
        raise
    if json:
        out_lines.document(report.to_json())
    else:
        out_lines.text("\n".join(report.lines()))


@contextmanager
def _shown(out: Output) -> Iterator[Callable[[Progress], None]]:
    """Where progress goes: a bar on a terminal, a line a file elsewhere, nowhere under --quiet."""
    if out.quiet or not out.terminal:
        label = ""

        def line(progress: Progress) -> None:
            nonlocal label
            if progress.label != label:
                label = progress.label
                out.note(f"{label} ({100 * progress.done / max(progress.total, 1):.0f} %)")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("converting", total=None)

        def advance(progress: Progress) -> None:
            bar.update(task, description=progress.label, completed=progress.done, total=progress.total)

        yield advance
