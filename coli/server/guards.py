"""What every request passes before an endpoint sees it, as plain ASGI layers, outermost first.

    Named       x-request-id on every answer
    (Cors)      what browsers ask before a page's request; only where there is --cors-origin
    Answered    whatever is raised below becomes a refusal in the API's shape
    Door        Host header (a rebound name), Origin header (another site's page), then the key; probes need none
    Ready       503 while the model is loading
    Body        the body whole, at most 4 MiB, and what JSON is in it: request.state.content (of POST routes)

Plain ASGI and no BaseHTTPMiddleware, which hides that a client has left: `receive` goes through to the server once the
body has been read. /health and /version need no name, no key and no model.
An exception after the headers went out cannot become a status: it is said and raised on, so that uvicorn breaks the
connection and no client takes half an answer for a whole one.
Guarded by tests/server/test_guards.py.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coli import finite_json
from coli.errors import ColiError
from coli.server.errors import ApiError, body, loading, openai_body
from coli.server.options import BODY_LIMIT, ServeOptions, loopback

OPEN = ("/health", "/version")  # for probes, which have no key and call a machine as they like
DISCARD = 16 * BODY_LIMIT  # of a body too long is read before the refusal, or a client still writing never sees it
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Named:
    """Every answer has an id: the client's own where it is sane, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # OpenAI's name and Anthropic's
            await send(message)

        await self.app(scope, receive, send_with_id)


class Answered:
    """Every exception becomes an answer."""

    def __init__(self, app: ASGIApp, say: Callable[[str], None]) -> None:
        self.app, self.say = app, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            refusal = ApiError.of(error)
            if refusal.status == 500:
                self.say(f"request {scope['state']['request_id']}: {_fault(error)}")
            if begun:
                raise
            await refuse(refusal, scope, receive, send)


class Door:
    """Who may come in: by the name it was reached under, by the page that asks, by key."""

    def __init__(self, app: ASGIApp, options: ServeOptions) -> None:
        self.app, self.hosts, self.origins = app, options.hosts, frozenset(options.cors_origins)
        self.key = options.api_key.encode() if options.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            headers = Headers(scope=scope)
            self._check_host(headers.get("host", ""), scope.get("server"))
            self._check_origin(headers.get("origin"), headers.get("host", ""))
            if self.key is not None:
                self._check_key(headers)
        await self.app(scope, receive, send)

    def _check_host(self, host: str, here: Sequence[Any] | None) -> None:
        """`here`: this end of the connection. Who was told that address asked for it: a rebound name is none."""
        name = _name(host)
        if loopback(name) or name in self.hosts or "*" in self.hosts or (here and _same_address(name, here[0])):
            return
        what = (f"the host {name!r} is not served here (start the server with --allowed-host {name})" if name else
                "the request does not say whom it asks (HTTP/1.1 does, in its Host header)")  # fmt: skip
        raise ApiError(403, what, code="host_not_allowed")

    def _check_origin(self, origin: str | None, host: str) -> None:
        """A page of another site could make this machine compute, even where it may not read the answer."""
        if origin is None or "*" in self.origins or origin in self.origins:
            return
        if origin.partition("://")[2] != host:
            raise _foreign(origin)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        assert self.key is not None
        if not hmac.compare_digest(given.encode("latin-1"), self.key):
            what = "no key was given" if not given else "the key is not this server's"
            hint = "Authorization: Bearer KEY, or x-api-key: KEY"
            raise ApiError(401, f"{what} ({hint})", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class Cors(CORSMiddleware):
    """Starlette's, but that a preflight is refused in the house's shape."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response, origin = super().preflight_response(request_headers), request_headers["origin"]
        if response.status_code == 200:
            return response
        refusal = _foreign(origin)
        if self.is_allowed_origin(origin):
            refusal = ApiError(403, bytes(response.body).decode(), code="cors_not_allowed")
        return JSONResponse(openai_body(refusal), refusal.status, {"vary": "Origin"})


class Ready:
    """No endpoint runs before there is a model."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        waits = scope["type"] == "http" and scope["path"] not in OPEN and scope["app"].state.service is None
        if waits:
            raise loading()
        await self.app(scope, receive, send)


class Body:
    """A body, read whole and parsed, before anything is done about it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await _read(Headers(scope=scope), receive)
        if raw is None:
            return None  # the client left while it was writing
        scope["state"]["content"] = content_of(raw)
        first: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def replay() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, replay, send)


async def _read(headers: Headers, receive: Receive) -> bytes | None:
    """The body; None when the client left. Raises ApiError 413 above the limit, whether the length was told or not."""
    told = headers.get("content-length", "")
    too_long = told.isdecimal() and int(told) > BODY_LIMIT
    if too_long and "expect" in headers:
        raise _too_long()  # it asks before it writes
    chunks: list[bytes] = []
    size, more = 0, True
    while more and size <= DISCARD:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        too_long = too_long or size > BODY_LIMIT
        if too_long:
            chunks.clear()
        else:
            chunks.append(message.get("body", b""))
    if too_long:
        raise _too_long()
    return b"".join(chunks)


def _too_long() -> ApiError:
    what = f"the body is longer than {BODY_LIMIT >> 20} MiB"
    return ApiError(413, what, code="request_too_large", headers={"connection": "close"})


def content_of(raw: bytes) -> dict[str, Any]:
    """The JSON object in a body, whose every text can be written as UTF-8. Raises ApiError 400."""
    try:
        content = finite_json.loads(raw.decode())
        if b"\\u" in raw:
            json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except UnicodeDecodeError as error:
        raise _bad_body(f"byte {error.start} is no UTF-8") from None
    except UnicodeEncodeError:
        raise _bad_body("a text holds half a surrogate pair") from None
    except RecursionError:
        raise _bad_body("nested too deeply") from None
    except ValueError as error:
        raise _bad_body(str(error)) from None
    if not isinstance(content, dict):
        raise _bad_body("it must be an object")
    return content


def _bad_body(why: str) -> ApiError:
    return ApiError(400, f"the body is not the JSON expected: {why}", code="invalid_json")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error, in the shape that the client reads."""
    await JSONResponse(body(error, scope), error.status, error.headers)(scope, receive, send)


def _fault(error: Exception) -> str:
    """One line for what has a name, the traceback for what has none."""
    if isinstance(error, (ColiError, ApiError)):
        return str(error)
    return "".join(traceback.format_exception(error)).strip()


def _foreign(origin: str) -> ApiError:
    if origin == "null":
        what = "pages without an origin (from a file, sandboxed) are not served here (--cors-origin '*' serves any)"
    else:
        what = f"pages of {origin!r} are not served here (start the server with --cors-origin {origin})"
    return ApiError(403, what, code="origin_not_allowed")


def _same_address(name: str, address: str) -> bool:
    """Whether both are one IP address, in whatever spelling."""
    try:
        one, other = (ipaddress.ip_address(text.partition("%")[0]) for text in (name, address))
    except ValueError:
        return False
    return one == (getattr(other, "ipv4_mapped", None) or other)  # so a socket for both families calls an IPv4 peer


def _name(host: str) -> str:
    """The name in a Host header, without port and brackets, in lower case; none of what is not spelled as one."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] or "").lower() if found else ""
