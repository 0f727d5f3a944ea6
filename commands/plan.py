"""`coli plan`: would a model fit, what would take the memory, and how fast would it be? From headers, in a moment.

Nothing is loaded or compiled: a survey of the headers (of a bare config.json: of the tensors it implies), the plan that
a run would follow (coli/planning/plan.py), and a prediction from what `--probe` once measured here. The answer goes to
stdout whether the model fits or not; where no budget is enough, stderr says what is missing and the exit code is 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options, _speculation
from coli.server.options import ServeOptions

if TYPE_CHECKING:
    from pathlib import Path

    from coli.commands._output import Output
    from coli.planning.plan import Sequences
    from coli.planning.probe import Measured
    from coli.planning.report import Asked
    from coli.planning.survey import Survey
    from coli.settings import Settings


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint folder, a .gguf file, a Hugging Face id, or the "
                       "config.json of a model that is not here."),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option("--ram", metavar="GB[,GB...]", help="Memory budget; several make a table [0.88 of what is free]."),
    ] = None,
    ctx: _options.Ctx = None,
    threads: _options.Threads = None,
    cap: _options.Cap = None,
    mtp: _speculation.Mtp = None,
    drafts: _speculation.Drafts = None,
    mtp_cap: _speculation.MtpCap = None,
    lookup: _speculation.Lookup = None,
    trunk: _options.Trunk = None,
    experts: _options.Experts = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="FORMAT", help="Of a bare config.json: the format that the weights would "
                     "have: bf16, fp8, q8_0, q4_0, q4_k_m, int4-g64 [as the config says]."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", metavar="N", min=1, max=16, help="Plan for `coli serve` with these slots.")
    ] = None,
    snapshots: Annotated[
        int | None, typer.Option("--snapshots", metavar="N", min=0, help="States of prefixes and pins that are kept "
                                 f"in all [0; {ServeOptions.checkpoints + ServeOptions.pins} a slot of a server].")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure disk and memory now, about two seconds, and keep the figures.")
    ] = False,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the share in memory and tok/s of every budget as bars.")
    ] = False,
    json: _options.Json = False,
    quiet: _options.Quiet = False,
) -> None:  # fmt: skip
    """Say what a model takes of a memory budget, and how fast it would decode. No weights are read.

    tok/s is for plain decoding, without drafts, from the speeds that --probe measured. Exit code 4 when none of the
    budgets is enough; with several of which some are, 0.
    """
    from coli.commands._output import Output
    from coli.errors import UsageError
    from coli.planning.report import report

    if plot and json:
        raise UsageError("draws on stdout, where --json puts its document", "--plot", "give one of the two")
    budgets = _budgets(ram)
    settings, warnings = _options.settings(
        model=model, ram=budgets[0] / 1e9 if budgets else None, ctx=ctx, threads=threads, cap=cap, mtp=mtp,
        drafts=drafts, mtp_cap=mtp_cap, lookup=lookup, trunk=trunk, experts=experts,
    )  # fmt: skip
    out = Output(quiet=quiet, color=not settings.no_color)
    out.lines(warnings)
    if settings.model is None:
        out.note(_options.NO_MODEL)
    document = report(_asked(settings, budgets, weights, _sequences(slots, snapshots), out, measure=probe))
    if json:
        out.document(document)
    else:
        from coli.commands import _plan_view

        out.text(_plan_view.text(document, plot=plot, color=not settings.no_color))
    _end(document)


def _budgets(ram: str | None) -> list[int]:
    """Bytes of every budget named, each once. Raises UsageError."""
    from coli.errors import UsageError
    from coli.kinds import Gigabytes

    if ram is None:
        return []
    try:
        return list(dict.fromkeys(Gigabytes().parse(part) for part in ram.split(",")))
    except ValueError:
        hint = f"give {Gigabytes().range}, or several with commas between"
        raise UsageError(f"{ascii(ram)} is out of range", "--ram", hint) from None


def _sequences(slots: int | None, snapshots: int | None) -> Sequences:
    """Without `slots` those of a run."""
    from coli.planning.plan import Sequences

    if slots is None:
        return Sequences(snapshots=snapshots or 0)
    return Sequences.served(slots) if snapshots is None else Sequences(slots, snapshots, server=True)


def _asked(
    settings: Settings, budgets: list[int], weights: str | None, sequences: Sequences, out: Output, *, measure: bool
) -> Asked:
    """What the report is asked, the model surveyed and the machine measured (or what was kept of it)."""
    from coli import memory
    from coli.planning import probe
    from coli.planning.header_cache import surveyed
    from coli.planning.report import Asked
    from coli.program.cpu import default_threads
    from coli.settings import no_effect
    from coli.speculation.options import idle

    path, bare = _find(settings.model, weights)
    survey = surveyed(path, settings, weights)
    settings = settings.resolve(survey.engine)
    out.lines(no_effect(settings, survey.engine))
    out.lines(idle(settings, head=survey.head is not None and settings.mtp is not False))
    threads = settings.threads or default_threads()
    measured, notes = probe.kept(settings.cache_dir, path, record=survey.record, threads=threads)
    if measure:
        new = _probe(path, survey, settings, out, threads=threads, bare=bare)
        measured = probe.Measured(new.memory, new.disk or measured.disk)
    else:
        out.lines(notes)
    return Asked(
        survey=survey, settings=settings, budgets=budgets or [settings.ram or memory.default_budget()],
        imagined=(weights or "config") if bare else "", sequences=sequences, measured=measured, threads=threads,
        avx512=settings.simd and probe.avx512(),
    )  # fmt: skip


def _find(model: str | None, weights: str | None) -> tuple[Path, bool]:
    """(where the model lies, whether only its config is there). Raises ModelError, and UsageError for `weights` of a
    model whose weights are there."""
    import os
    from pathlib import Path

    from coli.errors import UsageError
    from coli.formats.imagined import is_bare
    from coli.models.find import find

    config = os.path.expanduser(model or "")
    path = Path(config) if config.endswith(".json") and os.path.isfile(config) else find(model)
    bare = is_bare(path)
    if weights is not None and not bare:
        raise UsageError("the model's weights are there, in the format that they have", "--weights",
                         "leave it out, or give a bare config.json")  # fmt: skip
    return path, bare


def _probe(path: Path, survey: Survey, settings: Settings, out: Output, *, threads: int, bare: bool) -> Measured:
    """Measure memory, and the disk the model lies on, and keep the figures; what cannot be done is said."""
    from coli.errors import ColiError
    from coli.formats.readers import reading_threads
    from coli.planning import probe

    out.progress("measuring memory")
    memory, disk = probe.memory(threads), None
    if bare:
        out.note("the disk is not measured: there are no weights to read yet")
    elif survey.slots:
        out.progress("measuring the disk")
        try:
            disk = probe.disk(path, record=survey.record, threads=reading_threads(threads))
        except ColiError as error:
            out.note(f"the disk is not measured: {error}")
    out.done()
    measured = probe.Measured(memory, disk)
    try:
        probe.keep(settings.cache_dir, measured)
    except ColiError as error:
        out.note(f"what was measured is not kept: {error}")
    return measured


def _end(document: dict[str, Any]) -> None:
    """Raise DoesNotFit where no budget is enough."""
    from coli.errors import DoesNotFit
    from coli.planning.plan import enough
    from coli.report import size

    rows = document["plans"]
    if any(row["fits"] for row in rows):
        return
    if len(rows) == 1:
        raise DoesNotFit(rows[0]["why"], "RAM_GB" if rows[0]["origin"] == "variable" else "--ram", rows[0]["hint"])
    least = document["needs"]["least_bytes"]
    raise DoesNotFit(f"none of the {len(rows)} budgets holds the model, which needs at least {size(least)}", "--ram",
                     f"give --ram {enough(least)}")  # fmt: skip
