"""The README's table "Will it fit?": real models from their configs alone, a budget a row.

    python -m tests.cli.plan_table [--write]

prints the rows, or writes them into README.md between its two marks. Every figure is a sum of named terms of the plan
that a run follows (COLUMNS says which), so the columns of a row add up to its total; tests/cli/test_plan_real.py
compares README.md with what this computes and checks that no term is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from coli.errors import DoesNotFit
from coli.planning.header_cache import surveyed
from coli.planning.plan import Plan, make_plan
from coli.settings import load

ROOT = Path(__file__).parents[2]
README, CONFIGS = ROOT / "README.md", ROOT / "tests" / "configs"
BEGIN, END = "<!-- python -m tests.cli.plan_table --write -->\n", "<!-- end of the table -->\n"
THREADS, CTX = 8, 8192
GB, MB = 1e9, 1e6

COLUMNS = {
    "dense": (GB, ("dense",)),
    "head": (GB, ("head", "head_kv", "head_workspace", "vocabulary", "head_experts")),
    "K/V 8192": (MB, ("kv",)),
    "recurrent": (MB, ("recurrent",)),
    "undo": (MB, ("undo",)),
    "workspace": (MB, ("workspace", "lookup", "reading", "logits")),
    "process": (MB, ("process", "server", "tokenizer", "snapshots")),
}
"""Column -> its unit and its terms; the experts, `cap` of a record a layer, are the rest of the total."""


class Row(NamedTuple):
    """A model of tests/configs in a format (None: the config's own), and the budgets in GB."""

    title: str
    config: str
    weights: str | None
    budgets: tuple[int, ...]


ROWS = (
    Row("Qwen3.8-Flash-Next FP8", "qwen3.8-flash-next-fp8", None, (24, 32, 64)),
    Row("Qwen3.6-35B-A3B bf16", "qwen3.6-35b-a3b", None, (16, 24, 32)),
    Row("Qwen3.6-35B-A3B Q4_K_M", "qwen3.6-35b-a3b", "q4_k_m", (16, 24, 32)),
    Row("Qwen3.6-35B-A3B int4-g64", "qwen3.6-35b-a3b", "int4-g64", (16, 24, 32)),
    Row("Qwen3.8-27B bf16", "qwen3.8-27b", None, (32, 64)),
    Row("Qwen3.8-27B Q4_K_M", "qwen3.8-27b", "q4_k_m", (16, 24)),
    Row("Qwen3-Coder-Next bf16", "qwen3-coder-next", None, (24, 32, 64)),
    Row("Qwen3-Coder-Next Q4_K_M", "qwen3-coder-next", "q4_k_m", (24, 32, 64)),
)  # fmt: skip


def plan_of(row: Row, gigabytes: float, **flags: object) -> Plan:
    """Raises DoesNotFit."""
    settings = load({"threads": THREADS, "ctx": CTX, **flags}, {})[0]
    survey = surveyed(CONFIGS / f"{row.config}.json", settings, row.weights)
    return make_plan(survey, settings.resolve(survey.engine), int(gigabytes * GB))


def parts(plan: Plan) -> dict[str, int]:
    """Bytes of every column."""
    terms = asdict(plan.terms) | {"head_experts": plan.head_experts}
    return {name: sum(terms[term] for term in named) for name, (_, named) in COLUMNS.items()}


def lines() -> Iterator[str]:
    yield "| model | GB | " + " | ".join(COLUMNS) + " | expert | experts a layer | in memory | total |"
    yield "|---" * (6 + len(COLUMNS)) + "|"
    for row in ROWS:
        for gigabytes in row.budgets:
            try:
                yield _line(row, gigabytes, plan_of(row, gigabytes))
            except DoesNotFit:
                least = plan_of(row, 1000, cap=1).total / GB
                yield f"| {row.title} | {gigabytes} |" + " |" * (len(COLUMNS) + 3) + f" needs {least:.2f} |"


def _line(row: Row, gigabytes: int, plan: Plan) -> str:
    cells = [row.title, str(gigabytes)]
    for (name, nbytes), (unit, _) in zip(parts(plan).items(), COLUMNS.values(), strict=True):
        digits = 2 if unit == GB else 0
        cells.append("-" if name == "head" and not plan.head else f"{nbytes / unit:.{digits}f}")
    slots = plan.survey.slots
    if slots:
        cells += [f"{plan.survey.record / MB:.2f}", f"{plan.cap} of {plan.survey.geometry.experts}",
                  f"{plan.residency:.0%}"]  # fmt: skip
    else:
        cells += ["-", "-", "-"]
    return f"| {' | '.join(cells)} | {plan.total / GB:.2f} |"


def table() -> str:
    return "".join(f"{line}\n" for line in lines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(table(), end="")
        return
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
