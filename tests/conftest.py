"""Fixtures that every room shares: the shipped model, a tiny checkpoint, and the command line as a user has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from coli.models.find import NANO

OURS = ("COLI_", "Q36_", "Q38_", "_COLI_")
CLI = (sys.executable, "-m", "coli.commands.app")
FAKE = (sys.executable, str(Path(__file__).parent / "cli" / "fake_engine.py"))
Coli = Callable[..., "subprocess.CompletedProcess[str]"]

# no test here is timed: on a busy machine a deadline fails what is right
hypothesis.settings.register_profile("coli", deadline=None)
hypothesis.settings.load_profile("coli")


@pytest.fixture(scope="session")
def nano() -> Path:
    """The shipped checkpoint's folder."""
    return NANO


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random checkpoint."""
    from tests.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The tiny engines of the exactness harness (tests/speculation/engines.py), each opened when first asked for."""
    from tests.speculation.engines import Engines

    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


def clean_env(**extra: str) -> dict[str, str]:
    """The environment without a variable of ours, plus `extra`. COLI_CACHE stays: compiling is slow."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "COLI_CACHE" or not (name.startswith(OURS) or name in ("RAM_GB", "NO_COLOR"))
    }
    return {**kept, **extra}


@pytest.fixture
def coli(tmp_path: Path) -> Coli:
    """`coli(*arguments, env={}, fake=False, **subprocess_options)` runs the command line in an empty folder.

    `fake` puts a scripted engine (tests/cli/fake_engine.py) in the place of the real one; stdin is /dev/null.
    """

    def call(*arguments: str | bytes, env: dict[str, str] | None = None, fake: bool = False,
             **options: Any) -> subprocess.CompletedProcess[str]:  # fmt: skip
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("text", True)
        options.setdefault("timeout", 240)
        options.setdefault("encoding", "utf-8" if options["text"] else None)
        return subprocess.run(
            [*(FAKE if fake else CLI), *arguments], stderr=subprocess.PIPE, cwd=tmp_path, env=clean_env(**(env or {})),
            **options,
        )  # fmt: skip

    return call
