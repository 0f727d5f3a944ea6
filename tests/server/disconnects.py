"""The bar for clients that leave: many of them, at random moments, in front of four slots; one JSON line at the end.

    python -m tests.server.disconnects [--count 1000] [--seed 0]

Ten clients at a time (four run, six wait) leave while they send their request, in the queue, in prefill, in
decode, streamed or not, by closing or by a reset; some stay to the end. Behind every wave the next request has to start
within a second. What any of them was told up to its leaving must be the beginning of the right answer, and every right
answer still come afterwards. Memory and file descriptors are compared with those of the same server when every slot had
been filled once and the first wave was over: what grows with requests shows, what is allocated once does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from coli.models.find import NANO
from tests.server.live import Live, live
from tests.server.scrape import Scrape, broken

SLOTS, QUEUE, CTX = 4, 8, 2048
CLIENTS = 10  # at a time; who has left is not gone at once, so there is room for two more
FLAGS = ("--slots", str(SLOTS), "--max-queue", str(QUEUE), "--ctx", str(CTX))
WAVE = 50  # clients, then a probe
TOKENS, MORE = 60, 25  # of an answer; who will leave asks for so many times as much, which nobody is to compute
NEVER = {str(id): -100 for id in json.loads((NANO / "generation_config.json").read_text())["eos_token_id"]}
GROWTH, START_S = 0.05, 1.0  # the bars
SPARE = 8  # files and threads that pools of a fixed size may still take
LONG = "one two three four five six seven " * 60  # takes some chunks to read
PROMPTS = ("Tell me a story about a fox.", "Why is the sky blue?", "Count from one to ten.", LONG, "Hi!" + LONG)


class Ask(NamedTuple):
    """A request: `path`, a prompt and whether it streams."""

    path: str
    prompt: str
    stream: bool

    def raw(self, max_tokens: int) -> bytes:
        asked = {"messages": [{"role": "user", "content": self.prompt}]} if "chat" in self.path else {
            "prompt": self.prompt}  # fmt: skip
        body = json.dumps({"model": "nano", **asked, "max_tokens": max_tokens, "temperature": 0, "logit_bias": NEVER,
                           "stream": self.stream})  # fmt: skip
        head = f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json"
        return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


ASKS = [Ask(path, prompt, stream) for path in ("/v1/chat/completions", "/v1/completions") for prompt in PROMPTS
        for stream in (True, False)]  # fmt: skip


@dataclass
class Outcome:
    """What happened; `faults` says what of it must not."""

    clients: int = 0  # but for those refused
    turn_s: float = 0.0  # of an answer, alone
    left: Counter[str] = field(default_factory=Counter)  # by what they had been told: nothing, headers, text
    finished: int = 0
    refused: int = 0  # 429
    wrong: list[str] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)  # of the request behind each wave
    rss: list[int] = field(default_factory=list)  # after each wave
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    cancelled: int = 0  # turns, by the server's own count
    unfreed: str = ""

    def growth(self, values: list[int]) -> float:
        """Of the last waves over the first that count. Medians, so that one garbage collection decides nothing."""
        first, last = values[1 : 1 + max(1, len(values) // 4)], values[-max(1, len(values) // 4) :]
        return sorted(last)[len(last) // 2] / sorted(first)[len(first) // 2] - 1

    def faults(self, start_s: float = START_S) -> Iterator[str]:
        yield from self.wrong
        if self.unfreed:
            yield f"not freed: {self.unfreed}"
        if max(self.starts_s) >= start_s:
            yield f"a request behind a wave began after {max(self.starts_s):.2f} s"
        if self.growth(self.rss) > GROWTH:
            yield f"RSS grew by {self.growth(self.rss):.1%}: {self.rss}"
        for name, counts in (("files", self.files), ("threads", self.threads)):
            if counts[-1] > counts[0] + SPARE:
                yield f"{name} are kept: {counts}"
        if self.cancelled < self.left["text"] / 2:
            yield f"only {self.cancelled} turns were cancelled"

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "left": dict(self.left), "rss_growth": round(self.growth(self.rss), 4),
                "slowest_start_s": round(max(self.starts_s), 3), "faults": list(self.faults())}  # fmt: skip


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def collect(reader: asyncio.StreamReader, got: bytearray, most: float = float("inf")) -> bool:
    """What the server sends, into `got`, which is there for whoever breaks this off; False at `most` bytes."""
    while len(got) < most:
        if not (part := await reader.read(4096)):
            return True
        got += part
    return False


def told(ask: Ask, raw: bytes, *, whole: bool) -> tuple[int, str]:
    """(status, text) of an answer; without `whole`, of as much of it as there is. Status 0: not even headers."""
    head, end, body = raw.partition(b"\r\n\r\n")
    if not end:
        return 0, ""
    status = int(head[9:12])
    if b"transfer-encoding: chunked" in head.lower():
        body = dechunked(body)
    if status != 200 or not (ask.stream or whole):
        return status, ""
    if not ask.stream:
        return status, content(ask, json.loads(body)["choices"][0])
    lines = [line[6:] for line in body.decode().split("\n\n") if line.startswith("data: ")]
    if whole and (not lines or lines[-1] != "[DONE]"):
        raise AssertionError(f"a stream without an end: {body[-300:]!r}")
    frames = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be cut
    return status, "".join(content(ask, choice) for frame in frames for choice in frame["choices"])


def dechunked(body: bytes) -> bytes:
    """As far as chunks are whole."""
    parts = []
    while True:
        size, line, rest = body.partition(b"\r\n")
        if not line or not (length := int(size, 16)) or len(rest) < length + 2:
            return b"".join(parts)
        parts.append(rest[:length])
        body = rest[length + 2 :]


def content(ask: Ask, choice: dict[str, Any]) -> str:
    """The text of a choice: reasoning and content are one here."""
    if "chat" not in ask.path:
        return choice["text"]
    said = choice["delta" if ask.stream else "message"]
    return (said.get("reasoning_content") or "") + (said.get("content") or "")


class Clients:
    """Those of one server; `right`: the answers, `sizes`: their bytes on the wire."""

    def __init__(self, server: Live, seed: int, tokens: int) -> None:
        self.server, self.port, self.tokens, self.dice = server, server.port, tokens, random.Random(seed)
        self.process, self.out = psutil.Process(server.process.pid), Outcome()
        self.right: dict[Ask, str] = {}
        self.sizes: dict[Ask, int] = {}

    async def answer(self, ask: Ask) -> str:
        """The whole answer."""
        got = bytearray()
        async with connected(self.port) as (reader, writer):
            writer.write(ask.raw(self.tokens))
            await collect(reader, got)
        status, text = told(ask, bytes(got), whole=True)
        assert status == 200, bytes(got)
        self.sizes[ask] = len(got)
        return text

    async def prepare(self) -> None:
        """Ask everything once, of a server that nobody has left; then let every slot fill its context."""
        start = time.perf_counter()
        for ask in ASKS:
            self.right[ask] = await self.answer(ask)
        self.out.turn_s = (time.perf_counter() - start) / len(ASKS)
        for ask in ASKS:
            streamed, whole = (self.right[ask._replace(stream=stream)] for stream in (True, False))
            assert streamed == whole, (streamed, whole)
        await asyncio.gather(*map(self._fill, range(SLOTS)))

    async def _fill(self, number: int) -> None:
        async with connected(self.port) as (reader, writer):
            writer.write(Ask("/v1/completions", f"{number} {LONG}", True).raw(CTX))
            await collect(reader, bytearray())

    async def wave(self, count: int) -> None:
        """`count` clients; then as many as fit leave at once, and the server is looked at right behind them."""
        room = asyncio.Semaphore(CLIENTS)

        async def one() -> None:
            async with room:
                await self._client()

        await asyncio.gather(*(one() for _ in range(count)))
        await self._burst()
        await self._probe()
        self.out.rss.append(self.process.memory_info().rss)
        self.out.files.append(self.process.num_fds())
        self.out.threads.append(self.process.num_threads())

    async def _client(self) -> None:
        ask, got, whole, dice = self.dice.choice(ASKS), bytearray(), False, self.dice
        way = dice.choices(("stays", "asking", "by time", "by size"), (0.1, 0.1, 0.4, 0.4))[0]
        raw, moment, most = ask.raw(self.tokens * (1 if way == "stays" else MORE)), None, float("inf")
        match way:
            case "asking":  # it has not sent all
                raw, moment = raw[: dice.randrange(len(raw))], dice.random() * self.out.turn_s
            case "by size" if ask.stream:
                most = dice.randrange(self.sizes[ask])
            case "by size" | "by time":
                moment = dice.random() * self.out.turn_s * SLOTS
        async with connected(self.port) as (reader, writer):
            writer.write(raw)
            with suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(moment):
                    whole = await collect(reader, got, most)
            if not whole and dice.random() < 0.5:
                writer.transport.abort()  # a reset
        self._judge(ask, bytes(got), whole, stayed=way == "stays")
        if got.startswith(b"HTTP/1.1 429"):
            await asyncio.sleep(self.out.turn_s)

    def _judge(self, ask: Ask, got: bytes, whole: bool, *, stayed: bool) -> None:
        out, right = self.out, self.right[ask]
        status, text = told(ask, got, whole=whole)
        if status == 429:
            out.refused += 1
            return
        out.clients += 1
        if status not in (0, 200) or (whole and status != 200):
            out.wrong.append(f"status {status} for {ask}: {got[-300:]!r}")
        elif text != right if stayed else text[: len(right)] != right[: len(text)]:
            out.wrong.append(f"{text!r} is not {right!r}")
        if whole:
            out.finished += 1
        else:
            out.left["text" if text else "headers" if status else "nothing"] += 1

    async def _burst(self) -> None:
        """CLIENTS at once; when the first has text, all of them leave together."""
        begun = asyncio.Event()
        asks = [self.dice.choice(ASKS[::2]) for _ in range(CLIENTS)]

        async def one(ask: Ask) -> None:
            got = bytearray()
            async with connected(self.port) as (reader, writer):
                writer.write(ask.raw(self.tokens * MORE))
                reading = asyncio.create_task(collect(reader, got, most=1000))
                reading.add_done_callback(lambda _: begun.set())
                await begun.wait()
                reading.cancel()
            self._judge(ask, bytes(got), False, stayed=False)

        await asyncio.gather(*map(one, asks))

    async def _probe(self) -> None:
        """The next request: when its first byte comes, and what it says."""
        ask, got = self.dice.choice([ask for ask in ASKS if ask.stream]), bytearray()
        start = time.perf_counter()
        async with connected(self.port) as (reader, writer):
            writer.write(ask.raw(self.tokens))
            got += await reader.read(1)
            self.out.starts_s.append(time.perf_counter() - start)
            await collect(reader, got)
        status, text = told(ask, bytes(got), whole=True)
        if (status, text) != (200, self.right[ask]):
            self.out.wrong.append(f"behind a wave, {status}: {text!r} is not {self.right[ask]!r}")

    async def finish(self) -> None:
        """Everything once more, as many at a time as there are slots; then nobody may be left inside."""
        for first in range(0, len(ASKS), SLOTS):
            asks = ASKS[first : first + SLOTS]
            for ask, text in zip(asks, await asyncio.gather(*map(self.answer, asks)), strict=True):
                if text != self.right[ask]:
                    self.out.wrong.append(f"afterwards, {text!r} is not {self.right[ask]!r}")
        seen = Scrape.of((await asyncio.to_thread(self.server.get, "/metrics")).body.decode())
        inside = {name: seen(f"requests_{name}") for name in ("running", "waiting")}
        self.out.unfreed = str(inside) if any(inside.values()) else ""
        self.out.cancelled = int(seen("request_success_total", finished_reason="cancelled"))
        self.out.wrong += [f"/metrics: not so: {words}" for words in broken(seen)]


async def disconnects(server: Live, count: int, *, seed: int = 0, wave: int = WAVE, tokens: int = TOKENS) -> Outcome:
    clients = Clients(server, seed, tokens)
    await clients.prepare()
    while (missing := count - clients.out.left.total()) > 0:
        await clients.wave(min(wave, missing))
    await clients.finish()
    return clients.out


def main() -> int:
    options = argparse.ArgumentParser(description="Clients that leave at random moments.")
    options.add_argument("--count", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, live(Path(folder), *FLAGS) as server:
        out = asyncio.run(disconnects(server, given.count, seed=given.seed))
    print(json.dumps({**out.facts(), "seconds": round(time.perf_counter() - start, 1)}))
    return 1 if list(out.faults()) else 0


if __name__ == "__main__":
    sys.exit(main())
