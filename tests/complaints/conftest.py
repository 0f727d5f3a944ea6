"""The server that tests/server has, and a nano engine without drafts in this process to say what it should answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coli.engine import Engine
from coli.settings import load
from tests.server.conftest import openai_client, server

__all__ = ["openai_client", "plain_nano", "server"]


@pytest.fixture(scope="session")
def plain_nano() -> Iterator[Engine]:
    with Engine.open(load({"threads": 2, "mtp": False, "lookup": False}, {})[0]) as engine:
        yield engine
