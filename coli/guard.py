"""The guard: gives expert memory back before the kernel kills the process for it.

Idea: between forwards, and in long ones where a layer waits for experts, but at most four times a second, the guard
reads what the process holds, what the machine and the control groups around it have left, and how long everybody waited
for memory lately. It foresees instead of waiting: a forward may fill every slot of the expert caches that is still
empty, and may touch all that a forward needs the first time, so what is to come counts as if it were there. What then
is over is given back by the caches (`shrink`: empty slots first, then experts used longest ago), whose tokens do not
depend on how much they hold. Two laws, one number:

    budget   held + to come  <=  budget, once it is over by more than the plan may err (3 % or 64 MiB)
    room     to come  <=  left - reserve     of the machine and of every group with a limit

Where the kernel says that everything stood still for memory for a tenth of the time (PSI), the reserve counts twice: a
bound and no spiral, since reading experts through a full page cache causes such waits as well.
What the embedding process held beyond our own term before the engine opened is not ours. Said once, when it happens.
Guarded by tests/models/test_guard.py and, against real groups, by tests/bench/cgroup.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from coli import cgroup, memory
from coli.report import size

INTERVAL = 0.25  # seconds between two looks
IDLE = 5.0  # and after one that found nothing to give
STANDSTILL = 10.0  # percent of the time that nobody could go on for want of memory


class Cache(Protocol):
    """What the guard needs of an expert store. `shrink` returns the bytes it gave back, perhaps more, perhaps none."""

    @property
    def nbytes(self) -> int: ...
    @property
    def filled_bytes(self) -> int: ...
    def shrink(self, nbytes: int) -> int: ...


@dataclass(frozen=True)
class Place:
    """Something that memory runs out in: bytes it holds at most, bytes left of them, percent of time it stood still."""

    words: str
    limit: int
    left: int
    stalled: float = 0.0

    @property
    def room(self) -> int:
        return self.left - memory.reserve(self.limit) * (1 + (self.stalled >= STANDSTILL))


@dataclass(frozen=True)
class Reading:
    """What is held, and every place that limits it."""

    held: int
    places: tuple[Place, ...]


class Meter:
    """Reads the kernel's figures; `root`: where the groups are looked for."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._process, self._groups = psutil.Process(), cgroup.groups(root)
        self._pressure = root / "proc/pressure/memory"

    def __call__(self) -> Reading:
        mine = self._process.memory_info()
        # files we have mapped are "available" to the system, not to us (as in coli/cgroup.py)
        return Reading(mine.rss, tuple(self._places(getattr(mine, "shared", 0))))

    def _places(self, mapped: int) -> Iterator[Place]:
        machine = psutil.virtual_memory()
        yield Place("on this machine", machine.total, machine.available - mapped, cgroup.stalled(self._pressure))
        for group in self._groups:
            limit = group.limit
            if limit is not None:
                yield Place(f"in control group {group.path}", limit, limit - group.used, group.pressure)


class Guard:
    """Watches over `caches`, the largest first. `given`: bytes given back so far."""

    def __init__(
        self, budget: int, terms: memory.Terms, caches: Sequence[Cache], *, say: Callable[[str], None], on: bool = True,
        held: int | None = None, read: Callable[[], Reading] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`held`: bytes this process held before the engine was opened (nothing but our own term, unless given)."""
        self.budget, self.caches, self.given = budget, tuple(caches), 0
        slow = terms.kv + terms.head_kv + terms.snapshots + terms.lookup  # grow with the answer, a token at a time
        self._soon = terms.total - slow
        self._others = max(0, (held or 0) - terms.process - terms.server)
        self._margin = max(budget * 3 // 100, 64 << 20)
        self._say, self._read, self._clock = say, read or Meter(), clock
        self._due = -math.inf if on else math.inf
        self._said = False

    def tick(self) -> None:
        """Look, if it is time to; call it where no kernel runs, between forwards and before experts are read."""
        if self._clock() >= self._due:
            self._look()

    def _look(self) -> None:
        self._due = self._clock() + INTERVAL
        over, why = self._over(self._read())
        if over <= 0:
            return
        given = self._give(over)
        self.given += given
        self._due += 0 if given else IDLE
        if not self._said:
            self._said, kept = True, sum(cache.nbytes for cache in self.caches)
            done = f"the expert cache shrinks from {size(kept + given)} to {size(kept)}, and further where it must"
            self._say(f"memory runs short: {why}; {done if given else 'there is no expert cache to give back'}")

    def _over(self, reading: Reading) -> tuple[int, str]:
        """(bytes to give back, why)."""
        held = reading.held - self._others
        filled = sum(cache.filled_bytes for cache in self.caches)
        empty = sum(cache.nbytes for cache in self.caches) - filled
        full = held + empty
        over, why = full - self.budget, f"{size(full)} would be held, the budget is {size(self.budget)}"
        over = over if over > self._margin else 0
        coming = empty + max(0, self._soon - (held - filled))
        for place in reading.places:
            if coming - place.room > over:
                over, why = coming - place.room, f"{size(max(0, place.left))} left {place.words}"
        return over, why

    def _give(self, nbytes: int) -> int:
        given = 0
        for cache in self.caches:
            if given < nbytes:
                given += cache.shrink(nbytes - given)
        return given
