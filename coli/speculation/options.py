"""What a session may draft with: the part of the settings that can differ from turn to turn on one loaded engine.

`coli bench` opens an engine once and gives every arm its own `Speculation`; a server will make one per request. What is
decided when the model is loaded (the head itself, its wiring, its vocabulary list, its expert cache) is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from coli.errors import UsageError
from coli.settings import FORCE_MODES, TABLE, Settings

MOST_MTP_DRAFTS, MOST_LOOKUP_DRAFTS = 3, 5


@dataclass(frozen=True)
class Speculation:
    """`drafts`: of the head in every verify, 0 leaves it to the gate. The FORCE modes need a reference
    (coli/speculation/force.py)."""

    mtp: bool = True  # where the checkpoint has a head and it was loaded
    drafts: int = 2
    pstep: bool = False
    lookup: bool = True
    lookup_drafts: int = MOST_LOOKUP_DRAFTS
    gate: bool = True
    mtp_force: str | None = None
    lookup_force: str | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for what no engine can do."""
        modes = (None, *FORCE_MODES)
        rules = [
            (0 <= self.drafts <= MOST_MTP_DRAFTS, "drafts", f"give 0 to {MOST_MTP_DRAFTS}"),
            (1 <= self.lookup_drafts <= MOST_LOOKUP_DRAFTS, "lookup_drafts", f"give 1 to {MOST_LOOKUP_DRAFTS}"),
            (self.mtp_force in modes, "mtp_force", f"give one of {', '.join(FORCE_MODES)}"),
            (self.lookup_force in modes, "lookup_force", f"give one of {', '.join(FORCE_MODES)}"),
        ]
        for holds, name, hint in rules:
            if not holds:
                raise UsageError(f"{getattr(self, name)!r} is out of range", name, hint)

    @classmethod
    def of(cls, settings: Settings) -> Speculation:
        return cls(
            mtp=settings.mtp is not False, drafts=settings.drafts, pstep=settings.mtp_pstep, lookup=settings.lookup,
            lookup_drafts=settings.lookup_drafts, gate=settings.gate, mtp_force=settings.mtp_force,
            lookup_force=settings.lookup_force,
        )  # fmt: skip

    @property
    def deepest(self) -> int:
        """Drafts of the longest verify."""
        return max(self.mtp * (self.drafts or MOST_MTP_DRAFTS), self.lookup * self.lookup_drafts)

    @classmethod
    def off(cls) -> Speculation:
        """Plain decoding."""
        return cls(mtp=False, lookup=False)


def idle(settings: Settings, *, head: bool) -> list[str]:
    """A line for each setting that was given and cannot act, because what it steers is off; `head`: one is loaded."""
    given = [name for name in TABLE if settings.origin(name) != "default"]
    steers_head = ("drafts", "mtp_vocab", "mtp_wiring", "mtp_cap", "mtp_pstep", "mtp_force", "mtp_dump", "vocab_usage")
    why = {name: "no draft head is loaded" for name in steers_head if not head}
    if not settings.lookup:
        why |= dict.fromkeys(("lookup_drafts", "lookup_force"), "prompt lookup is off")
    if head and settings.mtp_pstep and (settings.drafts < 2 or not settings.gate):
        why["mtp_pstep"] = "it trims a fixed depth of 2 or 3 under the gate"
    if head and settings.mtp_force and settings.mtp_force.startswith("row"):
        most = settings.drafts or MOST_MTP_DRAFTS
        if int(settings.mtp_force[3:]) > most:
            why["mtp_force"] = f"a verify has {most} drafts of the head"
    return [f"{TABLE[name].name} has no effect: {why[name]}" for name in given if name in why]
