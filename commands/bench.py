"""`coli bench`: what drafting is worth on this machine, this model and these prompts.

Order of work: whatever can be wrong without a model (arms, prompts, the picture's file) is checked first; then one
engine opens, every arm gets a session, and coli/bench measures. Ctrl-C ends the measuring, not the report: the table
shows what was measured, the exit code is 130. A difference in the output is exit code 6, after the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options, _speculation

if TYPE_CHECKING:
    from coli.bench.arms import Arm
    from coli.bench.measure import Sample
    from coli.bench.prompts import Prompt
    from coli.commands._output import Output
    from coli.engine import Engine
    from coli.settings import Settings


TERMINAL = "-"


class Form(StrEnum):
    """What stdout gets."""

    TABLE = "table"
    MD = "md"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


@dataclass(frozen=True)
class Plan:
    """What is measured and how it is shown. `named`: the user chose the arms. `plot` TERMINAL: bars on stdout; None:
    bars where that is a terminal."""

    prompts: list[Prompt]
    arms: list[Arm]
    named: bool
    repeats: int
    max_tokens: int
    temperature: float | None
    seed: int
    form: Form
    plot: Path | None
    color: bool


def bench(
    task: Annotated[
        list[str] | None,
        typer.Option("--task", metavar="NAME", help="A built-in prompt: chat, story, code, rename, repeat, json, or "
                     "prose (sampled, made to defeat drafts); may be repeated [all of them]."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt of your own; may be repeated.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option("--prompt-file", metavar="FILE", help="A prompt from a file; may be repeated.")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option("--arms", metavar="A,B,...", help="off; 1, 2, 3 (drafts of the MTP head; qwen36 up to 7); auto "
                     "(the gate's depth, and lookup); lookup; mtp+lookup (2 drafts, and lookup) [all of them]."),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Timed answers of each arm.")] = 5,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=2, help="Tokens of an answer at most.")
    ] = 128,
    temp: Annotated[
        float | None, typer.Option("--temp", metavar="T", help="Temperature of every prompt [0; prose 1].")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of every sampled answer.")] = 0,
    output: Annotated[
        Form,
        typer.Option("--output", help="Form of the result. The last line is one JSON document, but for csv, which "
                     "stays plain CSV."),
    ] = Form.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw a picture, .svg or .png (needs matplotlib); `-` draws bars "
                     "on stdout even when it is no terminal."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="TRACE", help="Measure nothing: say what each depth would have cost in a "
                     "trace of `coli run --trace`."),
    ] = None,
    mtp: _speculation.Mtp = None,
    mtp_vocab: _speculation.MtpVocab = None,
    mtp_vocab_ids: _speculation.MtpVocabIds = None,
    mtp_wiring: _speculation.MtpWiring = None,
    mtp_cap: _speculation.MtpCap = None,
    pmin: _speculation.Pmin = None,
    pstep: _speculation.Pstep = None,
    lookup_drafts: _speculation.LookupDrafts = None,
    gate: _speculation.Gate = None,
    model: _options.Model = None,
    ctx: _options.Ctx = None,
    cap: _options.Cap = None,
    ram: _options.Ram = None,
    threads: _options.Threads = None,
    trunk: _options.Trunk = None,
    experts: _options.Experts = None,
    quiet: _options.Quiet = False,
) -> None:  # fmt: skip
    """Measure decoding with and without drafts: arms in turn, on one loaded model.

    The table: tok/s is the median of the timed answers (lowest..highest), x off the median of the ratios to arm off
    in the same repeat, hits the share of drafts accepted by position, T(n) the time of a forward of n rows, same
    whether every answer had the tokens of arm off's first one. A difference ends with exit code 6.
    """
    from coli.commands._output import Output

    settings, warnings = _options.settings(
        model=model, ctx=ctx, cap=cap, ram=ram, threads=threads, trunk=trunk, experts=experts, mtp=mtp,
        mtp_vocab=mtp_vocab, mtp_vocab_ids=mtp_vocab_ids, mtp_wiring=mtp_wiring, mtp_cap=mtp_cap, mtp_pmin=pmin,
        mtp_pstep=pstep, lookup_drafts=lookup_drafts, gate=gate,
    )  # fmt: skip
    out = Output(quiet=quiet, color=not settings.no_color)
    out.lines(warnings)
    if replay is not None:
        _check_replay(task=task, prompt=prompt, prompt_file=prompt_file, plot=plot)
        _replay(replay, output, out, color=not settings.no_color)
        return
    from coli.bench.arms import parse

    plan = Plan(
        _prompts(task or [], prompt or [], prompt_file or []), parse(arms), arms is not None, repeat, max_tokens,
        temp, seed, output, plot, color=not settings.no_color,
    )  # fmt: skip
    _check(plan)
    code = _measure(plan, settings, out)
    if code:
        raise typer.Exit(code)


def _check_replay(**measuring: Any) -> None:
    from coli.errors import UsageError

    for name, value in measuring.items():
        if value:
            raise UsageError("goes with measuring, --replay measures nothing", f"--{name.replace('_', '-')}",
                             "give one of the two")  # fmt: skip


def _prompts(tasks: list[str], texts: list[str], files: list[Path]) -> list[Prompt]:
    from coli.bench.prompts import choose
    from coli.commands._prompt import text_in, text_of
    from coli.errors import UsageError

    given = [(text_of(text, "--prompt"), "--prompt") for text in texts]
    given += [(text_in(file, "--prompt-file"), f"--prompt-file {file}") for file in files]
    for text, where in given:
        if not text.strip():
            raise UsageError("the prompt is empty", where, "give some text")
    return choose(tasks, [text for text, _ in given])


def _check(plan: Plan) -> None:
    """What would fail after the measuring is found before it."""
    from coli.bench import figure
    from coli.commands._output import check_file
    from coli.errors import UsageError
    from coli.sampling import Sampling

    try:
        Sampling(temperature=plan.temperature or 0.0, seed=plan.seed)
    except UsageError as error:
        raise UsageError(error.what, {"temperature": "--temp"}.get(error.where, "--seed"), error.hint) from error
    if str(plan.plot) == TERMINAL and plan.form != Form.TABLE:
        raise UsageError(f"bars go with the table, not with {plan.form.value}", "--plot -", "give a file")
    if plan.plot is not None and str(plan.plot) != TERMINAL:
        figure.check(plan.plot)
        check_file(plan.plot, "--plot")


def _measure(plan: Plan, settings: Settings, out: Output) -> int:
    """Open the engine, measure, print; returns the exit code. Raises CheckFailed after a difference was printed."""
    from coli.bench.arms import BASELINE, baseline, opening, runnable
    from coli.bench.environment import environment
    from coli.engine import Engine
    from coli.settings import MOST_DRAFTS

    engine = Engine.open(opening(settings, plan.arms), on_progress=out.progress)
    try:
        out.done()
        if settings.model is None:
            out.note(_options.NO_MODEL)
        out.lines(engine.notes)
        engine.say = out.note
        out.note(engine.banner())
        settings = settings.resolve(engine.name)  # the user's: those of the engine hold what the arms need
        arms, notes = runnable(
            plan.arms, named=plan.named, head=engine.head is not None, most=MOST_DRAFTS[engine.name]
        )
        out.lines(notes)
        if (against := baseline(arms)) != BASELINE:
            out.note(f"arm {BASELINE} is not measured: ratios are against arm {against}")
        if engine.chat is None and not all(prompt.raw for prompt in plan.prompts):
            out.note("the model has no chat template: the prompts are sent as they are")
        block = environment(engine, settings)
        samples, code = _samples(plan, arms, settings, engine, out)
    finally:
        engine.close()
    _show(plan, samples, against, block, out, complete=not code)
    return code


def _samples(
    plan: Plan, arms: list[Arm], settings: Settings, engine: Engine, out: Output
) -> tuple[list[Sample], int]:
    """(what was measured, exit code of the signal that cut it short or 0)."""
    from coli.bench.measure import Bench
    from coli.bench.prompts import request
    from coli.commands._signals import cancelling
    from coli.session import Session
    from coli.speculation.options import Speculation

    drafting = {arm.name: arm.speculation(Speculation.of(settings)) for arm in arms}
    requests = {
        prompt.name: request(prompt, engine, max_tokens=plan.max_tokens, temperature=plan.temperature, seed=plan.seed)
        for prompt in plan.prompts
    }
    state = engine.model.new_state()  # one for all arms, as they answer in turn: the budget knows one
    bench = Bench(
        drafting, lambda arm, trace: Session(engine, drafting[arm], trace=trace, state=state), requests, plan.repeats
    )
    with cancelling(bench.cancel) as caught:
        bench.run(out.progress)
    out.done()
    return bench.samples, int(caught[0]) if caught else 0


def _show(
    plan: Plan, samples: list[Sample], baseline: str, block: dict[str, Any], out: Output, *, complete: bool
) -> None:
    """Print the result. Raises CheckFailed, after that, when an answer differed."""
    from coli.bench import figure, render
    from coli.bench.environment import lines
    from coli.bench.summary import contests, summarise
    from coli.commands import _bench_view as view
    from coli.errors import CheckFailed

    rows = summarise(samples, baseline)
    found = contests(rows)
    differing = [render.difference(row) for row in rows if row.difference is not None]
    records = {Form.CSV: render.flat, Form.JSONL: render.record}.get(plan.form, render.cells)
    out.text(
        view.result(
            plan.form,
            [records(row) for row in rows],
            render.document(rows, found, block, complete=complete),
            before=lines(block),
            after=[*map(render.contest, found), *differing],
            bars=rows if _bars(plan) else (),
            color=plan.color,
        )
    )
    if plan.plot is not None and str(plan.plot) != TERMINAL:
        title = f"coli bench: {block['model']['name']}, {block['threads']} threads, {block['cpu']}"
        plan.plot.write_bytes(figure.draw(rows, title, plan.plot.suffix.lower().lstrip(".")))
        out.note(f"picture in {plan.plot}")
    if differing and complete:
        raise CheckFailed(differing[0], "coli bench", "drafts must not change the output: this is a fault of coli")


def _bars(plan: Plan) -> bool:
    import sys

    return plan.form == Form.TABLE and (str(plan.plot) == TERMINAL or sys.stdout.isatty())


def _replay(trace: Path, form: Form, out: Output, *, color: bool) -> None:
    """The table of a trace, with no model at all."""
    from dataclasses import asdict

    from coli.bench import render
    from coli.commands import _bench_view as view
    from coli.trace import most, read, replay

    header, records = read(trace)
    rows = replay(records, head=most(header))
    people = form in (Form.TABLE, Form.MD)
    document = {"kind": "replay", "trace": str(trace), "header": header, "forwards": len(records),
                "rows": [asdict(row) for row in rows]}  # fmt: skip
    before = render.replayed(header, records)
    shown = [render.replay_cells(row) if people else asdict(row) for row in rows]
    out.text(view.result(form, shown, document, before=before, color=color))
