"""Counting one answer's verifies while they settle; the report is made from these counters alone."""

from __future__ import annotations

from coli.speculation.report import SourceReport

POSITIONS = 8  # drafts a verify may carry at most


class Tally:
    """The counters of one source. Lists are by position in a verify: carried, accepted, judged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.verifies = self.written = 0
        self.carried, self.accepted, self.judged = [0] * POSITIONS, [0] * POSITIONS, [0] * POSITIONS

    def wrote(self, drafts: int) -> None:
        self.written += drafts

    def settled(self, carried: int, accepted: int, judged: int) -> None:
        """A verify with `carried` drafts is over: the first `judged` were compared with picks, `accepted` stood."""
        self.verifies += 1
        for counts, number in ((self.carried, carried), (self.accepted, accepted), (self.judged, judged)):
            for position in range(number):
                counts[position] += 1

    def report(self, declined: int, probes: int) -> SourceReport:
        used = POSITIONS - next((i for i, count in enumerate(reversed(self.carried)) if count), POSITIONS)
        return SourceReport(
            name=self.name, verifies=self.verifies, drafts=sum(self.carried), written=self.written,
            accepted=sum(self.accepted), judged=sum(self.judged), declined=declined, probes=probes,
            by_position=tuple(zip(self.carried[:used], self.accepted[:used], strict=True)),
            judged_by_position=tuple(zip(self.judged[:used], self.accepted[:used], strict=True)),
        )  # fmt: skip
