"""The gate against its arithmetic, the anchors of spec_decoding.md section 5, and simulated machines."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coli.speculation.gate import Gate
from tests.speculation.simulation import Machine, line, true_values


def gate_with(times: dict[int, float], gate: Gate | None = None) -> Gate:
    """A gate that has measured these times, each until nothing else is remembered."""
    gate = gate or Gate()
    for _ in range(12):
        for rows, seconds in times.items():
            gate.forward(rows, seconds)
    gate.forward(1, times[1])
    return gate


FREE = dict.fromkeys(range(1, 10), 1.0)
COSTLY = {n: float(n) for n in range(1, 10)}


# -- anchors -----------------------------------------------------------------------------------------------------------


def test_anchor_a_fresh_gate_with_free_rows():
    gate = gate_with(FREE)
    assert gate.value("mtp", 0) == gate.value("lookup", 0) == 1.0
    assert gate.value("mtp", 1) == pytest.approx(1.8)
    assert gate.value("lookup", 1) == pytest.approx(1.5)
    assert gate.E("mtp", 3) == pytest.approx(2.52)


def test_anchor_free_rows_mean_depth_three():
    gate = gate_with(FREE)
    k, value = gate.pick("mtp", 3)
    assert k == 3 and value == pytest.approx(2.52)


@pytest.mark.parametrize("source", ["mtp", "lookup"])
def test_anchor_costly_rows_three_probes_in_48_picks(source):
    gate = gate_with(COSTLY)
    depths = []
    for _ in range(48):
        k, value = gate.pick(source, 3)
        assert value == pytest.approx(gate.value(source, k))
        gate.forward(k + 1, COSTLY[k + 1])
        if k:
            gate.result(source, 1, 0)
        depths.append(k)
    assert Counter(depths) == {0: 45, 1: 3} and depths[15] == depths[31] == depths[47] == 1
    assert gate.probes(source) == 3 and gate.declined(source) == 45


def test_costly_rows_are_declined_even_when_every_probe_stands():
    gate = gate_with(COSTLY)
    for _ in range(48):
        k, _ = gate.pick("lookup", 5)
        gate.forward(k + 1, COSTLY[k + 1])
        gate.result("lookup", k, k)
    assert gate.probes("lookup") == 3 and gate.declined("lookup") == 45


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def test_cost_is_time_over_a_plain_steps_time():
    gate = gate_with({1: 0.2, 2: 0.25, 3: 0.31, 4: 0.4})
    assert gate.cost("mtp", 1) == pytest.approx(1.25) and gate.cost("mtp", 3) == pytest.approx(2.0)
    for _ in range(8):
        gate.first_cost("mtp", 0.01)
        gate.draft_cost("mtp", 0.02)
    assert gate.cost("mtp", 0) == 1.0
    assert gate.cost("mtp", 1) == pytest.approx(0.26 / 0.2)
    assert gate.cost("mtp", 3) == pytest.approx((0.4 + 0.01 + 0.04) / 0.2)
    assert gate.cost("lookup", 3) == pytest.approx(2.0)  # its own costs, not the head's
    assert gate.value("mtp", 3) == pytest.approx(2.52 / 2.25)


def test_a_row_count_not_measured_costs_by_rho():
    gate = Gate()
    assert gate.cost("mtp", 2) == pytest.approx(1 + 2 * 0.5)  # nothing measured: the prior
    gate.forward(1, 2.0)
    gate.forward(3, 2.8)  # (1.4 - 1) / 2 = 0.2; the prior weighs two
    assert gate.describe().rho == pytest.approx((2 * 0.5 + 0.2) / 3)
    assert gate.cost("mtp", 2) == pytest.approx(1.4)
    assert gate.cost("mtp", 4) == pytest.approx(1 + 4 * 0.4)


def test_rho_stays_between_0_and_4():
    low, high = Gate(), Gate()
    for gate, seconds in ((low, 0.1), (high, 2.9)):
        gate.forward(1, 1.0)
        for _ in range(100):
            gate.forward(2, seconds)
    assert low.describe().rho == pytest.approx(0.0, abs=1e-3)
    assert high.describe().rho == pytest.approx(1.9, abs=1e-3)
    for _ in range(100):
        high.forward(2, 900.0)
    assert high.describe().rho == pytest.approx(4.0, abs=1e-3)


def test_without_a_plain_step_costs_come_from_rho_alone():
    """A fixed depth: T(1) is never known, so neither T(3) in seconds nor a draft's seconds can have a price."""
    gate = Gate()
    for _ in range(200):
        gate.forward(3, 0.4)
        gate.draft_cost("mtp", 0.1)
        gate.first_cost("mtp", 0.1)
    assert gate.describe().t1_s is None and gate.describe().rows == () and gate.describe().rho == 0.5
    assert [gate.cost("mtp", k) for k in range(4)] == [1.0, 1.5, 2.0, 2.5]


def test_acceptance_is_a_mean_that_becomes_an_average_over_16():
    gate = Gate()
    gate.result("mtp", 1, 0)
    assert gate.E("mtp", 1) == pytest.approx(1 + 0.8 * 2 / 3)
    for _ in range(13):
        gate.result("mtp", 1, 0)
    before = gate.E("mtp", 1) - 1
    assert before == pytest.approx(0.8 * 2 / 16)
    gate.result("mtp", 1, 1)
    assert gate.E("mtp", 1) - 1 == pytest.approx(before + (1 - before) / 16)


def test_times_are_a_mean_that_becomes_an_average_over_8():
    gate = Gate()
    for seconds in (1.0, 2.0, 1.5):
        gate.forward(1, seconds)
    assert gate.describe().t1_s == pytest.approx(1.5)
    for _ in range(5):
        gate.forward(1, 1.5)
    gate.forward(1, 2.3)
    assert gate.describe().t1_s == pytest.approx(1.6)


def test_the_smallest_of_equally_good_depths():
    gate = Gate()
    for rows, seconds in ((1, 1.0), (2, 1.25), (3, 1.5), (4, 1.75)):
        gate.forward(rows, seconds)
    for j in (1, 2, 3):  # lookup drafts at an acceptance of exactly 1/2: E = 1.5, 1.75, 1.875
        assert gate.E("lookup", j) == 2 - 0.5**j
    assert gate.value("lookup", 1) == 1.2 > gate.value("lookup", 2)
    gate = Gate()
    for rows, seconds in ((1, 1.0), (2, 1.5), (3, 1.75), (4, 1.875)):
        gate.forward(rows, seconds)
    assert [gate.value("lookup", k) for k in range(4)] == [1.0] * 4
    assert gate.pick("lookup", 3) == (0, 1.0)  # not worth more than a plain step
    gate = Gate()
    for rows, seconds in ((1, 1.0), (2, 0.75), (3, 0.875), (4, 0.9375)):
        gate.forward(rows, seconds)
    assert [gate.value("lookup", k) for k in range(4)] == [1.0, 2.0, 2.0, 2.0]
    assert gate.pick("lookup", 3) == (1, 2.0)


def test_never_more_than_proposed_and_never_more_than_eight():
    gate = gate_with(FREE)
    assert [gate.pick("lookup", proposed)[0] for proposed in (1, 2, 5, 8, 20)] == [1, 2, 5, 8, 8]
    assert gate.pick("lookup", 0) == (0, 1.0) and gate.pick("lookup", -1) == (0, 1.0)
    for bad in (-1, 9):
        with pytest.raises((ValueError, IndexError)):
            gate.value("mtp", bad)


def test_a_probe_has_nothing_to_try_beyond_what_was_proposed():
    gate = gate_with({1: 1.0, 2: 1.0, 3: 9.0, 4: 13.0})
    depths = [gate.pick("mtp", 1)[0] for _ in range(32)]
    assert depths == [1] * 32 and gate.probes("mtp") == 0
    depths = [gate.pick("mtp", 3)[0] for _ in range(32)]
    assert Counter(depths) == {1: 30, 2: 2} and gate.probes("mtp") == 2


@pytest.mark.parametrize(("rows", "seconds"), [(0, 1.0), (-1, 1.0), (10, 1.0), (1, 0.0), (2, -1.0), (2, math.nan)])
def test_a_forward_that_cannot_be_is_refused(rows, seconds):
    with pytest.raises(ValueError, match="forward of"):
        Gate().forward(rows, seconds)


@pytest.mark.parametrize(("judged", "accepted"), [(0, 1), (3, 1), (-1, -1), (-1, -2)])
def test_a_result_that_cannot_be_is_refused(judged, accepted):
    with pytest.raises(ValueError, match="judged"):
        Gate().result("mtp", judged, accepted)


def test_an_unknown_source_is_refused():
    with pytest.raises(KeyError):
        Gate().pick("dspark", 1)


# -- plain steps -------------------------------------------------------------------------------------------------------


def test_plain_step_first_of_all_then_after_8_then_every_64():
    machine = Machine(line(0.1), [1.0] * 8)
    depths = machine.run(400)
    plain = [step for step, k in enumerate(depths) if k == 0]
    assert plain[:3] == [0, 9, 74] and all(b - a == 65 for a, b in pairwise(plain[2:]))
    assert machine.gate.declined("mtp") == 0  # none was declined: all were taken for their time


def test_plain_step_holds_for_every_source_of_the_step():
    gate = gate_with(FREE)
    for _ in range(64):
        assert gate.pick("mtp", 3)[0] > 0
        gate.forward(4, 1.0)
    assert gate.pick("mtp", 3) == gate.pick("lookup", 5) == gate.pick_p("mtp", [0.9, 0.9], 2) == (0, 1.0)
    assert gate.pick_p("mtp", [0.9], 1)[0] == 1  # a fixed depth of one draft is never trimmed
    gate.forward(1, 1.0)
    assert gate.pick("lookup", 5)[0] == 5


def test_plain_step_that_a_fixed_depth_does_not_take_is_not_asked_for_at_every_pick():
    """Beside a head at a fixed depth the lookup would be refused for ever."""
    gate = Gate()
    refused = 0
    for _ in range(650):
        refused += gate.pick("lookup", 5)[0] == 0
        gate.forward(3, 1.0)
        gate.result("lookup", 5, 5)
    assert refused <= 11


# -- each step's own drafts --------------------------------------------------------------------------------------------


def test_bins_start_at_their_own_p_with_the_weight_of_two():
    gate = gate_with(FREE)
    k, value = gate.pick_p("mtp", [0.93, 0.41])
    assert k == 2 and value == pytest.approx(1 + 0.95 + 0.95 * 0.45)
    gate.result_p("mtp", [0.93, 0.41], 2, 1)
    assert gate.pick_p("mtp", [0.98])[1] == pytest.approx(1 + (2 * 0.95 + 1) / 3)
    assert gate.pick_p("mtp", [0.49])[1] == pytest.approx(1 + 2 * 0.45 / 3)
    assert gate.pick_p("mtp", [0.5])[1] == pytest.approx(1.55)
    assert gate.pick_p("mtp", [1.0])[1] == gate.pick_p("mtp", [0.9])[1]
    assert gate.E("mtp", 1) == pytest.approx(1 + (2 * 0.8 + 1) / 3)  # the plain averages learn from it too


def test_drafts_already_written_cost_no_writing():
    gate = gate_with({1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6})
    for _ in range(8):
        gate.draft_cost("mtp", 5.0)
        gate.first_cost("mtp", 5.0)
    assert gate.pick("mtp", 3)[0] == 0
    assert gate.pick_p("mtp", [0.95, 0.95, 0.95])[0] == 3


def test_a_fixed_depth_keeps_its_first_draft_and_trims_the_rest():
    gate = gate_with(COSTLY)
    assert gate.pick_p("mtp", [0.05, 0.95, 0.95]) == (0, 1.0)
    k, value = gate.pick_p("mtp", [0.05, 0.05, 0.05], 3)
    assert k == 1 and value == pytest.approx(1.05 / 2)
    assert gate.pick_p("mtp", [0.95, 0.05, 0.95], 3)[0] == 1
    assert gate_with(FREE).pick_p("mtp", [0.95, 0.95, 0.95], 2)[0] == 2
    assert gate.pick_p("mtp", []) == (0, 1.0)


def test_a_head_that_doubts_itself_without_reason_is_found_out():
    """p says 0.05, all are accepted: the probes one deeper teach the bin."""
    gate = gate_with({1: 1.0, 2: 1.3, 3: 1.6, 4: 1.9})
    for step in range(400):
        p = [0.95, 0.05]
        k, _ = gate.pick_p("mtp", p, 2)
        gate.forward(k + 1, 1.0 + 0.3 * k)
        gate.result_p("mtp", p, k, k)
        if step > 300:
            assert k in (0, 2)


def test_deeper_p_writes_only_what_could_pay():
    gate = gate_with({n: 1.0 + 0.2 * (n - 1) for n in range(1, 10)})
    assert gate.deeper_p("mtp", []) and gate.deeper_p("mtp", [0.95]) and gate.deeper_p("mtp", [0.95, 0.95])
    assert not gate.deeper_p("mtp", [0.95, 0.05])  # one draft is worth more than both
    assert not gate.deeper_p("mtp", [0.05])  # the next one is hardly ever reached
    assert not gate.deeper_p("mtp", [0.95] * 8)
    costly = gate_with({n: 1.0 + 1.2 * (n - 1) for n in range(1, 10)})
    assert not costly.deeper_p("mtp", []) and not costly.deeper_p("mtp", [0.95])


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=7), st.lists(st.floats(1.0, 4.0), min_size=8, max_size=8))
def test_deeper_p_is_its_sentence(p, ratios):
    gate = gate_with({1: 1.0} | dict(enumerate(ratios, 2)))
    chances = [(min(int(x * 10), 9) + 0.5) / 10 for x in p] + [0.95]

    def value(k: int) -> float:
        return sum(math.prod(chances[:j]) for j in range(k + 1)) / (ratios[k - 1] if k else 1.0)

    n = len(p)
    gaps = [abs(value(n) - value(j)) for j in range(1, n)] + [abs(value(n + 1) - x) for x in (1.0, value(n))]
    if min(gaps) > 1e-3:  # not decided by rounding, or by what is left of the averages' first samples
        expected = all(value(j) <= value(n) for j in range(1, n)) and value(n + 1) > max(1.0, value(n))
        assert gate.deeper_p("mtp", p) == expected


# -- two sources and turns ---------------------------------------------------------------------------------------------


def test_a_probe_that_was_outdone_is_not_counted_and_comes_again():
    gate = gate_with({1: 1.0, 2: 1.6, 3: 2.2, 4: 2.8})
    for _ in range(15):
        assert gate.pick("lookup", 2)[0] == 0
        gate.outdone("lookup")
    for _ in range(5):
        assert gate.pick("lookup", 2)[0] == 1
        gate.outdone("lookup")
        assert gate.probes("lookup") == 0
    assert gate.pick("lookup", 2)[0] == 1 and gate.probes("lookup") == 1
    gate.result("lookup", 1, 0)
    assert gate.pick("lookup", 2)[0] == 0


def test_a_turn_starts_the_counters_and_keeps_what_was_learned():
    machine = Machine(line(1.0), [0.1] * 8, source="lookup")
    machine.run(100)
    gate = machine.gate
    before = gate.describe()
    assert before.decided and gate.declined("lookup") and gate.probes("lookup")
    gate.turn()
    after = gate.describe()
    assert not after.decided and gate.declined("lookup") == gate.probes("lookup") == 0
    assert (after.t1_s, after.rows, after.acceptance) == (before.t1_s, before.rows, before.acceptance)
    gate.pick("lookup", 2)
    assert gate.describe().decided


def test_describe():
    gate = gate_with({1: 0.2431, 2: 0.3185, 3: 0.3938})
    for _ in range(8):
        gate.draft_cost("mtp", 0.0098)
        gate.first_cost("mtp", 0.004)
    report = gate.describe()
    assert report.t1_s == pytest.approx(0.2431)
    assert [n for n, _ in report.rows] == [2, 3]
    assert [ratio for _, ratio in report.rows] == pytest.approx([1.31, 1.62], abs=5e-3)
    assert report.rho == pytest.approx(0.31, abs=0.02)
    assert (report.draft_s, report.first_s) == pytest.approx((0.0098, 0.004))
    assert report.acceptance == (0.8, 0.6, 0.5, 0.5, 0.5) and not report.decided
    alone = Gate()
    alone.result("lookup", 1, 1)
    assert alone.describe().acceptance == pytest.approx((2 / 3, 0.5, 0.5, 0.5, 0.5))  # there is no head


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1.5))
def test_counters_on_random_traces(seed, acceptance, slope):
    """Every pick is a verify, declined, or a plain step taken for its time; probes are verifies."""
    rng = random.Random(seed)
    machine = Machine(line(slope), [acceptance] * 8, source="lookup", most=5, noise=0.05, seed=seed)
    taken_for_time = verifies = 0
    for _ in range(300):
        declined = machine.gate.declined("lookup")
        proposed = rng.randint(0, 5)
        k = machine.step(proposed)
        assert 0 <= k <= proposed
        verifies += k > 0
        taken_for_time += proposed > 0 and k == 0 and machine.gate.declined("lookup") == declined
    gate = machine.gate
    picks = 300 - machine.depths.count(0) + gate.declined("lookup")
    assert picks == verifies + gate.declined("lookup")
    assert gate.probes("lookup") <= verifies
    assert taken_for_time <= 2 + 300 // 65
    assert machine.tokens == machine.forwards + machine.accepted


# -- convergence -------------------------------------------------------------------------------------------------------

REGIMES = {
    "free rows": ([0.9] * 8, line(0.0), 0.0, 0.0),
    "a big model": ([0.97, 0.83, 0.79, 0.5, 0.5], line(0.31), 0.02, 0.04),
    "a small model": ([0.95, 0.85, 0.5, 0.4, 0.3], line(0.4), 0.1, 0.1),
    "only the first": ([0.9, 0.2, 0.2, 0.2, 0.2], line(0.3), 0.02, 0.04),
    "dear drafts": ([0.95] * 8, line(0.1), 0.1, 0.6),
    "costly rows": ([0.3] * 8, line(0.7), 0.05, 0.05),
}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize(("source", "most"), [("mtp", 3), ("lookup", 5)])
def test_converges_within_64_verifies(regime, source, most):
    """After 64 steps, over the next 128 and on 20 seeds, times noisy by 5 %: the value of the arithmetic's best depth
    less what probes and plain steps must cost; the depth chosen most is the best one or within 2 % of it."""
    acceptance, times, first, extra = REGIMES[regime]
    values = true_values(acceptance, times, most, first, extra)
    reached, chosen = [], Counter[int]()
    for seed in range(20):
        machine = Machine(times, acceptance, source=source, most=most, first=first, extra=extra, noise=0.05, seed=seed)
        machine.run(64)
        machine.clear()
        chosen.update(machine.run(128))
        reached.append(machine.value() / max(values))
    assert sum(reached) / len(reached) > 0.955 and min(reached) > 0.88
    assert values[chosen.most_common(1)[0][0]] > 0.98 * max(values)


@pytest.mark.parametrize("regime", ["free rows", "a small model", "costly rows"])
def test_converges_exactly_where_nothing_is_noisy(regime):
    """The same drafts stand every time: all but the probes and the plain steps taken for T(1) have the best depth."""
    times = REGIMES[regime][1]
    stands = {"free rows": 3, "a small model": 2, "costly rows": 0}[regime]
    acceptance = [1.0] * stands + [0.0] * 8
    machine = Machine(times, acceptance)
    machine.run(64)
    values = true_values(acceptance, times, 3)
    assert values.index(max(values)) == stands
    machine.gate.turn()
    depths = Counter(machine.run(128))
    others = machine.gate.probes("mtp") + (2 if stands else 0)
    assert machine.gate.probes("mtp") == (0 if stands == 3 else 8)
    assert depths[stands] >= 128 - others


def test_a_hiccup_of_the_machine_does_not_turn_a_costly_draft_on():
    gate = gate_with({1: 1.0, 2: 1.9, 3: 2.8, 4: 3.7})
    assert gate.value("mtp", 1) < 1.0
    gate.forward(1, 10.0)
    assert gate.describe().t1_s == pytest.approx(1.0)
    gate.forward(1, 10.0)  # twice is no hiccup
    assert gate.describe().t1_s == pytest.approx(1.0 + 9.0 / 8)


def test_hiccups_of_one_forward_in_a_hundred_cost_little():
    for regime in REGIMES:
        acceptance, times, first, extra = REGIMES[regime]
        reached = []
        for seed in range(20):
            machine = Machine(times, acceptance, first=first, extra=extra, noise=0.03, hiccups=0.01, seed=seed)
            machine.run(264)
            reached.append(machine.value() / max(true_values(acceptance, times, 3, first, extra)))
        assert sum(reached) / len(reached) > 0.93, regime


def test_a_cold_first_plain_step_is_soon_forgotten():
    gate = Gate()
    assert gate.pick("mtp", 3) == (0, 1.0)
    gate.forward(1, 10.0)
    machine = Machine(line(0.7), [0.3] * 8, gate, noise=0.03)
    machine.run(12)
    assert gate.describe().t1_s == pytest.approx(1.0, rel=0.1)
    machine.clear()
    machine.run(64)
    assert machine.value() > 0.9


def test_a_pick_a_forward_and_a_result_are_quick():
    """A decode step of the small model takes 500 us. The bar is loose for a busy machine; the note has the figure."""
    gate = gate_with(FREE)

    def one() -> None:
        k, _ = gate.pick("lookup", 5)
        gate.forward(k + 1, 1.0)
        gate.result("lookup", k, k)

    def microseconds() -> float:
        start = time.perf_counter()
        for _ in range(2_000):
            one()
        return (time.perf_counter() - start) / 2_000 * 1e6

    assert min(microseconds() for _ in range(7)) < 12


def test_cold_first_drafts_do_not_decline_a_head():
    """Its first drafts read its experts from disk: twenty plain steps, five, one; then it is as fast as ever."""
    gate = Gate()
    assert gate.pick("mtp", 3)[0] == 0
    gate.forward(1, 1.0)
    for first in (20.0, 5.0, 1.0, 0.2):
        depth, _ = gate.pick("mtp", 3)
        assert depth > 0
        gate.first_cost("mtp", first)
        gate.forward(depth + 1, 1.0 + 0.2 * depth)
        gate.result("mtp", depth, depth)
    assert gate.describe().first_s == 0.2 and gate.cost("mtp", 1) == pytest.approx(1.4)


def test_cold_first_drafts_that_stay_dear_are_declined_after_their_trials():
    gate = Gate()
    machine = Machine(line(0.2), [0.9] * 8, gate, first=20.0)
    machine.run(40)
    assert 4 <= sum(depth > 0 for depth in machine.depths) <= 4 + 40 // 16 + 1
