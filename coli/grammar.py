"""Answers held to a grammar: which tokens may come next, by llguidance (the extra `coli[grammar]`).

Idea: the session picks tokens one after another, also out of a verify, so a constraint needs two words: `mask()`, what
may come now, and `accept(token)`, what came. Drafts are not its business: a draft the grammar refuses is never picked,
as its row is masked like any other, and the ids are those of plain decoding. Whoever wants to save such rows asks
`admits` beforehand.

llguidance knows grammars and the bytes of the tokens; the rest is here:
  stop tokens   allowed exactly where the grammar may end. They are the request's, not the tokenizer's
  vocabulary    the logits may have more rows than the tokenizer has tokens: those are never allowed
  reasoning     an open one is free until </think> has been written, by whichever tokens, as the router reads text
                (coli/answer.py). A token that writes its last character and more is refused: the grammar begins with a
                token. So are stop tokens: an answer that ends before it begins would not be one
  tool calls    the checkpoint's form of them (coli/tools.py). Text values may hold anything but the closing tags, for
                they are written raw; other values are JSON of their schema. Properties come in the schema's order.
                Of what schemas say of raw text, const, enum and short lengths are obeyed, pattern and format are not

A `multipleOf` becomes an automaton with a state for every remainder, and two that meet one for every remainder of
their least common multiple: what would not fit in memory is refused before llguidance begins (`_check_multiples`).

White space in JSON is a blank, or a newline and its indentation: a model that likes blanks must not go on for ever.

Invariants: what ends by itself parses and validates, drafts on and off give the same ids, and `admits` agrees with
mask and accept token by token (tests/text/test_grammar.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from math import lcm
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from coli.answer import END_THINK
from coli.chat import Reasoning
from coli.errors import UsageError
from coli.tokenizer import Tokenizer
from coli.tools import CLOSE, OPEN, Style, branches, coerce, functions, types

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.bool_]
_END = END_THINK.encode()
MOST_REMAINDERS = 50_000  # compiled in 0.2 s with 30 MB; ten times as many take 4 s
_WHITESPACE = r"(\n[ \t]{0,32}| )"
_END_VALUE = "\n</parameter>\n"
# llguidance's Lark: text without the tags that would end it, and that text up to the parameter's end
_TEXT = r"""
FREE: /(?s:.*)/ & ~/(?s:.*)(<\/parameter>|<\/tool_call>)(?s:.*)/
TEXT: FREE "\n</parameter>\n"
"""
_SHORT = 256  # characters: longer bounds are passed over, llguidance gives up on some thousands


class MissingExtra(UsageError):
    """llguidance is not installed."""


class _Vocabulary:
    """A tokenizer as llguidance wants it: made once for each. It does not hold the tokenizer, whose entry it is."""

    def __init__(self, tokenizer: Tokenizer, some_stop: int) -> None:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingExtra("a grammar needs llguidance", hint="pip install 'coli[grammar]'") from error
        self.size = tokenizer.vocab_size
        self.library: LLTokenizer = LLTokenizer(tokenizer.to_json(), n_vocab=self.size, eos_token=some_stop)
        self.ends = self.library.eos_tokens

    @cached_property
    def crossing(self) -> tuple[list[int], ...]:
        """[k]: the tokens that write the end of </think>, whose first k characters are there, and go on after it."""
        found: tuple[list[int], ...] = tuple([] for _ in _END)
        for token in range(self.size):
            spelled = self.library.decode_bytes([token])
            if b">" in spelled[:-1]:
                for k, tokens in enumerate(found):
                    _, tag, rest = (_END[:k] + spelled).partition(_END)
                    if tag and rest:
                        tokens.append(token)
        return found


_known: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_lock = Lock()


def _vocabulary_of(tokenizer: Tokenizer, some_stop: int) -> _Vocabulary:
    with _lock:
        if tokenizer not in _known:
            _known[tokenizer] = _Vocabulary(tokenizer, some_stop)
        return _known[tokenizer]


class Constraint:
    """The grammar of one answer and where it stands. One answer at a time; `reset` for another."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop_ids: Iterable[int], grammar: str, free: bool) -> None:
        """`free`: the answer begins inside reasoning. See `constraint_for`."""
        self._tokenizer, self._vocab, self._free = tokenizer, vocab, free
        self._rows = min(vocab, tokenizer.vocab_size)
        self._stops = sorted(token for token in set(stop_ids) if token < self._rows)
        if not self._stops:
            raise UsageError("an answer held to a grammar needs a token that ends it", "stop_ids")
        self._vocabulary = _vocabulary_of(tokenizer, self._stops[0])
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        self._matcher = LLMatcher(self._vocabulary.library, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise UsageError(f"this grammar cannot be followed: {_words(self._matcher)}", "schema")
        self.reset()

    def reset(self) -> None:
        """Back to the beginning."""
        self._matcher.reset()
        self._written = b"" if self._free else None  # the end of the reasoning; None once it is over
        self._mask: Mask | None = None

    def mask(self) -> Mask:
        """Which tokens may come next [vocab], read-only. Raises UsageError where the grammar becomes too complex."""
        if self._mask is None:
            self._mask = self._by_grammar() if self._written is None else self._in_reasoning(self._written)
            self._mask.flags.writeable = False
        return self._mask

    def accept(self, token: int) -> None:
        """The token that was picked. ValueError for one that the mask forbids."""
        if not 0 <= token < self._vocab or not self.mask()[token]:
            raise ValueError(f"token {token} is not what the grammar allows")
        if self._written is not None:
            self._written = self._after(self._written, token)
        elif token not in self._stops:
            self._matcher.consume_token(token)
        else:
            return  # the end: nothing but it may follow
        self._mask = None

    def admits(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first, it would accept in turn; it counts no further than a stop token.
        Changes nothing, and costs far less than a mask for each."""
        written, at = self._written, 0
        foreign = next((i for i, token in enumerate(tokens) if self._is_foreign(token)), len(tokens))
        while written is not None and at < foreign:
            if tokens[at] in self._refused(written):
                return at
            written, at = self._after(written, tokens[at]), at + 1
        return at + self._matcher.validate_tokens(list(tokens[at:foreign]))

    def _is_foreign(self, token: int) -> bool:
        return token in self._stops or not 0 <= token < self._rows

    def _by_grammar(self) -> Mask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"the answer's grammar became too complex: {_words(self._matcher)}")
        allowed = np.unpackbits(bits, count=self._vocabulary.size, bitorder="little").view(np.bool_)
        allowed[self._vocabulary.ends] = False  # llguidance's word for "may end": one of somebody's stop tokens
        allowed[self._stops] = self._matcher.is_accepting()
        return self._rows_of(allowed)

    def _in_reasoning(self, written: bytes) -> Mask:
        allowed = np.ones(self._vocabulary.size, np.bool_)
        allowed[self._refused(written)] = False
        return self._rows_of(allowed)

    def _rows_of(self, allowed: Mask) -> Mask:
        """The tokenizer's tokens as the rows of the logits."""
        mask = np.zeros(self._vocab, np.bool_)
        mask[: self._rows] = allowed[: self._rows]
        return mask

    def _refused(self, written: bytes) -> list[int]:
        """Tokens that must not come in reasoning whose last bytes are these."""
        there = next(k for k in range(len(_END) - 1, -1, -1) if written.endswith(_END[:k]))
        return self._stops + self._vocabulary.crossing[there]

    def _after(self, written: bytes, token: int) -> bytes | None:
        """The end of the reasoning with one token more; None when that ended it."""
        written += self._tokenizer.text_bytes(token)
        return None if _END in written else written[1 - len(_END) :]


def _words(matcher: LLMatcher) -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()


def constraint_for(
    tokenizer: Tokenizer, vocab: int, stop_ids: Iterable[int], *, schema: Mapping[str, Any] | None = None,
    json_object: bool = False, tools: Sequence[Mapping[str, Any]] = (), name: str | None = None, style: Style = "xml",
    parallel: bool = True, strict: bool = True, reasoning: Reasoning = "none",
) -> Constraint:  # fmt: skip
    """What holds an answer to a JSON schema, to any JSON object, or to calls of `tools` (of the one `name`, if given).

    `vocab`: rows of the logits; `stop_ids`: those of the request. `style`: tools.call_style of the template;
    `parallel`: more than one call may come; `strict` False: keywords llguidance does not know are passed over (a tool
    says it for itself: its own `strict`, False by default, as in OpenAI's API). With reasoning "open" the grammar
    begins after </think>, and the answer cannot end before. Slow the first time for a tokenizer: call it off the event
    loop. Raises MissingExtra without llguidance, UsageError for a schema it refuses (its own words) or an unknown name.
    """
    if (schema is not None) + json_object + bool(tools) != 1:
        raise ValueError("one of schema, json_object and tools")
    try:
        if tools:
            main, values = _calls(tools, name, style, parallel, tokenizer)
        else:
            main, values = "@answer", {"answer": _json({"type": "object"} if schema is None else schema, strict)}
        lead = "LEAD? " if reasoning == "open" else ""  # the newlines a template writes after </think>
        lark = f"start: {lead}{main}\nLEAD: /\\n{{1,2}}/\n{_TEXT}{_of_lengths(main)}"
        grammars = [{"name": "main", "lark_grammar": lark}, *({"name": key, **value} for key, value in values.items())]
        grammar = json.dumps({"grammars": grammars})
    except RecursionError:
        raise UsageError("this grammar cannot be followed: the schema is nested too deeply", "schema") from None
    _check_multiples(values)
    return Constraint(tokenizer, vocab, stop_ids, grammar, reasoning == "open")


# ---- grammars as llguidance reads them -------------------------------------------------------------------------------

_Values = dict[str, dict[str, Any]]  # name in the Lark text -> grammar


def _json(schema: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE, "lenient": not strict}}}


def _check_multiples(schemas: Any) -> None:
    """Raises UsageError where the automaton of all the `multipleOf` in there would be too large. Whatever has this name
    and is a number counts, for a schema can refer to any part of itself."""
    common, digits = 1, 0  # the least common multiple so far is common / 10^digits
    waiting = [schemas]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, Mapping):
            waiting.extend(one.values())
            value = one.get("multipleOf")
            if isinstance(value, int | float) and value > 0:
                common, digits = _common_multiple(common, digits, value)


def _common_multiple(common: int, digits: int, value: float) -> tuple[int, int]:
    """With one more. Raises UsageError where it is too large."""
    number = Decimal(str(value))
    behind = max(0, -int(number.as_tuple().exponent))
    most = max(digits, behind)
    together = lcm(common * 10 ** (most - digits), int(number.scaleb(behind)) * 10 ** (most - behind))
    while most and together % 10 == 0:
        together, most = together // 10, most - 1
    if together > MOST_REMAINDERS:
        what = f"'multipleOf' of {str(value)[:30]} asks for too many remainders"
        raise UsageError(f"this grammar cannot be followed: {what}, alone or beside the others", "schema",
                         f"their common multiple, without its point, may be {MOST_REMAINDERS} at most")  # fmt: skip
    return together, most


def _calls(
    tools: Sequence[Mapping[str, Any]], name: str | None, style: Style, parallel: bool, tokenizer: Tokenizer
) -> tuple[str, _Values]:
    """Lark for one call or more, and the grammars it names."""
    schemas = functions(tools)
    strict = {one["name"]: one.get("strict") is True for one in (tool.get("function", tool) for tool in tools)}
    if name is not None and name not in schemas:
        raise UsageError(f"no tool is named {name!r}, there are {', '.join(schemas)}", "tool_choice")
    values: _Values = {}
    write = _json_call if style == "json" else _xml_call
    bodies = [write(one, schemas[one], f"v{i}", strict[one], values)
              for i, one in enumerate([name] if name else schemas)]  # fmt: skip
    before, after = (_tag(tag, tokenizer) for tag in (OPEN, CLOSE))
    call = f'{before} "\\n" ({" | ".join(bodies)}) {after}'
    return call + (f' ("\\n" {call})*' if parallel else ""), values


def _json_call(name: str, schema: Mapping[str, Any], label: str, strict: bool, values: _Values) -> str:
    values[label] = _json({**schema, "type": "object"}, strict)
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return f'{_quoted(head)} @{label} "}}\\n"'


def _xml_call(name: str, schema: Mapping[str, Any], label: str, strict: bool, values: _Values) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UsageError(f"the parameters of {name!r} are no JSON schema: properties is an object, required a list",
                         "tools")  # fmt: skip
    parts = [_quoted(f"<function={name}>\n")]
    for i, (key, one) in enumerate(properties.items()):
        if not key or key != key.strip() or ">" in key or "\n" in key:
            raise UsageError(f"the form of this model's calls cannot write a parameter named {key!r}", "tools")
        value = _xml_value(key, one, schema, f"{label}p{i}", strict, values)
        part = _quoted(f"<parameter={key}>\n") + " " + value
        parts.append(part if key in required else f"({part})?")
    return " ".join([*parts, _quoted("</function>\n")])


def _xml_value(key: str, schema: Any, root: Mapping[str, Any], label: str, strict: bool, values: _Values) -> str:
    """A value and the end of its parameter: raw text where text may stand, otherwise JSON.

    Values that are listed are written as they are listed. Branches are written each as its own; free text among them
    is all of them, as it may spell the others."""
    kinds = types(schema, root)
    if not kinds:
        return "TEXT"
    if "string" not in kinds:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        values[label] = _json({**shared, **schema}, strict)
        return f"@{label} {_quoted(_END_VALUE)}"
    if "const" in schema or isinstance(schema.get("enum"), list):
        return _one_of(key, [schema["const"]] if "const" in schema else schema["enum"], schema, root)
    parts = branches(schema, root)
    if not parts or len(parts) > 1 and ("allOf" in schema or "$ref" in schema):
        return _text(schema)
    if label.count("b") > 3:  # references in circles
        return "TEXT"
    ways = [_xml_value(key, part, root, f"{label}b{i}", strict, values) for i, part in enumerate(parts)]
    return next((way for way in ways if way == "TEXT"), f"({' | '.join(ways)})")


def _one_of(key: str, listed: list[Any], schema: Any, root: Mapping[str, Any]) -> str:
    """One of the listed values that its type lets through, text raw and others in JSON."""
    texts = []
    for one in listed:
        text = one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
        if isinstance(one, str) or not isinstance(coerce(text, schema, root), str):
            texts.append(text)
    if any("</parameter>" in text or CLOSE in text for text in texts):
        raise UsageError(f"the form of this model's calls cannot write a value listed for {key!r}: it holds a tag that "
                         "ends values", "tools")  # fmt: skip
    if not texts:
        raise UsageError(f"no value listed for {key!r} is of its type", "tools")
    return f"({' | '.join(_quoted(text + _END_VALUE) for text in texts)})"


def _text(schema: Mapping[str, Any]) -> str:
    """The name in the Lark text of free text, of the lengths that the schema tells where they are short."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", _SHORT + 1)
    if any(type(one) is not int or one < 0 for one in (least, most)) or least > _SHORT:
        return "TEXT"
    if least > most:
        raise UsageError(f"no text has {least} characters or more, and {most} at most", "tools")
    upto = most if most <= _SHORT else ""
    return f"TEXT_{least}_{upto}" if least or upto != "" else "TEXT"


def _of_lengths(main: str) -> str:
    """Lark for the texts of certain lengths that `main` names."""
    found = sorted(set(re.findall(r"\bTEXT_(\d+)_(\d*)", main)))
    return "".join(f"TEXT_{least}_{most}: (/(?s:.{{{least},{most}}})/ & FREE) {_quoted(_END_VALUE)}\n"
                   for least, most in found)  # fmt: skip


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    """One of the call's tags: its own token where there is one."""
    token = tokenizer.token_id(tag)
    return _quoted(tag) if token is None else f"<[{token}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
