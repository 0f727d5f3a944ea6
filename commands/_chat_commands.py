"""The slash commands of a chat: one table, from which /help, completion and the parser read.

A line that begins with a slash is a command, one that begins with two is text with one. A command gives the lines to
say, raises UsageError for what it cannot do, or Leave. Guarded by tests/cli/test_chat_loop.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coli.commands._errors import printable
from coli.errors import UsageError
from coli.report import count

if TYPE_CHECKING:
    from coli.commands._chat_loop import Chat
    from coli.conversation import Conversation

MOST = 64 << 20  # bytes of a saved conversation that are read
_THINKING = {"on": True, "off": False, "auto": None}


class Leave(Exception):
    """The user has had enough."""


@dataclass(frozen=True)
class Command:
    """One slash command; `argument` is what it takes, in words."""

    run: Callable[[Chat, str], list[str]]
    argument: str
    help: str


def command_of(text: str) -> tuple[str, str] | None:
    """(name, argument) of a command, None for text that is meant for the model."""
    if not text.startswith("/") or text.startswith("//"):
        return None
    name, *argument = text.split(maxsplit=1)
    return name, argument[0].strip() if argument else ""


def run(chat: Chat, name: str, argument: str) -> list[str]:
    """The lines to say. Raises UsageError and Leave."""
    command = TABLE.get(name)
    if command is None:
        raise UsageError("no such command", name, "/help lists them; //text sends text that begins with a slash")
    if argument and not command.argument:
        raise UsageError("takes nothing", name, "/help lists what each command takes")
    return command.run(chat, argument)


def _help(chat: Chat, argument: str) -> list[str]:
    rows = {f"{name} {command.argument}".strip(): command.help for name, command in TABLE.items()}
    width = max(map(len, rows))
    return [*(f"{usage:<{width}}  {text}" for usage, text in rows.items()), *chat.keys]


def _reset(chat: Chat, argument: str) -> list[str]:
    gone = len(chat.conversation.turns)
    chat.conversation.turns.clear()
    kept = ", the system message stays" if chat.conversation.system is not None else ""
    return [f"forgot {count(gone, 'turn')}{kept}"]


def _system(chat: Chat, argument: str) -> list[str]:
    if argument:
        chat.conversation.system = None if argument == "-" else argument
    system = chat.conversation.system
    return ["no system message" if system is None else f"system message: {printable(system)}"]


def _save(chat: Chat, argument: str) -> list[str]:
    from coli.commands._output import write_file
    from coli.conversation import Conversation

    path = _path("/save", argument)
    if os.path.exists(path):  # False too for a name that no file can have: writing says why
        try:
            Conversation.from_json(_read(path), path)
        except UsageError as error:
            raise UsageError("is there and is no saved conversation", path, "give another name") from error
    write_file(path, chat.conversation.to_json())
    return [printable(f"saved {_turns(chat.conversation)} to {path}")]


def _load(chat: Chat, argument: str) -> list[str]:
    from coli.conversation import Conversation

    path = _path("/load", argument)
    chat.conversation = Conversation.from_json(_read(path), path)
    return [printable(f"loaded {_turns(chat.conversation)} from {path}")]


def _stats(chat: Chat, argument: str) -> list[str]:
    last = [] if chat.facts is None else [f"last: {chat.facts.line()}"]
    return [chat.totals.line(), *last, *chat.partner.details()]


def _think(chat: Chat, argument: str) -> list[str]:
    if argument and argument not in _THINKING:
        raise UsageError(f"{argument!r} is none of {', '.join(_THINKING)}", "/think", "/think alone says which it is")
    if argument:
        chat.conversation.thinking = _THINKING[argument]
    now = next(name for name, value in _THINKING.items() if value is chat.conversation.thinking)
    words = "auto, as the model's template says" if now == "auto" else now
    return [f"thinking: {words}", *chat.partner.idle(chat.conversation)]


def _quit(chat: Chat, argument: str) -> list[str]:
    raise Leave


TABLE = {
    "/help": Command(_help, "", "this list"),
    "/reset": Command(_reset, "", "begin anew; the system message stays"),
    "/system": Command(_system, "[TEXT|-]", "show the system message, set it, or take it away"),
    "/save": Command(_save, "FILE", "write the conversation to a JSON file"),
    "/load": Command(_load, "FILE", "go on with a saved conversation"),
    "/stats": Command(_stats, "", "tokens, speed, drafts and reuse so far"),
    "/think": Command(_think, "[on|off|auto]", "whether the model thinks first"),
    "/quit": Command(_quit, "", "leave"),
}


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise UsageError("which file?", name, f"{name} FILE")
    try:
        return Path(argument).expanduser()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{argument}: {error}", name) from None


def _read(path: Path) -> str:
    """A saved conversation's text. Only a regular file is read, and a small one: a pipe or a device may never end."""
    from coli.tokenizer import decode_prompt

    where, hint = f"file {path}", "give a file that /save wrote"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError("is no regular file", where, hint)
            data = file.read(MOST + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read: {getattr(error, 'strerror', None) or error}", where, hint) from error
    if len(data) > MOST:
        raise UsageError(f"is larger than {MOST:,} bytes", where, hint)
    return decode_prompt(data, where)


def _turns(conversation: Conversation) -> str:
    system = "" if conversation.system is None else " and the system message"
    return count(len(conversation.turns), "turn") + system
