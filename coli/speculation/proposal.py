"""What the decoder remembers between two forwards: drafts on their way from a source to the picks that settle them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Proposal:
    """Drafts of one source; none for a plain step."""

    source: str | None = None
    drafts: list[int] = field(default_factory=list)
    p: list[float] | None = None
    written: int = 0
    seconds: float = 0.0


@dataclass
class Shadow:
    """Copied drafts that no verify carried. The picks show all the same how many would have stood, which keeps the
    gate's word of the lookup fresh without a single probe; no report counts them."""

    drafts: list[int]
    accepted: int = 0


@dataclass
class Verify:
    """The last forward: its drafts, how many stood so far, and what is kept of it until it settles."""

    pick: int
    position: int
    proposal: Proposal
    logits: np.ndarray  # of the rows that are numbers
    streams: np.ndarray | None  # for the head, once it is known which rows stand; a plain step's has gone there
    seconds: float
    bytes: list[int]  # by row
    accepted: int = 0

    @property
    def next(self) -> int | None:
        """The draft that the next pick settles; None behind the last whose row is numbers: what plain decoding might
        never ask for must not be answered, and where it does ask it fails as plain decoding does."""
        return self.proposal.drafts[self.accepted] if self.accepted + 1 < len(self.logits) else None
