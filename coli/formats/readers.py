"""A few threads that read files while Python does something else.

Idea: reads release the GIL, so plain threads suffice; a job is a function with its arguments and reports for itself
(an exception that leaves a job would be lost, so jobs catch theirs). Threads start with the first job, so opening a
model starts none. Handing a job over costs about 2 us against some 30 us of concurrent.futures.

There is a queue for each rank, and the first one that is not empty is served. A `Task` is taken once, by a thread or by
who cancels it, and may be hastened into the first queue: it then stands in two and the second find is empty. No lock is
needed: appending to and popping from a deque and a list are atomic, and for every entry of the queues there is one
ticket, put behind it; a thread that holds a ticket and has found some queues empty has an entry in those that remain.
Guarded by tests/formats/test_readers.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

NOW, SOON, SOMETIME = range(3)  # ranks


HEAD_READERS = 4  # threads that read the experts of a draft head


def reading_threads(threads: int) -> int:
    """Threads that read experts beside `threads` that compute: a disk is at its best with several requests at once."""
    return max(8, min(threads, 32))


class Task:
    """A job that is done once, or not at all where it is taken away before."""

    __slots__ = ("_job",)

    def __init__(self, job: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._job = [(job, args)]

    def run(self) -> None:
        """Do the job, unless somebody has taken it."""
        try:
            job, args = self._job.pop()
        except IndexError:
            return
        job(*args)

    def cancel(self) -> bool:
        """Whether the job was still there: nobody does it now."""
        try:
            self._job.pop()
        except IndexError:
            return False
        return True


class ReadPool:
    """`threads` daemon threads taking jobs by rank, and in order."""

    def __init__(self, threads: int, name: str) -> None:
        if threads < 1:
            raise ValueError(f"a pool of {threads} threads")
        self.threads, self.name = threads, name
        self._queues: tuple[deque[Task], ...] = deque(), deque(), deque()
        self._tickets: SimpleQueue[bool] = SimpleQueue()  # one for every entry of the queues; False ends a thread
        self._team: list[Thread] = []
        self._closed = False

    def submit(self, job: Callable[..., None], *args: Any, rank: int = NOW) -> Task:
        """Run `job(*args)` on some thread. The job must not raise."""
        if self._closed:
            raise RuntimeError(f"{self.name} is closed")
        if not self._team:
            self._team = [Thread(target=self._work, name=f"{self.name}-{i}", daemon=True) for i in range(self.threads)]
            for thread in self._team:
                thread.start()
        task = Task(job, args)
        self._enter(rank, task)
        return task

    def hasten(self, task: Task) -> None:
        """A job of a later rank is wanted now."""
        self._enter(NOW, task)

    def _enter(self, rank: int, task: Task) -> None:
        self._queues[rank].append(task)
        self._tickets.put(True)

    def _work(self) -> None:
        while self._tickets.get():
            for queue in self._queues:
                try:
                    task = queue.popleft()
                except IndexError:
                    continue
                task.run()
                del task
                break

    def close(self) -> None:
        """Finish the jobs given so far and end the threads. May be called twice."""
        self._closed = True
        for _ in self._team:
            self._tickets.put(False)
        for thread in self._team:
            thread.join()
        self._team = []
