"""The bar of tests/server/disconnects.py, in small, over a real server; and that each of its faults is one."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.server.disconnects import FLAGS, Ask, Outcome, dechunked, disconnects, told
from tests.server.live import live

SOUND = Outcome(clients=1000, left=Counter(text=900), finished=100, starts_s=[0.1, 0.9], rss=[100, 104, 104, 105],
                files=[9, 9, 9, 12], threads=[20, 22, 22, 22], cancelled=800)  # fmt: skip


@pytest.mark.slow
def test_clients_that_leave(tmp_path: Path) -> None:
    with live(tmp_path, *FLAGS, "--ctx", "1024") as server:
        out = asyncio.run(disconnects(server, 60, seed=1, wave=20, tokens=25))
    assert not list(out.faults(start_s=10.0)), out.facts()  # the machine may be busy with other tests
    assert out.left.total() >= 60 and out.left["text"] and out.left["nothing"]


def test_what_is_sound() -> None:
    assert not list(SOUND.faults())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wrong": ["'a' is not 'b'"]}, "'a' is not 'b'"),
        ({"unfreed": "{'running': 1}"}, "not freed"),
        ({"starts_s": [0.1, 1.0, 0.1]}, "began after 1.00 s"),
        ({"rss": [100, 100, 103, 106]}, "RSS grew by 6.0%"),
        ({"files": [9, 9, 9, 18]}, "files are kept"),
        ({"threads": [20, 22, 30, 40]}, "threads are kept"),
        ({"cancelled": 0}, "only 0 turns were cancelled"),
    ],
)
def test_faults(change: dict[str, Any], words: str) -> None:
    found = list(replace(SOUND, **change).faults())
    assert len(found) == 1 and words in found[0]


def test_an_answer_is_read_as_far_as_it_came() -> None:
    ask = Ask("/v1/completions", "", True)
    frames = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"b"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (frames[:50], frames[50:])) + b"0\r\n\r\n"
    assert dechunked(body) == frames
    assert told(ask, head + body, whole=True) == (200, "ab")
    seen = {told(ask, (head + body)[:cut], whole=False) for cut in range(len(head + body))}
    assert seen == {(0, ""), (200, ""), (200, "a"), (200, "ab")}
    with pytest.raises(AssertionError, match="without an end"):
        told(ask, head + body[:60], whole=True)
