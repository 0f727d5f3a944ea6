"""Tool calls as models write them, read back into names and JSON arguments.

Idea: between `<tool_call>` and `</tool_call>` stands one of two forms, and the first character says which:

  Qwen3-Coder and Qwen3.6/3.8      <function=NAME> <parameter=KEY>\\nVALUE\\n</parameter> ... </function>
  Hermes (older Qwen, many others)  {"name": NAME, "arguments": {...}}

The values of the first are raw text, so the tool's own JSON schema says what each is: `coerce` reads `5` as a number
where a number may stand and as text where only text may. A value that fits no type it may have stays text: the client
checks arguments anyway, and sees what the model wrote. One newline on either side of a value is the form's.

A value may hold `</parameter>` or `</tool_call>` itself: a parameter ends where another or the function's end follows,
a call where its own form is complete (`complete`). A call is read whole or not at all, and a call of a tool that was
not given is none: `parse` gives None, and the caller keeps the text.

Invariant: what a template renders of a call is read back as that call (tests/text/test_tools.py).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from coli import finite_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Style = Literal["xml", "json"]

_FUNCTION_TAG = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON may spell one alone, UTF-8 cannot
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # how Jinja's `string` filter shows them to the model
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ToolCall(NamedTuple):
    """One call. `arguments` is the text of a JSON object, as OpenAI's API carries it."""

    id: str
    name: str
    arguments: str


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> JSON schema of the parameters. A tool is `{"type": "function", "function": {...}}` or the inner part."""
    inner = [tool.get("function", tool) for tool in tools]
    return {one["name"]: one["parameters"] if isinstance(one.get("parameters"), Mapping) else {} for one in inner}


def call_style(template: str) -> Style:
    """The form a template asks for, read from its source: in what it renders, users and tools may spell either."""
    return "xml" if _FUNCTION_TAG in template else "json"


# ---- reading a call --------------------------------------------------------------------------------------------------


def begins(body: str) -> bool:
    """Whether text after `<tool_call>`, its leading space removed, is one of the two forms."""
    return body.startswith(("{", _FUNCTION_TAG))


def may_become(body: str) -> bool:
    """Whether it is not yet one, but may become one."""
    return body != _FUNCTION_TAG and _FUNCTION_TAG.startswith(body)


def complete(body: str) -> bool:
    """Whether a `</tool_call>` after `body` ends the call; if not, it belongs to a value."""
    body = body.strip()
    return body.endswith("}" if body.startswith("{") else "</function>")


def parse(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> ToolCall | None:
    """The call between the tags; None when it is malformed or of none of the tools (`functions`)."""
    found = _parse_json(body) if body.lstrip().startswith("{") else _parse_xml(body, schemas)
    if found is None or found[0] not in schemas:
        return None
    name, arguments = found
    try:
        text = json.dumps(arguments, ensure_ascii=False)
    except RecursionError:  # nested deeper than can be written
        return None
    return ToolCall(new_id(), name, _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text))


def _parse_json(body: str) -> tuple[str, dict[str, Any]] | None:
    call = _load(body)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # some models quote the object once more
        arguments = _load(arguments)
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _parse_xml(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return None
    name, rest = function[1].strip(), function[2]
    properties = schemas.get(name, {}).get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    arguments, at = {}, 0
    while at < len(rest):
        parameter = _PARAMETER.match(rest, at)
        if parameter is None:
            return None
        key, at = parameter[1], parameter.end()
        if key not in known:  # space around a name is the model's, unless the tool named it so
            key = key.strip() or key
        text = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = coerce(text, *_schema_of(key, schemas.get(name, {})))
    return name, arguments


def _load(text: str) -> Any:
    """JSON, with raw newlines in strings allowed; `_BROKEN` when it is none. NaN and what is infinite here are none."""
    try:
        return finite_json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _BROKEN


_BROKEN = object()


# ---- values by their schema ------------------------------------------------------------------------------------------


def coerce(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A raw value as what `schema` lets it be, text when it fits nothing else. `root` holds what a $ref names."""
    kinds = types(schema, root)
    if kinds == {"string"}:
        return text
    value = _load(_PYTHON.get(text.strip(), text))
    if value is _BROKEN:
        return text
    values = listed(schema, root)
    if text in values and (text in _PYTHON or not any(_same(value, one) for one in values)):
        return text  # "5" of ["5", true, 6]; of ["5", 5] it is either
    if isinstance(value, float) and value.is_integer() and "integer" in kinds and "number" not in kinds:
        value = int(value)  # 5.0 is an integer to JSON Schema
    name = "null" if value is None else _NAMES[type(value)]
    return value if not kinds or name in kinds or (name == "integer" and "number" in kinds) else text


def types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """JSON types a schema allows, by its type, enum, const and branches; an empty set when it does not say.

    Every part is read once, as references may go in circles, and what is no schema says nothing: nobody checked it."""
    found: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        named = [one["type"]] if isinstance(one.get("type"), str) else _list(one, "type")
        if named:
            found.update(name for name in named if isinstance(name, str))
            continue
        values = [one["const"]] if "const" in one else _list(one, "enum")
        found.update("null" if value is None else _NAMES[type(value)] for value in values)
        waiting += branches(one, root)
    return found


def listed(schema: Any, root: Mapping[str, Any]) -> list[Any]:
    """What the const and enum of a schema and of its branches name, each part read once, as in `types`."""
    found: list[Any] = []
    waiting, seen = [schema], set()
    while waiting:
        one = waiting.pop(0)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        found += [one["const"]] if "const" in one else _list(one, "enum")
        waiting += branches(one, root)
    return found


def branches(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any]:
    """The schemas that one is made of."""
    parts = [*_list(schema, "anyOf"), *_list(schema, "oneOf"), *_list(schema, "allOf")]
    return [*parts, _resolve(schema["$ref"], root)] if "$ref" in schema else parts


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _resolve(reference: Any, root: Any) -> Any:
    """What a `#/path` of the same schema names; None when it names nothing there."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in filter(None, reference[1:].split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _schema_of(key: str, root: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The schema of one parameter, text when nothing is said of it; and the whole, for its references."""
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key], root
    others = root.get("additionalProperties")
    return others if isinstance(others, Mapping) else {"type": "string"}, root
