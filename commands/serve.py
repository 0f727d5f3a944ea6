"""`coli serve`: the model behind OpenAI's and Anthropic's HTTP APIs.

Flags and port are checked before the model is opened. Everything is said on stderr: what loading says, the line with
the address once requests are taken, report lines of every turn, and what stopping does. Stdout stays empty.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coli.commands import _options
from coli.commands._model_flags import model_flags
from coli.errors import Exit, UsageError
from coli.server.options import ServeOptions

if TYPE_CHECKING:
    from coli.commands._output import Output
    from coli.engine import Engine
    from coli.server.service import Service
    from coli.settings import Settings


@model_flags
def serve(
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on.")
    ] = ServeOptions.host,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port to listen on; 0 takes a free one.")
    ] = ServeOptions.port,
    model_id: Annotated[
        str | None, typer.Option("--model-id", metavar="NAME", help="The model's name in the API [its folder's].")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="Asked of every client; COLI_API_KEY keeps it out of `ps`."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let others reach the server without a key.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="A name it is called by, besides its IP address; may be "
                     "repeated, * is any."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="URL", help="A site whose pages may ask; may be repeated, * is any."),
    ] = None,
    slots: Annotated[
        int, typer.Option("--slots", metavar="1..16", help="Requests answered at a time, in turn.")
    ] = ServeOptions.slots,
    max_queue: Annotated[
        int, typer.Option("--max-queue", metavar="N", help="Requests that wait at most.")
    ] = ServeOptions.max_queue,
    queue_timeout: Annotated[
        float, typer.Option("--queue-timeout", metavar="S", help="Seconds a request waits at most.")
    ] = ServeOptions.queue_timeout,
    checkpoints: Annotated[
        int, typer.Option("--checkpoints", metavar="N", help="States of earlier prompts kept per slot.")
    ] = ServeOptions.checkpoints,
    pins: Annotated[
        int, typer.Option("--pins", metavar="N", help="Further ones per slot, for requests that say pin.")
    ] = ServeOptions.pins,
    flags: Any = None,
    quiet: _options.Quiet = False,
) -> None:  # fmt: skip
    """Serve the model over OpenAI's and Anthropic's HTTP APIs. SIGTERM answers what was asked, then leaves."""
    from coli.commands._output import Output

    settings, warnings = _options.settings(**flags, api_key=api_key)
    out = Output(quiet=quiet, color=not settings.no_color, answers=False)
    out.lines(warnings)
    _check_extra()
    options = ServeOptions(
        host=host, port=port, model_id=model_id, api_key=settings.api_key, insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()), cors_origins=tuple(cors_origin or ()), slots=slots,
        max_queue=max_queue, queue_timeout=queue_timeout, checkpoints=checkpoints, pins=pins,
    )  # fmt: skip
    options.check()  # before the engine's modules are imported
    from coli.server.serving import run

    engines: list[Engine] = []
    try:
        busy = run(options, lambda: _load(settings, options, out, engines),
                   lambda service, url: _ready(service, url, out), out.note)  # fmt: skip
    finally:
        for engine in engines:
            engine.close()
    if busy:  # everything is saved and said, and the interpreter would wait for that thread
        os._exit(Exit.OK)


def _check_extra() -> None:
    """Raise UsageError where the packages of the extra are missing."""
    from importlib.util import find_spec

    missing = [name for name in ("starlette", "uvicorn", "pydantic", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise UsageError(f"needs packages that are not installed: {', '.join(missing)}", "coli serve",
                         "pip install 'coli[serve]'")  # fmt: skip


def _load(settings: Settings, options: ServeOptions, out: Output, engines: list[Engine]) -> Service:
    """Open the model; runs on another thread, so `engines` is told what there is to close."""
    from coli.engine import Engine
    from coli.server.service import Service

    snapshots = options.slots * (options.checkpoints + options.pins)
    engine = Engine.open(settings, on_progress=out.progress, slots=options.slots, snapshots=snapshots, server=True)
    engines.append(engine)
    out.done()
    if settings.model is None:
        out.note(_options.NO_MODEL)
    out.lines(engine.notes)
    out.note(engine.banner())
    engine.say = out.note
    return Service(engine, options, out.note)


def _ready(service: Service, url: str, out: Output) -> None:
    key = "a key is asked for" if service.options.api_key else "no key"
    slots = f"{service.options.slots} slot{'s' * (service.options.slots > 1)}"
    out.note(f"coli serve: {url}/v1 · model {service.model_id} · {slots} · {key}")
