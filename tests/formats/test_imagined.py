"""A model that is not there: its plan is the plan of the real files, term by term, in every family and format.

The real ones are generated; what llama.cpp would make of a tensor is written here a second time, over GGUF's names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from coli.convert.convert import convert
from coli.convert.report import Options
from coli.errors import ModelError, UsageError
from coli.formats.checkpoint import Checkpoint
from coli.formats.imagined import imagine, is_bare
from coli.models.describe import describe
from coli.models.families import family_of
from coli.planning.plan import Plan, make_plan
from coli.planning.survey import Survey, survey
from coli.settings import load
from tests.containers import write_sidecar
from tests.gguf_blocks import elements
from tests.gguf_files import layout, write_gguf
from tests.tiny import odd_config, tiny_config, tiny_weights, write_tiny
from tests.tiny36 import FAMILIES, block36_config, odd36_config, tiny36_config, tiny36_weights, write_tiny36

FLASH = "qwen4_exp_text"
ALL = (FLASH, *FAMILIES)
FLAGS: tuple[dict[str, Any], ...] = (
    {"mtp": False}, {}, {"trunk": "int8", "ctx": 64}, {"experts": "int4", "undo": "slots", "drafts": 2},
)  # fmt: skip


def config_of(family: str, size: str, **overrides: Any) -> dict[str, Any]:
    """A config that says of its draft head what the files have."""
    if family == FLASH:
        make: Any = {"tiny": tiny_config, "odd": odd_config, "block": _block}[size]
        return make(**overrides)
    made = {"tiny": tiny36_config, "odd": odd36_config, "block": block36_config}[size](family, **overrides)
    return made | ({"mtp_num_hidden_layers": 1} if family == "qwen3_next" else {})


def _block(**overrides: Any) -> dict[str, Any]:
    """Columns in multiples of 256, so that K blocks fit, but for the low rank of the streams' mixers."""
    return tiny_config(hidden_size=256, moe_intermediate_size=256, shared_expert_intermediate_size=256,
                       num_attention_heads=8, linear_num_value_heads=16, ple_embed_dim=256, **overrides)  # fmt: skip


def weights_of(config: dict[str, Any]) -> Any:
    return tiny_weights(config) if config["model_type"] == FLASH else tiny36_weights(config)


def write(folder: Path, config: dict[str, Any], **how: Any) -> Path:
    return (write_tiny if config["model_type"] == FLASH else write_tiny36)(folder, config, **how)


def bare(folder: Path, config: dict[str, Any] | Path) -> Path:
    """A folder with nothing but a config.json: this one, or that of a model."""
    folder.mkdir()
    text = (config / "config.json").read_text() if isinstance(config, Path) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def plans(checkpoint: Checkpoint, flags: dict[str, Any]) -> tuple[Survey, Plan]:
    family = family_of(checkpoint)
    settings = load(flags | {"threads": 2}, {})[0].resolve(family.name)
    geometry = family.geometry(checkpoint.config, checkpoint.config_path)
    family.check(checkpoint, geometry)
    found = survey(checkpoint, family, geometry, settings)
    settings = settings.override(page_cache="drop")  # else the buffers of such reads come and go with the budget
    floor = make_plan(found, settings, 1 << 40)
    budget = floor.terms.total + 3 * found.slot + (3 * floor.survey.head.slot if floor.head and found.head else 0)
    return found, make_plan(found, settings, budget)


def compare(real: Path, imagined: Path, word: str | None = None, flags: tuple[dict[str, Any], ...] = FLAGS) -> Survey:
    """Both surveys are equal and so are the plans; the survey of the last flags."""
    for given in flags:
        with Checkpoint.open(real) as checkpoint:
            there, plan = plans(checkpoint, given)
            theirs = describe(checkpoint, there.geometry, there.engine)
        invented = imagine(imagined, word)
        here, guess = plans(invented, given)
        # a GGUF file does not store how the n-gram table was split, nor its hash's seed
        same = there.geometry if word in BASE else here.geometry
        assert replace(here, path=there.path, geometry=same) == there
        assert asdict(guess.terms) == asdict(plan.terms)
        assert (guess.cap, guess.head, guess.head_cap, guess.total) == (plan.cap, plan.head, plan.head_cap, plan.total)
        assert guess.cap == (3 if there.slots else 0)
        ours = describe(invented, here.geometry, here.engine)
        sizes = ("dense", "experts", "table", "mtp", "expert_record", "quantisation")
        assert {name: getattr(ours, name) for name in sizes} == {name: getattr(theirs, name) for name in sizes}
    return there


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["tiny", "odd"])
@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_floats(tmp_path, family, size, dtype):
    named = {"BF16": None, "F16": "float16", "F32": "float32"}[dtype]
    config = config_of(family, size, **({"torch_dtype": named} if named else {}))
    real = write(tmp_path / "m", config, dtype=dtype)
    found = compare(real, bare(tmp_path / "bare", real))
    assert found.has_head == (family != "qwen3_moe") and (found.head is not None) == found.has_head


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("block", [(16, 32), (128, 128)])
def test_fp8_as_the_releases_have_it(tmp_path, family, block):
    real = write(tmp_path / "m", config_of(family, "tiny"), dtype="FP8", block=block)
    found = compare(real, bare(tmp_path / "bare", real), flags=FLAGS[:3])
    assert ("F8_E4M3" in found.dense) == (family != FLASH) and found.format in ("FP8", "none")


def test_fp8_where_the_config_lists_what_stays(tmp_path):
    """Names in a release's spelling: a module, a module around others, parts of a name."""
    config = tiny36_config("qwen3_5_moe_text")
    left = ("lm_head", "model.language_model.layers.0.mlp", "model.layers.0.linear_attn", "mtp.fc", "model.visual.a",
            "shared_expert", "mlp.gate", "shared_expert_gate", "in_proj_a", "in_proj_b")  # fmt: skip

    def coded(name: str) -> bool:
        return "_proj" in name and not (
            name.startswith("layers.0.") or "shared_expert" in name or "in_proj_a" in name or "in_proj_b" in name
        )

    real = write_tiny36(tmp_path / "m", config, dtype="FP8", fp8=coded, block=(16, 16))
    text = json.loads((real / "config.json").read_text())
    text["quantization_config"]["modules_to_not_convert"] = list(left)
    (real / "config.json").write_text(json.dumps(text))
    found = compare(real, bare(tmp_path / "bare", real), flags=FLAGS[:3])
    assert found.slots[0] > found.slots[1], "the experts of layer 0 stay bf16"


@pytest.mark.parametrize("word", ["bf16", "fp8", "FP8"])
def test_a_word_wins_over_the_config(tmp_path, word):
    dtype = word.upper()
    config = tiny_config(dtype="float32")
    real = write_tiny(tmp_path / "m", config, dtype=dtype)
    compare(real, bare(tmp_path / "bare", config), word, FLAGS[:1])


@pytest.mark.parametrize(("family", "size"), [("qwen4_exp_text", "tiny"), ("qwen3_5_text", "odd")])
def test_a_tied_model_and_one_without_a_head(tmp_path, family, size):
    config = config_of(family, size, tie_word_embeddings=True, mtp_num_hidden_layers=0)

    def untie(weights: dict[str, Any]) -> None:
        weights.pop("lm_head.weight", None)

    real = write(tmp_path / "m", config, dtype="BF16", mtp=False, change=untie)
    found = compare(real, bare(tmp_path / "bare", real))
    assert not found.has_head


# ---- GGUF ------------------------------------------------------------------------------------------------------------

BASE = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K"}


def quantised(config: dict[str, Any], word: str) -> dict[str, str]:
    """GGUF name -> type, as llama-quantize chooses it."""
    tensors = layout(config, weights_of(config))
    blocks = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    last = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    types, values = {}, 0
    for name, array in sorted(tensors.items(), key=lambda item: (_number(item[0]), item[0])):
        kind, number = BASE[word], _number(name)
        if name == last and kind != "Q8_0":
            kind = "Q6_K"
        elif word == "q4_k_m" and name.endswith("attn_v.weight"):
            kind, values = "Q6_K" if _more(values, blocks) else kind, values + 1
        elif word == "q4_k_m" and name.endswith("attn_qkv.weight"):
            kind = "Q5_K"
        elif word == "q4_k_m" and "ffn_down" in name and _more(number, blocks):
            kind = "Q6_K"
        if array.shape[-1] % elements(kind):
            kind = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}.get(kind, kind)
        if array.shape[-1] % elements(kind):
            kind = "F16"
        floats = array.ndim == 1 or name.endswith(("ffn_gate_inp.weight", "conv1d.weight"))
        types[name] = "F32" if floats else kind
    return types


def _number(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _more(i: int, n: int) -> bool:
    return i in range(n // 8) or i >= n * 7 // 8 or (i - n // 8) % 3 == 2


@pytest.mark.parametrize("size", ["tiny", "block"])
@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("word", list(BASE))
def test_gguf(tmp_path, family, size, word):
    config = config_of(family, size)
    real = write_gguf(tmp_path / "m.gguf", config, weights_of(config), types=quantised(config, word))
    found = compare(real, bare(tmp_path / "bare", config), word, FLAGS[:2] if size == "tiny" else FLAGS)
    if size == "block" and word == "q4_k_m":
        assert {"Q4_K", "Q6_K"} <= found.dense.keys()
        assert family == "qwen3_5_text" or "Q6_K" in found.format


def test_a_tied_gguf_has_its_embedding_in_six_bits(tmp_path):
    config = config_of("qwen3_5_moe_text", "block", tie_word_embeddings=True)
    types = quantised(config, "q4_k_m")
    assert types["token_embd.weight"] == "Q6_K" and "output.weight" not in types
    real = write_gguf(tmp_path / "m.gguf", config, weights_of(config), types=types)
    compare(real, bare(tmp_path / "bare", config), "q4_k_m")


@pytest.mark.parametrize(("word", "gigabytes"), [("q4_0", 17.30), ("q4_k_m", 18.55), ("q8_0", 32.48), ("bf16", 61.06)])
def test_sizes_of_files_that_are_published(tmp_path, word, gigabytes):
    """Qwen3-30B-A3B: what its GGUF files on the hub weigh, tokenizer apart."""
    config = dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, vocab_size=151_936, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=262_144,
    )  # fmt: skip
    assert round(imagine(bare(tmp_path / "bare", config), word).nbytes / 1e9, 2) == gigabytes


# ---- int4 experts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [f for f in ALL if f != "qwen3_5_text"])
@pytest.mark.parametrize("flags", [{"mtp": False}, {}, {"trunk": "int8"}])
def test_int4_groups_of_64(tmp_path, family, flags):
    """The same numbers by `--experts int4`, from what `coli convert` wrote, and from the config alone."""
    config = config_of(family, "block" if family == FLASH else "tiny")
    real = write(tmp_path / "m", config, dtype="BF16")
    guess = plans(imagine(bare(tmp_path / "bare", real), "int4-g64"), flags)[1]
    assert guess.cap == 3
    with Checkpoint.open(real) as checkpoint:
        made = plans(checkpoint, flags | {"experts": "int4"})[1]
    if family == FLASH:
        write_sidecar(real, tiny_weights(config))
        with Checkpoint.open(real) as checkpoint:
            stored = plans(checkpoint, flags | {"experts": "int4"})[1]
    else:
        convert(real, tmp_path / "out", Options())
        with Checkpoint.open(tmp_path / "out") as checkpoint:
            stored = plans(checkpoint, flags)[1]
    for other in (made, stored):
        assert asdict(other.terms) == asdict(guess.terms)
        assert (other.cap, other.head_cap, other.total) == (guess.cap, guess.head_cap, guess.total)
        assert other.survey.slots == guess.survey.slots


def test_int4_keeps_the_dense_weights_of_an_fp8_release(tmp_path):
    real = write_tiny36(tmp_path / "m", tiny36_config("qwen3_5_moe_text"), dtype="FP8", block=(16, 16))
    here = plans(imagine(bare(tmp_path / "bare", real), "int4-g64"), {})[0]
    with Checkpoint.open(real) as checkpoint:
        there = plans(checkpoint, {"experts": "int4"})[0]
    assert here.dense == there.dense and "F8_E4M3" in here.dense and here.slots == there.slots
    assert here.format.startswith("int4 ")


# ---- what it is not --------------------------------------------------------------------------------------------------


def test_what_counts_as_bare(tmp_path):
    real = write_tiny(tmp_path / "m")
    assert not is_bare(real) and not is_bare(tmp_path) and not is_bare(tmp_path / "no")
    folder = bare(tmp_path / "bare", real)
    assert is_bare(folder) and is_bare(folder / "config.json")
    for name in ("tokenizer.json", "model.safetensors.index.json"):
        (folder / name).write_text("{}")
        assert is_bare(folder)
    for name in ("model-00001-of-00002.safetensors", "convert.json", "model.gguf", "pytorch_model.bin"):
        (folder / name).write_text("")
        assert not is_bare(folder)
        (folder / name).unlink()


def test_a_config_of_any_name(tmp_path):
    folder = bare(tmp_path / "bare", tiny_config())
    there, here = imagine(folder), imagine((folder / "config.json").rename(tmp_path / "flash.json"))
    assert here.nbytes == there.nbytes and here.config_path == here.folder == tmp_path / "flash.json"


def test_no_weight_can_be_read(tmp_path):
    checkpoint = imagine(bare(tmp_path / "bare", tiny_config()))
    for read in (checkpoint.load, checkpoint.view, lambda name: checkpoint.fd(checkpoint[name])):
        with pytest.raises(ModelError, match="only its config is here"):
            read("lm_head.weight")


@pytest.mark.parametrize(
    ("config", "word", "error", "words"),
    [
        ({}, "q5_1", UsageError, "'?q5_1'? is no format of weights .*bf16, fp8, q8_0"),
        ({"quantization_config": {"quant_method": "awq"}}, None, ModelError, "weights quantised by awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, ModelError, "no weight_block_size"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
                                  "modules_to_not_convert": "lm_head"}}, None, ModelError, "not a list of names"),
        ({"dtype": "int8"}, None, ModelError, "dtype: int8 is not one of"),
        ({"model_type": "llama"}, None, ModelError, "model type llama"),
        ({"mtp_num_hidden_layers": -1}, None, ModelError, "mtp_num_hidden_layers"),
        ({"hidden_size": None}, None, ModelError, "hidden_size: missing"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, config, word, error, words):
    with pytest.raises(error, match=words):
        imagine(bare(tmp_path / "bare", tiny_config(**config)), word)


def test_a_quantised_config_can_be_planned_in_another_format(tmp_path):
    folder = bare(tmp_path / "bare", tiny_config(quantization_config={"quant_method": "awq"}))
    assert imagine(folder, "bf16").nbytes > imagine(folder, "fp8").nbytes > imagine(folder, "q4_0").nbytes


def test_int4_experts_of_a_model_without_any(tmp_path):
    with pytest.raises(UsageError, match="this model has none"):
        imagine(bare(tmp_path / "bare", tiny36_config("qwen3_5_text")), "int4-g64")


def test_nothing_where_a_config_should_be(tmp_path):
    with pytest.raises(ModelError, match="config is missing"):
        imagine(tmp_path / "none.json")
    (tmp_path / "torn.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="not valid JSON"):
        imagine(tmp_path / "torn.json")
