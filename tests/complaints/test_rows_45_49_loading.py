"""Rows 45 to 49 of the complaints: what is not whole is refused before a weight is read, with exit code 3 and one line
that names the file, the tensor where there is one, and what to do.

The readers' own tests cut and damage everywhere (tests/formats); here is what a user at the command line gets of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coli.commands._errors import describe, printable
from coli.errors import ColiError, ModelError
from coli.formats.safetensors import STORAGE, read_header
from coli.tokenizer import Tokenizer
from tests.containers import write_container, write_sidecar
from tests.formats.test_fuzz import look
from tests.formats.test_gguf import HOSTILE as HOSTILE_GGUF
from tests.formats.test_safetensors import HOSTILE, pack
from tests.gguf_files import write_gguf
from tests.tiny import Stored, tiny_config, tiny_weights, write_safetensors, write_tiny
from tests.tiny36 import FAMILIES, tiny36_config, tiny36_weights, write_tiny36

MOE, CODER, FLASH = "qwen3_5_moe_text", "qwen3_moe", "qwen4_exp_text"
AGAIN = "download the file again"


@pytest.fixture
def refused(coli) -> Callable[..., str]:
    """Runs `coli run hi --model PATH`, which must fail as it should; returns its line."""

    def call(model: Path, *words: str) -> str:
        done = coli("run", "hi", "--quiet", "--model", str(model))
        assert (done.returncode, done.stdout) == (3, ""), done.stderr
        line = done.stderr
        assert line.startswith("coli: ") and line.count("\n") == 1 and line.endswith(")\n"), line
        for word in words:
            assert word in line, line
        return line

    return call


def shards(folder: Path) -> list[Path]:
    """The three files of a folder's weights."""
    write_tiny36(folder, tiny36_config(MOE), dtype="BF16", shards=3)
    return sorted(folder.glob("*.safetensors"))


def tensors_of(path: Path) -> Stored:
    """A file's tensors as tests/tiny.py writes them."""
    content = path.read_bytes()
    return {name: (t.dtype, np.frombuffer(content[t.offset : t.offset + t.nbytes], STORAGE[t.dtype]).reshape(t.shape))
            for name, t in read_header(path).items()}  # fmt: skip


def parts(folder: Path) -> list[Path]:
    """The three files of a split GGUF."""
    config = tiny36_config(MOE)
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "m.gguf", config, tiny36_weights(config), types="Q8_0", splits=3)
    return sorted(folder.glob("m-*.gguf"))


# ---- row 45: cut files ---------------------------------------------------------------------------------------------

CUTS = ["empty", "inside the length", "inside the header", "behind the header", "inside a tensor", "one byte short"]


@pytest.mark.parametrize("cut", CUTS)
def test_row_45_a_safetensors_file_cut_at_every_section(tmp_path, refused, cut):
    path = shards(tmp_path)[1]
    content, tensors = path.read_bytes(), sorted(read_header(path).values(), key=lambda tensor: tensor.offset)
    first, inner, last = tensors[0], next(t for t in tensors if t.nbytes > 1000), tensors[-1]
    assert last.offset + last.nbytes == len(content)
    at, words = {
        "empty": (0, ["0 bytes are too short"]), "inside the length": (5, ["5 bytes are too short"]),
        "inside the header": (300, ["truncated inside the header"]),
        "behind the header": (first.offset, ["truncated: its data ends at byte"]),
        "inside a tensor": (inner.offset + 1000, ["truncated: its data ends", f"the file at {inner.offset + 1000}"]),
        "one byte short": (len(content) - 1, [f"tensor {last.name}: truncated"]),
    }[cut]  # fmt: skip
    path.write_bytes(content[:at])
    line = refused(tmp_path, str(path), AGAIN, *words)
    if cut in ("behind the header", "inside a tensor"):
        named = line.partition(": tensor ")[2].partition(": ")[0]
        cut_off = {tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > at}
        assert named in cut_off


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("share", [1e-5, 0.001, 0.05, 0.5, 0.999999])
def test_row_45_a_gguf_file_cut_at_every_section(tmp_path, refused, part, share):
    """Inside the magic, a key, the list of tensors or a tensor's data, in the first part and in another."""
    found = parts(tmp_path)
    content = found[part].read_bytes()
    found[part].write_bytes(content[: int(len(content) * share)])
    line = refused(found[0], str(found[part]), "the file again")
    if share >= 0.5:
        assert ": tensor blk." in line and ": truncated: its data ends at byte" in line, line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json",
                                  "generation_config.json"])  # fmt: skip
def test_row_45_a_cut_text_file(tmp_path, refused, name):
    shards(tmp_path)
    text = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(text[: len(text) // 2])
    refused(tmp_path, str(tmp_path / name))


def test_row_45_a_cut_container(tmp_path, refused):
    write_container(tmp_path, tiny36_config(CODER))
    path = tmp_path / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(tmp_path, str(path), ": tensor model.layers.2.", "truncated: its data ends", AGAIN)
    path.unlink()
    refused(tmp_path, "missing tensors: layers.2.", "the download is incomplete")


def test_row_45_a_cut_sidecar(tmp_path, refused):
    """Of a model that has no experts but these."""
    write_tiny(tmp_path, dtype="BF16", mtp=False)
    write_sidecar(tmp_path, tiny_weights(tiny_config(), mtp=False))
    whole = tmp_path / "model.safetensors"
    write_safetensors(whole, {name: t for name, t in tensors_of(whole).items() if ".mlp.experts." not in name})
    look(tmp_path)
    path = tmp_path / "experts-int4g64" / "layer-002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(tmp_path, str(path), ": tensor model.layers.2.mlp.experts.", "truncated: its data ends", AGAIN)
    path.unlink()
    refused(tmp_path, str(path.parent), "no experts of layer 2", "download its missing files, or convert again")


# ---- row 46: split files -------------------------------------------------------------------------------------------


def test_row_46_joined_gguf_parts(tmp_path, refused):
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts(tmp_path)))
    refused(joined, str(joined), "two files were joined", "keep the split files as they were downloaded")


def test_row_46_joined_safetensors(tmp_path, refused):
    files = shards(tmp_path)
    files[0].write_bytes(b"".join(file.read_bytes() for file in files))
    refused(tmp_path, str(files[0]), "two files were joined", "keep the split files as they were downloaded")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_row_46_a_missing_part(tmp_path, refused, number):
    found, files = parts(tmp_path / "gguf"), shards(tmp_path / "hf")
    for path in (found[number], files[number]):
        path.unlink()
    if number:
        refused(found[0], f"1 missing: {found[number].name}", "download the missing parts into the same folder")
    refused(tmp_path / "hf", "of 3 files 1 missing", files[number].name, "download the missing files")


@pytest.mark.parametrize("number", [1, 2])
def test_row_46_a_part_that_is_not_the_first(tmp_path, refused, number):
    """The line says which file to give, and giving it works."""
    found = parts(tmp_path)
    line = refused(found[number], str(found[number]), f"part {number + 1} of 3")
    named = line.rpartition("give the first part: ")[2].strip(")\n")
    look(tmp_path / named)


def test_row_46_a_part_that_was_renamed(tmp_path, refused):
    found = parts(tmp_path)
    refused(found[0].rename(tmp_path / "model.gguf"), "name the parts NAME-00001-of-00003.gguf")


def test_row_46_one_file_of_a_folder_and_a_folder_of_files(tmp_path, refused):
    files = shards(tmp_path / "hf")
    refused(files[1], str(files[1]), "give the folder that holds config.json")
    parts(tmp_path / "gguf")
    refused(tmp_path / "gguf", "a folder of GGUF files", "give the file itself: m-00001-of-00003.gguf")


# ---- row 48: twice the same name, merges in two spellings ----------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False])
def test_row_48_a_tensor_in_two_shards(tmp_path, refused, indexed):
    files = shards(tmp_path)
    name = next(iter(read_header(files[0])))
    write_safetensors(files[1], tensors_of(files[1]) | {name: tensors_of(files[0])[name]})
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, name, files[1].name)


def test_row_48_a_tensor_under_both_prefixes(tmp_path, refused):
    write_tiny36(tmp_path, tiny36_config(CODER), dtype="BF16")
    found = tensors_of(tmp_path / "model.safetensors")
    found["model.language_model.norm.weight"] = found["model.norm.weight"]
    write_safetensors(tmp_path / "model.safetensors", found)
    refused(tmp_path, "model.norm.weight", "model.language_model.norm.weight", "twice")


def test_row_48_a_tensor_twice_in_one_header(tmp_path, refused):
    """JSON allows it, and a parser that is not asked keeps the last one."""
    write_tiny36(tmp_path, tiny36_config(CODER), dtype="BF16")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    entry = header[header.index(b'"model.norm.weight"') :]
    entry = entry[: entry.index(b"}") + 1]
    longer = b"{" + entry + b", " + header[1:].rstrip()
    path.write_bytes(len(longer).to_bytes(8, "little") + longer + content[8 + len(header) :])
    refused(tmp_path, str(path), "model.norm.weight is listed twice")


TEXTS = [
    "Hello, it's 1234 o'clock\r\n\r\n  x\t", "中文 ё 👩‍👩‍👧 क्षि a\u0302", "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x", " leading and  double  spaces ", "a b",
]  # fmt: skip


def test_row_48_merges_in_both_spellings(tmp_path, nano):
    """"a b" and ["a", "b"] are the same tokenizer, in the older writers' spelling and the newer ones'."""
    whole = json.loads((nano / "tokenizer.json").read_text())
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in whole["model"]["merges"]]
    ids = []
    for number, merges in enumerate(([" ".join(pair) for pair in pairs], pairs)):
        whole["model"]["merges"] = merges
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(whole))
        tokenizer = Tokenizer.load(folder)
        ids.append([tokenizer.encode(text, special) for text in TEXTS for special in (True, False)])
    shipped = Tokenizer.load(nano)
    assert ids[0] == ids[1] == [shipped.encode(text, special) for text in TEXTS for special in (True, False)]
    assert len(pairs) > 7000 and any(len(found) < len(text.encode()) for found, text in zip(ids[0][::2], TEXTS,
                                                                                         strict=True))  # fmt: skip


@pytest.mark.parametrize("merge", ["ab", "a b c", ["a"], ["a", "b", "c"], [], 7, "qzq zqz"])
def test_row_48_a_merge_that_is_no_pair(tmp_path, nano, merge):
    whole = json.loads((nano / "tokenizer.json").read_text())
    kept = whole["model"]["merges"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in kept]
    whole["model"]["merges"] = [merge, *(pairs if isinstance(merge, list) else map(" ".join, pairs))]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match="tokenizer.json: not a usable tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.hint


# ---- row 49: hostile headers and configs ---------------------------------------------------------------------------


def said(error: BaseException) -> str:
    """The line of an error that must be a ModelError."""
    code, line = describe(error)
    assert code == 3 and line and printable(line) == line and getattr(error, "hint", None), line
    return line


@pytest.mark.parametrize("name", HOSTILE)
def test_row_49_hostile_safetensors_headers(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(tiny36_config(CODER)))
    (tmp_path / "model.safetensors").write_bytes(pack(HOSTILE[name][0], bytes(12)))
    with pytest.raises(ColiError) as caught:
        look(tmp_path)
    assert str(tmp_path / "model.safetensors") in said(caught.value)


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_row_49_hostile_gguf_headers(tmp_path, name):
    path = tmp_path / "m.gguf"
    path.write_bytes(HOSTILE_GGUF[name][0])
    with pytest.raises(ColiError) as caught:
        look(path)
    assert str(path) in said(caught.value)


@pytest.mark.parametrize("header", ["negative size", "sizes that overflow", "offsets negative", "outside the file",
                                    "unknown dtype"])  # fmt: skip
def test_row_49_at_the_command_line(tmp_path, refused, header):
    write_tiny36(tmp_path, tiny36_config(CODER), dtype="BF16")
    (tmp_path / "model.safetensors").write_bytes(pack(HOSTILE[header][0], bytes(12)))
    refused(tmp_path, str(tmp_path / "model.safetensors"), "tensor a")


HOSTILE_VALUES: list[Any] = [
    -1, -(1 << 62), 0, 1 << 31, 1 << 40, 1 << 63, 10**30, 1.5, float("nan"), float("inf"), "64", None, True, [], [64],
    {},
]  # fmt: skip


def configs(folder: Path) -> Iterator[tuple[str, Any]]:
    """A checkpoint's config with every number in it replaced, one after the other."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    places = [(text, key) for key in text]
    places += [(inner, key) for inner in text.values() if isinstance(inner, dict) for key in inner]
    for inside, key in places:
        right = inside[key]
        if isinstance(right, int | float) and not isinstance(right, bool):
            for wrong in HOSTILE_VALUES:
                inside[key] = wrong
                path.write_text(json.dumps(config))
                yield key, wrong
            inside[key] = right


# What opens all the same: sound numbers that no shape hangs on, keys that have a default, keys that are not asked for.
LARGE = {1 << 31, 1 << 40, 1 << 63, 10**30}
SOUND: dict[str, set[Any]] = {"rope_theta": LARGE | {1.5}, "max_position_embeddings": LARGE, "indexer_budget": LARGE}
DEFAULTED = {"partial_rotary_factor", "decoder_sparse_step", "full_attention_interval", "seed", "indexer_kv_heads"}
UNREAD = {"mtp_num_hidden_layers", "max_window_layers", "eos_token_id", "intermediate_size"}


@pytest.mark.parametrize("family", [*FAMILIES, FLASH])
def test_row_49_hostile_configs(tmp_path, family):
    """Every number of a config replaced by what is out of range, of another type or absurd: one line, or a checkpoint
    that does not ask for it."""
    if family == FLASH:
        write_tiny(tmp_path, dtype="BF16")
    else:
        write_tiny36(tmp_path, tiny36_config(family), dtype="BF16")
    refusals = 0
    for key, wrong in configs(tmp_path):
        try:
            look(tmp_path)
        except ColiError as error:
            assert str(tmp_path) in said(error)
            refusals += 1
            continue
        assert key in UNREAD or (wrong is None and key in DEFAULTED) or wrong in SOUND.get(key, ()), (key, wrong)
    assert refusals > 180


@pytest.mark.parametrize(("key", "wrong"), [("hidden_size", -64), ("num_hidden_layers", 1 << 40), ("head_dim", 0),
                                            ("vocab_size", 1.5), ("num_experts_per_tok", 9)])  # fmt: skip
def test_row_49_a_config_at_the_command_line(tmp_path, refused, key, wrong):
    write_tiny36(tmp_path, tiny36_config(CODER), dtype="BF16")
    (tmp_path / "config.json").write_text(json.dumps(tiny36_config(CODER) | {key: wrong}))
    refused(tmp_path, str(tmp_path / "config.json"), key)
