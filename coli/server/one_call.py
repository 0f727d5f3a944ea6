"""An answer that makes one tool call at most: free until the call is there, then over.

Idea: where no call is required there is no grammar to hold the answer to, and none is needed. The tokens are read as
the client's answer is read (coli/answer.py), and behind the first call nothing but a stop token may come. The model
ends the turn itself, so usage, log-probabilities and the state that is kept are those of an answer without more calls.
Where a call is required the grammar says it (`parallel` of coli.grammar.constraint_for).
Guarded by tests/server/test_ask.py and test_one_call.py.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coli.answer import AnswerRouter
from coli.chat import Reasoning
from coli.errors import UsageError
from coli.tokenizer import Tokenizer


class OneCall:
    """The constraint of one answer (coli.session.Constraint)."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Iterable[int], reasoning: Reasoning,
                 tools: Sequence[Mapping[str, Any]]) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._router = AnswerRouter(reasoning, tools)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._called = False
        self._end = np.zeros(vocab, np.bool_)
        self._end[[token for token in stop_ids if token < vocab]] = True
        self._end.flags.writeable = False
        if not self._end.any():
            raise UsageError("one call at most needs a token that ends the answer, and the model has none",
                             "parallel_tool_calls")  # fmt: skip

    def mask(self) -> np.ndarray | None:
        return self._end if self._called else None

    def accept(self, token: int) -> None:
        deltas = self._router.push(self._decode(self._tokenizer.text_bytes(token)))
        self._called = self._called or any(delta.call is not None for delta in deltas)

    def admits(self, drafts: Sequence[int]) -> int:
        """Of drafts that hold the call's end too many: their rows are judged by the mask, as all are."""
        return 0 if self._called else len(drafts)
