"""The arms: ways to draft, each a `Speculation` that differs from the settings' in sources and depth only.

What an arm does not name (per-step confidence, drafts of a lookup, the gate) stays as the settings have it, so that a
variable like Q38_MTP_PSTEP=1 is measured under every arm it concerns.
Guarded by tests/speculation/test_bench_setup.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coli.errors import UsageError
from coli.settings import TABLE, Settings
from coli.speculation.options import MOST_MTP_DRAFTS, Speculation

BASELINE = "off"


@dataclass(frozen=True)
class Arm:
    """One way to draft. `head`: it makes no sense without an MTP head."""

    name: str
    meaning: str
    options: dict[str, Any]
    head: bool = False

    def speculation(self, base: Speculation) -> Speculation:
        """`base` (the settings') with this arm's sources."""
        return replace(base, **self.options)


def _depth(drafts: int) -> Arm:
    what = f"the head, {drafts} draft{'s' * (drafts > 1)} in every verify"
    return Arm(str(drafts), what, {"mtp": True, "drafts": drafts, "lookup": False}, head=True)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(BASELINE, "plain decoding", {"mtp": False, "lookup": False}),
        *map(_depth, (1, 2, 3)),
        Arm("auto", "the head's depth by the gate, and lookup", {"mtp": True, "drafts": 0, "lookup": True}),
        Arm("lookup", "prompt lookup alone", {"mtp": False, "lookup": True}),
        Arm("mtp+lookup", "the head with 2 drafts, and lookup", {"mtp": True, "drafts": 2, "lookup": True}, head=True),
    )
}


def parse(names: str) -> list[Arm]:
    """The arms of a comma-separated list, in its order. Raises UsageError."""
    chosen: list[Arm] = []
    for name in (part.strip() for part in names.split(",")):
        if name not in ARMS:
            raise UsageError(f"{name!r} is no arm", "--arms", f"give some of {','.join(ARMS)}")
        if ARMS[name] in chosen:
            raise UsageError(f"{name} is named twice", "--arms", "name each arm once")
        chosen.append(ARMS[name])
    return chosen


def opening(settings: Settings, arms: list[Arm]) -> Settings:
    """The settings that one engine for all these arms opens with: memory for the deepest verify of any of them, and
    the user's counts left alone. Raises UsageError for a FORCE mode."""
    base = Speculation.of(settings)
    for name, mode in (("mtp_force", base.mtp_force), ("lookup_force", base.lookup_force)):
        if mode is not None:
            raise UsageError("drafts from a reference, which a benchmark has none of", TABLE[name].name, "unset it")
    wanted = [arm.speculation(base) for arm in arms]
    drafts = max((each.drafts or MOST_MTP_DRAFTS for each in wanted if each.mtp), default=1)
    return replace(settings, drafts=drafts, lookup=any(each.lookup for each in wanted), usage_save=False)


def runnable(arms: list[Arm], *, head: bool) -> tuple[list[Arm], list[str]]:
    """(arms that a model with or without a head can run, notes on those left out). Raises UsageError when none can."""
    kept = [arm for arm in arms if head or not arm.head]
    left = [arm.name for arm in arms if arm not in kept]
    if not kept:
        raise UsageError("no arm is left: the model runs without an MTP head", "--arms", "add off, auto or lookup")
    return kept, [f"arms left out, the model runs without an MTP head: {', '.join(left)}"] if left else []


def baseline(arms: list[Arm]) -> str:
    """The arm that ratios and outputs are compared with: plain decoding, or the first arm without it."""
    names = [arm.name for arm in arms]
    return BASELINE if BASELINE in names else names[0]
