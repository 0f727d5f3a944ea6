"""An answer of /v1/completions or /v1/chat/completions off the wire, streamed or in one piece, in one form.

The server cuts a stream where time cuts it: what came within some milliseconds is one chunk. So neighbouring deltas are
joined, and tokens with their log-probabilities stand in one row; all else of a frame is checked here or kept. What an
answer `said` is equal for a stream and a document, and for any two servers that computed the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

HEAD = ("id", "object", "created", "model", "system_fingerprint")
NAMES = {"reasoning_content": "reasoning", "content": "content"}  # of a chat's deltas
Pieces = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Answer:
    """`pieces`: (kind, text) in order, no two neighbours of one kind; `tokens` None: no logprobs. `finish_reason` and
    `usage` are None where the client left before. `coli`: its object in the last chunk, where it was asked for."""

    pieces: Pieces
    tokens: tuple[Any, ...] | None
    finish_reason: str | None
    usage: Mapping[str, Any] | None
    made_by: tuple[str, str]  # model and fingerprint
    coli: Mapping[str, Any] | None = None

    def text(self, kind: str = "content") -> str:
        return "".join(text for name, text in self.pieces if name == kind)

    @property
    def cached(self) -> int:
        return self._usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def drafts(self) -> tuple[int, int]:
        """Accepted and rejected."""
        details = self._usage["completion_tokens_details"]
        return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Tokens of the prompt, of the answer, of both, of reasoning."""
        usage = self._usage
        return (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"],
                usage["completion_tokens_details"]["reasoning_tokens"])  # fmt: skip

    @property
    def _usage(self) -> Mapping[str, Any]:
        assert self.usage is not None, "the client left before"
        return self.usage

    @property
    def said(self) -> tuple[Any, ...]:
        """All that does not depend on drafts, on earlier turns, or on streaming."""
        return self.text("reasoning"), self.text(), self.tokens, self.finish_reason, self.counts, self.made_by

    def without_tokens(self) -> Answer:
        return replace(self, tokens=None)


def document(content: Mapping[str, Any]) -> Answer:
    """An answer in one piece."""
    [choice] = content["choices"]
    chat = content["object"] == "chat.completion"
    assert chat or content["object"] == "text_completion", content["object"]
    said = choice["message"] if chat else {"content": choice["text"]}
    assert not chat or said["role"] == "assistant"
    pieces = [(name, said.get(field) or "") for field, name in NAMES.items()]
    return Answer(_joined(pieces), _tokens(choice["logprobs"]), choice["finish_reason"], content["usage"],
                  _made_by(content))  # fmt: skip


def chunks(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The frames of a stream as they come. Raises AssertionError where it does not end as streams do."""
    lines = iter(lines)
    for line in lines:
        if line == b"data: [DONE]\n":
            assert [line for line in lines if line != b"\n"] == [], "frames behind the end"
            return
        if line != b"\n" and not line.startswith(b":"):
            assert line.startswith(b"data: {"), line
            yield json.loads(line[6:])
    raise AssertionError("a stream without an end")


def stream(frames: Sequence[Mapping[str, Any]], *, whole: bool = True, logprobs: bool) -> Answer:
    """An answer from its frames; without `whole`, the beginning that a client saw that left. Usage was asked for."""
    assert not [frame for frame in frames if "error" in frame], frames
    assert len({tuple(frame[name] for name in HEAD) for frame in frames}) == 1, "frames of several answers"
    told, ends = (frames[:-1], frames[-1]) if whole else (frames, None)
    assert all(len(frame["choices"]) == 1 and frame["usage"] is None for frame in told)
    choices = [frame["choices"][0] for frame in told]
    pieces = _deltas(choices, whole) if frames[0]["object"] == "chat.completion.chunk" else _texts(choices, whole)
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[: len(reasons) - whole] == [None] * (len(reasons) - whole), reasons
    tokens = tuple(token for choice in choices for token in _tokens(choice["logprobs"]) or ())
    assert logprobs or not tokens, "logprobs nobody asked for"
    assert ends is None or (ends["choices"] == [] and reasons[-1] and choices[-1]["logprobs"] is None)
    return Answer(_joined(pieces), tokens if logprobs else None, reasons[-1] if whole else None,
                  None if ends is None else ends["usage"], _made_by(frames[0]),
                  None if ends is None else ends.get("coli"))  # fmt: skip


def _deltas(choices: Sequence[Mapping[str, Any]], whole: bool) -> list[tuple[str, str]]:
    """Of a chat: the role first and alone, the reason alone; between them one kind of text a chunk."""
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}, deltas[0]
    assert not whole or deltas[-1] == {}, deltas[-1]
    assert all(len(delta) <= 1 for delta in deltas[1:])
    return [(NAMES[field], text) for delta in deltas[1:] for field, text in delta.items()]


def _texts(choices: Sequence[Mapping[str, Any]], whole: bool) -> list[tuple[str, str]]:
    assert not whole or choices[-1]["text"] == "", choices[-1]
    return [("content", choice["text"]) for choice in choices]


def _joined(pieces: Iterable[tuple[str, str]]) -> Pieces:
    """Neighbours of one kind as one."""
    said = (piece for piece in pieces if piece[1])
    return tuple((kind, "".join(text for _, text in group)) for kind, group in groupby(said, lambda piece: piece[0]))


def _tokens(logprobs: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """One entry a token, of the shape of either endpoint; the token's text is `["token"]`."""
    if logprobs is None:
        return None
    if "content" in logprobs:
        return tuple(logprobs["content"])
    columns = {"token": "tokens", "logprob": "token_logprobs", "top": "top_logprobs", "offset": "text_offset"}
    rows = zip(*(logprobs[column] for column in columns.values()), strict=True)
    return tuple(dict(zip(columns, row, strict=True)) for row in rows)


def _made_by(content: Mapping[str, Any]) -> tuple[str, str]:
    return content["model"], content["system_fingerprint"]
