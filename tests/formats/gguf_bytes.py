"""GGUF files byte by byte, for what a writer would not write: wrong counts, types, offsets, lengths."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, value: object) -> bytes:
    """One key; `value` is a number, a str, or the finished bytes of a value."""
    if not isinstance(value, bytes):
        value = text(value) if isinstance(value, str) else struct.pack(f"<{FORMS[kind]}", value)
    return text(name) + struct.pack("<I", kind) + value


def listed(kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    """The value of an array key."""
    items = [text(v) if kind == STRING else struct.pack(f"<{FORMS[kind]}", v) for v in values]  # type: ignore[arg-type]
    return struct.pack("<IQ", kind, len(values) if count is None else count) + b"".join(items)


def tensor(name: str | bytes, dims: Sequence[int], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    """One tensor's entry, dimensions in the file's order."""
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def file(
    keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", *, version: int = 3, align: int = 32,
    key_count: int | None = None, tensor_count: int | None = None, magic: bytes = b"GGUF",
) -> bytes:  # fmt: skip
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data if data else head
