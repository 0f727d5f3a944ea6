"""The prompt of `coli run`: words, stdin and a file become one text.

Parts are joined by a blank line in the order words, file, stdin. stdin is read for `-`, or when it is a pipe or a file
(with words it is then added after them; /dev/null and terminals never are). Every part must be UTF-8.
One newline at the end of stdin or of a file is dropped, since shells and editors put it there; a raw prompt keeps it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from coli.errors import UsageError

EXAMPLE = 'for example: coli run "Tell me a short story about a fox."'
_PATIENCE_S = 1.0


def gather(words: list[str], file: Path | None, *, raw: bool, note: Callable[[str], None]) -> str:
    """The whole prompt. Raises UsageError for none, an empty one, bad UTF-8 and an unreadable file."""
    dash = words == ["-"]
    parts = [] if dash or not words else [text_of(" ".join(words), "PROMPT")]
    if file is not None:
        parts.append(text_in(file, "--file", raw=raw))
    if dash or _piped(alone=not parts):
        parts.append(_trim(_decode(_read_stdin(note), "stdin"), raw))
    elif not parts:
        raise UsageError("no prompt", "coli run", EXAMPLE)
    parts = [part for part in parts if part]
    prompt = "\n\n".join(parts)
    if not (prompt if raw else prompt.strip()):
        raise UsageError("the prompt is empty", "coli run", EXAMPLE)
    return prompt


def text_of(argument: str, where: str) -> str:
    """A word of the command line; bytes that were no UTF-8 arrive as lone surrogates. Raises UsageError."""
    return _decode(os.fsencode(argument), where)


def text_in(file: Path, flag: str, *, raw: bool = False) -> str:
    """A file's text. Raises UsageError for an unreadable one and for bad UTF-8."""
    return _trim(_decode(_read_file(file, flag), f"{flag} {file}"), raw)


def _decode(data: bytes, where: str) -> str:
    from coli.tokenizer import decode_prompt

    return decode_prompt(data, where)


def _trim(text: str, raw: bool) -> str:
    return text if raw else text.removesuffix("\n").removesuffix("\r")


def _read_file(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read: {reason}", f"{flag} {path}", "give a file of UTF-8 text") from error


def _piped(*, alone: bool) -> bool:
    """Whether stdin is part of the prompt: anything but a terminal when alone, else a pipe, socket or file."""
    try:
        number = sys.stdin.fileno()
        mode = os.fstat(number).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by an object without a descriptor
        return False
    if alone:
        return not os.isatty(number)
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin(note: Callable[[str], None]) -> bytes:
    from select import select

    if sys.stdin is None:
        return b""
    try:
        if not select([sys.stdin], [], [], _PATIENCE_S)[0]:
            note("waiting for the prompt on stdin (Ctrl-D ends it; < /dev/null says there is none)")
        return sys.stdin.buffer.read()
    except OSError as error:
        hint = "give the prompt as words or with --file"
        raise UsageError(f"cannot read: {error.strerror}", "stdin", hint) from error
