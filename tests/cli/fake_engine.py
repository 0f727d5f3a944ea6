"""The command line on a scripted engine: `python fake_engine.py run ...`.

FAKE_MODE chooses what the session does: `echo` answers with the prompt's words, `slow` says a word every 20 ms without
end, `deaf` the same without hearing cancel, `break` fails after two words, `memory` runs out of memory, `bug` divides
by zero, `loading` takes a minute to open. `same` has logits too, `lossy` another second token when it drafts, `blurred`
other last logits when it drafts. FAKE_OPENED names a file that opening the engine creates.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from coli.errors import NonFinite
from coli.report import Experts, ModelFacts, RunReport, Timings


@dataclass(frozen=True)
class Sampling:
    seed: int | None = None


MODE = os.environ.get("FAKE_MODE", "echo")


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Chat:
    reads = frozenset({"enable_thinking", "reasoning_effort"})

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        said = " ".join(f"{m['role']}={m['content']}" for m in messages)
        return f"{said} thinking={options['thinking']} effort={options['effort']}"


class Engine:
    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.name, self.notes, self.tokenizer = "qwen38", ["a note of the engine"], Tokenizer()
        self.ctx, self.geometry = 100, SimpleNamespace(vocab=256)
        self.model_path, self.threads = Path("fake"), 1
        self.chat = None if MODE == "no template" else Chat()

    @classmethod
    def open(cls, settings: Any, on_progress: Any) -> Engine:
        for done in range(3):
            on_progress(f"compiling {done}/3")
        if os.environ.get("FAKE_OPENED"):
            open(os.environ["FAKE_OPENED"], "w").close()
        if MODE == "loading":
            time.sleep(60)
        return cls(settings)

    def banner(self) -> str:
        return "the banner"

    def save_history(self) -> list[str]:
        return []

    def close(self) -> None:
        if not self.settings.debug:
            return
        sys.stderr.write("closed\n")


@dataclass(frozen=True)
class Request:
    prompt_ids: tuple[int, ...]
    max_tokens: int | None = None
    sampling: Any = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None


class Session:
    """Token i of an answer is i. Drafts unless it is given a Speculation (the check gives it one: off)."""

    def __init__(self, engine: Engine, speculation: Any = None, *, trace: Any = None, reference: Any = None) -> None:
        self.engine, self.drafts, self.trace, self.reference = engine, speculation is None, trace, reference
        self.report: RunReport | None = None
        self.cancelled = False
        self.last_logits: Any = None
        self.picked_ids: tuple[int, ...] = ()
        self.seed: int | None = None

    def cancel(self) -> None:
        self.cancelled = MODE != "deaf"

    def generate(self, request: Request) -> Iterator[str]:
        said: list[str] = []
        self.seed = request.sampling.seed
        for piece in self.pieces(bytes(request.prompt_ids).decode()):
            if self.cancelled or len(said) == request.max_tokens:
                break
            said.append(piece)
            if self.trace is not None:
                self.trace({"position": len(said), "source": None, "k": 0})
            yield piece
        ids = list(range(len(said)))
        if MODE == "lossy" and self.drafts:
            ids[1:2] = [7]
        if MODE in ("same", "slow", "lossy", "blurred"):
            self.last_logits = self.logits(len(said) - 1)
        self.picked_ids = tuple(ids)
        reason = "cancelled" if self.cancelled else "length"
        model = ModelFacts("/m", "qwen38", {"layers": 2})
        self.report = RunReport(
            "".join(said), tuple(ids), len(request.prompt_ids), len(said), reason,
            Timings(0.5, 0.1, 0.1, 2.0, 120.0, 8.0), 10**8, Experts(7, 1, 4096), model,
        )  # fmt: skip

    def logits(self, best: int) -> Any:
        """Those that choose `best`: the logit of a token falls by 0.5 a step away from it."""
        import numpy as np

        logits = -0.5 * np.abs(np.arange(256, dtype=np.float32) - np.float32(best))
        logits[0] += 0.25 * (MODE == "blurred" and self.drafts)
        return logits

    def pieces(self, prompt: str) -> Iterator[str]:
        if MODE == "memory":
            raise MemoryError
        if MODE == "bug":
            yield str(1 // (len(prompt) - len(prompt)))
        if MODE in ("slow", "deaf"):
            while True:
                yield "ha "
                time.sleep(0.02)
        for index, word in enumerate(prompt.split(" ")):
            if MODE == "break" and index == 2:
                raise NonFinite("NaN in the logits", "layer 3", "lower the temperature")
            if MODE == "scarce" and index == 1:
                self.engine.say("memory runs short")
            yield word if index == 0 else f" {word}"


def install() -> None:
    """Put the fakes in the place of coli.engine and coli.session."""
    fakes = {"coli.engine": {"Engine": Engine}, "coli.session": {"Session": Session, "Request": Request}}
    for name, members in fakes.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module


if __name__ == "__main__":
    from coli.commands.app import main

    install()
    sys.exit(main())
