"""Text to token ids and back: a thin coat over the `tokenizers` package.

Idea: the package owns the way in (normaliser, splits, merges, read from `tokenizer.json`, or put together from a GGUF
file's metadata by coli/formats/gguf_text.py); the way out is ours,
because an answer is streamed token by token and a token is a run of *bytes*, often half a character. All families we
run use byte-level BPE, whose vocabulary spells each byte as one printable character (the GPT-2 alphabet);
`token_bytes` spells it back. A file whose decoder is of another kind is refused at load, instead of printing odd
characters later.

Three views of a token, one rule each:
  token_bytes(id)   its exact bytes. Added tokens (`<think>`, `<|im_end|>`) give their text in UTF-8. An id without a
                    token (a padding row of the embedding table) gives b"".
  text_bytes(id)    what it adds to an answer: the same, but b"" for control tokens, those marked `special` in the file.
                    `<think>` and `<tool_call>` are not marked in Qwen files and so stay visible.
  decode(ids)       token_bytes joined, then UTF-8 with U+FFFD for what is broken. Control tokens are shown.

Two ways in: `encode(text)` turns the spelling of an added token into that token, which a rendered chat template needs;
`encode(text, special=False)` takes every character as plain text, for a prompt from a hand that must not write
`<|im_end|>`. No token is put in front or behind (no BOS): a template writes what it wants.

Invariant: `decode(encode(text)) == NFC(text)` for text without lone surrogates, and decode is the join of the token
bytes (tests/text/test_tokenizer.py, which also holds the oracle's prompt ids).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from coli.errors import ModelError, UsageError
from coli.formats import gguf_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from coli.formats.checkpoint import Checkpoint

FILE = "tokenizer.json"
_LONG = 1 << 14  # characters, from which on a text takes a while
_HINT = "download the model folder again; coli needs its tokenizer.json"


def _alphabet() -> dict[str, int]:
    """The GPT-2 byte alphabet, character -> byte: printable Latin-1 is itself, the other 68 bytes are U+0100 and on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = _alphabet()


def decode_prompt(data: bytes, where: str) -> str:
    """A prompt's bytes as text. `where` names the source (a file, "stdin", "argument 2").

    Raises UsageError with the offset of the first byte that is not UTF-8. A leading byte order mark is dropped.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UsageError(what, where, "convert it, for example with iconv -t UTF-8") from None


class Tokenizer:
    """See the module's note. Safe to share between threads once loaded."""

    def __init__(self, library: Library, file: Path) -> None:
        self.file = file
        self._library = library
        added = library.get_added_tokens_decoder()
        self._added = {number: token.content.encode("utf-8", "replace") for number, token in added.items()}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of a checkpoint: its tokenizer.json, or the metadata of its GGUF file. Raises ModelError."""
        if not checkpoint.traits.gguf:
            return cls.load(checkpoint.folder)
        return cls(gguf_text.library_of(checkpoint.metadata, checkpoint.folder), checkpoint.folder)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `folder/tokenizer.json`. Raises ModelError when it is missing, damaged or not byte-level."""
        file = Path(folder) / FILE
        if not file.is_file():
            raise ModelError("the file is missing", file, _HINT)
        from tokenizers import Tokenizer as Library

        try:
            library = Library.from_file(str(file))
            kinds = _kinds(json.loads(library.decoder.__getstate__())) if library.decoder else set()
            library.no_truncation()  # settings of the trainer; they would cut or fill prompts in silence
            library.no_padding()
        except BaseException as error:  # the package raises bare Exception; a panic in Rust is not even that
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ModelError(f"not a usable tokenizer: {error}", file, _HINT) from error
        if "ByteLevel" not in kinds:
            found = ", ".join(sorted(kinds)) or "none"
            raise ModelError(f"its decoder is {found}, coli reads byte-level BPE only", file, "use another model")
        return cls(library, file)

    def to_json(self) -> str:
        """The content of a tokenizer.json that gives the same tokenizer."""
        return self._library.to_str(pretty=True)

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id + 1. The model's own vocabulary may be longer: its last rows are padding."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of `text`, nothing added at either end. `special=False`: spellings of added tokens stay plain text.

        Raises UsageError for a lone surrogate (what Python makes of a broken byte in an argument).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"character {error.start} of the prompt is a lone surrogate (U+{ord(text[error.start]):04X})"
            raise UsageError(what, hint="the prompt was not UTF-8 where it came from") from None
        library = self._library if special else self._plain
        if len(text) < _LONG:
            return list(library.encode(text, add_special_tokens=False).ids)
        # a batch lets go of the GIL, so that other threads go on, and of offsets, which nobody wants
        return list(library.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @cached_property
    def _plain(self) -> Library:
        """The same tokenizer without its added tokens: the package's own switch only covers those marked special."""
        from tokenizers import Tokenizer as Library

        whole, plain = self._library, Library(self._library.model)
        plain.normalizer, plain.pre_tokenizer, plain.decoder = whole.normalizer, whole.pre_tokenizer, whole.decoder
        return plain

    def token_id(self, token: str) -> int | None:
        """The id of one token by its spelling in the file (`"<|im_end|>"`), None when there is none."""
        return self._library.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token; b"" for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to an answer's text: token_bytes, but nothing for control tokens."""
        return b"" if token_id in self.special_ids else self.token_bytes(token_id)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, control tokens shown, U+FFFD for bytes that are not UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        token = self._library.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if token is None:
            return b""
        if all(character in ALPHABET for character in token):
            return bytes(ALPHABET[character] for character in token)
        return token.encode("utf-8", "replace")  # not in the alphabet: its own text, as the package's decoder does


def _kinds(decoder: dict) -> set[str]:
    """The types of a decoder and, for a sequence, of its parts."""
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))
