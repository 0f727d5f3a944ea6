"""What one answer cost: the numbers a run ends with, as one JSON document and as two lines for a person (and those of
coli/speculation/report.py, where there was drafting).

Idea: the session fills one frozen RunReport; commands only choose a form. `to_json()` is a public shape (its keys are
pinned by tests/cli/test_report.py), `lines()` is prose and may change.
Units: seconds, bytes, tokens per second. Prefill counts the prompt's tokens; decode counts the tokens after the first,
because the first one comes out of the prefill. A rate over no time is 0.0, never NaN or infinity: JSON has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coli.speculation.report import SpeculationReport

_ENDINGS = {
    "stop": "the model ended it", "length": "the token limit ended it", "cancelled": "cancelled",
    "error": "an error ended it",
}  # fmt: skip


def rate(tokens: int, seconds: float) -> float:
    """Tokens per second; 0.0 when no time passed."""
    return tokens / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Timings:
    """Seconds, and tokens per second. `ttft_s` runs from the request to the first token, loading not included."""

    load_s: float = 0.0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0


@dataclass(frozen=True)
class Experts:
    """Expert look-ups that found the weights in memory or on their way, those that did not, and the bytes of all
    reads. `prefetched`: experts read ahead on a guess, `prefetch_used`: those that were then chosen; `warmed`: experts
    read in the background because earlier runs used them."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    prefetched: int = 0
    prefetch_used: int = 0
    warmed: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Which model answered; `geometry` holds plain numbers, strings and lists."""

    path: str
    engine: str
    geometry: Mapping[str, Any]


@dataclass(frozen=True)
class RunReport:
    """One answer. `finish_reason` is "stop", "length" or "cancelled"; `speculation` is None for plain decoding;
    `cached_tokens`: of the prompt, that did not have to be read; `token_ids`: those whose text begins before the cut of
    a stop string, and the stop token that ended it; `stop`: the stop string that ended it."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    timings: Timings
    peak_rss_bytes: int
    experts: Experts
    model: ModelFacts
    speculation: SpeculationReport | None = None
    cached_tokens: int = 0
    stop: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The document of `coli run --json`."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "timings": asdict(self.timings),
            "memory": {"peak_rss_bytes": self.peak_rss_bytes},
            "experts": asdict(self.experts),
            "model": {"path": self.model.path, "engine": self.model.engine, "geometry": dict(self.model.geometry)},
            "speculation": None if self.speculation is None else self.speculation.to_json(),
        }

    def lines(self) -> list[str]:
        """The summary for stderr."""
        t, e = self.timings, self.experts
        drafting = [] if self.speculation is None else self.speculation.lines()
        ahead = f"{e.prefetched:,} read ahead and {e.prefetch_used:,} of them used, " if e.prefetched else ""
        ahead += f"{e.warmed:,} read at the start, " if e.warmed else ""
        told = speeds(self.prompt_tokens, t.prefill_tok_s, self.completion_tokens, t.decode_tok_s, self.finish_reason)
        return [
            f"first token {t.ttft_s:.2f} s after {t.load_s:.2f} s of loading · {told}",
            f"experts {count(e.hits, 'hit')}, {count(e.misses, 'miss', 'misses')}, {ahead}{size(e.bytes_read)} read · "
            f"peak memory {size(self.peak_rss_bytes)}",
            *drafting,
        ]


def speeds(prompt_tokens: int, prefill_tok_s: float, completion_tokens: int, decode_tok_s: float,
           finish_reason: str) -> str:  # fmt: skip
    """What both parts of an answer took, and how it ended."""
    return (f"prefill {count(prompt_tokens, 'token')}, {prefill_tok_s:.1f} tok/s · "
            f"decode {count(completion_tokens, 'token')}, {decode_tok_s:.1f} tok/s · "
            f"{_ENDINGS.get(finish_reason, finish_reason)}")  # fmt: skip


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 token`, `2,048 tokens`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(nbytes: int) -> str:
    """Bytes in decimal units with three digits: `0 B`, `45.0 MB`, `185 GB`."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
