"""Tokenizer, chat template and stop ids out of a GGUF file's metadata (keys `tokenizer.*`, model_spec.md 9 and 10).

Idea: a GGUF holds a vocabulary, merges and the *name* of a pre-tokenizer; the rest of a tokenizer.json (normaliser,
regexes, byte-level steps) is known for that name. So the `tokenizers` package is handed the same parts it would read
from the file, as Python values: building a vocabulary of 248,000 tokens that way takes less than parsing it as JSON.
Token types: 1 is the vocabulary; 3 (control) and 4 (user defined) are its added tokens, the first of them `special`;
5 (unused) fills rows of the embedding table and is no token, as tokenizer.json has none for them. Others do not occur
in a byte-level vocabulary. A converter also calls tokens control for their looks (`<|fim_prefix|>`): ids are equal to
those of tokenizer.json either way, but such a token is not shown in an answer.
`add_bos_token` is not read: like everywhere in coli a template writes what it wants.
Added tokens lie in the vocabulary too, which is how they keep their ids beside gaps; no merge reaches them.
Invariant: ids, text and special ids equal tokenizer.json's where both exist; a bad value is one ModelError that names
the key. Guarded by tests/text/test_gguf_text.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coli.errors import ModelError
from coli.formats.strict import AGAIN, counted, listing, show

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

Metadata = Mapping[str, Any]

_GGML = "tokenizer.ggml."
TOKENS, TYPES, MERGES = f"{_GGML}tokens", f"{_GGML}token_type", f"{_GGML}merges"
TEMPLATE = "tokenizer.chat_template"
_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?LETTER+|\p{N}| ?[^\s\p{L}MARK\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
SPLITS = {  # where text is cut before it is merged, by the name of the pre-tokenizer
    "qwen2": _WORDS.replace("LETTER", r"\p{L}").replace("MARK", ""),
    "qwen35": _WORDS.replace("LETTER", r"[\p{L}\p{M}]").replace("MARK", r"\p{M}"),
}


def library_of(metadata: Metadata, where: object) -> Library:
    """The tokenizer of a GGUF file, `where` is its path. Raises ModelError."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _split(metadata, where)
    vocabulary, added = _vocabulary(metadata, where)
    whole = all(len(token) == 1 for token in vocabulary if token not in added)  # bytes only: nothing to merge
    merges = [] if whole and MERGES not in metadata else _merges(metadata, where)
    try:
        library = Tokenizer(models.BPE(vocabulary, merges))
    except BaseException as error:  # the package raises bare Exception; a panic in Rust is not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelError(f"{MERGES} do not fit the vocabulary: {show(error)}", where, AGAIN) from error
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(token, normalized=False, special=special) for token, special in added.items()])
    return library


def template_of(metadata: Metadata, where: object) -> str | None:
    """The chat template, None when the file has none. Raises ModelError for named ones without a default."""
    for key in (TEMPLATE, f"{TEMPLATE}.default"):
        if key in metadata:
            text: str = _value(metadata, key, str, where)
            return text
    named = [key for key in metadata if key.startswith(f"{TEMPLATE}.")]
    if named:
        raise ModelError(f"{TEMPLATE} is missing, there is only {listing(named)}", where, "use --raw")
    return None


def token_strings(metadata: Metadata, where: object) -> dict[str, str]:
    """The strings a template may print: bos_token, eos_token and pad_token as far as the file names them."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    ids = {name: _token_id(metadata, key, where) for name, key in names.items()}
    return {name: metadata[TOKENS][number] for name, number in ids.items() if number is not None}


def stop_ids_of(metadata: Metadata, where: object) -> frozenset[int]:
    """The ids the file names as ends: of the text, of a turn, of a message."""
    ids = (_token_id(metadata, end, where) for end in ("eos", "eot", "eom"))
    return frozenset(number for number in ids if number is not None)


def _split(metadata: Metadata, where: object) -> str:
    for key, known in ((f"{_GGML}model", ("gpt2",)), (f"{_GGML}pre", tuple(SPLITS))):
        name = _value(metadata, key, str, where)
        if name not in known:
            what = f"{key} is {show(name)}, known: {', '.join(known)}"
            raise ModelError(what, where, "use another model, or its folder with tokenizer.json")
    return SPLITS[name]


def _vocabulary(metadata: Metadata, where: object) -> tuple[dict[str, int], dict[str, bool]]:
    """Every token but the unused ones with its id, and the added ones with whether they are special."""
    tokens, types = _list(metadata, TOKENS, str, where), _list(metadata, TYPES, int, where)
    if len(types) != len(tokens):
        raise ModelError(f"{TYPES} has {len(types)} entries for {counted(len(tokens), 'token')}", where, AGAIN)
    foreign = set(types) - {_NORMAL, _CONTROL, _USER, _UNUSED}
    if foreign:
        at = next(i for i, kind in enumerate(types) if kind in foreign)
        what = f"{TYPES}[{at}] is {types[at]}, a byte-level vocabulary has {_NORMAL}, {_CONTROL}, {_USER} and {_UNUSED}"
        raise ModelError(what, where, "use another model")
    used = [(token, i) for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED]
    vocabulary = dict(used)
    if len(vocabulary) != len(used):
        token, at = next((token, i) for token, i in used if vocabulary[token] != i)
        raise ModelError(f"{TOKENS}[{at}] {show(token)} is there again as {vocabulary[token]}", where, AGAIN)
    return vocabulary, {tokens[i]: kind == _CONTROL for i, kind in enumerate(types) if kind in (_CONTROL, _USER)}


def _merges(metadata: Metadata, where: object) -> list[tuple[str, str]]:
    """The pairs, first rank first."""
    merges = _list(metadata, MERGES, str, where)
    at = next((i for i, merge in enumerate(merges) if merge.count(" ") != 1), None)
    if at is not None:
        raise ModelError(f"{MERGES}[{at}] {show(merges[at])} is no pair of tokens", where, AGAIN)
    parts = " ".join(merges).split(" ") if merges else []
    return list(zip(parts[::2], parts[1::2], strict=True))


def _token_id(metadata: Metadata, name: str, where: object) -> int | None:
    key = f"{_GGML}{name}_token_id"
    if key not in metadata:
        return None
    number, count = _value(metadata, key, int, where), len(metadata.get(TOKENS, ()))
    if not 0 <= number < count:
        raise ModelError(f"{key} is {show(number)}, there are {counted(count, 'token')}", where, AGAIN)
    return int(number)


def _get(metadata: Metadata, key: str, where: object) -> Any:
    if key not in metadata:
        raise ModelError(f"{key} is missing", where, "the file was made without its tokenizer: use another one")
    return metadata[key]


def _value(metadata: Metadata, key: str, kind: type, where: object) -> Any:
    value = _get(metadata, key, where)
    if type(value) is not kind:
        raise ModelError(f"{key} is of type {type(value).__name__}, not {kind.__name__}", where, AGAIN)
    return value


def _list(metadata: Metadata, key: str, kind: type, where: object) -> list[Any]:
    """An array as a list of plain values, each of the kind."""
    value = _get(metadata, key, where)
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence) or isinstance(items, str):
        raise ModelError(f"{key} is of type {type(value).__name__}, not an array", where, AGAIN)
    items = list(items)
    if set(map(type, items)) - {kind}:
        at = next(i for i, item in enumerate(items) if type(item) is not kind)
        raise ModelError(f"{key}[{at}] is of type {type(items[at]).__name__}, not {kind.__name__}", where, AGAIN)
    return items
