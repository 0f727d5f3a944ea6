"""Requests that a server must survive, as Hypothesis strategies.

    sound     a body the model of its endpoint allows (tests/server/fuzz_bodies.py)
    bent      such a body with one to three places replaced, removed, added, doubled or wrapped: wrong types, numbers
              that are huge, negative or none, half surrogate pairs, nesting without end
    broken    such a body whose bytes are cut, doubled, encoded otherwise or no JSON, or which names a key twice
    door      any method, path and header that HTTP allows
    noise     bytes that are no HTTP

Guarded by tests/server/test_fuzz.py.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.server.fuzz_bodies import LITERALS, MODELS, VALUES, Draw, bodies, mark, written

GETS = ("/v1/models", "/health", "/version", "/metrics", "/profile")


class Case(NamedTuple):
    """One request; noise has its bytes in `body` and no method."""

    kind: str
    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    chunked: bool = False

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def raw(self) -> bytes:
        if self.kind == "noise":
            return self.body
        names = {name.lower() for name, _ in self.headers}
        headers = [*self.headers] if "host" in names else [("host", "127.0.0.1"), *self.headers]
        body = self.body
        if self.chunked:
            headers.append(("transfer-encoding", "chunked"))
            half = len(body) // 2
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
            body += b"0\r\n\r\n"
        elif body or self.method == "POST":
            headers.append(("content-length", str(len(body))))
        lines = [f"{self.method} {self.target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers), "", ""]
        return "\r\n".join(lines).encode("latin-1") + body


# ---- what is done to bodies ------------------------------------------------------------------------------------------

_ODD = (
    None, True, False, 0, -1, 1, 2, 0.5, -0.5, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**30, 1e308, "", "0", "auto", [],
    {}, [[]], [None], {"": {}}, {"type": "text"}, {"role": "user"}, ["", 5], "\ud800", "\U0010ffff", "word " * 400,
)  # fmt: skip
ODD = st.sampled_from(_ODD) | st.integers(0, len(LITERALS) - 1).map(mark) | VALUES


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside, nearer ones first."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    own = [(*path, key) for key, _ in items]
    return own + [place for way in own for place in _places(node[way[-1]], way)]


def _bend(body: dict[str, Any], way: tuple[Any, ...], how: str, odd: Any, name: str) -> None:
    """Change one place."""
    node: Any = body
    for key in way[:-1]:
        node = node[key]
    key = way[-1]
    match how:
        case "replace":
            node[key] = odd
        case "remove":
            del node[key]
        case "wrap":
            node[key] = [node[key]]
        case "double" if isinstance(node, list):
            node.insert(key, node[key])
        case "add" if isinstance(node, dict):
            node[name] = odd
        case _:
            node[key] = [odd, node[key]] if isinstance(node, list) else {name: node[key]}


_FOREIGN = ("n", "store", "functions", "audio", "container", "\u0000", "x")
_HOWS = ("replace", "replace", "replace", "remove", "wrap", "double", "add", "rename")


@st.composite
def _bent(draw: Draw, path: str, model: str) -> bytes:
    body = deepcopy(draw(bodies(path, model)))  # values drawn from samples are shared, and so are odd ones
    names = st.sampled_from((*MODELS[path].model_fields, *_FOREIGN))
    for _ in range(draw(st.integers(1, 3))):
        if places := _places(body):
            _bend(body, draw(st.sampled_from(places)), draw(st.sampled_from(_HOWS)), deepcopy(draw(ODD)), draw(names))
    return written(body, ascii_only=draw(st.booleans()))


@st.composite
def _broken(draw: Draw, path: str, model: str) -> bytes:
    whole = written(draw(bodies(path, model)), ascii_only=draw(st.booleans()))
    at = draw(st.integers(0, len(whole)))
    return draw(st.sampled_from((
        whole[:at], whole[at:], whole + whole, whole[:at] + b"\xff" + whole[at:],
        whole[:at] + b"\xed\xa0\x80" + whole[at:], b"\xef\xbb\xbf" + whole,
        whole.decode("utf-8", "replace").encode("utf-16"), b"[" + whole + b"]", b"", b"null", b'"' + whole[1:],
        b"{" + b'"model": 5, "stream": [], ' + whole[1:], whole[:-1] + b', "model": "other"}',
        b"[" * 100_000, b'{"a":' * 5000, b"model=x&stream=true", b"--x\r\n\r\n--x--", b"\x00" * 9, b"\x1f\x8b\x08\x00",
    )) | st.binary(max_size=40))  # fmt: skip


# ---- requests --------------------------------------------------------------------------------------------------------

_METHODS = st.sampled_from((
    "GET", "GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "FOO", "M-SEARCH",
    "!#$%",
))  # fmt: skip
_PATHS = st.sampled_from((
    *GETS, *MODELS, "/", "//", "/v1", "/v1/", "/v1/models/nano", "/v1/models/", "/v1/models/..%2f..", "/%00", "/%ff%fe",
    "/v1/chat/completions/", "/v1/messages/x", "/V1/models", "/v1//models", "/v1/models?after_id=x&limit=-1", "*",
    "/..;/x", "/health?" + "a" * 3000, "http://127.0.0.1/v1/models", "http://elsewhere/", "/v1/messages%2Fcount_tokens",
    "/\x7e", "/v1/models/%F0%9F%A6%8A", "/" + "x/" * 900, "127.0.0.1:1", "/v1/models/" + "%F0%9F%A6%8A" * 900,
))  # fmt: skip
_SMALL = st.sampled_from((b"", b"", b"{}", b"x" * 2000))
_LATIN = st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_characters="\x7f\x80\x85\xa0")
_NAMED = st.sampled_from(("x-any", "accept", "origin", "x-request-id", "authorization", "anthropic-version"))
_HEADERS = st.sampled_from((
    ("content-type", "text/plain"), ("content-type", "application/x-www-form-urlencoded"), ("content-type", ""),
    ("content-type", "application/json; charset=utf-16"), ("content-encoding", "gzip"), ("accept", "image/png"),
    ("accept-encoding", "gzip, br"), ("range", "bytes=0-1"), ("if-none-match", "*"), ("cookie", "a=b; c"),
    ("authorization", "Bearer \xff"), ("authorization", "Basic"), ("x-api-key", "k"), ("x-request-id", "mine-1"),
    ("x-request-id", "no good"), ("x-request-id", "\xe4"), ("host", "localhost:1"), ("host", "elsewhere"), ("host", ""),
    ("host", "[::1]"), ("host", "[::"), ("host", "\xe4"), ("origin", "null"), ("origin", "http://127.0.0.1"),
    ("origin", "https://elsewhere"), ("upgrade", "websocket"), ("upgrade", "h2c"), ("connection", "upgrade"),
    ("connection", "close"), ("expect", "100-continue"), ("x-http-method-override", "DELETE"), ("forwarded", "for=x"),
    ("anthropic-version", "2023-06-01"), ("anthropic-beta", "all"), ("accept", "application/openmetrics-text"),
    ("x-stainless-retry-count", "-1"), ("sec-websocket-key", "x"), ("te", "trailers"), ("long", "x" * 4000),
)) | st.tuples(_NAMED, st.text(_LATIN, max_size=12))  # fmt: skip
_SOME = st.lists(_HEADERS, max_size=3, unique_by=lambda header: header[0]).map(tuple)
_JSON = (("content-type", "application/json"),)
_NOISE = st.sampled_from((
    b"\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\na b: c\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
)) | st.binary(min_size=1, max_size=60).map(lambda some: some + b"\r\n\r\n")  # fmt: skip


_KINDS = ("sound",) * 8 + ("bent",) * 9 + ("broken",) * 2 + ("door",) * 3 + ("noise",)  # most reach deep


@cache
def cases(model: str) -> SearchStrategy[Case]:
    """Requests to a server of this model."""
    made = {"sound": {path: bodies(path, model).map(written) for path in MODELS},
            "bent": {path: _bent(path, model) for path in MODELS},
            "broken": {path: _broken(path, model) for path in MODELS}}  # fmt: skip

    @st.composite
    def one(draw: Draw) -> Case:
        kind = draw(st.sampled_from(_KINDS))
        if kind == "noise":
            return Case(kind, "", "", (), draw(_NOISE))
        if kind == "door":
            return Case(kind, draw(_METHODS), draw(_PATHS), draw(_SOME), draw(_SMALL))
        path = draw(st.sampled_from((*MODELS,)))
        headers = _JSON if kind == "sound" else draw(st.just(_JSON) | _SOME)
        return Case(kind, "POST", path, headers, draw(made[kind][path]), draw(st.integers(0, 3)) == 3)

    return one()
