"""A folder opens with one name per tensor, whatever the spelling and the split; anything doubtful is refused."""

from __future__ import annotations

import gc
import json
import os
import time

import numpy as np
import pytest

from coli.errors import ModelError, ReadError
from coli.formats.checkpoint import INDEX, Checkpoint, canonical
from tests.tiny import header_bytes, store, tiny_config, write_folder, write_safetensors, write_tiny

CONFIG = {"model_type": "x"}


def some(*names: str) -> dict:
    return {name: store(np.arange(6, dtype=np.float32).reshape(2, 3) + i, "BF16") for i, name in enumerate(names)}


def refused(folder, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    text = str(caught.value)
    assert str(folder) in text and caught.value.hint and "\n" not in text
    for word in words:
        assert word in text, text


# ---- names -------------------------------------------------------------------------------------------------------


def test_names():
    assert canonical("model.language_model.layers.0.x") == canonical("model.layers.0.x") == "layers.0.x"
    assert canonical("lm_head.weight") == "lm_head.weight" and canonical("mtp.norm.weight") == "mtp.norm.weight"
    assert canonical("model.visual.x") is None and canonical("visual.x") is None


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_prefix_and_split_change_nothing(tmp_path, prefix, shards):
    plain = Checkpoint.open(write_tiny(tmp_path / "a", seed=4))
    other = Checkpoint.open(write_tiny(tmp_path / "b", seed=4, prefix=prefix, shards=shards, visual=True))
    assert set(plain) == set(other) and len(other.ignored) == 1
    assert plain.config.items() <= other.config.items()
    assert plain.nbytes == other.nbytes
    for name in plain:
        assert plain.view(name).tobytes() == other.view(name).tobytes()
        assert plain[name].shape == other[name].shape


def test_two_spellings_of_one_tensor(tmp_path):
    write_folder(tmp_path, CONFIG, some("model.norm.weight", "model.language_model.norm.weight"))
    refused(tmp_path, "model.norm.weight", "model.language_model.norm.weight", "twice")


# ---- config ------------------------------------------------------------------------------------------------------


def test_nested_config_is_flattened_and_keeps_the_original(tmp_path):
    config = {"model_type": "qwen4_exp", "tie_word_embeddings": True, "vision_config": {"hidden_size": 1},
              "text_config": {"model_type": "qwen4_exp_text", "hidden_size": 64},
              "quantization_config": {"weight_block_size": [2, 3]}}  # fmt: skip
    with Checkpoint.open(write_folder(tmp_path, config, some("a"))) as checkpoint:
        assert checkpoint.config == {"model_type": "qwen4_exp_text", "hidden_size": 64, "tie_word_embeddings": True}
        assert checkpoint.raw_config == config
        assert checkpoint.quantization == {"weight_block_size": [2, 3]}


def test_quantization_may_sit_in_the_text_config(tmp_path):
    config = {"text_config": {"quantization_config": {"weight_block_size": [2, 3]}}}
    with Checkpoint.open(write_folder(tmp_path, config, some("a"))) as checkpoint:
        assert checkpoint.quantization == {"weight_block_size": [2, 3]} and checkpoint.config == {}


BAD_CONFIGS = ("", "[]", "nonsense", '{"a": ', '"x"', "\ufeff{}", "[" * 100_000, '{"text_config": 3}',
               '{"quantization_config": "fp8"}', '{"text_config": [1]}')  # fmt: skip


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_bad_configs(tmp_path, text):
    write_folder(tmp_path, CONFIG, some("a"))
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "config.json")


def test_config_missing_or_binary(tmp_path):
    write_folder(tmp_path, CONFIG, some("a"))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    refused(tmp_path, "UTF-8")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "config.json is missing")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "not a file")


def test_folders_that_hold_no_checkpoint(tmp_path):
    refused(tmp_path / "absent", "no such folder")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "not a folder")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no .safetensors file")
    (tmp_path / "model.bin").touch()
    refused(tmp_path, "only *.bin")
    (tmp_path / "model.gguf").touch()
    refused(tmp_path, "a folder of GGUF files", "model.gguf")


# ---- split files -------------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path):
    return write_folder(tmp_path, CONFIG, some(*"abcde"), shards=3)


def test_without_an_index_all_files_are_read(split):
    (split / INDEX).unlink()
    with Checkpoint.open(split) as checkpoint:
        assert set(checkpoint) == set("abcde")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_split_is_named(split, number, indexed):
    name = f"model-0000{number}-of-00003.safetensors"
    (split / name).unlink()
    if not indexed:
        (split / INDEX).unlink()
    refused(split, name, "of 3")


def test_a_hostile_count_of_splits_costs_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "model-00007-of-999999999.safetensors", some("a"))
    refused(tmp_path, "of 999999999 split files 999999998 missing", "model-000000001-of-999999999.safetensors")


def test_a_tensor_in_two_files(split):
    (split / INDEX).unlink()
    write_safetensors(split / "extra.safetensors", some("b"))
    refused(split, "tensor b", "extra.safetensors", "model-00002-of-00003.safetensors")


def test_index_and_files_must_agree(split):
    good = json.loads((split / INDEX).read_text())

    def with_map(**changes: object) -> None:
        placed = {k: v for k, v in (good["weight_map"] | changes).items() if v != "drop"}
        (split / INDEX).write_text(json.dumps(good | {"weight_map": placed}))

    with_map(z=good["weight_map"]["a"])
    refused(split, "misplaces 1 tensor: z")
    with_map(a=good["weight_map"]["b"])
    refused(split, "misplaces 1 tensor: a")
    with_map(a="drop")
    refused(split, "leaves out 1 tensor: a")
    for hostile in ("../x.safetensors", "/etc/x.safetensors", "a\0.safetensors", "x.bin", 5, None, ["x"]):
        with_map(a=hostile)
        refused(split, "weight_map")
    for text in ("{}", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "x", "a": "y"}}'):
        (split / INDEX).write_text(text)
        refused(split)


def test_a_split_cut_short_is_named(split):
    path = split / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(split, path.name, "truncated")


# ---- reading -----------------------------------------------------------------------------------------------------


def test_views_are_read_only_and_keep_the_file_alive(tmp_path):
    write_folder(tmp_path, CONFIG, some("a"))
    checkpoint = Checkpoint.open(tmp_path)
    view = checkpoint.view("a")
    assert view.dtype == np.uint16 and view.shape == (2, 3) and not view.flags.writeable and not view.flags.owndata
    checkpoint.close()
    checkpoint.close()
    assert view.tobytes() == some("a")["a"][1].tobytes()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.load("a")


def test_an_unaligned_tensor_is_copied(tmp_path):
    values = np.arange(5, dtype=np.float32)
    head, _ = header_bytes({"q": ("F8_E4M3", (3,)), "a": ("F32", (5,)), "e": ("F32", (0, 2))})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(head + b"abc" + values.tobytes())
    with Checkpoint.open(tmp_path) as checkpoint:
        view = checkpoint.view("a")
        assert view.flags.aligned and not view.flags.writeable and (view == values).all()
        assert checkpoint.load("a").tobytes() == values.tobytes()
        assert checkpoint.view("e").shape == checkpoint.load("e").shape == (0, 2)


def test_read_into_copies_the_bytes_asked_for(tmp_path):
    with Checkpoint.open(write_tiny(tmp_path, tiny_config(), dtype="BF16")) as checkpoint:
        name = "embed_tokens.weight"
        raw = checkpoint.view(name).tobytes()
        assert checkpoint.load(name).tobytes() == raw
        buffer = bytearray(40)
        checkpoint.read_into(checkpoint[name], memoryview(buffer), 100, 37)
        assert bytes(buffer) == raw[100:137] + bytes(3)
        with pytest.raises(ValueError):
            checkpoint.read_into(checkpoint[name], memoryview(buffer), len(raw) - 10, 37)
        parts = [memoryview(bytearray(3)) for _ in range(1500)]
        assert checkpoint.preadv(checkpoint[name].path, parts, checkpoint[name].offset) == 4500
        assert b"".join(parts) == raw[:4500]
        with pytest.raises(ModelError, match="absent"):
            checkpoint["absent"]


def test_failed_reads_name_tensor_file_and_errno(tmp_path, monkeypatch):
    write_folder(tmp_path, CONFIG, some("a"))
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 20)
        with pytest.raises(ReadError, match=r"model.safetensors.*tensor a.*unexpected end"):
            checkpoint.load("a")
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(ReadError, match="errno 5"):
            checkpoint.load("a")


def test_short_reads_are_continued(tmp_path, monkeypatch):
    with Checkpoint.open(write_tiny(tmp_path)) as checkpoint:
        exact = checkpoint.view("embed_tokens.weight").tobytes()
        real = os.preadv

        def stingy(fd, buffers, offset):
            return real(fd, [buffers[0][:1000]], offset)

        monkeypatch.setattr(os, "preadv", stingy)
        assert checkpoint.load("embed_tokens.weight").tobytes() == exact


def test_a_huge_folder_opens_quickly(tmp_path):
    """130 files, 60,000 tensors."""
    (tmp_path / "config.json").write_text("{}")
    for shard in range(130):
        names = {f"model.layers.{shard}.mlp.experts.{i}.gate_proj.weight": ("F8_E4M3", (1, 2)) for i in range(462)}
        head, _ = header_bytes(names)
        (tmp_path / f"model-{shard + 1:05d}-of-00130.safetensors").write_bytes(head + bytes(2 * len(names)))
    start = time.perf_counter()
    with Checkpoint.open(tmp_path) as checkpoint:
        assert len(checkpoint.tensors) == 60_060
    assert time.perf_counter() - start < 5  # 0.5 s alone on one core; the machine may be busy


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_collection_is_left_as_it_was(tmp_path, collects):
    whole, torn = write_tiny(tmp_path / "whole"), write_tiny(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"\x08")
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        Checkpoint.open(whole).close()
        assert gc.isenabled() == collects
        with pytest.raises(ModelError):
            Checkpoint.open(torn)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if was else gc.disable)()


def test_a_system_that_takes_no_advice_reads_all_the_same(tmp_path, monkeypatch):
    folder = write_tiny(tmp_path / "m", shards=3)
    with Checkpoint.open(folder) as checkpoint:
        names = set(checkpoint)

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint) == names
    monkeypatch.delattr(os, "posix_fadvise")
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint) == names
