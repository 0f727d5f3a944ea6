"""POST /v1/completions: a prompt as it is, an answer as it is (reasoning and calls are not told apart).

A stream's chunks look like the document; the last before `[DONE]` and usage has the finish_reason and no text. Echoed,
the prompt's text comes first. `logprobs` have the legacy shape: four lists, of tokens, their log-probabilities, the
likeliest with the token itself, and where in the text each begins (the prompt not counted).
Invariant: the chunks joined are the document (tests/server/test_openai_completions.py).
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from coli.logprobs import Scored
from coli.server.answering import Answer, Answering
from coli.server.ask import prepare_text
from coli.server.openai_reply import Reply, floored, token_text, usage_json
from coli.server.openai_schema import CompletionRequest
from coli.server.service import Service
from coli.server.sse import DONE, EventStream, event
from coli.tokenizer import Tokenizer


async def endpoint(http: HttpRequest) -> Response:
    service: Service = http.app.state.service
    asked = CompletionRequest.of(http.state.content)
    service.check_model(asked.model)
    prepared = await asyncio.to_thread(prepare_text, service, asked.one_prompt(), asked.options())
    answering = await Answering.begin(http, prepared)
    reply = Reply.new(service, "cmpl", "text_completion")
    writer = _Writer(reply, service.engine.tokenizer, asked, prepared.prompt if asked.echo else "")
    if asked.stream:
        return EventStream(answering, _frames(answering, writer))
    return JSONResponse(writer.document(await answering.whole()))


async def _frames(answering: Answering, writer: _Writer) -> AsyncGenerator[bytes, None]:
    if writer.echo:
        yield writer.chunk(writer.echo)
    async for batch in answering:
        text = "".join(delta.text for delta in batch.deltas)
        if text or writer.asked.logprobs is not None:
            yield writer.chunk(text, batch.tokens)
    yield writer.end(answering.answer)


class _Writer:
    """The document or the chunks of one answer."""

    def __init__(self, reply: Reply, tokenizer: Tokenizer, asked: CompletionRequest, echo: str) -> None:
        self.reply, self.tokenizer, self.asked, self.echo = reply, tokenizer, asked, echo
        self._offsets = _Offsets(tokenizer)

    def document(self, answer: Answer) -> dict[str, Any]:
        logprobs = None if self.asked.logprobs is None else self._logprobs(answer.tokens)
        choice = _choice(self.echo + answer.content, logprobs, answer.finish_reason)
        return self.reply.document([choice], usage=usage_json(answer.usage))

    def chunk(self, text: str, tokens: Sequence[Scored] = (), finish_reason: str | None = None, **more: Any) -> bytes:
        usage = {"usage": None} if self.asked.include_usage else {}
        logprobs = self._logprobs(tokens) if tokens and self.asked.logprobs is not None else None
        return event(self.reply.document([_choice(text, logprobs, finish_reason)], **usage, **more))

    def end(self, answer: Answer) -> bytes:
        """The reason, the usage, the end."""
        asked = self.asked
        facts = {"coli": answer.coli} if asked.include_coli else {}
        frames = [self.chunk("", (), answer.finish_reason, **({} if asked.include_usage else facts))]
        if asked.include_usage:
            frames.append(event(self.reply.document([], usage=usage_json(answer.usage), **facts)))
        return b"".join([*frames, DONE])

    def _logprobs(self, tokens: Sequence[Scored]) -> dict[str, Any]:
        return {
            "tokens": [token_text(self.tokenizer, token.id) for token in tokens],
            "token_logprobs": [floored(token.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._offsets.of(token.id) for token in tokens],
        }

    def _top(self, token: Scored) -> dict[str, float]:
        """The likeliest and the token itself, by their text."""
        ranked = dict([*token.top, (token.id, token.logprob)])
        return {token_text(self.tokenizer, one): floored(logprob) for one, logprob in ranked.items()}


def _choice(text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class _Offsets:
    """Where in the answer's text each token begins, in characters; one inside a character, where that begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, token: int) -> int:
        offset = self._length
        self._length += len(self._decoder.decode(self._tokenizer.text_bytes(token)))
        return offset
