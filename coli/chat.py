"""Messages to the prompt a model was trained on: the checkpoint's own chat template, and what a chat needs around it.

Idea: never rebuild a template, render it. Templates are Jinja2 programs written for Hugging Face's renderer, so this is
the same environment: immutable sandbox, trimmed blocks, loop controls, and the helpers they call (`raise_exception`,
`strftime_now`, `tojson` that leaves <, > and & alone, the `{% generation %}` tag, which marks text for training and is
transparent here). The sandbox keeps a template from the machine; it does not bound the time or memory it spends.

The template is the first of: chat_template.jinja, "chat_template" in tokenizer_config.json (a string, or a list of
{name, template} whose "default" is taken), chat_template.json. A GGUF file has it in its metadata. None of them:
`open` gives None and prompts go in raw.

A message's text may spell control tokens and the rendered prompt is encoded with them, as everywhere else.

Invariant: rendering nano's messages gives the prompts of its oracle, character by character
(tests/text/test_chat_template.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coli.errors import ModelError, UsageError
from coli.formats import gguf_text

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from coli.formats.checkpoint import Checkpoint
    from coli.tokenizer import Tokenizer

Message = Mapping[str, Any]
Reasoning = Literal["open", "closed", "none"]

# what a user may ask for -> what Qwen templates know (model_spec.md section 10: other names are the caller's to map)
EFFORTS: Mapping[str, str] = {
    "max": "xhigh",
    "xhigh": "xhigh",
    "high": "xhigh",
    "medium": "medium",
    "low": "low",
    "minimal": "low",
}

# a control token as all our families spell them: <|im_start|>, <|assistant|>, and DeepSeek's with full-width bars
CONTROL = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>")
_QWEN_ENDS = (b"<|im_end|>", b"<|endoftext|>")


class _Refused(Exception):
    """The template called raise_exception."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template as it was read and compiled, the file it came from and the strings (`bos_token`, ...) it may print."""

    file: Path
    tokenizer: Tokenizer
    source: str
    template: Template
    reads: frozenset[str]  # variables the template asks for: "enable_thinking" in reads
    tokens: Mapping[str, str]
    efforts: Mapping[str, str]

    @classmethod
    def open(cls, checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a checkpoint, None when it has none. Raises ModelError for an unreadable or broken one."""
        if not checkpoint.traits.gguf:
            return cls.load(checkpoint.folder, tokenizer)
        metadata, file = checkpoint.metadata, checkpoint.folder
        source = gguf_text.template_of(metadata, file)
        if source is None:
            return None
        return cls._compile(file, source, tokenizer, gguf_text.token_strings(metadata, file))

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The same of a folder."""
        found = _source(Path(folder))
        return found and cls._compile(*found, tokenizer, _token_strings(Path(folder)))

    @classmethod
    def _compile(cls, file: Path, source: str, tokenizer: Tokenizer, tokens: Mapping[str, str]) -> ChatTemplate:
        from jinja2 import TemplateSyntaxError, meta

        environment = _environment()
        try:
            reads = meta.find_undeclared_variables(environment.parse(source))
            template = environment.from_string(source)
        except Exception as error:  # a hostile one also fails in Python's compiler, on top of Jinja's own errors
            line = f" (line {error.lineno})" if isinstance(error, (TemplateSyntaxError, SyntaxError)) else ""
            what = f"the chat template does not compile{line}: {error}"
            raise ModelError(what, file, "use --raw, or replace the file") from error
        return cls(file, tokenizer, source, template, frozenset(reads), tokens, EFFORTS)

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool | None = None,
        effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt. `thinking` and `effort` are left to the template's own default when None.

        A template that reads neither ignores them: look into `reads` to tell the user. Raises UsageError for an unknown
        effort and for messages the template refuses (its own words), ModelError when the template fails.
        """
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        if thinking is not None:
            given["enable_thinking"] = thinking
        if effort is not None:
            given["reasoning_effort"] = self._effort(effort)
        try:
            return self.template.render(**{**self.tokens, **given})
        except _Refused as refusal:
            raise UsageError(f"the chat template refuses these messages: {refusal}", self.file) from refusal
        except Exception as error:  # a template is a program: it can fail in every way a program can
            what = f"the chat template failed: {type(error).__name__}: {error}"
            raise ModelError(what, self.file, "use --raw, or replace the file") from error

    def prompt_ids(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """`render` with the same options, encoded."""
        return self.tokenizer.encode(self.render(messages, **options))

    def _effort(self, name: str) -> str:
        if name not in self.efforts:
            raise UsageError(f"{name!r} is no effort, choose from {', '.join(self.efforts)}", "--effort")
        return self.efforts[name]


def reasoning_state(prompt: str, tags: tuple[str, str] = ("<think>", "</think>")) -> Reasoning:
    """Where the answer to a rendered prompt begins: inside the reasoning ("open"), after it ("closed"), or "none".

    Read from the prompt's tail, as the same flag gives different tails in different templates: a tag at the very end
    decides, otherwise the last one after the last control token, where only the template and a started answer write.
    A tag in a user's message is neither.
    """
    opening, closing = tags
    tail = prompt.rstrip()
    if not tail.endswith(tags):
        turns = list(CONTROL.finditer(tail))
        tail = tail[turns[-1].end() :] if turns else ""
    opened, closed = tail.rfind(opening), tail.rfind(closing)
    if opened == closed:  # neither is there
        return "none"
    return "open" if opened > closed else "closed"


def stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """The token ids that end an answer of this checkpoint. Raises ModelError for anything that is not a token id.

    Of a GGUF file: those it names and Qwen's two, for a file names one and the models end with either.
    """
    if not checkpoint.traits.gguf:
        return folder_stop_ids(checkpoint.folder, checkpoint.raw_config)
    named = gguf_text.stop_ids_of(checkpoint.metadata, checkpoint.folder)
    return named | {i for i in tokenizer.special_ids if tokenizer.token_bytes(i) in _QWEN_ENDS}


def folder_stop_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """The same of a folder: `eos_token_id` of generation_config.json, else of the config or its text part.

    One id or a list; the first place that names any wins, as in Hugging Face's generate. Raises ModelError for anything
    that is not a token id.
    """
    generation = Path(folder) / "generation_config.json"
    places: list[tuple[Path, Any]] = [(generation, _read_json(generation) if generation.is_file() else {})]
    places += [(Path(folder) / "config.json", part) for part in (config, config.get("text_config"))]
    for file, part in places:
        value = part.get("eos_token_id") if isinstance(part, Mapping) else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for one in ids:
            if type(one) is not int or one < 0:
                raise ModelError(f"eos_token_id holds {one!r}, a token id is a whole number from 0", file,
                                 "the file is damaged or edited: download it again")  # fmt: skip
        if ids:
            return frozenset(ids)
    return frozenset()


def checkpoint_sampling(folder: Path) -> dict[str, Any]:
    """How the makers of a checkpoint sample from it, by its generation_config.json, in Sampling's names."""
    file = Path(folder) / "generation_config.json"
    said = _read_json(file) if file.is_file() else {}
    if said.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: said[name] for name in names if said.get(name) is not None}


def _source(folder: Path) -> tuple[Path, str] | None:
    """The file that holds the folder's template, and the template."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file, _read_text(file)
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        found = _read_json(file).get("chat_template") if file.is_file() else None
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            if "default" not in named:
                names = ", ".join(map(str, named)) or "none"
                raise ModelError(f'no chat template is named "default", found: {names}', file, "use --raw")
            found = named["default"]
        if found is not None:
            if not isinstance(found, str):
                raise ModelError(f"chat_template is a {type(found).__name__}, not text", file, "use --raw")
            return file, found
    return None


def _token_strings(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, pad_token, ... of tokenizer_config.json; unset ones stay undefined and print as nothing."""
    file = folder / "tokenizer_config.json"
    config = _read_json(file) if file.is_file() else {}
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot be read: {error}", file, "download the model folder again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not JSON: {error}", file, "download the model folder again") from error
    if not isinstance(content, dict):
        raise ModelError(f"holds a {type(content).__name__}, not an object", file, "download the model folder again")
    return content


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment Hugging Face templates are written for."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    """Plain JSON; Jinja's own filter escapes <, >, & and ' for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise _Refused(message)
