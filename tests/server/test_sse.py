"""Server-sent events (coli/server/sse.py): frames, keep-alive, errors behind the headers, and who cleans up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from coli.errors import ReadError
from coli.server import sse
from coli.server.errors import ApiError


def test_a_frame_is_one_line_of_ascii() -> None:
    frame = sse.event({"text": "ü\u2028\n\x85"}, "delta")
    assert frame.count(b"\n") == 3 and frame.endswith(b"\n\n") and frame.isascii()
    name, data, *_ = frame.decode().split("\n")
    assert name == "event: delta" and json.loads(data.removeprefix("data: ")) == {"text": "ü\u2028\n\x85"}
    with pytest.raises(ValueError):
        sse.event({"number": float("nan")})


class Wire:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.closed = 0

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def aclose(self) -> None:
        self.closed += 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def stream(wire: Wire, frames: AsyncGenerator[bytes, None]) -> None:
    answering: Any = SimpleNamespace(aclose=wire.aclose)
    await sse.EventStream(answering, frames)({}, None, wire.send)  # type: ignore[arg-type]


async def saying(*frames: bytes, then: Exception | None = None) -> AsyncGenerator[bytes, None]:
    for frame in frames:
        yield frame
    if then is not None:
        raise then


def test_headers_frames_end() -> None:
    wire = Wire()
    asyncio.run(stream(wire, saying(b"data: 1\n\n", sse.DONE)))
    start, *bodies = wire.messages
    headers = dict(start["headers"])
    assert start["status"] == 200 and headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in headers and headers[b"cache-control"] == b"no-cache"
    assert [body["more_body"] for body in bodies] == [True, True, False]
    assert wire.body == b"data: 1\n\ndata: [DONE]\n\n" and wire.closed == 1


@pytest.mark.parametrize("error, status, raised", [
    (ApiError(503, "stopping"), 503, False), (ReadError("no disk"), 500, True), (KeyError("bug"), 500, True),
])  # fmt: skip
def test_an_error_behind_the_headers_is_the_last_frame(error: Exception, status: int, raised: bool) -> None:
    wire = Wire()
    if raised:  # for the operator; the client has been told
        with pytest.raises(type(error)):
            asyncio.run(stream(wire, saying(b"data: 1\n\n", then=error)))
    else:
        asyncio.run(stream(wire, saying(b"data: 1\n\n", then=error)))
    last = wire.body.decode().split("\n\n")[1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == ApiError.of(error).message
    assert b"[DONE]" not in wire.body and wire.messages[-1]["more_body"] is False and wire.closed == 1
    assert ApiError.of(error).status == status


def test_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)

    async def slow() -> AsyncGenerator[bytes, None]:
        while wire.body.count(sse.KEEP_ALIVE) < 2:
            await asyncio.sleep(0.001)
        yield sse.DONE

    wire = Wire()
    asyncio.run(stream(wire, slow()))
    assert wire.body == 2 * sse.KEEP_ALIVE + sse.DONE


def test_a_stream_that_is_cut_closes_its_answer() -> None:
    async def run() -> None:
        task = asyncio.create_task(stream(wire, endless()))
        while not wire.body:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    wire = Wire()
    asyncio.run(run())
    assert wire.closed == 1
