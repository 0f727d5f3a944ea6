"""COLI_SIMD=0: code for a CPU without AVX-512 gives the same bits as the fast build (kernels/simd.py says why)."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from coli.kernels import simd
from coli.kernels.blocked import prepared_blocks_bytes
from coli.kernels.linear import linear, quantize, quantize_blocks
from coli.kernels.linear_reference import to_bf16
from coli.kernels.packing import GRAIN, OFFSETS, PREPARED_KINDS, pack_int4, pack_int8, prepared_bytes
from coli.kernels.tiles import tile
from tests.kernels.harness import TILE_SIGNATURE, call, compiled, pointers, step, tile_table
from tests.kernels.test_blocked_tiles import weight
from tests.kernels.test_deltanet import Model

# AVX2, FMA and F16C, and nothing of AVX-512: the features must be named (here: none beyond the CPU's own), because
# Numba adds all of the host's to a CPU name alone.
PORTABLE = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": ""}
SHUFFLING = {**PORTABLE, "NUMBA_CPU_FEATURES": "+avx2"}  # named, as COLI_SIMD=0 names the CPU's own: byte shuffles too


def outputs() -> dict[str, str]:
    """Hashes of a few kernels' outputs, at odd sizes."""
    n, k, count = 35, 203, 3
    rng = np.random.default_rng(9)
    w, x = rng.standard_normal((n, k), dtype=np.float32), rng.standard_normal((count, k), dtype=np.float32)
    fp8 = rng.integers(0, 0x7F, (n, k)).astype(np.uint8)
    plain = {
        "f16": w.astype(np.float16), "bf16": to_bf16(w), "fp8": fp8, "int8": pack_int8(w).data,
        "int4": pack_int4(w).data, "int4f": pack_int4(w).data,
    }  # fmt: skip
    scales = rng.random((3, 7), dtype=np.float32)
    hashes = {}
    for kind, stored in plain.items():
        rows = x
        if kind in PREPARED_KINDS:
            rows = np.zeros((count, prepared_bytes(k)), np.uint8)
            call(quantize, np.array([count]), pointers(x), pointers(rows), k, OFFSETS[kind])
        y = np.zeros((count, n), np.float32)
        tiles = tile_table({3: tile(kind, 3)})
        call(linear, step(count), stored, scales, pointers(rows, 6), pointers(y, 6), n, k, 16, 32, tiles, GRAIN)
        hashes[kind] = hashlib.sha256(y.tobytes()).hexdigest()
    blocked = {kind: _blocked(kind) for kind in ("q8_0", "q5_1", "q5_k", "q6_k", "iq4_nl", "iq4_xsf")}
    return hashes | blocked | {f"deltanet {shape}": _deltanet(shape) for shape in ((1, 3, 17, 16), (2, 4, 33, 128))}


def _blocked(kind: str) -> str:
    """Three rows by a block-quantised weight."""
    w = weight(kind, 35, 2)
    x = np.random.default_rng(8).standard_normal((3, w.shape[1]), dtype=np.float32)
    rows, y = x, np.zeros((3, 35), np.float32)
    if not kind.endswith("f"):
        rows = np.zeros((3, prepared_blocks_bytes(x.shape[1])), np.uint8)
        call(quantize_blocks, np.array([3]), pointers(x), pointers(rows), x.shape[1])
    tiles = tile_table({3: tile(kind, 3)})
    call(linear, step(3), w.packed, 0, pointers(rows, 6), pointers(y, 6), *w.shape, 0, 0, tiles, GRAIN)
    return hashlib.sha256(y.tobytes()).hexdigest()


def _deltanet(shape: tuple[int, int, int, int]) -> str:
    """Outputs and states of verifies by slots and by a log, of which three rows stand, and of what follows."""
    digest = hashlib.sha256()
    for log in (False, True):
        model = Model(shape, log=log)
        digest.update(model.run(slice(0, 5), undoable=1).tobytes())
        if log:
            model.standing = 2
        else:
            model.live[:] = model.cells[3, 1]
        digest.update(model.run(slice(3, 9)).tobytes() + model.live.tobytes())
    return digest.hexdigest()


def uses_wide_registers() -> bool:
    """Does the compiled int8 tile touch a 512-bit register?"""
    return "zmm" in compiled(tile("int8", 3), TILE_SIGNATURE)._library.get_asm_str()


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not llvm.get_host_cpu_features().get("avx2", False),
    reason="needs an x86 CPU with AVX2",
)
@pytest.mark.parametrize("build", [PORTABLE, SHUFFLING], ids=["nothing named", "avx2 named"])
def test_the_portable_build_gives_the_same_bits(build: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_portable"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **build},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    other = json.loads(result.stdout.splitlines()[-1])
    assert other["wide"] is False
    assert other["outputs"] == outputs()


def test_vnni_is_used_where_the_cpu_has_it() -> None:
    if "NUMBA_CPU_FEATURES" not in os.environ and "NUMBA_CPU_NAME" not in os.environ:
        assert simd.has_vnni() == llvm.get_host_cpu_features().get("avx512vnni", False)
        assert not simd.has_vnni() or uses_wide_registers()


if __name__ == "__main__":
    print(json.dumps({"wide": uses_wide_registers(), "outputs": outputs()}))
