"""Where later prompts may part from this one: the lengths at which its state is worth keeping.

A recurrent state cannot be cut back, so a prompt's checkpoint helps a later one only if that begins with all of it. The
end of the prompt is always kept. Templates give two more places, found by rendering what has not been said yet and
looking how far the texts agree:
  system     what a new conversation shares: the system message and the tools
  history    what the next turn shares: templates write the last turn's opening otherwise once an answer follows it
             (without its reasoning, without the tag that opened it)

Control tokens split a text before it is encoded, so ids agree up to the last one in front of the difference; only what
stands behind it is encoded again. A mark is a wish: a wrong one costs a checkpoint and changes no answer.
Guarded by tests/text/test_marks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coli.chat import CONTROL, Message
from coli.errors import ColiError

Encode = Callable[[str], list[int]]
Render = Callable[[Sequence[Message]], str]

PROBE = "\ue000"  # a private character: no text begins with it by chance
_WINDOW = 64  # characters after the difference: enough for any token that the difference is in


def system_probe(messages: Sequence[Message]) -> list[Message]:
    """Another conversation under the same system message."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    return [*system, {"role": "user", "content": PROBE}]


def history_probe(messages: Sequence[Message]) -> list[Message]:
    """This conversation when it has gone on."""
    last = messages[-1]
    if last["role"] == "assistant":  # the answer continues it
        said = [*messages[:-1], {**last, "content": last["content"] + PROBE}]
    else:
        said = [*messages, {"role": "assistant", "content": PROBE}]
    return [*said, {"role": "user", "content": PROBE}]


def mark(encode: Encode, ids: Sequence[int], prompt: str, render: Render, probe: Sequence[Message],
         refusals: type[Exception] | tuple[type[Exception], ...] = ColiError) -> int:  # fmt: skip
    """Where the prompts of `probe` part from `prompt`; 0 where that is its end, or where `render` raises one of the
    `refusals`: a template need not take messages that nobody sent."""
    try:
        length = parting(encode, ids, prompt, render(probe))
    except refusals:
        return 0
    return length if length < len(ids) else 0


def lengths(*marks: int) -> tuple[int, ...]:
    """Those that are there, in order, each once."""
    return tuple(sorted({*marks} - {0}))


def parting(encode: Encode, ids: Sequence[int], text: str, other: str) -> int:
    """How many of `ids`, those of `text`, the ids of `other` begin with."""
    end = _common(text, other)
    start = max((found.end() for found in CONTROL.finditer(text, 0, end)), default=0)
    window = slice(start, end + _WINDOW)
    return _before(encode, ids, text, start) + _common(encode(text[window]), encode(other[window]))


def _before(encode: Encode, ids: Sequence[int], text: str, start: int) -> int:
    """Tokens of text[:start], by encoding the shorter side."""
    return len(encode(text[:start])) if 2 * start < len(text) else len(ids) - len(encode(text[start:]))


def _common(a: Sequence, b: Sequence) -> int:
    """Length of the longest common prefix; slices compare faster than a loop over a long text."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
