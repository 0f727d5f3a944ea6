"""nano with a chat template that reads tools, thinking and past reasoning, as Qwen's do. It answers as ever; what it
writes when a call is required is the grammar's doing."""

from __future__ import annotations

from pathlib import Path

from coli.models.find import NANO

TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{% endfor %}
{{- 'Call them so:\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>' }}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools %}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content and (preserve_thinking or loop.last) %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n<think>\n' + ('' if enable_thinking else '\n</think>\n\n') }}
{%- endif %}
"""


def write(folder: Path) -> Path:
    """The model's folder, in `folder`."""
    model = folder / "nano-tools"
    model.mkdir()
    for file in NANO.iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return model
