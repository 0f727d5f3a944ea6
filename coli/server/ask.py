"""A request of any API, as the engine's: messages to a prompt, wishes to a coli.session.Request.

    Options        what all APIs can ask for beside the text; an endpoint fills in what its clients sent
    prepare_chat   messages through the checkpoint's template
    prepare_text   a text or token ids as they are
    Prepared       the engine's request, and what the answer's reader needs to know (coli/server/answering.py)

Messages come in the template's form: `role` system, user, assistant or tool; `content` a string; of an assistant also
`reasoning_content` and `tool_calls`, whose arguments are a mapping. Tools come in OpenAI's form, which templates read.

What a client leaves open is the checkpoint's word (generation_config.json), else OpenAI's default. What cannot be done
is refused by name before any work, a prompt that does not fit with both counts. These functions run on a worker thread
(`await asyncio.to_thread(prepare_chat, ...)`): a long prompt takes a while to encode.

A prompt is read up to two marks besides its end, so that the state of these places is kept (coli/marks.py).

Guarded by tests/server/test_ask.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from coli import marks
from coli.answer import Form
from coli.chat import ChatTemplate, Message, checkpoint_sampling, reasoning_state
from coli.errors import ColiError, ModelError, PromptTooLong, UsageError
from coli.sampling import Sampling, Wished
from coli.server.errors import ApiError, unsupported
from coli.server.one_call import OneCall
from coli.session import Constraint, Request
from coli.speculation.options import Speculation

if TYPE_CHECKING:
    from coli.engine import Engine
    from coli.server.service import Service

NO_EFFORT = "none"
FREE = ("auto", "none")  # choices that leave it to the model whether to call
MOST_STOP = 1024  # characters
LEAST_REPETITION = 0.01  # as far below 1 as the sampler's highest is above it; logits are divided by it
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "thinking", "effort"})  # not a client's to set

Tool: TypeAlias = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class Named:
    """The one tool that must be called."""

    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True)
class Speculative:
    """Drafts of this turn: none, or `max_drafts` of either source in a verify at most."""

    enabled: bool = True
    max_drafts: int | None = None


@dataclass(frozen=True)
class Options(Wished):
    """None: not asked for. `logprobs`: alternatives beside every token's own. `response_format`: OpenAI's object of
    chat completions. `prediction`: what the answer may say, word for word, for drafts to copy from; a hint alone, so
    it says nothing where there are no drafts."""

    max_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prediction: str | None = None
    response_format: Mapping[str, Any] | None = None
    speculative: Speculative | None = None
    pin: bool = False


@dataclass(frozen=True)
class Prepared:
    """`forced`: behind the answer's reasoning there are calls and nothing else."""

    request: Request
    prompt: str
    forced: bool = False


def prepare_chat(
    service: Service, *, messages: Sequence[Message], options: Options = Options(), tools: Sequence[Tool] = (),
    tool_choice: ToolChoice = "auto", parallel_tool_calls: bool = True, thinking: bool | None = None,
    effort: str | None = None, template_kwargs: Mapping[str, Any] | None = None,
) -> Prepared:  # fmt: skip
    """Raises ApiError and ColiError (PromptTooLong and UsageError are the client's)."""
    engine, messages = service.engine, _ordered(messages)
    _distinct(tools)
    read = tools if tool_choice != "none" else ()
    render = _renderer(engine, messages, read, thinking, effort, template_kwargs)
    prompt = render(messages)
    ids = _fitting(engine, engine.tokenizer.encode(prompt), "messages")
    goes_on = messages[-1]["role"] == "assistant"
    constraint = _constraint(engine, options.response_format, read, tool_choice, parallel_tool_calls, prompt, goes_on)
    system, history = _marks(engine, render, messages, bool(read), prompt, ids)
    pins = (history, len(ids)) if options.pin else ()  # of a pinned prompt also what its next turn begins with
    form = Form(reasoning_state(prompt), tuple(read))
    request = replace(_request(service, ids, options), constraint=constraint, marks=marks.lengths(system, history),
                      pins=marks.lengths(*pins), shared=system, form=form)  # fmt: skip
    return Prepared(request, prompt, forced=tool_choice not in FREE)


def prepare_text(service: Service, prompt: str | Sequence[int], options: Options = Options()) -> Prepared:
    """The same of a prompt as it is, for an answer that is text as it is."""
    engine = service.engine
    if isinstance(prompt, str):
        text, ids = prompt, _fitting(engine, engine.tokenizer.encode(prompt), "prompt")
    else:
        ids = _fitting(engine, prompt, "prompt")
        text = engine.tokenizer.decode(ids)
    request = replace(_request(service, ids, options), pins=(len(ids),) if options.pin else ())
    return Prepared(request, text)


def count_chat(
    service: Service, *, messages: Sequence[Message], tools: Sequence[Tool] = (), tool_choice: ToolChoice = "auto",
    thinking: bool | None = None, effort: str | None = None, template_kwargs: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Tokens of the prompt that `prepare_chat` would make, however many."""
    messages = _ordered(messages)
    _distinct(tools)
    read = tools if tool_choice != "none" else ()
    render = _renderer(service.engine, messages, read, thinking, effort, template_kwargs)
    return len(service.engine.tokenizer.encode(render(messages)))


# ---- the prompt ------------------------------------------------------------------------------------------------------


def _renderer(engine: Engine, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None,
              effort: str | None, template_kwargs: Mapping[str, Any] | None) -> marks.Render:  # fmt: skip
    """Renders messages as this request wants them. Raises ApiError for what its template does not know."""
    chat = engine.chat
    if chat is None:
        raise ApiError(400, "the model has no chat template (use /v1/completions)", code="no_chat_template")
    if tools and "tools" not in chat.reads:
        raise unsupported("tools", "the model's chat template does not read them")
    if "tools" not in chat.reads and any(one["role"] == "tool" or one.get("tool_calls") for one in messages):
        raise unsupported("messages", "the model's chat template reads no tool calls and no results of them")
    variables = _variables(chat, thinking, effort, template_kwargs or {})

    def render(messages: Sequence[Message]) -> str:
        goes_on = messages[-1]["role"] == "assistant"
        try:
            text = chat.render(messages, tools=list(tools) or None, add_generation_prompt=not goes_on, **variables)
        except ModelError as error:  # it rendered others: these messages are not what it was written for
            raise ApiError(400, error.what, param="messages", code="chat_template_failed") from error
        return _unended(engine, text) if goes_on else text

    return render


def _distinct(tools: Sequence[Tool]) -> None:
    """Refuses two tools of one name: a call would say neither which it means nor what its values are."""
    seen: set[str] = set()
    for name in (tool["function"]["name"] for tool in tools):
        if name in seen:
            raise ApiError(400, f"invalid 'tools': two are named {name!r}", param="tools", code="invalid_value")
        seen.add(name)


def _ordered(messages: Sequence[Message]) -> Sequence[Message]:
    """The same with the system's messages at the head as one. Raises ApiError for what stands where it cannot."""
    if not messages:
        raise ApiError(400, "there are no messages", param="messages", code="invalid_value")
    head = next((number for number, one in enumerate(messages) if one["role"] != "system"), len(messages))
    for number, message in enumerate(messages[head:], head):
        if message["role"] == "system":
            what = "a system message stands first or not at all"
            raise ApiError(400, what, param=f"messages[{number}].role", code="invalid_value")
    if messages[-1].get("tool_calls"):
        what = "the results of the last message's tool calls are missing"
        raise ApiError(400, what, param="messages", code="invalid_value")
    if head < 2:
        return messages
    return [{**messages[0], "content": "\n\n".join(one["content"] for one in messages[:head])}, *messages[head:]]


def _variables(chat: ChatTemplate, thinking: bool | None, effort: str | None,
               given: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """What the template is told beside messages and tools. `given` are variables under the template's own names."""
    for name in given:
        if name not in chat.reads - RESERVED:
            raise unsupported(f"chat_template_kwargs.{name}", "the model's chat template does not read it")
    thinking, effort = _effort(chat, thinking, effort)
    if thinking is not None and "enable_thinking" not in chat.reads:
        raise unsupported("enable_thinking", "the model's chat template does not read it")
    wishes = {"enable_thinking": thinking, "reasoning_effort": None if effort is None else chat.efforts[effort]}
    return {name: value for name, value in wishes.items() if value is not None} | dict(given)


def _effort(chat: ChatTemplate, thinking: bool | None, effort: str | None) -> tuple[bool | None, str | None]:
    """An effort in terms of the template: as it is, or as thinking switched on or off."""
    if effort is None:
        return thinking, None
    if effort not in (NO_EFFORT, *chat.efforts):
        words = ", ".join((NO_EFFORT, *chat.efforts))
        raise ApiError(400, f"{effort!r} is no effort, choose from {words}", param="reasoning_effort",
                       code="invalid_value")  # fmt: skip
    if effort != NO_EFFORT and "reasoning_effort" in chat.reads:
        return thinking, effort
    if "enable_thinking" not in chat.reads:
        raise unsupported("reasoning_effort", "the model's chat template reads neither it nor enable_thinking")
    return effort != NO_EFFORT if thinking is None else thinking, None


def _unended(engine: Engine, text: str) -> str:
    """`text` without the end of its last message, an assistant's that the answer continues."""
    spellings = [engine.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in engine.stop_ids]
    at, end = max(((text.rfind(spelling), spelling) for spelling in spellings if spelling), default=(-1, ""))
    if at < 0 or text[at + len(end) :].strip():
        raise unsupported("messages", "the model's chat template cannot continue an assistant's message",
                          "let the last message be a user's")  # fmt: skip
    return text[:at]


def _fitting(engine: Engine, ids: Sequence[int], param: str) -> tuple[int, ...]:
    """Raises ApiError and PromptTooLong, of this field, unless these are tokens of the model with room for one more."""
    if not ids:
        raise ApiError(400, "the prompt has no tokens", param=param, code="invalid_value")
    if len(ids) >= engine.ctx:
        what = (f"this model's maximum context length is {engine.ctx} tokens, the prompt has {len(ids)} and an answer "
                "needs at least one")  # fmt: skip
        raise PromptTooLong(what, param, "shorten the prompt")
    wrong = next((token for token in ids if not 0 <= token < engine.geometry.vocab), None)
    if wrong is not None:
        what = f"token id {wrong} is outside the model's vocabulary of {engine.geometry.vocab}"
        raise ApiError(400, what, param=param, code="invalid_value")
    return tuple(ids)


def _marks(engine: Engine, render: marks.Render, messages: Sequence[Message], tools: bool, prompt: str,
           ids: Sequence[int]) -> tuple[int, int]:  # fmt: skip
    """Of the system message with the tools, and of the history; 0 where there is none."""

    def mark(probe: Sequence[Message]) -> int:
        return marks.mark(engine.tokenizer.encode, ids, prompt, render, probe, (ApiError, ColiError))

    system = mark(marks.system_probe(messages)) if tools or messages[0]["role"] == "system" else 0
    return system, mark(marks.history_probe(messages))


# ---- the rest --------------------------------------------------------------------------------------------------------


def _request(service: Service, ids: tuple[int, ...], options: Options) -> Request:
    engine = service.engine
    if any(len(stop) > MOST_STOP for stop in options.stop):
        raise ApiError(400, f"a stop string is longer than {MOST_STOP} characters", param="stop", code="invalid_value")
    vocab = engine.geometry.vocab
    if (wrong := next((token for token, _ in options.logit_bias if token >= vocab), None)) is not None:
        what = f"invalid 'logit_bias': token {wrong} is outside the model's vocabulary of {vocab}"
        raise ApiError(400, what, param="logit_bias", code="invalid_value")
    if options.pin and not service.options.pins:
        raise unsupported("pin", "the server was started with --pins 0")
    # no more of it than an answer could say: it is indexed, and the plan counts on that
    prediction = engine.tokenizer.encode(options.prediction)[: engine.ctx] if options.prediction else ()
    return Request(
        ids, options.max_tokens, _sampling(engine, options), options.stop, logprobs=options.logprobs,
        prediction=tuple(prediction), speculation=_speculation(engine, options.speculative),
    )  # fmt: skip


def _sampling(engine: Engine, options: Options) -> Sampling:
    """What was asked for, else the checkpoint's word, else OpenAI's defaults."""
    if options.seed is not None:
        options = replace(options, seed=options.seed % (1 << 64))  # OpenAI's may be negative
    if options.repetition_penalty is not None and 0 < options.repetition_penalty < LEAST_REPETITION:
        what = f"repetition_penalty is below {LEAST_REPETITION:g}, where logits overflow"
        raise ApiError(400, what, param="repetition_penalty", code="invalid_value")
    return Sampling.wished(options, _own_sampling(engine.model_path))


_own_sampling = lru_cache(maxsize=8)(checkpoint_sampling)


def _speculation(engine: Engine, wish: Speculative | None) -> Speculation | None:
    """None: the server's own."""
    if wish is None:
        return None
    if not wish.enabled or wish.max_drafts == 0:
        return Speculation.off()
    own = Speculation.of(engine.settings)
    if not (own.lookup or (own.mtp and engine.head is not None)):
        raise unsupported("speculative.enabled", "the server was started without drafts")
    most = wish.max_drafts
    if most is None:
        return None
    return replace(own, most=min(own.most, most), drafts=min(own.drafts, most),
                   lookup_drafts=min(own.lookup_drafts, most))  # fmt: skip


def _constraint(engine: Engine, form: Mapping[str, Any] | None, tools: Sequence[Tool], choice: ToolChoice,
                parallel: bool, prompt: str, goes_on: bool) -> Constraint | None:  # fmt: skip
    """The grammar that the answer must follow, None where it is free. Raises ApiError for what cannot go together."""
    forced, kind = choice not in FREE, "text" if form is None else form["type"]
    if not forced and kind == "text":
        if parallel or not tools:
            return None
        return OneCall(engine.tokenizer, engine.geometry.vocab, engine.stop_ids, reasoning_state(prompt), tools)
    param = "tool_choice" if forced else "response_format"
    if forced and kind != "text":
        raise unsupported("response_format", "an answer of tool calls has no other form")
    if not forced and tools:
        raise unsupported("response_format", "beside tools", 'set tool_choice to "none"')
    if goes_on:
        raise unsupported(param, "the answer goes on with the last message", "let the last message be a user's")
    return _grammar(engine, form or {}, tools, choice, parallel, prompt)


def _grammar(engine: Engine, form: Mapping[str, Any], tools: Sequence[Tool], choice: ToolChoice, parallel: bool,
             prompt: str) -> Constraint:  # fmt: skip
    from coli.grammar import MissingExtra, constraint_for
    from coli.tools import call_style

    assert engine.chat is not None, "it rendered the prompt"
    wish: dict[str, Any] = {"json_object": True}
    if forced := choice not in FREE:
        name = choice.name if isinstance(choice, Named) else None
        if not tools or name not in (None, *(tool["function"]["name"] for tool in tools)):
            what = "no tools are given" if not tools else f"no tool is named {name!r}"
            raise ApiError(400, f"invalid 'tool_choice': {what}", param="tool_choice", code="invalid_value")
        wish = {"tools": tools, "name": name, "style": call_style(engine.chat.source), "parallel": parallel}
    elif form["type"] == "json_schema":
        asked = form["json_schema"]
        wish = {"schema": asked.get("schema", {"type": "object"}), "strict": asked.get("strict") is True}
    try:
        return constraint_for(engine.tokenizer, engine.geometry.vocab, engine.stop_ids,
                              reasoning=reasoning_state(prompt), **wish)  # fmt: skip
    except MissingExtra as error:
        raise unsupported("tool_choice" if forced else "response_format", error.what, error.hint) from error
    except UsageError as error:  # of a schema that the client wrote
        param, code = ("tools", "invalid_function_parameters") if forced else ("response_format", "invalid_json_schema")
        raise ApiError(400, f"invalid '{param}': {error.what}", param=param, code=code) from error
