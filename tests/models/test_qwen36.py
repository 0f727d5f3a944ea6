"""The four families of engine qwen36 against the NumPy oracle, and against themselves however their rows come in."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from coli.errors import ModelError, NonFinite
from coli.kernels.packing import quantise_int8
from coli.models import base
from tests.models.bench_model import Opened, any_chunking, every_row_of_a_long_piece, oracle_logits, random_ids
from tests.tiny36 import (
    FAMILIES,
    every_matrix,
    is_expert,
    odd36_config,
    release_fp8,
    tiny36_config,
    write_tiny36,
)

# float32 column of model_spec.md section 0, and tests/oracle/check_hybrid.py for qwen3_moe; the bar is ten times it
F32_COLUMN = {"qwen3_next": 7.2e-5, "qwen3_5_text": 1.4e-4, "qwen3_5_moe_text": 1.9e-4, "qwen3_moe": 9.7e-6}
ROWS = 72
SPARSE = [family for family in FAMILIES if family != "qwen3_5_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(family, tmp_path_factory):
    return write_tiny36(tmp_path_factory.mktemp("tiny36"), tiny36_config(family), seed=11)


def assert_equal_oracle(folder, family, logits, ids, **kept):
    """Within ten times what two float32 implementations differ by, and the same pick everywhere. The column is for
    logits up to 5."""
    exact = oracle_logits(folder, ids, np.float64, **kept)
    bar = 10 * F32_COLUMN[family] * max(1.0, np.abs(exact).max() / 5)
    assert np.abs(logits - exact).max() <= bar
    assert (logits.argmax(-1) == exact.argmax(-1)).all()


def run(folder, ids, **flags):
    with Opened(folder, **flags) as opened:
        return opened.logits(ids, [7])[1]


def test_logits_equal_the_oracle_however_the_prompt_is_cut(tiny, family):
    ids = random_ids(ROWS, tiny)
    with Opened(tiny) as opened:
        assert opened.engine.name == "qwen36"
        _, single = opened.logits(ids, [1])
        _, chunks = opened.logits(ids, [7])
        _, whole = opened.logits(ids, [ROWS])
    assert_equal_oracle(tiny, family, single, ids)
    assert np.abs(single - oracle_logits(tiny, ids, np.float32)).max() <= 20 * F32_COLUMN[family]
    assert single.tobytes() == chunks.tobytes()
    assert whole.tobytes() == single[-1:].tobytes()


def test_asking_for_every_row_of_a_long_piece_gives_every_row(tiny):
    every_row_of_a_long_piece(tiny)


@pytest.mark.parametrize("seed", range(2))
def test_any_chunking_leaves_the_same_logits_and_the_same_state(tiny, seed):
    any_chunking(tiny, seed)


# ---- geometries and spellings --------------------------------------------------------------------------------------

ODD = {family: odd36_config(family) for family in FAMILIES} | {
    "tied": tiny36_config("qwen3_5_moe_text", tie_word_embeddings=True),
    "a value head a key head": tiny36_config("qwen3_next", linear_num_value_heads=2, linear_value_head_dim=32),
    "every other layer attends": tiny36_config("qwen3_next", full_attention_interval=2, num_hidden_layers=4),
    "attention first": tiny36_config("qwen3_5_text", layer_types=["full_attention", "linear_attention"] * 2,
                                     num_hidden_layers=4),
    "DeltaNet only": tiny36_config("qwen3_5_moe_text", layer_types=["linear_attention"] * 3, num_hidden_layers=3),
    "one key and value head for all": tiny36_config("qwen3_moe", num_key_value_heads=1),
    "coder, some layers dense": tiny36_config("qwen3_moe", mlp_only_layers=[0, 4], decoder_sparse_step=2),
    "coder, not renormalised": tiny36_config("qwen3_moe", norm_topk_prob=False),
    "next, some layers dense, not renormalised": tiny36_config("qwen3_next", mlp_only_layers=[0, 3],
                                                               norm_topk_prob=False),
    "all experts": tiny36_config("qwen3_5_moe_text", num_experts_per_tok=8),
    "one expert of one": tiny36_config("qwen3_moe", num_experts=1, num_experts_per_tok=1),
}  # fmt: skip


@pytest.mark.parametrize("config", ODD.values(), ids=ODD.keys())
def test_other_geometries_equal_the_oracle(tmp_path, config):
    folder = write_tiny36(tmp_path, config, seed=5)
    ids = random_ids(50, folder)
    assert_equal_oracle(folder, config["model_type"], run(folder, ids), ids)


LEFT_OUT = {
    "qwen3_next": ("full_attention_interval", "partial_rotary_factor", "decoder_sparse_step", "mlp_only_layers",
                   "norm_topk_prob", "rope_scaling"),
    "qwen3_5_moe_text": ("layer_types", "attn_output_gate", "mtp_num_hidden_layers", "tie_word_embeddings"),
    "qwen3_5_text": ("layer_types", "output_gate_type", "attention_bias"),
    "qwen3_moe": ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "rope_scaling", "sliding_window",
                  "use_sliding_window"),
}  # fmt: skip


def test_what_a_config_leaves_out_has_the_familys_default(tmp_path, family):
    """norm_topk_prob among them: on for qwen3_next, off for qwen3_moe."""
    config = {key: value for key, value in tiny36_config(family).items() if key not in LEFT_OUT[family]}
    folder = write_tiny36(tmp_path, config | {"tie_word_embeddings": False}, seed=6)
    ids = random_ids(30, folder)
    assert_equal_oracle(folder, family, run(folder, ids), ids)


# ---- stored forms ----------------------------------------------------------------------------------------------------


def _half(name: str) -> bool:
    """Every second tensor or so; a layer's experts together."""
    return every_matrix(name) and zlib.crc32(name.split(".experts.")[0].encode()) % 2 == 0


FORMS = {
    "bf16": dict(dtype="BF16"),
    "f16 in shards, spelled as the other families": dict(dtype="F16", shards=3, visual=True, spelled="otherwise"),
    "f32 experts, bf16 dense, A_log in f32": dict(dtype="F32", dense="BF16", exact="F32"),
    "fp8 as released": dict(dtype="FP8", block=(32, 48)),
    "fp8, one block, f32 scales, A_log in f32": dict(dtype="FP8", scale_dtype="F32", exact="F32"),
    "fp8 experts only, fused": dict(dtype="FP8", fp8=is_expert, per_expert=False, block=(16, 24)),
    "fp8 dense only": dict(dtype="FP8", fp8=lambda name: release_fp8(name) and not is_expert(name), block=(16, 16)),
    "fp8, every matrix, fused, odd blocks": dict(dtype="FP8", fp8=every_matrix, per_expert=False, block=(16, 40)),
    "fp8, every second matrix": dict(dtype="FP8", fp8=_half, block=(32, 32), dense="F32"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_stored_form_equals_the_oracle(tmp_path, family, form):
    """What is FP8 is known by its scale and by nothing else."""
    form = dict(form)
    if form.pop("spelled", None):
        nested = family.endswith("_text")
        form |= dict(prefix="model." if nested else "model.language_model.", per_expert=nested)
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=7, **form)
    ids = random_ids(40, folder)
    assert_equal_oracle(folder, family, run(folder, ids), ids)


def test_fp8_of_odd_sizes_equals_the_oracle(tmp_path, family):
    """Blocks and rows that end anywhere."""
    folder = write_tiny36(tmp_path, odd36_config(family), seed=8, dtype="FP8", fp8=every_matrix, block=(16, 24))
    ids = random_ids(40, folder)
    assert_equal_oracle(folder, family, run(folder, ids), ids)


def test_how_experts_are_spelled_changes_no_bit(tmp_path, family):
    logits = []
    for split in (False, True):
        folder = write_tiny36(tmp_path / str(split), tiny36_config(family), seed=9, dtype="BF16", per_expert=split)
        logits.append(run(folder, random_ids(20, folder)).tobytes())
    assert logits[0] == logits[1]


# ---- what must make no difference --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("cap", [1, 2, 5])
def test_the_bits_do_not_depend_on_how_many_experts_fit(tmp_path, family, cap):
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=11)
    ids = random_ids(60, folder)
    with Opened(folder) as opened:
        expected, content = opened.logits(ids, [13])[1], opened.state.content()
    with Opened(folder, cap=cap) as opened:
        assert opened.logits(ids, [13])[1].tobytes() == expected.tobytes()
        assert opened.state.content() == content
        store = opened.engine.store
        assert store.misses > 0
        assert sum(len(store.resident(layer)) for layer in range(len(store.table))) <= cap * len(store.table)


SAME = {"one thread": dict(threads=1), "three threads": dict(threads=3), "plain kernels": dict(simd=False),
        "slots": dict(undo="slots"), "short chunks": dict(prefill_chunk=5)}  # fmt: skip


@pytest.mark.parametrize("flags", SAME.values(), ids=SAME.keys())
def test_the_bits_do_not_depend_on_how_the_engine_was_opened(tiny, flags):
    ids = random_ids(40, tiny)
    with Opened(tiny) as opened:
        expected = opened.logits(ids, [6])[1]
    with Opened(tiny, **flags) as opened:
        assert opened.logits(ids, [6])[1].tobytes() == expected.tobytes()


def test_plain_kernels_compute_fp8_the_same(tmp_path, family):
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=12, dtype="FP8", block=(32, 48))
    ids = random_ids(20, folder)
    assert run(folder, ids).tobytes() == run(folder, ids, simd=False).tobytes()


# ---- int8 rows -----------------------------------------------------------------------------------------------------

KEPT = ("in_proj_a", "in_proj_b", "mlp.gate.", "shared_expert_gate", "embed_tokens", "experts.", "conv1d")


def _int8_rows(name: str, w: np.ndarray) -> np.ndarray:
    if w.ndim != 2 or any(part in name for part in KEPT):
        return w
    codes, scales = quantise_int8(w)
    return codes.astype(w.dtype) * scales[:, None]


def test_int8_rows_equal_the_oracle_on_the_rounded_weights(tiny, family):
    """With float32 activations exactly."""
    ids = random_ids(40, tiny)
    assert_equal_oracle(tiny, family, run(tiny, ids, trunk="int8", act="f32"), ids, change=_int8_rows)


def test_int8_activations_add_the_usual_error_and_stay_row_independent(tmp_path, family):
    """A percent in each of two layers; random layers behind them would only blow it up."""
    changes = dict(layer_types=["linear_attention", "full_attention"], full_attention_interval=2)
    config = {key: changes.get(key, value) for key, value in tiny36_config(family, num_hidden_layers=2).items()}
    folder = write_tiny36(tmp_path, config, seed=11)
    ids = random_ids(40, folder)
    exact = oracle_logits(folder, ids, np.float64, change=_int8_rows)
    with Opened(folder, trunk="int8") as opened:
        (_, one), (_, many) = opened.logits(ids, [1]), opened.logits(ids, [6])
    assert one.tobytes() == many.tobytes()
    error = np.median(np.linalg.norm(one - exact, axis=-1) / np.linalg.norm(exact, axis=-1))
    assert 1e-4 < error < 0.05


# ---- values that are not finite ------------------------------------------------------------------------------------

POISON = {
    "qwen3_next": ("layers.2.linear_attn.in_proj_qkvz.weight", "layers.1.mlp.gate.weight"),
    "qwen3_5_moe_text": ("layers.0.linear_attn.out_proj.weight", "layers.3.self_attn.q_norm.weight"),
    "qwen3_5_text": ("layers.1.mlp.up_proj.weight", "layers.2.input_layernorm.weight"),
    "qwen3_moe": ("layers.4.mlp.gate.weight", "layers.0.self_attn.k_proj.weight"),
}


@pytest.mark.parametrize("which", [0, 1])
def test_a_small_weight_that_is_not_finite_is_found_at_load(tmp_path, family, which):
    name = POISON[family][which]
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=3, poison=name)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        Opened(folder)


def test_a_value_that_is_not_finite_names_the_layer(tmp_path, monkeypatch, family):
    """As it would come out of a matrix too large to be looked at when loaded."""
    monkeypatch.setattr(base, "_SMALL", 0)
    name = POISON[family][0]
    folder = write_tiny36(tmp_path, tiny36_config(family), seed=3, poison=name)
    with Opened(folder) as opened:
        with pytest.raises(NonFinite, match=f"layer {name.split('.')[1]}"):
            opened.logits(random_ids(9, folder), [9])
        assert opened.state.length == 0


# ---- taking rows back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", ["slots", "log"])
def test_keeping_any_number_of_rows_equals_never_having_seen_the_rest(tiny, undo):
    prompt, verify, after = (random_ids(n, tiny, seed) for n, seed in ((11, 1), (8, 2), (9, 3)))
    with Opened(tiny, undo=undo) as opened:
        model = opened.engine.model
        for kept in range(1, 9):
            state, plain = model.new_state(), model.new_state()
            model.forward(prompt, state)
            answer = model.forward(verify, state, want="all", undoable=True).logits.copy()
            state.keep(kept)
            for token in (*prompt, *verify[:kept]):
                expected = model.forward([token], plain).logits.copy()
            assert answer[kept - 1].tobytes() == expected[0].tobytes()
            assert state.content() == plain.content()
            model.forward(after, state)
            model.forward(after, plain)
            assert state.content() == plain.content()
