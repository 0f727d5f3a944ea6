"""A client for the benches of `coli serve` that costs next to nothing: raw sockets, one kept connection, times.

The machine's two cores are shared with what is measured, so while an answer comes its bytes are only put aside, each
piece with the moment it arrived; they are read once the answer is there.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
READY = re.compile(r"coli serve: http://127\.0\.0\.1:(\d+)/v1")
TEXT = ("content", "reasoning_content")


@dataclass(frozen=True)
class Answer:
    """A chat completion from outside. `sent` is a perf_counter, `first_s` and `last_s` (the first and the last text)
    and `whole_s` are seconds after it; an answer that was not streamed has one moment for all. `error` is empty where
    the answer was sound."""

    status: int
    sent: float
    whole_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    text: str = ""
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None
    retry_after_s: float = 0.0
    error: str = ""

    @property
    def tokens(self) -> int:
        return 0 if self.usage is None else self.usage["completion_tokens"]

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.usage is None else self.usage["prompt_tokens"]

    @property
    def cached_tokens(self) -> int:
        return 0 if self.usage is None else self.usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def decode_s(self) -> float:
        return self.last_s - self.first_s


class Client:
    """One connection. Use it as an async context manager."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def get(self, path: str) -> bytes:
        status, _, pieces = await self._exchange(f"GET {path} HTTP/1.1", b"")
        body = b"".join(piece for _, piece in pieces)
        if status != 200:
            raise RuntimeError(f"GET {path}: {status} {body!r}")
        return body

    async def chat(self, **fields: Any) -> Answer:
        body = json.dumps(fields).encode()
        sent = time.perf_counter()
        status, headers, pieces = await self._exchange(f"POST {CHAT} HTTP/1.1", body)
        whole = pieces[-1][0] - sent
        if status != 200:
            text = b"".join(piece for _, piece in pieces).decode()
            return Answer(status, sent, whole, retry_after_s=float(headers.get("retry-after", 0)), error=text)
        if headers["content-type"].startswith("text/event-stream"):
            return _streamed(sent, whole, pieces)
        return _whole(sent, whole, json.loads(b"".join(piece for _, piece in pieces)))

    async def _exchange(self, line: str, body: bytes) -> tuple[int, dict[str, str], list[tuple[float, bytes]]]:
        """(status, headers, pieces of the body with the moments they came)."""
        head = (f"{line}\r\nhost: 127.0.0.1:{self._port}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n")  # fmt: skip
        self._writer.write(head.encode() + body)
        first, *rest = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in rest) if name}
        return int(first.split()[1]), headers, await self._body(headers)

    async def _body(self, headers: Mapping[str, str]) -> list[tuple[float, bytes]]:
        if headers.get("transfer-encoding") != "chunked":
            whole = await self._reader.readexactly(int(headers["content-length"]))
            return [(time.perf_counter(), whole)]
        pieces = []
        while size := int(await self._reader.readline(), 16):
            chunk = await self._reader.readexactly(size + 2)
            pieces.append((time.perf_counter(), chunk[:-2]))
        await self._reader.readline()
        return [*pieces, (time.perf_counter(), b"")]


def _streamed(sent: float, whole: float, pieces: list[tuple[float, bytes]]) -> Answer:
    """The answer of a stream's frames; a frame may have come in several pieces, or several in one."""
    texts, reason, usage, error, held = [], "", None, "", b""
    for moment, piece in pieces:
        *frames, held = (held + piece).split(b"\n\n")
        for frame in frames:
            if not frame.startswith(b"data: {"):
                error = error or ("" if frame.startswith(b":") or frame == b"data: [DONE]" else f"frame {frame!r}")
                continue
            content = json.loads(frame[6:])
            error = error or json.dumps(content["error"]) if "error" in content else error
            usage = content.get("usage") or usage
            for choice in content.get("choices", ()):
                reason = choice.get("finish_reason") or reason
                texts += [(moment, choice["delta"][name]) for name in TEXT if choice["delta"].get(name)]
    if not error and (held or not pieces or usage is None or not reason):
        error = "the stream broke off"
    first, last = (texts[0][0] - sent, texts[-1][0] - sent) if texts else (whole, whole)
    return Answer(200, sent, whole, first, last, "".join(text for _, text in texts), reason, usage, error=error)


def _whole(sent: float, whole: float, content: Mapping[str, Any]) -> Answer:
    choice = content["choices"][0]
    text = "".join(choice["message"].get(name) or "" for name in TEXT)
    return Answer(200, sent, whole, whole, whole, text, choice["finish_reason"], content["usage"])
