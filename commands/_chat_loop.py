"""The loop of a chat: read, command or question, answer, again.

Ctrl-C counts. The first one stops the answer, which stays in the conversation as far as it came, or empties the input;
a second one before anything else was sent leaves with 130, and while an answer will not stop, at once. Ctrl-D and /quit
leave with 0, SIGTERM with 143.
A turn that fails is undone. A person is told and goes on; a script ends with the error's exit code, and so it does with
a Ctrl-C. A command that a script got wrong is told, the rest of it runs, and its exit code is 2.
Guarded by tests/cli/test_chat_loop.py and tests/cli/test_chat_pty.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from coli.commands import _chat_commands as commands
from coli.commands._errors import printable
from coli.commands._signals import Terminated, cancelling
from coli.conversation import Conversation, Partner, Totals, Turn, TurnFacts
from coli.errors import ColiError, Exit

if TYPE_CHECKING:
    from coli.commands._chat_view import View
    from coli.commands._output import Output

AGAIN = "Ctrl-C once more leaves (so do Ctrl-D and /quit)"


class Reader(Protocol):
    keys: tuple[str, ...]  # lines of /help about them

    def read(self) -> str | None:
        """The next input, None at the end. Raises KeyboardInterrupt for a Ctrl-C."""

    def interrupted(self) -> bool:
        """Whether a Ctrl-C came since the last input and `read` has not raised for it; it will not then."""


class Chat:
    """One chat on its way. `interactive`: a person sits there, so mistakes end nothing."""

    def __init__(self, conversation: Conversation, partner: Partner, reader: Reader, view: View, out: Output, *,
                 interactive: bool) -> None:  # fmt: skip
        self.conversation, self.partner = conversation, partner
        self.totals = Totals()
        self.facts: TurnFacts | None = None  # of the last answer
        self.keys = reader.keys
        self._reader, self._view, self._out, self._interactive = reader, view, out, interactive
        self._strikes = 0  # Ctrl-Cs in a row
        self._code = Exit.OK

    def run(self) -> int:
        """Until the end of the input, /quit or a signal; the exit code."""
        try:
            while (text := self._read()) is not None:
                self._take(text)
                if self._leaving:
                    return self._code
        except commands.Leave:
            pass
        return self._code

    @property
    def _leaving(self) -> bool:
        return self._code in (Exit.INTERRUPTED, Exit.TERMINATED)

    def _read(self) -> str | None:
        while True:
            try:
                text = self._reader.read()
                self._strikes = 0
                return text
            except KeyboardInterrupt:
                if not self._struck():
                    raise

    def _struck(self) -> bool:
        """Count a Ctrl-C; whether the chat goes on."""
        self._strikes += 1
        if not self._interactive or self._strikes > 1:
            return False
        self._out.note(AGAIN)
        return True

    def _take(self, text: str) -> None:
        asked = commands.command_of(text)
        try:
            if asked is None:
                self._ask(text[1:] if text.startswith("/") else text)
            else:
                for line in commands.run(self, *asked):
                    self._view.note(line)
        except ColiError as error:
            if not self._interactive:
                if asked is None:
                    raise
                self._code = Exit.USAGE
            self._fail(error)

    def _fail(self, error: ColiError) -> None:
        self._out.error(printable(str(error)))

    # ---- a turn ------------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        said: dict[str, list[str]] = {"reasoning": [], "content": []}
        caught: list[Exit] = []
        try:
            answer = self.partner.answer(self.conversation, question)  # what a cancel from here on is for
            with cancelling(self.partner.cancel) as caught:
                if self._reader.interrupted():  # after it was read, before anybody listened
                    caught.append(Exit.INTERRUPTED)
                    self.partner.cancel()
                self._view.begin()
                for delta in answer:
                    said[delta.kind].append(delta.text)
                    self._view.show(delta)
        except BaseException:
            self._view.fail()
            if Exit.TERMINATED in caught:
                raise Terminated from None
            raise
        turn = Turn(question, "".join(said["content"]), "".join(said["reasoning"]))
        self._view.end(turn, self.partner.facts)
        self._settle(turn, caught)

    def _settle(self, turn: Turn, caught: list[Exit]) -> None:
        """Take the turn into the conversation and say what it cost."""
        facts = self.facts = self.partner.facts
        stopped = facts is None or facts.finish_reason == "cancelled"
        if facts is not None:
            self.totals = self.totals.plus(facts)
        if stopped and not turn.content and not turn.reasoning:
            self._view.note("stopped before the answer began: the question is forgotten")
        else:
            self.conversation.turns.append(turn)
            self._view.note("stopped" if facts is None else facts.line())
        if not caught:
            return
        if caught[0] == Exit.TERMINATED or not self._struck():
            self._code = caught[0]
