"""`coli run`: one prompt in, one answer out.

Order of work: everything that can be wrong without a model (flags, variables, prompt, files) is checked first, then the
engine opens, then the answer streams. Ctrl-C and SIGTERM end the answer, not the report: the text so far stays, the
exit code says what happened.
Two ways to have the answer proved: `--check` decodes it once more without drafts, `--reference` answers the prompt of a
file and compares. A difference is a CheckFailed after everything else has been said.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options, _speculation
from coli.commands._model_flags import model_flags
from coli.errors import CheckFailed, Exit, UsageError

if TYPE_CHECKING:
    from coli.check import Difference, Floats
    from coli.commands._output import Output
    from coli.engine import Engine
    from coli.planning.measured import MemoryReport
    from coli.reference import Comparison, Reference
    from coli.report import RunReport
    from coli.sampling import Sampling
    from coli.session import Request
    from coli.settings import Settings
    from coli.trace import Writer


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


@dataclass(frozen=True)
class Form:
    """What becomes of the answer: one document or text, a trace of its forwards, a second run without drafts; whether
    its memory is told."""

    as_json: bool
    trace: Path | None
    check: bool
    memory: bool


@dataclass(frozen=True)
class Answer:
    """What a session leaves of its answer; `code` is the exit code of the signal that cut it short, or OK."""

    report: RunReport
    picked_ids: tuple[int, ...]
    last_logits: Floats | None
    seed: int | None
    code: int
    memory: MemoryReport | None


@model_flags
def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt; `-` or a pipe is read from stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="Read the prompt from a file.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens at most [what the context holds].")
    ] = None,
    system: _options.System = None,
    think: _options.Think = None,
    effort: _options.Effort = None,
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
    flags: Any = None,
    trace: _speculation.Trace = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Say what memory was planned for and what it came to.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Decode again without drafts and compare: exit 6.")] = False,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="Answer the prompt of a reference and compare: exit 6."),
    ] = None,
    json: _options.Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result to a file, not to stdout.")
    ] = None,
    quiet: _options.Quiet = False,
) -> None:
    """Answer one prompt. The text goes to stdout, everything else to stderr."""
    from coli.commands._output import Output, check_file

    settings, warnings = _options.settings(**flags)
    out = Output(quiet=quiet, color=not settings.no_color, file=output)
    out.lines(warnings)
    if trace is not None:
        check_file(trace, "--trace")
        if output is not None and trace.resolve() == output.resolve():
            raise UsageError("is the --output file as well", f"--trace {trace}", "give two files")
    sampling = sampling_of(
        temperature=temp, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    ask = Ask("", raw, system, think, effort, max_tokens, tuple(stop or ()), sampling)
    _speculation.check_force(settings, reference=reference is not None)
    asked: Ask | Reference
    asked = _reference(reference, words, file, ask) if reference else _question(ask, words or [], file, out)
    code = _answer(asked, settings, out, Form(json, trace, check, memory))
    if code:
        raise typer.Exit(code)


def _question(ask: Ask, words: list[str], file: Path | None, out: Output) -> Ask:
    """`ask` with its prompt. Raises UsageError for what is wrong with either."""
    from coli.commands._prompt import gather, text_of

    _check_template_flags(ask.raw, system=ask.system, think=ask.think, effort=ask.effort)
    for text in ask.stop:
        if not text:
            raise UsageError("an empty text stops every answer", "--stop", "give the text to end before")
        text_of(text, "--stop")
    if ask.system is not None:
        text_of(ask.system, "--system")
    return replace(ask, prompt=gather(words, file, raw=ask.raw, note=out.note))


def _reference(path: Path, words: list[str] | None, file: Path | None, ask: Ask) -> Reference:
    """The reference to answer. Raises UsageError where something else says what to answer, or how."""
    from coli.reference import Reference
    from coli.sampling import Sampling

    others = {
        "a prompt": words, "--file": file, "--raw": ask.raw, "--system": ask.system is not None,
        "--think": ask.think is not None, "--effort": ask.effort is not None, "--max-tokens": ask.max_tokens,
        "--stop": ask.stop, "sampling": ask.sampling != Sampling(),
    }  # fmt: skip
    given = next((name for name, value in others.items() if value), None)
    if given is not None:
        raise UsageError(f"brings its own prompt and is answered greedily, to its last token, so {given} cannot be "
                         "given", "--reference", "give one of the two")  # fmt: skip
    return Reference.load(path)


def sampling_of(**values: Any) -> Sampling:
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


def _answer(asked: Ask | Reference, settings: Settings, out: Output, form: Form) -> int:
    """Open the engine, stream the answer, print reports and proofs; returns the exit code."""
    from coli.engine import Engine
    from coli.speculation.options import Speculation
    from coli.trace import Writer

    with ExitStack() as opened:
        trace = opened.enter_context(Writer(form.trace)) if form.trace is not None else None
        engine = Engine.open(settings, on_progress=out.progress)
        opened.callback(engine.close)
        out.done()
        if settings.model is None:
            out.note(_options.NO_MODEL)
        out.lines(engine.notes)
        out.note(engine.banner())
        engine.say = out.note
        if trace is not None:
            trace.start(model=engine.model_path.name, engine=engine.name, threads=engine.threads,
                        speculation=Speculation.of(engine.settings))  # fmt: skip
        if isinstance(asked, Ask):
            code = _one(engine, request(asked, engine, out), out, form, trace)
        else:
            asked.fit(engine.geometry.vocab, engine.ctx)
            code = _one(engine, asked.request(), out, form, trace, asked)
        out.lines(engine.save_history())
        return code


def _one(
    engine: Engine, asked: Request, out: Output, form: Form, trace: Writer | None, reference: Reference | None = None
) -> int:
    """One answer with its proofs. Raises CheckFailed when one of them fails."""
    from coli.commands._memory_view import lines as memory_lines

    answer = _generate(engine, asked, out, form, trace, reference)
    report = answer.report
    if not form.as_json and reference is None:
        out.text(report.text, streamed=True)
    out.lines(report.lines())
    document, compared, difference = report.to_json(), None, None
    if answer.memory is not None:
        out.lines(memory_lines(answer.memory))
        document["memory"] |= answer.memory.to_json()
    if reference is not None:
        compared = _compare(engine, asked, answer, reference)
        document["reference"] = compared.to_json()
    if form.check:
        difference = _check(engine, asked, answer, out)
        document["check"] = {"tokens": len(answer.picked_ids), "difference": difference and difference.to_json()}
    if form.as_json:
        out.document(document)
    elif compared is not None:
        out.text("\n".join(compared.lines()))
    if difference is not None:
        raise CheckFailed(str(difference), "--check")
    if reference is not None and compared is not None and not compared.same and not answer.code:
        raise CheckFailed(f"the answer is another: {compared.failure}", reference.path)
    return answer.code


def _generate(
    engine: Engine, asked: Request, out: Output, form: Form, trace: Writer | None, reference: Reference | None
) -> Answer:
    from coli.commands._signals import cancelling
    from coli.planning.measured import measured
    from coli.session import Session

    session = Session(engine, trace=trace, reference=None if reference is None else reference.full_ids)
    try:
        with cancelling(session.cancel) as caught:
            for piece in session.generate(asked):
                if not form.as_json and reference is None:
                    out.piece(piece)
    except Exception:
        out.end_line()
        raise
    report = session.report
    assert report is not None, "a session has a report once its iterator has ended"
    cut = bool(caught) and report.finish_reason == "cancelled"
    # a copy: the next session of the engine computes into the same buffers
    logits = None if session.last_logits is None else session.last_logits.copy()
    return Answer(report, session.picked_ids, logits, session.seed, int(caught[0] if cut else Exit.OK),
                  measured(engine, session) if form.memory else None)  # fmt: skip


def _check(engine: Engine, asked: Request, answer: Answer, out: Output) -> Difference | None:
    from coli.check import check
    from coli.report import count

    tokens = count(len(answer.picked_ids), "token")
    out.progress("check: decoding again without drafts")
    difference = check(engine, asked, answer.picked_ids, answer.last_logits, answer.seed)
    out.done()
    if difference is None:
        out.note(f"check: {tokens} and the last logits are those of plain decoding")
    return difference


def _compare(engine: Engine, asked: Request, answer: Answer, reference: Reference) -> Comparison:
    from coli.check import replay
    from coli.reference import compare

    return compare(reference, answer.picked_ids, answer.last_logits,
                   lambda position: replay(engine, asked, position + 1)[1])  # fmt: skip


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
