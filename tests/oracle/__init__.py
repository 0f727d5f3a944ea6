"""The reference: qwen4_exp and its draft head in plain NumPy, float64 for a proof, float32 for an engine-like run.

Our own code, proved against transformers (model_spec.md section 0). It shares nothing with `coli/`, not even the
safetensors reader, so that the two cannot agree by sharing a mistake.

    model = load(folder)             # float64; load(folder, np.float32)
    logits, streams = model.forward(ids)     appends rows, any chunking
    head = Qwen4MTP(model)           # head.rows(streams, next_ids), head.draft(stream, token, depth)
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.oracle.qwen4 import Qwen4Model, Qwen4MTP
from tests.oracle.store import SafetensorsDir, Weights

__all__ = ["Qwen4MTP", "Qwen4Model", "SafetensorsDir", "Weights", "load"]


def load(folder: Path, dtype: type = np.float64) -> Qwen4Model:
    """The model of a checkpoint folder, with the prefix and the FP8 block size it uses."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    block = raw.get("quantization_config", {}).get("weight_block_size", [128, 128])
    source = SafetensorsDir(folder)
    nested = any(name.startswith("model.language_model.") for name in source.index)
    weights = Weights(source, dtype, block)
    return Qwen4Model(raw.get("text_config", raw), weights, "model.language_model." if nested else "model.")
