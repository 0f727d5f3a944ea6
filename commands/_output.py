"""The one door to the terminal: results to stdout, everything said about them to stderr.

`result` and `piece` write the answer; `note`, `lines` and `progress` speak on stderr and are silent under --quiet.
Progress is one line rewritten in place on a terminal; elsewhere it is a plain line once a stage (texts with the same
words before their first digit are one stage). A stdout that cannot be written is an error with a name, except a closed
pipe, which travels on as BrokenPipeError and ends the command quietly. A stderr that cannot be written is given up
silently: the result matters more than the talk about it.
`--output FILE` is checked before any work and written at the end through a temporary file beside it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coli.errors import ColiError, UsageError

_DIM, _PLAIN, _WIPE = "\x1b[2m", "\x1b[0m", "\r\x1b[K"
_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Output:
    """Where a command's words go. `color` is off under NO_COLOR; `file` takes the result's place on stdout; without
    `answers` nothing is ever written there, and it may be closed."""

    def __init__(self, *, quiet: bool = False, color: bool = True, file: Path | None = None,
                 answers: bool = True) -> None:  # fmt: skip
        self.quiet = quiet
        self.file = file
        self._tty = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._dim = color and self._tty
        self._transient = False  # a progress line stands on the terminal
        self._stage = ""
        self._open = False  # the result's last line on stdout has no end yet
        if file is not None:
            check_file(file)
        elif answers:
            _check_stdout()

    @property
    def terminal(self) -> bool:
        """Whether stderr is a terminal that can rewrite a line."""
        return self._tty

    # ---- stdout --------------------------------------------------------------------------------------------------

    def piece(self, text: str) -> None:
        """Stream a piece of the result, now. With a file the pieces are left to the final `text`."""
        if text and self.file is None:
            self._wipe()
            self._open = not text.endswith("\n")
            write_stdout(text)

    def text(self, text: str, *, streamed: bool = False) -> None:
        """The whole result, which ends in a newline unless it is empty; `streamed` says stdout has its pieces."""
        end = "\n" if text and not text.endswith("\n") else ""
        if self.file is not None:
            write_file(self.file, text + end)
        else:
            self.piece(end if streamed else text + end)

    def end_line(self) -> None:
        """Before an error: on a terminal the broken answer ends its line."""
        if self._open and sys.stdout.isatty():
            self.piece("\n")

    def document(self, value: Any) -> None:
        """The result as one JSON document on one line."""
        self.text(json.dumps(value, ensure_ascii=False, allow_nan=False))

    # ---- stderr --------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """A line about the work; on a terminal it does not go into the middle of an answer's line."""
        if not self.quiet:
            self._line(f"{_DIM}{text}{_PLAIN}" if self._dim else text)

    def aside(self, text: str) -> None:
        """A piece of what the work says beside its result, as it comes."""
        if not self.quiet:
            self._wipe()
            text = harmless(text)
            _say(f"{_DIM}{text}{_PLAIN}" if self._dim and text.strip() else text)

    def error(self, text: str) -> None:
        """An error that does not end the command: a line, also under --quiet."""
        self._line(f"coli: {text}")

    def _line(self, text: str) -> None:
        self._wipe()
        if self._open and sys.stdout.isatty() and sys.stderr.isatty():
            _say("\n")
        _say(f"{text}\n")

    def lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(text)

    def progress(self, text: str) -> None:
        """What is going on: rewritten in place on a terminal, once a stage elsewhere."""
        if self.quiet:
            return
        if self._tty:
            self._transient = True
            _say(f"{_WIPE}{text[: _width()]}")
        elif (stage := re.split(r"\d", text)[0]) != self._stage:
            self._stage = stage
            _say(f"{text}\n")

    def done(self) -> None:
        """Take the progress line away."""
        self._wipe()

    def _wipe(self) -> None:
        if self._transient:
            self._transient = False
            _say(_WIPE)


def write_stdout(text: str | None = None) -> None:
    """Write and flush, or flush alone. Raises BrokenPipeError for a closed pipe, ColiError for any other refusal."""
    try:
        if text is not None:
            sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "give it a file or a pipe, or use --output"
        raise ColiError(f"cannot write: {error.strerror}", "stdout", hint) from error


def write_file(path: Path, text: str) -> None:
    """Write `path` whole or not at all; a device or a named pipe is written in place. Raises ColiError."""
    try:
        if path.exists() and not path.is_file():
            with open(path, "w", encoding="utf-8", newline="") as place:
                place.write(text)
            return
        target = Path(os.path.realpath(path))  # a link keeps pointing where it did
        with _beside(target) as place:
            try:
                place.write(text)
                place.flush()
                if target.exists():
                    os.chmod(place.name, stat.S_IMODE(target.stat().st_mode))
                os.replace(place.name, target)
            except BaseException:
                os.unlink(place.name)
                raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, half a character in the text
        reason = getattr(error, "strerror", None) or error
        raise ColiError(f"cannot write: {reason}", path, "check the name and the disk") from error


def _beside(target: Path) -> Any:
    """A new file in the target's folder, open for text."""
    return open(target.parent / f".{target.name[:200]}.{os.getpid()}.part", "x", encoding="utf-8", newline="")


def check_file(path: Path, flag: str = "--output") -> None:
    """Raise UsageError unless `path` can be written, by trying."""
    try:
        if path.is_dir():
            raise UsageError("is a folder", f"{flag} {path}", "give a file")
        if path.exists() and not path.is_file():
            return
        with _beside(Path(os.path.realpath(path))) as place:
            os.unlink(place.name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "give a file in a folder you may write"
        raise UsageError(f"cannot write: {reason}", f"{flag} {path}", hint) from error


def _check_stdout() -> None:
    """Raise ColiError where nothing can ever be written (`>&-`)."""
    if isinstance(sys.stdout, Closed):
        write_stdout("")


def _say(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # nobody listens


def harmless(text: str) -> str:
    """`text` without a character that steers a terminal: control characters stand as their pictures."""
    return text.translate(_PICTURES)


def _width() -> int:
    try:
        return (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1  # a new pty says 0
    except (OSError, ValueError):
        return 79


# ---- streams of the process ------------------------------------------------------------------------------------------


class Closed:
    """A stdout that was closed before we started: every write fails as the kernel would have it."""

    encoding, errors = "utf-8", "strict"

    def write(self, text: str | bytes) -> int:
        raise OSError(9, "Bad file descriptor")

    def flush(self) -> None:
        """Nothing is ever held back."""

    def isatty(self) -> bool:
        return False


def prepare_streams() -> None:
    """Make stdout UTF-8 whatever the locale, and occupy descriptors 0..2, so no file we open becomes stdout."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = Closed()  # type: ignore[assignment]
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as the process)


def abandon_stdout() -> None:
    """After a failed write: let the interpreter's last flush go nowhere instead of failing again."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    except (OSError, ValueError, AttributeError):
        return  # there is no descriptor to flush
