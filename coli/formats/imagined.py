"""A checkpoint of a model that is not there: its config.json, and every tensor as a file of it would have it.

Idea: a plan needs names, shapes and dtypes, never a weight. The family's own layout table gives names and shapes,
coli/formats/recipes.py the dtypes; places are invented, one tensor behind the other in a file that does not exist. So
`imagine` answers "would it fit?" before 185 GB are downloaded, and survey, plan and check run on it unchanged.
Experts are spelled the shortest way that has the same bytes: fused, or one by one where FP8 blocks would straddle gate
and up. Whether there is a draft head is the config's word (`mtp_num_hidden_layers`) for want of tensors.
Invariant: the plan is the plan of the real files, term by term; no weight can be read. Guarded by
tests/formats/test_imagined.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from coli.errors import ModelError, UsageError
from coli.formats import recipes
from coli.formats.checkpoint import CONVERSION, Checkpoint, Traits, flatten
from coli.formats.fp8 import SCALE, block_size, blocks
from coli.formats.ggml import row_bytes
from coli.formats.recipes import Shape
from coli.formats.safetensors import STORAGE, Tensor
from coli.formats.strict import read_object
from coli.models.config import Reader
from coli.models.families import Family, family_of

CONFIG = "config.json"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_GGUF = ("mlp.experts.gate_proj", "linear_attn.in_proj_qkv.weight", "indexer.q_proj.weight", "ngram_embedding.weight")
_FUSED, _PACKED = ("mlp.experts.gate_up_proj",), ("mlp.experts.0.merged_weight",)


class Imagined(Checkpoint):
    """`folder` is the path that was given; `numbers` are the constants that a layout's check reads as tensors."""

    def __init__(self, folder: Path, config_path: Path) -> None:
        super().__init__(folder)
        self._config_path = config_path
        self.numbers: Mapping[str, np.ndarray] = {}

    @property
    def config_path(self) -> Path:
        return self._config_path

    def load(self, tensor: Tensor | str) -> np.ndarray:
        name = tensor if isinstance(tensor, str) else tensor.name
        return self.numbers[name] if name in self.numbers else super().load(tensor)

    def _descriptor(self, path: Path) -> int:
        raise ModelError("only its config is here, no weights", self.folder, "download the model")


class _Ending:
    """The names, of all there could be, that end in one of these: how a checkpoint spells what it may spell."""

    def __init__(self, *endings: str) -> None:
        self._endings = endings

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.endswith(self._endings)


def is_bare(path: Path) -> bool:
    """Whether a path is a config.json (of any name), or a folder with one and without any file of weights."""
    if not path.is_dir():
        return path.suffix.lower() == ".json" and path.is_file()
    if not (path / CONFIG).is_file() or (path / CONVERSION).exists():
        return False
    return not any(entry.suffix.lower() in _WEIGHTS for entry in path.iterdir())


def imagine(path: Path, weights: str | None = None) -> Checkpoint:
    """The checkpoint that the config at `path` (a file, or a folder with one) describes, in the format `weights` (one
    of recipes.WORDS), by default the one that the config names, bf16 where it names none. Raises ModelError, and
    UsageError for a format that is unknown or that the model has no use for."""
    path = Path(path)
    checkpoint = Imagined(path, path / CONFIG if path.is_dir() else path)
    where = checkpoint.config_path
    checkpoint.raw_config = read_object(where, "config", hint="give a model's config.json")
    checkpoint.config, quantization = flatten(checkpoint.raw_config, where)
    family = family_of(checkpoint)
    geometry = family.geometry(checkpoint.config, where)
    word = recipes.known(weights) if weights is not None else None
    if word in ("q8_0", "q4_0", "q4_k_m"):
        _as_gguf(checkpoint, family, geometry, word)
    else:
        _as_folder(checkpoint, family, geometry, word, quantization)
    return checkpoint


def _as_gguf(checkpoint: Imagined, family: Family, g: Any, word: str) -> None:
    checkpoint.constants = family.constants(g)
    table = _table(checkpoint, family, g, _GGUF)
    table = {name: shape for name, shape in table.items() if name not in checkpoint.constants}
    checkpoint.traits = Traits(gguf=True, norms_folded=True, decay_ready=True, tiled=not g.gdn_grouped)
    _place(checkpoint, table, recipes.gguf(table, word, g.tied))


def _as_folder(checkpoint: Imagined, family: Family, g: Any, word: str | None, quantization: dict[str, Any]) -> None:
    where = checkpoint.config_path
    if word == "int4-g64" and not g.experts:
        raise UsageError("int4-g64 is a format of routed experts, this model has none", "--weights",
                         "give another format")  # fmt: skip
    if word == "fp8":
        own = quantization if quantization.get("quant_method") == "fp8" else {}
        quantization = {"quant_method": "fp8", "weight_block_size": recipes.BLOCK} | own
    if word == "bf16":
        quantization, config = {}, checkpoint.config | {"dtype": "bfloat16"}
    else:
        recipes.word_of(checkpoint.config, quantization, where)  # refuses what is not read
        config = checkpoint.config
    checkpoint.quantization, checkpoint.numbers = quantization, family.constants(g)
    straddled = bool(quantization) and g.moe_inter % block_size(quantization, where)[0] != 0
    spelling = _PACKED if word == "int4-g64" else () if straddled else _FUSED
    table = _table(checkpoint, family, g, spelling)
    packed: dict[str, str] = {}
    if word == "int4-g64":
        checkpoint.meta = {"expert_gs": recipes.GROUP}
        codes, scales = recipes.merged(g.hidden, g.moe_inter)
        packed = {name: "F32" if name.endswith(".qs") else "U8" for name in table if ".merged_weight" in name}
        table |= {name: (scales if dtype == "F32" else codes,) for name, dtype in packed.items()}
    _place(checkpoint, table, recipes.release(table, config, quantization, where) | packed)


def _table(checkpoint: Imagined, family: Family, g: Any, spelling: tuple[str, ...]) -> dict[str, Shape]:
    """Names and shapes of the trunk and of the head, if the config has one."""
    names: Any = _Ending(*spelling) if spelling else ()
    heads = Reader(checkpoint.config, checkpoint.config_path).size("mtp_num_hidden_layers", low=0, default=0)
    return family.expected(g, names) | (family.expected_head(g, names) if heads else {})


def _place(checkpoint: Imagined, table: Mapping[str, Shape], dtypes: Mapping[str, str]) -> None:
    """Give every tensor a place, and FP8 weights the scales that belong to them."""
    path, end = checkpoint.folder / "model.safetensors", 0

    def add(name: str, dtype: str, shape: Shape) -> None:
        nonlocal end
        item = STORAGE.get(dtype)
        nbytes = prod(shape) * item.itemsize if item else prod(shape[:-1]) * row_bytes(dtype, shape[-1])
        checkpoint.tensors[name] = Tensor(name, dtype, shape, path, end, nbytes)
        end += nbytes

    for name, shape in table.items():
        add(name, dtypes[name], shape)
        if dtypes[name] == "F8_E4M3" and ".ngram_embedding." in name:
            scale = name[: name.index(".ngram_embedding.")] + ".ngram_embedding.weight_scale"
            if scale not in checkpoint:
                add(scale, "BF16", (1,))
        elif dtypes[name] == "F8_E4M3":
            add(name + SCALE, "BF16", blocks(shape, block_size(checkpoint.quantization)))
