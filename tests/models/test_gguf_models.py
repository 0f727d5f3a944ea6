"""Engines on GGUF files: the oracle's logits and drafts whatever the file is made of, and bytes that nothing changes.

A file written from the weights of a folder computes what the folder does, bit for bit in any float type: norms come
with their 1 + already added, ssm_a already is -exp(A_log), both as the engine would compute them. With one exception:
where V heads are tiled (qwen35, qwen35moe, qwen4exp), out_proj adds up the same products in another order, heads
0 3 1 4 2 5 for 0 1 2 3 4 5. So there the bits are equal only where that order is the folder's (as many value heads as
key heads, or one key head) and otherwise as near as two float32 implementations are. The oracle reads a folder that
holds the numbers the blocks of the file stand for (tests/gguf_files.py, `dequantised`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from coli.errors import ModelError
from coli.formats.ggml import NATIVE
from tests import gguf_blocks, oracle
from tests.gguf_blocks import decode, encode
from tests.gguf_files import dequantised, write_gguf
from tests.models.bench_model import Opened, oracle_logits, random_ids
from tests.tiny import tiny_config, tiny_weights, write_tiny
from tests.tiny36 import FAMILIES, HEADED, block36_config, tiny36_config, tiny36_weights, write_tiny36

NEXT, MOE, DENSE, CODER = FAMILIES
FLASH = "qwen4_exp_text"
ALL = [*FAMILIES, FLASH]
SPARSE = [family for family in ALL if family != DENSE]
TILED = (MOE, DENSE, FLASH)
Types = str | dict[str, str]

# float32 columns of model_spec.md section 0 (qwen3_moe: tests/oracle/check_hybrid.py), for logits up to 5; and "f32
# rows" of its table of heads. The bar is ten times that
F32_COLUMN = {NEXT: 7.2e-5, DENSE: 1.4e-4, MOE: 1.9e-4, CODER: 9.7e-6, FLASH: 1.2e-5}
HEAD_COLUMN = {NEXT: 7.4e-5, DENSE: 1.3e-4, MOE: 2.3e-4, FLASH: 9.8e-6}

_TWO = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], full_attention_interval=2)


def small(family: str, **changes: Any) -> dict[str, Any]:
    """Eight layers of width 64; of `changes` what the family has."""
    config = tiny_config() if family == FLASH else tiny36_config(family)
    return config | {key: value for key, value in changes.items() if key in config}


def wide(family: str, **changes: Any) -> dict[str, Any]:
    """Two layers, a mixer of each kind, whose rows are whole blocks of every type; four value heads a key head."""
    if family != FLASH:
        config = block36_config(family)
        return config | {key: value for key, value in (_TWO | changes).items() if key in config}
    rope = tiny_config()["rope_parameters"] | dict(partial_rotary_factor=0.25)
    config = tiny_config(
        hidden_size=256, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_value_heads=8,
        moe_intermediate_size=256, shared_expert_intermediate_size=256, hc_lowrank=32, ple_layer_ids=[2],
        ple_embed_dim=256, rope_parameters=rope,
    )  # fmt: skip
    return config | {key: value for key, value in (_TWO | changes).items() if key in config}


def weights_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    return tiny_weights(config, 11) if config["model_type"] == FLASH else tiny36_weights(config, 11)


def write(folder: Path, config: dict[str, Any], types: Types = "F32", stored: str = "F32",
          **options: Any) -> tuple[Path, Path]:  # fmt: skip
    """(folder, GGUF file) of the same numbers. The folder's dtype is `stored`, which has to hold them."""
    weights = weights_of(config)
    exact = dequantised(config, weights, types=types)
    make: Callable[..., Path] = write_tiny if config["model_type"] == FLASH else write_tiny36
    made = make(folder / "hf", config, seed=11, dtype=stored, change=lambda found: found.update(exact))
    return made, write_gguf(folder / "model.gguf", config, weights, types=types, **options)


def run(path: Path, ids: np.ndarray, **flags: Any) -> np.ndarray:
    with Opened(path, **flags) as opened:
        return opened.logits(ids, [7])[1]


def assert_near(logits: np.ndarray, exact: np.ndarray, column: float) -> None:
    assert np.abs(logits - exact).max() <= 10 * column * max(1.0, np.abs(exact).max() / 5)
    assert (logits.argmax(-1) == exact.argmax(-1)).all()


def assert_equal_oracle(folder: Path, path: Path, family: str, count: int = 24, **flags: Any) -> None:
    ids = random_ids(count, folder)
    exact = oracle_logits(folder, ids, np.float64)
    assert_near(run(path, ids, **flags), exact, F32_COLUMN[family])


# ---- float files: the folder's bits ------------------------------------------------------------------------------

HEADS = {"value heads in threes": {}, "as many as key heads": dict(linear_num_value_heads=2),
         "one key head": dict(linear_num_key_heads=1)}  # fmt: skip
PLACED = [(family, heads) for family in ALL for heads in HEADS if family != CODER or not HEADS[heads]]


@pytest.mark.parametrize(("family", "heads"), PLACED)
def test_a_float32_file_computes_what_the_folder_does(tmp_path, family, heads):
    folder, path = write(tmp_path, small(family, **HEADS[heads]))
    ids = random_ids(40, folder)
    theirs, ours = run(folder, ids), run(path, ids)
    assert (ours.tobytes() == theirs.tobytes()) == (family not in TILED or bool(HEADS[heads]))
    assert_near(ours, oracle_logits(folder, ids, np.float64), F32_COLUMN[family])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("family", ALL)
def test_half_precision_files_too(tmp_path, family, dtype):
    """What a converter keeps in float32 is rounded here, so that the folder can hold the same numbers."""
    config = small(family, linear_num_value_heads=2)

    def rounded(found: dict[str, np.ndarray]) -> None:
        found |= {n: decode(encode(w, dtype), dtype) for n, w in found.items() if w.dtype == np.float32}

    weights = weights_of(config)
    rounded(weights)
    make: Callable[..., Path] = write_tiny if family == FLASH else write_tiny36
    folder = make(tmp_path / "hf", config, seed=11, dtype=dtype, change=rounded)
    path = write_gguf(tmp_path / "model.gguf", config, weights, types=dtype)
    ids = random_ids(40, folder)
    assert run(path, ids).tobytes() == run(folder, ids).tobytes()


SPELLINGS = {"experts fused": dict(fused_experts=True), "early qwen3next": dict(old=True), "split": dict(splits=4)}


@pytest.mark.parametrize(("family", "spelling"), [
    (NEXT, "early qwen3next"), (NEXT, "split"), (MOE, "experts fused"), (MOE, "split"), (FLASH, "experts fused"),
    (FLASH, "split"), (CODER, "split"),
])  # fmt: skip
def test_how_a_file_spells_its_tensors_changes_no_bit(tmp_path, family, spelling):
    """With experts that come and go, so that what is read comes from every part of a split file."""
    config = wide(family)
    weights, types = weights_of(config), {"": "Q4_K", "ffn_down_exps.weight": "Q6_K"}
    one = write_gguf(tmp_path / "one.gguf", config, weights, types=types)
    other = write_gguf(tmp_path / "other.gguf", config, weights, types=types, **SPELLINGS[spelling])
    ids = np.random.default_rng(3).integers(0, config["vocab_size"], 24)
    assert run(other, ids, cap=2).tobytes() == run(one, ids).tobytes()


def test_without_a_head_the_trunk_is_the_same(tmp_path):
    config = wide(MOE)
    ids, weights = np.arange(40, 64), weights_of(config)
    paths = [write_gguf(tmp_path / f"{mtp}.gguf", config, weights, types="Q8_0", mtp=mtp) for mtp in (True, False)]
    assert run(paths[0], ids).tobytes() == run(paths[1], ids).tobytes()
    with pytest.raises(ModelError, match="no draft head"):
        Opened(paths[1], mtp=True)


# ---- quantised files: the oracle's numbers on the values of their blocks -----------------------------------------

QUICK = ("Q8_0", "Q4_0", "Q4_K", "Q6_K")  # compiling the kernels of all types takes a while
QUANTISED = [(MOE, dtype) for dtype in NATIVE]
QUANTISED += [(NEXT, "Q8_0"), (NEXT, "Q5_K"), (DENSE, "Q4_0"), (DENSE, "Q6_K"), (CODER, "Q5_1"), (CODER, "IQ4_XS")]
QUANTISED += [(FLASH, "Q4_1"), (FLASH, "Q4_K"), (FLASH, "IQ4_NL")]


@pytest.fixture(scope="module", ids=" ".join, params=[
    pytest.param(pair, marks=() if pair[1] in QUICK else pytest.mark.slow) for pair in QUANTISED
])  # fmt: skip
def quantised(request, tmp_path_factory):
    """(family, type, a file that has nothing but this type, embedding, lm_head and n-gram table too, ids, the oracle's
    logits)."""
    family, dtype = request.param
    folder, path = write(tmp_path_factory.mktemp("quantised"), wide(family), dtype)
    ids = random_ids(24, folder)
    return family, dtype, path, ids, oracle_logits(folder, ids, np.float64)


def test_every_type_equals_the_oracle(quantised):
    """With float32 activations."""
    family, dtype, path, ids, exact = quantised
    with Opened(path, act="f32") as opened:
        assert_near(opened.logits(ids, [7])[1], exact, F32_COLUMN[family])
        engine = opened.engine
        kinds = {part.kind for record in engine.store.records for part in (record.gate, record.down)}
        assert kinds == ({f"{dtype.lower()}f"} if family != DENSE else set())
        assert max(engine.weights.kinds, key=lambda kind: engine.weights.kinds[kind]) == f"{dtype.lower()}f"
        assert not engine.notes


def test_int8_activations_add_the_usual_error_and_stay_row_independent(quantised):
    """Codes of 32 features that share a scale: steps of max / 127, half a percent of a normal vector in the mean
    square, at each of some ten products one behind the other: the bar of int8 rows in tests/models/test_qwen36.py."""
    _, _, path, ids, exact = quantised
    with Opened(path) as opened:
        (_, one), (_, many) = opened.logits(ids, [1]), opened.logits(ids, [6])
    assert one.tobytes() == many.tobytes()
    assert 1e-4 < usual_error(one, exact) < 0.05


def usual_error(logits: np.ndarray, exact: np.ndarray) -> float:
    return float(np.median(np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)))


# As llama.cpp mixes them: better types for what hurts most, by layer
MIXED: dict[str, tuple[str, dict[str, Any], Types]] = {
    "medium": (MOE, {}, {"": "Q4_K", "blk.0.ffn_down_exps.weight": "Q6_K", "attn_v.weight": "Q6_K",
                         "output.weight": "Q6_K"}),
    "medium, dense": (DENSE, {}, {"": "Q5_K", "blk.1.ffn_down.weight": "Q6_K", "attn_qkv.weight": "Q6_K",
                                  "output.weight": "Q8_0", "token_embd.weight": "IQ4_XS"}),
    "medium, four streams": (FLASH, {}, {"": "Q4_K", "blk.1.ffn_down_exps.weight": "Q6_K", "indexer.k_proj.weight":
                                         "BF16", "per_layer_token_embd.weight": "Q8_0", "token_embd.weight": "Q5_0"}),
    "tied": (MOE, dict(tie_word_embeddings=True), {"": "Q4_K", "token_embd.weight": "Q6_K"}),
    "tied, grouped projections": (NEXT, dict(tie_word_embeddings=True), {"": "IQ4_NL", "token_embd.weight": "Q8_0",
                                                                        "ssm_ba.weight": "Q5_1"}),
    "gate and up of two types": (CODER, {}, {"": "Q8_0", "blk.0.ffn_gate_exps.weight": "Q4_K",
                                             "blk.1.ffn_up_exps.weight": "Q5_1"}),
    "only experts quantised": (MOE, {}, {"": "BF16", "_exps.weight": "Q4_0"}),
    "only experts float": (CODER, {}, {"": "Q8_0", "_exps.weight": "F16"}),
    "routers quantised": (MOE, {}, {"": "Q8_0", "ffn_gate_inp.weight": "Q8_0", "ssm_alpha.weight": "Q4_K"}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixed_types_equal_the_oracle(tmp_path, name):
    family, changes, types = MIXED[name]
    folder, path = write(tmp_path, wide(family, **changes), types)
    ids = random_ids(24, folder)
    exact = oracle_logits(folder, ids, np.float64)
    assert_near(run(path, ids, act="f32"), exact, F32_COLUMN[family])
    assert 1e-4 < usual_error(run(path, ids), exact) < 0.05


def test_the_banner_says_what_runs_in_which_type(tmp_path):
    family, _, types = MIXED["medium"]
    path = write(tmp_path, wide(family), types)[1]
    with Opened(path) as opened:
        banner = opened.engine.banner()
        assert "experts Q4_K, down Q6_K in 1 of 2 layers, 8 of 8 a layer" in banner
        assert "dense weights q4_k, q6_k, f32 " in banner.lower()


# ---- types without kernels -----------------------------------------------------------------------------------------


def _any_blocks(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """An encoder for a type nobody here can encode: bytes at random (the same for the same values) and a scale, the
    first two bytes, that makes them as large as the values."""
    nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][1]

    def encoder(blocks: np.ndarray) -> np.ndarray:
        raw = np.random.default_rng(zlib.crc32(blocks.tobytes())).integers(0, 256, (len(blocks), nbytes), np.uint8)
        for scale in (np.ones(len(blocks)), None):
            if scale is None:
                scale = blocks.std(axis=1) / decode(raw, dtype).std(axis=1)
            raw[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
        return raw

    return encoder


@pytest.mark.parametrize(("family", "dtype"), [
    (MOE, "Q2_K"), (NEXT, "Q3_K"), (FLASH, "Q3_K"), (DENSE, "IQ2_XS"), (CODER, "IQ3_S"), (MOE, "IQ3_XXS"),
])  # fmt: skip
def test_types_without_a_kernel_are_decoded_and_said(tmp_path, monkeypatch, family, dtype):
    if dtype.startswith("IQ"):
        monkeypatch.setitem(gguf_blocks._ENCODERS, dtype, _any_blocks(dtype))
    folder, path = write(tmp_path, wide(family), {"": dtype, "ffn_down_exps.weight": "Q4_K"})
    assert_equal_oracle(folder, path, family, act="f32")
    with Opened(path) as opened:
        notes = " ".join(opened.engine.notes)
        assert f"dense weights of {dtype} have no kernel: decoded to float32" in notes
        assert (f"experts of {dtype} are decoded to float32 as they are read, exactly" in notes) == (family != DENSE)


# ---- draft heads ---------------------------------------------------------------------------------------------------

HEAD_TYPES: dict[str, Types] = {
    "F32": "F32", "Q8_0": "Q8_0",
    "mixed": {"": "Q4_K", "nextn.eh_proj.weight": "Q6_K", "blk.2.ffn_down_exps.weight": "Q5_0",
              "blk.2.ffn_down.weight": "Q5_0", "output.weight": "Q6_K"},
}  # fmt: skip


def drafted(path: Path, ids: list[int], depth: int, **flags: Any) -> Iterator[tuple[int, np.ndarray]]:
    """(draft, scores) of a head behind `ids`, a prompt in pieces, and of its own drafts."""
    flags = {"ctx": 96, "mtp": True} | flags
    with Opened(path, **flags) as opened:
        head, model, state = opened.engine.head, opened.engine.model, opened.state
        pairs, at = head.new_state(), 0
        for size in (20, 7, 1, len(ids) - 29):
            head.note(pairs, state, model.forward(ids[at : at + size], state).streams)
            at += size
        token = head.draft(pairs, state, ids[-1])[0]
        yield token, head.scores.copy()
        for number in range(1, depth):
            token = head.deeper(pairs, token, number)[0]
            yield token, head.scores.copy()


@pytest.mark.parametrize("types", HEAD_TYPES)
@pytest.mark.parametrize("family", [*HEADED, FLASH, f"{FLASH}, wiring a"])
def test_drafts_and_scores_are_the_oracles(tmp_path, family, types):
    family, _, wiring = family.partition(", wiring ")
    folder, path = write(tmp_path, wide(family), HEAD_TYPES[types])
    trunk, ids = oracle.load(folder), random_ids(44, folder).tolist()
    head = oracle.Qwen4MTP(trunk, wiring or "b") if family == FLASH else oracle.head_of(trunk)
    scores, rows = head.rows(trunk.forward(np.array(ids[:-1]))[1], np.array(ids[1:]))
    flags = dict(mtp_wiring=wiring) if wiring else {}
    for draft, found in drafted(path, ids, 3 if family == FLASH else 7, act="f32", **flags):
        assert_near(found, scores[-1], HEAD_COLUMN[family])
        assert draft == scores[-1].argmax()
        scores, rows = head.rows(rows[-1:], np.array([draft]))


@pytest.mark.parametrize("family", [*HEADED, FLASH])
def test_a_float_heads_scores_are_the_folders_bits(tmp_path, family):
    folder, path = write(tmp_path, small(family, linear_num_value_heads=2))
    ids = random_ids(44, folder).tolist()
    ways = [[(draft, scores.tobytes()) for draft, scores in drafted(where, ids, 3)] for where in (folder, path)]
    assert ways[0] == ways[1]


# ---- what must make no difference ----------------------------------------------------------------------------------

# every type with kernels somewhere, and one without
MANY = {
    "": "Q8_0", "attn_q.weight": "Q4_K", "attn_k.weight": "Q5_K", "attn_v.weight": "Q6_K", "attn_output.weight": "Q4_0",
    "attn_qkv.weight": "Q4_1", "attn_gate.weight": "IQ4_NL", "ssm_out.weight": "Q5_1", "output.weight": "Q6_K",
    "token_embd.weight": "Q4_K", "ffn_gate_exps.weight": "IQ4_XS", "ffn_up_exps.weight": "Q4_K",
    "blk.0.ffn_down_exps.weight": "Q5_0", "blk.1.ffn_down_exps.weight": "Q3_K", "ffn_gate.weight": "Q4_K",
    "ffn_up.weight": "Q5_K", "ffn_down.weight": "Q6_K",
}  # fmt: skip
FLAGS = {"one thread": dict(threads=1), "three threads": dict(threads=3), "plain kernels": dict(simd=False),
         "slots": dict(undo="slots"), "short chunks": dict(prefill_chunk=5)}  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(family, marks=pytest.mark.slow) for family in ALL])
def many(request, tmp_path_factory):
    """(family, its file of many types, ids, their logits one by one)."""
    config = wide(request.param)
    path = write_gguf(tmp_path_factory.mktemp("many") / "m.gguf", config, weights_of(config), types=MANY)
    ids = np.random.default_rng(8).integers(0, config["vocab_size"], 60)
    with Opened(path) as opened:
        return request.param, path, ids, opened.logits(ids, [1])[1], opened.state.content()


@contextmanager
def same_state(path: Path, content: dict[str, bytes], **flags: Any) -> Iterator[Opened]:
    with Opened(path, **flags) as opened:
        yield opened
        assert opened.state.content() == content


def test_prefill_is_chunks_is_one_by_one(many):
    _, path, ids, one, content = many
    for sizes in ([60], [7], [23, 1, 8, 2, 5]):
        with same_state(path, content) as opened:
            at, logits = opened.logits(ids, sizes)
            assert logits.tobytes() == one[at].tobytes()


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS.keys())
def test_the_bytes_do_not_depend_on_how_the_engine_was_opened(many, flags):
    _, path, ids, one, content = many
    with same_state(path, content, **flags) as opened:
        assert opened.logits(ids, [6])[1].tobytes() == one.tobytes()


@pytest.mark.parametrize("cap", [1, 3])
def test_the_bytes_do_not_depend_on_how_many_experts_fit(many, cap):
    family, path, ids, one, content = many
    with same_state(path, content, cap=cap) as opened:
        assert opened.logits(ids, [8])[1].tobytes() == one.tobytes()
        assert opened.engine.store.misses > cap * len(opened.engine.store.records) or family == DENSE


def test_keeping_any_number_of_rows_equals_never_having_seen_the_rest(many):
    _, path, ids, one, _ = many
    with Opened(path) as opened:
        model = opened.engine.model
        for kept in range(1, 9):
            state, plain = model.new_state(), model.new_state()
            model.forward(ids[:20], state)
            answer = model.forward(ids[20:28], state, want="all", undoable=True).logits.copy()
            state.keep(kept)
            assert answer.tobytes() == one[20:28].tobytes()
            model.forward(ids[: 20 + kept], plain)
            assert state.content() == plain.content()


# ---- memory and damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
def test_resident_bytes_are_the_files(tmp_path, family):
    """Nothing of a quantised file grows: what is resident takes the bytes it has in the file, for whole sixteens of
    rows. Embedding and n-gram tables are not resident."""
    config = wide(family)
    path = write_gguf(tmp_path / "m.gguf", config, weights_of(config), types="Q4_K", mtp=False)
    with Opened(path) as opened:
        engine, tensors = opened.engine, opened.engine.checkpoint.tensors
        experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
        dense = [tensor for name, tensor in tensors.items() if name not in experts and "embed" not in name]
        padding = sum(t.nbytes // t.shape[0] * (-t.shape[0] % 16) for t in dense if t.dtype == "Q4_K")
        assert engine.weights.nbytes == engine.terms.dense == sum(t.nbytes for t in dense) + padding
        assert engine.store.nbytes == sum(t.nbytes for t in experts.values())


@pytest.mark.parametrize(("dtype", "tensor", "name", "where"), [
    ("Q8_0", "layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight", "open"),
    ("Q4_K", "lm_head.weight", "output.weight", "open"),
    ("Q6_K", "layers.0.linear_attn.out_proj.weight", "blk.0.ssm_out.weight", "open"),
    ("F32", "layers.1.mlp.gate.weight", "blk.1.ffn_gate_inp.weight", "open"),
    ("F32", "layers.0.linear_attn.conv1d.weight", "blk.0.ssm_conv1d.weight", "open"),
    ("Q4_0", "layers.0.mlp.experts.down_proj", "blk.0.ffn_down_exps.weight", "read"),
    ("Q5_1", "layers.1.mlp.experts.gate_up_proj", "blk.1.ffn_gate_exps.weight", "read"),
    ("Q2_K", "layers.1.mlp.experts.gate_up_proj", "blk.1.ffn_gate_exps.weight", "read"),
])  # fmt: skip
def test_a_number_that_is_not_finite_is_found_and_named(tmp_path, dtype, tensor, name, where):
    """In what is compared, when the file is opened; in an expert when it is read."""
    config = wide(MOE)
    weights = weights_of(config)
    inner = config["moe_intermediate_size"] if tensor.endswith("gate_up_proj") else None
    weights[tensor][:, :inner] *= np.float32(1e38)  # beyond float16, the type of every scale
    if dtype == "F32":
        weights[tensor].reshape(-1)[1] = np.nan
    with np.errstate(all="ignore"):
        path = write_gguf(tmp_path / "m.gguf", config, weights, types=dtype)
    with pytest.raises(ModelError) as caught:
        opened = Opened(path)
        assert where == "read"
        with opened:
            opened.logits(np.arange(30, 60), [30])
    assert str(path) in str(caught.value) and name in str(caught.value) and caught.value.hint


def test_wishes_that_change_nothing_are_said(tmp_path):
    """No float matrix for --trunk int8, no expert for --experts int4."""
    config = wide(DENSE)
    every = {"": "Q8_0", "ffn_gate_inp.weight": "Q8_0"}
    path = write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config, 0, False), types=every, mtp=False)
    with Opened(path, trunk="int8", experts="int4") as opened:
        idle = [note for note in opened.engine.notes if "has no effect" in note]
    assert [note.split()[0] for note in idle] == ["--trunk", "--experts"]
    with Opened(write_tiny36(tmp_path / "floats", small(MOE)), trunk="int8", experts="int4") as opened:
        assert not [note for note in opened.engine.notes if "has no effect" in note]
