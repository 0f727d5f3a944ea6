"""How often each token was used, as a file (coli/history.py) of exactly one form.

Format, little-endian:

    8 bytes   magic  89 "COLIVC" 0A
    4 uint32  version (1) | tokens in the vocabulary | records | phase: tokens counted since the counts last halved
    records   uint32 token, float32 count above 0; tokens ascend
    uint32    CRC-32 of everything before it

An absent or empty file holds no counts. Anything else that is not exactly this, whole, for this vocabulary, is a
ColiError with the file's name, and nothing here writes over it.

`update` is safe with two processes at once and with a crash at any moment: the file is locked, read again and replaced.

Guarded by tests/speculation/test_vocabulary.py (two processes saving at once; a file cut at and flipped in every byte).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coli import history
from coli.errors import ColiError

HALVING = 1024  # tokens after which all counts halve
MAGIC, VERSION = b"\x89COLIVC\n", 1
_HEAD = struct.Struct("<8s4I")
_RECORD = np.dtype([("token", "<u4"), ("count", "<f4")])
_VARIABLE = "COLI_VOCAB_USAGE"
_HINT = history.hint(_VARIABLE)


@dataclass(frozen=True)
class Counts:
    """`values` float32 [vocab]; `phase`, 0 to 1023, tokens counted since they last halved."""

    values: np.ndarray
    phase: int

    @classmethod
    def none(cls, vocab: int) -> Counts:
        return cls(np.zeros(vocab, np.float32), 0)

    def plus(self, own: np.ndarray, tokens: int) -> Counts:
        """These counts, and behind them `own` [vocab], what `tokens` more tokens left after their own halvings."""
        halvings, phase = divmod(self.phase + tokens, HALVING)
        return Counts(np.ldexp(self.values, -halvings) + own, phase)


def encode(counts: Counts) -> bytes:
    tokens = np.flatnonzero(counts.values)
    records = np.empty(len(tokens), _RECORD)
    records["token"], records["count"] = tokens, counts.values[tokens]
    body = _HEAD.pack(MAGIC, VERSION, len(counts.values), len(tokens), counts.phase) + records.tobytes()
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode(data: bytes, vocab: int, path: Path) -> Counts:
    """The counts in a file's bytes. Raises ColiError."""
    if not data:
        return Counts.none(vocab)
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise ColiError("holds no counts of a draft vocabulary", path, _HINT)
    _, version, tokens, records, phase = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ColiError(f"is of version {version}, this coli reads version {VERSION}", path, _HINT)
    if tokens != vocab:
        raise ColiError(f"counts a vocabulary of {tokens} tokens, this model's has {vocab}", path, _HINT)
    if len(data) != _HEAD.size + records * _RECORD.itemsize + 4:
        raise ColiError("ends in a damaged record", path, _HINT)
    table = np.frombuffer(data, _RECORD, records, _HEAD.size)
    ids, values = table["token"].astype(np.int64), table["count"]
    sound = zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little") and phase < HALVING
    if not sound or np.any(np.diff(ids, prepend=-1, append=vocab) <= 0) or not np.all((values > 0) & (values < np.inf)):
        raise ColiError("is damaged: its checksum or a record is wrong", path, _HINT)
    counts = Counts.none(vocab)
    counts.values[ids] = values
    return Counts(counts.values, phase)


def load(path: Path, vocab: int) -> Counts:
    """The counts in a file. Raises ColiError."""
    return decode(history.read(path, _HEAD.size + vocab * _RECORD.itemsize + 4, _VARIABLE), vocab, path)


def update(path: Path, vocab: int, change: Callable[[Counts], Counts]) -> Counts:
    """Put change(what the file holds now) in its place; returns that. Raises ColiError, the file being as it was."""
    with history.rewriting(path, _VARIABLE) as replace:
        counts = change(load(path, vocab))
        replace(encode(counts))
    return counts
