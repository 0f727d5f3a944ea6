"""The HTTP side of `coli chat`: a server's answers by OpenAI's chat API, over the standard library's http.client.

One connection an answer. The answer is read as server-sent events: `data:` lines up to an empty line are one event,
lines that begin with a colon keep the connection alive, `[DONE]` ends it. An end without `[DONE]` is an error, never a
short answer.
`cancel` shuts the socket down under the reader, from whatever thread; the server sees a client that went away and frees
its slot within one forward. What was read until then is the answer.
A coli server says so at /version and is then asked for its own facts (`include_coli`); any other server of this API is
asked for nothing it may not know.
Waiting for an answer has no time limit, since a queue and a long prompt take minutes: connecting has one, and the
kernel's keep-alive finds a peer that is gone.
Guarded by tests/cli/test_chat_client.py, against a scripted server and against `coli serve`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from coli.answer import Delta, Kind
from coli.conversation import Conversation, TurnFacts, Wishes
from coli.errors import ColiError, PromptTooLong, UsageError
from coli.report import count, rate, speeds
from coli.speculation.report import GateReport

Pieces: TypeAlias = tuple[tuple[Kind, Any], ...]
CONNECT_S = 10.0
PROBE_S = 1.0  # for the server that nobody named: loopback answers at once or not at all
LOADING_S = 0.5  # between looks at a server that is still loading
_BODY = 1 << 20  # bytes of an error or a list that are read


@dataclass(frozen=True)
class Address:
    """Where an API lives: `prefix` is what stands before /chat/completions, `root` what stands before that /v1."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def of(cls, url: str) -> Address:
        """`http://host:port/v1`, the /v1 being optional. Raises UsageError."""
        hint = "give an address such as http://127.0.0.1:8000/v1"
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"is no address: {error}", f"--url {url}", hint) from None
        if scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username is not None:
            raise UsageError("is no address of a server", f"--url {url}", hint)
        if not _plain(parts.path):
            raise UsageError("its path is not plain ASCII", f"--url {url}", "write other characters as %XX")
        if not _names(host):
            raise UsageError(f"{host!r} is no name of a host", f"--url {url}", hint)
        return cls(scheme, host, port or (443 if scheme == "https" else 80), parts.path.rstrip("/") or "/v1")

    @property
    def root(self) -> str:
        return self.prefix.removesuffix("/v1")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def connect(self, timeout: float) -> HTTPConnection:
        kind = HTTPSConnection if self.scheme == "https" else HTTPConnection
        return kind(self.host, self.port, timeout=timeout)


def is_coli(address: Address, timeout: float = PROBE_S) -> bool:
    """Whether a coli server answers there. No key is sent to find out."""
    connection = address.connect(timeout)
    try:
        connection.request("GET", f"{address.root}/version")
        response = connection.getresponse()
        document = json.loads(response.read(_BODY))
        return response.status == 200 and isinstance(document, dict) and document.get("name") == "coli"
    except (OSError, HTTPException, ValueError, RecursionError):
        return False
    finally:
        connection.close()


class Server:
    """A `Partner` behind an address. `open` finds its model."""

    def __init__(self, address: Address, key: str | None, wishes: Wishes) -> None:
        self.address, self.wishes = address, wishes
        self._key = key
        self.coli = False
        self.model = ""
        self.ctx: int | None = None  # positions; not every server says
        self.facts: TurnFacts | None = None
        self.say: Callable[[str], None] = lambda text: None  # a server tells this side nothing meanwhile
        self.own: dict[str, Any] = {}  # the coli object of the last answer
        self._socket: socket.socket | None = None
        self._cancelled = False  # the answer under way

    @classmethod
    def open(cls, address: Address, key: str | None, wishes: Wishes, on_progress: Callable[[str], None]) -> Server:
        """The server's first model; waits while the server loads it. Raises ColiError."""
        server = cls(address, key, wishes)
        server.coli = is_coli(address, CONNECT_S)
        while not server._look():
            on_progress(f"the server at {address} is loading its model")
            time.sleep(LOADING_S)
        return server

    def _look(self) -> bool:
        """Ask for the models; False while the server loads."""
        connection, response = self._request("GET", "/models", None, CONNECT_S)
        try:
            body = self._body(response)
            if response.status == 503 and _error(body).get("code") == "loading":
                return False
            self._check(response, body)
            models = body.get("data") if isinstance(body, dict) else None
            first = next((one for one in models if isinstance(one, dict)), {}) if isinstance(models, list) else {}
            name, ctx = first.get("id"), first.get("max_model_len")
            if not isinstance(name, str):
                raise UsageError("lists no model", self.address, "give the address of an OpenAI-compatible API")
            self.model, self.ctx = name, _whole(ctx) or None
            return True
        finally:
            connection.close()

    # ---- an answer ---------------------------------------------------------------------------------------------------

    def answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        self.facts, self.own, self._cancelled = None, {}, False
        return self._answer(conversation, question)

    def _answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        clock = _Clock()
        connection = None
        try:
            connection, response = self._request("POST", "/chat/completions", self._ask(conversation, question), None)
            if response.status != 200:
                self._check(response, self._body(response))
            yield from self._read(response, clock)
        except (OSError, HTTPException) as error:
            if not self._cancelled:
                raise self._lost(error) from error
        except ColiError:
            if not self._cancelled:
                raise
        finally:
            self._socket = None
            if connection is not None:
                connection.close()

    def cancel(self) -> None:
        self._cancelled = True
        if (open_socket := self._socket) is not None:
            _shut(open_socket)

    def details(self) -> list[str]:
        """As of an engine of one's own: how full the context is, speeds, the gate."""
        facts = self.facts
        if facts is None:
            return []
        room = f" of {count(self.ctx, 'position')}" if self.ctx else ""
        lines = [f"context {facts.prompt_tokens + facts.completion_tokens:,}{room}"]
        if (prefill := _number(self.own.get("prefill_s"))) is not None:
            read = rate(facts.prompt_tokens - facts.cached_tokens, prefill)
            told = speeds(facts.prompt_tokens, read, facts.completion_tokens, facts.tok_s, facts.finish_reason)
            lines.append(f"first token {facts.ttft_s:.2f} s · {told}")
        return lines + _gate(self.own)

    def idle(self, conversation: Conversation) -> list[str]:
        return []  # the server refuses what its model does not read

    def _ask(self, conversation: Conversation, question: str) -> dict[str, Any]:
        wishes, thinking = self.wishes, conversation.thinking
        options: dict[str, Any] = {"include_usage": True} | ({"include_coli": True} if self.coli else {})
        body = {
            "model": self.model, "messages": conversation.messages(question), "stream": True,
            "stream_options": options, "max_completion_tokens" if self.coli else "max_tokens": wishes.max_tokens,
            "temperature": wishes.temperature, "top_p": wishes.top_p, "top_k": wishes.top_k, "min_p": wishes.min_p,
            "repetition_penalty": wishes.repetition_penalty, "presence_penalty": wishes.presence_penalty,
            "frequency_penalty": wishes.frequency_penalty, "seed": wishes.seed,
            "stop": None if wishes.stop is None else list(wishes.stop), "reasoning_effort": wishes.effort,
            "chat_template_kwargs": None if thinking is None else {"enable_thinking": thinking},
        }  # fmt: skip
        return {name: value for name, value in body.items() if value is not None}

    def _read(self, response: HTTPResponse, clock: _Clock) -> Iterator[Delta]:
        """The deltas of a stream; `facts` at its end. Raises ColiError for an error in it and for an early end."""
        reason, usage = "", dict[str, Any]()
        for data in events(response):
            if data == "[DONE]":
                self.facts = _facts(reason, usage, self.own, clock)
                return
            chunk = self._chunk(data)
            reason, usage, self.own = chunk.reason or reason, chunk.usage or usage, chunk.own or self.own
            for delta in chunk.deltas:
                clock.tick()
                yield delta
        raise ColiError("the server ended the answer in the middle", self.address, "look at its log, then ask again")

    def _chunk(self, data: str) -> _Chunk:
        try:
            document = json.loads(data)
            if document.get("error"):
                raise ColiError(_error(document).get("message") or "the server failed", self.address)
            return _Chunk.of(document)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise ColiError(f"sent what is no chunk of an answer: {data[:80]!r}", self.address) from None

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, body: Any, timeout: float | None) -> tuple[HTTPConnection, HTTPResponse]:
        """(connection, response), the body unread. Raises ColiError when nobody is there."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self.address.connect(CONNECT_S)
        try:
            connection.connect()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ColiError(f"no server answers there: {reason}", self.address, "start one with coli serve") from error
        try:
            connection.sock.settimeout(timeout)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket = connection.sock
            if self._cancelled:
                _shut(connection.sock)
            connection.request(method, self.address.prefix + path, None if body is None else json.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException as error:
            connection.close()
            if isinstance(error, (OSError, HTTPException)):
                raise self._lost(error) from error
            raise

    def _lost(self, error: Exception) -> ColiError:
        """The connection broke, or what answers speaks no HTTP."""
        return ColiError(f"the connection broke: {str(error) or type(error).__name__}", self.address,
                         "is a server still there?")  # fmt: skip

    def _body(self, response: HTTPResponse) -> Any:
        try:
            return json.loads(response.read(_BODY))
        except (ValueError, RecursionError):
            return None
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error

    def _check(self, response: HTTPResponse, body: Any) -> None:
        """Raise what a status other than 200 means."""
        if response.status == 200:
            return
        error = _error(body)
        message = error.get("message") or f"the server answers {response.status} {response.reason}"
        if response.status in (401, 403):
            raise UsageError(message, self.address, "give its key by COLI_API_KEY or --api-key")
        if response.status in (429, 503):
            seconds = response.headers["Retry-After"]
            raise ColiError(message, self.address, f"ask again in {seconds} s" if seconds else "ask again later")
        if error.get("code") == "context_length_exceeded":
            raise PromptTooLong(message, self.address)
        raise (UsageError if response.status < 500 else ColiError)(message, self.address)


@dataclass(frozen=True)
class _Chunk:
    """What one event brings; what it does not bring is empty."""

    deltas: list[Delta]
    reason: str
    usage: dict[str, Any]
    own: dict[str, Any]

    @classmethod
    def of(cls, document: dict[str, Any]) -> _Chunk:
        """Raises TypeError or AttributeError for another shape than a chunk's."""
        deltas, reason = list[Delta](), ""
        for choice in document.get("choices") or ():
            told = choice.get("finish_reason")
            reason = told if isinstance(told, str) and told.isprintable() else reason
            said = choice.get("delta") or {}
            texts: Pieces = (("reasoning", said.get("reasoning_content")), ("content", said.get("content")))
            deltas += [Delta(kind, "" + text) for kind, text in texts if text]
        return cls(deltas, reason, _object(document.get("usage")), _object(document.get("coli")))


class _Clock:
    """When a question went out, when the first and the last piece of its answer came."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first = self.last = 0.0

    def tick(self) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each server-sent event; one that the end of the stream cuts is none (HTML standard, 9.2.6)."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))


def _facts(reason: str, usage: dict[str, Any], own: dict[str, Any], clock: _Clock) -> TurnFacts:
    """What the server counted, and what this side's clock saw."""
    prompt, completion = _object(usage.get("prompt_tokens_details")), _object(usage.get("completion_tokens_details"))
    accepted = _whole(completion.get("accepted_prediction_tokens"))
    return TurnFacts(
        finish_reason=reason, prompt_tokens=_whole(usage.get("prompt_tokens")),
        cached_tokens=_whole(prompt.get("cached_tokens")), completion_tokens=_whole(usage.get("completion_tokens")),
        accepted=accepted, carried=accepted + _whole(completion.get("rejected_prediction_tokens")),
        per_forward=_number(own.get("tokens_per_forward")), ttft_s=max(0.0, clock.first - clock.start),
        decode_s=_number(own.get("decode_s")) or clock.last - clock.first,  # pieces come in bundles, tokens do not
    )  # fmt: skip


def _object(value: Any) -> dict[str, Any]:
    """`value`, {} where it is no object."""
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """`value`, None where it is no number that a count or a time can be."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 53
    return value if sound else None


def _whole(value: Any) -> int:
    """`value`, 0 where it is no count."""
    return value if isinstance(value, int) and _number(value) is not None else 0


def _plain(text: str) -> bool:
    """Whether it can stand in a request's first line."""
    return all("!" <= character <= "~" for character in text)


def _names(host: str) -> bool:
    """Whether a resolver can be asked for it."""
    try:
        return _plain(host.encode("idna").decode("ascii"))
    except UnicodeError:
        return False


def _gate(own: dict[str, Any]) -> list[str]:
    """The gate's line, where it had a say; a coli of another version may tell it otherwise."""
    try:
        gate = GateReport.of(own["gate"])
        return [f"gate: {gate.line()}"] if gate.decided else []
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return []


def _error(body: Any) -> dict[str, Any]:
    """What an error's body says, {} where it is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return {}
    return {name: value for name, value in error.items() if isinstance(value, str)}


def _shut(open_socket: socket.socket) -> None:
    """End both directions: a reader in another thread gets its end of file. TLS too, beneath its layer."""
    try:
        socket.socket.shutdown(open_socket, socket.SHUT_RDWR)
    except OSError:
        return  # the other side was first
