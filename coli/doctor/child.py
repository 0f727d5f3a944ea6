"""Questions put to a child process, because whoever answers them may crash, hang, or stay in memory for good.

Guarded by tests/cli/test_vulkan_devices.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from coli.errors import ColiError


def ask(arguments: Sequence[str], timeout: float) -> str:
    """The last line that `python ARGUMENTS` writes. Raises ColiError, which says how it ended without one."""
    command = [sys.executable, "-P", *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ColiError(f"no answer within {timeout:.0f} s") from None
    except OSError as error:
        raise ColiError(f"no process could be started: {error.strerror}") from error
    said, complaint = (part.decode("utf-8", "replace").strip().splitlines() for part in (done.stdout, done.stderr))
    if done.returncode < 0:
        raise ColiError(f"a crash ({_name(-done.returncode)})")
    if done.returncode or not said:
        raise ColiError(complaint[-1] if complaint else f"no answer (exit {done.returncode})")
    return said[-1]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
