"""Where the memory goes: one table of terms that sizes the expert cache and that the report is compared with.

Every buffer's bytes follow from geometry and settings. `terms` lists them, `choose_cap` spends what is left of the
budget on expert slots. Nothing here allocates. The default budget is 0.88 of the memory that is free for this
process, control-group limits included (design.md section 8).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from coli.errors import DoesNotFit
from coli.state import StateSpec

PROCESS = 130_000_000  # interpreter, NumPy, LLVM's loader, tokenizer: measured (tests/models/test_memory.py)
_SHARE = 0.88


@dataclass(frozen=True)
class Terms:
    """Bytes of every kind of resident memory but the expert cache."""

    process: int
    dense: int  # dense weights: mapped from the files, or repacked
    kv: int  # K, V, index keys of the whole context
    recurrent: int  # DeltaNet states and conv rings
    workspace: int  # activations of a prefill chunk
    undo: int  # what the deepest verify needs to be undone
    head: int  # the draft head: weights, context, workspace, and experts where their number is fixed
    lookup: int  # the index of prompt lookup, of a whole context

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def terms(
    spec: StateSpec, *, dense: int, ctx: int, workspace: int, undo: int = 0, head: int = 0, lookup: int = 0
) -> Terms:
    return Terms(
        process=PROCESS, dense=dense, kv=ctx * spec.kv_bytes_per_token(),
        recurrent=spec.recurrent_bytes() + spec.ring_bytes(), workspace=workspace, undo=undo, head=head, lookup=lookup,
    )


def available() -> int:
    """Bytes this process may still take: free memory of the machine or of its control group, whichever is less."""
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().splitlines()[-1].split("::")[-1]
        group = Path("/sys/fs/cgroup") / own.lstrip("/")
        for folder in (group, *group.parents):
            limit = folder / "memory.max"
            if limit.exists() and limit.read_text().strip() != "max":
                free = min(free, int(limit.read_text()) - int((folder / "memory.current").read_text()))
    return max(0, free)


def default_budget() -> int:
    return int(_SHARE * available())


def choose_cap(budget: int, needs: Terms, *, experts: int, each: int) -> int:
    """Expert slots a layer that the budget holds, at most all; `each`: bytes of one slot in every layer. Raises
    DoesNotFit below one, and where a model without experts does not fit."""
    cap = (budget - needs.total) // each if each else int(budget >= needs.total)
    if cap < 1:
        floor = needs.total + each
        rest = needs.process + needs.recurrent + needs.workspace + needs.undo + needs.lookup
        raise DoesNotFit(
            f"the budget is {budget / 1e9:.2f} GB, this model needs at least {floor / 1e9:.2f} GB "
            f"({needs.dense / 1e9:.2f} weights, {needs.kv / 1e9:.2f} context, {each / 1e9:.2f} for one expert a layer, "
            f"{needs.head / 1e9:.2f} draft head, {rest / 1e9:.2f} the rest)",
            "--ram", f"give --ram {floor / 1e9 + 0.005:.2f} or a smaller --ctx",
        )  # fmt: skip
    return min(experts, cap)


def peak_rss() -> int:
    """Most memory this process ever held, in bytes.

    Linux's own mark is preferred: getrusage's survives an exec, so a program started by a large one would report the
    large one's."""
    import resource
    import sys

    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
