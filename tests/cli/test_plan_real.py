"""The real models from their configs alone: known sizes (model_spec 11, spec_decoding 2), and the README's table."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from coli import memory
from coli.formats.imagined import imagine
from coli.models.families import Family, family_of
from coli.planning.header_cache import surveyed
from coli.planning.plan import make_plan
from coli.planning.survey import Survey
from coli.settings import load
from tests.cli import plan_table

CONFIGS = Path(__file__).parents[1] / "configs"
FLASH, A3B, DENSE, CODER = "qwen3.8-flash-next-fp8", "qwen3.6-35b-a3b", "qwen3.8-27b", "qwen3-coder-next"
MODELS = (FLASH, A3B, DENSE, CODER)
MIB, GIB = 1 << 20, 1 << 30


def opened(model: str, weights: str | None = None) -> tuple[Any, Family, Any]:
    checkpoint = imagine(CONFIGS / f"{model}.json", weights)
    family = family_of(checkpoint)
    return checkpoint, family, family.geometry(checkpoint.config, checkpoint.config_path)


def survey_of(model: str, weights: str | None = None, **flags: Any) -> Survey:
    return surveyed(CONFIGS / f"{model}.json", load(flags, {})[0], weights)


def state_of(model: str) -> Any:
    _, family, g = opened(model)
    return family.state_spec(g)


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "nbytes"), [(FLASH, 118_038_528), (A3B, 65_863_680), (DENSE, 156_893_184), (CODER, 79_036_416)]
)
def test_a_copy_of_the_recurrent_state(model, nbytes):
    assert state_of(model).snapshot_bytes(0) == nbytes


@pytest.mark.parametrize(("model", "slots"), [(FLASH, {1: 113, 3: 338, 5: 563}), (A3B, {1: 63, 5: 314})])
def test_copies_for_a_verify(model, slots):
    for rows, mebibytes in slots.items():
        assert round(rows * state_of(model).snapshot_bytes(0) / MIB) == mebibytes


def test_undo_slots_hold_what_cannot_be_rewound():
    """The rings are addressed by position and need no copy: a slot is S alone."""
    spec = state_of(FLASH)
    assert spec.recurrent_bytes() == 36 * 3_145_728 and spec.undo_bytes("slots", 5) == 5 * 36 * 3_145_728
    assert spec.snapshot_bytes(0) - spec.recurrent_bytes() == 36 * 122_880 + 368_640
    found = survey_of(FLASH)
    for drafts, rows in ((2, 5), (3, 5)):  # prompt lookup brings up to five
        settings = load({"undo": "slots", "drafts": drafts, "threads": 8}, {})[0].resolve(found.engine)
        assert make_plan(found, settings, 64 * 10**9).terms.undo == rows * spec.recurrent_bytes()
    settings = load({"undo": "slots", "drafts": 2, "lookup": False, "threads": 8}, {})[0].resolve(found.engine)
    assert make_plan(found, settings, 64 * 10**9).terms.undo == 2 * spec.recurrent_bytes()


@pytest.mark.parametrize(
    ("model", "trunk", "head", "pooled"),
    [(FLASH, 55_296, 59_904, 12 * 128 // 4 * 4), (A3B, 40_960, 45_056, 0), (DENSE, 131_072, 139_264, 0),
     (CODER, 49_152, None, 0)],
)  # fmt: skip
def test_bytes_of_a_context_token(model, trunk, head, pooled):
    _, family, g = opened(model)
    found = family.state_spec(g).kv_bytes_per_token()
    assert found == trunk + pooled
    if head is not None:
        assert family.head_spec(g).kv_bytes_per_token() == head - trunk + pooled // 12
    settings = load({"ctx": 8192, "threads": 8}, {})[0].resolve(family.name)
    assert make_plan(survey_of(model), settings, 64 * 10**9).terms.kv == 8192 * found


# ---- weights ---------------------------------------------------------------------------------------------------------


def aligned(*parts: int) -> int:
    """Parts of a record begin on 64-byte boundaries."""
    return sum(-(-part // 64) * 64 for part in parts)


@pytest.mark.parametrize(
    ("model", "weights", "nbytes", "record"),
    [
        (FLASH, None, 4_915_200, 4_915_200 + aligned(400, 400, 400)),  # 600 bytes of bf16 scales, widened
        (FLASH, "bf16", 9_830_400, 9_830_400),
        (FLASH, "int4-g64", 2_764_800, 2_764_800),
        (A3B, None, 6_291_456, 6_291_456),
        (A3B, "fp8", 3_145_728, 3_145_728 + aligned(256, 256, 256)),
        (A3B, "int4-g64", 1_769_472, 1_769_472),
        (CODER, None, 6_291_456, 6_291_456),
        (CODER, "int4-g64", 1_769_472, 1_769_472),
    ],
)  # fmt: skip
def test_an_expert(model, weights, nbytes, record):
    found = survey_of(model, weights)
    assert set(found.slots) == {record} and len(found.slots) == found.geometry.layers
    assert found.experts is not None
    codes = {layer.stored for layer in found.experts.layers}
    assert codes == {nbytes - (0 if weights != "int4-g64" else nbytes // 9)}, "a ninth of an int4 record is scales"


def test_widened_scales_of_an_fp8_expert():
    checkpoint, _, _ = opened(FLASH)
    one = [checkpoint[f"layers.0.mlp.experts.{part}_scale_inv"] for part in ("gate_up_proj", "down_proj")]
    assert sum(scale.nbytes for scale in one) == 512 * 600 and {scale.dtype for scale in one} == {"BF16"}


@pytest.mark.parametrize(
    ("model", "routed", "head"),
    [(FLASH, 120.8e9, 2_607_150_848), (A3B, 32.2e9, 844_640_768), (CODER, 77.3e9, None), (DENSE, 0, 424_699_392)],
)
def test_numbers_of_parameters(model, routed, head):
    checkpoint, family, g = opened(model, "bf16")
    sizes = {name: tensor.nbytes // 2 for name, tensor in checkpoint.tensors.items() if tensor.dtype == "BF16"}
    experts = sum(n for name, n in sizes.items() if ".mlp.experts." in name and not name.startswith("mtp."))
    assert round(experts / 1e8) == round(routed / 1e8)
    if head is not None:
        assert sum(n for name, n in sizes.items() if name.startswith("mtp.")) == head
    whole = sum(n for name, n in sizes.items() if not name.startswith("mtp.") and ".ngram_embedding." not in name)
    billions = {FLASH: 125.74, A3B: 34.66, DENSE: 26.90, CODER: 79.67}[model]
    assert round(whole / 1e9, 2) == billions


def test_the_table_of_the_flash_model():
    checkpoint, _, _ = opened(FLASH)
    table = [tensor for name, tensor in checkpoint.tensors.items() if ".ngram_embedding.shard" in name]
    assert sum(t.shape[0] for t in table) == 320_001_536 and len(table) == 128
    assert sum(t.nbytes for t in table) == 51_200_245_760
    assert round(checkpoint.nbytes / 1e9, 1) == 184.6, "185.5 GB with the vision tower"


@pytest.mark.parametrize(
    ("model", "weights", "whole", "dense"),
    [(FLASH, "bf16", 4.86, 0.17), (FLASH, None, 2.34 + 0.17, 0.17), (A3B, None, 1.573, 75 / 1024),
     (DENSE, None, 810 / 1024, 810 / 1024)],
)  # fmt: skip
def test_a_draft_head(model, weights, whole, dense):
    checkpoint, _, _ = opened(model, weights)
    stored = sum(tensor.nbytes for name, tensor in checkpoint.tensors.items() if name.startswith("mtp."))
    found = survey_of(model, weights)
    assert found.head is not None and abs(stored / GIB - whole) < 0.006
    assert abs(sum(found.head.dense.values()) / GIB - dense) < 0.005
    if found.head.slot:
        assert found.head.slot == found.slots[0]


@pytest.mark.parametrize(("model", "gibibytes"), [(FLASH, 1.18), (A3B, 0.95), (DENSE, 2.37)])
def test_embedding_and_lm_head(model, gibibytes):
    """The embedding stays in the file: its rows are read one by one."""
    checkpoint, _, _ = opened(model, "bf16")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert round(checkpoint[name].nbytes / GIB, 2) == gibibytes
    dense = sum(survey_of(model, "bf16").dense.values())
    kept = sum(t.nbytes for name, t in checkpoint.tensors.items() if not name.startswith("mtp.")
               and ".mlp.experts." not in name and ".ngram_embedding." not in name)  # fmt: skip
    assert dense == kept - checkpoint["embed_tokens.weight"].nbytes


def test_llama_cpp_gives_half_of_the_down_matrices_six_bits():
    found = survey_of(A3B, "q4_k_m")
    assert found.format == "Q4_K, down Q6_K in 20 of 40 layers"
    assert {m.matrix.dtype for layer in found.experts.layers for m in layer.located} == {"Q4_K", "Q6_K"}
    assert survey_of(FLASH, "q4_k_m").format == "Q4_K, down Q5_0 in 24 of 48 layers, down Q8_0 in 24 of 48 layers"


# ---- the README's table ----------------------------------------------------------------------------------------------


def test_no_term_is_left_out_of_the_table():
    named = [term for _, terms in plan_table.COLUMNS.values() for term in terms]
    assert sorted(named) == sorted([*(field.name for field in fields(memory.Terms)), "head_experts"])


@pytest.mark.parametrize("row", plan_table.ROWS, ids=lambda row: row.title)
def test_the_columns_of_a_row_are_its_total(row):
    plan = plan_table.plan_of(row, row.budgets[-1])
    parts = plan_table.parts(plan)
    assert sum(parts.values()) + plan.cap * sum(plan.survey.slots) == plan.total <= row.budgets[-1] * 1e9
    assert parts["dense"] == plan.terms.dense and parts["K/V 8192"] == 8192 * state_of(row.config).kv_bytes_per_token()
    assert sum(asdict(plan.terms).values()) == plan.terms.total


def test_the_readme_has_the_table():
    text = plan_table.README.read_text()
    assert text.count(plan_table.BEGIN) == text.count(plan_table.END) == 1
    found = text.split(plan_table.BEGIN)[1].split(plan_table.END)[0]
    assert found == plan_table.table(), "python -m tests.cli.plan_table --write"
    assert text.index("## Will it fit?") < text.index(plan_table.BEGIN) < text.index("## What works today")
