"""A few threads that read files while Python does something else.

Idea: reads release the GIL, so plain threads suffice; a job is a function with its arguments and reports for itself
(an exception that leaves a job would be lost, so jobs catch theirs). Threads start with the first job, so opening a
model starts none. Handing a job over costs about 2 us against some 30 us of concurrent.futures.
Guarded by tests/formats/test_readers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any


class ReadPool:
    """`threads` daemon threads taking jobs in order."""

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise ValueError(f"a pool of {threads} threads")
        self.threads, self.name = threads, name
        self._jobs: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._team: list[Thread] = []
        self._closed = False

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Run `job(*args)` on some thread. The job must not raise."""
        if self._closed:
            raise RuntimeError(f"{self.name} is closed")
        if not self._team:
            self._team = [Thread(target=self._work, name=f"{self.name}-{i}", daemon=True) for i in range(self.threads)]
            for thread in self._team:
                thread.start()
        self._jobs.put((job, args))

    def _work(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, args = task
            job(*args)
            del job, args, task

    def close(self) -> None:
        """Finish the jobs given so far and end the threads. May be called twice."""
        self._closed = True
        for _ in self._team:
            self._jobs.put(None)
        for thread in self._team:
            thread.join()
        self._team = []
