from __future__ import annotations

import numpy as np
import pytest

from coli.kernels.ple import ple_gate
from coli.kernels.reference import ple_gate_numpy
from tests.kernels.harness import call, close, step
from tests.kernels.independence import assert_independent, guarded, inner


@pytest.mark.parametrize("h", [1, 16, 50, 256, 2560])
@pytest.mark.parametrize("copies", [1, 4])
def test_ple_gate(h: int, copies: int) -> None:
    rng = np.random.default_rng(h)
    key, query = rng.standard_normal((2, 6, copies * h)).astype(np.float32)
    val = rng.standard_normal((6, h)).astype(np.float32)
    key[0] = 0  # sign(0): the gate is a half
    key[1] *= np.float32(1e-6)  # below the root's floor

    def run(part: slice, nt: int) -> np.ndarray:
        k, q, v, u = guarded(key[part]), guarded(query[part], 1), guarded(val[part], 2), guarded(key[part] * 0, 3)
        call(
            ple_gate, step(len(k)), k, k.shape[1], q, q.shape[1], v, v.shape[1], u, u.shape[1], h, copies, nt=nt
        )  # fmt: skip
        return inner(u, copies * h)

    expected = ple_gate_numpy(*(x.astype(np.float64) for x in (key, query, val)), copies)
    # the root makes the gate's error half of g's, and g is a sum of h products
    assert close(assert_independent(run), expected, np.tile(np.abs(val), (1, copies)), 2e-6)
