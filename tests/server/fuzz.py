"""The bar for requests of every kind: no 5xx, every answer in its API's shape; one JSON line at the end.

    python -m tests.server.fuzz [--count 20000] [--seed 0] [--faults 20]

Half of them go to nano, half to nano with a template that reads tools, each over connections that are kept as long as
the server keeps them. What is demanded of every answer stands in `judged`: its status, its id, its type, its shape by
the types of OpenAI's and Anthropic's own clients, an end of every stream. Behind every request a plain one, on the
same connection where it lives, must be answered as the first time. Nothing is shrunk: all faults are listed, each with
the request. Requests are those of tests/server/fuzz_cases.py, the same for the same seed and the same sources
(Hypothesis takes numbers and texts out of these).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from pydantic import TypeAdapter, ValidationError

from tests.server import tool_model
from tests.server.fuzz_bodies import CHAT, COUNT, MESSAGES, MODELS, RESPONSES, TEXT
from tests.server.fuzz_cases import GETS, Case, cases
from tests.server.live import Live, live

FLAGS = ("--ctx", "320", "--slots", "2")  # an answer without a limit ends soon
BATCH = 500  # requests of one run of Hypothesis, which remembers them all
PATIENCE_S = 120.0
ENDS = {"response.completed", "response.incomplete"}
REFUSALS = {400, 401, 403, 404, 405, 413}
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class Wire:
    """A connection to a server, opened again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.socket: socket.socket | None = None
        self.opened = 0

    def ask(self, case: Case) -> Answer:
        """Raises OSError and HTTPException where there is no whole answer."""
        try:
            answer, closes = self._exchanged(case)
        except BaseException:
            self.close()
            raise
        if closes:
            self.close()
        return answer

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        self.socket = None

    def _exchanged(self, case: Case) -> tuple[Answer, bool]:
        if self.socket is None:
            self.socket = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
            self.opened += 1
        with contextlib.suppress(ConnectionError):  # who refuses early does not read all of it
            self.socket.sendall(case.raw())
        with contextlib.closing(HTTPResponse(self.socket, method=case.method)) as response:
            response.begin()
            body = response.read()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, body), response.will_close


# ---- what an answer must be ------------------------------------------------------------------------------------------


@cache
def shapes(path: str) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """An answer in one piece and an event of a stream, as the clients of a path read them."""
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    whole, event = {
        CHAT: (ChatCompletion, ChatCompletionChunk), TEXT: (Completion, Completion),
        RESPONSES: (Response, ResponseStreamEvent), MESSAGES: (Message, RawMessageStreamEvent),
        COUNT: (MessageTokensCount, MessageTokensCount),
    }[path]  # fmt: skip
    return TypeAdapter(whole), TypeAdapter(event)


def judged(case: Case, answer: Answer) -> Iterator[str]:
    """What is wrong with an answer."""
    if answer.status >= 500 or answer.status not in REFUSALS | {200}:
        yield f"status {answer.status}"
    yield from _of_id(case, answer)
    if case.method == "HEAD":
        if answer.body:
            yield "an answer to HEAD has a body"
    elif answer.status != 200:
        yield from _of_refusal(case, answer)
    elif case.method == "POST" and case.path in MODELS:
        yield from _of_answer(case.path, answer)
    elif case.path in GETS and case.path != "/metrics":
        yield from () if isinstance(_json(answer.body), dict) else ("no object",)


def _of_id(case: Case, answer: Answer) -> Iterator[str]:
    given = [value for name, value in case.headers if name == "x-request-id" and _SANE_ID.fullmatch(value)]
    told = answer.headers.get("x-request-id", "")
    if not _SANE_ID.fullmatch(told) or (given and told != given[0]):
        yield f"x-request-id is {told!r}"


def _of_refusal(case: Case, answer: Answer) -> Iterator[str]:
    told = _json(answer.body)
    if answer.headers.get("content-type") != "application/json":
        yield f"a refusal of type {answer.headers.get('content-type')!r}"
    match told:
        case {"type": "error", "error": {"type": str(), "message": str(message), **rest}, "request_id": str(number)}:
            of, whole = "Anthropic", bool(message) and not rest and number == answer.headers.get("x-request-id")
        case {"error": {"message": str(message), "type": str(), "param": str() | None, "code": str() | None, **rest}}:
            of, whole = "OpenAI", bool(message) and not rest and len(told) == 1
        case _:
            of, whole = "nobody", False
    if not whole:
        yield f"a refusal in no shape: {answer.body[:200]!r}"
    elif of != _asks_as(case):
        yield f"a refusal in {of}'s shape"


def _asks_as(case: Case) -> str:
    """Whose client it is: Anthropic's name their version wherever they ask."""
    names = {name for name, _ in case.headers}
    return "Anthropic" if case.path.startswith("/v1/messages") or "anthropic-version" in names else "OpenAI"


def _of_answer(path: str, answer: Answer) -> Iterator[str]:
    whole, event = shapes(path)
    try:
        if answer.headers["content-type"].startswith("text/event-stream"):
            yield from _of_stream(path, answer.body, event)
        else:
            content = json.loads(answer.body, parse_constant=_no_constant)
            whole.validate_python(content)
    except (ValueError, ValidationError) as error:
        yield f"not what clients read: {str(error)[:300]}"


def _of_stream(path: str, body: bytes, event: TypeAdapter[Any]) -> Iterator[str]:
    frames = [frame for frame in body.decode("ascii").split("\n\n") if not frame.startswith(":")]
    if frames.pop() != "":
        yield "a stream ends within a frame"
    lines = [frame.rpartition("\n") for frame in frames]
    done = bool(lines) and lines[-1][2] == "data: [DONE]"
    events = [json.loads(data.removeprefix("data: "), parse_constant=_no_constant)
              for _, _, data in lines[: len(lines) - done]]  # fmt: skip
    if any(one.get("error") is not None for one in events):
        yield f"an error in a stream: {body[-300:]!r}"
        return
    if done != (path in (CHAT, TEXT)):
        yield "a stream without [DONE]" if not done else "a [DONE] that is OpenAI's chat's"
    if path in (CHAT, TEXT):
        reasons = [choice["finish_reason"] for one in events for choice in one["choices"] if choice["finish_reason"]]
        if len(reasons) != 1:
            yield f"{len(reasons)} reasons to end"
    else:
        kinds = [one["type"] for one in events]
        if [name for name, _, _ in lines] != [f"event: {kind}" for kind in kinds]:
            yield "events under other names"
        if kinds.count("message_stop") + sum(map(kinds.count, ENDS)) != 1 or kinds[-1] not in {"message_stop"} | ENDS:
            yield f"a stream that ends with {kinds[-1:]}"
        numbers = [one["sequence_number"] for one in events] if path == RESPONSES else []
        if numbers != list(range(len(numbers))):
            yield "events out of order"
    for one in events:
        if one.get("type") != "ping":  # which the clients' types leave out, and their readers know
            event.validate_python(one if path != TEXT else _ended(one))


def _ended(chunk: dict[str, Any]) -> dict[str, Any]:
    """A chunk of completions as if it were the last: the client's types have forgotten that others have no reason."""
    choices = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
    return {**chunk, "choices": choices}


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except ValueError:
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# ---- asking ----------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What came of the requests."""

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    sound: Counter[str] = field(default_factory=Counter)  # answers to sound requests that were 200, by path
    streams: int = 0
    connections: int = 0
    faults: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def facts(self) -> dict[str, Any]:
        names = ("count", "streams", "connections")
        statuses = {str(status): many for status, many in sorted(self.statuses.items())}
        return {**{name: getattr(self, name) for name in names}, "statuses": statuses, "kinds": dict(self.kinds),
                "sound_200": dict(self.sound), "faults": len(self.faults)}  # fmt: skip


class Fuzz:
    """Requests to one server and what it makes of them."""

    def __init__(self, port: int, model: str) -> None:
        self.wire, self.tally = Wire(port), Tally()
        body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 2, "temperature": 0})
        self.plain = Case("plain", "POST", TEXT, (("content-type", "application/json"),), body.encode())
        self.model, self.right = model, self._told()

    def run(self, count: int, seed: int) -> Tally:
        while (missing := count - self.tally.count) > 0:
            self._batch(min(BATCH, missing), seed * 1_000_000 + self.tally.count)
        self.wire.close()
        self.tally.connections = self.wire.opened
        return self.tally

    def _batch(self, count: int, seed: int) -> None:
        @seeded(seed)
        @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(cases(self.model))
        def each(case: Case) -> None:
            self.tally.faults += [f"{fault}: {shown(case)}" for fault in self._faults(case)]

        each()

    def _faults(self, case: Case) -> Iterator[str]:
        self.tally.count += 1
        self.tally.kinds[case.kind] += 1
        if case.kind == "noise":
            self.wire.close()
        try:
            answer = self.wire.ask(case)
            if case.kind == "noise":
                self.wire.close()  # there may be another answer
        except (OSError, HTTPException) as error:
            yield f"no answer, {error!r}"
        else:
            self._note(case, answer)
            yield from judged(case, answer)
        try:
            if (told := self._told()) != self.right:
                yield f"afterwards {told!r} instead of {self.right!r}"
        except (OSError, HTTPException) as error:
            yield f"no answer afterwards, {error!r}"

    def _note(self, case: Case, answer: Answer) -> None:
        tally = self.tally
        tally.statuses[answer.status] += 1
        if case.kind == "sound":
            tally.sound[case.path] += answer.status == 200
        tally.streams += answer.headers.get("content-type", "").startswith("text/event-stream")

    def _told(self) -> tuple[int, str]:
        """What the plain request is answered."""
        answer = self.wire.ask(self.plain)
        return answer.status, _json(answer.body)["choices"][0]["text"] if answer.status == 200 else repr(answer.body)


def shown(case: Case) -> str:
    raw = case.raw()
    return f"[{case.kind}] {raw[:1500]!r}" + (f" and {len(raw) - 1500} more" if len(raw) > 1500 else "")


def fuzz(server: Live, model: str, count: int, seed: int) -> Tally:
    """Also what the server said of faults of its own."""
    tally = Fuzz(server.port, model).run(count, seed)
    said = server.stderr()
    if "Traceback" in said:
        tally.faults.append(f"on stderr: {said[said.index('Traceback') :][:3000]}")
    return tally


def _target(model: str, count: int, seed: int) -> Tally:
    with tempfile.TemporaryDirectory() as folder:
        path = tool_model.write(Path(folder)) if model == "nano-tools" else None
        with live(Path(folder), *FLAGS, model=path) as server:
            return fuzz(server, model, count, seed)


def main() -> int:
    options = argparse.ArgumentParser(description="Requests of every kind to `coli serve`.")
    options.add_argument("--count", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--faults", type=int, default=20, help="how many are shown")
    given = options.parse_args()
    start, half = time.perf_counter(), given.count // 2
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        targets = [pool.submit(_target, "nano", given.count - half, 2 * given.seed),
                   pool.submit(_target, "nano-tools", half, 2 * given.seed + 1)]  # fmt: skip
        tally = targets[0].result() + targets[1].result()
    for fault in tally.faults[: given.faults]:
        print(fault, file=sys.stderr)
    print(json.dumps({**tally.facts(), "seconds": round(time.perf_counter() - start, 1)}))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
