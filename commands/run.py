"""`coli run`: one prompt in, one answer out.

Order of work: everything that can be wrong without a model (flags, variables, prompt, output file) is checked first,
then the engine opens, then the answer streams. Ctrl-C and SIGTERM end the answer, not the report: the text so far
stays, the exit code says what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options
from coli.errors import Exit, UsageError

if TYPE_CHECKING:
    from coli.commands._output import Output
    from coli.engine import Engine
    from coli.report import RunReport
    from coli.sampling import Sampling
    from coli.session import Request
    from coli.settings import Settings

@dataclass(frozen=True)
class Ask:
    """What is asked, before a tokenizer has seen it."""

    prompt: str
    raw: bool
    system: str | None
    think: bool | None
    effort: str | None
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Sampling


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt; `-` or a pipe is read from stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")] = None,
    model: _options.Model = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens at most [what the context holds].")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="Let the model think first [as its template says].")
    ] = None,
    effort: Annotated[
        str | None, typer.Option("--effort", metavar="WORD", help="How hard to think, for templates that ask.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    temp: Annotated[float, typer.Option("--temp", metavar="T", help="Temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", metavar="K", help="Likeliest tokens only; 0 is all.")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", metavar="P", help="Least share of the top token's chance.")
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option("--repetition-penalty", metavar="X", help="1 is none.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty", metavar="X", help="0 is none.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", metavar="X", help="0 is none.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of the sampler.")] = None,
    ctx: _options.Ctx = None,
    cap: _options.Cap = None,
    ram: _options.Ram = None,
    threads: _options.Threads = None,
    json: _options.Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result to a file, not to stdout.")
    ] = None,
    quiet: _options.Quiet = False,
) -> None:
    """Answer one prompt. The text goes to stdout, everything else to stderr."""
    from coli.commands._output import Output
    from coli.commands._prompt import gather, text_of

    settings, warnings = _options.settings(model=model, ctx=ctx, cap=cap, ram=ram, threads=threads)
    out = Output(quiet=quiet, color=not settings.no_color, file=output)
    out.lines(warnings)
    sampling = _sampling(
        temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    _check_template_flags(raw, system=system, think=think, effort=effort)
    for text in stop or ():
        if not text:
            raise UsageError("an empty text stops every answer", "--stop", "give the text to end before")
        text_of(text, "--stop")
    if system is not None:
        text_of(system, "--system")
    prompt = gather(words or [], file, raw=raw, note=out.note)
    ask = Ask(prompt, raw, system, think, effort, max_tokens, tuple(stop or ()), sampling)
    code = _answer(ask, settings, out, as_json=json)
    if code:
        raise typer.Exit(code)


def _sampling(**values: Any) -> Sampling:
    """The sampler's settings; what it refuses is said in terms of the flag."""
    from coli.sampling import Sampling

    try:
        return Sampling(**values)
    except UsageError as error:
        flag = {"temperature": "temp"}.get(error.where, error.where).replace("_", "-")
        raise UsageError(error.what, f"--{flag}", error.hint) from error


def _check_template_flags(raw: bool, **flags: Any) -> None:
    given = [f"--{name}" for name, value in flags.items() if value is not None]
    if raw and given:
        raise UsageError("goes into the chat template, which --raw leaves out", given[0], "give one of the two")


def _answer(ask: Ask, settings: Settings, out: Output, *, as_json: bool) -> int:
    """Open the engine, stream the answer, print the report; returns the exit code."""
    from coli.engine import Engine

    engine = Engine.open(settings, on_progress=out.progress)
    try:
        out.done()
        if settings.model is None:
            out.note(_options.NO_MODEL)
        out.lines(engine.notes)
        out.note(engine.banner())
        report, code = _generate(engine, request(ask, engine, out), out, stream=not as_json)
        out.document(report.to_json()) if as_json else out.text(report.text, streamed=True)
        out.lines(report.lines())
        return code
    finally:
        engine.close()


def _generate(engine: Engine, asked: Request, out: Output, *, stream: bool) -> tuple[RunReport, int]:
    from coli.commands._signals import cancelling
    from coli.session import Session

    session = Session(engine)
    try:
        with cancelling(session.cancel) as caught:
            for piece in session.generate(asked):
                if stream:
                    out.piece(piece)
    except Exception:
        out.end_line()
        raise
    report = session.report
    assert report is not None, "a session has a report once its iterator has ended"
    cut = bool(caught) and report.finish_reason == "cancelled"
    return report, int(caught[0] if cut else Exit.OK)


def request(ask: Ask, engine: Engine, out: Output) -> Request:
    """The engine's request: the prompt in the checkpoint's chat form, or as it is."""
    from coli.session import Request

    text = ask.prompt
    if engine.chat is None and not ask.raw:
        for flag, value in (("--system", ask.system), ("--think", ask.think), ("--effort", ask.effort)):
            if value is not None:
                raise UsageError("the model has no chat template to put it in", flag, "put it into the prompt")
        out.note("the model has no chat template: the prompt is sent as it is")
    elif engine.chat is not None and not ask.raw:
        messages = [{"role": "system", "content": ask.system}] if ask.system is not None else []
        messages.append({"role": "user", "content": ask.prompt})
        for flag, value, name in (
            ("--think", ask.think, "enable_thinking"), ("--effort", ask.effort, "reasoning_effort")
        ):  # fmt: skip
            if value is not None and name not in engine.chat.reads:
                out.note(f"{flag} has no effect: the model's chat template does not read {name}")
        text = engine.chat.render(messages, thinking=ask.think, effort=ask.effort)
    return Request(
        prompt_ids=tuple(engine.tokenizer.encode(text)),
        max_tokens=ask.max_tokens,
        sampling=ask.sampling,
        stop=ask.stop,
    )
