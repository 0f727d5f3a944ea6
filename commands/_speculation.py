"""Flags about drafts. All but the last are rows of the settings table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coli.settings import Settings

Mtp = Annotated[
    bool | None, typer.Option("--mtp/--no-mtp", help="Draft with the checkpoint's own head [where it has one].")
]
Drafts = Annotated[
    str | None, typer.Option("--drafts", metavar="N|auto", help="Drafts of the head in every verify [2].")
]
MtpVocab = Annotated[
    int | None, typer.Option("--mtp-vocab", metavar="N", help="Tokens the head scores; 0 is all [16000].")
]
Pstep = Annotated[
    bool | None, typer.Option("--pstep/--no-pstep", help="Trim drafts the head is unsure of [no].")
]
Lookup = Annotated[
    bool | None, typer.Option("--lookup/--no-lookup", help="Draft by copying from earlier in the text [yes].")
]
LookupDrafts = Annotated[
    int | None, typer.Option("--lookup-drafts", metavar="N", help="Drafts copied at most [5].")
]
Gate = Annotated[
    bool | None, typer.Option("--gate/--no-gate", help="Draft only where it is measured to pay [yes].")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write one JSON line a forward to a file.")
]

def check_force(settings: Settings) -> None:
    """Raise UsageError for a FORCE variable where there is no reference to draft from."""
    from coli.errors import UsageError
    from coli.settings import TABLE

    for name in ("mtp_force", "lookup_force"):
        if getattr(settings, name) is not None:
            raise UsageError("only acts with --reference", TABLE[name].name, "unset it, or give a reference")
