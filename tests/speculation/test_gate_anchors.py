"""The anchors of spec_decoding.md section 5, on a gate that is told nothing but what they name."""

from __future__ import annotations

import pytest

from coli.speculation.gate import Gate


def test_anchor_free_rows_are_drafted_in_full_at_once():
    gate = Gate()
    for rows in range(1, 10):
        gate.forward(rows, 1.0)
    assert gate.pick("mtp", 3) == (3, pytest.approx(2.52))


def test_anchor_costly_rows_are_probed_three_times_in_48_picks():
    gate = Gate()
    gate.forward(1, 1.0)
    for rows in range(2, 10):
        gate.forward(rows, 3.0 * rows)
    for _ in range(48):
        gate.pick("mtp", 3)
    assert (gate.probes("mtp"), gate.declined("mtp")) == (3, 45)


def test_anchor_the_first_two_samples_make_a_mean():
    gate = Gate()
    gate.forward(1, 1.0)
    gate.forward(2, 1.0)
    gate.forward(2, 5.0)
    assert dict(gate.describe().rows)[2] == pytest.approx(3.0)
