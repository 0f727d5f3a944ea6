"""The engine of this process as the partner of a chat: a conversation in, deltas out.

One session serves all turns. What it keeps of earlier prompts (coli/prefix.py) makes a turn cost its new tokens only:
checkpoints at the end of every prompt and answer, and at the places where the template will write these messages
otherwise once they are history (coli/marks.py). An edited or loaded conversation falls back to the deepest place
that still agrees.
What the user leaves open is the checkpoint's own word on sampling, as in `coli serve`.
Guarded by tests/cli/test_chat.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from coli import marks
from coli.answer import AnswerRouter, Delta, Form
from coli.chat import Message, checkpoint_sampling, reasoning_state
from coli.conversation import Conversation, TurnFacts, Wishes
from coli.engine import Engine
from coli.errors import ModelError
from coli.report import RunReport, count
from coli.sampling import Sampling
from coli.session import Request, Session

CHECKPOINTS = 4  # of a turn: system message, history, end of prompt, end of answer


class OwnEngine:
    """A `Partner`; the caller closes the engine."""

    def __init__(self, engine: Engine, wishes: Wishes) -> None:
        """Raises ModelError for a model without a chat template, UsageError for a wish out of its range."""
        if engine.chat is None:
            raise ModelError("the model has no chat template", engine.model_path, "coli run --raw continues a text")
        self._engine, self._chat, self._wishes = engine, engine.chat, wishes
        self._session = Session(engine, checkpoints=CHECKPOINTS)
        self._sampling = Sampling.wished(wishes, checkpoint_sampling(engine.model_path))
        self.facts: TurnFacts | None = None
        self.say: Callable[[str], None] = engine.notes.append
        engine.say = lambda text: self.say(text)

    def answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        self.facts = None
        self._session.forget()
        return self._answer(conversation, question)

    def _answer(self, conversation: Conversation, question: str) -> Iterator[Delta]:
        request, router = self._request(conversation, question)
        with closing(self._session.steps(request)) as steps:
            for step in steps:
                yield from router.push(step.text)
        yield from router.flush()
        report = self._session.report
        assert report is not None, "a session has a report once its iterator has ended"
        self.facts = _facts(report)

    def cancel(self) -> None:
        self._session.cancel()

    def details(self) -> list[str]:
        report = self._session.report
        if report is None:
            return []
        held = report.prompt_tokens + report.completion_tokens
        return [f"context {held:,} of {count(self._engine.ctx, 'position')}", *report.lines()]

    def idle(self, conversation: Conversation) -> list[str]:
        wishes = {"enable_thinking": conversation.thinking, "reasoning_effort": self._wishes.effort}
        return [f"the model's chat template does not read {name}: asking for it has no effect"
                for name, value in wishes.items() if value is not None and name not in self._chat.reads]  # fmt: skip

    def _request(self, conversation: Conversation, question: str) -> tuple[Request, AnswerRouter]:
        messages = conversation.messages(question)
        wishes = self._wishes

        def render(messages: Sequence[Message]) -> str:
            return self._chat.render(messages, thinking=conversation.thinking, effort=wishes.effort)

        prompt = render(messages)
        ids = self._engine.tokenizer.encode(prompt)
        places = [marks.mark(self._engine.tokenizer.encode, ids, prompt, render, probe(messages))
                  for probe in (marks.system_probe, marks.history_probe)]  # fmt: skip
        form = Form(reasoning_state(prompt))
        request = Request(tuple(ids), wishes.max_tokens, self._sampling, wishes.stop or (),
                          marks=marks.lengths(*places), form=form)  # fmt: skip
        return request, form.router()


def _facts(report: RunReport) -> TurnFacts:
    spec = report.speculation
    return TurnFacts(
        finish_reason=report.finish_reason, prompt_tokens=report.prompt_tokens, cached_tokens=report.cached_tokens,
        completion_tokens=report.completion_tokens, accepted=spec.accepted if spec is not None else 0,
        carried=spec.drafts if spec is not None else 0, per_forward=spec.per_forward if spec is not None else None,
        ttft_s=report.timings.ttft_s, decode_s=report.timings.decode_s,
    )  # fmt: skip
