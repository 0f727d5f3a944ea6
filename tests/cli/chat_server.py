"""A server that says what a test wrote down, in the wire format of OpenAI's chat API."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {
    "prompt_tokens": 21, "completion_tokens": 5, "total_tokens": 26, "prompt_tokens_details": {"cached_tokens": 13},
    "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 3,
                                  "rejected_prediction_tokens": 1},
}  # fmt: skip
Refusal = tuple[int, dict[str, Any], dict[str, str]]  # status, body, headers


@dataclass
class Script:
    """What is answered. `pieces`: deltas of every answer; `refusals`: come first, one a request of either kind."""

    pieces: list[dict[str, str]] = field(default_factory=lambda: [{"content": "Hi "}, {"content": "there."}])
    version: dict[str, Any] | None = field(default_factory=lambda: {"name": "coli", "version": "0"})
    models: list[Refusal] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    pause: float = 0.0  # before each piece
    endless: bool = False  # the last piece is said again and again
    cut: bool = False  # the connection ends before [DONE]
    error: str | None = None  # an error in the stream, after the pieces
    raw: str | None = None  # the data of an event before the last ones
    reason: Any = "stop"
    usage: dict[str, Any] = field(default_factory=lambda: dict(USAGE))
    own: dict[str, Any] = field(default_factory=lambda: {"tokens_per_forward": 2.5, "gate": None})
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies, in order
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)  # a client left in the middle of an answer


def error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a server that follows `script`, which a test may change on the way."""

    class Handler(_Handler):
        pass

    Handler.script = script
    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is part of the play, whatever else goes wrong is not."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        script = self.script
        if self.path == "/version" and script.version is not None:
            self._json(200, script.version)
        elif self.path == "/v1/models":
            script.headers.append(dict(self.headers))
            self._json(*(script.models.pop(0) if script.models else (200, {"data": [{"id": "scripted"}]}, {})))
        else:
            self._json(404, error("nothing here"))

    def do_POST(self) -> None:
        script = self.script
        script.headers.append(dict(self.headers))
        script.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if script.refusals:
            self._json(*script.refusals.pop(0))
            return
        try:
            self._stream(script, script.asked[-1])
        except OSError:
            script.gone.set()
            self.close_connection = True

    def _stream(self, script: Script, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(": keep-alive\n\n")
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for delta in _said(script):
            time.sleep(script.pause)
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if script.error is not None:
            self._event(error(script.error))
        if script.cut or script.error is not None:
            self.close_connection = True
            return
        if script.raw is not None:
            self._chunk(f"data: {script.raw}\n\n")
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": script.reason}]})
        last: dict[str, Any] = {"choices": [], "usage": script.usage}
        if asked["stream_options"].get("include_coli"):
            last["coli"] = script.own
        self._event(last)
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(value)}\n\n")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": "application/json", "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Tests have their own words."""


def _said(script: Script) -> Iterator[dict[str, str]]:
    yield from script.pieces
    while script.endless:
        yield script.pieces[-1]
