"""The reference: the Qwen families and their draft heads in plain NumPy, float64 for a proof, float32 for an
engine-like run.

Our own code, proved against transformers (model_spec.md section 0, check_hybrid.py). It shares nothing with `coli/`,
not even the safetensors reader, so that the two cannot agree by sharing a mistake.

    model = load(folder)             # float64; load(folder, np.float32)
    logits, streams = model.forward(ids)     appends rows, any chunking; streams are what the head takes
    head = head_of(model)            # head.rows(streams, next_ids), head.draft(stream, token, depth)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.oracle.qwen4 import Qwen4Model, Qwen4MTP
from tests.oracle.qwen_hybrid import MODEL_TYPES, HybridModel, HybridMTP
from tests.oracle.store import SafetensorsDir, Weights

__all__ = ["HybridMTP", "HybridModel", "Qwen4MTP", "Qwen4Model", "SafetensorsDir", "Weights", "head_of", "load"]

Change = Callable[[str, np.ndarray], np.ndarray]


class _Changed(Weights):
    """Weights that are each passed through `change(name, array)`."""

    def __init__(self, source, dtype, block, change: Change) -> None:
        super().__init__(source, dtype, block)
        self.change = change

    def __call__(self, name: str) -> np.ndarray:
        if name not in self.cache:
            self.cache[name] = self.change(name, super().__call__(name))
        return self.cache[name]


def load(folder: Path, dtype: type = np.float64, change: Change = lambda name, array: array):
    """The model of a checkpoint folder, with the prefix and the FP8 block size it uses."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    block = (raw.get("quantization_config") or {}).get("weight_block_size", [128, 128])
    source = SafetensorsDir(folder)
    nested = any(name.startswith("model.language_model.") for name in source.index)
    config = raw.get("text_config", raw)
    kind = HybridModel if config["model_type"] in MODEL_TYPES else Qwen4Model
    return kind(config, _Changed(source, dtype, block, change), "model.language_model." if nested else "model.")


def head_of(model):
    """The draft head of a model whose checkpoint has one."""
    return HybridMTP(model) if isinstance(model, HybridModel) else Qwen4MTP(model)
