"""`coli` with one oddity, named first: `slow` loads models only once the file `go` is in the current folder, `fragile`
loses the engine's thread at the first step of a turn, `stuck` never ends making a prompt, of which the file `stuck`
in the current folder tells."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from coli.commands.app import main
from coli.engine import Engine
from coli.server import openai_completions
from coli.server.scheduler import Scheduler

_open = Engine.open


def _patient(*arguments: Any, **options: Any) -> Engine:
    while not Path("go").exists():
        time.sleep(0.02)
    return _open(*arguments, **options)


def _dies(*_: Any) -> None:
    raise RuntimeError("broken on purpose")


def _never_ends(*_: Any, **__: Any) -> None:
    Path("stuck").touch()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    if sys.argv[1] == "slow":
        Engine.open = _patient  # type: ignore[method-assign]
    elif sys.argv[1] == "fragile":
        Scheduler._advance = _dies  # type: ignore[method-assign]
    elif sys.argv[1] == "stuck":
        openai_completions.prepare_text = _never_ends  # type: ignore[assignment]
    sys.exit(main(sys.argv[2:]))
