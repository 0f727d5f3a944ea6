"""What a session may draft with: the part of the settings that can differ from turn to turn on one loaded engine.

`coli bench` opens an engine once and gives every arm its own `Speculation`; a server will make one per request. What is
decided when the model is loaded (the head itself, its wiring, its vocabulary list, its expert cache) is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

from coli.settings import Settings

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
