"""No kernel reads or writes a byte outside its buffers (tests/fence.py)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_env

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")


def fenced(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tests.fence", what], cwd=Path(__file__).parents[1], text=True,
                          capture_output=True, timeout=280, env=clean_env())  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("side", ["start", "end"])
def test_nothing_is_touched_outside_a_buffer(side):
    done = fenced(side)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["tokens"] > 3000 and found["buffers"] > 3000 and found["faults"] == 0


@pytest.mark.slow
def test_the_fence_holds():
    assert fenced("broken").returncode == -signal.SIGSEGV
