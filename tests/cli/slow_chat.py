"""The command line with answers that take their time and have no end of their own: 20 ms a step, no stop token."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from coli.commands.app import main
from coli.session import Request, Session, Step

_steps = Session.steps


def slowly(self: Session, request: Request) -> Iterator[Step]:
    for step in _steps(self, replace(request, stop_ids=frozenset())):
        time.sleep(0.02)
        yield step


if __name__ == "__main__":
    Session.steps = slowly  # type: ignore[method-assign,assignment]
    sys.exit(main())
