"""Reading a model's config: every value is checked where it is read, and an error names its key.

Guarded by tests/models/test_layout.py, which gives every key absurd values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coli.errors import ModelError
from coli.formats.strict import AGAIN, show

SIZE_LIMIT = 1 << 31
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Reader:
    """Typed access to one JSON object of `where`; a value of null counts as absent."""

    config: Mapping[str, Any]
    where: object
    prefix: str = ""

    def bad(self, key: str, what: str, hint: str = AGAIN) -> ModelError:
        return ModelError(f"{self.prefix}{key}: {what}", self.where, hint)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.bad(key, "missing")
        return default

    def size(self, key: str, *, low: int = 1, limit: int = SIZE_LIMIT, default: Any = _REQUIRED) -> int:
        """An integer in low..limit."""
        value = self.get(key, default)
        if type(value) is not int or not low <= value <= limit:
            raise self.bad(key, f"{show(value)} is not a whole number in {low}..{limit}")
        return value

    def number(self, key: str, *, below: float = 1e30, default: Any = _REQUIRED) -> float:
        """A number above 0 and under `below`."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < below:
            raise self.bad(key, f"{show(value)} is not a number between 0 and {below}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, f"{show(value)} is neither true nor false")
        return value

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """The value `choices` has for the name found."""
        name = self.get(key, default)
        if not isinstance(name, str) or name not in choices:
            raise self.bad(key, f"{show(name)} is not one of {', '.join(choices)}")
        return choices[name]

    def inside(self, key: str) -> Reader:
        """A reader of the object under `key`, empty when there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(key, f"{show(value)} is not an object")
        return Reader(value, self.where, f"{self.prefix}{key}.")
