"""What every request passes before an endpoint: id, host, origin, key, readiness, size, JSON. No socket, no model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from coli.errors import NonFinite, PromptTooLong, UsageError
from coli.server.errors import ApiError
from coli.server.guards import DISCARD, Answered, Body, Door, Named, Ready
from coli.server.options import BODY_LIMIT, ServeOptions
from tests.server.asgi import Answer, ask

KEY = "s3cret-ключ"


async def echo(request: Request) -> Response:
    return JSONResponse({"content": request.state.content, "id": request.state.request_id})


async def breaks(request: Request) -> Response:
    async def body() -> Any:
        yield b"half an answ"
        raise ZeroDivisionError("too late")

    return StreamingResponse(body())


class App:
    """The guards around small endpoints; `said` is what they said."""

    def __init__(self, service: object = "a service", **options: Any) -> None:
        self.said: list[str] = []
        layers = [Middleware(Named), Middleware(Answered, say=self.said.append),
                  Middleware(Door, options=ServeOptions(**options)), Middleware(Ready)]  # fmt: skip
        post = {"methods": ["POST"], "middleware": [Middleware(Body)]}
        routes = [Route("/v1/echo", echo, **post), Route("/v1/messages", echo, **post), Route("/v1/breaks", breaks)]
        routes += [Route(f"/v1/{name}", raising(error)) for name, error in FAULTS.items()]
        routes += [Route(path, lambda _: Response("up")) for path in ("/health", "/version", "/v1/models")]
        self.app = Starlette(routes=routes, middleware=layers)
        self.app.state.service = service

    def get(self, path: str, **headers: str) -> Answer:
        return ask(self.app, "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, *chunks: bytes, path: str = "/v1/echo", headers: dict[str, str] | None = None,
             leaves: bool = False) -> Answer:  # fmt: skip
        return ask(self.app, "POST", path, chunks=chunks, headers=headers, leaves=leaves)


def raising(error: Exception) -> Any:
    async def endpoint(request: Request) -> Response:
        raise error

    return endpoint


FAULTS: dict[str, Exception] = {
    "unexpected": ZeroDivisionError("a secret of ours"),
    "nan": NonFinite("a NaN", "layer 3"),
    "long": PromptTooLong("the prompt has 9 tokens, the context holds 8", "--ctx 8", "shorten it"),
    "usage": UsageError("is 3, it must be a number 0..2", "temperature"),
}


# ---- id and exceptions -----------------------------------------------------------------------------------------------


def test_every_answer_has_an_id_and_a_sane_one_of_the_client_is_kept() -> None:
    app = App()
    for answer in (app.get("/health"), app.get("/v1/unexpected"), app.get("/nowhere"), app.post(b"{")):
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert app.get("/health", x_request_id="mine-7").headers["x-request-id"] == "mine-7"
    assert app.get("/health", x_request_id="a\tb").headers["x-request-id"].startswith("req_")
    assert app.get("/health", x_request_id="x" * 129).headers["x-request-id"].startswith("req_")
    assert app.post(b"{}", headers={"x-request-id": "mine-8"}).json()["id"] == "mine-8"


def test_a_fault_is_a_500_that_tells_the_operator_and_not_the_client() -> None:
    app = App()
    answer = app.get("/v1/unexpected", x_request_id="id-1")
    assert answer.status == 500 and answer.json()["error"]["type"] == "server_error"
    assert b"secret" not in answer.body
    (said,) = app.said
    assert "id-1" in said and "a secret of ours" in said and "Traceback" in said


def test_errors_of_coli_have_their_status() -> None:
    app = App()
    assert app.get("/v1/nan").status == 500 and "layer 3: a NaN" in app.said[0] and "Traceback" not in app.said[0]
    long = app.get("/v1/long")
    assert long.status == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert "9 tokens" in long.json()["error"]["message"] and "--ctx" not in long.json()["error"]["message"]
    usage = app.get("/v1/usage")
    assert usage.status == 400 and usage.json()["error"]["param"] == "temperature"
    assert len(app.said) == 1


def test_a_fault_behind_the_headers_breaks_the_answer() -> None:
    app = App()
    with pytest.raises(ZeroDivisionError):
        app.get("/v1/breaks")
    assert "too late" in app.said[0]


# ---- the door --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "[::1]"])
def test_names_of_loopback_are_served(host: str) -> None:
    assert App().get("/v1/models", host=host).status == 200


NAMELESS = ("", "[", "[::1", "[::1]]", "[::1].evil.com", "localhost:80.evil.com", "localhost:80:80", "::1", "[]")


@pytest.mark.parametrize("host", [*NAMELESS, "evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
                                  "10.0.0.1:8000", "[::2]:8000", "0.0.0.0"])  # fmt: skip
def test_other_names_are_not(host: str) -> None:
    answer = App().get("/v1/models", host=host)
    assert answer.status == 403 and answer.json()["error"]["code"] == "host_not_allowed"
    hinted = "--allowed-host" in answer.json()["error"]["message"]
    assert hinted == (host not in NAMELESS), "a hint that can be followed"
    assert App().get("/health", host=host).status == App().get("/version", host=host).status == 200


@pytest.mark.parametrize(
    ("host", "here", "status"),
    [
        ("192.168.1.5:8000", "192.168.1.5", 200), ("192.168.1.5", "::ffff:192.168.1.5", 200),
        ("[fe80::1]:8000", "fe80::1%eth0", 200), ("[FE80:0::1]", "fe80::1", 200), ("192.168.1.6", "192.168.1.5", 403),
        ("box.lan", "192.168.1.5", 403), ("192.168.1.5.evil.example", "192.168.1.5", 403), ("a", "/run/coli.sock", 403),
    ],
)  # fmt: skip
def test_the_address_that_was_reached_is_no_rebound_name(host: str, here: str, status: int) -> None:
    app = App(host="0.0.0.0", api_key="k")
    headers = {"host": host, "x-api-key": "k"}
    assert ask(app.app, "GET", "/v1/models", headers=headers, here=here).status == status


def test_allowed_hosts() -> None:
    app = App(allowed_hosts=("Box.Example", "fe80::1"), host="10.0.0.1", api_key="k")
    for host in ("box.example:8000", "BOX.example", "10.0.0.1:8000", "[fe80::1]:80", "localhost"):
        assert app.get("/v1/models", host=host, x_api_key="k").status == 200
    assert app.get("/v1/models", host="other.example", x_api_key="k").status == 403
    assert App(allowed_hosts=("*",)).get("/v1/models", host="anything.example").status == 200


def test_pages_of_other_sites_are_turned_away() -> None:
    app = App(cors_origins=("https://ok.example",))
    assert app.get("/v1/models", origin="https://evil.example").status == 403
    sandboxed = app.get("/v1/models", origin="null")
    assert sandboxed.status == 403 and "--cors-origin '*'" in sandboxed.json()["error"]["message"]
    assert app.get("/v1/models", origin="http://localhost:3000", host="localhost:8000").status == 403
    assert app.get("/v1/models", origin="http://localhost:8000", host="localhost:8000").status == 200
    assert app.get("/v1/models", origin="https://ok.example").status == 200
    for origin in ("https://any.example", "null"):
        assert App(cors_origins=("*",)).get("/v1/models", origin=origin).status == 200


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"},
                                     {"x-api-key": KEY}])  # fmt: skip
def test_the_key_opens(headers: dict[str, str]) -> None:
    assert ask(App(api_key=KEY).app, "GET", "/v1/models", headers=headers).status == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY},
                                     {"authorization": f"Basic {KEY}"}, {"x-api-key": KEY[:-1]}, {"x-api-key": ""},
                                     {"authorization": "Bearer wrong", "x-api-key": KEY}])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/nowhere", "/v1/echo"])
def test_no_key_no_entry(headers: dict[str, str], path: str) -> None:
    answer = ask(App(api_key=KEY).app, "POST", path, headers=headers)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer" and answer.read == 0
    error = answer.json()
    assert error["error"]["type"] == "authentication_error" if path == "/v1/messages" else (
        error["error"]["code"] == "invalid_api_key")  # fmt: skip
    claude = ask(App(api_key=KEY).app, "POST", path, headers={**headers, "anthropic-version": "2023-06-01"})
    assert claude.status == 401 and claude.json()["error"]["type"] == "authentication_error"
    assert claude.json()["request_id"] == claude.headers["request-id"]


def test_probes_need_no_key_and_no_model() -> None:
    app = App(service=None, api_key=KEY)
    assert app.get("/health").status == 200 and app.get("/version").status == 200
    assert app.get("/v1/models").status == 401
    loading = app.get("/v1/models", x_api_key=KEY)
    assert loading.status == 503 and loading.json()["error"]["code"] == "loading" and loading.headers["retry-after"]


# ---- the body --------------------------------------------------------------------------------------------------------


def padded(size: int) -> bytes:
    return b'{"a":"' + b"x" * (size - 8) + b'"}'


def test_a_body_comes_whole_whatever_its_chunks() -> None:
    content = {"text": "ё 中 👩‍👩‍👧", "n": [1, 2.5, None, True]}
    raw = json.dumps(content, ensure_ascii=False).encode()
    for step in (1, 3, 7, len(raw)):
        chunks = [raw[at : at + step] for at in range(0, len(raw), step)]
        assert App().post(*chunks).json()["content"] == content
    assert App().post(json.dumps(content).encode()).json()["content"] == content


def test_the_limit_counts_bytes_told_or_not() -> None:
    app = App()
    assert app.post(padded(BODY_LIMIT)).status == 200
    assert app.post(padded(BODY_LIMIT), headers={"content-length": str(BODY_LIMIT)}).status == 200
    raw = padded(BODY_LIMIT + 1)
    told = app.post(raw, headers={"content-length": str(len(raw))})
    untold = app.post(*(raw[at : at + 65536] for at in range(0, len(raw), 65536)))
    for answer in (told, untold):
        assert answer.status == 413 and answer.json()["error"]["code"] == "request_too_large"
        assert answer.read == len(raw), "a client that is still writing would not see the answer"
    assert app.post(raw, path="/v1/messages").json()["error"]["type"] == "request_too_large"


def test_who_asks_first_need_not_write() -> None:
    answer = App().post(b"never read", headers={"content-length": "9999999999", "expect": "100-continue"})
    assert answer.status == 413 and answer.read == 0


def test_a_body_without_end_is_left() -> None:
    answer = ask(App().app, "POST", "/v1/echo", chunks=itertools.repeat(b"x" * BODY_LIMIT))
    assert answer.status == 413 and DISCARD < answer.read <= DISCARD + BODY_LIMIT
    assert answer.headers["connection"] == "close"


def test_a_client_that_leaves_while_writing_gets_nothing() -> None:
    assert App().post(b'{"a":', leaves=True).status is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "Expecting value"), (b"{", "Expecting"), (b"[]", "must be an object"), (b"null", "must be an object"),
        (b'{"a": NaN}', "NaN is no number"), (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": [1e999]}', "1e999 is too large"), (b'{"a": -1' + b"0" * 400 + b".0}", "is too large"),
        (b'{"a": "\xff"}', "byte 7 is no UTF-8"), (b'{"a": "\\ud83d"}', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"), (b'{"a":' + b"[" * 100000, "nested too deeply"),
        (b'{"a":' + b"9" * 5000 + b"}", "limit"), (b'\xef\xbb\xbf{"a": 1}', "BOM"), (b"a=1&b=2", "Expecting value"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_json_is_a_400(raw: bytes, words: str) -> None:
    app = App()
    answer = app.post(raw)
    assert answer.status == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert words in answer.json()["error"]["message"] and not app.said


def test_a_refusal_keeps_its_headers() -> None:
    error = ApiError(429, "later", headers={"retry-after": "7"})
    layers = [Middleware(Named), Middleware(Answered, say=pytest.fail)]
    answer = ask(Starlette(routes=[Route("/", raising(error))], middleware=layers))
    assert answer.status == 429 and answer.headers["retry-after"] == "7"
    assert answer.json()["error"] == {"message": "later", "type": "rate_limit_error", "param": None, "code": None}
