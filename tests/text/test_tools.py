"""Calls read back from both forms: what a template renders of them, values by their schema, and what is no call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.chat import ChatTemplate
from coli.models.find import NANO
from coli.tokenizer import Tokenizer
from coli.tools import begins, call_style, coerce, complete, functions, may_become, parse, types

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "deep": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/where"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"where": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "edit", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "list_all"}},
]
SCHEMAS = functions(TOOLS)

# how the two families of templates show a call; values that are neither text nor a container go through `string`
XML = """{%- for call in messages[0].tool_calls %}{{ '<tool_call>\n<function=' + call.name + '>\n' }}
{%- for key, value in call.arguments.items() %}{{ '<parameter=' + key + '>\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
{{- '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}"""
HERMES = """{%- for call in messages[0].tool_calls -%}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{%- endfor %}"""


def read(body: str, schemas: Any = SCHEMAS) -> tuple[str, Any] | None:
    call = parse(body, schemas)
    return call and (call.name, json.loads(call.arguments))


def renderer(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    chat = ChatTemplate.load(folder, Tokenizer.load(NANO))
    assert chat is not None
    return chat


# text that holds no closing tag at a line's end, which nobody could read back
hard = ["5", "true", "null", '{"a": 1}', "", "\n", " \n x\n", "a </parameter> b", "x\n</tool_call>\ny", "</function>"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(hard)
objects = st.dictionaries(texts, st.integers() | texts | st.lists(st.booleans(), max_size=2), max_size=3)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "path": texts, "count": st.integers(), "deep": st.booleans(), "where": objects,
        "ratio": st.floats(allow_nan=False, allow_infinity=False), "tags": st.lists(texts, max_size=3),
        "note": st.none() | st.sampled_from(["", "none", "see below"]), "unknown": texts,
    },
)  # fmt: skip


@pytest.mark.parametrize("source", [XML, HERMES], ids=["xml", "hermes"])
def test_a_rendered_call_is_read_back(tmp_path: Path, source: str) -> None:
    chat = renderer(tmp_path, source)

    @settings(deadline=None)
    @given(arguments)
    def check(given: dict[str, Any]) -> None:
        text = chat.render([{"role": "assistant", "tool_calls": [{"name": "edit", "arguments": given}]}])
        body = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        assert body != text and begins(body.lstrip()) and complete(body)
        assert read(body) == ("edit", given)

    check()
    assert call_style(chat.source) == ("xml" if source == XML else "json")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": ["integer", "number"]}, "5.0", 5.0),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "12345678901234567890123", 12345678901234567890123),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "-1e999", "-1e999"),
        ({}, "[1e999]", "[1e999]"),
        ({"type": "number"}, "Infinity", "Infinity"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "null"}, "None", None),
        ({"type": "array"}, '["a\nb"]', ["a\nb"]),
        ({"type": "object"}, "[]", "[]"),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "05", "05"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"allOf": [{"type": "integer"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "True", True),
        ({"$ref": "#/$defs/many"}, "[1]", [1]),
        ({"$ref": "#/$defs/a~1b"}, "[1]", "[1]"),
        ({"$ref": "#/$defs/circle"}, "[1]", [1]),
        ({"$ref": "#/nowhere"}, "[1]", [1]),
        ({}, "5", 5),
        ({}, "plain", "plain"),
        (True, "5", 5),
    ],
)
def test_a_value_is_what_its_schema_lets_it_be(schema: Any, text: str, value: Any) -> None:
    circle = {"$ref": "#/$defs/circle"}
    root = {"$defs": {"many": {"type": "array"}, "a/b": {"type": "string"}, "circle": circle}}
    found = coerce(text, schema, root)
    assert found == value and type(found) is type(value)


def test_types_of_branches_are_joined() -> None:
    schema = {"oneOf": [{"enum": [1, None, "a"]}, {"allOf": [{"type": ["array", "object"]}]}]}
    assert types(schema, {}) == {"integer", "null", "string", "array", "object"}


def test_parameters_nobody_described() -> None:
    body = "<function=f>\n<parameter=x>\n5\n</parameter>\n</function>"
    assert read(body, {"f": {}}) == ("f", {"x": "5"})
    assert read(body, {"f": {"additionalProperties": {"type": "integer"}}}) == ("f", {"x": 5})


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ("\n<function=list_all>\n</function>\n", ("list_all", {})),
        ("<function=list_all></function>", ("list_all", {})),
        ("<function=edit><parameter=count>5</parameter></function>", ("edit", {"count": 5})),
        ("<function=edit>\n<parameter=path>\n\n a\n\n</parameter>\n</function>", ("edit", {"path": "\n a\n"})),
        ('{"name": "edit", "arguments": {"count": 5}}', ("edit", {"count": 5})),
        ('\n{"name": "edit", "arguments": "{\\"count\\": 5}"}\n', ("edit", {"count": 5})),
        ('{"name": "list_all"}', ("list_all", {})),
        ("<function=other>\n</function>", None),
        ('{"name": "other", "arguments": {}}', None),
        ('{"name": "edit", "arguments": [1]}', None),
        ('{"name": "edit", "arguments": "{"}', None),
        ('{"name": ["edit"], "arguments": {}}', None),
        ('{"name": "edit", "arguments": {}} and so on}', None),
        ('{"name": "edit", "arguments": {"ratio": NaN}}', None),
        ("<function=edit>\n<parameter=path>\na\n</function>", None),
        ("<function=edit>\n<parameter=path\na\n</parameter>\n</function>", None),
        ("<function=edit>\nand some words\n</function>", None),
        ("<function=edit>\n<parameter=path>\na\n</parameter>\nwords\n</function>", None),
        ("<function=>\n</function>", None),
    ],
)
def test_what_is_a_call(body: str, call: tuple[str, Any] | None) -> None:
    assert read(body) == call


def test_a_name_with_space_around_it_is_the_tools_or_the_models() -> None:
    schemas = {"f": {"properties": {" a": {"type": "integer"}, "b": {"type": "integer"}}}}
    body = "<function=f>" + "".join(f"<parameter={key}>\n5\n</parameter>\n" for key in (" a", " b ", "\u2028"))
    assert read(body + "</function>", schemas) == ("f", {" a": 5, "b": 5, "\u2028": "5"})


def test_every_call_has_its_own_id_and_keeps_its_letters() -> None:
    one, two = (parse("<function=edit><parameter=path>中 é</parameter></function>", SCHEMAS) for _ in range(2))
    assert one and two and one.id != two.id and one.id.startswith("call_")
    assert one.arguments == two.arguments == '{"path": "中 é"}'


def test_half_a_surrogate_stays_spelled() -> None:
    call = parse('{"name": "edit", "arguments": {"path": "\\ud83d \\ud83e\\udd8a"}}', SCHEMAS)
    assert call and call.arguments.encode() == '{"path": "\\ud83d 🦊"}'.encode()


@pytest.mark.parametrize("depth", [100, 900, 100_000])
def test_values_nested_too_deeply_to_be_read_or_written(depth: int) -> None:
    value = "[" * depth + "]" * depth
    xml = read(f"<function=edit>\n<parameter=where>\n{value}\n</parameter>\n</function>", {"edit": {}})
    assert xml == ("edit", {"where": value})
    inner = parse(f'{{"name": "edit", "arguments": {{"tags": {value}}}}}', SCHEMAS)
    assert inner is None or inner.arguments == f'{{"tags": {value}}}'
    tags = parse(f"<function=edit>\n<parameter=tags>\n{value}\n</parameter>\n</function>", SCHEMAS)
    assert tags is None or json.dumps(value) in tags.arguments or value in tags.arguments


def test_a_form_is_known_by_its_beginning() -> None:
    assert all(may_become("<function="[:size]) and not begins("<function="[:size]) for size in range(10))
    assert begins("<function=") and begins("{") and not may_become("<function=") and not may_become("{")
    assert not begins("<b") and not may_become("<b")
    assert not complete('{"a": "') and not complete("<function=f>}") and not complete("{</function>")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5},
        {"type": [{}]},
        {"anyOf": 5},
        {"allOf": [5, None]},
        {"enum": {}},
        {"$ref": 5},
        {"$ref": "#/$defs/x"},
        5,
    ],
)
def test_what_is_no_schema_says_nothing(schema: Any) -> None:
    assert types(schema, {"$defs": 7}) == set() and coerce("[1]", schema, {"$defs": 7}) == [1]


def test_references_in_circles_are_read_once() -> None:
    wide = {"anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(30)] + [{"type": "null"}]}
    assert types(wide, {"$defs": {str(i): wide for i in range(30)}}) == {"null"}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["string", "#/x", "#"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["x", "type", "properties", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "additionalProperties"]
    ), inner, max_size=4), max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(json_values, st.sampled_from(["5", "null", "1e999", "text", '{"x": [true]}']))
def test_whatever_a_tool_says_of_its_parameters_a_call_is_read(parameters: Any, value: str) -> None:
    schemas = functions([{"name": "f", "parameters": parameters}])
    for body in (f"<function=f><parameter=x>{value}</parameter></function>", '{"name": "f", "arguments": {"x": 5}}'):
        call = read(body, schemas)
        assert call is not None and call[0] == "f" and "x" in call[1]


def test_a_tool_without_usable_parameters_takes_text() -> None:
    for tool in ({"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": {"properties": 5}}):
        assert read("<function=f><parameter=x>5</parameter></function>", functions([tool])) == ("f", {"x": "5"})
