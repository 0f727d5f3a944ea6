"""N-gram rows: golden ids of the real model, equality with the oracle, and reads that equal the file, from tables that
are read row by row and from ones that are kept."""

from __future__ import annotations

import errno
import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli import ngrams
from coli.errors import ReadError
from coli.formats.checkpoint import Checkpoint
from coli.formats.fp8 import E4M3
from coli.models.qwen38_layout import geometry
from coli.ngrams import NgramHash, NgramTable, is_prime, multipliers, primes
from tests.models.bench_model import Opened
from tests.oracle.qwen4 import NGram
from tests.tiny import odd_config, tiny_config, write_tiny

REAL = tiny_config(
    vocab_size=248_320, hidden_size=2560, ple_layer_ids=[2], ple_embed_dim=2560, ngram_size=3, heads_per_ngram=8,
    ngram_vocab_size_base=20_000_000, make_ngram_vocab_size_divisible_by=128, split_ngram_parts=128,
    eos_token_id=248_044,
)  # fmt: skip
STEPS = [3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171]
GOLDEN = {
    (9707,): (16410909, 39682429, 169641436, 182022480),
    (248044, 9707): (16410909, 39682429, 169641436, 182022480),
    (1, 2, 3): (14605717, 24410875, 161523077, 195939126),
    (2, 248044, 3): (5318554, 26730617, 175277381, 199452204),
    (248044, 2, 3): (14605717, 24410875, 165072300, 195686070),
}


def test_constants_of_the_real_model():
    hashes = NgramHash(geometry(REAL), 0)
    assert hashes.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
    assert (hashes.sizes - 20_000_000).tolist() == STEPS
    assert hashes.offsets.tolist() == [0, *np.cumsum(hashes.sizes)[:-1].tolist()]
    assert hashes.table_rows == 320_001_536


@pytest.mark.parametrize(("tokens", "golden"), GOLDEN.items())
def test_golden_ids(tokens, golden):
    hashes = NgramHash(geometry(REAL), 0)
    rows = hashes.rows(np.concatenate([hashes.empty_history(), tokens]))
    assert rows.shape == (len(tokens), 16) and rows.dtype == np.int64
    assert tuple(rows[-1, [0, 1, 8, 9]].tolist()) == golden


def test_primes():
    def direct(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))

    assert [n for n in range(3000) if is_prime(n)] == [n for n in range(3000) if direct(n)]
    assert is_prime(2**61 - 1) and not is_prime(3215031751) and not is_prime(341550071728321)
    assert primes(2, 5) == (2, 3, 5, 7, 11)
    start = time.perf_counter()
    assert len(primes(20_000_000, 64)) == 64
    assert time.perf_counter() - start < 1


def test_products_never_wrap():
    for vocab in (2, 256, 248_320, 1 << 31):
        assert all(0 < m < 1 << 63 and m % 2 and m * (vocab - 1) < 1 << 63 for m in multipliers(vocab, 8, 1234, 1))


FAMILIES = {
    "tiny": tiny_config(),
    "odd": odd_config(),
    "4-grams": tiny_config(ngram_size=4, ple_embed_dim=48),
    "real": REAL,
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES.keys())
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_rows_equal_the_oracles(config, data):
    """Any text with many eos in it, in any chunks: chunking changes nothing either."""
    g = geometry(config)
    index = data.draw(st.integers(0, len(g.ple_layers) - 1))
    token = st.integers(0, g.vocab - 1) | st.just(g.ngram_eos)
    text = data.draw(st.lists(token, min_size=1, max_size=12))
    oracle, hashes = NGram(config, index), NgramHash(g, index)
    expected = [oracle.ids(text[:t][-(g.ngram_size - 1) :], text[t]) for t in range(len(text))]
    window = np.concatenate([hashes.empty_history(), text])
    assert hashes.rows(window).tolist() == expected
    again = np.concatenate([window, text, text, text, text, text, text])  # long enough for NumPy, whatever the text
    assert hashes.rows(again)[: len(text)].tolist() == expected
    cut = data.draw(st.integers(0, len(text)))
    back = g.ngram_size - 1
    pieces = [hashes.rows(window[: back + cut]), hashes.rows(window[cut:])]
    assert np.concatenate(pieces).tolist() == expected


FORMS = {
    "f32": dict(dtype="F32"),
    "f16": dict(dtype="F16", shards=3),
    "bf16 whole": dict(dtype="BF16", table_shards=0),
    "fp8": dict(dtype="FP8"),
    "fp8 whole": dict(dtype="FP8", table_shards=0),
    "odd": dict(dtype="BF16", config=odd_config()),
}


@pytest.fixture
def streamed(monkeypatch):
    """No table is small enough to be kept."""
    monkeypatch.setattr(ngrams, "KEPT", 0)


def opened(folder) -> tuple[Checkpoint, NgramTable, NgramHash]:
    checkpoint = Checkpoint.open(folder)
    g = geometry(checkpoint.config)
    return checkpoint, NgramTable(checkpoint, g, g.ple_layers[1], threads=2), NgramHash(g, 1)


def whole_table(checkpoint: Checkpoint, layer: int) -> np.ndarray:
    p = f"layers.{layer}.ple.ple_embedding.ngram_embedding."
    names = [f"{p}weight"] if f"{p}weight" in checkpoint else []
    names = names or [f"{p}shard_{i}.weight" for i in range(checkpoint.config["split_ngram_parts"])]
    stored = np.concatenate([checkpoint.view(name) for name in names])
    if stored.dtype == np.uint8:
        scale = (checkpoint.load(f"{p}weight_scale").astype(np.uint32) << 16).view(np.float32)
        return E4M3[stored] * scale
    return (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored.astype(np.float32)


@pytest.mark.parametrize("kept", [False, True], ids=["streamed", "kept"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_rows_read_equal_the_table(tmp_path, monkeypatch, form, kept):
    monkeypatch.setattr(ngrams, "KEPT", ngrams.KEPT if kept else 0)
    checkpoint, table, hashes = opened(write_tiny(tmp_path, **form))
    assert table.kept == kept
    exact = whole_table(checkpoint, table.layer)
    rng = np.random.default_rng(3)
    for count in (1, 2, 7, 40):
        rows = rng.integers(0, hashes.table_rows, (count, hashes.heads))
        rows[0, 0], rows[-1, -1] = 0, hashes.table_rows - 1
        table.start(rows)
        found = table.wait()
        assert found.dtype == np.float32 and found.flags.c_contiguous
        assert found.tobytes() == exact[rows].reshape(count, -1).tobytes()
    table.close()


@pytest.mark.parametrize("kept", [False, True], ids=["streamed", "kept"])
def test_a_start_without_wait_is_dropped(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(ngrams, "KEPT", ngrams.KEPT if kept else 0)
    checkpoint, table, hashes = opened(write_tiny(tmp_path))
    exact = whole_table(checkpoint, table.layer)
    for row in range(50):
        table.start(np.full((1, hashes.heads), row))
    assert (table.wait() == np.tile(exact[49], hashes.heads)).all()
    with pytest.raises(RuntimeError):
        table.wait()
    table.close()


def test_failed_reads_name_layer_file_and_errno(tmp_path, monkeypatch, streamed):
    _, table, hashes = opened(write_tiny(tmp_path))

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    rows = np.zeros((1, hashes.heads), np.int64)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        table.start(rows)
        with pytest.raises(ReadError, match=r"model.safetensors: cannot read the n-gram table of layer 5.*errno 5"):
            table.wait()
    table.start(rows)
    assert table.wait().shape == (1, 64)
    table.start(rows + hashes.table_rows)
    with pytest.raises(IndexError):
        table.wait()
    table.close()


def test_a_row_outside_a_kept_table_is_refused(tmp_path):
    _, table, hashes = opened(write_tiny(tmp_path))
    table.start(np.full((1, hashes.heads), hashes.table_rows))
    with pytest.raises(IndexError):
        table.wait()
    table.close()


def test_a_forward_is_the_same_with_either_table(tmp_path, monkeypatch):
    """The program stops for rows that are on their way, and has kept ones from the start."""
    ids, logits = np.arange(3, 17), []
    folder = write_tiny(tmp_path, dtype="BF16")
    for limit in (ngrams.KEPT, 0):
        monkeypatch.setattr(ngrams, "KEPT", limit)
        with Opened(folder) as model:
            answers = [model.engine.model.forward(part, model.state, want="all").logits for part in (ids[:9], ids[9:])]
            logits.append(np.concatenate(answers).tobytes())
    assert logits[0] == logits[1]


def test_one_token_costs_little(tmp_path, streamed):
    """16 rows of 160 FP8 values as in the real model: 60 us hot on an idle core, asserted with room for a busy one."""
    config = tiny_config(ple_layer_ids=[2, 6], ple_embed_dim=2560, heads_per_ngram=8)
    _, table, hashes = opened(write_tiny(tmp_path, config, dtype="FP8", mtp=False))
    window = np.array([5, 9, 17])
    table.start(hashes.rows(window))
    table.wait()
    times = []
    for _ in range(200):
        start = time.perf_counter()
        table.start(hashes.rows(window))
        table.wait()
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3, min(times)
    table.close()
