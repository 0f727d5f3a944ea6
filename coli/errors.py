"""Every error coli raises on purpose, and the exit code each one ends a command with.

    ColiError                 1   anything that went wrong and has a name
    ├── UsageError            2   a flag, a variable, a prompt or their combination
    │   └── PromptTooLong     2   prompt and context do not fit together
    ├── ModelError            3   a model that is missing, damaged, foreign or hostile
    ├── DoesNotFit            4   the memory given is below what the model needs
    ├── DeviceError           5   a compute device that is missing or was lost
    ├── CheckFailed           6   `--check` found a difference
    ├── ReadError             1   a read failed while running (layer, expert, file, errno)
    └── NonFinite             1   a NaN or an infinity (layer, request)

An error says what happened, where (file, tensor, flag) and what to do about it; a command prints the
three on one line and nothing else unless `COLI_DEBUG=1` asks for the traceback.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command (the README has the same table)."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL = 3
    MEMORY = 4
    DEVICE = 5
    CHECK = 6
    INTERRUPTED = 130
    TERMINATED = 143


class ColiError(Exception):
    """`what` happened, `where`, and the `hint` that says what to do."""

    exit = Exit.FAILURE

    def __init__(self, what: str, where: object = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, str(where), hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class UsageError(ColiError):
    exit = Exit.USAGE


class PromptTooLong(UsageError):
    pass


class ModelError(ColiError):
    exit = Exit.MODEL


class DoesNotFit(ColiError):
    exit = Exit.MEMORY


class DeviceError(ColiError):
    exit = Exit.DEVICE


class CheckFailed(ColiError):
    exit = Exit.CHECK


class ReadError(ColiError):
    pass


class NonFinite(ColiError):
    pass
