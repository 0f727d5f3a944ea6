"""The team: its constants, sleeping and waking, cuts, and many plays in a row."""

from __future__ import annotations

import time

import numpy as np
import pytest

from coli.kernels import dispatch, threads
from coli.program import builder, cpu
from coli.program.builder import Program
from coli.program.cache import Kernels
from coli.program.cpu import Team


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def test_the_layers_agree_on_the_control_block_and_the_table():
    assert (builder.ROW_CELLS, builder.ARGS) == (threads.ROW_CELLS, threads.ARGS)
    assert (builder.BARRIER, builder.MAY_CUT) == (threads.BARRIER, threads.MAY_CUT)
    names = ("CUT", "TABLE", "PC", "END", "THREADS", "QUIT", "SPINS", "IDLE_SPINS", "LINES", "PARKED")
    assert [getattr(cpu, name) for name in names] == [getattr(threads, name) for name in names]
    from coli.models import playing

    reasons = ("NEED_EXPERTS", "MORE_WAVES", "NEED_NGRAMS")
    assert [getattr(playing, name) for name in reasons] == [getattr(dispatch, name) for name in reasons]


def _scaling_program(kernels: Kernels, values: np.ndarray, times: int, cut: np.ndarray | None = None) -> Program:
    """silu_scaled `times` times in place; with `cut`, a stop behind each."""
    program = Program(len(values))
    program.step[0] = len(values)
    for _ in range(times):
        program.op("silu_scaled", program.step, values, values.shape[1], values.shape[1], 1.5)
        if cut is not None:
            program.op("wait_ngrams", cut, may_cut=True)
    return program.finish(kernels)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_bytes(kernels, count):
    start = np.random.default_rng(3).standard_normal((5, 700)).astype(np.float32)
    reference = start.copy()
    one = Team(kernels, 1)
    one.play(_scaling_program(kernels, reference, 40))
    one.close()
    values = start.copy()
    team = Team(kernels, count)
    program = _scaling_program(kernels, values, 40)
    assert team.play(program) == len(program.table)
    team.close()
    assert values.tobytes() == reference.tobytes()


def test_workers_sleep_when_idle_and_wake_for_the_next_play(kernels):
    values = np.ones((4, 64), np.float32)
    team = Team(kernels, 3)
    program = _scaling_program(kernels, values, 3)
    for _ in range(5):
        team.play(program)
        deadline = time.monotonic() + 10
        parked = [cpu.LINES + cpu.LINE_CELLS * tid + cpu.PARKED for tid in (1, 2)]
        while not all(team.control[cell] for cell in parked):
            assert time.monotonic() < deadline, "an idle worker never went to sleep"
            time.sleep(0.001)
    team.close()
    assert np.isfinite(values).all()


def test_a_cut_stops_behind_the_op_and_play_goes_on_there(kernels):
    values = np.full((2, 32), 2.0, np.float32)
    team = Team(kernels, 2)
    program = _scaling_program(kernels, values, 3, team.cut_cell)
    stops, at = [], 0
    while at < len(program.table):
        at = team.play(program, at)
        stops.append((at, int(team.cut_cell[0])))
    team.close()
    assert stops == [(2, dispatch.NEED_NGRAMS), (4, dispatch.NEED_NGRAMS), (6, dispatch.NEED_NGRAMS)]


def test_two_cuts_without_a_barrier_between_are_refused(kernels):
    program = Program(1)
    cell = np.zeros(1, np.int64)
    program.op("wait_ngrams", cell, may_cut=True)
    program.op("wait_ngrams", cell, may_cut=True)
    with pytest.raises(AssertionError, match="too close"):
        program.finish(kernels)


def test_ten_thousand_plays(kernels):
    values = np.zeros((1, 16), np.float32)
    team = Team(kernels, 2)
    program = _scaling_program(kernels, values, 1)
    for _ in range(10_000):
        assert team.play(program) == 1
    team.close()
