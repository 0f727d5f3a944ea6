"""/metrics, /profile and the report lines of a running server, against what its clients got."""

from __future__ import annotations

import asyncio
import itertools

from tests.bench.serve_load import Client, count_faults, phase, scraped
from tests.server.live import Live

ASK = {"model": "nano", "messages": [{"role": "user", "content": "Tell me a story about a bear."}], "temperature": 0}


def test_what_several_clients_got_is_what_was_counted(server: Live):
    seen = asyncio.run(phase(server.port, 4, 0.7, itertools.count(1)))
    assert len(seen.served) >= 4 and count_faults(seen) == []
    kinds = seen.counted.labels("memory_bytes", "kind")
    assert {"rss", "dense", "experts", "kv", "recurrent", "snapshots"} <= kinds


def test_a_refused_request_is_no_turn(server: Live):
    async def refused() -> tuple[int, float]:
        async with Client(server.port) as client:
            before = await scraped(server.port)
            answer = await client.chat(**ASK, n=2)
            return answer.status, (await scraped(server.port) - before)("request_success_total")

    assert asyncio.run(refused()) == (400, 0)


def test_a_turn_is_told_by_its_request_s_id_and_on_stderr_alone(server: Live):
    reply = server.post("/v1/chat/completions", {**ASK, "max_tokens": 30})
    assert reply.status == 200
    id, usage = reply.headers["x-request-id"], reply.json()["usage"]
    turn = server.get("/profile").json()["turns"][0]
    assert (turn["id"], turn["prompt_tokens"], turn["completion_tokens"], turn["finish_reason"]) == (
        id, usage["prompt_tokens"], usage["completion_tokens"], "length",
    )  # fmt: skip
    accepted = sum(drafts["accepted"] for drafts in turn["drafts"].values())
    assert accepted == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert f"[qwen38 MTP] turn {id}: " in server.stderr()
    assert b"tokens/forward" not in reply.body and b"story" not in server.get("/profile").body
