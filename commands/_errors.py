"""How every command ends: one table from exception to exit code and one line on stderr.

The line is `coli: where: what (what to do)`. The traceback is printed under COLI_DEBUG=1 only, and then before the
line. Names out of files and folders may hold anything, so what is not printable is escaped.
Guarded by tests/cli/test_errors.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from coli.commands._output import abandon_stdout, prepare_streams, write_stdout
from coli.commands._signals import Terminated, terminable
from coli.errors import ColiError, Exit

# The base of Typer's usage errors carries `format_message` and `exit_code`, but no version exports it by name.
_TyperError: type[Exception] = typer.BadParameter.__mro__[2]  # type: ignore[assignment]


def _typer_line(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "coli"
    message = error.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
    return f"{message} (`{path} --help` lists what it takes)"


def _os_line(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error)
    name = getattr(error, "filename", None)
    return f"{os.fspath(name)!s}: {reason}" if name else f"the system refused: {reason}"


def _fault_line(error: BaseException) -> str:
    name = type(error).__name__
    return f"unexpected {name}: {error} (a fault of coli; COLI_DEBUG=1 shows the traceback)"


def _memory_line(error: BaseException) -> str:
    return "out of memory (lower --ctx, --cap or --ram, or close other programs)"


# The first row whose type matches decides; a line of None is silence.
_TABLE: tuple[tuple[type[BaseException], Exit | None, Callable[[BaseException], str] | None], ...] = (
    (ColiError, None, str),  # carries its own exit code
    (_TyperError, Exit.USAGE, _typer_line),
    (typer.Abort, Exit.INTERRUPTED, lambda _: "interrupted"),
    (KeyboardInterrupt, Exit.INTERRUPTED, lambda _: "interrupted"),
    (Terminated, Exit.TERMINATED, lambda _: "terminated"),
    (BrokenPipeError, Exit.OK, None),  # the reader has what it wanted
    (MemoryError, Exit.MEMORY, _memory_line),
    (OSError, Exit.FAILURE, _os_line),
    (Exception, Exit.FAILURE, _fault_line),
)


def describe(error: BaseException) -> tuple[int, str | None]:
    """(exit code, line for stderr or None) of an exception that ended a command."""
    for kind, code, line in _TABLE:
        if isinstance(error, kind):
            number = int(error.exit if isinstance(error, ColiError) else code or 0)
            return number, None if line is None else printable(line(error))
    return int(Exit.FAILURE), printable(_fault_line(error))


def printable(text: str) -> str:
    """`text` as one line without control characters."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in line)


def guarded(command: Callable[[], int]) -> int:
    """Run `command` and return the exit code of the process, whatever happens in it."""
    prepare_streams()
    try:
        with terminable():
            code = command()
            write_stdout()  # what Typer printed and nobody flushed
            return code
    except typer.Exit as stop:
        return stop.exit_code
    except SystemExit as stop:  # Typer's completion scripts leave this way
        return stop.code if isinstance(stop.code, int) else int(Exit.OK)
    except BaseException as error:
        return _end(error)


def _end(error: BaseException) -> int:
    code, line = describe(error)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        abandon_stdout()
    try:
        if os.environ.get("COLI_DEBUG") == "1":
            import traceback

            traceback.print_exception(error)
        if line is not None:
            sys.stderr.write(f"coli: {line}\n")
            sys.stderr.flush()
    except (OSError, ValueError):
        return code  # stderr is gone too
    return code
