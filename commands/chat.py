"""`coli chat`: a conversation with a model, in this process or behind a server.

Who answers is decided before anything is opened, and said:
    --url, or COLI_URL without a flag about the model    that server, or an error
    a flag or a variable that names a model              this process
    nothing of these                                     the coli server of this machine at its default port, where one
                                                         answers, else this process
A person at a terminal gets an editor and Markdown; a pipe is a script: a line a turn, answers on stdout, all else on
stderr (`-i` treats it as a person).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options
from coli.commands._errors import printable
from coli.commands._model_flags import model_flags
from coli.errors import UsageError

if TYPE_CHECKING:
    from coli.client import Address
    from coli.commands._chat_loop import Reader
    from coli.commands._output import Output
    from coli.conversation import Conversation, Partner, Wishes
    from coli.settings import Settings

LOCAL = "http://127.0.0.1:8000/v1"


@model_flags
def chat(
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help=f"A server's address, such as {LOCAL} [one that runs].")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", metavar="KEY", help="For the server; COLI_API_KEY keeps it out of `ps`.")
    ] = None,
    system: _options.System = None,
    think: _options.Think = None,
    effort: _options.Effort = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens of an answer at most.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End an answer before it; may be repeated.")
    ] = None,
    temp: Annotated[
        float | None, typer.Option("--temp", metavar="T", help="Temperature; 0 is greedy [the model's own].")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", help="Nucleus sampling.")] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Likeliest tokens only; 0 is all.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", metavar="P", help="Least share of the top token's chance.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", metavar="X", help="1 is none.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option("--presence-penalty", metavar="X", help="0 is none.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option("--frequency-penalty", metavar="X", help="0 is none.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Seed of every answer's sampler.")] = None,
    flags: Any = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="A person reads and writes, also where it looks like a pipe.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document an answer.")] = False,
    quiet: _options.Quiet = False,
) -> None:  # fmt: skip
    """Talk with a model: one that a server runs, or one of its own. /help lists what else can be said."""
    from coli.commands._output import Output
    from coli.conversation import Conversation

    settings, warnings = _options.settings(**flags, url=url, api_key=api_key)
    out = Output(quiet=quiet, color=not settings.no_color)
    out.lines(warnings)
    wishes = _wishes(
        max_tokens=max_tokens, stop=tuple(stop) if stop else None, effort=effort, temperature=temp, top_p=top_p,
        top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, seed=seed,
    )  # fmt: skip
    conversation = Conversation(_valid(system, "--system"), think)
    with _partner(settings, wishes, out) as partner:
        code = _talk(conversation, partner, out, interactive=interactive, as_json=json, color=not settings.no_color)
    if code:
        raise typer.Exit(code)


def _wishes(**given: Any) -> Wishes:
    """What the flags ask for. Raises UsageError for one that no model takes."""
    from coli.chat import EFFORTS
    from coli.commands.run import sampling_of
    from coli.conversation import Wishes

    plain = ("max_tokens", "stop", "effort")
    if sampling := {name: value for name, value in given.items() if value is not None and name not in plain}:
        sampling_of(**sampling)
    for text in given["stop"] or ():
        if not _valid(text, "--stop"):
            raise UsageError("an empty text stops every answer", "--stop", "give the text to end before")
    if given["effort"] not in (None, *EFFORTS):
        raise UsageError(f"{given['effort']!r} is no effort", "--effort", f"choose from {', '.join(EFFORTS)}")
    return Wishes(**given)


def _valid(text: str | None, flag: str) -> str | None:
    from coli.commands._prompt import text_of

    return None if text is None else text_of(text, flag)


# ---- who answers -----------------------------------------------------------------------------------------------------


@contextmanager
def _partner(settings: Settings, wishes: Wishes, out: Output) -> Iterator[Partner]:
    """The server or the engine, open."""
    from coli.client import Server

    address = _address(settings, out)
    with ExitStack() as opened:
        if address is not None:
            server = Server.open(address, settings.api_key, wishes, out.progress)
            out.done()
            out.note(printable(f"coli chat: {server.model} at {address}"))
            yield server
            return
        from coli.engine import Engine
        from coli.own_engine import CHECKPOINTS, OwnEngine

        engine = Engine.open(settings, on_progress=out.progress, snapshots=CHECKPOINTS)
        opened.callback(engine.close)
        out.done()
        if settings.model is None:
            out.note(_options.NO_MODEL)
        out.lines(engine.notes)
        out.note(engine.banner())
        yield OwnEngine(engine, wishes)
        out.lines(engine.save_history())


def _address(settings: Settings, out: Output) -> Address | None:
    """Where to ask, None for an engine of our own. Raises UsageError for a server and a model at once."""
    from coli.client import Address, is_coli

    ours = [name for name in settings.flags if name not in ("url", "api_key")]
    if settings.origin("url") == "flag" and ours:
        raise UsageError("is a matter of the engine, which the server has", settings.named(ours[0]),
                         "give it to coli serve, or leave --url out")  # fmt: skip
    if ours or (settings.url is None and settings.model is not None):
        return None
    if settings.url is not None:
        return Address.of(settings.url)
    local = Address.of(LOCAL)
    if is_coli(local):
        return local
    out.note(f"no coli server at {LOCAL}: this process answers (--url names another)")
    return None


def _talk(conversation: Conversation, partner: Partner, out: Output, *, interactive: bool, as_json: bool,
          color: bool) -> int:  # fmt: skip
    from coli.commands._chat_commands import TABLE
    from coli.commands._chat_input import Editor, Interrupts, Lines, at_terminal, person
    from coli.commands._chat_loop import Chat
    from coli.commands._chat_view import view

    interactive = interactive or person()
    shown = view(out, as_json=as_json, color=color)
    partner.say = shown.note
    out.lines(partner.idle(conversation))
    with Interrupts() as interrupts:
        reader: Reader = (Editor(interrupts, out.note, TABLE) if at_terminal()
                          else Lines(interrupts, out.aside if interactive else None))  # fmt: skip
        return Chat(conversation, partner, reader, shown, out, interactive=interactive).run()
