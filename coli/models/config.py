"""Reading a model's config: every value is checked where it is read, and an error names its key.

Guarded by tests/models/test_layout.py, which gives every key absurd values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coli.errors import ModelError
from coli.formats.strict import AGAIN, listing, show

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


def layer_types(read: Reader, layers: int, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The `layer_types` list in the words of `kinds`."""
    types = read.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        found = f"{len(types)} entries" if isinstance(types, list) else show(types)
        raise read.bad("layer_types", f"expected a list of {layers}, found {found}")
    unknown = {show(kind) for kind in types if not isinstance(kind, str) or kind not in kinds}
    if unknown:
        raise read.bad("layer_types", f"unknown kinds {listing(unknown)}", f"known are {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in types)


def rope(read: Reader, head_dim: int, *, factor: float) -> tuple[float, int]:
    """(theta, rotated features), from rope_parameters or the older top-level keys; `factor`: the part of `head_dim`
    that rotates where the config does not say."""
    inner = read.inside("rope_parameters")
    for nested in (inner, read.inside("rope_scaling")):
        kind = nested.config.get("rope_type", nested.config.get("type"))
        if kind not in (None, "default", "mrope"):
            raise nested.bad("rope_type", f"{show(kind)} is not supported", "only plain rotary positions are")
    source = inner if "rope_theta" in inner.config else read
    theta = source.number("rope_theta")
    source = inner if "partial_rotary_factor" in inner.config else read
    factor = source.number("partial_rotary_factor", default=factor)
    rotary = int(head_dim * factor)
    if factor > 1 or rotary < 2 or rotary % 2:
        raise source.bad("partial_rotary_factor", f"{factor} of head_dim {head_dim} is not an even, usable width")
    return theta, rotary
