"""The list of tokens that a draft head scores, and the counts that choose it.

Idea: a head that scores 16,000 tokens instead of 248,320 reads a fifteenth of lm_head for each draft and misses few
picks, because people and models repeat themselves. The list (spec_decoding.md section 4) holds

    the `size` tokens with the highest counts, the lower id first among equals: without a history the lowest ids, which
        are a BPE vocabulary's earliest and most frequent merges
    every token counted at all whose count is at least 3/4 of the last of those
    every token of the current conversation

and is rebuilt when a request begins and whenever the counts halve; in between, a token that is missing joins at its
end. What is scored never changes what is emitted: a missing token only turns an accepted draft into a rejected one.

Counts: every prompt token read and every pick adds 1; after 1024 of them all counts halve, the file's phase going on
from run to run. They are float32: halving is exact, so a token seen once outranks an unseen one until its count leaves
float32's range 149 halvings later. Held as two arrays, what the file gave and what this process added since, so that
the second can be put behind a file that has changed meanwhile.

Sequences that take turns share the counts, not the list: each has a `Seat` with its conversation, its list and what its
report counts, and `sit` puts that list where the head reads.

Arrays: `ids` int64 [vocab], `count` of them valid: ascending as rebuilt (good for memory and for the blocks of
kernels/linear.py), then those that joined. Its address stays the same: the head's program holds it.

File (coli/speculation/counts.py) is saved as if the two runs that overlapped had been one after the other: under a
lock the file's counts are read again, halved as often as this process's tokens make due behind the file's own phase,
and this process's own are added. A file that was refused at the start is reported and never replaced.

A list of ids that the user names (Q36_MTP_VOCAB_IDS) takes the place of all this: `FixedVocabulary` has the same face,
scores those ids, and nothing that is read or picked changes it.

Guarded by tests/speculation/test_vocabulary.py (a slow model of these rules over random histories; two processes) and
test_fixed_vocabulary.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coli import history
from coli.errors import ColiError, UsageError
from coli.experts.usage import usage_file
from coli.speculation import counts as file
from coli.speculation.counts import HALVING, Counts
from coli.speculation.report import VocabularyReport

if TYPE_CHECKING:
    from coli.settings import Settings

NAME = ".coli_vocab"
TOKEN_BYTES = 16  # for each token of the vocabulary: its id, two counts
SEAT_BYTES = 10  # the same of a seat: two marks, its id while another sits
_NEAR = np.float32(0.75)
_LONGEST = 32  # bytes of a file of ids for each token of the vocabulary, at most


class Seat:
    """What a list is to one sequence: its marks, its ids while another sits, and the counts of its report."""

    def __init__(self, vocab: int) -> None:
        self.said = np.zeros(vocab, np.bool_)  # tokens of the conversation
        self.member = bytearray(vocab)  # tokens of the list
        self.mask = np.frombuffer(self.member, np.bool_)
        self.ids: np.ndarray | None = None  # None: no list was made yet
        self.start_report()

    def start_report(self) -> None:
        self.picks = self.inside = self.sizes = self.appended = self.rebuilds = 0


class Vocabulary:
    """The tokens worth scoring, `size` of `vocab` and some more. Not for use by two threads at once.

    `path`: where counts are kept; None keeps none. `notes` says, each in a line, why a file was not used or written."""

    def __init__(self, vocab: int, size: int, path: Path | None = None) -> None:
        self.vocab, self.size = vocab, min(max(size, 1), vocab)
        self.notes: list[str] = []
        self.ids, self.count = np.zeros(vocab, np.int64), 0
        self._path = path
        self._given = Counts.none(vocab)  # what the file held, halved since
        self._own, self._read = np.zeros(vocab, np.float32), 0  # counts and tokens of this process that no file has
        self._seat = Seat(vocab)
        self._left = HALVING  # tokens until the counts halve
        if path is not None:
            self._open(path)
        self._choose()

    @property
    def nbytes(self) -> int:
        """Bytes of the list, its counts, and one seat."""
        return self.vocab * (TOKEN_BYTES + SEAT_BYTES)

    def _open(self, path: Path) -> None:
        try:
            self._take(file.load(path, self.vocab))
        except ColiError as error:
            self.notes.append(f"{error}; the draft vocabulary starts without a history and will not be saved")
            self._path = None

    def _take(self, counts: Counts) -> None:
        self._given, self._left = counts, HALVING - counts.phase
        self._own, self._read = np.zeros(self.vocab, np.float32), 0

    # ---- the turn ------------------------------------------------------------------------------------------------

    def seat(self) -> Seat:
        """One for a further sequence."""
        return Seat(self.vocab)

    def sit(self, seat: Seat) -> None:
        """From here on all is about the sequence of this seat."""
        if seat is self._seat:
            return
        self._seat.ids, self._seat = self.ids[: self.count].copy(), seat
        if seat.ids is None:
            self._choose()
        else:
            self.count = len(seat.ids)
            self.ids[: self.count] = seat.ids

    def begin(self, conversation: Sequence[int] | np.ndarray) -> None:
        """A request starts: the list is rebuilt around its `conversation` (prompt tokens, restored ones too)."""
        self._seat.said[:] = False
        self._seat.said[np.asarray(conversation, np.int64)] = True
        self._rebuild()

    def read(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Count prompt tokens that were computed (not restored); they are part of the conversation."""
        ids = np.asarray(tokens, np.int64)
        self._seat.said[ids] = True
        for at in self._pieces(len(ids)):
            np.add.at(self._own, ids[at], np.float32(1))
            self._counted(len(ids[at]))
        for token in np.unique(ids[~self._seat.mask[ids]]).tolist():
            self._join(token)

    def _pieces(self, count: int) -> Iterable[slice]:
        """`count` tokens in pieces that end where the counts halve."""
        at = 0
        while at < count:
            piece = slice(at, min(at + self._left, count))
            at = piece.stop
            yield piece

    def picked(self, token: int) -> None:
        """Count a pick; it joins the list when it is missing."""
        self._seat.picks += 1
        self._seat.sizes += self.count
        if self._seat.member[token]:
            self._seat.inside += 1
        else:
            self._join(token)
        self._own[token] += 1
        self._seat.said[token] = True
        self._counted(1)

    def _join(self, token: int) -> None:
        self.ids[self.count] = token
        self.count += 1
        self._seat.member[token] = 1
        self._seat.appended += 1

    def _counted(self, tokens: int) -> None:
        """These tokens, no more than are left, were added; the counts halve when they were the last."""
        self._left -= tokens
        self._read += tokens
        if self._left == 0:
            self._given.values[:] *= np.float32(0.5)
            self._own *= np.float32(0.5)
            self._left = HALVING
            self._rebuild()

    def _rebuild(self) -> None:
        self._choose()
        self._seat.rebuilds += 1

    def _choose(self) -> None:
        """Write the list that counts and conversation give."""
        mask, counts = self._seat.mask, self._given.values + self._own
        seen = counts[counts > 0]
        last = np.float32(0)
        if len(seen) >= self.size:
            last = np.partition(seen, len(seen) - self.size)[len(seen) - self.size]
        np.greater(counts, last, out=mask)
        ties = np.flatnonzero(counts == last)[: self.size - int(np.count_nonzero(mask))]
        if last > 0:
            mask |= counts >= last * _NEAR
        mask[ties] = True
        mask |= self._seat.said
        ids = np.flatnonzero(mask)
        self.count = len(ids)
        self.ids[: self.count] = ids

    # ---- the report and the file ---------------------------------------------------------------------------------

    def turn_report(self) -> VocabularyReport:
        """What happened since the last report: `inside` counts picks that were on the list when they were picked."""
        seat = self._seat
        size = seat.sizes / seat.picks if seat.picks else float(self.count)
        report = VocabularyReport(size, seat.inside, seat.picks, seat.appended, seat.rebuilds, self.vocab)
        seat.start_report()
        return report

    def save(self) -> None:
        """Add what was counted since the last save to the file. What prevents it becomes a note: nothing else is
        lost by it."""
        if self._path is None or not self._read:
            return
        try:
            self._take(file.update(self._path, self.vocab, lambda counts: counts.plus(self._own, self._read)))
        except ColiError as error:
            self.notes.append(f"{error}; the draft vocabulary's counts of this run are not saved")


class FixedVocabulary:
    """The tokens that a file of ids names, of `vocab`. What is counted is for the report only.

    The file: ids in decimal, blanks, commas or line ends between them, each once. Raises UsageError with what is wrong
    and the line it is on."""

    def __init__(self, vocab: int, path: Path, where: str) -> None:
        self.vocab = vocab
        self.notes: list[str] = []  # what is fixed has nothing to tell
        ids = _listed(path, vocab, f"{where} {path}")
        self.ids, self.count = np.zeros(vocab, np.int64), len(ids)
        self.ids[: self.count] = sorted(ids)
        self._member = frozenset(ids)
        self._seat = Seat(0)

    @property
    def nbytes(self) -> int:
        """Bytes of the list."""
        return self.ids.nbytes

    def seat(self) -> Seat:
        return Seat(0)

    def sit(self, seat: Seat) -> None:
        """What is picked counts for this seat's report."""
        self._seat = seat

    def begin(self, conversation: Sequence[int] | np.ndarray) -> None:
        """A request starts, which changes nothing."""

    def read(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Prompt tokens were computed, which changes nothing."""

    def picked(self, token: int) -> None:
        self._seat.picks += 1
        self._seat.inside += token in self._member

    def turn_report(self) -> VocabularyReport:
        """What happened since the last report."""
        report = VocabularyReport(float(self.count), self._seat.inside, self._seat.picks, 0, 0, self.vocab, fixed=True)
        self._seat.start_report()
        return report

    def save(self) -> None:
        """There is no history."""


def _listed(path: Path, vocab: int, where: str) -> set[int]:
    hint, ids = "give decimal ids with blanks, commas or line ends between them", set[int]()
    try:
        with open(path, "rb") as file:
            data = file.read(vocab * _LONGEST + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read: {getattr(error, 'strerror', None) or error}", where, hint) from error
    if len(data) > vocab * _LONGEST:
        raise UsageError(f"is too long for a list of {vocab:,} ids", where, hint)
    for number, line in enumerate(data.splitlines(), 1):
        for word in filter(None, re.split(rb"[\s,]+", line)):
            shown = ascii(word[:30].decode("latin-1"))
            if not re.fullmatch(rb"[0-9]{1,9}", word):
                raise UsageError(f"line {number}: {shown} is no token id", where, hint)
            if int(word) >= vocab:
                raise UsageError(f"line {number}: {int(word)} is no token of this model, whose ids end at {vocab - 1}",
                                 where, "the list belongs to another model")  # fmt: skip
            if int(word) in ids:
                raise UsageError(f"line {number}: {int(word)} is named before", where, "name each id once")
            ids.add(int(word))
    if not ids:
        raise UsageError("names no token", where, hint)
    return ids


def open_vocabulary(
    settings: Settings, model: Path, vocab: int
) -> tuple[Vocabulary | FixedVocabulary | None, list[str]]:
    """(what a head scores, None for everything; notes). Raises UsageError for a list of ids that is none."""
    if settings.mtp_dump is not None:
        return None, []
    if settings.mtp_vocab_ids is not None:
        return FixedVocabulary(vocab, settings.mtp_vocab_ids, settings.named("mtp_vocab_ids")), []
    if not 0 < settings.mtp_vocab < vocab:
        return None, []
    path, off = vocab_file(model, settings)
    if path is None:
        return None, [off]
    vocabulary = Vocabulary(vocab, settings.mtp_vocab, path)
    notes = list(vocabulary.notes)
    vocabulary.notes.clear()
    return vocabulary, notes


def vocab_file(model: Path, settings: Any) -> tuple[Path | None, str]:
    """(file of the counts, ""), or (None, why there can be no list): `settings.vocab_usage` when given, else the
    default's place; None when it would be the history of the experts."""
    path = settings.vocab_usage or history.beside(model, NAME, "vocabulary")
    if history.same(path, usage_file(model, settings)):
        return None, (
            f"the draft vocabulary's list is off: {path} is the expert history's file (COLI_USAGE) as well; "
            "COLI_VOCAB_USAGE names another"
        )
    return path, ""
