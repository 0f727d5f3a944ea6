"""What a check says, and what it looks at.

A check is a function of the `Patient` that yields findings. What it learns on the way (the path, the open checkpoint,
the geometry, ...) it leaves there for the checks behind it; a check that needs what an earlier one could not find is
left out and named in `Report.skipped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coli.errors import ColiError
from coli.formats.checkpoint import Checkpoint
from coli.models.families import Family
from coli.planning.plan import Plan
from coli.planning.survey import Survey
from coli.settings import Settings
from coli.tokenizer import Tokenizer

OK, WARN, ERROR = "ok", "warn", "error"


@dataclass(frozen=True)
class Finding:
    """`status`: ok, warn (coli runs, something is not as it should be) or error; `hint`: what to do, where it is not
    ok; `facts`: the same as plain JSON values."""

    check: str
    status: str
    what: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """One entry of `findings`."""
        return {"check": self.check, "status": self.status, "what": self.what, "hint": self.hint or None,
                "facts": dict(self.facts)}  # fmt: skip


def ok(what: str, **facts: Any) -> Finding:
    """A finding of the check that yields it, as the two below."""
    return Finding("", OK, what, facts=facts)


def warn(what: str, hint: str, **facts: Any) -> Finding:
    return Finding("", WARN, what, hint, facts)


def error(what: str, hint: str, **facts: Any) -> Finding:
    return Finding("", ERROR, what, hint, facts)


@dataclass
class Patient:
    """The model and the settings that are examined, and what is known of them so far."""

    settings: Settings
    deep: bool = False
    say: Callable[[str], None] = lambda text: None  # of progress
    refused: tuple[ColiError, ...] = ()  # variables left out of the settings
    warnings: tuple[str, ...] = ()  # of the settings
    path: Path | None = None
    checkpoint: Checkpoint | None = None
    family: Family | None = None
    geometry: Any = None
    sound: bool = False  # every tensor is there, in its shape
    tokenizer: Tokenizer | None = None
    survey: Survey | None = None
    plan: Plan | None = None

    def close(self) -> None:
        if self.checkpoint is not None:
            self.checkpoint.close()


@dataclass(frozen=True)
class Check:
    """`look` is given a patient whose fields `needs` are known."""

    name: str
    look: Callable[[Any], Iterator[Finding]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """`path`: the model, None when it was not found; `skipped`: checks for which something was missing."""

    path: Path | None
    deep: bool
    findings: tuple[Finding, ...]
    skipped: tuple[str, ...]

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """0 without an error, 2 without a model, 1 otherwise."""
        return 2 if self.path is None else int(self.count(ERROR) > 0)

    def to_json(self) -> dict[str, Any]:
        """The document of `coli doctor --json`."""
        return {
            "model": None if self.path is None else str(self.path), "deep": self.deep, "exit": self.exit_code,
            "errors": self.count(ERROR), "warnings": self.count(WARN),
            "findings": [finding.to_json() for finding in self.findings], "skipped": list(self.skipped),
        }  # fmt: skip
