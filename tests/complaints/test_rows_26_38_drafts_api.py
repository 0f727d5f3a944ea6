"""Rows 26, 28 and 38 over the API: a request switches its drafts off, and what is said of drafts is what runs."""

from __future__ import annotations

import pytest

from tests.complaints.over_http import frames
from tests.server.live import live

ASKED = [{"role": "user", "content": "Say the same again and again: the fox, the fox, the fox, the fox."}]


def turn(server, **wishes):
    """(the `coli` object of a turn's last chunk, its text, its report lines on stderr)."""
    told = {"include_usage": True, "include_coli": True}
    body = {"model": "nano", "messages": ASKED, "temperature": 0, "max_tokens": 60, "stream": True,
            "stream_options": told, **wishes}  # fmt: skip
    before = len(server.stderr())
    documents = frames(server.post("/v1/chat/completions", body).body)
    text = "".join(choice["delta"].get("content") or "" for doc in documents for choice in doc["choices"])
    assert not any("coli" in document for document in documents[:-1])
    return documents[-1]["coli"], text, server.stderr()[before:]


def test_row_26_a_request_switches_drafts_off(server):
    on, text, lines = turn(server)
    assert on["speculation"] and on["drafts"] > 0 and on["tokens_per_forward"] > 1 and "[qwen38 MTP] turn " in lines
    for off in (False, {"enabled": False}, {"max_drafts": 0}):
        facts, same, lines = turn(server, speculative=off)
        assert same == text and not facts["speculation"] and "acceptance" not in lines
    few, same, _ = turn(server, speculative={"max_drafts": 1})
    assert same == text and few["tokens"] <= 2 * few["forwards"]


HEAD, NO_HEAD = "\ndraft head: ", "\nno draft head: "


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [((), {"head": True, "lookup": True, "most": 5}), (("--no-mtp",), {"head": False, "lookup": True, "most": 5}),
     (("--no-lookup", "--drafts", "1"), {"head": True, "lookup": False, "most": 1}),
     (("--no-mtp", "--no-lookup"), {"head": False, "lookup": False, "most": 0})],
)  # fmt: skip
def test_rows_28_and_38_what_is_said_is_what_runs(tmp_path, flags, drafts):
    """Banner, /health, the facts of a turn and its lines: one truth, of a hybrid model."""
    with live(tmp_path, *flags) as server:
        banner = server.stderr()
        assert (HEAD in banner) == drafts["head"] and (NO_HEAD in banner) == (not drafts["head"])
        assert server.get("/health").json()["drafts"] == drafts
        facts, _, lines = turn(server)
        assert facts["speculation"] == any(drafts.values())
        assert ("MTP] turn" in lines, "lookup] turn" in lines) == (drafts["head"], drafts["lookup"])
        wish = server.post("/v1/chat/completions", {"model": "nano", "messages": ASKED, "max_tokens": 2,
                                                    "speculative": {"enabled": True}})  # fmt: skip
        assert wish.status == (200 if any(drafts.values()) else 400)
        if wish.status == 400:
            assert wish.json()["error"]["param"] == "speculative.enabled"
