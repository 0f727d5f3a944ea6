"""Kinds of settings: how a text becomes a value, and the range it must lie in.

Idea: a kind knows its range in words, so an error, `coli env` and a flag's help say the same. A variable's text goes
through `parse`, a flag that Typer has parsed through `check`; both raise ValueError (or KeyError) for what is outside,
and `show` writes a value so that `parse` reads it back. An empty text is outside every range.
Guarded by tests/cli/test_settings.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

GB = 10**9


class Kind(Protocol):
    @property
    def range(self) -> str:
        """What is accepted, in words."""

    def parse(self, text: str) -> Any:
        """The value of a variable's text. Raises ValueError."""

    def check(self, value: Any) -> Any:
        """The setting for a value that a flag already parsed. Raises ValueError."""

    def show(self, value: Any) -> str:
        """The value as `parse` would read it."""


@dataclass(frozen=True)
class Whole:
    """A whole number, `low..high` (no upper end without `high`)."""

    low: int
    high: int | None = None

    @property
    def range(self) -> str:
        return f"{self.low} or more" if self.high is None else f"{self.low}..{self.high}"

    def parse(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):  # int() would also take "1_000" and " 8"
            raise ValueError
        return self.check(int(text))

    def check(self, value: int) -> int:
        if value < self.low or (self.high is not None and value > self.high):
            raise ValueError
        return value

    def show(self, value: int) -> str:
        return str(value)


@dataclass(frozen=True)
class Bit:
    """Exactly 0 or 1: `true`, `on`, `01` are errors, so that a typing slip never means its opposite.

    `off` and `on` are the values that they stand for."""

    off: Any = False
    on: Any = True
    range: str = "0 or 1"

    def parse(self, text: str) -> Any:
        return {"0": self.off, "1": self.on}[text]

    def check(self, value: bool) -> Any:
        return self.on if value else self.off

    def show(self, value: Any) -> str:
        return str(int(value == self.on))


@dataclass(frozen=True)
class Depth:
    """Drafts in every verify, `0..most`; `auto` is another word for 0, which leaves the depth to the gate."""

    most: int

    @property
    def range(self) -> str:
        return f"0..{self.most} or auto"

    def parse(self, text: str) -> int:
        return 0 if text == "auto" else Whole(0, self.most).parse(text)

    def check(self, value: str | int) -> int:
        return self.parse(str(value))  # the flag arrives as text too, for the sake of `auto`

    def show(self, value: int) -> str:
        return str(value) if value else "auto"


@dataclass(frozen=True)
class Share:
    """A number from 0 to 1."""

    range: str = "0..1"

    def parse(self, text: str) -> float:
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", text):  # float() would also take "nan", "1_0" and " 1"
            raise ValueError
        return self.check(float(text))

    def check(self, value: float) -> float:
        if not 0.0 <= value <= 1.0:  # also refuses NaN
            raise ValueError
        return value

    def show(self, value: float) -> str:
        return f"{value:.15f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Gigabytes:
    """A positive number of GB (10^9 bytes) that becomes whole bytes."""

    range: str = "above 0 and below 10^9, in GB (10^9 bytes)"

    def parse(self, text: str) -> int:
        return self.check(float(text))

    def check(self, value: float) -> int:
        if not 0 < value < 1e9:  # also refuses NaN and infinity
            raise ValueError
        return max(1, round(value * GB))

    def show(self, value: int) -> str:
        return f"{value / GB:g}"


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def range(self) -> str:
        return " or ".join(filter(None, (", ".join(self.words[:-1]), self.words[-1])))

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: str) -> str:
        if value not in self.words:
            raise ValueError
        return value

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class Text:
    """Any text but an empty one."""

    range: str

    def parse(self, text: str) -> str:
        return self.check(text)

    def check(self, value: str) -> str:
        if not value.strip():
            raise ValueError
        return value

    def show(self, value: str) -> str:
        return value


@dataclass(frozen=True)
class Secret(Text):
    """A key, never shown: what a header carries the same way everywhere (RFC 9110, 5.5)."""

    range: str = "printable ASCII characters without blanks"

    def check(self, value: str) -> str:
        if not value or not all("!" <= character <= "~" for character in value):
            raise ValueError
        return value

    def show(self, value: str) -> str:
        return "(set)"


@dataclass(frozen=True)
class Folder:
    """A folder, with `~` expanded; it need not exist yet."""

    range: str = "a folder"

    def parse(self, text: str) -> Path:
        if not text.strip():
            raise ValueError
        return self.check(Path(text))

    def check(self, value: Path) -> Path:
        try:
            return value.expanduser()
        except RuntimeError as error:  # no such user
            raise ValueError from error

    def show(self, value: Path) -> str:
        return str(value)


@dataclass(frozen=True)
class File(Folder):
    """A file, with `~` expanded; it need not exist yet."""

    range: str = "a file"


@dataclass(frozen=True)
class Present:
    """On when the variable holds anything at all (the convention of no-color.org)."""

    range: str = "set to anything, or not at all"

    def parse(self, text: str) -> bool:
        return bool(text)

    def check(self, value: bool) -> bool:
        return value

    def show(self, value: bool) -> str:
        return str(int(value))
