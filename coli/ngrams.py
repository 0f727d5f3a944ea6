"""The hashed n-gram table: which rows a token reads, and reading them.

Idea: a PLE layer adds, for every token, `heads` short rows of a huge table (Qwen3.8: 16 rows of 160 out of 320 million,
51 GB), chosen by hashes of the last n tokens. The table is never loaded. `NgramHash` computes row numbers for a whole
chunk in NumPy, for a few tokens in plain Python; `NgramTable.start` hands their reads to background threads as soon as
the tokens are known, `wait` collects them as float32 where the layer needs them. A small model's table is kept in
memory instead: handing a job to a thread and back costs more than all its rows.
Hash (model_spec.md 5b): window w_0 (the token), w_1, ... back in time; from the first predecessor that is missing or
equals eos on, every older entry becomes eos. mix_g = w_0 M_0 xor ... xor w_{g-1} M_{g-1}; a head of the g-grams reads
row mix_g mod P + offset, P successive primes over all heads and PLE layers, M odd multipliers from splitmix64.
Invariant: token * M < 2^63, so uint64 arithmetic never wraps. Guarded by tests/models/test_ngrams.py (golden ids,
equality with the oracle on every shape).
"""

from __future__ import annotations

import os
from functools import lru_cache
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from coli.errors import ModelError
from coli.formats import ggml
from coli.formats.checkpoint import Checkpoint, read_error
from coli.formats.fp8 import E4M3, widen
from coli.formats.readers import ReadPool
from coli.formats.safetensors import STORAGE, Tensor

if TYPE_CHECKING:
    from coli.models.qwen38_geometry import Geometry

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # enough below 3.3e24 (https://oeis.org/A014233)
_ROWS_A_JOB = 8
_FEW = 6  # tokens that plain Python hashes faster than NumPy
KEPT = 1 << 22  # bytes of float32 up to which a table is kept: too little for the memory plan to list


def splitmix64(value: int) -> int:
    """One output of the splitmix64 generator (https://prng.di.unimi.it/splitmix64.c)."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def multipliers(vocab: int, count: int, seed: int, ple_index: int) -> list[int]:
    """The `count` odd multipliers of one PLE layer, each below 2^63 / vocab."""
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    base = seed + 10007 * ple_index
    return [2 * (splitmix64((base + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(count)]


def is_prime(number: int) -> bool:
    """Miller-Rabin with fixed witnesses: exact for every 64-bit number."""
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    shift = ((number - 1) & (1 - number)).bit_length() - 1
    odd = (number - 1) >> shift
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(shift - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


@lru_cache
def primes(first: int, count: int) -> tuple[int, ...]:
    """The `count` smallest primes >= first."""
    found: list[int] = []
    number = first
    while len(found) < count:
        if is_prime(number):
            found.append(number)
        number += 1
    return tuple(found)


class NgramHash:
    """Row numbers of one PLE layer's table; `ple_index` counts the PLE layers from 0.

    `multipliers` [ngram_size], `sizes` and `offsets` [heads] are int64, `table_rows` is the padded row count.
    """

    def __init__(self, geometry: Geometry, ple_index: int) -> None:
        heads = geometry.ngram_heads
        self.size, self.heads, self.eos = geometry.ngram_size, heads, geometry.ngram_eos
        self._per_gram = geometry.heads_per_ngram
        sizes = primes(geometry.ngram_base, heads * (ple_index + 1))[heads * ple_index :]
        factors = multipliers(geometry.vocab, self.size, geometry.ngram_seed, ple_index)
        self.multipliers = np.array(factors, np.int64)
        self.sizes = np.array(sizes, np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.sizes)[:-1]]).astype(np.int64)
        self.table_rows = -(-sum(sizes) // geometry.ngram_divisor) * geometry.ngram_divisor
        self._factors = self.multipliers.astype(np.uint64)
        self._moduli = self.sizes.astype(np.uint64).reshape(self.size - 1, self._per_gram)
        pairs = list(zip(sizes, self.offsets.tolist(), strict=True))
        self._plain = list(zip(factors[1:], zip(*[iter(pairs)] * self._per_gram, strict=True), strict=True))
        self._first = factors[0]

    def empty_history(self) -> np.ndarray:
        """The int64 [ngram_size - 1] history before a first token: a missing token counts as eos."""
        return np.full(self.size - 1, self.eos, np.int64)

    def rows(self, window: np.ndarray) -> np.ndarray:
        """int64 [T, heads] row numbers of the last T tokens of `window`, an int array [ngram_size - 1 + T] that starts
        with the ngram_size - 1 tokens before them (`empty_history` at the start of a text)."""
        back = self.size - 1
        count = len(window) - back
        if count <= _FEW:
            return np.array(self._few(np.asarray(window).tolist()), np.int64).reshape(count, self.heads)
        window = np.asarray(window).astype(np.uint64)
        mix = window[back:] * self._factors[0]
        cut = np.zeros(count, bool)
        eos = np.uint64(self.eos)
        rows = np.empty((count, back, self._per_gram), np.uint64)
        for step in range(1, self.size):
            token = window[back - step : back - step + count]
            cut |= token == eos
            mix ^= np.where(cut, eos, token) * self._factors[step]
            np.remainder(mix[:, None], self._moduli[step - 1], out=rows[:, step - 1])
        return rows.reshape(count, self.heads).view(np.int64) + self.offsets

    def _few(self, window: list[int]) -> list[int]:
        rows: list[int] = []
        for at in range(self.size - 1, len(window)):
            mix, cut = window[at] * self._first, False
            for step, (factor, heads) in enumerate(self._plain, 1):
                cut = cut or window[at - step] == self.eos
                mix ^= (self.eos if cut else window[at - step]) * factor
                rows += [mix % size + offset for size, offset in heads]
        return rows


def table_tensors(checkpoint: Checkpoint, layer: int) -> list[Tensor]:
    """The table of one layer in row order: its shards, or the whole tensor. Raises ModelError when there is none."""
    prefix = table_prefix(layer)
    if f"{prefix}weight" in checkpoint:
        return [checkpoint[f"{prefix}weight"]]
    shards: list[Tensor] = []
    while f"{prefix}shard_{len(shards)}.weight" in checkpoint:
        shards.append(checkpoint[f"{prefix}shard_{len(shards)}.weight"])
    if not shards:
        raise ModelError(f"layer {layer} has no n-gram table", checkpoint.folder, "download the checkpoint again")
    return shards


def table_prefix(layer: int) -> str:
    return f"layers.{layer}.ple.ple_embedding.ngram_embedding."


class _Request:
    """The rows of one `start`: a raw buffer filled by jobs that each put None or an error into `done`."""

    def __init__(self, rows: np.ndarray, row_bytes: int) -> None:
        self.tokens, self.rows = len(rows), rows.reshape(-1)
        self.raw = np.empty((self.rows.size, row_bytes), np.uint8)
        self.bytes = self.raw.reshape(-1).data
        self.done: SimpleQueue[Exception | None] = SimpleQueue()
        self.jobs = 0


class NgramTable:
    """Rows of one PLE layer's table, read from the checkpoint when asked for.

    One request is under way at a time; a `start` before `wait` drops the earlier one. `layer` is 0-based. `kept`: the
    whole table is in memory, `wait` never waits.
    """

    def __init__(self, checkpoint: Checkpoint, geometry: Geometry, layer: int, threads: int = 4) -> None:
        tensors = table_tensors(checkpoint, layer)
        self.layer, self.dim = layer, geometry.row_dim
        self._checkpoint, self._tensors = checkpoint, tensors
        self._dtype = tensors[0].dtype
        self._storage = np.dtype("u1") if self._dtype in ggml.QUANTISED else STORAGE[self._dtype]
        self._row_bytes = ggml.row_bytes(self._dtype, self.dim) if self._dtype in ggml.SIZES else self.dim
        self._shard_rows = tensors[0].shape[0]
        self._fds = [checkpoint.fd(tensor) for tensor in tensors]
        self._starts = np.array([tensor.offset for tensor in tensors], np.int64)
        self._values = self._fp8_values() if self._dtype == "F8_E4M3" else None
        self._pool = ReadPool(threads, f"ngrams-{layer}")
        self._request: _Request | None = None
        floats = sum(tensor.shape[0] for tensor in tensors) * self.dim
        self._table = self._whole() if 4 * floats <= KEPT else None
        self._asked: np.ndarray | None = None  # rows of a kept table

    @property
    def kept(self) -> bool:
        return self._table is not None

    def _whole(self) -> np.ndarray:
        return np.concatenate([self._decode(self._checkpoint.load(tensor)) for tensor in self._tensors])

    def _decode(self, stored: np.ndarray) -> np.ndarray:
        """float32 [rows, dim] of rows as they are stored."""
        if self._dtype in ggml.QUANTISED:
            return ggml.dequantize(self._dtype, stored)
        return widen(stored, self._dtype) if self._values is None else self._values.take(stored.view(np.uint8))

    def _fp8_values(self) -> np.ndarray:
        """float32 [256]: every code times the table's scalar scale."""
        tensor = self._checkpoint[f"{table_prefix(self.layer)}weight_scale"]
        return E4M3 * widen(self._checkpoint.load(tensor), tensor.dtype).reshape(-1)[0]

    def start(self, rows: np.ndarray) -> None:
        """Begin reading int64 [T, heads] row numbers (as `NgramHash.rows` gives them) in the background."""
        if self._table is not None:
            self._asked = rows
            return
        request = _Request(rows, self._row_bytes)
        count = request.rows.size
        step = max(_ROWS_A_JOB, -(-count // self._pool.threads))
        for first in range(0, count, step):
            request.jobs += 1
            self._pool.submit(self._read, request, first, min(first + step, count))
        self._request = request

    def _read(self, request: _Request, first: int, last: int) -> None:
        try:
            shards, within = np.divmod(request.rows[first:last], self._shard_rows)
            offsets = (self._starts[shards] + within * self._row_bytes).tolist()
            fds, buffer, size = self._fds, request.bytes, self._row_bytes
            at = first * size
            for shard, offset in zip(shards.tolist(), offsets, strict=True):
                target = buffer[at : at + size]
                if os.preadv(fds[shard], (target,), offset) != size:
                    self._checkpoint.preadv(self._tensors[shard].path, [target], offset)
                at += size
        except OSError as error:
            what = f"the n-gram table of layer {self.layer}"
            request.done.put(read_error(error, what, self._tensors[shard].path))
        except Exception as error:  # a row number out of range is the caller's mistake: raised by its `wait`
            request.done.put(error)
        else:
            request.done.put(None)

    def wait(self) -> np.ndarray:
        """float32 [T, heads * dim] of the rows last started, in order. Raises ReadError."""
        if self._table is not None and self._asked is not None:
            rows, self._asked = self._asked, None
            return self._table.take(rows, axis=0).reshape(len(rows), -1)
        request, self._request = self._request, None
        if request is None:
            raise RuntimeError("wait() without start()")
        results = [request.done.get() for _ in range(request.jobs)]
        for error in results:
            if error is not None:
                raise error
        return self._decode(request.raw.view(self._storage)).reshape(request.tokens, -1)

    def close(self) -> None:
        """End the reading threads. The checkpoint stays open."""
        self._pool.close()
