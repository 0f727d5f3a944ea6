"""The reader of HTTP: uvicorn's on h11, but that what is no HTTP is refused as all else is, with an id and in JSON.

uvicorn answers it in plain text, without an id, and fails where an answer is already out: a body may turn out broken
after its request was refused. Then there is nothing left to say, and no traceback for anybody to fill a log with.
Guarded by tests/server/test_app.py.
"""

from __future__ import annotations

import contextlib
import json
import uuid

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from coli.server.errors import ApiError, openai_body


class Reader(H11Protocol):
    """One connection."""

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for what h11 cannot read."""
        request_id = f"req_{uuid.uuid4().hex}".encode()
        raw = json.dumps(openai_body(ApiError(400, "this is no HTTP/1.1 request", code="invalid_http"))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(raw)),
                   (b"connection", b"close"), (b"x-request-id", request_id), (b"request-id", request_id)]  # fmt: skip
        told = (h11.Response(status_code=400, headers=headers, reason=b"Bad Request"), h11.Data(data=raw),
                h11.EndOfMessage())  # fmt: skip
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is out already, or it is one to HEAD
            for event in told:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
