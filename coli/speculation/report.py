"""What drafting brought: the counters of one answer, as the lines of spec_decoding.md section 6 and as JSON.

Idea: the decoder counts while verifies settle and hands over one frozen `SpeculationReport`; nothing is derived from
settings, so a report cannot claim a depth or a source that did not run (complaint row 28).
Three counts of a draft, kept apart (rows 21 and 22):
    written    a source proposed it
    carried    a verify had a row for it: `drafts`; the rest was trimmed. Acceptance is accepted over carried
    judged     the caller's picks reached it: the accepted ones and the first that differed. The gate learns from these
`tokens` are the decode tokens fed after the prompt, `forwards` the forwards that fed them: plain steps and verifies.
Facts of the run (tokens per forward, ended mid-verify) stand on the line of every source that is on, also of one that
never drafted.
Invariant: `identities()` is empty: tokens = forwards + accepted over all sources, the positions sum to the totals, a
position's hits never exceed those of the one before. Guarded by tests/speculation/test_report.py, on random runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coli.report import count, size
from coli.settings import PREFIX

PLACES = 3  # of drafts by position on the head's line, at least
DOUBT_AFTER, DOUBT_BELOW = 64, 0.05  # carried drafts, acceptance: a sound head is far above it even on noise


@dataclass(frozen=True)
class SourceReport:
    """One source ("mtp" or "lookup"). `by_position[j]` is (carried, accepted) of draft j + 1 over all verifies,
    `judged_by_position[j]` (judged, accepted)."""

    name: str
    verifies: int = 0
    drafts: int = 0  # carried
    written: int = 0
    accepted: int = 0
    judged: int = 0
    declined: int = 0  # proposals that the gate turned into plain steps
    probes: int = 0  # verifies one deeper than the gate's best, or out of turn, to learn
    by_position: tuple[tuple[int, int], ...] = ()
    judged_by_position: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        judged = [number for number, _ in self.judged_by_position] + [0] * len(self.by_position)
        return {
            "drafts": self.drafts,
            "accepted": self.accepted,
            "judged": self.judged,
            "written": self.written,
            "trimmed": self.written - self.drafts,
            "verifies": self.verifies,
            "declined": self.declined,
            "probes": self.probes,
            "by_position": [
                {"drafts": carried, "accepted": hits, "judged": reached}
                for (carried, hits), reached in zip(self.by_position, judged, strict=False)
            ],
        }


@dataclass(frozen=True)
class GateReport:
    """What the gate has measured. Seconds; `rows` are (n, T(n)/T(1)), `acceptance` the estimates by position."""

    t1_s: float | None  # None: no plain step was measured
    rows: tuple[tuple[int, float], ...]
    rho: float
    draft_s: float  # of each draft past the first; of the head, 0 without one
    first_s: float  # before the first draft is there
    acceptance: tuple[float, ...]  # of the head, of the lookup without one
    decided: bool  # whether it was asked in this answer

    def line(self) -> str:
        t1 = "T(1) not measured" if self.t1_s is None else f"T(1) {self.t1_s * 1e3:.1f} ms"
        rows = "".join(f" {number}:{ratio:.2f}" for number, ratio in self.rows)
        hits = " ".join(f"{share:.2f}" for share in self.acceptance)
        return (
            f"{t1},{' rows' + rows + ',' if rows else ''} rho {self.rho:.2f}, {self.draft_s * 1e3:.1f} ms per extra "
            f"draft, acceptance by position {hits}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "t1_ms": None if self.t1_s is None else self.t1_s * 1e3,
            "rows": {str(number): ratio for number, ratio in self.rows},
            "rho": self.rho,
            "draft_ms": self.draft_s * 1e3,
            "first_draft_ms": self.first_s * 1e3,
            "acceptance": list(self.acceptance),
            "decided": self.decided,
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> GateReport:
        """The report that `to_json` told."""
        t1 = told["t1_ms"]
        return cls(
            None if t1 is None else t1 / 1e3, tuple((int(rows), float(ratio)) for rows, ratio in told["rows"].items()),
            float(told["rho"]), told["draft_ms"] / 1e3, told["first_draft_ms"] / 1e3,
            tuple(float(share) for share in told["acceptance"]), bool(told["decided"]),
        )  # fmt: skip


@dataclass(frozen=True)
class VocabularyReport:
    """The list of tokens the head scored. `size` is its average, `total` the whole vocabulary; `inside` of `picks`
    were on it."""

    size: float
    inside: int
    picks: int
    appended: int
    rebuilds: int
    total: int
    fixed: bool = False  # the list was given, and nothing changes it

    def line(self) -> str:
        if self.fixed:
            return (
                f"fixed list of {self.size:,.0f} of {self.total:,} tokens | picks inside "
                f"{_share(self.inside, self.picks)}"
            )
        return (
            f"{self.size:,.0f} of {self.total:,} tokens on average | picks inside {_share(self.inside, self.picks)} | "
            f"{count(self.appended, 'id')} appended, {count(self.rebuilds, 'rebuild')}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "average_size": self.size,
            "vocabulary": self.total,
            "picks": self.picks,
            "picks_inside": self.inside,
            "appended": self.appended,
            "rebuilds": self.rebuilds,
            "fixed": self.fixed,
        }


@dataclass(frozen=True)
class SpeculationReport:
    """One answer's drafting. A source that was off is None; `fixed_depth` 0 left the head's depth to the gate.
    Bytes are file bytes of experts: in the decode forwards, and those that only rows undone afterwards asked for.
    `most`: drafts of the head that a verify can carry; `head_gated`: the gate had a say in how many it does."""

    engine: str
    tokens: int
    forwards: int
    mtp: SourceReport | None
    lookup: SourceReport | None
    gate: GateReport | None
    gate_on: bool
    fixed_depth: int
    wiring: str
    mtp_force: str | None
    lookup_force: str | None
    ended_mid_verify: bool
    expert_bytes: int
    rejected_rows: int
    rejected_bytes: int
    vocabulary: VocabularyReport | None
    warnings: tuple[str, ...] = ()
    most: int = PLACES
    head_gated: bool = False

    @property
    def sources(self) -> tuple[SourceReport, ...]:
        return tuple(source for source in (self.mtp, self.lookup) if source is not None)

    @property
    def drafts(self) -> int:
        """Carried, of all sources."""
        return sum(source.drafts for source in self.sources)

    @property
    def accepted(self) -> int:
        """Of all sources."""
        return sum(source.accepted for source in self.sources)

    @property
    def per_forward(self) -> float | None:
        """Tokens a forward; None without any."""
        return self.tokens / self.forwards if self.forwards else None

    def lines(self, scope: str = "run") -> list[str]:
        """The lines for stderr; `scope` is "run" or "turn <id>"."""
        rows = {"MTP" if self.wiring else "mtp": self._mtp(), "lookup": self._lookup()}
        if self.gate is not None and self.gate.decided:
            rows["spec gate"] = self.gate.line()
        if self.vocabulary is not None:
            rows["draft list"] = self.vocabulary.line()
        if self.sources:
            rows["expert reads"] = self._reads()
        return [f"[{self.engine} {name}] {scope}: {text}" for name, text in rows.items() if text] + list(self.warnings)

    def to_json(self) -> dict[str, Any]:
        """`speculation` of `coli run --json`."""
        mtp = None if self.mtp is None else {
            **self.mtp.to_json(), "wiring": self.wiring or None, "depth": self.fixed_depth or "auto",
            "force": self.mtp_force,
        }  # fmt: skip
        lookup = None if self.lookup is None else {**self.lookup.to_json(), "force": self.lookup_force}
        return {
            "tokens": self.tokens,
            "forwards": self.forwards,
            "mtp": mtp,
            "lookup": lookup,
            "gate": None if self.gate is None else {"on": self.gate_on, **self.gate.to_json()},
            "ended_mid_verify": self.ended_mid_verify,
            "bytes_per_token": self.expert_bytes / self.tokens if self.tokens else 0.0,
            "rejected": {"rows": self.rejected_rows, "bytes": self.rejected_bytes},
            "draft_list": None if self.vocabulary is None else self.vocabulary.to_json(),
            "warnings": list(self.warnings),
        }

    def identities(self) -> list[str]:
        """The identities that do not hold, in words; a sound report has none."""
        verifies = sum(source.verifies for source in self.sources)
        undone = self.drafts - self.accepted
        checks = {
            f"{self.tokens} tokens = {self.forwards} forwards + {self.accepted} accepted":
                self.tokens == self.forwards + self.accepted,
            f"{verifies} verifies are among {self.forwards} forwards": verifies <= self.forwards,
            f"{self.rejected_rows} rejected rows are among {undone} undone": self.rejected_rows <= undone,
            "bytes of rejected rows are among all": 0 <= self.rejected_bytes <= self.expert_bytes,
        }  # fmt: skip
        broken = [text for text, holds in checks.items() if not holds]
        return broken + [f"{source.name}: {text}" for source in self.sources for text in _broken(source)]

    # ---- lines ---------------------------------------------------------------------------------------------------

    def _mtp(self) -> str:
        if self.mtp is None:
            return ""
        force = f", {PREFIX[self.engine]}MTP_FORCE={self.mtp_force}" if self.mtp_force else ""
        what = f"wiring {self.wiring}" if self.wiring else self._gated(self.mtp, self.head_gated)
        parts = [self._pace(), f"acceptance {_share(self.mtp.accepted, self.mtp.drafts, ' drafts')}", what + force]
        if self.fixed_depth != 1:
            places = max(self.fixed_depth or self.most, PLACES)
            seen = [*self.mtp.by_position, *[(0, 0)] * (places - len(self.mtp.by_position))]
            depth = "depth by the gate" if self.gate_on and not self.fixed_depth else "fixed depth"
            text = " ".join(f"{at} {_share(hits, carried)}" for at, (carried, hits) in enumerate(seen, 1))
            parts.append(f"{depth}, by position: {text}")
        return " | ".join([*parts, *self._ending()])

    def _lookup(self) -> str:
        if self.lookup is None:
            return ""
        source = self.lookup
        drafts = _share(source.accepted, source.drafts, f" drafts in {source.verifies} verifies")
        force = f", COLI_LOOKUP_FORCE={self.lookup_force}" if self.lookup_force else ""
        gate = self._gated(source, self.gate_on)
        return " | ".join([self._pace(), f"acceptance {drafts}", gate + force, *self._ending()])

    def _gated(self, source: SourceReport, on: bool) -> str:
        return f"gate on, {source.declined} declined, {source.probes} probes" if on else "gate off"

    def _pace(self) -> str:
        pace = self.tokens / self.forwards if self.forwards else 0.0
        return f"{pace:.2f} tokens/forward ({self.forwards} forwards per {self.tokens} tokens)"

    def _ending(self) -> list[str]:
        return ["ended mid-verify"] if self.ended_mid_verify else []

    def _reads(self) -> str:
        rows = self.rejected_rows
        each = f" ({size(round(self.rejected_bytes / rows))} each)" if rows else ""
        return (
            f"{size(round(self.expert_bytes / self.tokens) if self.tokens else 0)} per emitted token | "
            f"{size(self.rejected_bytes)} in {count(rows, 'rejected row')}{each}"
        )


def acceptance_warning(drafts: int, accepted: int) -> str | None:
    """A line when a head's drafts are almost never accepted after enough carried ones (complaint row 30), else None."""
    if drafts < DOUBT_AFTER or accepted >= DOUBT_BELOW * drafts:
        return None
    return (
        f"the head's drafts are almost never accepted ({_share(accepted, drafts)}): is the head quantised or of "
        "another checkpoint? --no-mtp leaves it out"
    )


def _share(part: int, whole: int, unit: str = "") -> str:
    """`90.0% (63/70 drafts)`; 0.0% of nothing."""
    return f"{100 * part / whole if whole else 0.0:.1f}% ({part}/{whole}{unit})"


def _broken(source: SourceReport) -> Iterator[str]:
    """The identities of one source that do not hold."""
    carried, hits = [row[0] for row in source.by_position], [row[1] for row in source.by_position]
    judged = [row[0] for row in source.judged_by_position]
    if sum(hits) != source.accepted or sum(carried) != source.drafts or sum(judged) != source.judged:
        yield "the positions do not sum to the totals"
    if carried and carried[0] != source.verifies:
        yield "a verify carried no first draft"
    if any(counts != sorted(counts, reverse=True) for counts in (carried, hits, judged)):
        yield "a position counts more than the one before it"
    if any(number > before for number, before in zip(judged[1:], hits, strict=False)):
        yield "a draft was judged behind one that did not stand"
    if not all(a <= j <= c for a, j, c in zip(hits, judged, carried, strict=False)):
        yield "a position's accepted, judged and carried drafts are out of order"
    if not source.accepted <= source.judged <= source.accepted + source.verifies:
        yield "more drafts were judged than accepted ones and one rejection a verify"
    if not source.drafts <= source.written:
        yield "more drafts were carried than written"
