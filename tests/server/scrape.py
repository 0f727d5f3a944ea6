"""A scrape of /metrics as numbers, and what must hold of them whatever was served (server.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels. `families`: type by name."""

    samples: Mapping[tuple[str, Labels], float]
    families: Mapping[str, str]

    @classmethod
    def of(cls, text: str) -> Scrape:
        families = list(text_string_to_metric_families(text))
        samples = {(sample.name, frozenset(sample.labels.items())): sample.value
                   for family in families for sample in family.samples}  # fmt: skip
        return cls(samples, {family.name: family.type for family in families})

    def __sub__(self, before: Scrape) -> Scrape:
        """What was counted since `before`."""
        return Scrape({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()}, self.families)

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples coli_`name` that have these labels. Raises KeyError where there is no such name."""
        name = f"coli_{name}"
        found = [value for (known, has), value in self.samples.items() if known == name and labels.items() <= has]
        if not found:
            raise KeyError(name)
        return sum(found)

    def labels(self, name: str, label: str) -> set[str]:
        """The values that `label` has in the samples of coli_`name`."""
        return {dict(has)[label] for known, has in self.samples if known == f"coli_{name}" and label in dict(has)}

    def mean(self, name: str) -> float:
        """Seconds of a histogram, on average."""
        count = self(f"{name}_seconds_count")
        return self(f"{name}_seconds_sum") / count if count else 0.0

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper end, how many are at most that) of a histogram without labels, in order."""
        ends = self.labels(f"{name}_seconds_bucket", "le")
        return sorted((float(end), self(f"{name}_seconds_bucket", le=end)) for end in ends)

    def quantile(self, name: str, share: float) -> tuple[float, float]:
        """(lower, upper) end of the bucket that this share of a histogram's values lies below."""
        rows, lower = self.buckets(name), 0.0
        for end, count in rows:
            if count >= share * rows[-1][1]:
                return lower, end
            lower = end
        raise AssertionError("unreachable")


def broken(seen: Scrape) -> list[str]:
    """The identities that do not hold, in words. For scrapes between turns, and for their differences."""
    wide = sum(seen("forward_seconds_count", rows=rows) for rows in seen.labels("forward_seconds_count", "rows")
               if rows != "1")  # fmt: skip
    checks = {
        "verifies are the forwards of several rows": seen("spec_drafts_total") == wide,
        "hits are among the queries": 0 <= seen("prefix_cache_hits_total") <= seen("prefix_cache_queries_total"),
        "queries are the prompts' tokens": seen("prefix_cache_queries_total") == seen("prompt_tokens_total"),
        "every turn that is over has its time": (
            seen("e2e_request_latency_seconds_count") == seen("request_success_total")
        ),
        "first tokens are among the turns that had a slot": (
            seen("time_to_first_token_seconds_count") <= seen("request_queue_time_seconds_count")
        ),
        "tokens are first, later and stop tokens": (
            0 <= seen("generation_tokens_total") - seen("time_to_first_token_seconds_count")
            - seen("inter_token_latency_seconds_count") <= seen("request_success_total", finished_reason="stop")
        ),
    }  # fmt: skip
    found = [text for text, holds in checks.items() if not holds]
    return found + [f"{source}: {text}" for source in sorted(seen.labels("spec_drafts_total", "source"))
                    for text in _broken(seen, source)]  # fmt: skip


def _broken(seen: Scrape, source: str) -> list[str]:
    accepted = seen("spec_accepted_tokens_total", source=source)
    places = sorted(seen.labels("spec_accepted_by_position_total", "position"), key=int)
    hits = [seen("spec_accepted_by_position_total", source=source, position=place) for place in places]
    checks = {
        "positions sum to the accepted": sum(hits) == accepted,
        "no position counts more than the one before it": hits == sorted(hits, reverse=True),
        "accepted drafts are among the carried": accepted <= seen("spec_draft_tokens_total", source=source),
        "first positions are among the verifies": hits[0] <= seen("spec_drafts_total", source=source),
    }
    return [text for text, holds in checks.items() if not holds]
