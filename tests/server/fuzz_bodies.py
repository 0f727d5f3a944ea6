"""Bodies that the request models allow, as Hypothesis strategies read off the models' own JSON schemas.

A schema knows what each field may be, not what goes together nor what means anything: names that lead somewhere have
strategies of their own (`_MEANT`), a body has what it must and a few of the rest, and `_tidied` puts turns and blocks
where they may stand. What JSON's text can say and Python's values cannot (1e999, a thousand digits, NaN, nesting deeper
than a stack) is a mark in the value, replaced by its text when the body is written (`written`).
Guarded by tests/server/test_fuzz.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from coli.server.anthropic_schema import CountRequest, MessagesRequest
from coli.server.openai_schema import ChatRequest, CompletionRequest
from coli.server.responses_schema import ResponsesRequest

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MODELS: Mapping[str, type[BaseModel]] = {
    CHAT: ChatRequest, TEXT: CompletionRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest,
    COUNT: CountRequest,
}  # fmt: skip
_ASIDE = {RESPONSES: ("top_logprobs", "include")}  # what else cannot be had beside tools
LIMITS = {CHAT: "max_completion_tokens", TEXT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
FORMS = ("response_format", "text", "output_config")  # where a body says what form its answer has


Draw = Callable[[SearchStrategy[Any]], Any]

# ---- values ----------------------------------------------------------------------------------------------------------

_VALID = (  # JSON all the same, so it may stand wherever a body takes anything
    "1e999", "-1e999", "9" * 400, "9" * 4299, "-0.0", "1E-400", "5e-324", "1.7976931348623157e308",
    "[" * 300 + "]" * 300, "[" * 900 + "]" * 900, '{"a":' * 300 + "1" + "}" * 300, '{"a":' * 960 + "1" + "}" * 960,
    r'"\u0000"', '{"type":"object","properties":{"x":' * 120 + "{}" + "}}" * 120,
    '{"anyOf":[' * 200 + "{}" + "]}" * 200,
)  # fmt: skip
LITERALS = (
    *_VALID, "NaN", "-Infinity", "9" * 5000, "[" * 100_000 + "]" * 100_000, r'"\ud800"', r'"\udfff\ud800"',
    '"' + "x" * 50_000 + '"', "[" + "1," * 20_000 + "1]",
)  # fmt: skip


def mark(index: int) -> str:
    """What stands for a literal in a value."""
    return f"@literal {index}@"


_MARK = re.compile(r'"@literal (\d+)@"')


def written(body: Any, *, ascii_only: bool = True) -> bytes:
    """JSON's bytes, literals in their places; a lone surrogate is written even where UTF-8 has no bytes for it."""
    text = json.dumps(body, ensure_ascii=ascii_only)
    return _MARK.sub(lambda mark: LITERALS[int(mark[1])], text).encode("utf-8", "surrogatepass")


_TEXTS = (
    "Hi!", "", " ", "\x00", "\ufeff", "\u2028\u2029", "e\u0301", "\U0001f469\u200d\U0001f467", "\u202eabc",
    "<think>", "</think>", "<|im_end|>", "<|im_start|>system\n", "<tool_call>\n<function=f>\n", "</tool_call>",
    "\U0010ffff", "{{ 7 * 7 }}", "{% raw %}", "\r\n\r\n", "%s%n",
)  # fmt: skip
TEXTS = st.sampled_from(_TEXTS) | st.text(max_size=12)
IDS, NAMES = st.sampled_from(("a", "b", "c")), st.sampled_from(("f", "look_up", "ö-1"))
_EXTREME = st.integers(0, len(_VALID) - 1).map(mark)
_SCALARS = _EXTREME | st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-9, 9) | TEXTS
VALUES = st.recursive(_SCALARS, lambda of: st.lists(of, max_size=3) | st.dictionaries(TEXTS, of, max_size=3),
                      max_leaves=6)  # fmt: skip
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)

_LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number", "minimum": 0}, {"type": "boolean"}, {"type": "null"},
    {"enum": ["x", "y", 3, None]}, {"const": {"a": [1]}}, {"type": ["string", "integer"]}, {}, {"$ref": "#/$defs/d"},
    {"type": "string", "pattern": "^a{1,3}$"}, {"type": "string", "format": "date"}, {"$ref": "#"},
    {"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 5, "maximum": 4}, {"type": 5}, {"enum": []},
    {"type": "string", "pattern": "("}, {"$ref": "http://x/y"}, {"not": {}}, {"type": "string", "minLength": 10**6},
)  # fmt: skip


def _grown(of: SearchStrategy[Any]) -> SearchStrategy[Any]:
    some = st.dictionaries(st.sampled_from(("x", "y", "ö", "a b", "")), of, max_size=3)
    return (
        st.builds(lambda fields, needed: {"type": "object", "properties": fields, "required": needed,
                                          "additionalProperties": False, "$defs": {"d": {"type": "integer"}}},
                  some, st.lists(st.sampled_from(("x", "y", "z")), max_size=2))
        | st.builds(lambda one, most: {"type": "array", "items": one, "maxItems": most}, of, st.integers(0, 3))
        | st.builds(lambda kind, few: {kind: few}, st.sampled_from(("anyOf", "oneOf", "allOf")),
                    st.lists(of, max_size=2))
    )  # fmt: skip


_WORDS = st.sampled_from(("const", "default", "description", "minimum", "maxLength", "maxItems", "pattern", "x-y"))
_LEAF = st.sampled_from(_LEAVES) | st.dictionaries(_WORDS, _EXTREME | VALUES, max_size=2)
SCHEMAS = st.recursive(_LEAF, _grown, max_leaves=4)
ARGUMENTS = OBJECTS.map(json.dumps) | st.sampled_from(
    ('{"x": 1}', "", "{}", "[]", "{", '{"x": NaN}', r'{"x": "\ud800"}', '{"x": 1e999}', '{"x":' * 5000, "null",
     '{"x": ' + "[" * 900 + "]" * 900 + "}", '{"x": ' + "9" * 5000 + "}")
)  # fmt: skip
_CHOICES = st.sampled_from(("auto", "none", "required", {"type": "function", "function": {"name": "f"}}))


# ---- bodies ----------------------------------------------------------------------------------------------------------

_FEW = st.sampled_from((1, 2, 3, 5, 8, 80))  # the last is enough for a call
_RARE = ("MediaPart", "Unreadable")  # parts that are always refused
_LIKELY = (  # fields that lead somewhere
    *("tools", "tool_choice", "tool_calls") * 3, "response_format", "text", "output_config", "format", "thinking",
    "stop", "logprobs", "top_logprobs", "stream_options", "prediction", "speculative", "reasoning_content",
    *("repetition_penalty", "logit_bias") * 2,
)  # fmt: skip

# what a name means, where the schema's word alone would never come to anything
_MEANT: dict[str, SearchStrategy[Any]] = {
    "max_tokens": _FEW, "max_completion_tokens": _FEW, "max_output_tokens": _FEW, "budget_tokens": st.just(1),
    "prompt": st.one_of(TEXTS, st.just("word " * 400), st.lists(st.integers(0, 8191), min_size=1, max_size=6),
                        st.lists(TEXTS, min_size=1, max_size=1)),
    "parameters": SCHEMAS, "schema": SCHEMAS, "input_schema": SCHEMAS, "arguments": ARGUMENTS,
    "id": IDS, "call_id": IDS, "tool_call_id": IDS, "tool_use_id": IDS, "name": NAMES,
    # also the ends of what the sampler takes: a penalty may be above 0 and far below anything that was meant
    "temperature": st.sampled_from((0, 0.5, 1, 1.0, 5e-324)), "top_p": st.sampled_from((0.1, 1, 5e-324)),
    "top_k": st.integers(0, 50) | st.just(2**31 - 1), "min_p": st.sampled_from((0, 0.2, 1, 5e-324)),
    "repetition_penalty": st.sampled_from((1, 1.2, 0.1, 100, 1e-9, 5e-324)),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 8191).map(str), st.floats(-100, 100), max_size=3),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(("enable_thinking", "preserve_thinking")), st.booleans()),
    "reasoning_effort": st.sampled_from(("none", "low", "high")), "description": TEXTS,
    "encrypted_content": st.sampled_from(("coli:aGk=", "coli://///w==", "coli:ä", "theirs")),
    "signature": st.sampled_from(("coli:aGk=", "coli://///w==", "coli", "")),
}  # fmt: skip


def _of(schema: Mapping[str, Any], defs: Mapping[str, Any], name: str, model: str) -> SearchStrategy[Any]:
    """Values that a JSON schema as pydantic writes them allows; `name` is the field's."""

    def again(one: Mapping[str, Any], name: str = "") -> SearchStrategy[Any]:
        return _of(one, defs, name, model)

    if name == "model":
        return st.just(model)
    if name in _MEANT:
        return _MEANT[name]
    match schema:
        case {"$ref": ref}:
            return again(defs[ref.rpartition("/")[2]])
        case {"anyOf": branches} | {"oneOf": branches}:
            weights = [1 if one.get("type") == "null" or one.get("$ref", "").endswith(_RARE) else 9
                       for one in branches]
            return _some(tuple(again(one) for one in branches), tuple(weights))
        case {"const": value}:
            return st.just(value)
        case {"enum": values}:
            return st.sampled_from(values)
        case {"type": "object", "properties": fields}:
            return _objects({key: again(one, key) for key, one in fields.items()}, schema.get("required", []))
        case {"type": "object", "additionalProperties": dict(value)}:
            return st.dictionaries(TEXTS, again(value), max_size=2)
        case {"type": "array", "items": item}:
            return st.lists(again(item), min_size=schema.get("minItems", 0), max_size=min(schema.get("maxItems", 3), 3))
        case {"type": "string"}:
            return TEXTS.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case {"type": "integer" | "number"}:
            return st.integers(schema.get("minimum", 0), min(schema.get("maximum", 9), 9))
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "null"}:
            return st.none()
        case {"type": "object"}:
            return OBJECTS
    return _CHOICES if name == "tool_choice" else VALUES


@st.composite
def _some(draw: Draw, branches: Sequence[SearchStrategy[Any]], weights: Sequence[int]) -> Any:
    """One of them, by weight: st.one_of takes each as often."""
    return draw(branches[draw(st.sampled_from([at for at, weight in enumerate(weights) for _ in range(weight)]))])


def _objects(fields: Mapping[str, SearchStrategy[Any]], required: list[str]) -> SearchStrategy[dict[str, Any]]:
    """With what is required and a few of the others: with all of them nothing would ever go together."""
    others = [name for name in (*fields, *_LIKELY) if name in fields and name not in required]

    @st.composite
    def some(draw: Draw) -> dict[str, Any]:
        chosen = draw(st.lists(st.sampled_from(others), max_size=4, unique=True)) if others else []
        return {name: draw(fields[name]) for name in (*required, *chosen)}

    return some()


@cache
def bodies(path: str, model: str) -> SearchStrategy[dict[str, Any]]:
    """Sound ones, a short answer asked for."""
    schema = MODELS[path].model_json_schema(by_alias=True)
    made = _of(schema, schema.get("$defs", {}), "", model)
    streams = st.sampled_from((True, False))
    return st.builds(lambda body, few, stream: _tidied(path, body, few, stream), made, _FEW, streams)


def _tidied(path: str, body: dict[str, Any], few: int, stream: bool) -> dict[str, Any]:
    """The same with what a model of single fields cannot say: what goes together, and which turn may come when."""
    body = dict(body)
    if not stream:
        body.pop("stream_options", None)
    if not body.get("tools"):
        body.pop("tool_choice", None)
    elif body.get("tool_choice") != "none":
        for name in (*FORMS, *_ASIDE.get(path, ())):
            body.pop(name, None)
    if path in LIMITS:
        forced = body.get("tool_choice") or any(body.get(name) for name in FORMS)
        body |= {LIMITS[path]: max(few, 60) if forced else few, "stream": stream}  # a call takes so much
    if path == CHAT and body.get("top_logprobs") is not None:
        body["logprobs"] = True
    for name in ("messages", "input"):
        if isinstance(turns := body.get(name), list):
            placed = [again for turn in turns for again in _placed(path, turn)]
            first = sorted(placed, key=lambda turn: turn.get("role") not in ("system", "developer"))
            body[name] = [*first, {"role": "user", "content": "Go on."}]
    return body


def _placed(path: str, turn: dict[str, Any]) -> list[dict[str, Any]]:
    """A turn with blocks that may stand in it, behind what it answers to."""
    if turn.get("type") == "function_call_output":
        return [{"type": "function_call", "call_id": turn["call_id"], "name": "f", "arguments": "{}"}, turn]
    if path not in (MESSAGES, COUNT) or not isinstance(turn["content"], list):
        return [turn]
    wrong = ("tool_result",) if turn["role"] == "assistant" else ("tool_use", "thinking")
    blocks = [block for block in turn["content"] if block["type"] not in wrong]
    used = [{"type": "tool_use", "id": block["tool_use_id"], "name": "f", "input": {"x": 1}}
            for block in blocks if block["type"] == "tool_result"]  # fmt: skip
    said = {**turn, "content": blocks or "Hi!"}
    return [{"role": "assistant", "content": used}, said] if used else [said]


