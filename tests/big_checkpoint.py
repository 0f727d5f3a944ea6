"""A generated checkpoint with the real geometry per layer of Qwen3.8-Flash-Next FP8, for loading and speed tests.

    python -m tests.big_checkpoint FOLDER [--layers 4] [--dense-experts] [--bf16]

Real are all shapes, dtypes, names and scales (model_spec.md 5a, 5d): hidden 2560, 512 experts a layer, vocabulary
248,320, an n-gram table of 320,001,536 x 160 FP8 in 128 shards. Few are the layers. Weights are small random numbers
from one repeated pattern, so that a forward stays finite. The table (51 GB) is always a hole in its file, the experts
(2.5 GB a layer) are holes unless `sparse=False`; a hole reads as zeros. What is left to write is some 3.3 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from coli.experts.records import trunk_layers
from coli.models.qwen38_layout import HEAD, expected, expected_head, geometry, hash_buffers
from coli.ngrams import NgramHash
from tests.tiny import ITEM, bf16, header_bytes, write_text_files

PATTERN = 16 << 20
FP8_SCALE = 1e-4  # random codes have a standard deviation near 130, the real weights one near 0.02
Spec = tuple[str, tuple[int, ...]]


def real_config(layers: int = 4, *, experts_fp8: bool = True, **others: Any) -> dict[str, Any]:
    """The text config of Qwen3.8-Flash-Next with `layers` layers; `others` replace what it says."""
    config: dict[str, Any] = dict(
        model_type="qwen4_exp_text", hidden_size=2560, vocab_size=248_320, num_hidden_layers=layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        num_attention_heads=24, num_key_value_heads=2, head_dim=256, hidden_act="silu", linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=48,
        output_gate_type="sigmoid", num_experts=512, num_experts_per_tok=10, moe_intermediate_size=640,
        shared_expert_intermediate_size=640, norm_topk_prob=True, hc_count=4, hc_lowrank=320, ple_layer_ids=[2],
        ple_embed_dim=2560, ple_conv_kernel_size=4, ngram_size=3, heads_per_ngram=8, ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128, split_ngram_parts=128, seed=1234, indexer_n_heads=4,
        indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=2048, indexer_compress_ratio=4, rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
                             mrope_section=[11, 11, 10], mrope_interleaved=True),
        max_position_embeddings=262_144, tie_word_embeddings=False, eos_token_id=248_044,
    )  # fmt: skip
    if experts_fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return config | others


def write_real_geometry(
    folder: Path, layers: int = 4, *, experts_fp8: bool = True, sparse: bool = True, **others: Any
) -> Path:
    """Write the checkpoint: FP8 experts one by one, or BF16 fused; `sparse` leaves the experts' weights as holes;
    `others` replace what the config says."""
    folder.mkdir(parents=True, exist_ok=True)
    config = real_config(layers, experts_fp8=experts_fp8, **others)
    quantization = config.pop("quantization_config", None)
    raw = {"model_type": "qwen4_exp", "text_config": config} | (
        {"quantization_config": quantization} if quantization else {}
    )
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    files = _plan(config, experts_fp8)
    patterns = {dtype: _pattern(dtype) for dtype in ("BF16", "F8_E4M3")}
    placed: dict[str, str] = {}
    for number, specs in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(folder / file, specs, config, patterns, sparse)
        placed |= dict.fromkeys(specs, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    write_text_files(folder, config["vocab_size"])
    return folder


def _plan(config: dict[str, Any], fp8: bool) -> list[dict[str, Spec]]:
    """The tensors of every file: all dense ones, each layer's experts and the head's, each PLE layer's table."""
    g = geometry(config)
    fused = set() if fp8 else {f"{layer}mlp.experts.gate_up_proj" for layer in (*trunk_layers(g), HEAD)}
    files: dict[str, dict[str, Spec]] = {"dense": {}}
    for name, shape in (expected(g, fused) | expected_head(g, fused)).items():
        stored = name if name.startswith(("lm_head.", "mtp.")) else f"model.language_model.{name}"
        layer = "head" if name.startswith("mtp.") else name.split(".")[1]
        if ".mlp.experts." in name:
            group = files.setdefault(f"experts {layer}", {})
            group[stored] = "F8_E4M3" if fp8 else "BF16", shape
            if fp8:
                group[f"{stored}_scale_inv"] = "BF16", (-(-shape[0] // 128), -(-shape[1] // 128))
        elif ".ngram_embedding." in name:
            group = files.setdefault(f"table {layer}", {})
            group[stored] = "F8_E4M3", shape
            group[f"{stored.rsplit('.', 2)[0]}.weight_scale"] = "BF16", (1,)
        else:
            buffer = name.endswith(("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"))
            files["dense"][stored] = "I64" if buffer else "BF16", shape
    return list(files.values())


def _pattern(dtype: str) -> np.ndarray:
    rng = np.random.default_rng(8)
    if dtype == "BF16":
        return bf16(0.02 * rng.standard_normal(PATTERN // 2, np.float32)).view(np.uint8)
    codes = rng.integers(0, 256, PATTERN, np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    return codes


def _write(
    path: Path, specs: dict[str, Spec], config: dict[str, Any], patterns: dict[str, np.ndarray], sparse: bool
) -> None:
    order = sorted(specs, key=lambda name: -ITEM[specs[name][0]])
    head, offsets = header_bytes({name: specs[name] for name in order})
    buffers = _buffers(config)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.pwrite(fd, head, 0)
        sizes = {name: math.prod(shape) * ITEM[dtype] for name, (dtype, shape) in specs.items()}
        os.truncate(fd, max(offsets[name] + sizes[name] for name in specs))
        for name, (dtype, shape) in specs.items():
            if ".ngram_embedding.shard_" in name or (sparse and ".experts." in name and "_scale_inv" not in name):
                continue
            data = _values(name, shape, buffers)
            if data is not None:
                os.pwrite(fd, data.tobytes(), offsets[name])
            else:
                _fill(fd, patterns[dtype], offsets[name], sizes[name])
    finally:
        os.close(fd)


def _buffers(config: dict[str, Any]) -> dict[str, np.ndarray]:
    g = geometry(config)
    found: dict[str, np.ndarray] = {}
    for index, layer in enumerate(g.ple_layers):
        found |= hash_buffers(NgramHash(g, index), layer)
    return {f"model.language_model.{name}": values for name, values in found.items()}


def _values(name: str, shape: tuple[int, ...], buffers: dict[str, np.ndarray]) -> np.ndarray | None:
    """The few tensors that are not the pattern: scales, hash constants, and the one norm that is not centred at 0."""
    if name in buffers:
        return buffers[name]
    if name.endswith(("_scale_inv", ".weight_scale")):
        return bf16(np.full(shape, FP8_SCALE, np.float32))
    if name.endswith("linear_attn.norm.weight"):
        return bf16(np.ones(shape, np.float32))
    return None


def _fill(fd: int, pattern: np.ndarray, offset: int, nbytes: int) -> None:
    """`nbytes` of the repeated pattern, its start shifted by the offset so that neighbours differ."""
    start = offset % 65_537 // 8 * 8
    while nbytes:
        piece = pattern[start : start + nbytes]
        written = os.pwrite(fd, piece, offset)
        offset, nbytes, start = offset + written, nbytes - written, 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with the real geometry per layer.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dense-experts", action="store_true", help="write the experts' bytes too (2.5 GB a layer)")
    parser.add_argument("--bf16", action="store_true", help="BF16 fused experts instead of FP8")
    args = parser.parse_args()
    start = time.perf_counter()
    write_real_geometry(args.folder, args.layers, experts_fp8=not args.bf16, sparse=not args.dense_experts)
    used = sum(path.stat().st_blocks * 512 for path in args.folder.iterdir())
    apparent = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{apparent / 1e9:.1f} GB, {used / 1e9:.1f} GB on disk, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
