"""Reasoning that a client carries for us between two requests without reading it.

Anthropic's `signature` and OpenAI's `encrypted_content` are opaque to clients, who send them back as they came. Ours
hold the text itself, so that nothing needs to be kept here; it is the client's own, and hiding it from them is no aim.
What another server wrote there is not ours to read: it opens to None.
Guarded by tests/server/test_anthropic.py and test_responses.py.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "coli:"


def seal(text: str) -> str:
    return _MARK + base64.b64encode(text.encode()).decode("ascii")


def unseal(sealed: str | None) -> str | None:
    """The text that `seal` put away; None for what it did not write."""
    if sealed is None or not sealed.startswith(_MARK):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
