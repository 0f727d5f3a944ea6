"""One server on nano for every test that has no wish of its own, and the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.server import tool_model
from tests.server.live import Live, live

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """`coli serve` on the shipped model, with two slots."""
    with live(tmp_path_factory.mktemp("server"), "--slots", "2") as server:
        yield server


@pytest.fixture(scope="session")
def openai_client(server: Live) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic_client(server: Live) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The same model with a template that reads tools; its name is "nano-tools"."""
    folder = tmp_path_factory.mktemp("tools")
    with live(folder, model=tool_model.write(folder)) as server:
        yield server
