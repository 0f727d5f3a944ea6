"""Flags that several commands share, and the settings they make.

The flags of the settings table that every model knows are spelled here once; `settings` reads flags and environment
and says the warnings of the table on stderr.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="A checkpoint folder, a .gguf file or a Hugging Face id [nano]."),
]
Ctx = Annotated[int | None, typer.Option("--ctx", metavar="N", help="Positions kept, prompt and answer together.")]
Cap = Annotated[int | None, typer.Option("--cap", metavar="N", help="Experts kept in memory per layer.")]
Ram = Annotated[float | None, typer.Option("--ram", metavar="GB", help="Memory budget [0.88 of what is free].")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Compute threads [physical cores].")]
Trunk = Annotated[
    str | None,
    typer.Option("--trunk", metavar="stored|int8", help="Dense float weights as stored, or as int8 rows [stored]."),
]
Experts = Annotated[
    str | None,
    typer.Option("--experts", metavar="stored|int4|int8", help="Routed experts as stored, or quantised [stored]."),
]
Usage = Annotated[
    Path | None, typer.Option("--usage", metavar="FILE", help="Expert history [`.coli_usage` beside the model].")
]
WarmStart = Annotated[
    bool | None, typer.Option("--warm-start/--no-warm-start", help="Read the most used experts ahead, at the start.")
]
Prefetch = Annotated[
    str | None, typer.Option("--prefetch", metavar="auto|on|off", help="Read the next layer's likely experts ahead.")
]
Direct = Annotated[bool | None, typer.Option("--direct/--no-direct", help="Read experts past the page cache.")]
Mirror = Annotated[
    Path | None, typer.Option("--mirror", metavar="FOLDER", help="A copy of the model on another disk, read as well.")
]
PageCache = Annotated[
    str | None, typer.Option("--page-cache", metavar="auto|keep|drop", help="The system's copy of experts read [auto].")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")]
Think = Annotated[
    bool | None, typer.Option("--think/--no-think", help="Let the model think first [as its template says].")
]
Effort = Annotated[
    str | None, typer.Option("--effort", metavar="WORD", help="How hard to think, for templates that ask.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors.")]


NO_MODEL = "no model given: using the shipped nano model (--model or COLI_MODEL names another)"


def settings(**flags: Any) -> tuple[Any, list[str]]:
    """(Settings, warnings) of the flags given. Raises UsageError."""
    from coli.settings import load

    return load(flags)
