"""The built-in prompts, one a task, and how a prompt becomes a request.

Each is short enough for the shipped nano model and fits what it learned (its report: stories, functions, conversions
and copies work; renames copy well with a wrong word here and there). What they stand for:
    chat     a short answer                     story    free text that is easy to draft
    code     a function from a sentence         rename   long copies with edits: the head and the lookup both draft
    repeat   a pure copy: the lookup's best     json     a format change: copies in another order
    prose    raw text sampled at temperature 1: drafts are wrong often, what they cost must be small
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coli.errors import PromptTooLong, UsageError
from coli.sampling import Sampling
from coli.session import Request

if TYPE_CHECKING:
    from coli.engine import Engine


@dataclass(frozen=True)
class Prompt:
    """One text to answer. `raw` goes without the chat template; `temperature` is the task's own."""

    name: str
    text: str = field(repr=False)
    raw: bool = False
    temperature: float = 0.0


_RENAME = """Rename `total` to `amount` in this code and print it again.

```python
def invoice(items, tax_rate):
    total = 0.0
    for item in items:
        total += item.price * item.count
    if total > 100:
        total = total - 5
    total = total * (1 + tax_rate)
    return round(total, 2)
```"""

_REPEAT = """Repeat the following text exactly:

The old man walked down to the harbor every morning, before the town was awake. He looked at the boats, counted them, \
and wrote the number into a small book. Then he sat on the wall and waited for the sun."""

_JSON = """Convert this CSV to JSON.

```csv
name,age,city
Anna,31,Oslo
Ben,27,Paris
Clara,45,Rome
```"""

BUILT_IN: dict[str, Prompt] = {
    prompt.name: prompt
    for prompt in (
        Prompt("chat", "What is speculative decoding?"),
        Prompt("story", "Tell me a short story about a fox."),
        Prompt("code", "Write a Python function that checks if a number is prime."),
        Prompt("rename", _RENAME),
        Prompt("repeat", _REPEAT),
        Prompt("json", _JSON),
        Prompt("prose", "It was a dark and stormy night, and the old man sat alone by the fire.", raw=True,
               temperature=1.0),
    )
}  # fmt: skip


def choose(tasks: list[str], texts: list[str]) -> list[Prompt]:
    """The prompts of these tasks, then these texts as `prompt 1`, `prompt 2`, ...; every task when nothing is named.
    Raises UsageError."""
    for task in tasks:
        if task not in BUILT_IN:
            raise UsageError(f"{task!r} is no task", "--task", f"give one of {', '.join(BUILT_IN)}")
    named = [BUILT_IN[task] for task in dict.fromkeys(tasks)]
    own = [Prompt(f"prompt {number}" if len(texts) > 1 else "prompt", text) for number, text in enumerate(texts, 1)]
    return named + own or list(BUILT_IN.values())


def request(prompt: Prompt, engine: Engine, *, max_tokens: int, temperature: float | None, seed: int) -> Request:
    """The engine's request: greedy, or sampled with one seed, so that every arm and repeat has the same answer.
    Raises PromptTooLong when the context has no room for two tokens, the least that can be timed."""
    text = prompt.text
    if engine.chat is not None and not prompt.raw:
        text = engine.chat.render([{"role": "user", "content": text}], thinking=None, effort=None)
    heat = prompt.temperature if temperature is None else temperature
    sampling = Sampling(temperature=heat, seed=seed if heat else None)
    ids = tuple(engine.tokenizer.encode(text))
    if len(ids) + 2 > engine.ctx:
        raise PromptTooLong(f"the prompt has {len(ids):,} tokens, the context holds {engine.ctx:,}", prompt.name,
                            "shorten it or raise --ctx")  # fmt: skip
    return Request(ids, max_tokens=max_tokens, sampling=sampling)
