"""The control groups that limit this process's memory and CPUs, version 1 and version 2, as Linux shows them in files.

Idea: a process is in one group, and that group's parents limit it too. `groups` finds them all by what
/proc/self/cgroup says (the group's path) and /proc/self/mountinfo (where a hierarchy is mounted, and from which group
on: a container sees only its own part of it). A `Group` answers from its files, anew at every call, since limits change
while a process runs. Memory that a group holds counts as used only where the kernel cannot take it back: the page
cache of files is given up before anybody is killed, unless a process has it mapped (our own dense weights: giving
those up would end in reading them again at every token).
Invariant: what cannot be read limits nothing; no function raises for a file that is missing, foreign or refused.
Guarded by tests/models/test_cgroup.py, on trees of files made for it (`root`) and on the real one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63 for it, version 2 a word


@dataclass(frozen=True)
class _Names:
    """What a version calls its files and the rows of `memory.stat`."""

    limits: tuple[str, ...]
    used: str
    cached: tuple[str, ...]
    mapped: str


_VERSIONS = {
    "cgroup": _Names(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"),
        "total_mapped_file",
    ),
    # beyond memory.high a group is slowed down to a crawl: as good as a limit
    "cgroup2": _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"), "file_mapped"),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """One control group. `path`: its name below the mount point, "/" for the one that is mounted."""

    folder: Path
    path: str
    names: _Names

    @property
    def limit(self) -> int | None:
        """Bytes it may hold; None without a limit."""
        limits = [int(text) for name in self.names.limits if (text := _text(self.folder / name).strip()).isdigit()]
        return min((limit for limit in limits if limit < _NO_LIMIT), default=None)

    @property
    def used(self) -> int:
        """Bytes it holds that the kernel cannot take back; 0 where it does not tell."""
        text = _text(self.folder / self.names.used).strip()
        if not text.isdigit():
            return 0
        rows = dict(line.split(" ", 1) for line in _text(self.folder / "memory.stat").splitlines() if " " in line)
        cached = sum(int(rows.get(name, 0)) for name in self.names.cached)
        return max(0, int(text) - max(0, cached - int(rows.get(self.names.mapped, 0))))

    @property
    def left(self) -> int | None:
        """Bytes until its limit, less than none when it was lowered; None without a limit."""
        return None if (limit := self.limit) is None else limit - self.used

    @property
    def pressure(self) -> float:
        """Percent of the last ten seconds that all its processes waited for memory; 0 where the kernel does not say."""
        return stalled(self.folder / "memory.pressure")


def stalled(path: Path) -> float:
    """The 10-second average of "full" in a pressure file (percent), 0 without one."""
    found = re.search(r"^full avg10=(\d+\.\d+)", _text(path), re.MULTILINE)
    return float(found[1]) if found else 0.0


def groups(root: Path = Path("/")) -> tuple[Group, ...]:
    """The groups this process's memory counts in, its own first; `root`: where /proc and the mounts are looked for."""
    return tuple(Group(folder, path, _VERSIONS[version]) for version, folder, path in _chain(root, "memory")
                 if (folder / _VERSIONS[version].used).exists())  # fmt: skip


def cpus(root: Path = Path("/")) -> float | None:
    """CPUs that the groups give this process at once; None without a limit."""
    quotas = []
    for version, folder, _ in _chain(root, "cpu"):
        both = _text(folder / "cpu.max") if version == "cgroup2" else " ".join(
            _text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))  # fmt: skip
        numbers = both.split()  # "max" or -1 where there is no limit
        if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def _chain(root: Path, controller: str) -> Iterator[tuple[str, Path, str]]:
    """(version, folder, path) of our groups in the hierarchies of either version that may have `controller`, our own
    first."""
    paths = _paths(root, controller)
    for version, top, mounted in _mounts(root, controller):
        if version in paths:
            below = _below(paths[version], top)
            place = mounted.joinpath(*below)
            for i, folder in enumerate([place, *list(place.parents)[: len(below)]]):
                yield version, folder, "/" + "/".join(below[: len(below) - i])


def _paths(root: Path, controller: str) -> dict[str, str]:
    """The path of our group in the hierarchies of either version."""
    paths = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            paths["cgroup"] = path
        elif (number, controllers) == ("0", ""):
            paths["cgroup2"] = path
    return paths


def _mounts(root: Path, controller: str) -> list[tuple[str, str, Path]]:
    """(version, the group that is mounted, where) of every mounted hierarchy."""
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        version, _, options = rest.split(" ", 2)
        if version == "cgroup2" or (version == "cgroup" and controller in options.split(",")):
            top, place = map(_plain, fields.split(" ")[3:5])
            mounts.append((version, top, root / place.lstrip("/")))
    return mounts


def _below(path: str, top: str) -> list[str]:
    """The steps from the mounted group `top` down to `path`; none where that lies elsewhere, beyond what we see."""
    steps, first = [[step for step in text.split("/") if step] for text in (path, top)]
    return steps[len(first) :] if steps[: len(first)] == first and ".." not in steps else []


def _plain(text: str) -> str:
    """A mountinfo field with its octal escapes undone."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
