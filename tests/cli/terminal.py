"""A program on a terminal of its own: type, wait for words, read the rest."""

from __future__ import annotations

import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import pytest

pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))

ROWS, COLUMNS, WHERE_S = 24, 100, b"\x1b[6n"  # the last is what asks for the cursor's place
# makes the terminal the program's own, so that Ctrl-C is its signal; no preexec_fn, for tests have threads
_OWN = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background may have been told to ignore it
os.execvp(sys.argv[1], sys.argv[1:])
"""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[=>()].?)")


class Terminal:
    """A context; on leaving it the program is killed if it has not ended."""

    def __init__(self, arguments: Sequence[str], cwd: Path, env: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN, *arguments], stdin=slave, stdout=slave, stderr=slave, cwd=cwd,
            env={**env, "TERM": "xterm"}, start_new_session=True,
        )  # fmt: skip
        self._slave = slave  # kept open, so that its modes can be looked at when the program has ended
        self.seen = ""  # of the program, without escape sequences, since the last `until`
        self.raw = b""  # everything

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, words: str, patience: float = 60.0) -> str:
        """What was written up to these words; fails where they do not come."""
        deadline = time.monotonic() + patience
        while words not in self.seen:
            assert time.monotonic() < deadline and self._read(), f"no {words!r} in {self.seen[-2000:]!r}"
        place = self.seen.index(words) + len(words)
        text, self.seen = self.seen[:place], self.seen[place:]
        return text

    def end(self, patience: float = 60.0) -> int:
        """The exit code, once it has ended; `seen` has the rest."""
        deadline = time.monotonic() + patience
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still there: {self.seen[-2000:]!r}"
            self._read(0.05)
        while self._read(0.05):
            continue
        return self.process.returncode

    @property
    def cooked(self) -> bool:
        """Whether the terminal is as a shell wants it: lines, with echo."""
        flags = termios.tcgetattr(self._slave)[3]
        return bool(flags & termios.ICANON and flags & termios.ECHO)

    def _read(self, patience: float = 1.0) -> bool:
        """Whether something came, or the program is still there to write."""
        if not select.select([self._master], [], [], patience)[0]:
            return self.process.poll() is None and patience >= 1.0
        data = os.read(self._master, 65536)
        self.raw += data
        for _ in range(data.count(WHERE_S)):
            self.type("\x1b[10;1R")
        self.seen = _ESCAPES.sub("", (self.seen + data.decode("utf-8", "replace")).replace("\r\n", "\n"))
        return True
