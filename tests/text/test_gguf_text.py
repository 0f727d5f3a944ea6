"""Tokenizer, template and stop ids from GGUF metadata equal those of the folder the metadata was made from."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli.chat import ChatTemplate, folder_stop_ids, stop_ids
from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint
from coli.formats.gguf_text import SPLITS
from coli.tokenizer import ALPHABET, Tokenizer
from tests.gguf_files import tiny_text, write_gguf
from tests.tiny import write_text_files
from tests.tiny36 import tiny36_config, tiny36_weights

ROOT = Path(__file__).parents[2]
NANO = ROOT / "coli" / "assets" / "nano"
GGML = "tokenizer.ggml."


def metadata_of(folder: Path, padding: int = 0, pre: str = "qwen35") -> dict[str, Any]:
    """What a converter writes of a folder's text files, `padding` rows of the embedding table included."""
    parts = json.loads((folder / "tokenizer.json").read_text())
    by_id = {i: (token, 1) for token, i in parts["model"]["vocab"].items()}
    by_id |= {t["id"]: (t["content"], 3 if t["special"] else 4) for t in parts["added_tokens"]}
    size = len(by_id) + padding
    tokens = [by_id.get(i, (f"[PAD{i}]", 5)) for i in range(size)]
    facts = {f"{GGML}model": "gpt2", f"{GGML}pre": pre, f"{GGML}tokens": [t for t, _ in tokens],
             f"{GGML}token_type": np.array([kind for _, kind in tokens], np.int32),
             f"{GGML}merges": [" ".join(pair) for pair in parts["model"]["merges"]],
             f"{GGML}eos_token_id": 8189, f"{GGML}padding_token_id": 8187, f"{GGML}add_bos_token": False,
             "tokenizer.chat_template": (folder / "chat_template.jinja").read_text()}  # fmt: skip
    return facts


def opened(metadata: dict[str, Any]) -> Any:
    return SimpleNamespace(traits=SimpleNamespace(gguf=True), metadata=metadata, folder=Path("m.gguf"))


def changed(**changes: Any) -> Any:
    """Nano's metadata with `tokenizer.ggml.KEY` replaced, None taking it out."""
    facts = NANO_FACTS | {f"{GGML}{key}": value for key, value in changes.items()}
    return opened({key: value for key, value in facts.items() if value is not None})


def plain(key: str) -> list[Any]:
    """One of nano's arrays, as a list to change."""
    value = NANO_FACTS[f"{GGML}{key}"]
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


NANO_FACTS = metadata_of(NANO, padding=40)
theirs, ours = Tokenizer.load(NANO), Tokenizer.open(opened(NANO_FACTS))


# ---- equality with tokenizer.json ------------------------------------------------------------------------------------


def agree(text: str) -> None:
    for special in (True, False):
        ids = theirs.encode(text, special=special)
        assert ours.encode(text, special=special) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids)


LETTERS = [
    *"abzABZ09_-'\"\\/<>|[](){}.,!?;: \t\n\r", "\r\n", "  ", "   ", "\n\n", "'s", "'LL", "'re", "é", "e\u0301",
    "\u0301", "ё", "й", "и\u0306", "中", "文", "한", "\u1112\u1161\u11ab", "ﷺ", "ﬁ", "ſ", "\u212a", "\u212b", "٣", "Ⅷ",
    "²", "½", "👩‍👩‍👧", "🇩🇪", "क्षि", "\u200d", "\ufeff", "\u00a0", "\u3000", "\u0085", "\u2028", "\x00", "\x7f",
    "\ufffd", "\U0010ffff", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|im_end", "|>",
    "<think", "\u200b", "Ġ", "Ċ", "[PAD8192]", " the", "def ", "return", "http://", "1234567", "==", "    ", "\t\t",
]  # fmt: skip


def test_thousands_of_adversarial_strings() -> None:
    draw = random.Random(4)
    for _ in range(3000):
        agree("".join(draw.choices(LETTERS, k=draw.randrange(1, 14))))
    for _ in range(500):
        agree("".join(chr(draw.choice((draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)))) for _ in range(9)))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text(text: str) -> None:
    agree(text)


def test_real_text_and_every_token() -> None:
    for line in (NANO / "eval_chat.jsonl").read_text().splitlines()[:200]:
        agree(line)
    assert ours.special_ids == theirs.special_ids and ours.vocab_size == theirs.vocab_size
    for i in range(len(NANO_FACTS[f"{GGML}tokens"]) + 2):
        assert ours.token_bytes(i) == theirs.token_bytes(i) and ours.text_bytes(i) == theirs.text_bytes(i)
    assert ours.token_id("<think>") == 8190 and ours.token_id("[PAD8192]") is None


def test_rows_without_a_token_may_lie_before_the_added_ones() -> None:
    facts = metadata_of(NANO)
    tokens, types = facts[f"{GGML}tokens"], facts[f"{GGML}token_type"].tolist()
    gap = opened(facts | {f"{GGML}tokens": [*tokens[:8187], "[PAD8187]", *tokens[8187:]],
                          f"{GGML}token_type": [*types[:8187], 5, *types[8187:]]})  # fmt: skip
    found = Tokenizer.open(gap)
    text = "<|im_start|>user\nhello<|im_end|>"
    moved = [i + (i >= 8187) for i in theirs.encode(text)]
    assert found.encode(text) == moved and found.special_ids == {8188, 8189, 8190}
    assert found.token_bytes(8187) == b"" and found.decode(moved) == text


def test_the_two_splits_differ_in_marks_alone() -> None:
    old = Tokenizer.open(opened(NANO_FACTS | {f"{GGML}pre": "qwen2"}))
    for text in ("Hello, it's 1234 o'clock\r\n\r\n  x\t", "中文 ё 👩‍👩‍👧", "<|im_end|>  \n a"):
        assert old.encode(text) == theirs.encode(text)
    cut = [piece for piece, _ in old._library.pre_tokenizer.pre_tokenize_str("क्षि a\u0302")]
    joined = [piece for piece, _ in ours._library.pre_tokenizer.pre_tokenize_str("क्षि a\u0302")]
    assert len(joined) == 2 < len(cut)
    golden = json.loads((NANO / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    assert SPLITS["qwen35"] == golden and "\\p{M}" not in SPLITS["qwen2"]


def test_to_json_gives_the_same_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ours.to_json())
    again = Tokenizer.load(tmp_path)
    text = "<|im_start|>user\nDon't  panic ё 中 1234<think>"
    assert [again.encode(text, s) for s in (True, False)] == [theirs.encode(text, s) for s in (True, False)]
    assert again.special_ids == theirs.special_ids


def test_a_large_vocabulary_opens_fast() -> None:
    """248,000 tokens and merges, as Qwen3.6 has; in CPU time, which other work on the machine moves less."""
    letters = sorted(ALPHABET)
    pairs = [(a, b) for a in letters for b in letters]
    merges, level = [f"{a} {b}" for a, b in pairs], [a + b for a, b in pairs]
    tokens, steps = letters + level, level.copy()
    while len(tokens) < 248_044:  # then of four letters, six and eight
        grown = [(a, steps[7919 * i % len(steps)]) for i, a in enumerate(level)]
        level = [a + b for a, b in grown]
        tokens, merges = tokens + level, merges + [f"{a} {b}" for a, b in grown]
    tokens, merges = tokens[:248_044], merges[: 248_044 - 256]
    tokens += [f"<|special_{i}|>" for i in range(30)]
    types = np.array([1] * 248_044 + [3] * 30, np.int32)
    facts = {f"{GGML}model": "gpt2", f"{GGML}pre": "qwen35", f"{GGML}tokens": tokens, f"{GGML}token_type": types,
             f"{GGML}merges": merges}  # fmt: skip
    start = time.process_time()
    found = Tokenizer.open(opened(facts))
    taken = time.process_time() - start
    assert len(found.special_ids) == 30 and found.encode("a<|special_7|>")[-1] == 248_051
    assert taken < 1.5


# ---- template and stop ids -------------------------------------------------------------------------------------------


def test_nano_template_and_stops() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    folder, file = ChatTemplate.load(NANO, theirs), ChatTemplate.open(opened(NANO_FACTS), ours)
    assert folder is not None and file is not None and file.reads == folder.reads
    assert file.tokens == folder.tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for thinking in (None, True, False):
        assert file.prompt_ids(messages, thinking=thinking) == folder.prompt_ids(messages, thinking=thinking)
    assert stop_ids(opened(NANO_FACTS), ours) == folder_stop_ids(NANO, {}) == {8187, 8189}


def test_a_named_template_is_taken_by_default_only() -> None:
    bare = {key: value for key, value in NANO_FACTS.items() if key != "tokenizer.chat_template"}
    assert ChatTemplate.open(opened(bare), ours) is None
    tools = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    with pytest.raises(ModelError, match=r"m.gguf: tokenizer.chat_template is missing, .*chat_template.tool_use"):
        ChatTemplate.open(opened(bare | tools), ours)
    named = opened(bare | tools | {"tokenizer.chat_template.default": "plain"})
    assert ChatTemplate.open(named, ours).render([]) == "plain"
    whole = opened(NANO_FACTS | tools | {"tokenizer.chat_template": "whole"})
    assert ChatTemplate.open(whole, ours).render([]) == "whole"
    assert ChatTemplate.open(opened(bare | {"tokenizer.chat_template": ""}), ours).render([]) == ""
    for wrong, words in ((7, "of type int"), ("{% if %}", "does not compile")):
        with pytest.raises(ModelError, match=words):
            ChatTemplate.open(opened(bare | {"tokenizer.chat_template": wrong}), ours)


def test_stop_ids_are_the_named_and_qwens_control_tokens() -> None:
    assert stop_ids(changed(eos_token_id=5, eot_token_id=6, eom_token_id=7), ours) == {5, 6, 7, 8187, 8189}
    assert stop_ids(changed(eos_token_id=None), ours) == {8187, 8189}
    shown = changed(token_type=[4 if kind == 3 else kind for kind in plain("token_type")])
    assert stop_ids(shown, Tokenizer.open(shown)) == {8189}  # user defined: a text may hold them
    for key, wrong in (("eos", 9000), ("eot", -1), ("eom", "x"), ("eos", True), ("eos", 1.0)):
        with pytest.raises(ModelError, match=rf"m.gguf: tokenizer.ggml.{key}_token_id"):
            stop_ids(changed(**{f"{key}_token_id": wrong}), ours)


def test_a_written_file_and_a_written_folder_speak_alike(tmp_path: Path) -> None:
    config = tiny36_config("qwen3_5_text")
    path = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config))
    write_text_files(tmp_path, config["vocab_size"])
    folder = Tokenizer.load(tmp_path)
    with Checkpoint.open(path) as checkpoint:
        file = Tokenizer.open(checkpoint)
        chat, stops = ChatTemplate.open(checkpoint, file), stop_ids(checkpoint, file)
    text = "<|im_start|>user\nЁж 中\xff\n<|im_end|><think>"
    assert file.encode(text) == folder.encode(text) and file.special_ids == folder.special_ids
    assert [file.token_bytes(i) for i in range(272)] == [folder.token_bytes(i) for i in range(272)]
    other = ChatTemplate.load(tmp_path, folder)
    assert chat is not None and other is not None
    assert chat.render([{"role": "user", "content": "x"}]) == other.render([{"role": "user", "content": "x"}])
    assert stops == folder_stop_ids(tmp_path, {})


# ---- damage ----------------------------------------------------------------------------------------------------------


def with_item(key: str, at: int, value: Any) -> Callable[[], Any]:
    def change() -> Any:
        items = plain(key)
        items[at] = value
        return changed(**{key: items})

    return change


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: changed(model="llama"), "ggml.model is llama, known: gpt2"),
        (lambda: changed(model=None), "ggml.model is missing"),
        (lambda: changed(pre="glm4\n"), r"ggml.pre is glm4\\n, known: qwen2, qwen35"),
        (lambda: changed(pre=None), "ggml.pre is missing"),
        (lambda: changed(pre=3), "ggml.pre is of type int, not str"),
        (lambda: changed(tokens=None), "ggml.tokens is missing"),
        (lambda: changed(tokens="abc"), "ggml.tokens is of type str, not an array"),
        (lambda: changed(tokens=7), "ggml.tokens is of type int, not an array"),
        (lambda: changed(tokens=np.arange(8232)), r"ggml.tokens\[0\] is of type int, not str"),
        (lambda: changed(tokens=[]), "ggml.token_type has 8232 entries for 0 tokens"),
        (lambda: changed(token_type=None), "ggml.token_type is missing"),
        (lambda: changed(token_type=np.ones(8232, np.float32)), r"ggml.token_type\[0\] is of type float, not int"),
        (lambda: changed(token_type=np.ones(8232, bool)), r"ggml.token_type\[0\] is of type bool, not int"),
        (with_item("token_type", 9, 6), r"ggml.token_type\[9\] is 6"),
        (with_item("token_type", 9, -1), r"ggml.token_type\[9\] is -1"),
        (with_item("tokens", 300, "a"), r"ggml.tokens\[\d+\] a is there again as \d+"),
        (lambda: changed(merges=None), "ggml.merges is missing"),
        (with_item("merges", 5, "ab"), r"ggml.merges\[5\] ab is no pair"),
        (with_item("merges", 5, "a b c"), r"ggml.merges\[5\] a b c is no pair"),
        (with_item("merges", 5, "a qzqzqz"), "ggml.merges do not fit the vocabulary: .*qzqzqz"),
        (with_item("merges", 5, "qz zqz"), "ggml.merges do not fit the vocabulary"),
        (with_item("merges", 5, " a"), "ggml.merges do not fit the vocabulary"),
        (with_item("merges", 5, 5), r"ggml.merges\[5\] is of type int"),
    ],
)
def test_bad_metadata_is_one_error_that_names_the_key(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ModelError, match=f"^m.gguf: tokenizer.{words}") as caught:
        Tokenizer.open(make())
    assert caught.value.hint and "\n" not in str(caught.value)


def test_a_vocabulary_of_bytes_needs_no_merges() -> None:
    facts = tiny_text(272)
    assert f"{GGML}merges" not in facts
    found = Tokenizer.open(opened(facts))
    assert found.encode("aё<|im_end|>") == [97, 0xD1, 0x91, 258] and found.vocab_size == 261
