"""What a session may draft with: the part of the settings that can differ from turn to turn on one loaded engine.

`coli bench` opens an engine once and gives every arm its own `Speculation`; a server will make one per request. What is
decided when the model is loaded (the head itself, its wiring, its vocabulary list, its expert cache) is not here.
Where the engines' rules differ (spec_decoding.md section 3) the difference is a field, so that the decoder knows no
engine: `most` drafts of the head, and `strict`, who wins when both sources are worth the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from coli.errors import UsageError
from coli.settings import FORCE_MODES, MOST_DRAFTS, TABLE, Settings

MOST_LOOKUP_DRAFTS = 5
STRICT = ("qwen36",)


@dataclass(frozen=True)
class Speculation:
    """`drafts`: of the head in every verify, 0 leaves it to the gate. `pmin`: the head stops at a draft it holds less
    likely. `strict`: the head's drafts must be worth more than the copied ones; else the longer proposal wins a tie.
    The FORCE modes need a reference (coli/speculation/force.py)."""

    mtp: bool = True  # where the checkpoint has a head and it was loaded
    drafts: int = 2
    pstep: bool = False
    lookup: bool = True
    lookup_drafts: int = MOST_LOOKUP_DRAFTS
    gate: bool = True
    mtp_force: str | None = None
    lookup_force: str | None = None
    pmin: float = 0.0
    most: int = MOST_DRAFTS["qwen38"]
    strict: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for what no engine can do."""
        modes, deepest = (None, *FORCE_MODES), max(MOST_DRAFTS.values())
        rules = [
            (1 <= self.most <= deepest, "most", f"give 1 to {deepest}"),
            (0 <= self.drafts <= self.most, "drafts", f"give 0 to {self.most}"),
            (1 <= self.lookup_drafts <= MOST_LOOKUP_DRAFTS, "lookup_drafts", f"give 1 to {MOST_LOOKUP_DRAFTS}"),
            (0.0 <= self.pmin <= 1.0, "pmin", "give 0 to 1"),
            (self.mtp_force in modes, "mtp_force", f"give one of {', '.join(FORCE_MODES)}"),
            (self.lookup_force in modes, "lookup_force", f"give one of {', '.join(FORCE_MODES)}"),
        ]
        for holds, name, hint in rules:
            if not holds:
                raise UsageError(f"{getattr(self, name)!r} is out of range", name, hint)

    @classmethod
    def of(cls, settings: Settings) -> Speculation:
        """What the settings say for the engine they were resolved for."""
        return cls(
            mtp=settings.mtp is not False, drafts=settings.drafts, pstep=settings.mtp_pstep, lookup=settings.lookup,
            lookup_drafts=settings.lookup_drafts, gate=settings.gate, mtp_force=settings.mtp_force,
            lookup_force=settings.lookup_force, pmin=settings.mtp_pmin, most=MOST_DRAFTS[settings.engine],
            strict=settings.engine in STRICT,
        )  # fmt: skip

    @property
    def deepest(self) -> int:
        """Drafts of the longest verify."""
        return max(self.mtp * (self.drafts or self.most), self.lookup * self.lookup_drafts)

    @property
    def trims(self) -> bool:
        """Whether the gate trims each verify's drafts by how sure the head was of them."""
        return self.pstep and self.gate and self.drafts >= 2

    @property
    def head_gated(self) -> bool:
        """Whether the gate has a say in how many of the head's drafts are carried."""
        return self.gate and (not self.drafts or self.trims)

    @classmethod
    def off(cls) -> Speculation:
        """Plain decoding."""
        return cls(mtp=False, lookup=False)


def idle(settings: Settings, *, head: bool) -> list[str]:
    """A line for each setting that was given and cannot act, because what it steers is off; `head`: one is loaded.
    What belongs to another engine is `coli.settings.no_effect`'s to say."""
    given = [name for name in TABLE if settings.origin(name) != "default"]
    given = [name for name in given if settings.row(name).serves(settings.engine)]
    why = _head_idle(settings) if head else dict.fromkeys(_HEADS, "no draft head is loaded")
    if not settings.lookup:
        why |= dict.fromkeys(("lookup_drafts", "lookup_force"), "prompt lookup is off")
    return [f"{settings.named(name)} has no effect: {why[name]}" for name in given if name in why]


_HEADS = ("drafts", "mtp_pmin", "mtp_vocab", "mtp_vocab_ids", "mtp_wiring", "mtp_cap", "mtp_pstep", "mtp_force",
          "mtp_dump", "vocab_usage")  # fmt: skip


def _head_idle(settings: Settings) -> dict[str, str]:
    """Why a head's setting does nothing beside the others, by field."""
    why, most = {}, settings.drafts or MOST_DRAFTS[settings.engine]
    if settings.mtp_pstep and (settings.drafts < 2 or not settings.gate):
        why["mtp_pstep"] = "it trims a fixed depth of 2 and more under the gate"
    if most == 1:
        why["mtp_pmin"] = "the first draft is always kept, and a verify has no other"
    force = settings.mtp_force or ""
    if force.startswith("row") and int(force[3:]) > most:
        why["mtp_force"] = f"a verify has {most} drafts of the head"
    if settings.mtp_vocab_ids is not None and settings.mtp_dump is not None:
        why["mtp_vocab_ids"] = f"{settings.row('mtp_dump').name} has the head score the whole vocabulary"
    elif settings.mtp_vocab_ids is not None:
        fixed = f"the head scores the fixed list of {settings.row('mtp_vocab_ids').name}"
        why |= dict.fromkeys(("mtp_vocab", "vocab_usage"), fixed)
    return why
