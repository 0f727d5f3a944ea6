"""The arms: ways to draft, each a `Speculation` that differs from the settings' in sources and depth only.

Arms are named before a model is loaded, so the names of every engine are taken at first (`parse`); which of them the
engine has, and which are measured when none is named, is known when it is open (`runnable`).

What an arm does not name (per-step confidence, drafts of a lookup, the gate) stays as the settings have it, so that a
variable like Q38_MTP_PSTEP=1 is measured under every arm it concerns.
Guarded by tests/speculation/test_bench_setup.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from coli.errors import UsageError
from coli.settings import MOST_DRAFTS, TABLE, Settings
from coli.speculation.options import Speculation

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
        *map(_depth, range(1, max(MOST_DRAFTS.values()) + 1)),
        Arm("auto", "the head's depth by the gate, and lookup", {"mtp": True, "drafts": 0, "lookup": True}),
        Arm("lookup", "prompt lookup alone", {"mtp": False, "lookup": True}),
        Arm("mtp+lookup", "the head with 2 drafts, and lookup", {"mtp": True, "drafts": 2, "lookup": True}, head=True),
    )
}


def parse(names: str | None) -> list[Arm]:
    """The arms of a comma-separated list, in its order; every one there is without a list. Raises UsageError."""
    if names is None:
        return list(ARMS.values())
    chosen: list[Arm] = []
    for name in (part.strip() for part in names.split(",")):
        if name not in ARMS:
            raise UsageError(f"{name!r} is no arm", "--arms", f"give some of {','.join(ARMS)}")
        if ARMS[name] in chosen:
            raise UsageError(f"{name} is named twice", "--arms", "name each arm once")
        chosen.append(ARMS[name])
    return chosen


def opening(settings: Settings, arms: list[Arm]) -> Settings:
    """The settings that an engine for all these arms opens with: memory for the deepest verify of any of them, and the
    user's counts left alone. Raises UsageError for a FORCE mode."""
    for row in (*TABLE["mtp_force"], *TABLE["lookup_force"]):
        if row.name in settings.given:
            raise UsageError("drafts from a reference, which a benchmark has none of", row.name, "unset it")
    heads = [arm.options["drafts"] for arm in arms if arm.options["mtp"]]
    every_engine_can = heads and min(heads) > 0 and max(heads) <= min(MOST_DRAFTS.values())
    lookup = any(arm.options["lookup"] for arm in arms)
    return settings.override(drafts=max(heads) if every_engine_can else 0, lookup=lookup, usage_save=False)


def runnable(arms: list[Arm], *, named: bool, head: bool, most: int) -> tuple[list[Arm], list[str]]:
    """(arms that a model can run, notes on those left out): with or without a `head`, of at most so many drafts.
    `named`: the user asked for them. Raises UsageError when none can, or a named one is too deep."""
    deep = [arm.name for arm in arms if arm.options["mtp"] and arm.options["drafts"] > most]
    if deep and named:
        raise UsageError(f"the model's engine drafts {most} at most, not {', '.join(deep)}", "--arms",
                         f"give depths of 1..{most}")  # fmt: skip
    arms = [arm for arm in arms if arm.name not in deep]
    kept = [arm for arm in arms if head or not arm.head]
    left = [arm.name for arm in arms if arm not in kept]
    if not kept:
        raise UsageError("no arm is left: the model runs without an MTP head", "--arms", "add off, auto or lookup")
    return kept, [f"arms left out, the model runs without an MTP head: {', '.join(left)}"] if left else []


def baseline(arms: list[Arm]) -> str:
    """The arm that ratios and outputs are compared with: plain decoding, or the first arm without it."""
    names = [arm.name for arm in arms]
    return BASELINE if BASELINE in names else names[0]
