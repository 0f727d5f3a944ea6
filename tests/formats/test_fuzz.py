"""20,000 damaged safetensors headers and 20,000 damaged GGUF files: each opens or is one ColiError, in bounded memory
and time, and no descriptor stays behind. What opens is sound: every tensor lies inside its file.

Each case goes as far as a user's model does before a weight is read: the headers, the config, the geometry, the layout.
Memory is bounded by the address space the process may take, so that one huge allocation is a MemoryError, not an
estimate.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from coli.errors import ColiError
from coli.formats.checkpoint import Checkpoint
from coli.formats.gguf import Strings
from coli.models import qwen36_geometry, qwen36_layout, qwen38_layout
from tests.formats.mutations import mutated, mutated_json
from tests.gguf_files import write_gguf
from tests.tiny import tiny_config, tiny_weights, write_tiny
from tests.tiny36 import FAMILIES, tiny36_config, tiny36_weights

CASES = 20_000
SECONDS = 1.0  # of one case, most take less than a millisecond
ROOM = 256 << 20  # bytes of address space for a case, the maps of its files among them
GROWTH = 48 << 20  # bytes resident more after all cases than after the first hundreds

SMALL = dict(hidden_size=32, vocab_size=48, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
             num_experts=2, num_experts_per_tok=1, eos_token_id=3)  # fmt: skip


@contextmanager
def little_memory() -> Iterator[None]:
    """Address space for `ROOM` more bytes than the process has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def look(path: Path) -> None:
    """What an engine asks of a checkpoint before it loads a weight."""
    with Checkpoint.open(path) as checkpoint:
        sound(checkpoint)
        for value in checkpoint.metadata.values():
            if isinstance(value, Strings):
                assert len(list(value)) == len(value)
        qwen38 = checkpoint.config.get("model_type") in qwen38_layout.MODEL_TYPES
        made: Any = (qwen38_layout if qwen38 else qwen36_geometry).geometry(checkpoint.config, path)
        layout: Any = qwen38_layout if qwen38 else qwen36_layout
        layout.check(checkpoint, made)
        if any(name.startswith("mtp.") for name in checkpoint):
            layout.check_head(checkpoint, made)


def sound(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.tensors.values():
        size = os.fstat(checkpoint.fd(tensor)).st_size
        rows = tensor.shape[0] if tensor.pitch else 1
        span = (rows - 1) * tensor.pitch + tensor.nbytes // rows if tensor.nbytes else 0
        assert tensor.offset >= 0 and tensor.offset + span <= size
        storage, shape = tensor.stored()
        count = 1
        for length in shape:
            count *= length
        assert count * storage.itemsize == tensor.nbytes
        if tensor.nbytes < 1 << 16:
            assert checkpoint.load(tensor).shape == checkpoint.view(tensor).shape == shape


def run(path: Path, damage: Callable[[random.Random, int], None], least: int) -> None:
    """Every case, and that they reached `least` reasons to refuse, and opened some."""
    outcomes: Counter[str] = Counter()
    process, descriptors, resident, slowest = psutil.Process(), os.listdir("/proc/self/fd"), 0, 0.0
    with little_memory():
        for case in range(CASES):
            damage(random.Random(case), case)
            start = time.thread_time()
            try:
                look(path)
                outcomes["opened"] += 1
            except ColiError as error:
                message = f"{error.what}: {error.hint}"
                assert "\n" not in str(error) and error.where and error.hint, str(error)
                outcomes[re.sub(r"[\w.\\-]*\d[\w.\\-]*|\b\w*[._]\w*\b", "N", message)[:60]] += 1
            except Exception as error:
                raise AssertionError(f"case {case}") from error
            slowest = max(slowest, time.thread_time() - start)
            if case == 500:
                resident = process.memory_info().rss
    assert slowest < SECONDS
    assert process.memory_info().rss - resident < GROWTH
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert outcomes["opened"] > CASES // 500 and len(outcomes) > least, outcomes.most_common(60)


@pytest.mark.slow
def test_damaged_safetensors(tmp_path: Path) -> None:
    config = tiny_config(**SMALL, ple_layer_ids=[2])
    write_tiny(tmp_path, config, dtype="BF16")
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    content, config_text = path.read_bytes(), config_path.read_text()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    fields = [0, *(m.start() for m in re.finditer(rb'[\[{",]', content[: 8 + length]))]

    def damage(rng: random.Random, case: int) -> None:
        if case % 10 == 9:  # the config, with whole weights
            path.write_bytes(content)
            config_path.write_text(json.dumps(mutated_json(rng, config)))
        else:
            config_path.write_text(config_text)
            path.write_bytes(rewritten(rng) if case % 2 else mutated(rng, content, 8 + length, fields))

    def rewritten(rng: random.Random) -> bytes:
        text = json.dumps(mutated_json(rng, header)).encode()
        return struct.pack("<Q", len(text)) + text + data

    run(tmp_path, damage, least=40)


@pytest.mark.slow
def test_damaged_gguf(tmp_path: Path) -> None:
    contents = [small_gguf(tmp_path / "whole.gguf", family) for family in (*FAMILIES, "qwen4_exp_text")]
    places = [integers(content) for content in contents]
    path = tmp_path / "a.gguf"

    def damage(rng: random.Random, case: int) -> None:
        which = case % len(contents)
        path.write_bytes(mutated(rng, contents[which], max(places[which]) + 8, places[which]))

    run(path, damage, least=60)


def small_gguf(path: Path, family: str) -> bytes:
    if family == "qwen4_exp_text":
        config = tiny_config(**SMALL, ple_layer_ids=[2])
        weights = tiny_weights(config)
    else:
        small = SMALL | ({} if family != "qwen3_next" else {"full_attention_interval": 2})
        config = tiny36_config(family, **{k: v for k, v in small.items() if k in tiny36_config(family)})
        weights = tiny36_weights(config)
    types = {"": "Q8_0", "ssm_out.weight": "F32", "attn_q.weight": "BF16"}
    return write_gguf(path, config, weights, types=types).read_bytes()


def integers(content: bytes) -> list[int]:
    """Offsets of a header's integers: counts, and around every name its length, type, rank, dimensions, offset."""
    found = [4, 8, 16]
    names = rb"(?:general|tokenizer|qwen\w+|blk|output\w*|\w*token_embd)\.[\w.]+"
    for match in re.finditer(names, content):
        length = int.from_bytes(content[match.start() - 8 : match.start()], "little")
        if length == len(match[0].rstrip(b"\0")):
            end = match.start() + length
            found += [match.start() - 8, end, end + 4, end + 8, end + 12, end + 20, end + 24]
            found += [end + 4] * (10 if match[0].startswith(b"qwen") else 0)  # the values a config is made of
    return found
