"""One call at most, in the engine's hands (coli/server/one_call.py): the turn ends itself behind the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from coli.engine import Engine
from coli.grammar import Constraint, constraint_for
from coli.models.find import NANO
from coli.server.one_call import OneCall
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"days": {"type": "integer", "enum": [3]}}, "required": ["days"]}}}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(load({"model": str(NANO), "threads": 1, "ctx": 512}, {})[0]) as engine:
        yield engine


@dataclass
class Talkative:
    """A model that would call again and again: nano held to calls, and to one of them where `one` is there."""

    calls: Constraint
    one: OneCall | None

    def mask(self) -> np.ndarray:
        ended = None if self.one is None else self.one.mask()
        return self.calls.mask() if ended is None else ended

    def accept(self, token: int) -> None:
        self.calls.accept(token)
        if self.one is not None:
            self.one.accept(token)

    def admits(self, drafts: Sequence[int]) -> int:
        return min(self.calls.admits(drafts), len(drafts) if self.one is None else self.one.admits(drafts))


def test_the_turn_ends_behind_the_first_call_and_drafts_do_not_change_it(engine: Engine) -> None:
    prompt = tuple(engine.tokenizer.encode("<|im_start|>user\nWarm?<|im_end|>\n<|im_start|>assistant\n"))
    facts = (engine.tokenizer, engine.geometry.vocab, engine.stop_ids)

    def answer(single: bool, speculation: Speculation | None) -> tuple[str, tuple[int, ...], str]:
        one = OneCall(*facts, "closed", [TOOL]) if single else None
        request = Request(prompt, 150, constraint=Talkative(constraint_for(*facts, tools=[TOOL]), one))
        session = Session(engine, speculation)
        text = "".join(session.generate(request))
        assert session.report is not None
        return text, session.report.token_ids, session.report.finish_reason

    free, _, cut = answer(False, None)
    assert cut == "length" and free.count("</tool_call>") > 1
    text, ids, ended = answer(True, None)
    first = free[: free.index("</tool_call>") + len("</tool_call>")]
    assert (text.rstrip("\n"), ended) == (first, "stop"), "the token that ends the call may hold a newline more"
    assert ids[-1] in engine.stop_ids
    assert answer(True, Speculation.off()) == (text, ids, ended)
