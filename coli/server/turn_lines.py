"""What is said of every served turn, on stderr and never on the wire: the lines of spec_decoding.md section 6.

A turn that failed says so as well: its client may be gone, and who runs the server wants to know.
Guarded by tests/server/test_metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coli.server.observers import Observer

if TYPE_CHECKING:
    from coli.server.job import Job


class TurnLines(Observer):
    """Hands each line to `say`, on the thread of the engine."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def ended(self, job: Job) -> None:
        for line in turn_lines(job):
            self._say(line)


def turn_lines(job: Job) -> list[str]:
    """The lines of a job that is over."""
    scope = f"turn {job.id}"
    speculation = None if job.report is None else job.report.speculation
    lines = [] if speculation is None else speculation.lines(scope)
    return lines if job.error is None else [*lines, f"[coli serve] {scope}: {job.error}"]
