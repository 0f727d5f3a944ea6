"""Row 6: draft and verify compute the same function. The head is a copy of the trunk, so every draft must stand, under
every kernel option there is."""

from __future__ import annotations

import pytest

from coli.speculation.options import Speculation
from tests.speculation.engines import open_tiny
from tests.speculation.harness import compare, record
from tests.tiny import copied_config, copy_trunk_into_head, odd_config

LAYERS = ("num_hidden_layers", "layer_types", "ple_layer_ids")
ODD = {key: value for key, value in odd_config().items() if key not in LAYERS}
FP8 = dict(dtype="FP8", block=(32, 48), scale_dtype="F32")

OPTIONS: dict[str, tuple[dict, dict]] = {
    "f32": (dict(dtype="F32"), {}),
    "bf16": (dict(dtype="BF16"), {}),
    "bf16, one expert": (dict(dtype="BF16"), dict(cap=1)),
    "fp8": (FP8 | dict(dense="FP8"), {}),
    "fp8 experts, plain kernels": (FP8, dict(simd=False)),
    "int8 trunk": (dict(dtype="BF16"), dict(trunk="int8")),
    "int8 trunk, f32 activations": (dict(dtype="BF16"), dict(trunk="int8", act="f32")),
    "f32 activations": (FP8, dict(act="f32")),
    "plain kernels": (dict(dtype="BF16"), dict(simd=False)),
    "int8 trunk, plain kernels": (dict(dtype="BF16"), dict(trunk="int8", simd=False)),
    "undo by slots": (dict(dtype="BF16"), dict(undo="slots")),
    "undo by log": (dict(dtype="BF16"), dict(undo="log")),
    "one thread": (dict(dtype="F32"), dict(threads=1)),
    "three threads": (dict(dtype="F32"), dict(threads=3)),
    "odd sizes": (dict(dtype="BF16", config=copied_config(**ODD)), {}),
    "wiring a": (dict(dtype="BF16"), dict(mtp_wiring="a")),
}


@pytest.mark.parametrize(("form", "flags"), OPTIONS.values(), ids=OPTIONS.keys())
def test_row_06_a_head_that_is_the_trunk_is_always_right(tmp_path, form, flags):
    form = dict(config=copied_config(), change=copy_trunk_into_head, seed=3) | form
    with open_tiny(tmp_path, form, flags) as engine:
        for first in range(12):
            recording = record(engine, [20 * first, 7, 22 * first + 1], 14)
            for depth in (1, 2, 3):
                report = compare(recording, Speculation(drafts=depth, lookup=False, gate=False), f"{flags}, {depth}")
                assert report.mtp.accepted == report.mtp.judged > 0, f"{flags}: a draft was refused"
                assert report.forwards == -(-14 // (1 + depth))
