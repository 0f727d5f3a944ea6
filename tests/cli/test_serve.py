"""`coli serve` before anything is served: flags, refusals, the extra, and what help costs."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from typing import Any

import pytest

from coli.errors import UsageError
from coli.server.options import ServeOptions, loopback
from tests.conftest import Coli, clean_env

LIGHT = ("starlette", "uvicorn", "prometheus_client", "numpy", "numba", "asyncio", "coli.server.serving")


def test_help_loads_nothing_of_the_extra() -> None:
    code = (
        "import sys; from coli.commands.app import main; code = main(['serve', '--help']); "
        f"loaded = [name for name in {LIGHT!r} if name in sys.modules]; sys.exit(code or loaded or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_env())
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in ("--host", "--port", "--api-key", "--slots", "--model", "--drafts"))


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "prometheus_client"])  # pydantic may be Typer's too
def test_a_missing_extra_is_one_line_that_says_what_to_install(missing: str) -> None:
    code = (f"import sys; sys.modules[{missing!r}] = None; from coli.commands.app import main; "
            "sys.exit(main(['serve', '--port', '0']))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean_env())
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert missing in done.stderr and "pip install 'coli[serve]'" in done.stderr


def test_every_model_flag_of_run_is_one_of_serve() -> None:
    from coli.commands import app
    from coli.commands._model_flags import _FLAGS
    from coli.settings import TABLE

    group = app.typer.main.get_command(app.app)
    run, serve = ({name for flag in group.commands[command].params for name in flag.opts}
                  for command in ("run", "serve"))  # fmt: skip
    known = {row.flag for rows in TABLE.values() for row in rows if row.flag}
    assert run & known == serve & known - {"--api-key"} and len(run & known) == len(_FLAGS)


def test_defaults_are_those_of_the_options_and_of_the_plan() -> None:
    from coli.commands import app
    from coli.planning.plan import KEPT

    command = app.typer.main.get_command(app.app).commands["serve"]
    told = {flag.name: flag.default for flag in command.params}
    own = {field.name: field.default for field in fields(ServeOptions)}
    assert set(own) - set(told) == {"allowed_hosts", "cors_origins"}
    differing = [name for name in own if name in told and told[name] != own[name]]
    assert not differing
    assert told["checkpoints"] + told["pins"] == KEPT


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"host": "0.0.0.0"}, "--insecure"), ({"host": "::"}, "--api-key"), ({"host": "10.0.0.1"}, "COLI_API_KEY"),
        ({"host": "10.0.0.1", "api_key": None}, "--host 10.0.0.1"), ({"port": 65536}, "--port"),
        ({"port": -1}, "0..65535"),
        ({"slots": 0}, "--slots"), ({"slots": 17}, "1..16"), ({"max_queue": -1}, "--max-queue"),
        ({"queue_timeout": 0.0}, "--queue-timeout"), ({"queue_timeout": float("nan")}, "--queue-timeout"),
        ({"checkpoints": 0}, "--checkpoints"), ({"pins": -1}, "--pins"), ({"model_id": ""}, "--model-id"),
        ({"model_id": "a\nb"}, "--model-id"), ({"api_key": ""}, "--api-key"), ({"api_key": " x"}, "--api-key"),
        ({"cors_origins": ("ok.example",)}, "ok.example"), ({"cors_origins": ("https://a.b/page",)}, "--cors-origin"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_their_flag(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        ServeOptions(**wrong).check()
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "0.0.0.0"], "--insecure"), (["--slots", "17"], "1..16"), (["--queue-timeout", "nan"], "above 0"),
        (["--api-key", ""], "--api-key"), (["--drafts", "9"], "--drafts"), (["--port", "http"], "--port"),
        (["extra"], "extra"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_and_2(coli: Coli, arguments: list[str], named: str) -> None:
    done = coli("serve", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("coli: ") and done.stderr.count("\n") == 1 and named in done.stderr


def test_a_port_in_use_is_known_before_the_model_is_opened(coli: Coli) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        done = coli("serve", "--port", port, "--model", "/no/such/model")
    assert done.returncode == 2 and f"port {port} is in use" in done.stderr and "--port" in done.stderr


def test_env_does_not_show_the_key(coli: Coli) -> None:
    done = coli("env", env={"COLI_API_KEY": "s3cret"})
    assert "COLI_API_KEY = (set)  (variable)" in done.stdout and "s3cret" not in done.stdout + done.stderr
    assert "s3cret" not in coli("env", "--json", env={"COLI_API_KEY": "s3cret"}).stdout


@pytest.mark.parametrize(("name", "own"), [
    ("localhost", True), ("LOCALHOST", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True),
    ("0.0.0.0", False), ("::", False), ("", False), ("10.0.0.1", False), ("localhost.example", False),
])  # fmt: skip
def test_loopback(name: str, own: bool) -> None:
    assert loopback(name) is own


def test_an_open_door_needs_a_key_or_the_word() -> None:
    with pytest.raises(UsageError):
        ServeOptions(host="0.0.0.0").check()
    ServeOptions(host="0.0.0.0", api_key="k").check()
    ServeOptions(host="0.0.0.0", insecure=True).check()
    ServeOptions(host="::1").check()
    assert ServeOptions(host="0.0.0.0", allowed_hosts=("Box",)).hosts == {"box"}
    assert ServeOptions(host="10.0.0.1").hosts == {"10.0.0.1"}
