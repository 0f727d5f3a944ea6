"""Templates of the GEMV tiles: short text that becomes the long unrolled text of one tile.

`each name:` repeats its indented block counts[name] times with {name} = 0, 1, ...; `use name` puts a snippet there;
{expression} is evaluated with the numbers and `values` at hand. Everything else is plain Python
(kernels/tiles.py, kernels/tiles_blocked.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping


def unroll(template: str, counts: Mapping[str, int], values: Mapping[str, object]) -> str:
    return "\n".join(_unroll(template.strip("\n").split("\n"), counts, dict(values))) + "\n"


def _unroll(lines: list[str], counts: Mapping[str, int], values: dict[str, object]) -> list[str]:
    out: list[str] = []
    while lines:
        line, lines = lines[0], lines[1:]
        indent = line[: len(line) - len(line.lstrip())]
        word, _, name = line.strip().rstrip(":").partition(" ")
        if word == "use":
            lines = [indent + text for text in str(values[name]).strip("\n").split("\n") if text] + lines
        elif word == "each":
            size = next((i for i, text in enumerate(lines) if not text.startswith(indent + "    ")), len(lines))
            body, lines = [text[4:] for text in lines[:size]], lines[size:]
            for number in range(counts[name]):
                out += _unroll(body, counts, {**values, name: number})
        else:
            out.append(re.sub(r"\{([^}]*)\}", lambda m: str(eval(m[1], {}, values)), line))
    return out
