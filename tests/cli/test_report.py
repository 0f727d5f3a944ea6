"""The report: the JSON shape is public, the lines name every figure the issue asks for, no rate divides by zero."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coli.report import Experts, ModelFacts, RunReport, Timings, count, rate, size
from coli.speculation.report import SourceReport, SpeculationReport

REPORT = RunReport(
    "Höhe", (1, 2), 12, 2, "stop", Timings(0.5, 0.25, 0.2, 2.0, 60.0, 8.5), 123_456_789, Experts(90, 10, 45_000_000),
    ModelFacts("/m", "qwen38", {"layers": 12}),
)  # fmt: skip


def test_the_document_has_exactly_the_public_keys() -> None:
    document = REPORT.to_json()
    assert list(document) == [
        "text", "token_ids", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "timings",
        "memory", "experts", "model", "speculation",
    ]  # fmt: skip
    assert list(document["timings"]) == ["load_s", "ttft_s", "prefill_s", "decode_s", "prefill_tok_s", "decode_tok_s"]
    assert document["memory"] == {"peak_rss_bytes": 123_456_789}
    assert document["experts"] == {
        "hits": 90, "misses": 10, "bytes_read": 45_000_000, "prefetched": 0, "prefetch_used": 0, "warmed": 0,
    }  # fmt: skip
    assert list(document["model"]) == ["path", "engine", "geometry"]
    assert document["speculation"] is None
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_the_lines_name_every_figure() -> None:
    text = "\n".join(REPORT.lines())
    figures = ("0.25 s", "60.0 tok/s", "8.5 tok/s", "12 tokens", "2 tokens", "90 hits", "10 misses", "45.0 MB")
    assert all(figure in text for figure in figures)


def test_experts_read_ahead_are_told_where_there_were_any() -> None:
    assert "ahead" not in "\n".join(REPORT.lines())
    report = replace(REPORT, experts=Experts(90, 10, 45_000_000, 1_300, 1_100))
    assert "10 misses, 1,300 read ahead and 1,100 of them used, 45.0 MB read" in "\n".join(report.lines())


def test_drafting_adds_its_lines_and_its_part_of_the_document() -> None:
    drafting = SpeculationReport(
        engine="qwen38", tokens=5, forwards=3, mtp=SourceReport("mtp", 2, 4, 4, 2, 3), lookup=None, gate=None,
        gate_on=True, fixed_depth=1, wiring="b", mtp_force=None, lookup_force=None, ended_mid_verify=False,
        expert_bytes=10, rejected_rows=2, rejected_bytes=4, vocabulary=None,
    )  # fmt: skip
    report = replace(REPORT, speculation=drafting)
    assert report.lines() == REPORT.lines() + drafting.lines("run")
    document = report.to_json()
    assert document.pop("speculation") == drafting.to_json()
    assert document == {name: value for name, value in REPORT.to_json().items() if name != "speculation"}


def test_rate_counts() -> None:
    assert rate(10, 2.0) == 5.0 and rate(0, 0.0) == 0.0 and rate(5, 0.0) == 0.0
    assert count(1, "token") == "1 token" and count(2048, "token") == "2,048 tokens" and count(0, "hit") == "0 hits"


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9_996, "10.0 kB"),
                                              (999_600, "1.00 MB"), (185_000_000_000, "185 GB"),
                                              (5 * 10**16, "50000 TB")])  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
