"""What a release, llama.cpp or `coli convert` would store each tensor of a model as, from names and shapes alone.

Idea: a recipe is a function from a layout's table (canonical name -> shape) to dtypes; coli/formats/imagined.py makes a
checkpoint of that. Three kinds of maker:

    releases    floats as the config's dtype says; with FP8 every linear matrix that `modules_to_not_convert` does not
                list, or without such a list what the makers of these models quantise (model_spec.md 3d, 4d, 5d)
    llama.cpp   `llama-quantize`: vectors, convolutions and routers stay F32, lm_head gets six bits, and q4_k_m gives
                six to the V and down projections of every layer that `_more_bits` picks and five to DeltaNet's q, k, v;
                a row that is no whole blocks falls back to blocks of 32, then to F16
    coli        dense tensors as the release has them, routed experts int4 in groups of 64

Guarded by tests/formats/test_imagined.py, which compares plans with those of real files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from coli.errors import ModelError, UsageError
from coli.formats.checkpoint import canonical
from coli.formats.fp8 import block_size
from coli.formats.ggml import SIZES
from coli.formats.strict import AGAIN, show

WORDS = ("bf16", "fp8", "q8_0", "q4_0", "q4_k_m", "int4-g64")
GROUP = 64  # inputs that share a scale in int4-g64
BLOCK = [128, 128]  # of an FP8 release
Shape = tuple[int, ...]

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NO_MATRIX = re.compile(r"conv1d\.weight$|embed_tokens\.weight$|\.ple_embedding\.")
# What the FP8 releases of Qwen3.5 to 3.8 quantise beside the routed experts; Qwen3.8-Flash-Next nothing.
_LINEAR = re.compile(
    r"(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkvz?|in_proj_z|out_proj)|mlp\.(shared_expert\.)?(gate|up|down)_proj)"
    r"\.weight$"
)
# All that has "ffn_down" in its name there: a mixer before the MLP too (hc_ffn_down).
_DOWN = re.compile(
    r"\.(mlp\.(experts\.|shared_expert\.)?down_proj(\.weight)?|mlp_hyper_connection\.input_mix_weight_down\.weight)$"
)
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


# ---- releases --------------------------------------------------------------------------------------------------------


def word_of(config: Mapping[str, Any], quantization: Mapping[str, Any], where: object) -> str:
    """What a config says its weights are: "fp8", or a float type. Raises ModelError for what coli does not read."""
    if quantization:
        method = quantization.get("quant_method")
        if method != "fp8":
            raise ModelError(f"weights quantised by {show(method)}", where,
                             f"coli reads FP8 blocks; --weights plans for others: {', '.join(WORDS)}")  # fmt: skip
        block_size(quantization, where)
        return "fp8"
    return _float(config, where)


def _float(config: Mapping[str, Any], where: object) -> str:
    """The dtype of a release, BF16 where its config has none."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in _DTYPES:
        raise ModelError(f"dtype: {show(name)} is not one of {', '.join(_DTYPES)}", where, AGAIN)
    return _DTYPES[name]


def release(
    table: Mapping[str, Shape], config: Mapping[str, Any], quantization: Mapping[str, Any], where: object
) -> dict[str, str]:
    """dtypes of a Hugging Face folder; with a `quantization` (of FP8) matrices in blocks and an FP8 n-gram table."""
    plain = "BF16" if quantization else _float(config, where)
    listed = quantization.get("modules_to_not_convert")
    if listed is not None and not (isinstance(listed, list) and all(isinstance(name, str) for name in listed)):
        raise ModelError("modules_to_not_convert is not a list of names", where, AGAIN)
    coded = _fp8(config) if listed is None else _unlisted(listed)
    found = {}
    for name, shape in table.items():
        matrix = len(shape) > 1 and not _NO_MATRIX.search(name)
        fp8 = bool(quantization) and (matrix or ".ngram_embedding." in name) and coded(name)
        constant = ".ple_embedding." in name and ".ngram_embedding." not in name
        found[name] = "I64" if constant else "F8_E4M3" if fp8 else plain
    return found


def _fp8(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """What the release of this model has in FP8, where its config does not list the exceptions."""
    streams = str(config.get("model_type")).startswith("qwen4_exp")
    always = ".mlp.experts.", ".ngram_embedding."
    return lambda name: any(part in name for part in always) or (not streams and bool(_LINEAR.search(name)))


def _unlisted(listed: list[str]) -> Callable[[str], bool]:
    """Whether no entry of the list is the module, one around it, or (without a prefix) parts of its name: "mlp.gate"
    is every router, "model.layers.0" all of the first layer and nothing of the head's."""
    names = [(name, known) for name in listed if (known := canonical(name))]
    whole = tuple(f".{known}." for name, known in names if known != name)
    parts = tuple(f".{known}." for name, known in names if known == name)

    def coded(name: str) -> bool:
        module = f".{name.removesuffix('.weight')}."
        return not (module.startswith(whole) or any(part in module for part in parts))

    return coded


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


def gguf(table: Mapping[str, Shape], word: str, tied: bool) -> dict[str, str]:
    """ggml types of a file that llama-quantize made, by our names; `tied`: the embedding is the output too."""
    base = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_k_m": "Q4_K"}[word]
    output = "embed_tokens.weight" if tied else "lm_head.weight"
    blocks = 1 + max((_block(name) for name in table), default=0)
    if any(name.startswith("mtp.") for name in table):
        blocks += 1
    mixed = _mixed(table, blocks) if word == "q4_k_m" else {}
    found = {}
    for name, shape in table.items():
        wanted = mixed.get(name, base)
        if name == output and base != "Q8_0":
            wanted = "Q6_K"
        found[name] = "F32" if _stays_float(name, shape) else _fitting(wanted, shape[-1])
    return found


def _block(name: str) -> int:
    """Number of the layer a name belongs to; -1 outside the trunk's."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _stays_float(name: str, shape: Shape) -> bool:
    narrow = len([size for size in shape if size != 1]) < 2
    return narrow or "conv1d" in name or name.endswith("mlp.gate.weight")


def _mixed(table: Mapping[str, Shape], blocks: int) -> dict[str, str]:
    """What q4_k_m keeps in more than four bits. V projections are counted among themselves, against all blocks."""
    found, attending = {}, 0
    for name in table:
        if name.endswith("self_attn.v_proj.weight"):
            if _more_bits(attending, blocks):
                found[name] = "Q6_K"
            attending += 1
        elif name.endswith("linear_attn.in_proj_qkv.weight"):
            found[name] = "Q5_K"
        elif _DOWN.search(name) and _more_bits(blocks - 1 if name.startswith("mtp.") else _block(name), blocks):
            found[name] = "Q6_K"
    return found


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth, and every third layer between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fitting(dtype: str, columns: int) -> str:
    """The type, or what llama.cpp takes for rows that are no whole blocks of it."""
    if columns % SIZES[dtype][0]:
        dtype = _FALLBACK.get(dtype, dtype)
    return "F16" if columns % SIZES[dtype][0] else dtype


# ---- coli ------------------------------------------------------------------------------------------------------------


def merged(hidden: int, inter: int) -> tuple[int, int]:
    """(bytes of codes, scales) of an expert in int4 groups of 64, as coli/formats/container.py packs it."""
    matrices = ((inter, hidden), (inter, hidden), (hidden, inter))
    return prod((3, hidden, inter)) // 2, sum(n * -(-k // GROUP) for n, k in matrices)


def known(word: str) -> str:
    """`word` in lower case. Raises UsageError where it names no format."""
    if word.lower() not in WORDS:
        raise UsageError(f"{ascii(word)[1:-1]} is no format of weights", "--weights", f"give one of {', '.join(WORDS)}")
    return word.lower()
