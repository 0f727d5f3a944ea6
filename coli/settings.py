"""Every variable coli reads, in one table, and the frozen settings they become.

Idea: a field of `Settings` *is* its rows of the table. `variable(...)` gives it an environment name, kind (type and
range), default, flag and meaning, so a new variable is one line and `coli env`, the parser, the warnings and the
README's table read the same row. What every engine has for itself, the draft head's settings, is one field with a row
an engine (`per_engine`): own name, own range, own default, one flag for whichever engine runs.
Which engine runs is known when the checkpoint is open: `load` gives the first engine's values, `resolve(engine)` that
engine's. A variable is checked against its own range when it is loaded; a flag of such a field against the widest
range when it is loaded and against the running engine's in `resolve`.
Precedence: flag > variable > default, and each value remembers which of the three it came from (`origin`).
Strictness: a value outside its range is a UsageError that names the variable (or flag) and the range, an empty value
is outside every range; an unknown COLI_*, Q36_* or Q38_* name is one warning with the nearest known name, or a
UsageError under COLI_ENV_STRICT=1. Nothing else in coli reads the environment, but for two readers outside the
settings: `coli.models.find` (Hugging Face's own variables) and `coli.commands._errors` (COLI_DEBUG, when the settings
themselves are what failed).
Invariant: two fields never share a variable, and `Settings()` equals `load({}, {})`.
Guarded by tests/cli/test_settings.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from coli.errors import UsageError
from coli.kinds import Bit, Choice, Depth, File, Folder, Gigabytes, Kind, Present, Secret, Share, Text, Whole

ALL = ("all",)
ENGINES = ("qwen38", "qwen36")  # engines this version has; the first one's values are what `load` gives
PREFIX = {"qwen38": "Q38_", "qwen36": "Q36_"}  # of an engine's own variables
MOST_DRAFTS = {"qwen38": 3, "qwen36": 7}  # of the engine's own head in a verify
_OURS = ("COLI_", *PREFIX.values())  # prefixes we answer for
# Names of spec_decoding.md section 7 that this version has no use for, and why.
_ELSEWHERE = dict.fromkeys(("MTP", "DRAFT", "MTP_PSTEP", "COLI_MTP_GUARD_PCT", "COLI_MTP_GUARD_WINDOW"),
                           "it belongs to the engine colibri, which this version does not have")  # fmt: skip
_ELSEWHERE |= dict.fromkeys(("Q38_MTP_CHAIN", "Q38_DRAFT_HEAD"),
                            "it steers the device path, which this version does not have")  # fmt: skip
FORCE_MODES = ("accept", "mixed", "cycle", "reject", *(f"row{row}" for row in range(1, 9)))


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """One row: a name in the environment. `unset` is what a default of None means, in words."""

    name: str
    kind: Kind
    default: Any
    engines: tuple[str, ...]
    flag: str
    help: str
    unset: str = ""

    def serves(self, engine: str) -> bool:
        return self.engines == ALL or engine in self.engines


@dataclass(frozen=True)
class Own:
    """What an engine makes of a field that every engine has for itself."""

    kind: Kind
    default: Any
    unset: str = ""


def variable(name: str, kind: Kind, default: Any, help: str, *, flag: str = "", unset: str = "",
             also: Variable | None = None) -> Any:  # fmt: skip
    """A field of Settings with one row for all engines; `also`: another name for it, which yields to this one."""
    return _field([Variable(name, kind, default, ALL, flag, help, unset), *([also] if also is not None else [])])


def per_engine(name: str, help: str, *, flag: str = "", **engines: Own) -> Any:
    """A field of Settings with a row for each of these engines, named `name` behind the engine's prefix."""
    return _field([
        Variable(PREFIX[engine] + name, own.kind, own.default, (engine,), flag, help, own.unset)
        for engine, own in engines.items()
    ])  # fmt: skip


def _field(rows: Sequence[Variable]) -> Any:
    return field(default=rows[0].default, metadata={"rows": tuple(rows)})


@dataclass(frozen=True)
class Settings:
    """What a command runs with. `ram` is in bytes; `origins` names the fields that a flag or a variable set."""

    model: str | None = variable("COLI_MODEL", Text("a folder, a .gguf file or the id of a model in the Hugging Face "
                                                    "cache"), None, "the model to load", flag="--model",
                                 unset="the shipped nano model")  # fmt: skip
    ctx: int = variable("COLI_CTX", Whole(1), 8192, "positions kept: prompt and answer together; the default is cut "
                        "to the model's limit, a larger value given is refused", flag="--ctx")  # fmt: skip
    ram: int | None = variable("RAM_GB", Gigabytes(), None, "memory budget that the expert cache is sized by",
                               flag="--ram", unset="what the machine has free")  # fmt: skip
    cap: int | None = variable("COLI_CAP", Whole(1), None, "experts kept in memory per layer", flag="--cap",
                               unset="as many as the budget holds")  # fmt: skip
    threads: int | None = variable("COLI_THREADS", Whole(1, 256), None, "compute threads", flag="--threads",
                                   unset="physical cores")  # fmt: skip
    simd: bool = variable("COLI_SIMD", Bit(), True, "0 forces the plain kernels where AVX-512 ones exist")
    cache_dir: Path | None = variable("COLI_CACHE", Folder(), None, "where compiled kernels, what headers say and "
                                      "measured speeds are kept", unset="the user's cache folder")  # fmt: skip
    act: str = variable("COLI_ACT", Choice(("int8", "f32")), "int8",
                        "activations beside integer weights: int8 is fast, f32 exact")  # fmt: skip
    trunk: str = variable("COLI_TRUNK", Choice(("stored", "int8")), "stored", "dense float weights: as stored, or as "
                          "int8 rows made at load, half the bytes a token and slightly other numbers", flag="--trunk",
                          also=Variable("Q38_TRUNK_CPU_INT8", Bit("stored", "int8"), "stored", ("qwen38",), "",
                                        "1 is COLI_TRUNK=int8"))  # fmt: skip
    experts: str = variable("COLI_EXPERTS", Choice(("stored", "int4", "int8")), "stored", "routed experts: as stored, "
                            "or quantised when they are read, int4 in groups of 64 (from the sidecar where there is "
                            "one) or int8 rows", flag="--experts")  # fmt: skip
    prefill_chunk: int = variable("COLI_PREFILL_CHUNK", Whole(1, 512), 128, "prompt tokens computed together")
    mtp: bool | None = per_engine("MTP", "0 leaves the draft head unread, 1 refuses a checkpoint without one",
                                  flag="--mtp", qwen38=Own(Bit(), None, "on where there is a head that can run"),
                                  qwen36=Own(Bit(), False))  # fmt: skip
    drafts: int = per_engine("MTP_DRAFTS", "drafts of the head in every verify; auto (or 0) is the gate's pick",
                             flag="--drafts", qwen38=Own(Depth(MOST_DRAFTS["qwen38"]), 2),
                             qwen36=Own(Depth(MOST_DRAFTS["qwen36"]), 1))  # fmt: skip
    mtp_pmin: float = per_engine("MTP_PMIN", "the head stops at a draft it holds less likely than this; the first is "
                                 "always kept", flag="--pmin", qwen36=Own(Share(), 0.0))  # fmt: skip
    mtp_vocab: int = per_engine("MTP_VOCAB", "tokens the head scores, the most used ones; 0 is the whole vocabulary",
                                flag="--mtp-vocab", qwen38=Own(Whole(0), 16000),
                                qwen36=Own(Whole(0), 16000))  # fmt: skip
    mtp_vocab_ids: Path | None = per_engine("MTP_VOCAB_IDS", "file of the ids that the head scores, a fixed list in "
                                            "place of the most used ones: numbers with blanks, commas or line ends "
                                            "between", flag="--mtp-vocab-ids",
                                            qwen36=Own(File(), None, "no fixed list"))  # fmt: skip
    mtp_wiring: str = per_engine("MTP_WIRING", "the head's input norm: b one a stream, a one over the four",
                                 flag="--mtp-wiring", qwen38=Own(Choice(("a", "b")), "b"))  # fmt: skip
    mtp_cap: int | None = per_engine("MTP_CAP", "experts of the head kept in memory", flag="--mtp-cap",
                                     qwen38=Own(Whole(1), None, "as many as a layer keeps"),
                                     qwen36=Own(Whole(1), None, "as many as a layer keeps"))  # fmt: skip
    mtp_pstep: bool = per_engine("MTP_PSTEP", "1 trims each verify's deeper drafts, at a fixed depth of 2 and more, by "
                                 "how sure the head was of them", flag="--pstep", qwen38=Own(Bit(), False),
                                 qwen36=Own(Bit(), True))  # fmt: skip
    mtp_force: str | None = per_engine("MTP_FORCE", "tests: the head's drafts come from the reference of --reference, "
                                       "made wrong as the word says",
                                       qwen38=Own(Choice(FORCE_MODES), None, "the head's own drafts"),
                                       qwen36=Own(Choice(FORCE_MODES), None, "the head's own drafts"))  # fmt: skip
    mtp_dump: Path | None = per_engine("MTP_DUMP", "the head's logits are appended here, rows of raw float32",
                                       qwen38=Own(File(), None, "not written"),
                                       qwen36=Own(File(), None, "not written"))  # fmt: skip
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
    usage: Path | None = variable("COLI_USAGE", File(), None, "expert history, which says what to read ahead and "
                                  "what to keep; must not be COLI_VOCAB_USAGE's file", flag="--usage",
                                  unset="`.coli_usage` beside the model")  # fmt: skip
    warm_start: bool = variable("COLI_WARM_START", Bit(), True, "the most used experts are read in the background from "
                                "the start on", flag="--warm-start")  # fmt: skip
    prefetch: str = variable("COLI_PREFETCH", Choice(("auto", "on", "off")), "auto", "experts that the next layer "
                             "will probably choose are read ahead; auto: while enough of them are used",
                             flag="--prefetch")  # fmt: skip
    direct: bool = variable("COLI_DIRECT", Bit(), False, "1 reads experts past the page cache (O_DIRECT)",
                            flag="--direct")  # fmt: skip
    mirror: Path | None = variable("COLI_MODEL_MIRROR", Folder(), None, "a copy of the model on another disk: experts "
                                   "are read from both", flag="--mirror", unset="no copy")  # fmt: skip
    page_cache: str = variable("COLI_PAGE_CACHE", Choice(("auto", "keep", "drop")), "auto", "the system's copy of "
                               "experts that were read; auto: dropped where memory cannot hold every expert",
                               flag="--page-cache")  # fmt: skip
    guard: bool = variable("COLI_GUARD", Bit(), True, "0 never gives expert memory back, however scarce it becomes")
    undo: str = variable("COLI_UNDO", Choice(("slots", "log")), "log", "how drafts that did not stand are undone: "
                         "by copies of the recurrent state, or by a log of what they add")  # fmt: skip
    usage_save: bool = variable("USAGE_SAVE", Bit(), True, "0 leaves the history files as they are",
                                flag="--usage-save")  # fmt: skip
    api_key: str | None = variable("COLI_API_KEY", Secret(), None, "the key that `coli serve` asks of its "
                                   "clients and `coli chat` shows a server", flag="--api-key",
                                   unset="no key")  # fmt: skip
    url: str | None = variable("COLI_URL", Text("an address such as http://127.0.0.1:8000/v1"), None, "the server "
                               "that `coli chat` talks to", flag="--url", unset="the one of this machine at port "
                               "8000, where it answers")  # fmt: skip
    debug: bool = variable("COLI_DEBUG", Bit(), False, "1 prints the traceback of an error")
    env_strict: bool = variable("COLI_ENV_STRICT", Bit(), False, "1 makes an unknown variable an error")
    no_color: bool = variable("NO_COLOR", Present(), False, "no colours on stderr")
    engine: str = ENGINES[0]  # whose values these are
    flags: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # given, by field
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # values of variables, by name
    overrides: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of `override`, by field

    @property
    def trunk_int8(self) -> bool:
        return self.trunk == "int8"

    def row(self, name: str) -> Variable:
        """The row of field `name` that this engine reads; the first one where it reads none."""
        return next((row for row in TABLE[name] if row.serves(self.engine)), TABLE[name][0])

    def origin(self, name: str) -> str:
        """Where field `name` got its value: "flag", "variable" or "default"."""
        if name in self.flags:
            return "flag"
        mine = (row.name for row in TABLE[name] if row.serves(self.engine))
        return "variable" if any(name in self.given for name in mine) else "default"

    def named(self, name: str) -> str:
        """The flag or the variable that gave field `name` its value; the variable that would where neither did."""
        row = self.row(name)
        return row.flag if self.origin(name) == "flag" and row.flag else row.name

    def read(self, name: str, engine: str) -> Any:
        """What field `name` is to `engine`. Raises UsageError for a flag that is out of its range there."""
        rows = [row for row in TABLE[name] if row.serves(engine)]
        if name in self.overrides:
            return self.overrides[name]
        if rows and name in self.flags:
            own = "" if rows[0].engines == ALL else f" for the engine {engine}"
            return _checked(rows[0], self.flags[name], rows[0].kind.check, rows[0].flag, own)
        found = (self.given[row.name] for row in rows if row.name in self.given)
        return next(found, (rows or TABLE[name])[0].default)

    def resolve(self, engine: str) -> Settings:
        """The same settings as `engine` reads them. Raises UsageError for a flag that is out of its range there."""
        own = [name for name, rows in TABLE.items() if any(row.engines != ALL for row in rows)]
        return replace(self, engine=engine, **{name: self.read(name, engine) for name in own})

    def override(self, **values: Any) -> Settings:
        """These settings with values that a command sets itself, whatever was given and whichever engine runs."""
        return replace(self, overrides={**self.overrides, **values}, **values)


TABLE: dict[str, tuple[Variable, ...]] = {f.name: f.metadata["rows"] for f in fields(Settings) if "rows" in f.metadata}
VARIABLES: tuple[Variable, ...] = tuple(row for rows in TABLE.values() for row in rows)


# ---- filling it ------------------------------------------------------------------------------------------------------


def load(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[str]]:
    """(settings, warnings) from the flags given (field -> value, None is not given) and the environment.

    Raises UsageError for a value outside its range, and for an unknown variable under COLI_ENV_STRICT=1.
    """
    flags = {name: value for name, value in (flags or {}).items() if value is not None}
    environ = os.environ if environ is None else environ
    if wrong := flags.keys() - TABLE.keys():
        raise TypeError(f"no setting is named {', '.join(sorted(wrong))}")
    given = {
        row.name: _checked(row, environ[row.name], row.kind.parse, row.name)
        for name, rows in TABLE.items() for row in rows if name not in flags and row.name in environ
    }  # fmt: skip
    settings = Settings(given=given)
    values = {name: settings.read(name, ENGINES[0]) for name in TABLE}
    values |= {name: _widest(TABLE[name], value) for name, value in flags.items()}
    return replace(settings, flags=flags, **values), _unknown(environ, values["env_strict"])


def load_sound(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Settings, list[str], list[UsageError]]:
    """`load` without the variables it refuses: (settings, warnings, refusals). Raises UsageError for a flag."""
    kept, refused = dict(os.environ if environ is None else environ), list[UsageError]()
    while True:
        try:
            return *load(flags, kept), refused
        except UsageError as error:
            if kept.pop(error.where.partition("=")[0], None) is None:
                raise
            refused.append(error)


def no_effect(settings: Settings, engine: str) -> list[str]:
    """One warning for each variable and flag given whose owner is another engine than `engine`."""
    idle = [(row.name, row.engines) for row in VARIABLES if row.name in settings.given and not row.serves(engine)]
    for rows in (TABLE[name] for name in settings.flags):
        if not any(row.serves(engine) for row in rows):
            idle.append((rows[0].flag, rows[0].engines))
    return [f"{name} has no effect on the engine {engine}: it belongs to {', '.join(owner)}" for name, owner in idle]


def _widest(rows: Sequence[Variable], value: Any) -> Any:
    """The first setting that a row makes of a flag's value. Raises UsageError when no row takes it."""
    rows = [row for row in rows if row.flag] or rows
    for row in rows[:-1]:
        try:
            return row.kind.check(value)
        except (ValueError, KeyError, OverflowError):
            continue  # another engine's range may be wider
    ranges = {row.kind.range: row.engines for row in rows}
    words = ", ".join(f"{words} ({', '.join(engines)})" for words, engines in ranges.items())
    return _checked(rows[-1], value, rows[-1].kind.check, rows[0].flag, hint=words if len(ranges) > 1 else "")


def _checked(row: Variable, value: Any, read: Callable[[Any], Any], where: str, own: str = "", hint: str = "") -> Any:
    try:
        return read(value)
    except (ValueError, KeyError, OverflowError):
        secret = isinstance(row.kind, Secret)
        shown = "the key" if secret else ascii(value) if isinstance(value, str) else value
        raise UsageError(f"{shown} is out of range{own}", where, f"give {hint or row.kind.range}") from None


def _unknown(environ: Mapping[str, str], strict: bool) -> list[str]:
    """One warning a variable that carries our prefix and is no row of the table."""
    known = {row.name for row in VARIABLES}
    idle = [f"{name} has no effect: {why}" for name, why in _ELSEWHERE.items() if name in environ]
    names = sorted(n for n in environ if n.startswith(_OURS) and n not in known and n not in _ELSEWHERE)
    warnings = [_describe(name, known) for name in names]
    if warnings and strict:
        raise UsageError("; ".join(warnings), "COLI_ENV_STRICT=1", "`coli env` lists every variable")
    return idle + warnings


def _describe(name: str, known: set[str]) -> str:
    from difflib import get_close_matches

    nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
    return f"{ascii(name)[1:-1]} is no variable of coli; the nearest known name is {nearest}"
