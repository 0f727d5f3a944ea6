"""Rows 21 to 29 of complaints.md as far as they are the gate's, driven by a simulated clock. Named by row number."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from coli.speculation.gate import Gate
from tests.speculation.simulation import Machine, line, true_values


def test_row_21_only_judged_drafts_move_an_estimate():
    """llama.cpp#14048: drafts skipped by a minimum were counted in the rate. Five are written, two carried, and the
    second of these is the last anybody looks at."""
    gate = Gate()
    before = gate.describe().acceptance
    gate.result("mtp", judged=2, accepted=1)
    after = gate.describe().acceptance
    assert after[0] > before[0] and after[1] < before[1] and after[2:] == before[2:]


def test_row_21_trimmed_drafts_leave_their_bins_alone():
    gate = Gate()
    gate.forward(1, 1.0)
    p = [0.95, 0.55, 0.15]
    before = [gate.pick_p("mtp", [x], 1)[1] for x in p]
    gate.result_p("mtp", p, judged=1, accepted=0)
    after = [gate.pick_p("mtp", [x], 1)[1] for x in p]
    assert after[0] < before[0] and after[1:] == before[1:]


def test_row_21_identities_on_random_traces():
    """Each position's estimate is the average of what was judged there, whatever was proposed, carried or cut short."""
    for seed in range(50):
        rng = random.Random(seed)
        gate, expected, weights = Gate(), [0.8, 0.6, 0.5, 0.5, 0.5], [2] * 5
        for _ in range(100):
            carried = rng.randint(0, 5)
            accepted = rng.randint(0, carried)
            judged = min(accepted + rng.randint(0, 1), carried)  # a turn may end in the middle of a verify
            gate.result("mtp", judged, accepted)
            for j in range(judged):
                weights[j] = min(weights[j] + 1, 16)
                expected[j] += ((j < accepted) - expected[j]) / weights[j]
        assert gate.describe().acceptance == pytest.approx(expected)


def test_row_22_a_short_last_verify_judges_what_it_reached():
    """The denominator is what was judged, not what the configuration could have drafted."""
    gate = Gate()
    for _ in range(20):
        gate.result("lookup", judged=1, accepted=1)  # one draft was left before the token limit
    first, second = gate.describe().acceptance[:2]
    assert first > 0.85 and second == 0.5
    gate.result("lookup", judged=0, accepted=0)  # ended before any draft was looked at
    assert gate.describe().acceptance[:2] == (first, second)


def test_row_23_tokens_are_forwards_plus_accepted_on_1000_random_traces():
    for seed in range(1_000):
        rng = random.Random(seed)
        machine = Machine(line(rng.random()), [rng.random() for _ in range(8)], most=rng.randint(1, 5), seed=seed)
        machine.run(40)
        assert machine.tokens == machine.forwards + machine.accepted
        assert machine.accepted <= sum(machine.depths)


@pytest.mark.parametrize(
    ("slope", "first", "extra"),
    [(1.2, 0.0, 0.0), (0.6, 0.8, 0.1), (0.7, 0.5, 0.5), (0.95, 0.02, 0.02)],
    ids=["rows", "fixed overhead", "all three", "nearly"],
)
def test_row_25_nine_in_ten_accepted_and_yet_slower_than_plain(slope, first, extra):
    """llama.cpp#25908: the gate must choose 0 by the measured times, the fixed cost included."""
    assert max(true_values([0.9] * 8, line(slope), 3, first, extra)) == 1.0
    for seed in range(10):
        machine = Machine(line(slope), [0.9] * 8, first=first, extra=extra, noise=0.02, seed=seed)
        machine.run(64)
        machine.run(64 if first else 0)  # drafts whose first cost is on trial may come with the probes alone
        machine.clear()
        machine.run(256)
        probe = 1.0 + slope + first
        assert machine.value() > (15 + 1.9) / (15 + probe) - 0.016  # one in 16 is a probe; one plain step in 64 picks
        if probe > 2.0:  # no acceptance could pay for it: the law's probes and not one more
            assert max(machine.depths) == 1 and machine.depths.count(1) == 16


def test_row_25_the_same_acceptance_pays_where_the_overhead_is_small():
    machine = Machine(line(0.3), [0.9] * 8, first=0.05, extra=0.05)
    machine.run(64)
    machine.clear()
    machine.run(128)
    assert machine.value() > 1.5


@pytest.mark.parametrize("slope", [0.35, 0.5])
@pytest.mark.parametrize("acceptance", [0.05, 0.2, 0.3])
def test_row_26_prose_is_declined_and_costs_almost_nothing(slope, acceptance):
    """llama.cpp#23052: -9 to -32 % on prose. Here it costs what the law's probes cost: one step in 16."""
    probe = (1 + acceptance) / (1 + slope)
    floor = (15 + probe * (1 + slope)) / (15 + 1 + slope)
    reached = []
    for seed in range(20):
        machine = Machine(line(slope), [acceptance] * 8, noise=0.02, seed=seed)
        machine.run(64)
        machine.clear()
        machine.run(512)
        reached.append(machine.value())
    assert sum(reached) / len(reached) > floor - 0.006
    assert sum(reached) / len(reached) > 0.97


class Store:
    """A model on a disk: cold, a row pays for reading nearly as much as a plain step does; warm, rows share work."""

    def __init__(self) -> None:
        self.cold = False

    def __call__(self, rows: int) -> float:
        return 10.0 * (1.0 + 0.97 * (rows - 1)) if self.cold else 1.0 + 0.3 * (rows - 1)


@pytest.mark.parametrize("acceptance", [0.7, 0.8, 0.85])
def test_row_27_a_slow_store_turns_drafting_off_and_a_warm_one_on_again(acceptance):
    """colibri#640: what drafts win in compute they lose in reads; T(n) holds the reads."""
    for seed in range(10):
        store = Store()
        machine = Machine(store, [acceptance] * 8, noise=0.05, seed=seed)
        machine.run(100)
        assert machine.depths[-16:].count(0) <= 6
        store.cold = True
        machine.run(96)
        machine.clear()
        machine.run(64)
        assert machine.depths.count(0) >= 44 and machine.value() > 0.9
        store.cold = False
        machine.run(48)
        machine.clear()
        machine.run(96)
        assert machine.value() > 0.85 * max(true_values([acceptance] * 8, store, 3))


def test_row_27_times_follow_the_store_within_a_few_samples():
    gate = Gate()
    for _ in range(20):
        gate.forward(1, 1.0)
        gate.forward(2, 1.3)
    for _ in range(3):
        gate.forward(2, 20.0)
    assert gate.value("mtp", 1) < 1.0  # three slow verifies are enough to stop
    for _ in range(20):
        gate.forward(1, 1.0)
    gate.forward(2, 1.3)  # a probe after a long time
    assert gate.cost("mtp", 1) < 1.5


def test_row_27_a_cold_start_is_forgotten_by_the_first_warm_probe():
    gate = Gate()
    for _ in range(20):
        gate.forward(1, 10.0)
        gate.forward(2, 19.7)
    for _ in range(30):
        gate.forward(1, 1.0)
    gate.forward(2, 1.3)
    assert 1.0 < gate.cost("mtp", 1) < 1.4


@pytest.mark.parametrize("away", [10, 100, 1_000])
@pytest.mark.parametrize("slope", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("source", "most"), [("mtp", 3), ("lookup", 5)])
def test_row_29_acceptance_that_comes_back_is_seen_within_32_picks(away, slope, source, most):
    """Declined for `away` picks, then every draft stands: within 32 picks the gate drafts at every step (but the plain
    step every 64 forwards), and not only to probe."""
    acceptance = [0.0] * 8
    machine = Machine(line(slope), acceptance, source=source, most=most, noise=0.02, seed=away)
    machine.run(away)
    acceptance[:] = [1.0] * 8
    machine.clear()
    machine.run(48)
    assert machine.depths[32:].count(0) <= 1
    assert next(step for step, k in enumerate(machine.depths) if k) <= 16


def test_row_29_acceptance_that_comes_back_after_good_times():
    """1, then 0, then 1 again: the estimate stands high above 0 and below what pays when drafting stops."""
    for slope in (0.3, 0.5, 0.7):
        for seed in range(10):
            acceptance = [1.0] * 8
            machine = Machine(line(slope), acceptance, noise=0.02, seed=seed)
            machine.run(100)
            acceptance[:] = [0.0] * 8
            machine.run(100 + seed)
            assert machine.depths[-32:].count(0) >= 29
            acceptance[:] = [1.0] * 8
            machine.clear()
            machine.run(48)
            assert machine.depths[32:].count(0) <= 1


def declining_gate_at_its_probe() -> Gate:
    """a1 = 0.4 of 4 verifies where 0.45 would pay; the pick just made is a probe."""
    gate = Gate()
    for _ in range(12):
        for rows, seconds in ((1, 1.0), (2, 1.45), (3, 2.9)):
            gate.forward(rows, seconds)
    for _ in range(2):
        gate.result("mtp", 1, 0)
    depths = [gate.pick("mtp", 3)[0] for _ in range(16)]
    assert depths == [0] * 15 + [1]
    gate.forward(2, 1.45)
    return gate


def test_row_29_one_probe_that_stands_is_enough_where_little_was_missing():
    gate = declining_gate_at_its_probe()
    gate.result("mtp", 1, 1)
    assert gate.pick("mtp", 3)[0] == 1 and gate.probes("mtp") == 1  # drafting again, and nothing deeper to try yet


def test_row_29_a_probe_that_nobody_judged_calls_for_no_other():
    gate = declining_gate_at_its_probe()
    gate.result("mtp", 0, 0)  # the turn ended
    assert gate.pick("mtp", 3) == (0, 1.0) and gate.probes("mtp") == 1


def test_row_29_a_declining_gate_probes_each_16_and_a_drafting_one_takes_a_plain_step_each_64():
    machine = Machine(line(0.5), [0.0] * 8)
    machine.run(64)
    machine.clear()
    probes = [step for step, k in enumerate(machine.run(160)) if k]
    assert len(probes) == 10 and all(b - a == 16 for a, b in pairwise(probes))
    machine = Machine(line(0.1), [1.0] * 8)
    machine.run(75)
    depths = machine.run(130)
    plain = [step for step, k in enumerate(depths) if k == 0]
    assert len(plain) == 2 and plain[1] - plain[0] == 65
