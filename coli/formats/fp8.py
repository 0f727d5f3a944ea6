"""FP8 blocks, and everything else a checkpoint stores in fewer than 32 bits, as float32.

An E4M3FN code has 4 exponent bits (bias 7) and 3 mantissa bits, subnormals m * 2^-9, 0x7f and 0xff are NaN, no
infinities (OCP 8-bit floating point, https://arxiv.org/abs/2209.05433). A weight W [out, in] comes with
`<name>_scale_inv` [ceil(out/br), ceil(in/bc)], which *multiplies* in spite of its name: W = code * scale. (br, bc) is
`weight_block_size` of the config and nothing else: shapes cannot tell it, for the last blocks may be partial.
Invariant: an FP8 weight without its scale, and a scale without its FP8 weight, never pass (weights 200 times too big
load without complaint elsewhere). Guarded by tests/formats/test_fp8.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from coli.errors import ModelError
from coli.formats.safetensors import Tensor
from coli.formats.strict import counted, listing, show

SCALE = "_scale_inv"
SCALE_DTYPES = ("BF16", "F32", "F16")
BLOCK_LIMIT = 1 << 20
_PACKED = ".merged_weight.qs"  # scales of integers (coli/formats/container.py), not of FP8
_SPELLINGS = ("_scale_inv", "_scale", ".scale_weight", ".scale", ".scales", ".scale_inv", "_scale_2", ".qs", "_scales")


def _e4m3_table() -> np.ndarray:
    code = np.arange(256)
    sign, exponent, mantissa = 1.0 - 2.0 * (code >> 7), (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[(code & 0x7F) == 0x7F] = np.nan
    table = (sign * value).astype(np.float32)
    table.flags.writeable = False
    return table


E4M3 = _e4m3_table()
"""float32 [256]: the value of every code."""


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """A stored array (see `Checkpoint.view`) as float32, exact for F32, F16, BF16 and F8_E4M3."""
    if dtype == "F32":
        return array
    if dtype == "F16":
        return array.astype(np.float32)
    if dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return E4M3[array]
    raise ValueError(f"{dtype} does not widen to float32")


def dequantise(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """uint8 codes [..., out, in] times float32 scale [..., ceil(out/br), ceil(in/bc)] -> float32 [..., out, in]."""
    br, bc = block
    columns = codes.shape[-1]
    weight = E4M3[codes]
    for i in range(scale.shape[-2]):
        weight[..., i * br : (i + 1) * br, :] *= np.repeat(scale[..., i : i + 1, :], bc, axis=-1)[..., :columns]
    return weight


def has_nan_code(codes: np.ndarray) -> bool:
    """Whether any uint8 code is NaN: 0xff is the largest unsigned byte, 0x7f the largest signed one."""
    return bool(codes.size) and bool(codes.max() == 0xFF or codes.view(np.int8).max() == 0x7F)


def blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scale of a weight [..., out, in]: a partial last block counts as one."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def block_size(quantization: Mapping[str, Any], where: object = "config.json") -> tuple[int, int]:
    """(rows, columns) of a scale block from a quantization_config. Raises ModelError."""
    size = quantization.get("weight_block_size")
    hint = "FP8 weights need quantization_config.weight_block_size, two positive integers such as [128, 128]"
    if size is None:
        raise ModelError("quantization_config has no weight_block_size", where, hint)
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n <= BLOCK_LIMIT for n in size):
        raise ModelError(f"weight_block_size {show(size)} is not usable", where, hint)
    return size[0], size[1]


def pair_scales(
    tensors: Mapping[str, Tensor],
    quantization: Mapping[str, Any],
    exempt: Container[str] = (),
    where: object = "",
) -> dict[str, Tensor]:
    """The scale of every block-FP8 weight, by the weight's canonical name.

    `exempt` names tensors somebody else accounts for: the n-gram table with its one scalar scale. Raises ModelError for
    a missing scale, a scale that belongs to nothing, another spelling, a wrong shape or dtype.
    """
    scales = {name for name in tensors if name.endswith(_SPELLINGS) and name not in exempt
              and not name.endswith(_PACKED)}  # fmt: skip
    coded = {name for name, t in tensors.items() if t.dtype == "F8_E4M3" and name not in exempt} - scales
    wanted = {name + SCALE for name in coded}
    missing, unused = wanted - scales, scales - wanted
    if missing:
        raise _missing(missing, unused, where)
    if unused:
        raise ModelError(f"{counted(len(unused), 'scale')} without an FP8 weight: {listing(unused)}", where,
                         "the checkpoint mixes two formats: download it again")  # fmt: skip
    if not coded:
        return {}
    block = block_size(quantization, where)
    paired = {name: tensors[name + SCALE] for name in coded}
    sound: set[tuple[object, ...]] = set()  # thousands of experts have the shapes of the first
    for name, scale in paired.items():
        shapes = tensors[name].shape, scale.shape, scale.dtype
        if shapes not in sound:
            _check(tensors[name], scale, block)
            sound.add(shapes)
    return paired


def _stem(scale: str) -> str:
    """The module a scale is for, whatever the spelling."""
    ending = next((s for s in _SPELLINGS if scale.endswith(s)), "")
    return scale.removesuffix(ending).removesuffix(".weight")


def _missing(missing: set[str], unused: set[str], where: object) -> ModelError:
    stems = {_stem(name) for name in missing}
    others = {name for name in unused if not name.endswith(SCALE) and _stem(name) in stems}
    what = f"{counted(len(missing), 'FP8 weight')} without a scale: missing {listing(missing)}"
    if others:
        return ModelError(f"{what}; found {listing(others)} instead", where,
                          "only block scales named <weight>_scale_inv are read: use the FP8 release of the model's "
                          "maker, or the BF16 one")  # fmt: skip
    if unused:
        what += f"; scales without a weight: {listing(unused)}"
    return ModelError(what, where, "the values would be wrong without it: download the checkpoint again")


def _check(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    if len(weight.shape) < 2:
        raise ModelError(f"tensor {show(weight.name)}: FP8 blocks need a matrix, found shape {list(weight.shape)}",
                         weight.path, "only matrices may be FP8")  # fmt: skip
    if scale.dtype not in SCALE_DTYPES:
        raise ModelError(f"tensor {show(scale.name)}: a scale of dtype {scale.dtype}", scale.path,
                         f"scales are {', '.join(SCALE_DTYPES)}")  # fmt: skip
    expected = blocks(weight.shape, block)
    if scale.shape != expected:
        raise ModelError(f"tensor {show(scale.name)}: expected {list(expected)} for {list(weight.shape)} in blocks of "
                         f"{list(block)}, found {list(scale.shape)}", scale.path,
                         "weight_block_size of config.json and the file disagree: download both again")  # fmt: skip
