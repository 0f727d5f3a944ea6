"""Every variable coli reads, in one table, and the frozen settings they become.

Idea: a field of `Settings` *is* the row of the table. `variable(...)` gives it its environment name, kind (type and
range), default, owning engines, flag and meaning, so a new variable is one line and `coli env`, the parser, the
warnings and the README's table read the same row.
Precedence: flag > variable > default, and each value remembers which of the three it came from (`origin`).
Strictness: a value outside its range is a UsageError that names the variable (or flag) and the range, an empty value
is outside every range; an unknown COLI_*, Q36_* or Q38_* name is one warning with the nearest known name, or a
UsageError under COLI_ENV_STRICT=1. Nothing else in coli reads the environment, but for two readers outside the
settings: `coli.models.find` (Hugging Face's own variables) and `coli.commands._errors` (COLI_DEBUG, when the settings
themselves are what failed).
Invariant: two variables never share a field, and `Settings()` equals `load({}, {})`.
Guarded by tests/cli/test_settings.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from coli.errors import UsageError

ALL = ("all",)
QWEN38 = ("qwen38",)
ENGINES = ("qwen38",)  # engines this version has
_OWNED = {"COLI_": "", "Q36_": "qwen36", "Q38_": "qwen38"}  # prefixes we answer for, and the engine that owns them
# Names of spec_decoding.md section 7 that this version has no use for, and why.
_ELSEWHERE = dict.fromkeys(("MTP", "DRAFT", "MTP_PSTEP", "COLI_MTP_GUARD_PCT", "COLI_MTP_GUARD_WINDOW"),
                           "it belongs to the engine colibri, which this version does not have")  # fmt: skip
_ELSEWHERE |= dict.fromkeys(("Q38_MTP_CHAIN", "Q38_DRAFT_HEAD"),
                            "it steers the device path, which this version does not have")  # fmt: skip
GB = 10**9
FORCE_MODES = ("accept", "mixed", "cycle", "reject", *(f"row{row}" for row in range(1, 9)))


# ---- kinds: how a text becomes a value, and the range it must lie in -------------------------------------------------


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
    """Exactly 0 or 1: `true`, `on`, `01` are errors, so that a typing slip never means its opposite."""

    range: str = "0 or 1"

    def parse(self, text: str) -> bool:
        return {"0": False, "1": True}[text]

    def check(self, value: bool) -> bool:
        return value

    def show(self, value: bool) -> str:
        return str(int(value))


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
class Gigabytes:
    """A positive number of GB (10^9 bytes) that becomes whole bytes."""

    range: str = "above 0, in GB (10^9 bytes)"

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


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """One row: `unset` is what a default of None means, in words."""

    name: str
    kind: Kind
    engines: tuple[str, ...]
    flag: str
    help: str
    unset: str = ""


def variable(name: str, kind: Kind, default: Any, help: str, *, flag: str = "", engines: tuple[str, ...] = ALL,
             unset: str = "") -> Any:  # fmt: skip
    """A field of Settings that is a row of the table."""
    return field(default=default, metadata={"variable": Variable(name, kind, engines, flag, help, unset)})


@dataclass(frozen=True)
class Settings:
    """What a command runs with. `ram` is in bytes; `origins` names the fields that a flag or a variable set."""

    model: str | None = variable("COLI_MODEL", Text("a folder or a Hugging Face id in the local cache"), None,
                                 "the model to load", flag="--model", unset="the shipped nano model")  # fmt: skip
    ctx: int = variable("COLI_CTX", Whole(1), 8192, "positions kept: prompt and answer together; the default is cut "
                        "to the model's limit, a larger value given is refused", flag="--ctx")  # fmt: skip
    ram: int | None = variable("RAM_GB", Gigabytes(), None, "memory budget that the expert cache is sized by",
                               flag="--ram", unset="what the machine has free")  # fmt: skip
    cap: int | None = variable("COLI_CAP", Whole(1), None, "experts kept in memory per layer", flag="--cap",
                               unset="as many as the budget holds")  # fmt: skip
    threads: int | None = variable("COLI_THREADS", Whole(1, 256), None, "compute threads", flag="--threads",
                                   unset="physical cores")  # fmt: skip
    simd: bool = variable("COLI_SIMD", Bit(), True, "0 forces the plain kernels where AVX-512 ones exist")
    cache_dir: Path | None = variable("COLI_CACHE", Folder(), None, "where compiled kernels are kept",
                                      unset="the user's cache folder")  # fmt: skip
    act: str = variable("COLI_ACT", Choice(("int8", "f32")), "int8",
                        "activations beside integer weights: int8 is fast, f32 exact")  # fmt: skip
    trunk_int8: bool = variable("Q38_TRUNK_CPU_INT8", Bit(), False, "1 quantises dense bf16 weights to int8 rows at "
                                "load: half the bytes a token, other bits", engines=QWEN38)  # fmt: skip
    prefill_chunk: int = variable("COLI_PREFILL_CHUNK", Whole(1, 512), 128, "prompt tokens computed together")
    mtp: bool | None = variable("Q38_MTP", Bit(), None, "0 leaves the draft head unread, 1 refuses a checkpoint "
                                "without one", flag="--mtp", engines=QWEN38,
                                unset="on where the checkpoint has a head that can run")  # fmt: skip
    drafts: int = variable("Q38_MTP_DRAFTS", Depth(3), 2, "drafts of the head in every verify; auto (or 0) is the "
                           "gate's pick", flag="--drafts", engines=QWEN38)  # fmt: skip
    mtp_vocab: int = variable("Q38_MTP_VOCAB", Whole(0), 16000, "tokens the head scores, the most used ones; 0 is the "
                              "whole vocabulary", flag="--mtp-vocab", engines=QWEN38)  # fmt: skip
    mtp_wiring: str = variable("Q38_MTP_WIRING", Choice(("a", "b")), "b", "the head's input norm: b one a stream, a "
                               "one over the four", flag="--mtp-wiring", engines=QWEN38)  # fmt: skip
    mtp_cap: int | None = variable("Q38_MTP_CAP", Whole(1), None, "experts of the head kept in memory",
                                   flag="--mtp-cap", engines=QWEN38, unset="as many as a layer keeps")  # fmt: skip
    mtp_pstep: bool = variable("Q38_MTP_PSTEP", Bit(), False, "1 trims each verify's deeper drafts by how sure the "
                               "head was of them", flag="--pstep", engines=QWEN38)  # fmt: skip
    mtp_force: str | None = variable("Q38_MTP_FORCE", Choice(FORCE_MODES), None, "tests: the head's drafts come from "
                                     "the reference of --reference, made wrong as the word says", engines=QWEN38,
                                     unset="the head's own drafts")  # fmt: skip
    mtp_dump: Path | None = variable("Q38_MTP_DUMP", File(), None, "the head's logits are appended here, rows of raw "
                                     "float32", engines=QWEN38, unset="not written")  # fmt: skip
    lookup: bool = variable("COLI_LOOKUP", Bit(), True, "drafts copied from earlier in the text", flag="--lookup")
    lookup_drafts: int = variable("COLI_LOOKUP_DRAFTS", Whole(1, 5), 5, "drafts copied at most",
                                  flag="--lookup-drafts")  # fmt: skip
    lookup_force: str | None = variable("COLI_LOOKUP_FORCE", Choice(FORCE_MODES), None, "tests: as Q38_MTP_FORCE, for "
                                        "the copied drafts", unset="the text's own drafts")  # fmt: skip
    gate: bool = variable("COLI_SPEC_GATE", Bit(), True, "0 verifies every proposal in full, whatever it costs",
                          flag="--gate")  # fmt: skip
    vocab_usage: Path | None = variable("COLI_VOCAB_USAGE", File(), None, "token counts that choose the head's "
                                        "vocabulary", flag="--vocab-usage",
                                        unset="`.coli_vocab` beside the model")  # fmt: skip
    usage: Path | None = variable("COLI_USAGE", File(), None, "expert history; must not be COLI_VOCAB_USAGE's file",
                                  unset="none is kept")  # fmt: skip
    undo: str = variable("COLI_UNDO", Choice(("slots", "log")), "log", "how drafts that did not stand are undone: "
                         "by copies of the recurrent state, or by a log of what they add")  # fmt: skip
    usage_save: bool = variable("USAGE_SAVE", Bit(), True, "0 leaves the history files as they are",
                                flag="--usage-save")  # fmt: skip
    debug: bool = variable("COLI_DEBUG", Bit(), False, "1 prints the traceback of an error")
    env_strict: bool = variable("COLI_ENV_STRICT", Bit(), False, "1 makes an unknown variable an error")
    no_color: bool = variable("NO_COLOR", Present(), False, "no colours on stderr")
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def origin(self, name: str) -> str:
        """Where field `name` got its value: "flag", "variable" or "default"."""
        return self.origins.get(name, "default")


TABLE: dict[str, Variable] = {f.name: f.metadata["variable"] for f in fields(Settings) if "variable" in f.metadata}


# ---- filling it ------------------------------------------------------------------------------------------------------


def load(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[str]]:
    """(settings, warnings) from the flags given (field -> value, None is not given) and the environment.

    Raises UsageError for a value outside its range, and for an unknown variable under COLI_ENV_STRICT=1.
    """
    flags = {} if flags is None else flags
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, row in TABLE.items():
        if flags.get(name) is not None:
            values[name], origins[name] = _checked(row, flags[name], row.kind.check, row.flag), "flag"
        elif row.name in environ:
            values[name], origins[name] = _checked(row, environ[row.name], row.kind.parse, row.name), "variable"
    settings = Settings(**values, origins=origins)
    return settings, _unknown(environ, settings.env_strict)


def no_effect(settings: Settings, engine: str) -> list[str]:
    """One warning for each setting given whose owner is another engine than `engine`."""
    return [
        f"{row.name} has no effect on the engine {engine}: it belongs to {', '.join(row.engines)}"
        for name, row in TABLE.items()
        if settings.origin(name) != "default" and row.engines != ALL and engine not in row.engines
    ]


def _checked(row: Variable, value: Any, read: Any, where: str) -> Any:
    try:
        return read(value)
    except (ValueError, KeyError, OverflowError):
        shown = ascii(value) if isinstance(value, str) else value
        raise UsageError(f"{shown} is out of range", where, f"give {row.kind.range}") from None


def _unknown(environ: Mapping[str, str], strict: bool) -> list[str]:
    """One warning a variable that carries our prefix and is no row of the table."""
    known = {row.name for row in TABLE.values()}
    idle = [f"{name} has no effect: {why}" for name, why in _ELSEWHERE.items() if name in environ]
    ours = tuple(_OWNED)
    names = sorted(n for n in environ if n.startswith(ours) and n not in known and n not in _ELSEWHERE)
    warnings = [_describe(name, known) for name in names]
    if warnings and strict:
        raise UsageError("; ".join(warnings), "COLI_ENV_STRICT=1", "`coli env` lists every variable")
    return idle + warnings


def _describe(name: str, known: set[str]) -> str:
    from difflib import get_close_matches

    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    engine = next(owner for prefix, owner in _OWNED.items() if name.startswith(prefix))
    why = "is no variable of coli"
    if engine and engine not in ENGINES:
        why = f"has no effect: it belongs to the engine {engine}, which this version does not have"
    return f"{ascii(name)[1:-1]} {why}; the nearest known name is {nearest}"
