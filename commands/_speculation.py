"""Flags about drafts. All but the last are rows of the settings table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coli.settings import Settings

Mtp = Annotated[
    bool | None,
    typer.Option("--mtp/--no-mtp", help="Draft with the checkpoint's own head [qwen38: where it has one; qwen36: no]."),
]
Drafts = Annotated[
    str | None,
    typer.Option("--drafts", metavar="N|auto", help="Drafts of the head in every verify: qwen38 up to 3 [2], qwen36 up "
                 "to 7 [1]; auto is the gate's pick."),
]
Pmin = Annotated[
    float | None,
    typer.Option("--pmin", metavar="P", help="The head stops at a draft less likely than this (qwen36) [0]."),
]
MtpVocab = Annotated[
    int | None, typer.Option("--mtp-vocab", metavar="N", help="Tokens the head scores; 0 is all [16000].")
]
MtpVocabIds = Annotated[
    Path | None, typer.Option("--mtp-vocab-ids", metavar="FILE", help="A fixed list of ids for the head (qwen36).")
]
MtpWiring = Annotated[
    str | None, typer.Option("--mtp-wiring", metavar="a|b", help="The norm of the head's input (qwen38) [b].")
]
MtpCap = Annotated[
    int | None, typer.Option("--mtp-cap", metavar="N", help="Experts of the head kept in memory [as a layer's].")
]
VocabUsage = Annotated[
    Path | None, typer.Option("--vocab-usage", metavar="FILE", help="Token counts that choose what the head scores.")
]
UsageSave = Annotated[
    bool | None, typer.Option("--usage-save/--no-usage-save", help="Save what was learned for later runs [yes].")
]
Pstep = Annotated[
    bool | None, typer.Option("--pstep/--no-pstep", help="Trim drafts the head is unsure of [qwen38 no, qwen36 yes].")
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

def check_force(settings: Settings, *, reference: bool) -> None:
    """Raise UsageError for a FORCE variable without a reference to draft from, or whose source is off."""
    from coli.errors import UsageError
    from coli.settings import ENGINES, TABLE

    for name, source, flag in (("mtp_force", "mtp", "--mtp"), ("lookup_force", "lookup", "--lookup")):
        for row in (row for row in TABLE[name] if row.name in settings.given):
            if not reference:
                raise UsageError("only acts with --reference", row.name, "unset it, or give a reference")
            if all(settings.read(source, engine) is False for engine in ENGINES if row.serves(engine)):
                raise UsageError(f"forces drafts of a source that is off ({flag} turns it on)", row.name,
                                 "give both or none")  # fmt: skip
