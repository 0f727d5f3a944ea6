"""What `coli info` says of a checkpoint, for every engine and format: taken from headers, adding up to the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from coli.formats.checkpoint import Checkpoint
from coli.models.describe import Description, describe
from coli.models.families import family_of
from coli.models.find import NANO
from tests.containers import write_container, write_sidecar
from tests.gguf_files import write_gguf
from tests.tiny import tiny_config, tiny_weights, write_tiny
from tests.tiny36 import block36_config, tiny36_config, tiny36_weights, write_tiny36

MOE, DENSE, CODER = "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"


def described(path: Path, beside: int = 0) -> Description:
    """The description, whose sums are those of the tensors; `beside`: those of a sidecar that is the model's own."""
    with Checkpoint.open(path) as checkpoint:
        family = family_of(checkpoint)
        geometry = family.geometry(checkpoint.config, checkpoint.config_path)
        found = describe(checkpoint, geometry, family.name)
        assert found.dense + found.experts + found.table + found.mtp == found.nbytes == checkpoint.nbytes + beside
        assert sum(nbytes for _, nbytes in found.types.values()) == found.nbytes
        assert beside or sum(count for count, _ in found.types.values()) == len(checkpoint.tensors)
        assert found.ignored == sum(tensor.nbytes for tensor in checkpoint.ignored)
    return found


def test_the_shipped_model() -> None:
    found = described(NANO)
    assert (found.engine, found.model_type) == ("qwen38", "qwen4_exp_text") and found.format == "safetensors, 1 file"
    assert found.quantisation == "none (BF16)" and found.head == "1 layer, experts fused, BF16" and found.table > 0


def test_fp8_with_a_table(tmp_path: Path) -> None:
    found = described(write_tiny(tmp_path, dtype="FP8", dense="FP8", block=(32, 48)))
    assert "FP8 in blocks of 32x48" in found.quantisation and "experts FP8 in blocks of 32x48" in found.quantisation
    assert "F8_E4M3" in found.types and found.head is not None and "FP8" in found.head


def test_a_folder_of_the_other_engine(tmp_path: Path) -> None:
    found = described(write_tiny36(tmp_path, tiny36_config(MOE), dtype="BF16", shards=3, visual=True))
    assert (found.engine, found.architecture) == ("qwen36", "Qwen3_5MoeForConditionalGeneration") and found.ignored > 0
    assert found.format.startswith("safetensors, ") and found.quantisation == "none (BF16)" and found.table == 0
    assert found.expert_record == 3 * 64 * 32 * 2 and found.head == "1 layer, experts fused, BF16"


def test_experts_of_the_head_one_by_one_and_heads_without_experts(tmp_path: Path) -> None:
    split = described(write_tiny36(tmp_path / "a", tiny36_config(MOE), dtype="FP8", block=(32, 48)))
    assert split.head is not None and split.head.startswith("1 layer, experts one by one, FP8 in blocks of 32x48")
    assert split.quantisation.startswith("dense ") and "experts FP8 in blocks of 32x48" in split.quantisation
    dense = described(write_tiny36(tmp_path / "b", tiny36_config(DENSE), dtype="BF16"))
    assert dense.head == "1 layer, dense MLP, BF16" and (dense.experts, dense.expert_record) == (0, 0)
    coder = described(write_tiny36(tmp_path / "c", tiny36_config(CODER), dtype="F32"))
    assert coder.head is None and coder.mtp == 0 and coder.quantisation == "none (F32)"


def test_a_gguf_with_mixed_types(tmp_path: Path) -> None:
    config = block36_config(MOE)
    types = {"": "Q8_0", "ffn_down_exps.weight": "Q6_K", "ffn_gate_exps.weight": "Q4_K", "ffn_up_exps.weight": "Q3_K",
             "token_embd.weight": "F16"}  # fmt: skip
    found = described(write_gguf(tmp_path / "m.gguf", config, tiny36_weights(config), types=types, splits=2))
    assert found.format == "GGUF, 2 files" and found.architecture == "qwen35moe" and found.engine == "qwen36"
    dense, experts, decoded = found.quantisation.split("; ")
    assert dense.startswith("dense ") and "Q8_0" in dense and "F16" in dense
    assert experts == "experts Q6_K, Q4_K, Q3_K" and decoded == "Q3_K decoded to float32 when loaded"
    assert {"Q8_0", "Q6_K", "Q4_K", "Q3_K", "F32", "F16"} == set(found.types)
    assert found.head is not None and found.head.startswith("1 layer, experts stacked, ")


@pytest.mark.parametrize(("options", "words"), [
    (dict(bits=4, group=0), "int4 rows"), (dict(bits=8, group=32), "int8 groups of 32"),
    (dict(bits=4, down_bits=8, group=16, down_group=0), "int4 groups of 16 (down int8 rows)"),
])  # fmt: skip
def test_a_container(tmp_path: Path, options: dict[str, int], words: str) -> None:
    write_container(tmp_path / "c", tiny36_config(MOE), **options)
    found = described(tmp_path / "c")
    assert found.format.startswith("int4/int8 container, ") and found.quantisation == f"dense F16; experts {words}"
    assert found.head is not None and found.head.startswith("1 layer, experts packed, ") and words in found.head


def test_what_lies_beside_a_checkpoint_is_named(tmp_path: Path) -> None:
    config = tiny36_config(MOE)
    folder = write_tiny36(tmp_path / "a", config, dtype="BF16")
    write_sidecar(folder, tiny36_weights(config))
    write_sidecar(folder, tiny36_weights(config), bits=8, group=32, index={"complete": False})
    assert described(folder).quantisation == (
        "none (BF16); beside it experts-int4g64; beside it experts-int8g32, not complete"
    )


def drop_experts(weights: dict[str, np.ndarray]) -> None:
    for name in [name for name in weights if ".mlp.experts." in name]:
        del weights[name]


@pytest.mark.parametrize(("bits", "group", "nbytes"), [(4, 64, 0.5 + 4 / 64), (8, 32, 1 + 4 / 32)])
def test_experts_that_are_only_in_a_sidecar_are_the_models_own(
    tmp_path: Path, bits: int, group: int, nbytes: float
) -> None:
    config = tiny_config(hidden_size=64, moe_intermediate_size=64)
    weights, folder = tiny_weights(config), write_tiny(tmp_path, config, dtype="BF16", change=drop_experts)
    write_sidecar(folder, weights, bits=bits, group=group, index={"complete": False})
    left = described(folder)
    assert "not complete" in left.quantisation and left.head == "1 layer, experts missing, BF16"
    shutil.rmtree(folder / f"experts-int{bits}g{group}")
    write_sidecar(folder, weights, bits=bits, group=group)
    record = round(3 * 64 * 64 * nbytes)
    stored = record * config["num_experts"] * (config["num_hidden_layers"] + 1)  # and the head's
    found = described(folder, stored)
    assert found.expert_record == record and found.experts == stored - record * config["num_experts"]
    assert found.quantisation == f"dense BF16; experts int{bits} groups of {group}; n-gram table BF16"
    assert found.format == f"safetensors, 1 file, and experts-int{bits}g{group}"
    assert found.head == f"1 layer, experts one by one, BF16, int{bits} groups of {group}"
    assert found.types[{4: "U8", 8: "I8"}[bits]][0] == 3 * config["num_experts"] * (config["num_hidden_layers"] + 1)
