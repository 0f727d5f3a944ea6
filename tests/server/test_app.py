"""The small endpoints, and what every path has in common, over a real socket."""

from __future__ import annotations

import http.client
import json
import re
import socket
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from coli.server.app import ROUTES
from coli.server.options import BODY_LIMIT
from coli.server.service import model_name
from tests.server.live import Live, live

SHORT = {"model": "nano", "prompt": "Once", "max_tokens": 2, "temperature": 0}


def test_health_and_version(server: Live) -> None:
    health = server.get("/health")
    assert health.status == 200
    facts = {"status": "ok", "running": 0, "waiting": 0, "slots": 2}
    assert health.json() == facts | {"drafts": {"head": True, "lookup": True, "most": 5}}
    assert server.get("/version").json() == {"name": "coli", "version": version("coli")}
    assert server.request("HEAD", "/health").status == 200


def test_the_model_as_both_clients_read_it(server: Live) -> None:
    from anthropic import Anthropic
    from anthropic.types import ModelInfo
    from openai import OpenAI
    from openai.types import Model

    with OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        assert (model.id, model.object, model.owned_by) == ("nano", "model", "coli") and model.created > 1e9
        assert client.models.retrieve("nano") == model
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        (page,) = claude.models.list().data
        assert (page.id, page.type, page.display_name) == ("nano", "model", "nano")
        assert page.created_at.timestamp() == model.created
    found = server.get("/v1/models").json()["data"][0]
    assert found["max_model_len"] == 2048
    info = ModelInfo.model_validate(found)
    assert (info.lifecycle, info.max_input_tokens, info.max_tokens) == ("active", 2048, 2048)
    assert Model.model_validate(found)


@pytest.mark.parametrize("name", ["gpt-4o", "nano/", "org/nano", "NANO", "%6eanO"])
def test_another_model_is_not_found(server: Live, name: str) -> None:
    reply = server.get(f"/v1/models/{name}")
    assert reply.status == 404 and reply.json()["error"]["code"] == "model_not_found"
    assert "'nano'" in reply.json()["error"]["message"]


def test_metrics_and_profile_know_the_last_turn(server: Live) -> None:
    reply = server.post("/v1/completions", SHORT, {"x-request-id": "of-this-test"})
    assert reply.status == 200 and reply.headers["x-request-id"] == "of-this-test"
    turn = server.get("/profile").json()["turns"][0]
    assert turn["id"] == "of-this-test" and turn["completion_tokens"] == 2 and turn["finish_reason"] == "length"
    metrics = server.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert re.search(r'^coli_request_success_total\{finished_reason="length"\} [1-9]', metrics.body.decode(), re.M)
    assert "[qwen38 MTP] turn of-this-test" in server.stderr(), "report lines go to stderr"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nope", "/v1/chat/completions/", "/docs", "/openapi.json"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_unknown_path_is_a_404_in_our_shape(server: Live, method: str, path: str) -> None:
    reply = server.request(method, path)
    assert reply.status == 404 and reply.json()["error"]["code"] == "unknown_path" and path in reply.body.decode()


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_a_wrong_method_is_a_405_in_the_paths_shape(server: Live, path: str) -> None:
    reply = server.get(path)
    assert reply.status == 405 and reply.headers["allow"] == "POST" and reply.headers["x-request-id"]
    assert ("type" in reply.json()) == path.startswith("/v1/messages")
    assert server.post("/v1/models", {}).status == 405


@pytest.mark.parametrize("path", sorted(ROUTES))
@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"model": NaN}', b"\xff"], ids=str)
def test_what_is_no_json_is_a_400_everywhere(server: Live, path: str, raw: bytes) -> None:
    reply = server.post(path, raw)
    assert reply.status == 400 and "JSON" in reply.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_long_is_a_413_that_the_client_sees(server: Live, chunked: bool) -> None:
    raw = b'{"prompt": "' + b"x" * (2 * BODY_LIMIT) + b'"}'
    with closing(server.connect()) as connection:
        if chunked:
            connection.request("POST", "/v1/completions", iter([raw]), encode_chunked=True,
                               headers={"transfer-encoding": "chunked"})  # fmt: skip
        else:
            connection.request("POST", "/v1/completions", raw)
        answer = connection.getresponse()
        assert answer.status == 413 and json.loads(answer.read())["error"]["code"] == "request_too_large"
        assert answer.getheader("connection") == "close"


def test_a_connection_is_kept_through_refusals(server: Live) -> None:
    with closing(server.connect()) as connection:
        for _ in range(3):
            for method, path, raw, status in [("GET", "/nope", None, 404), ("POST", "/v1/completions", b"{", 400),
                                              ("POST", "/v1/messages", b"{}", 400), ("GET", "/health", None, 200)]:
                connection.request(method, path, raw)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status and answer.getheader("connection") != "close"


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000],
                         ids=["TLS", "headers without end"])  # fmt: skip
def test_what_is_no_http_is_refused_and_forgotten(server: Live, sent: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as raw:
        with suppress(ConnectionError):  # it need not be read to its end
            raw.sendall(sent)
        with suppress(ConnectionError):
            answer = b"".join(iter(lambda: raw.recv(65536), b""))  # fails if the connection stays
            head, _, said = answer.partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 400") and b"\r\nx-request-id: req_" in head
            assert json.loads(said)["error"]["code"] == "invalid_http"
    assert server.get("/health").status == 200
    assert "Invalid HTTP" not in server.stderr(), "anybody could fill the log"


def test_a_body_that_breaks_behind_its_refusal_ends_the_connection(server: Live) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as raw:
        raw.sendall(head + b"5\r\nhello\r\n")
        answer = raw.recv(65536)
        raw.sendall(b"no chunk\r\n")
        answer += b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1") == 1
    assert server.get("/health").status == 200
    assert "Traceback" not in server.stderr(), "anybody could fill the log"


def test_a_server_with_a_key_a_name_and_pages(tmp_path: Path) -> None:
    """One server for everything that must be asked for."""
    flags = ["--model-id", "org/my-model", "--cors-origin", "https://ok.example", "--allowed-host", "box.example"]
    with live(tmp_path, *flags, COLI_API_KEY="s3cret") as server:
        key = {"authorization": "Bearer s3cret"}
        assert "s3cret" not in server.stderr() and "a key is asked for" in server.stderr()
        assert server.get("/health").status == 200 and server.get("/metrics").status == 401
        assert server.post("/v1/completions", SHORT).status == 401
        assert server.request("GET", "/v1/models/org/my-model", headers=key).json()["id"] == "org/my-model"
        assert server.post("/v1/completions", {**SHORT, "model": "org/my-model"}, key).status == 200
        assert server.post("/v1/completions", SHORT, key).status == 404
        assert server.request("GET", "/metrics", headers={**key, "host": "box.example"}).status == 200
        page = {"origin": "https://ok.example"}
        asked = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = server.request("OPTIONS", "/v1/completions", headers=asked)
        assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "https://ok.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        assert preflight.headers["x-request-id"]
        for wrong, code in (({"origin": "https://evil.example"}, "origin_not_allowed"),
                            ({"access-control-request-method": "DELETE"}, "cors_not_allowed")):  # fmt: skip
            refused = server.request("OPTIONS", "/v1/completions", headers={**asked, **wrong})
            assert refused.status == 403 and refused.json()["error"]["code"] == code and refused.headers["x-request-id"]
            assert "access-control-allow-origin" not in refused.headers
        refused = server.post("/v1/completions", SHORT, page)
        assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://ok.example"
        foreign = server.request("GET", "/v1/models", headers={**key, "origin": "https://evil.example"})
        assert foreign.status == 403 and "access-control-allow-origin" not in foreign.headers


def test_closed_by_default(server: Live) -> None:
    assert "access-control-allow-origin" not in server.get("/health").headers
    assert server.get("/v1/models", origin="https://evil.example").status == 403
    assert server.get("/v1/models", host="evil.example").status == 403
    assert "server" not in server.get("/health").headers


@pytest.mark.parametrize(("path", "name"), [
    ("/models/Qwen3.6-35B", "Qwen3.6-35B"), ("/models/a.b-Q4.gguf", "a.b-Q4"),
    ("/hub/models--Qwen--Qwen3.6-35B/snapshots/0123abc", "Qwen/Qwen3.6-35B"),
])  # fmt: skip
def test_a_models_name(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_http_client_of_python_sees_whole_answers(server: Live) -> None:
    """Content-Length and chunked answers, on one connection."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        for stream in (False, True, False):
            connection.request("POST", "/v1/completions", json.dumps({**SHORT, "stream": stream}))
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status == 200 and (body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body))
