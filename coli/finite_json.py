"""JSON whose every number can be written again: NaN and Infinity are none of JSON's, and 1e999 would become one.

Python's parser takes all three. Guarded by tests/server/test_guards.py (bodies) and tests/text/test_tools.py (calls).
"""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str, *, strict: bool = True) -> Any:
    """Raises ValueError as json.loads, for these numbers too, and RecursionError. `strict` False: texts may hold
    control characters."""
    return json.loads(text, strict=strict, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number
