"""`--memory`: the plan's terms beside the measured ones, as lines for stderr."""

from __future__ import annotations

from coli.memory import NAMES
from coli.planning.measured import MemoryReport
from coli.report import size


def lines(report: MemoryReport) -> list[str]:
    """A table of three columns; the last line compares the totals."""
    rows = [("memory", "planned", "held")]
    rows += [(NAMES[term.name], size(term.planned), size(term.held)) for term in report.terms]
    wide = max(len(name) for name, _, _ in rows)
    table = [f"{name:<{wide}}  {planned:>8}  {held:>8}" for name, planned, held in rows]
    return [*table, f"{'total':<{wide}}  {size(report.planned):>8}  {size(report.peak):>8} at the peak, of a budget of "
            f"{size(report.budget)}"]  # fmt: skip
