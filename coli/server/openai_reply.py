"""What OpenAI's chat completions and completions have in common on the way out: ids, usage, log-probabilities.

A token is written as its text; one that holds a part of a character as its bytes in `\\x` spelling, so that two of them
never look the same, and `bytes` are exact. A control token has its spelling and null for bytes: it adds nothing to the
text. A log-probability below FLOOR is FLOOR, as OpenAI has it: JSON knows no infinity.
Guarded by tests/server/test_openai_chat.py and test_openai_completions.py.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from coli.logprobs import Scored
from coli.server.answering import Usage
from coli.tokenizer import Tokenizer

if TYPE_CHECKING:
    from coli.engine import Engine
    from coli.server.service import Service

FLOOR = -9999.0


@dataclass(frozen=True)
class Reply:
    """What every document and every chunk of one answer carries; `kind` is its object's name."""

    id: str
    kind: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def new(cls, service: Service, prefix: str, kind: str) -> Reply:
        name = f"{prefix}-{uuid.uuid4().hex}"
        return cls(name, kind, int(time.time()), service.model_id, fingerprint(service.engine))

    def document(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.fingerprint, "choices": list(choices), **more}


def fingerprint(engine: Engine) -> str:
    """The same as long as equal requests with equal seeds get equal answers."""
    asked = engine.settings
    facts = (version("coli"), engine.name, engine.checkpoint.nbytes, asked.act, asked.trunk_int8, asked.experts)
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted,
            "rejected_prediction_tokens": usage.rejected,
        },
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """How a token is written."""
    spelled = tokenizer.token_bytes(token)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in spelled)


def token_json(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    """A token of chat completions and Responses."""
    exact = None if token in tokenizer.special_ids else list(tokenizer.token_bytes(token))
    return {"token": token_text(tokenizer, token), "logprob": floored(logprob), "bytes": exact}


def scored_json(tokenizer: Tokenizer, scored: Scored) -> dict[str, Any]:
    """The same with its alternatives."""
    top = [token_json(tokenizer, token, logprob) for token, logprob in scored.top]
    return {**token_json(tokenizer, scored.id, scored.logprob), "top_logprobs": top}


def floored(logprob: float | None) -> float:
    assert logprob is not None, "logprobs were asked for"
    return max(logprob, FLOOR)
