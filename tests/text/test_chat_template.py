"""Chat templates: nano's against its oracle, the sources and errors, and where reasoning begins (complaint F 50)."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from coli.chat import ChatTemplate, folder_stop_ids, reasoning_state
from coli.errors import ModelError, UsageError
from coli.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
NANO = ROOT / "coli" / "assets" / "nano"
ORACLE = json.loads((ROOT / "tests" / "data" / "nano_oracle" / "oracle.json").read_text())
nano = Tokenizer.load(NANO)

# shapes of tail seen in the wild: switchable, always on, off by a closed block, none
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>' }}"
    "{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<｜{{ m.role }}｜>{{ m.content }}{% endfor %}"
    "{%- if add_generation_prompt %}<｜bot｜>{% endif %}"
)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def template(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    chat = ChatTemplate.load(folder, nano)
    assert chat is not None
    return chat


@pytest.mark.parametrize(
    ("name", "text", "thinking"),
    [
        ("capital", "What is the capital of France?", None),
        ("story", "Tell me a short story about a fox.", False),
        ("prime", "Write a Python function that checks if a number is prime.", None),
        (
            "think",
            "Rename `x` to `total` in this code and print it again.\n\n"
            "```python\ndef double(x):\n    return x * 2\n```",
            True,
        ),
    ],
)
def test_nano_prompts_of_the_oracle(name: str, text: str, thinking: bool | None) -> None:
    chat = ChatTemplate.load(NANO, nano)
    assert chat is not None and "enable_thinking" in chat.reads and "reasoning_effort" not in chat.reads
    assert chat.render(user(text), thinking=thinking) == ORACLE[name]["prompt"]
    assert chat.prompt_ids(user(text), thinking=thinking) == ORACLE[name]["prompt_ids"]
    assert reasoning_state(ORACLE[name]["prompt"]) == ("open" if thinking else "closed")


@pytest.mark.parametrize(
    ("source", "thinking", "state"),
    [
        (QWEN, None, "open"), (QWEN, True, "open"), (QWEN, False, "closed"),
        (GLM, None, "open"), (GLM, True, "open"), (GLM, False, "closed"),
        (PLAIN, None, "none"), (PLAIN, True, "none"), (PLAIN, False, "none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["hi", "what does <think> do?", "a stray </think>", "<think>", "</think>"])
def test_reasoning_state_of_template_tails(
    source: str, thinking: bool | None, state: str, text: str, tmp_path: Path
) -> None:
    chat = template(tmp_path, source)
    assert reasoning_state(chat.render(user(text), thinking=thinking)) == state
    assert reasoning_state(chat.render(user("hello"), thinking=thinking, add_generation_prompt=False)) == "none"


def test_reasoning_state_of_started_answers_and_raw_prompts() -> None:
    assert reasoning_state("<|im_start|>assistant\n<think>\nLet me see: ") == "open"
    assert reasoning_state("<|im_start|>assistant\n<think>\nyes\n</think>\n\nThe answer") == "closed"
    assert reasoning_state("Once upon a time, <think> was a word") == "none"
    assert reasoning_state("no markers, but then\n<think>\n") == "open"
    assert reasoning_state("") == "none"
    assert reasoning_state("x [think]", ("[think]", "[/think]")) == "open"


def test_thinking_and_effort_are_passed_only_when_given(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ enable_thinking is defined }} {{ reasoning_effort | default('own') }} {{ extra }}")
    assert chat.reads >= {"enable_thinking", "reasoning_effort"}
    assert chat.render([]) == "False own "
    assert chat.render([], thinking=False, effort="low", extra=1) == "True low 1"
    assert [chat.render([], effort=name).split()[1] for name in ("xhigh", "high", "max", "medium", "minimal")] == [
        "xhigh", "xhigh", "xhigh", "medium", "low"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--effort: 'huge' is no effort, choose from .*xhigh"):
        chat.render([], effort="huge")


def test_helpers_are_those_of_hugging_face(tmp_path: Path) -> None:
    source = """{%- for x in range(5) -%}
        {%- if x == 3 -%}{%- break -%}{%- endif -%}
        {{ x }}
    {%- endfor %}
    {% generation %}[{{ messages[0].content }}]{% endgeneration %}
{{ {"b": "<ё & 'q'>", "a": 1} | tojson }} {{ [1] | tojson(indent=2) }} {{ strftime_now("%Y") }}
"""
    rendered = template(tmp_path, source).render(user("hi"))
    expected = '012[hi]{"b": "<ё & \'q\'>", "a": 1} [\n  1\n] '
    assert rendered.startswith(expected)
    assert abs(int(rendered[len(expected) :]) - datetime.now().year) <= 1


def test_token_strings_come_from_the_tokenizer_config(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert template(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}").render([]) == "<s>|</s>|"


def test_sources_in_order(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path, nano) is None

    def rendered() -> str:
        chat = ChatTemplate.load(tmp_path, nano)
        assert chat is not None
        return chat.render([])

    (tmp_path / "chat_template.json").write_text('{"chat_template": "third"}')
    assert rendered() == "third"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "second"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert rendered() == "second"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "also second"}')
    assert rendered() == "also second"
    (tmp_path / "chat_template.jinja").write_text("first")
    assert rendered() == "first"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("chat_template.jinja", "a\n{% if %}", r"jinja: the chat template does not compile \(line 2\)"),
        ("chat_template.jinja", "{{ x | no_such_filter }}", "does not compile"),
        ("chat_template.jinja", "{{" + "(" * 5000, "does not compile"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("tokenizer_config.json", '{"chat_template": 5}', "a int, not text"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            'named "default", found: rag',
        ),
        ("chat_template.json", "[" * 100_000, "not JSON"),
    ],
)
def test_broken_sources_are_named(file: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelError, match=message) as error:
        ChatTemplate.load(tmp_path, nano)
    assert file in error.value.where


def test_a_refusal_is_the_users_and_in_the_templates_words(tmp_path: Path) -> None:
    chat = template(tmp_path, "{{ raise_exception('only user turns, please') }}")
    with pytest.raises(UsageError, match="chat_template.jinja: .*only user turns, please"):
        chat.render([])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.no.such }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_failing_or_hostile_template_is_the_models(source: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat_template.jinja: the chat template failed"):
        template(tmp_path, source).render(user("hi"))


def test_tools_reach_the_template(tmp_path: Path) -> None:
    chat = template(tmp_path, "{% if tools %}{{ tools[0].name }}{% else %}none{% endif %}")
    assert chat.render([]) == "none" and chat.render([], tools=[{"name": "clock"}]) == "clock"


def test_folder_stop_ids(tmp_path: Path) -> None:
    assert folder_stop_ids(NANO, json.loads((NANO / "config.json").read_text())) == {8187, 8189}
    assert folder_stop_ids(tmp_path, {}) == frozenset()
    assert folder_stop_ids(tmp_path, {"eos_token_id": 7}) == {7}
    assert folder_stop_ids(tmp_path, {"text_config": {"eos_token_id": [7, 8]}}) == {7, 8}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert folder_stop_ids(tmp_path, {"eos_token_id": 7}) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert folder_stop_ids(tmp_path, {"eos_token_id": 7}) == {1, 2}
    for wrong in ("-1", '"x"', "true", "[1, 2.0]"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(ModelError, match="generation_config.json: eos_token_id"):
            folder_stop_ids(tmp_path, {})
