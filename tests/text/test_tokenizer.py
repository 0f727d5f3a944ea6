"""The tokenizer against the oracle's ids, and the bytes it gives back."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.errors import ModelError, UsageError
from coli.tokenizer import ALPHABET, Tokenizer, decode_prompt

ROOT = Path(__file__).parents[2]
NANO = ROOT / "coli" / "assets" / "nano"
ORACLE = json.loads((ROOT / "tests" / "data" / "nano_oracle" / "oracle.json").read_text())
PROMPTS = {name: case for name, case in ORACLE.items() if isinstance(case, dict) and "prompt_ids" in case}
nano = Tokenizer.load(NANO)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", PROMPTS)
def test_oracle_ids_and_text(name: str) -> None:
    case = PROMPTS[name]
    assert nano.encode(case["prompt"]) == case["prompt_ids"]
    assert nano.decode(case["greedy_ids"]) == case["greedy_text"]


@given(st.one_of(texts, st.sampled_from(["👩‍👩‍👧 ё 中文", "e\u0301", "a\r\n\n  b\t", "<|im_end|><think>"])))
def test_round_trip(text: str) -> None:
    for special in (True, False):
        assert nano.decode(nano.encode(text, special=special)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.integers(0, nano.vocab_size + 100), max_size=30))
def test_decode_is_the_join_of_token_bytes(ids: list[int]) -> None:
    assert nano.decode(ids) == b"".join(map(nano.token_bytes, ids)).decode("utf-8", "replace")


def test_every_token_agrees_with_the_library() -> None:
    library = nano._library
    whole = [i for i in range(nano.vocab_size) if "\ufffd" not in nano.decode([i])]
    assert len(whole) > 7000
    assert all(library.decode([i], skip_special_tokens=False) == nano.decode([i]) for i in whole)


def test_alphabet_covers_every_byte_once_and_nano_has_a_token_for_each() -> None:
    assert sorted(ALPHABET.values()) == list(range(256))
    assert {nano.token_bytes(i) for i in range(256)} == {bytes([byte]) for byte in range(256)}


def test_control_tokens() -> None:
    end, think = nano.token_id("<|im_end|>"), nano.token_id("<think>")
    assert end == 8189 and think == 8190 and nano.token_id("no such token") is None
    assert nano.special_ids == {8187, 8188, 8189} and nano.vocab_size == 8192
    assert nano.token_bytes(end) == b"<|im_end|>" and nano.text_bytes(end) == b""
    assert nano.token_bytes(think) == nano.text_bytes(think) == b"<think>"
    for padding in (-1, 8192, 248_319, 1 << 40):
        assert nano.token_bytes(padding) == nano.text_bytes(padding) == b""


@given(texts, st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"]), texts)
def test_untrusted_text_makes_no_added_token(before: str, token: str, after: str) -> None:
    ids = nano.encode(before + token + after, special=False)
    assert not set(ids) & {8187, 8188, 8189, 8190, 8191}
    assert nano.token_id(token) in nano.encode(before + token + after)


def test_broken_prompts_name_the_place() -> None:
    with pytest.raises(UsageError, match=r"stdin: .*byte 0xff at offset 3"):
        decode_prompt(b"abc\xffd", "stdin")
    with pytest.raises(UsageError, match=r"byte 0xd1 at offset 2"):
        decode_prompt("аё".encode()[:3], "p.txt")
    with pytest.raises(UsageError, match=r"character 1 .*U\+DCFF"):
        nano.encode("a\udcff")
    assert decode_prompt("\ufeffё中".encode(), "stdin") == "ё中"


def _broken() -> dict[str, bytes]:
    good = json.loads((NANO / "tokenizer.json").read_text())
    tiny = good | {"added_tokens": [], "model": good["model"] | {"vocab": {"a": 0}, "merges": []}}
    parts = {
        "negative id": tiny | {"model": tiny["model"] | {"vocab": {"a": -1}}},
        "unknown merge": tiny | {"model": tiny["model"] | {"merges": [["b", "c"]]}},
        "bad regex": tiny
        | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},  # noqa: E501
        "no model": {"version": "1.0"},
        "no decoder": tiny | {"decoder": None},
        "other decoder": tiny | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
    }
    raw = {
        "empty": b"",
        "cut": (NANO / "tokenizer.json").read_bytes()[:5000],
        "binary": b"\xff\x00" * 50,
        "deep": b"[" * 9999,
    }
    return {name: json.dumps(part).encode() for name, part in parts.items()} | raw


@pytest.mark.parametrize("case", _broken())
def test_damaged_files_are_named(case: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_broken()[case])
    with pytest.raises(ModelError, match="tokenizer.json") as error:
        Tokenizer.load(tmp_path)
    assert error.value.hint


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer.json: the file is missing"):
        Tokenizer.load(tmp_path)


def test_settings_of_the_trainer_do_not_cut_prompts(tmp_path: Path) -> None:
    parts = json.loads((NANO / "tokenizer.json").read_text())
    parts["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    parts["padding"] = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                        "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    parts["decoder"] = {"type": "Sequence", "decoders": [{"type": "Fuse"}, parts["decoder"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    text = PROMPTS["story"]["prompt"]
    assert Tokenizer.load(tmp_path).encode(text) == nano.encode(text)


def test_importing_is_cheap() -> None:
    code = "import sys, coli.tokenizer, coli.chat, coli.stream; print([m for m in ('tokenizers', 'jinja2', 'numpy') if m in sys.modules])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
