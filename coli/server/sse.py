"""Server-sent events: an answer's frames over a connection that has to be kept.

The headers go out when this response is called, which is after the prompt was accepted. Whenever nothing was written
for a while (a long prefill, a tool call that is held until it is whole) a comment line tells proxies and clients that
we are still there. An error after the headers is one more frame and the end of the stream. Whatever ends it, the answer
is closed: a client that left takes its job along.

Frames are ASCII, so that no client can split a line at a character that only Unicode takes for one.
Guarded by tests/server/test_sse.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coli.server.answering import Answering
from coli.server.errors import ApiError, openai_body

KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"  # OpenAI's last frame
_SEPARATORS = (",", ":")


def event(content: Mapping[str, Any], name: str | None = None) -> bytes:
    """One frame; `name` is its `event:` line, which OpenAI's chat has none of."""
    data = f"data: {json.dumps(content, separators=_SEPARATORS, allow_nan=False)}\n\n"
    return (f"event: {name}\n{data}" if name else data).encode("ascii")


def openai_failure(error: ApiError) -> bytes:
    return event(openai_body(error))


class EventStream(Response):
    """A 200 whose body are `frames`, made from `answering`; `failure` makes the frame of an error, `idle` is the sign
    of life."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, frames: AsyncGenerator[bytes, None],
                 failure: Callable[[ApiError], bytes] = openai_failure, idle: bytes = KEEP_ALIVE) -> None:  # fmt: skip
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # of the empty body a Response has
        self.answering, self.frames, self.failure, self._idle = answering, frames, failure, idle
        self._written = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        quiet = asyncio.create_task(self._keep_alive(send))
        fault: Exception | None = None
        try:
            async with aclosing(self.frames) as frames:
                async for frame in frames:
                    await self._write(send, frame)
        except Exception as error:
            fault = error
            await self._write(send, self.failure(ApiError.of(error)))
        finally:
            quiet.cancel()
            await self.answering.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if fault is not None and not isinstance(fault, ApiError):
            raise fault  # the client was told; guards.Answered tells the operator

    async def _write(self, send: Send, frame: bytes) -> None:
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        self._written = time.monotonic()

    async def _keep_alive(self, send: Send) -> None:
        """The sign of life after every KEEP_ALIVE_S without a frame."""
        while True:
            await asyncio.sleep(self._written + KEEP_ALIVE_S - time.monotonic())
            if time.monotonic() - self._written >= KEEP_ALIVE_S:
                await self._write(send, self._idle)
