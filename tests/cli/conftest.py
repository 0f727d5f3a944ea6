"""A checkpoint for `coli doctor`, and copies of it that a test may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint in four files, with an index."""
    return write_tiny(tmp_path_factory.mktemp("whole") / "model", dtype="BF16", shards=4)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    return Path(shutil.copytree(whole, tmp_path / "model"))
