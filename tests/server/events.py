"""Streams of events, as they stand on the wire."""

from __future__ import annotations

import json
from typing import Any

from tests.server.live import Live


def events(server: Live, path: str, content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The events of a streamed answer with their names; comments are left out."""
    reply = server.post(path, {**content, "stream": True})
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    return parse(reply.body)


def parse(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    frames = stream.decode("ascii").split("\n\n")
    assert frames.pop() == "", "the stream ends within a frame"
    found = []
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][1]["type"] == found[-1][0]
    return found
