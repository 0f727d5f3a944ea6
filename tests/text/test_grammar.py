"""Answers held to a grammar: they parse and validate, drafts change nothing, and what may not come never may."""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from coli import grammar
from coli.answer import AnswerRouter
from coli.chat import Reasoning
from coli.engine import Engine
from coli.errors import UsageError
from coli.grammar import Constraint, MissingExtra, constraint_for
from coli.models.find import NANO
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from coli.tokenizer import Tokenizer
from coli.tools import functions, parse

nano = Tokenizer.load(NANO)
VOCAB = 8192 + 40  # more rows than the tokenizer has tokens
STOPS = frozenset({8187, 8189})
END_THINK = nano.token_id("</think>")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "owl"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer", "minimum": 1, "maximum": 20},
        "unit": {"type": "string", "enum": ["day", "week"]},
        "where": {"$ref": "#/$defs/where"},
        "any": {},
    },
    "required": ["count", "unit"],
    "additionalProperties": False,
    "$defs": {"where": {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": False}},
}
TOOLS = [
    {"type": "function", "function": {"name": "plan", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]


def check(value: Any) -> None:
    """SCHEMA, by hand."""
    assert list(value) == ["name", "age", "kind", "tags"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 120 and value["kind"] in ("fox", "owl")
    assert len(value["tags"]) <= 3 and all(type(tag) is bool for tag in value["tags"])


def held(**what: Any) -> Constraint:
    return constraint_for(nano, VOCAB, STOPS, **what)


def random_answer(constraint: Constraint, seed: int, most: int = 400) -> tuple[str, bool]:
    """What a model without any sense says, and whether it ended by itself."""
    rng, ids = np.random.default_rng(seed), []
    while len(ids) < most:
        mask = constraint.mask()
        token = int(np.where(mask, rng.gumbel(size=len(mask)), -np.inf).argmax())
        constraint.accept(token)
        if token in STOPS:
            return nano.decode(ids), True
        ids.append(token)
    return nano.decode(ids), False


def write(constraint: Constraint, text: str) -> None:
    for token in nano.encode(text):
        constraint.accept(token)


def refuses(constraint: Constraint, text: str) -> bool:
    with pytest.raises(ValueError, match="not what the grammar allows"):
        write(constraint, text)
    return True


# ---- what nano says --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(load({"model": str(NANO), "threads": 1, "ctx": 512}, {})[0]) as engine:
        yield engine


@pytest.mark.parametrize("reasoning", ["closed", "open"])
def test_nanos_answer_parses_and_drafts_do_not_change_it(engine: Engine, reasoning: Reasoning) -> None:
    """At temperature 1, with drafts from its own prompt, in which the JSON stands: some are right, some refused."""
    example = '{"name": "Reynard", "age": 7, "kind": "fox", "tags": [true, false]}'
    messages = [{"role": "user", "content": f"Answer in JSON like {example}, or like {example}."}]
    prompt = tuple(engine.chat.prompt_ids(messages, thinking=reasoning == "open"))
    constraint = constraint_for(
        engine.tokenizer, engine.geometry.vocab, engine.stop_ids, schema=SCHEMA, reasoning=reasoning
    )
    drafts, ended, accepted = Speculation(gate=False, mtp=False), 0, 0
    for seed in range(6):
        request = Request(prompt, 300, Sampling(temperature=1.0, seed=seed), constraint=constraint)
        answers = []
        for speculation in (drafts, Speculation.off()):
            constraint.reset()
            session = Session(engine, speculation)
            text = "".join(session.generate(request))
            answers.append((session.report.token_ids, text, session.last_logits.tobytes(), session.seed))
            if speculation is drafts:
                accepted += session.report.completion_tokens - session.report.speculation.forwards
        assert answers[0] == answers[1]
        if session.report.finish_reason == "stop":
            router = AnswerRouter(reasoning)
            deltas = [*router.push(text), *router.flush()]
            check(json.loads("".join(delta.text for delta in deltas if delta.kind == "content")))
            ended += 1
    assert ended == 6 or reasoning == "open" and ended
    assert accepted > 0


# ---- what a model without sense says ---------------------------------------------------------------------------------


def test_json_of_a_schema() -> None:
    constraint = held(schema=SCHEMA)
    for seed in range(30):
        constraint.reset()
        text, ended = random_answer(constraint, seed)
        assert ended
        check(json.loads(text))


def test_any_json_object() -> None:
    constraint, ended = held(json_object=True), 0
    for seed in range(10):
        constraint.reset()
        text, whole = random_answer(constraint, seed)
        assert text.startswith("{")
        ended += whole
        assert not whole or type(json.loads(text)) is dict
    assert ended


@pytest.mark.parametrize("style", ["xml", "json"])
@pytest.mark.parametrize("name", [None, "plan"])
def test_calls_are_read_back_and_fit_their_schema(style: Any, name: str | None) -> None:
    constraint, seen = held(tools=TOOLS, style=style, name=name, parallel=False), set()
    for seed in range(12):
        constraint.reset()
        text, ended = random_answer(constraint, seed)
        router = AnswerRouter("closed", TOOLS)
        deltas = [*router.push(text), *router.flush()]
        if not ended:  # in a text that found no end
            continue
        [(_, _, call)] = deltas
        value = json.loads(call.arguments)
        seen.add(call.name)
        if call.name == "plan":
            assert type(value["count"]) is int and 1 <= value["count"] <= 20 and value["unit"] in ("day", "week")
            assert isinstance(value.get("text", ""), str) and value.get("where", {}) in ({}, {"x": None})
            assert set(value) <= set(PARAMETERS["properties"])
    assert "plan" in seen and (name or "stop" in seen)


def test_more_calls_than_one_only_when_they_may_be() -> None:
    call = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    write(held(tools=TOOLS), f"{call}\n{call}<|im_end|>")
    single = held(tools=TOOLS, parallel=False)
    write(single, call)
    assert set(np.flatnonzero(single.mask())) == STOPS
    assert refuses(held(tools=TOOLS, name="plan"), call)


def test_a_text_value_may_hold_all_but_its_end() -> None:
    head = "<tool_call>\n<function=plan>\n<parameter=text>\n"
    others = "<parameter=count>\n5\n</parameter>\n<parameter=unit>\nday\n</parameter>\n"
    tail = f"\n</parameter>\n{others}</function>\n</tool_call><|im_end|>"
    for value in ("", "\n", "if a < b:\n    </p>", "</param\n", '"ё中👩‍👩‍👧"', "{"):
        write(held(tools=TOOLS), f"{head}{value}{tail}")
    for value in ("</parameter>", "</tool_call>", "<|im_start|>"):
        assert refuses(held(tools=TOOLS), head + value)


LEVEL = {"enum": ["5", 6, True, None, "True", {"x": 1}]}


@pytest.mark.parametrize(("schema", "good", "bad"), [
    ({"const": "a b"}, {"a b": "a b"}, ["a", "a bc", "5"]),
    ({"type": "string", "const": "5"}, {"5": "5"}, ["6"]),
    (LEVEL, {"5": "5", "6": 6, "true": True, "null": None, "True": "True", '{"x": 1}': {"x": 1}}, ["7", "None", "x"]),
    ({"type": ["string", "null"], "enum": ["a", 5, None]}, {"a": "a", "null": None}, ["5"]),
    ({"anyOf": [{"enum": ["a", "10"]}, {"type": "integer", "minimum": 20}]}, {"a": "a", "10": "10", "21": 21}, ["11"]),
    ({"$ref": "#/$defs/kind"}, {"fox": "fox"}, ["cat"]),
    ({"allOf": [{"$ref": "#/$defs/kind"}], "default": "fox"}, {"fox": "fox"}, ["cat"]),
    ({"type": "string", "maxLength": 3}, {"": "", "aé\n": "aé\n"}, ["abcd"]),
    ({"type": "string", "minLength": 2, "maxLength": 9999}, {"ab": "ab", "x" * 600: "x" * 600}, ["a"]),
    ({"anyOf": [{"type": "string"}, {"const": "a"}]}, {"b": "b"}, ["</parameter>"]),
])  # fmt: skip
def test_text_that_its_schema_bounds(schema: dict[str, Any], good: dict[str, Any], bad: list[str]) -> None:
    tool = {"name": "f", "parameters": {"properties": {"v": schema}, "required": ["v"],
                                        "$defs": {"kind": {"enum": ["fox", "owl"]}}}}  # fmt: skip
    constraint, head, tail = held(tools=[tool]), "<function=f>\n<parameter=v>\n", "\n</parameter>\n</function>\n"
    for text, value in good.items():
        constraint.reset()
        write(constraint, f"<tool_call>\n{head}{text}{tail}</tool_call><|im_end|>")
        call = parse(head + text + tail, functions([tool]))
        assert call is not None
        found = json.loads(call.arguments)["v"]
        assert (type(found), found) == (type(value), value)
    for text in bad:
        constraint.reset()
        assert refuses(constraint, f"<tool_call>\n{head}{text}{tail}")


@pytest.mark.parametrize("key", ["", " a", "a ", "\t", "\u2028", "a\nb", "a>b"])
def test_a_parameters_name_that_would_not_come_back_is_refused(key: str) -> None:
    tool = {"name": "f", "parameters": {"properties": {key: {"type": "string"}}}}
    with pytest.raises(UsageError, match=re.escape(f"cannot write a parameter named {key!r}")):
        held(tools=[tool])
    held(tools=[tool], style="json")


def test_a_listed_text_that_would_end_its_value_is_refused() -> None:
    for schema in ({"enum": ["ok", "x\n</parameter>\n<parameter=b>\ny"]}, {"const": "</tool_call>"}):
        tool = {"name": "f", "parameters": {"properties": {"a": schema}}}
        with pytest.raises(UsageError, match="a value listed for 'a': it holds a tag"):
            held(tools=[tool])
        held(tools=[tool], style="json")
    for schema, words in (({"type": "string", "enum": [5]}, "no value listed for 'a'"),
                          ({"type": "string", "minLength": 3, "maxLength": 2}, "no text has 3")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            held(tools=[{"name": "f", "parameters": {"properties": {"a": schema}}}])


def test_references_in_circles_are_text() -> None:
    loop = {"anyOf": [{"const": "a"}, {"$ref": "#/properties/v"}]}
    write(held(tools=[{"name": "f", "parameters": {"properties": {"v": loop}}}]),
          "<tool_call>\n<function=f>\n<parameter=v>\nanything\n</parameter>\n")  # fmt: skip


@pytest.mark.parametrize("style", ["xml", "json"])
def test_the_tags_of_calls_are_tokens_where_the_tokenizer_has_them(style: Any) -> None:
    library = Library.from_str(nano.to_json())
    library.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    qwen = Tokenizer(library, NANO)
    begin, end = (qwen.token_id(tag) for tag in ("<tool_call>", "</tool_call>"))
    constraint = constraint_for(qwen, VOCAB, STOPS, tools=TOOLS, style=style, parallel=False)
    assert list(np.flatnonzero(constraint.mask())) == [begin]
    body = {"xml": "\n<function=stop>\n</function>\n", "json": '\n{"name": "stop", "arguments": {}}\n'}[style]
    ids = qwen.encode(f"<tool_call>{body}</tool_call>")
    for token in ids:
        constraint.accept(token)
    assert ids[0] == begin and ids[-1] == end and set(np.flatnonzero(constraint.mask())) == STOPS
    constraint.reset()
    for token in qwen.encode("<tool_call>\n<function=plan>\n<parameter=text>\na") if style == "xml" else ids[:-1]:
        constraint.accept(token)
    assert constraint.mask()[end] == (style == "json") and not constraint.mask()[begin]


# ---- reasoning, stop tokens, the vocabulary --------------------------------------------------------------------------


def test_open_reasoning_is_free_and_does_not_end_the_answer() -> None:
    constraint = held(schema=SCHEMA, reasoning="open")
    for text in ("Let me think, <b>{", " a </thin", "king </", "think"):
        mask = constraint.mask()
        assert set(np.flatnonzero(~mask[: nano.vocab_size])) >= STOPS and not mask[nano.vocab_size :].any()
        assert mask.sum() > 8000
        write(constraint, text)
    crossing = [i for i in range(nano.vocab_size) if nano.token_bytes(i)[:1] == b">" and len(nano.token_bytes(i)) > 1]
    assert crossing and not constraint.mask()[crossing].any()
    constraint.accept(nano.encode(">")[0])  # spelled out: the tag is a tag as the router reads it
    assert constraint.mask().sum() < 200
    write(constraint, '\n\n{"name": "')
    constraint.reset()
    constraint.accept(END_THINK)
    assert refuses(constraint, "\n\n\n{")


def test_without_open_reasoning_it_begins_at_once() -> None:
    for reasoning in ("closed", "none"):
        assert refuses(held(schema=SCHEMA, reasoning=reasoning), "\n")
        write(held(schema=SCHEMA, reasoning=reasoning), "{")


def test_the_requests_own_stop_tokens_and_no_others() -> None:
    whole = nano.encode('{"a": 1}')
    for stops in ({5, 7}, {8187}):
        constraint = constraint_for(nano, VOCAB, stops | {VOCAB + 5}, json_object=True)
        for token in whole:
            assert not constraint.mask()[sorted(stops)].all() and not constraint.mask()[8188:8190].any()
            constraint.accept(token)
        assert set(np.flatnonzero(constraint.mask())) == stops
        constraint.accept(min(stops))
        assert set(np.flatnonzero(constraint.mask())) == stops
    with pytest.raises(UsageError, match="needs a token that ends it"):
        constraint_for(nano, VOCAB, {VOCAB + 5}, json_object=True)


def test_logits_narrower_than_the_tokenizer() -> None:
    constraint = constraint_for(nano, 5000, {7}, schema=SCHEMA, reasoning="open")
    assert constraint.mask().shape == (5000,) and constraint.mask().sum() == 4999
    write(constraint, "</think")
    assert constraint.mask().shape == (5000,) and constraint.mask().sum() < 4999
    constraint = constraint_for(nano, 5000, {7}, schema=SCHEMA)
    assert constraint.mask().shape == (5000,) and constraint.mask().any()


def test_a_mask_is_the_same_until_a_token_comes_and_cannot_be_written() -> None:
    constraint = held(schema=SCHEMA)
    assert constraint.mask() is constraint.mask() and not constraint.mask().flags.writeable
    before = constraint.mask()
    for token in (-1, VOCAB, 8190):
        with pytest.raises(ValueError):
            constraint.accept(token)
    assert constraint.mask() is before
    write(constraint, "{")
    assert not np.array_equal(constraint.mask(), before)


@pytest.mark.parametrize("reasoning", ["closed", "open"])
def test_admits_agrees_with_mask_and_accept(reasoning: Reasoning) -> None:
    rng = np.random.default_rng(3)
    text = 'Well</think>\n\n{"name": "a", "age": 5, ' if reasoning == "open" else '{"name": "a", "age": 5, '
    constraint, ids = held(schema=SCHEMA, reasoning=reasoning), nano.encode(text)
    for start in range(len(ids)):
        for wrong in range(6):
            drafts = ids[start : start + 6]
            if wrong < len(drafts):
                drafts[wrong] = int(rng.choice([rng.integers(VOCAB), 8189, 8191, 8192]))
            constraint.reset()
            for token in ids[:start]:
                constraint.accept(token)
            before = constraint.mask().copy()
            admitted = constraint.admits(drafts)
            assert np.array_equal(constraint.mask(), before)
            taken = 0
            for token in drafts:
                if token in STOPS or not constraint.mask()[token]:
                    break
                constraint.accept(token)
                taken += 1
            assert admitted == taken
    assert constraint.admits([]) == 0


def test_admits_counts_no_further_than_a_stop_token_that_is_text_too() -> None:
    ids = nano.encode('{"a": "x, y"}')
    assert len(set(ids)) == len(ids) and held(json_object=True).admits(ids) == len(ids)
    assert constraint_for(nano, VOCAB, {ids[4]}, json_object=True).admits(ids) == 4


def test_it_may_be_made_on_one_thread_and_asked_on_another() -> None:
    found: list[str] = []
    constraint = held(schema=SCHEMA)
    thread = threading.Thread(target=lambda: found.append(random_answer(constraint, 0)[0]))
    thread.start()
    thread.join()
    check(json.loads(found[0]))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "objct"}, "Invalid type: objct"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/nope"}, "does not exist"),
        ({"$ref": "http://localhost/x"}, "does not fetch"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "Unimplemented"),
        (nested(200), "recursion limit"),
        (nested(5000), "nested too deeply"),
    ],
)
def test_a_bad_schema_is_refused_in_llguidances_words(schema: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        held(schema=schema)


def test_a_tool_that_is_not_strict_may_use_keywords_nobody_knows() -> None:
    odd = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"name": "f", "parameters": odd}
    for style in ("xml", "json"):
        held(tools=[tool], style=style)
        with pytest.raises(UsageError, match="uniqueItems"):
            held(tools=[tool | {"strict": True}], style=style)
    held(schema=odd, strict=False)


def test_what_cannot_be_asked() -> None:
    with pytest.raises(UsageError, match="no tool is named 'go', there are plan, stop"):
        held(tools=TOOLS, name="go")
    with pytest.raises(UsageError, match="cannot write a parameter named 'a>b'"):
        held(tools=[{"name": "f", "parameters": {"properties": {"a>b": {}}}}])
    for odd in ({"properties": []}, {"properties": {"a": {}}, "required": 5}):
        with pytest.raises(UsageError, match="are no JSON schema"):
            held(tools=[{"name": "f", "parameters": odd}])
    for what in ({}, {"schema": SCHEMA, "json_object": True}, {"schema": SCHEMA, "tools": TOOLS}):
        with pytest.raises(ValueError, match="one of"):
            held(**what)


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"coli\[grammar\]"):
        constraint_for(Tokenizer.load(NANO), VOCAB, STOPS, json_object=True)


def test_a_schema_that_becomes_too_complex_on_the_way_is_the_users_error() -> None:
    constraint = held(schema={"type": "string", "pattern": "^(.*a.{300}b)*$"})
    with pytest.raises(UsageError, match="became too complex: [^<]*$"):
        write(constraint, '"' + "abaab" * 300)


def test_grammars_live_as_long_as_their_tokenizer() -> None:
    """One for each tokenizer, made once, gone with it."""
    tokenizer = Tokenizer.load(NANO)
    one, two = (constraint_for(tokenizer, VOCAB, STOPS, json_object=True) for _ in range(2))
    assert one._vocabulary is two._vocabulary and tokenizer in grammar._known
    gone, held_by = weakref.ref(tokenizer), one._vocabulary
    del tokenizer, one, two
    gc.collect()
    assert gone() is None and held_by not in list(grammar._known.values())


# ---- multiples -------------------------------------------------------------------------------------------------------

TOO_MANY = [
    {"type": "integer", "multipleOf": 99999989},
    {"type": "number", "multipleOf": 0.99999989},
    {"type": "number", "multipleOf": 1e300},
    {"type": "object", "properties": {"a": {"items": [{"multipleOf": 99999989}]}}},
    {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},  # meet in their common multiple
]


@pytest.mark.parametrize("schema", TOO_MANY)
def test_a_multiple_of_too_many_remainders_is_refused(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object",
                                                                           "properties": {"n": schema}}}}]  # fmt: skip
    wishes: list[dict[str, Any]] = [{"schema": schema}, {"tools": tools, "style": "json"}]
    if schema.get("type") in ("integer", "number"):  # others are written as text
        wishes.append({"tools": tools, "style": "xml"})
    for wish in wishes:
        with pytest.raises(UsageError, match="'multipleOf' of .* too many remainders"):
            constraint_for(nano, VOCAB, STOPS, **wish)


def test_usual_multiples_are_followed() -> None:
    properties = {"price": {"type": "number", "multipleOf": 0.01}, "lot": {"type": "integer", "multipleOf": 1000},
                  "half": {"type": "number", "multipleOf": 0.5}, "tiny": {"type": "number", "multipleOf": 1e-9}}
    schema = {"type": "object", "properties": {**properties, "multipleOf": {"type": "null"}}}
    assert constraint_for(nano, VOCAB, STOPS, schema=schema).mask().any()
