"""One request through an ASGI application, without a socket: bodies in chunks of one's choosing, clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message


class Answer(NamedTuple):
    """`status` None: nothing was sent."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    read: int  # bytes of the body that were asked for

    def json(self) -> Any:
        return json.loads(self.body)


def ask(app: ASGIApp, method: str = "GET", path: str = "/", *, headers: dict[str, str] | None = None,
        chunks: Iterable[bytes] = (b"",), leaves: bool = False, here: str = "localhost") -> Answer:  # fmt: skip
    """What the application answers; `leaves`: the client is gone behind the last chunk; `here`: the address it asks."""
    return asyncio.run(_ask(app, method, path, {"host": "localhost", **(headers or {})}, chunks, leaves, here))


async def _ask(app: ASGIApp, method: str, path: str, headers: dict[str, str], chunks: Iterable[bytes],
               leaves: bool, here: str) -> Answer:  # fmt: skip
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "root_path": "", "scheme": "http", "server": (here, 1), "http_version": "1.1",
             "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()]}  # fmt: skip
    sent: list[Message] = []
    left = iter(chunks)
    coming = next(left, None)
    read = 0

    async def receive() -> Message:
        nonlocal read, coming
        if coming is None:
            return {"type": "http.disconnect"}
        chunk, coming = coming, next(left, None)
        read += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": leaves or coming is not None}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = next((message for message in sent if message["type"] == "http.response.start"), None)
    names = {name.decode(): value.decode() for name, value in start["headers"]} if start else {}
    return Answer(start and start["status"], names, b"".join(message.get("body", b"") for message in sent), read)
