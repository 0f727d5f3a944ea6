"""`coli bench` on a scripted engine: `python fake_bench.py bench ...`.

An arm decodes 100 tokens per second, and 100 more for each draft of its head. FAKE_MODE: `differ` gives arm 3 another
answer, `no head` is a checkpoint without one, `slow` takes a second an answer, `no plot` has no matplotlib.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import coli.engine
import coli.session
from coli.bench import figure
from coli.models.find import NANO
from coli.report import Experts, ModelFacts, RunReport, Timings
from coli.session import Request
from coli.speculation.options import Speculation

MODE = os.environ.get("FAKE_MODE", "")


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Engine:
    name, cap, ctx, threads, model_path, chat, tokenizer = "qwen38", 8, 512, 2, NANO, None, Tokenizer()

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.notes = ["a note of the engine"]
        self.head = None if MODE == "no head" else object()
        self.model = SimpleNamespace(new_state=object)

    @classmethod
    def open(cls, settings: Any, on_progress: Any) -> Engine:
        assert not settings.usage_save, "a benchmark leaves the user's counts alone"
        return cls(settings)

    def banner(self) -> str:
        return "the banner"

    def close(self) -> None:
        pass


class Session:
    states: ClassVar[set[int]] = set()

    def __init__(
        self, engine: Engine, speculation: Speculation, *, trace: Callable[[dict[str, Any]], None], state: object
    ) -> None:
        self.speculation, self.trace = speculation, trace
        self.states.add(id(state))
        assert len(self.states) == 1, "the arms share one state"
        self.report: RunReport | None = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def generate(self, request: Request) -> Iterator[str]:
        self.cancelled = False
        drafts = self.speculation.drafts if self.speculation.mtp else 0
        end = time.monotonic() + (MODE == "slow")
        yield "text"
        while time.monotonic() < end and not self.cancelled:
            time.sleep(0.01)
        self.trace({"k": drafts, "seconds": 0.01 * (1 + drafts / 2)})
        ids = (1, 2, 4) if MODE == "differ" and drafts == 3 else (1, 2, 3)
        self.report = RunReport(
            "text", ids, len(request.prompt_ids), 3, "cancelled" if self.cancelled else "length",
            Timings(decode_tok_s=100.0 * (1 + drafts)), 0, Experts(), ModelFacts("/m", "qwen38", {}), None,
        )  # fmt: skip


if __name__ == "__main__":
    from coli.commands.app import main

    coli.engine.Engine = Engine  # type: ignore[assignment,misc]
    coli.session.Session = Session  # type: ignore[assignment,misc]
    if MODE == "no plot":
        figure.find_spec = lambda _: None  # type: ignore[assignment]
    sys.exit(main())
