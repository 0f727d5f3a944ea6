"""The model against the NumPy oracle, and against itself however its rows come in."""

from __future__ import annotations

import numpy as np
import pytest

from coli.errors import ModelError, NonFinite
from coli.kernels.packing import quantise_int8
from coli.models import base
from tests.models.bench_model import Opened, any_chunking, every_row_of_a_long_piece, oracle_logits, random_ids
from tests.tiny import odd_config, tiny_config, write_tiny

F32_COLUMN = 1.2e-5  # model_spec.md section 0, qwen4_exp, float32 decode; the bar is ten times it
ROWS = 72


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=11, dtype="F32")


def test_logits_equal_the_oracle_however_the_prompt_is_cut(tiny):
    """Two PLE layers, segment ends inside, context several times the index budget."""
    ids = random_ids(ROWS, tiny)
    expected = oracle_logits(tiny, ids, np.float32)
    exact = oracle_logits(tiny, ids, np.float64)
    with Opened(tiny) as opened:
        _, single = opened.logits(ids, [1])
        _, chunks = opened.logits(ids, [7])
        _, whole = opened.logits(ids, [ROWS])
    assert np.abs(single - expected).max() <= 10 * F32_COLUMN
    assert np.abs(single - exact).max() <= 10 * F32_COLUMN
    assert (single.argmax(-1) == exact.argmax(-1)).all()
    assert single.tobytes() == chunks.tobytes()
    assert whole.tobytes() == single[-1:].tobytes()


def test_asking_for_every_row_of_a_long_piece_gives_every_row(tiny):
    every_row_of_a_long_piece(tiny)


@pytest.mark.parametrize("seed", range(3))
def test_any_chunking_leaves_the_same_logits_and_the_same_state(tiny, seed):
    any_chunking(tiny, seed)


ODD = {
    "odd sizes": dict(hidden_size=52, moe_intermediate_size=19, shared_expert_intermediate_size=23, hc_lowrank=7,
                      vocab_size=301, num_experts=5, num_experts_per_tok=2),
    "one stream, wide ratio": dict(hc_count=1, indexer_compress_ratio=3, indexer_budget=9),
    "silu gate, no renormalisation": dict(output_gate_type="silu", norm_topk_prob=False),
    "no PLE": dict(ple_layer_ids=[]),
    "tied": dict(tie_word_embeddings=True),
}  # fmt: skip


@pytest.mark.parametrize("changes", [*ODD.values(), None], ids=[*ODD.keys(), "everything odd"])
def test_other_geometries_equal_the_oracle(tmp_path, changes):
    config = odd_config() if changes is None else tiny_config(**changes)
    folder = write_tiny(tmp_path, config, seed=5, dtype="F32")
    ids = random_ids(50, folder)
    with Opened(folder) as opened:
        _, logits = opened.logits(ids, [7])
    exact = oracle_logits(folder, ids, np.float64)
    assert np.abs(logits - exact).max() <= 10 * F32_COLUMN
    assert (logits.argmax(-1) == exact.argmax(-1)).all()


FORMS = {
    "bf16": dict(dtype="BF16"),
    "f16 in shards": dict(dtype="F16", shards=3, prefix="model.language_model."),
    "bf16 experts one by one": dict(dtype="BF16", per_expert=True),
    "fp8, bf16 scales": dict(dtype="FP8", per_expert=True, scale_dtype="BF16"),
    "fp8, f32 scales": dict(dtype="FP8", per_expert=True, scale_dtype="F32"),
    "fp8 everywhere, nested prefix": dict(dtype="FP8", dense="FP8", prefix="model.language_model."),
    "fp8, fused, odd blocks": dict(dtype="FP8", dense="FP8", per_expert=False, block=(16, 24)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_stored_form_equals_the_oracle(tmp_path, form):
    folder = write_tiny(tmp_path, seed=7, **form)
    ids = random_ids(40, folder)
    exact = oracle_logits(folder, ids, np.float64)
    with Opened(folder) as opened:
        _, logits = opened.logits(ids, [8])
    assert np.abs(logits - exact).max() <= 10 * F32_COLUMN
    assert (logits.argmax(-1) == exact.argmax(-1)).all()


@pytest.mark.parametrize("cap", [1, 2, 5])
def test_the_bits_do_not_depend_on_how_many_experts_fit(tiny, cap):
    """Waves, evictions and reads change nothing; experts are visited once per chunk when they fit."""
    ids = random_ids(60, tiny)
    with Opened(tiny) as opened:
        expected, content = opened.logits(ids, [13])[1], opened.state.content()
    with Opened(tiny, cap=cap) as opened:
        assert opened.logits(ids, [13])[1].tobytes() == expected.tobytes()
        assert opened.state.content() == content
        store, layers = opened.engine.store, range(opened.engine.geometry.layers)
        assert store.misses > 0
        assert sum(len(store.resident(layer)) for layer in layers) <= cap * len(layers)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_do_not_depend_on_the_threads(tiny, threads):
    ids = random_ids(40, tiny)
    with Opened(tiny) as opened:
        expected = opened.logits(ids, [6])[1]
    with Opened(tiny, threads=threads) as opened:
        assert opened.logits(ids, [6])[1].tobytes() == expected.tobytes()


KEPT = ("block_inject_weight", "in_proj_a", "in_proj_b", "index_qk_proj", "mlp.gate", "shared_expert_gate",
        "embed_tokens", "experts.", "ngram_embedding", "conv1d")  # fmt: skip


def _int8_rows(name: str, w: np.ndarray) -> np.ndarray:
    if w.ndim != 2 or any(part in name for part in KEPT):
        return w
    codes, scales = quantise_int8(w)
    return codes.astype(w.dtype) * scales[:, None]


def test_int8_rows_equal_the_oracle_on_the_rounded_weights(tiny):
    """With float32 activations exactly; int8 activations add the usual error and stay row independent."""
    ids = random_ids(40, tiny)
    exact = oracle_logits(tiny, ids, np.float64, change=_int8_rows)
    with Opened(tiny, trunk="int8", act="f32") as opened:
        _, logits = opened.logits(ids, [6])
    assert np.abs(logits - exact).max() <= 10 * F32_COLUMN
    with Opened(tiny, trunk="int8") as opened:
        (_, one), (_, many) = opened.logits(ids, [1]), opened.logits(ids, [6])
    assert one.tobytes() == many.tobytes()
    error = np.median(np.abs(one - exact).max(-1)) / np.abs(exact).max()  # 8 layers of widths 64: few inputs to average
    assert 1e-4 < error < 0.15


POISON = ("layers.2.linear_attn.out_proj.weight", "layers.1.mlp.gate.weight", "layers.3.self_attn.q_norm.weight",
          "layers.1.ple.key_proj.weight", "layers.3.self_attn.indexer.index_qk_proj.weight")  # fmt: skip


@pytest.mark.parametrize("name", POISON)
def test_a_small_weight_that_is_not_finite_is_found_at_load(tmp_path, name):
    folder = write_tiny(tmp_path, seed=3, dtype="F32", poison=name)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        Opened(folder)


@pytest.mark.parametrize("name", [POISON[0], POISON[1], POISON[3]])
def test_a_value_that_is_not_finite_names_the_layer(tmp_path, monkeypatch, name):
    """As it would come out of a matrix too large to be looked at when loaded."""
    monkeypatch.setattr(base, "_SMALL", 0)
    folder = write_tiny(tmp_path, seed=3, dtype="F32", poison=name)
    with Opened(folder) as opened:
        with pytest.raises(NonFinite, match=f"layer {name.split('.')[1]}"):
            opened.logits(random_ids(9, folder), [9])
        assert opened.state.length == 0
