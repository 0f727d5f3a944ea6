"""A real `coli serve` in a process of its own, for tests that speak HTTP to it over a socket.

`live` starts one on a free port, waits for the line that says it is ready, and ends it whatever the test does.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import CLI, clean_env

READY = re.compile(r"coli serve: (http://\S+)/v1")
PATIENCE_S = 120.0  # for a model on a busy machine


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Live:
    """A server: `url` without a path, `base_url` as OpenAI's clients want it."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stderr(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def request(self, method: str, path: str, content: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own; `content` becomes JSON unless it is bytes."""
        with closing(self.connect()) as connection:
            raw = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
            connection.request(method, path, raw, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, names, answer.read())

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, None, headers)

    def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return self.request("POST", path, content, {"content-type": "application/json", **(headers or {})})

    def answers(self) -> bool:
        """Whether anybody listens there yet; fails when the server ended."""
        assert self.process.poll() is None, self.stderr()
        try:
            return self.get("/health").status > 0
        except ConnectionError:
            return False

    def wait_ready(self) -> None:
        """Until it says so. Fails when it ends before."""
        while self.process.poll() is None:
            if found := READY.search(self.stderr()):
                self.url = found[1]
                return
            time.sleep(0.02)
        raise AssertionError(f"coli serve ended with {self.process.returncode}: {self.stderr()}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def launch(folder: Path, *flags: str, model: Path | str | None = None, command: Sequence[str] = CLI,
           **env: str) -> Live:  # fmt: skip
    """A server that is starting. What it learns is not saved unless USAGE_SAVE=1 is given."""
    named = [] if model is None else ["--model", str(model)]
    log = folder / "serve.stderr"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", *named, *flags], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=stderr, cwd=folder, env=clean_env(**{"USAGE_SAVE": "0", **env}),
        )  # fmt: skip
    return Live(process, log)


@contextmanager
def live(folder: Path, *flags: str, model: Path | str | None = None, command: Sequence[str] = CLI,
         **env: str) -> Iterator[Live]:  # fmt: skip
    """A server that is ready; killed at the end."""
    server = launch(folder, *flags, model=model, command=command, **env)
    try:
        server.wait_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
