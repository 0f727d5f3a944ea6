"""Ctrl-C and SIGTERM: raised as exceptions outside an answer, a clean stop of the answer inside one.

While an answer is computed the main thread sits in compiled code, where Python's own handlers wait for it to come back.
So the kernel's signal writes its number into a pipe (`signal.set_wakeup_fd`), and a watching thread acts at once: the
first signal cancels the answer, the second leaves the process with its exit code.
A signal that the parent set to be ignored (`nohup`, a shell's `&`) stays ignored.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from coli.errors import Exit

EXITS = {signal.SIGINT: Exit.INTERRUPTED, signal.SIGTERM: Exit.TERMINATED}


class Terminated(BaseException):
    """SIGTERM arrived."""


def _raise(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


def _leave_to_watcher(_number: int, _frame: FrameType | None) -> None:
    """The watching thread has the signal already."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated, as SIGINT raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[list[Exit]]:
    """The first SIGINT or SIGTERM calls `cancel` and puts its exit code into the list; a second ends the process."""
    caught: list[Exit] = []
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while got := os.read(reader, 1):
            code = EXITS.get(signal.Signals(got[0]))
            if code is not None and caught:
                os._exit(code)
            if code is not None:
                caught.append(code)
                cancel()

    watcher = threading.Thread(target=watch, name="coli-signals", daemon=True)
    watcher.start()
    heard = [number for number in EXITS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _leave_to_watcher) for number in heard}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield caught
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)
