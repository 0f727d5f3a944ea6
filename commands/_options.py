"""Flags that several commands share, and the settings they make.

The flags of the settings table that every model knows are spelled here once; `settings` reads flags and environment
and says the warnings of the table on stderr.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="A checkpoint folder or a Hugging Face id in the local cache."),
]
Ctx = Annotated[int | None, typer.Option("--ctx", metavar="N", help="Positions kept, prompt and answer together.")]
Cap = Annotated[int | None, typer.Option("--cap", metavar="N", help="Experts kept in memory per layer.")]
Ram = Annotated[float | None, typer.Option("--ram", metavar="GB", help="Memory budget, in GB.")]
Threads = Annotated[int | None, typer.Option("--threads", metavar="N", help="Compute threads [physical cores].")]
Trunk = Annotated[
    str | None,
    typer.Option("--trunk", metavar="stored|int8", help="Dense float weights as stored, or as int8 rows [stored]."),
]
Experts = Annotated[
    str | None,
    typer.Option("--experts", metavar="stored|int4|int8", help="Routed experts as stored, or quantised [stored]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing on stderr but errors.")]


NO_MODEL = "no model given: using the shipped nano model (--model or COLI_MODEL names another)"


def settings(**flags: Any) -> tuple[Any, list[str]]:
    """(Settings, warnings) of the flags given. Raises UsageError."""
    from coli.settings import load

    return load(flags)
