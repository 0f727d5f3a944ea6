"""Where the memory goes: the table of terms, and how much there is.

Every buffer's bytes follow from geometry and settings; coli/planning/plan.py fills `Terms` and spends what is left of
the budget on expert slots. Nothing here allocates. The default budget is 0.88 of the memory that is free for this
process, control-group limits included (design.md section 8).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil

from coli import cgroup

# Measured (tests/models/test_plan_reality.py): interpreter, NumPy, LLVM's loader, compiled kernels; what the tokenizers
# package keeps of a byte-level BPE of 64,000 to 248,000 tokens, for each.
PROCESS, TOKEN_BYTES = 120_000_000, 800
# The same of a server (tests/server/test_memory.py): uvicorn, starlette, pydantic, what they make of the endpoints, and
# connections; what llguidance keeps of the tokenizer, for each token, once a client asks for JSON.
SERVER, GRAMMAR_BYTES = 30_000_000, 500
_SHARE = 0.88

NAMES = {
    "process": "interpreter and libraries", "server": "server", "tokenizer": "tokenizer", "dense": "dense weights",
    "experts": "expert cache", "kv": "K/V of the context", "recurrent": "recurrent state", "workspace": "workspace",
    "undo": "undo of a verify", "snapshots": "prefix snapshots and pins", "reading": "reading past the page cache",
    "lookup": "index of prompt lookup", "logits": "logits of answers under way",
    "head": "draft head's weights", "head_experts": "draft head's experts", "head_kv": "draft head's K/V",
    "head_workspace": "draft head's workspace", "vocabulary": "draft vocabulary",
}  # fmt: skip
"""Every term in words: those of `Terms`, and the two expert caches that a plan sizes (coli/planning/plan.py)."""


@dataclass(frozen=True)
class Terms:
    """Bytes of every kind of resident memory but the expert caches, of all slots together."""

    process: int
    tokenizer: int
    dense: int  # dense weights: mapped from the files, or repacked
    kv: int  # K, V, index keys of the whole context
    recurrent: int  # DeltaNet states and conv rings
    workspace: int  # activations of a prefill chunk
    undo: int  # what the deepest verify needs to be undone
    snapshots: int  # states of prefixes and pins
    reading: int  # what experts are read through past the page cache, a piece a thread
    lookup: int  # the index of prompt lookup, of a whole context
    logits: int  # rows that an answer keeps for itself while others are computed
    server: int = 0  # what serves HTTP, and its grammars
    head: int = 0  # the draft head's dense weights
    head_kv: int = 0
    head_workspace: int = 0
    vocabulary: int = 0  # the list of tokens the head scores, and its counts

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def of_head(self) -> int:
        """All that the draft head needs besides its experts."""
        return self.head + self.head_kv + self.head_workspace + self.vocabulary

    def without_head(self) -> Terms:
        return replace(self, head=0, head_kv=0, head_workspace=0, vocabulary=0)


def available(root: Path = Path("/")) -> int:
    """Bytes this process may still take: what the machine has free, or what the control groups it is in leave it,
    whichever is less. Page cache that the kernel can take back is free; `root`: where the groups are looked for."""
    left = [left for group in cgroup.groups(root) if (left := group.left) is not None]
    return max(0, min([psutil.virtual_memory().available, *left]))


def reserve(limit: int) -> int:
    """What is never counted on of a machine or a group that holds `limit` bytes: the kernel kills before its last page
    is gone, and others want some."""
    return min(max(limit // 32, 16 << 20), 1 << 30)


def default_budget() -> int:
    return int(_SHARE * available())


def granted(asked: int, own: int = PROCESS) -> tuple[int, list[str]]:
    """(the budget for a wish of `asked` bytes, notes): no more than what is there. What this process already holds of
    its `own` terms is not missing."""
    mine = min(own, resident())
    there = available() + mine
    most = there - reserve(there)  # whatever is asked: who asks for more never gets less
    if asked <= most:
        return asked, []
    return max(0, most), [f"--ram {asked / 1e9:.4g} lowered to {max(0, most) / 1e9:.4g}: no more memory is available"]


def resident() -> int:
    """Bytes of memory this process holds now."""
    return psutil.Process().memory_info().rss


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
