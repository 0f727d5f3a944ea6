"""A GGUF file becomes a checkpoint: the walk against GGUFReader, the translation against the folder it was made from,
and every damage one ModelError that names the file."""

from __future__ import annotations

import mmap
import os
import re
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from coli.errors import ModelError
from coli.formats.checkpoint import Checkpoint, Traits
from coli.formats.gguf import Header, Strings, read_header
from coli.formats.safetensors import Tensor
from coli.models import qwen36_geometry, qwen36_layout, qwen38_layout
from tests.formats import gguf_bytes as raw
from tests.formats.gguf_bytes import ARRAY, BOOL, F32, STRING, U8, U16, U32, U64, file, key, listed, tensor, text
from tests.gguf_blocks import encode
from tests.gguf_files import architecture, layout, values_of, write_gguf
from tests.tiny import odd_config, tiny_config, tiny_weights
from tests.tiny36 import FAMILIES, HEADED, block36_config, odd36_config, tiny36_config, tiny36_weights

ALL = [*FAMILIES, "qwen4_exp_text"]
ENGINES = {family: (qwen36_geometry.geometry, qwen36_layout) for family in FAMILIES}
ENGINES["qwen4_exp_text"] = (qwen38_layout.geometry, qwen38_layout)


def config_of(family: str, odd: bool = False) -> dict[str, Any]:
    if family == "qwen4_exp_text":
        return odd_config(output_gate_type="sigmoid") if odd else tiny_config()
    return odd36_config(family) if odd else tiny36_config(family)


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    return tiny_weights(config) if config["model_type"] == "qwen4_exp_text" else tiny36_weights(config)


def write(path: Path, family: str, **options: Any) -> Path:
    config = config_of(family)
    return write_gguf(path, config, weights_of(config), **options)


def walk(path: Path) -> Header:
    with open(path, "rb") as stream:
        return read_header(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), path)


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(path).close()
    message = str(caught.value)
    assert str(path.parent) in message and caught.value.hint and "\n" not in message
    for word in words:
        assert re.search(word, message), message
    return message


def same(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, Strings):
        return list(ours) == theirs
    return np.array_equal(np.asarray(theirs), np.asarray(ours), equal_nan=np.asarray(ours).dtype.kind == "f")


# ---- the walk --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_the_walk_finds_what_ggufreader_finds(tmp_path: Path, family: str) -> None:
    types = {"ffn_down_exps.weight": "Q8_0", "": "BF16", "attn_q.weight": "Q4_0"}
    path = write(tmp_path / "a.gguf", family, types=types)
    theirs, ours = gguf.GGUFReader(path), walk(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert list(fields) == list(ours.metadata) and ours.version == 3 and ours.alignment == theirs.alignment
    for name, field in fields.items():
        assert same(field.contents(), ours.metadata[name]), name
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for t in theirs.tensors:
        shape = tuple(int(n) for n in t.shape)[::-1]
        assert ours.tensors[t.name] == Tensor(t.name, t.tensor_type.name, shape, path, t.data_offset, t.n_bytes)


def test_values_of_every_type(tmp_path: Path) -> None:
    numbers = {U8: 255, raw.I8: -128, U16: 65535, raw.I16: -32768, U32: 2**32 - 1, raw.I32: -(2**31), F32: 0.1, BOOL: 1,
               U64: 2**64 - 1, raw.I64: -(2**63), raw.F64: 0.1}  # fmt: skip
    keys = [key(f"n{kind}", kind, value) for kind, value in numbers.items()]
    keys += [key(f"a{kind}", ARRAY, listed(kind, [value, 0, value])) for kind, value in numbers.items()]
    keys += [key(f"e{kind}", ARRAY, listed(kind, [])) for kind in (*numbers, STRING)]
    keys += [key("text", STRING, "é\n"), key("no", STRING, "")]
    keys += [key("texts", ARRAY, listed(STRING, ["", "é", "b" * 300]))]
    path = tmp_path / "a.gguf"
    path.write_bytes(file(keys))
    found, theirs = walk(path).metadata, gguf.GGUFReader(path)
    assert len(found) == len(keys) and found["text"] == "é\n" and found["no"] == ""
    for kind, value in numbers.items():
        expected = struct.unpack("<f", struct.pack("<f", value))[0] if kind == F32 else value
        assert found[f"n{kind}"] == expected and type(found[f"n{kind}"]) is (bool if kind == BOOL else type(value))
        assert found[f"a{kind}"].tolist() == [expected, 0, expected] and not len(found[f"e{kind}"])
        assert same(theirs.fields[f"a{kind}"].contents(), found[f"a{kind}"])
    texts = found["texts"]
    assert list(texts) == ["", "é", "b" * 300] and texts[1] == texts[-2] == "é" and texts[1:] == ["é", "b" * 300]
    assert len(texts) == 3 and not len(found[f"e{STRING}"]) and list(found[f"e{STRING}"]) == []
    with pytest.raises(IndexError):
        texts[3]


def test_a_string_that_is_no_text_is_found_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(file([key("words", ARRAY, struct.pack("<IQ", STRING, 2) + text("fine") + text(b"\xff"))]))
    words = walk(path).metadata["words"]
    assert words[0] == "fine"
    with pytest.raises(ModelError, match=r"a.gguf: words\[1\] is not UTF-8"):
        list(words)


def test_a_large_vocabulary_opens_at_once(tmp_path: Path) -> None:
    """248,000 tokens and as many merges: 0.1 s of one core, where GGUFReader takes 11 s."""
    tokens = b"".join(text(f"token{i}") for i in range(248_320))
    keys = [key(name, ARRAY, struct.pack("<IQ", STRING, 248_320) + tokens) for name in ("tokens", "merges")]
    path = tmp_path / "a.gguf"
    path.write_bytes(file(keys))
    start = time.thread_time()
    found = walk(path).metadata["merges"]
    assert time.thread_time() - start < 0.6
    assert len(found) == 248_320 and found[248_319] == "token248319"


# ---- the translation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("family", ALL)
def test_config_and_names_are_those_of_the_folder(tmp_path: Path, family: str, odd: bool) -> None:
    config = config_of(family, odd)
    make, engine = ENGINES[family]
    with Checkpoint.open(write_gguf(tmp_path / "a.gguf", config, weights_of(config))) as checkpoint:
        shards = {"ngram_parts": 1} if family == "qwen4_exp_text" else {}  # a GGUF has the table in one piece
        assert make(checkpoint.config) == replace(make(config), **shards)
        assert checkpoint.config["rms_norm_eps"] == 1e-6
        engine.check(checkpoint, make(checkpoint.config))
        if family in (*HEADED, "qwen4_exp_text"):
            engine.check_head(checkpoint, make(checkpoint.config))


@pytest.mark.parametrize("family", ALL)
def test_what_a_name_cannot_say_is_a_trait(tmp_path: Path, family: str) -> None:
    with Checkpoint.open(write(tmp_path / "a.gguf", family)) as checkpoint:
        tiled = family in ("qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp_text")
        assert checkpoint.traits == Traits(gguf=True, norms_folded=True, decay_ready=True, tiled=tiled)
        assert checkpoint.folder == tmp_path / "a.gguf" and checkpoint.quantization == {} and not checkpoint.ignored
        assert checkpoint.raw_config == {"eos_token_id": [checkpoint.metadata["tokenizer.ggml.eos_token_id"]]}
    assert Traits() == Traits(False, False, False, False)


UNCHANGED = (
    "embed_tokens.weight", "lm_head.weight", "layers.3.self_attn.q_proj.weight", "layers.1.mlp.gate.weight",
    "layers.0.mlp.down_proj.weight", "layers.0.mlp.shared_expert_gate.weight", "layers.2.mlp.experts.down_proj",
    "mtp.fc.weight", "mtp.fc_hidden.weight", "mtp.fc_embedding.weight", "mtp.layers.0.self_attn.k_proj.weight",
    "mtp.layers.0.mlp.experts.down_proj", "layers.1.ple.conv1d.weight",
    "layers.1.ple.ple_embedding.ngram_embedding.weight", "layers.5.ple.ple_embedding.ngram_embedding.weight",
    "layers.3.attn_hyper_connection.block_inject_weight.weight",
)  # fmt: skip


@pytest.mark.parametrize("family", ALL)
def test_weights_are_the_folders(tmp_path: Path, family: str) -> None:
    """Of what the converter neither reorders nor changes, every value; of the rest the value it made of it."""
    config = config_of(family)
    weights = weights_of(config)
    with Checkpoint.open(write_gguf(tmp_path / "a.gguf", config, weights)) as checkpoint:
        for name in UNCHANGED:
            assert (name in checkpoint) == (name in weights), name
            if name in weights:
                assert np.array_equal(checkpoint.load(name), weights[name]), name
        if family != "qwen3_5_text":
            both, stem = weights["layers.1.mlp.experts.gate_up_proj"], "layers.1.mlp.experts."
            half = both.shape[1] // 2
            assert np.array_equal(checkpoint.view(f"{stem}gate_proj"), both[:, :half])
            assert np.array_equal(checkpoint.view(f"{stem}up_proj"), both[:, half:])
        if family != "qwen3_moe":
            heads = np.arange(6).reshape(2, 3).T.reshape(-1) if checkpoint.traits.tiled else np.arange(6)
            assert np.array_equal(checkpoint.view("layers.0.linear_attn.A_log"),
                                  -np.exp(weights["layers.0.linear_attn.A_log"][heads]))  # fmt: skip
            conv = weights["layers.0.linear_attn.conv1d.weight"]
            assert checkpoint["layers.0.linear_attn.conv1d.weight"].shape == conv.shape
        norm = "layers.3.self_attn.q_norm.weight"
        folded = np.float32(family != "qwen3_moe")
        assert np.array_equal(checkpoint.view(norm), weights[norm] + folded)


def test_old_files_and_fused_experts(tmp_path: Path) -> None:
    with Checkpoint.open(write(tmp_path / "a.gguf", "qwen3_next", old=True, fused_experts=True)) as checkpoint:
        assert {"layers.0.linear_attn.in_proj_qkvz.weight", "layers.0.mlp.experts.gate_up_proj"} < set(checkpoint)
        qwen36_layout.check(checkpoint, qwen36_geometry.geometry(checkpoint.config))


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_K", "IQ4_XS", "BF16", "F16"])
def test_quantised_tensors_are_their_bytes(tmp_path: Path, dtype: str) -> None:
    config = block36_config("qwen3_5_moe_text")
    weights, arch = tiny36_weights(config), "qwen35moe"
    stored = layout(config, weights)
    with Checkpoint.open(write_gguf(tmp_path / "a.gguf", config, weights, types=dtype)) as checkpoint:
        for ours, theirs in (("layers.3.self_attn.o_proj.weight", "blk.3.attn_output.weight"),
                             ("layers.0.linear_attn.out_proj.weight", "blk.0.ssm_out.weight"),
                             ("layers.1.mlp.experts.up_proj", "blk.1.ffn_up_exps.weight")):  # fmt: skip
            expected = encode(values_of(arch, theirs, stored[theirs]), dtype)
            view, entry = checkpoint.view(ours), checkpoint[ours]
            assert entry.dtype == dtype and entry.shape == stored[theirs].shape and entry.nbytes == expected.nbytes
            assert view.shape == expected.shape[:-1] + (view.shape[-1],) and not view.flags.writeable
            assert view.tobytes() == checkpoint.load(ours).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q8_0", "Q4_1"])
def test_columns_of_a_wider_matrix_read_like_a_matrix(tmp_path: Path, dtype: str) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    with Checkpoint.open(write_gguf(tmp_path / "a.gguf", config, weights, types=dtype)) as checkpoint:
        for name in ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight"):
            entry, view = checkpoint[name], checkpoint.view(name)
            expected = encode(weights[name], dtype)
            assert entry.shape == (64, 64) and entry.pitch == 2 * entry.nbytes // 64
            assert view.flags.c_contiguous and not view.flags.writeable and view.tobytes() == expected.tobytes()
            assert checkpoint.load(name).tobytes() == expected.tobytes()
            for start, count in ((0, entry.nbytes), (5, 3), (7, entry.nbytes - 9), (entry.nbytes - 1, 1), (9, 0)):
                buffer = bytearray(count)
                checkpoint.read_into(entry, memoryview(buffer), start, count)
                assert buffer == expected.tobytes()[start : start + count]


def test_a_matrix_that_does_not_come_apart_is_refused(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=48)  # 2 * 48 columns are whole blocks, 48 are not
    path = write_gguf(tmp_path / "a.gguf", config, tiny_weights(config), types={"eh_proj.weight": "Q8_0"})
    refused(path, "eh_proj", "no two matrices")


# ---- keys ------------------------------------------------------------------------------------------------------------

DEFAULTS = {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "full_attention_interval", "nextn_predict_layers", "rope.dimension_sections", "ple.layers", "vocab_size",
}  # fmt: skip


def changed(tmp_path: Path, family: str, **changes: Any) -> Path:
    """A file with some keys of its architecture set anew, or left out (None)."""
    def change(facts: dict[str, Any]) -> None:
        arch = architecture(config_of(family))
        for name, value in changes.items():
            full = name.replace("__", ".") if "__" in name else f"{arch}.{name}"
            facts[full] = value
            if value is None:
                del facts[full]

    return write(tmp_path / "a.gguf", family, change=change)


@pytest.mark.parametrize("family", ALL)
def test_a_missing_key_is_named(tmp_path: Path, family: str) -> None:
    path, arch = write(tmp_path / "a.gguf", family), architecture(config_of(family))
    content = path.read_bytes()
    unused = {"feed_forward_length"} if family != "qwen3_5_text" else set()
    names = {n.removeprefix(f"{arch}.") for n in walk(path).metadata if n.startswith(f"{arch}.")} - DEFAULTS - unused
    assert len(names) > 8
    for name in names:
        full = f"{arch}.{name}"
        path.write_bytes(content.replace(text(full), text(full[:-1] + "?")))
        refused(path, f"{full}: missing")
    refused(changed(tmp_path, family, context_length="x"), "context_length: a value of type str, expected int")


def test_layers_are_told_by_their_key_value_heads(tmp_path: Path) -> None:
    heads = [0, 2, 0, 2, 0, 0, 0, 2, 2]  # the last one is the draft head's block
    with pytest.raises(ModelError, match="missing tensors|missing.*unknown"):
        path = changed(tmp_path, "qwen3_5_moe_text", **{"attention.head_count_kv": heads})
        with Checkpoint.open(path) as checkpoint:
            kinds = checkpoint.config["layer_types"]
            assert [kind == "full_attention" for kind in kinds] == [bool(n) for n in heads[:8]]
            assert checkpoint.config["num_key_value_heads"] == 2
            qwen36_layout.check(checkpoint, qwen36_geometry.geometry(checkpoint.config))
    for wrong in ([0, 2], [1, 2] * 4 + [0], [0] * 9):
        refused(changed(tmp_path, "qwen3_5_moe_text", **{"attention.head_count_kv": wrong}), "head_count_kv")
    with Checkpoint.open(changed(tmp_path, "qwen3_5_moe_text", full_attention_interval=None)) as checkpoint:
        assert checkpoint.config["layer_types"][3] == "full_attention"


def test_a_draft_head_is_told_by_its_tensors(tmp_path: Path) -> None:
    with Checkpoint.open(changed(tmp_path, "qwen3_5_moe_text", nextn_predict_layers=None)) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 8 and "mtp.fc.weight" in checkpoint

    def left_over(blocks: int) -> Path:
        """A file whose head was taken out but for the key."""
        keys = {"qwen35moe.block_count": blocks, "qwen35moe.nextn_predict_layers": 1}
        return write(tmp_path / "b.gguf", "qwen3_5_moe_text", mtp=False, change=lambda facts: facts.update(keys))

    with Checkpoint.open(left_over(9)) as checkpoint:
        assert checkpoint.config["num_hidden_layers"] == 8 and not any(n.startswith("mtp.") for n in checkpoint)
    # block 7 is the trunk's last: to take it for a head would drop a layer without a word
    refused(left_over(8), "nextn_predict_layers: block 7 would be a draft head")


@pytest.mark.parametrize(("changes", "message"), [
    ({"block_count": 0}, "block_count: 0"), ({"block_count": 5000}, "block_count: 5000"),
    ({"nextn_predict_layers": 9}, "block_count: 9 with 9"), ({"full_attention_interval": 0}, "interval"),
    ({"ssm.inner_size": 97}, "ssm.inner_size"), ({"ssm.time_step_rank": 0}, "ssm.inner_size"),
    ({"rope.dimension_count": 33}, "rope.dimension_count"), ({"rope.dimension_count": 0}, "rope.dimension_count"),
    ({"attention.value_length": 31}, "value_length"), ({"attention.head_count": [4, 5] * 4 + [4]}, "head_count"),
    ({"expert_gating_func": 2}, "softmax"), ({"block_count": 8}, "block 7 would be a draft head"),
    ({"tokenizer__ggml__eos_token_id": "x"}, "eos_token_id"),
    ({"general__architecture": None}, "no general.architecture"), ({"general__architecture": 7}, "architecture 7"),
])  # fmt: skip
def test_absurd_keys(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "general__architecture" in changes:
        keys = [] if changes["general__architecture"] is None else [key("general.architecture", U32, 7)]
        (tmp_path / "a.gguf").write_bytes(file(keys))
        refused(tmp_path / "a.gguf", message)
    else:
        refused(changed(tmp_path, "qwen3_5_moe_text", **changes), message)


@pytest.mark.parametrize(("changes", "message"), [
    ({"ple.layers": [5, 1]}, "ple.layers"), ({"ple.layers": [1, 8]}, "ple.layers"), ({"ple.layers": [1]}, "sizes for"),
    ({"ple.layers": None}, "no layer uses"), ({"ple.ngram_size": 1}, "head_vocab_sizes"),
    ({"ple.head_offsets": [0] * 8}, "head_offsets"), ({"ple.head_offsets": [0, 1, 2, 3]}, "head_offsets"),
    ({"ple.layer_multipliers": [1]}, "layer_multipliers"), ({"ple.layer_multipliers": [-1] * 6}, "layer_multipliers"),
    ({"attention.compress_ratios": [4, 2] * 4 + [4]}, "compress_ratios"),
])  # fmt: skip
def test_absurd_keys_of_the_ngram_tables(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    refused(changed(tmp_path, "qwen4_exp_text", **changes), message)


def test_hash_constants_must_be_those_of_the_config(tmp_path: Path) -> None:
    with Checkpoint.open(changed(tmp_path, "qwen4_exp_text", **{"ple.layer_multipliers": [3] * 6})) as checkpoint:
        made = qwen38_layout.geometry(checkpoint.config)
        with pytest.raises(ModelError, match="layer_multipliers: the checkpoint's hash constants differ"):
            qwen38_layout.check(checkpoint, made)


def test_scaled_positions_are_not_silently_plain(tmp_path: Path) -> None:
    with Checkpoint.open(changed(tmp_path, "qwen3_moe", **{"rope.scaling.type": "yarn"})) as checkpoint, pytest.raises(
        ModelError, match="rope_type: yarn is not supported"
    ):
        qwen36_geometry.geometry(checkpoint.config)
    with Checkpoint.open(changed(tmp_path, "qwen3_moe", **{"rope.scaling.type": "none"})) as checkpoint:
        assert qwen36_geometry.geometry(checkpoint.config).rotary_dim == 32


# ---- names -----------------------------------------------------------------------------------------------------------


def renamed(path: Path, old: str, new: str) -> Path:
    content = path.read_bytes()
    assert len(old) == len(new) and content.count(text(old)) == 1
    path.write_bytes(content.replace(text(old), text(new)))
    return path


@pytest.mark.parametrize(("old", "new"), [
    ("blk.0.attn_qkv.weight", "blk.0.attn_qkX.weight"), ("blk.3.attn_q.weight", "blk.03attn_q.weight"),
    ("blk.1.ssm_a", "blk.x.ssm_a"), ("output_norm.weight", "output_nor\n.weight"), ("blk.1.ssm_a", "blk.9.ssm_a"),
    ("blk.8.nextn.enorm.weight", "blk.7.nextn.enorm.weight"), ("blk.0.ssm_norm.weight", "blk.0.ffn_norm.weight"),
])  # fmt: skip
def test_unknown_names_are_refused(tmp_path: Path, old: str, new: str) -> None:
    path = renamed(write(tmp_path / "a.gguf", "qwen3_5_moe_text"), old, new)
    refused(path, "1 tensor that qwen35moe has not: ")


def test_names_of_an_early_fork_and_of_other_architectures(tmp_path: Path) -> None:
    path = renamed(write(tmp_path / "a.gguf", "qwen4_exp_text"), "blk.8.nextn.enorm.weight", "mtp.pre_fc_enorm0.weight")
    refused(path, "early converter: mtp.pre_fc_enorm0.weight", "convert the model again")
    path.write_bytes(file([key("general.architecture", STRING, "llama")]))
    refused(path, "architecture llama is not supported", "qwen35moe, qwen35, qwen3next, qwen3moe, qwen4exp")


def test_without_an_embedding(tmp_path: Path) -> None:
    path = renamed(write(tmp_path / "a.gguf", "qwen3_moe"), "token_embd.weight", "token_embe.weight")
    refused(path, "token_embd.weight is missing")


# ---- split files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    first = write(tmp_path / "m.gguf", "qwen3_5_moe_text", splits=3)
    assert first.name == "m-00001-of-00003.gguf"
    return sorted(tmp_path.glob("m-*.gguf"))


def test_parts_are_one_checkpoint(tmp_path: Path, parts: list[Path]) -> None:
    whole = write(tmp_path / "whole.gguf", "qwen3_5_moe_text")
    with Checkpoint.open(parts[0]) as split, Checkpoint.open(whole) as one:
        assert set(split) == set(one) and split.config == one.config and split.nbytes == one.nbytes
        assert {t.path for t in split.tensors.values()} == set(parts)
        assert all(split.view(name).tobytes() == one.load(name).tobytes() for name in one)
        with pytest.raises(ValueError, match="closed"):
            split.close()
            split.load("norm.weight")


def test_a_later_part_names_the_first(parts: list[Path]) -> None:
    refused(parts[1], "part 2 of 3", "m-00001-of-00003.gguf")
    refused(parts[2].rename(parts[2].with_name("other.gguf")), "part 3 of 3", "00001")


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    refused(parts[0], "of 3 parts 1 missing: m-00002-of-00003.gguf", "download the missing")


def test_joined_parts_are_told_what_to_do(tmp_path: Path, parts: list[Path]) -> None:
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    refused(joined, "bytes follow the last tensor", "joined", "keep the split files")
    refused(parts[0].rename(tmp_path / "renamed.gguf"), "part 1 of 3", "NAME-00001-of-00003.gguf")


def test_parts_that_do_not_belong_together(tmp_path: Path, parts: list[Path]) -> None:
    def patched(part: Path, name: str, kind: int, old: int, new: int) -> None:
        content, saved = part.read_bytes(), part.with_suffix(".saved")
        if not saved.exists():
            shutil.copy(part, saved)
        assert key(name, kind, old) in content
        part.write_bytes(content.replace(key(name, kind, old), key(name, kind, new)))

    total = len(write_and_count(tmp_path))
    for name, kind, old, new in (("split.no", U16, 1, 2), ("split.no", U16, 1, 0), ("split.count", U16, 3, 4),
                                 ("split.tensors.count", raw.I32, total, total + 1)):  # fmt: skip
        patched(parts[1], name, kind, old, new)
        refused(parts[0], "expected part 2 of 3 with", "found part")
        shutil.move(parts[1].with_suffix(".saved"), parts[1])
    for part in parts:
        patched(part, "split.tensors.count", raw.I32, total, total - 1)
    refused(parts[0], f"the parts hold {total} tensors, the first one says {total - 1}")
    for part in parts:
        shutil.move(part.with_suffix(".saved"), part)
    patched(parts[0], "split.no", U16, 0, 7)
    refused(parts[0], "no part of anything")


def write_and_count(tmp_path: Path) -> dict[str, Tensor]:
    return walk(write(tmp_path / "whole.gguf", "qwen3_5_moe_text")).tensors


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    def part(number: int) -> bytes:
        keys = [key("split.no", U16, number), key("split.count", U16, 2), key("split.tensors.count", U32, 2)]
        return file(keys, [tensor("token_embd.weight", [8])], bytes(32))

    for number in (0, 1):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(part(number))
    refused(tmp_path / "m-00001-of-00002.gguf", "1 tensor also in an earlier part: token_embd.weight")


def test_a_folder_of_gguf_files_says_which_to_give(tmp_path: Path, parts: list[Path]) -> None:
    (tmp_path / "mmproj-F16.gguf").touch()
    message = refused(tmp_path / ".", "a folder of GGUF files", "give the file itself: m-00001-of-00003.gguf")
    assert "00002" not in message and "mmproj" not in message
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path / ".", "a folder of GGUF files")


# ---- damage ----------------------------------------------------------------------------------------------------------

ARCH = key("general.architecture", STRING, "qwen35moe")
ONE = tensor("a", [8])


def broken(**changes: Any) -> bytes:
    return file(**({"keys": [ARCH], "tensors": [ONE], "data": bytes(32)} | changes))


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes are too short"),
    "magic only": (b"GGUF", "4 bytes are too short"),
    "another file": (b"PK\3\4" + bytes(40), "not a GGUF file"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "GGML": (b"lmgg" + bytes(40), "the format before GGUF"),
    "version 0": (broken(version=0), "GGUF version 0"),
    "version 1": (broken(version=1), "GGUF version 1, this reads 2 and 3.*convert"),
    "version 4": (broken(version=4), "GGUF version 4.*newer"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "byte-swapped magic": (b"FUGG" + bytes(40), "big-endian"),
    "absurd tensors": (broken(tensor_count=1 << 60), "claims 1152921504606846976 tensors, over the limit"),
    "more tensors than bytes": (broken(tensor_count=50), "claims 50 tensors, and has room for"),
    "absurd keys": (broken(key_count=(1 << 64) - 1), "claims 18446744073709551615 keys, over the limit"),
    "more keys than bytes": (broken(key_count=900), "claims 900 keys, and has room for"),
    "one key too many": (broken(key_count=2), "the name of a tensor is empty"),
    "a key of absurd length": (file([text(b"k" * 9, 1 << 63)]), "the name of a key claims 9223372036854775808"),
    "a key of no text": (file([key(b"\xff\xfe", U8, 1)] * 2), "the name of a key is not UTF-8"),
    "a key without a name": (broken(keys=[key("", U8, 1)]), "the name of a key is empty"),
    "a key twice": (broken(keys=[ARCH, ARCH]), "key general.architecture is listed twice"),
    "a value of an unknown type": (broken(keys=[key("k", 13, b"")]), "key k has the unknown type 13"),
    "a string over the limit": (broken(keys=[key("k", STRING, text(b"", 1 << 25))]), "key k claims 33554432 bytes"),
    "a string beyond the end": (broken(keys=[key("k", STRING, text(b"", 1 << 20))]), "truncated inside key k"),
    "a string of no text": (broken(keys=[key("k", STRING, text(b"\xff"))]), "key k is not UTF-8"),
    "an array of arrays": (broken(keys=[key("k", ARRAY, listed(ARRAY, [], 3))]), "key k is an array of arrays"),
    "an array of nothing known": (broken(keys=[key("k", ARRAY, struct.pack("<IQ", 77, 1))]), "unknown type 77"),
    "an array beyond the end": (broken(keys=[key("k", ARRAY, listed(U32, [], 1 << 40))]), "truncated inside key k"),
    "an array of overflow": (broken(keys=[key("k", ARRAY, listed(U64, [], 1 << 61))]), "truncated inside key k"),
    "absurd strings": (broken(keys=[key("k", ARRAY, listed(STRING, [], 1 << 62))]), "strings in k, over the limit"),
    "strings beyond the end": (broken(keys=[key("k", ARRAY, listed(STRING, [], 1 << 16))]), "in k, and has room"),
    "a long string in an array": (
        broken(keys=[key("k", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"", (1 << 64) - 8) + text(""))]),
        "truncated inside key k"),
    "a string too long by one": (
        file([key("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"ab", 3))]), "truncated inside key k"),
    "alignment 0": (broken(keys=[key("general.alignment", U32, 0)]), "general.alignment 0 is not a power of two"),
    "alignment 48": (broken(keys=[key("general.alignment", U32, 48)]), "general.alignment 48"),
    "alignment of text": (broken(keys=[key("general.alignment", STRING, "32")]), "general.alignment"),
    "alignment of the whole disk": (broken(keys=[key("general.alignment", U32, 1 << 31)]), "truncated"),
    "nine dimensions": (broken(tensors=[tensor("a", [1] * 9)]), "tensor a has 9 dimensions"),
    "absurd dimensions": (broken(tensors=[tensor("a", [2], rank=1 << 31)]), "tensor a has 2147483648 dimensions"),
    "a tensor twice": (broken(tensors=[ONE, ONE]), "tensor a is listed twice"),
    "a tensor of no text": (broken(tensors=[tensor(b"\xff", [8])]), "the name of a tensor is not UTF-8"),
    "a dropped type": (broken(tensors=[tensor("a", [8], 4)]), "tensor a has the unknown type 4"),
    "a type to come": (broken(tensors=[tensor("a", [8], 1 << 31)]), "unknown type 2147483648"),
    "an absurd dimension": (broken(tensors=[tensor("a", [1 << 63])]), "dimensions .9223372036854775808. are absurd"),
    "dimensions that overflow": (broken(tensors=[tensor("a", [1 << 32] * 4)]), "tensor a: truncated"),
    "half a block": (broken(tensors=[tensor("a", [48], 8)]), "rows of 48 are no whole blocks of Q8_0"),
    "no block at all": (broken(tensors=[tensor("a", [], 8)]), "rows of 1 are no whole blocks"),
    "unaligned": (broken(tensors=[tensor("a", [8], 0, 4)]), "tensor a: its offset 4 is not aligned to 32"),
    "outside": (broken(tensors=[tensor("a", [8], 0, 32)]), "tensor a: truncated: its data ends"),
    "far outside": (broken(tensors=[tensor("a", [8], 0, 1 << 63)]), "tensor a: truncated"),
    "larger than the file": (broken(tensors=[tensor("a", [9])]), "tensor a: truncated"),
    "overlap": (broken(tensors=[ONE, tensor("b", [8], 1)]), "tensor b: its bytes overlap those of a|a: its bytes"),
    "bytes behind the last": (broken(data=bytes(64)), "32 bytes follow the last tensor"),
    "bytes behind the header": (file([ARCH]) + bytes(40), "40 bytes follow the last tensor"),
    "a name with a newline": (broken(tensors=[tensor("a\nb", [8], 4)]), r"tensor a\\nb has"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    refused(path, message)


@pytest.mark.parametrize(("name", "message"), [
    ("strings", "strings in k, over"), ("keys", "keys, over"), ("text", "texts of more than"),
    ("zeros", "the name of a key is empty"),
])  # fmt: skip
def test_a_huge_file_of_holes_takes_no_time(tmp_path: Path, name: str, message: str) -> None:
    """64 GB that would make every count possible."""
    content = {
        "strings": broken(keys=[key("k", ARRAY, listed(STRING, [], 1 << 30))]), "keys": broken(key_count=1 << 30),
        "text": broken(keys=[], key_count=100), "zeros": broken(keys=[], key_count=1 << 16),
    }[name]  # fmt: skip
    path = tmp_path / "a.gguf"
    with open(path, "wb") as stream:
        stream.write(content)
        if name == "text":
            at = 24
            for number in range(20):
                stream.seek(at)
                stream.write(text(f"k{number}") + struct.pack("<IQ", STRING, 16 << 20))
                at = stream.tell() + (16 << 20)
        stream.truncate(64 << 30)
    start = time.thread_time()
    refused(path, message)
    assert time.thread_time() - start < 2


def test_what_is_padding_and_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for data in (bytes(20), bytes(32)):  # with and without the padding a writer adds
        path.write_bytes(broken(tensors=[tensor("a", [5])], data=data))
        assert list(walk(path).tensors) == ["a"]
    for extra, alignment in ((33, 32), (64, 32), (65, 64)):
        keys = [ARCH, key("general.alignment", U32, alignment)]
        path.write_bytes(file(keys, [tensor("a", [5])], bytes(extra), align=alignment))
        if extra > alignment:
            refused(path, "follow the last tensor")
        else:
            assert walk(path).alignment == 64


def test_dimensions_come_in_our_order(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    tensors = [tensor("a", [4, 3, 2, 1]), tensor("s", [], 0, 96), tensor("e", [8, 0], 0, 128)]
    path.write_bytes(file([], tensors, bytes(128)))
    assert [t.shape for t in walk(path).tensors.values()] == [(1, 2, 3, 4), (), (0, 8)]


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """Every byte of the header, and a few of the data: what was cut is named."""
    config = tiny36_config("qwen3_moe", num_hidden_layers=1)
    path = write_gguf(tmp_path / "a.gguf", config, tiny36_weights(config))
    tensors = walk(path).tensors.values()
    data, last = min(t.offset for t in tensors), max(t.offset + t.nbytes for t in tensors)
    seen: set[str] = set()
    for length in [last - 1, *range(last, data, -9973), *range(data, -1, -5)]:
        os.truncate(path, length)
        if length < last:
            seen.add(re.sub(r"\d+", "N", refused(path, "too short|truncated inside|truncated: its data|room for")))
    assert {"key", "entry", "data"} <= {word for message in seen for word in message.split()}


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("absent.gguf", "pipe.gguf"):
        refused(tmp_path / name, "cannot open|not a regular file")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "config.json is missing")
