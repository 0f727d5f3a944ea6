"""A server's life over a real socket: loading, ready, draining, gone."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coli.errors import UsageError
from coli.server.serving import listen, url
from tests.conftest import CLI
from tests.server.live import PATIENCE_S, Live, launch, live

ODD = (sys.executable, str(Path(__file__).parent / "odd.py"))
LONG = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "temperature": 0}


def until(true: Callable[[], bool]) -> None:
    """Fails when it does not become true."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def loading(folder: Path) -> Iterator[Live]:
    """A server whose model is not loaded before `go` is in the folder."""
    with closing(listen("127.0.0.1", 0)) as free:
        address = url(free)
    server = launch(folder, "--port", address.rpartition(":")[2], command=[*ODD, "slow"])
    server.url = address
    try:
        until(server.answers)
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@contextmanager
def streaming(server: Live, content: dict[str, object]) -> Iterator[http.client.HTTPResponse]:
    """A completion whose first piece has come."""
    with closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(content))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.readline().startswith(b"data: ")
        yield answer


# ---- the socket ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    with closing(listen("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert url(taken) == f"http://127.0.0.1:{port}"
        with pytest.raises(UsageError, match=f"port {port} is in use") as caught:
            listen("127.0.0.1", port)
    assert f"--port {port}" in caught.value.where
    listen("127.0.0.1", port).close()  # free again


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "203.0.113.7", "a" * 300])
def test_a_host_of_another_machine_is_named(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        listen(host, 0)
    assert host in caught.value.where


def test_wildcards_are_called_by_loopback() -> None:
    with closing(listen("0.0.0.0", 0)) as every:
        assert url(every).startswith("http://127.0.0.1:")
    if socket.has_ipv6:
        with closing(listen("::1", 0)) as six:
            assert url(six).startswith("http://[::1]:")


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_the_port_answers_before_the_model_is_loaded(tmp_path: Path) -> None:
    with loading(tmp_path) as server:
        health = server.get("/health")
        assert health.status == 503 and health.json() == {"status": "loading"} and health.headers["retry-after"]
        assert server.get("/version").status == 200
        for reply in (server.post("/v1/completions", LONG), server.get("/v1/models"), server.get("/metrics")):
            assert reply.status == 503 and reply.json()["error"]["code"] == "loading" and reply.headers["retry-after"]
        (tmp_path / "go").touch()
        server.wait_ready()
        assert server.get("/health").json()["status"] == "ok"
        assert server.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_loading_ends_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with loading(tmp_path) as server:
        assert server.end(number) == code


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_the_first_signal_answers_what_was_asked_and_saves_what_was_learned(tmp_path: Path) -> None:
    with live(tmp_path, "--usage", str(tmp_path / "usage"), USAGE_SAVE="1") as server:
        with streaming(server, LONG) as answer, waiting(server) as later:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: server.get("/health").json()["status"] == "draining")
            refused = server.post("/v1/completions", LONG)
            assert refused.status == 503 and refused.json()["error"]["code"] == "draining"
            assert refused.headers["retry-after"]
            assert answer.read().endswith(b"data: [DONE]\n\n"), "a running answer was cut"
            reply = later.getresponse()
            assert reply.status == 200 and json.loads(reply.read())["usage"]["completion_tokens"] == 3
        assert server.process.wait(PATIENCE_S) == 0
        assert "stopping: 1 running, 1 waiting" in server.stderr()
        assert (tmp_path / "usage").stat().st_size


@contextmanager
def waiting(server: Live) -> Iterator[http.client.HTTPConnection]:
    """A connection whose request is in the queue."""
    with closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "max_tokens": 3, "stream": False}))
        until(lambda: server.get("/health").json()["waiting"] == 1)
        yield connection


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with live(tmp_path) as server, streaming(server, LONG):
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health").json()["status"] == "draining")
        assert server.end(number) == code


def test_a_thread_that_never_ends_keeps_nobody(tmp_path: Path) -> None:
    with live(tmp_path, command=[*ODD, "stuck"]) as server:
        with closing(server.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(LONG))
            until((tmp_path / "stuck").exists)
        assert server.end() == 0


def test_a_second_signal_ends_at_once_beside_such_a_thread(tmp_path: Path) -> None:
    with live(tmp_path, command=[*ODD, "stuck"]) as server, closing(server.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(LONG))
        until((tmp_path / "stuck").exists)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping:" in server.stderr())
        assert server.end() == 143


def test_a_closed_stdout_is_none_of_its_business(tmp_path: Path) -> None:
    with live(tmp_path, command=["/bin/sh", "-c", 'exec "$@" >&-', "sh", *CLI]) as server:
        assert server.get("/health").status == 200
        assert server.end() == 0


def test_ctrl_c_of_an_idle_server_is_a_clean_end(tmp_path: Path) -> None:
    with live(tmp_path) as server:
        assert server.get("/health").status == 200
        assert server.end(signal.SIGINT) == 0


def test_a_server_without_its_engine_leaves(tmp_path: Path) -> None:
    """Its turns are refused, and whoever watches the process starts another."""
    with live(tmp_path, command=[*ODD, "fragile"]) as server:
        reply = server.post("/v1/completions", LONG)
        assert reply.status == 500 and reply.json()["error"]["message"].startswith("internal error")
        assert server.process.wait(PATIENCE_S) == 1
        assert "coli: coli serve: the engine's thread has ended" in server.stderr().splitlines()[-1]


def test_a_model_that_cannot_be_opened_ends_the_server(tmp_path: Path) -> None:
    server = launch(tmp_path, model=tmp_path / "nothing")
    assert server.process.wait(PATIENCE_S) == 3
    assert server.stderr().startswith("coli: ") and server.stderr().count("\n") == 1
