"""The picture of a benchmark: one group of bars a prompt, one bar an arm, quartiles as whiskers.

matplotlib is an extra (`pip install "coli[plot]"`) and imported when a picture is drawn; `check` says beforehand
whether it will be there and what the file's ending means.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from coli.bench.summary import Row
from coli.errors import UsageError

FORMATS = ("svg", "png")
INSTALL = 'pip install "coli[plot]"'


def check(path: Path) -> None:
    """Raise UsageError when `draw` could not make this file."""
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError("no picture format that coli draws", f"--plot {path}", "end it in .svg or .png")
    if find_spec("matplotlib") is None:
        raise UsageError("matplotlib is not installed", f"--plot {path}", INSTALL)


def draw(rows: Sequence[Row], title: str, form: str) -> bytes:
    """The picture's file, `form` being one of FORMATS."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    prompts = list(dict.fromkeys(row.prompt for row in rows))
    arms = list(dict.fromkeys(row.arm for row in rows))
    figure = Figure(figsize=(3 + len(prompts) * (0.5 + 0.15 * len(arms)), 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(arms))
    for at, arm in enumerate(arms):
        mine = [(prompts.index(row.prompt), row.speed) for row in rows if row.arm == arm and row.speed is not None]
        axes.bar(
            [place + (at - (len(arms) - 1) / 2) * width for place, _ in mine],
            [speed.median for _, speed in mine],
            width,
            yerr=[
                [speed.median - speed.quarter for _, speed in mine],
                [speed.three_quarters - speed.median for _, speed in mine],
            ],
            label=arm,
            error_kw={"elinewidth": 0.8},
        )
    axes.set_xticks(range(len(prompts)), prompts)
    axes.set_ylabel("tokens per second (median, quartiles)")
    axes.set_title(title, fontsize="medium")
    axes.margins(x=0.01)
    if arms:
        figure.legend(loc="outside right upper", fontsize="small")
    place = io.BytesIO()
    figure.savefig(place, format=form, dpi=150)
    return place.getvalue()
