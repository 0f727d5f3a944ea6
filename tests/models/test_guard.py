"""The guard foresees what a forward may fill, gives back what is over and says so once; the tokens do not show it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest

from coli import memory
from coli.guard import IDLE, INTERVAL, STANDSTILL, Guard, Meter, Place, Reading
from coli.session import Request, Session
from tests.models.bench_model import Opened
from tests.models.test_cgroup import OWN_V1, V1_MOUNTS, tree, v1
from tests.tiny36 import tiny36_config, write_tiny36

MIB = 1 << 20
FIXED = 200 * MIB
NOTHING = memory.Terms(**{field.name: 0 for field in dataclasses.fields(memory.Terms)})
TERMS = dataclasses.replace(NOTHING, process=FIXED, kv=50 * MIB)
BUDGET = 2000 * MIB  # its margin is 64 MiB


class FakeCache:
    """Slots of one MiB; the last `floor` of them stay."""

    def __init__(self, slots: int, filled: int, floor: int = 8) -> None:
        self.slots, self.filled, self.floor = slots, filled, floor
        self.asked: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.slots * MIB

    @property
    def filled_bytes(self) -> int:
        return self.filled * MIB

    def shrink(self, nbytes: int) -> int:
        self.asked.append(nbytes)
        kept = max(self.floor, self.slots - -(-nbytes // MIB))
        given, self.slots = self.slots - kept, kept
        self.filled = min(self.filled, kept)
        return given * MIB


class World:
    """A process of FIXED bytes, its caches and what else it holds, on a machine with `left` bytes."""

    def __init__(self, *caches: FakeCache, budget: int = BUDGET, left: int = 1 << 40, on: bool = True, held=None):
        self.caches, self.left, self.more, self.time, self.looks = caches, left, 0, 100.0, 0
        self.stalled, self.limit = 0.0, 1 << 30
        self.said: list[str] = []
        self.guard = Guard(budget, TERMS, caches, say=self.said.append, on=on, held=held, read=self.read,
                           clock=lambda: self.time)  # fmt: skip

    def read(self) -> Reading:
        self.looks += 1
        held = FIXED + self.more + sum(cache.filled_bytes for cache in self.caches)
        return Reading(held, (Place("on this machine", self.limit, self.left, self.stalled),))

    def tick(self, seconds: float = INTERVAL) -> int:
        self.time += seconds
        before = self.guard.given
        self.guard.tick()
        return self.guard.given - before


def test_a_tick_looks_four_times_a_second_and_no_more():
    world = World(FakeCache(100, 10))
    for _ in range(1000):
        world.tick(INTERVAL / 100)
    assert 9 <= world.looks <= 11 and not world.said


def test_within_the_budget_nothing_happens():
    cache = FakeCache(1000, 0)
    world = World(cache, budget=FIXED + 1000 * MIB)
    for filled in range(0, 1001, 50):
        cache.filled = filled
        world.more = 60 * MIB  # less than the plan may err
        assert world.tick() == 0
    assert cache.asked == [] and world.said == []


def test_more_than_the_plan_said_is_given_back_before_the_slots_fill():
    cache = FakeCache(1000, 100)
    world = World(cache, budget=FIXED + 1000 * MIB)
    world.more = 70 * MIB
    assert world.tick() == 70 * MIB, "as much as is over, not only what exceeds the margin"
    cache.filled = cache.slots
    assert [world.tick() for _ in range(9)] == [0] * 9, "what was given back is over no more"
    assert world.said == ["memory runs short: 1.33 GB would be held, the budget is 1.26 GB; the expert cache shrinks "
                          "from 1.05 GB to 975 MB, and further where it must"]  # fmt: skip


@pytest.mark.parametrize("filled", [0, 500, 1000])
def test_a_place_nearly_full_is_left_its_reserve(filled):
    cache = FakeCache(1000, filled)
    world = World(cache)
    world.left = 1000 * MIB - filled * MIB + memory.reserve(world.limit)
    assert world.tick() == 0
    world.left -= 30 * MIB
    assert world.tick() == 30 * MIB
    assert len(world.said) == 1 and "left on this machine" in world.said[0]


def test_what_a_first_forward_touches_is_to_come_as_well():
    """The process holds 150 MiB of the 250 that are fixed, 50 of which come with the context, little by little."""
    cache = FakeCache(100, 0)
    world = World(cache)
    world.more = -50 * MIB
    world.left = memory.reserve(world.limit) + 140 * MIB
    assert world.tick() == 10 * MIB


def test_a_standstill_doubles_the_reserve_and_no_more():
    cache = FakeCache(100, 100)
    world = World(cache)
    world.left, world.stalled = 2 * memory.reserve(world.limit) - 10 * MIB, STANDSTILL - 1
    assert world.tick() == 0
    world.stalled = 99.0
    assert world.tick() == 10 * MIB
    world.left += 10 * MIB
    assert [world.tick() for _ in range(100)] == [0] * 100, "waiting alone takes nothing"


def test_caches_give_in_order_to_their_floor_and_then_the_guard_rests():
    trunk, head = FakeCache(20, 20, floor=8), FakeCache(10, 10, floor=4)
    world = World(trunk, head, left=0)
    assert world.tick() == 18 * MIB and (trunk.slots, head.slots) == (8, 4)
    assert world.tick() == 0
    looks = world.looks
    for _ in range(int(IDLE / INTERVAL) - 1):
        world.tick()
    assert world.looks == looks, "nothing to give: no look four times a second"
    world.tick(IDLE)
    assert world.looks == looks + 1 and len(world.said) == 1


def test_it_is_said_that_there_is_nothing_to_give():
    world = World(left=0)
    for _ in range(3):
        world.tick(2 * IDLE)
    assert world.said == ["memory runs short: 0 B left on this machine; there is no expert cache to give back"]


def test_off_is_off():
    world = World(FakeCache(100, 100), left=0, on=False)
    assert world.tick(1e9) == 0 and world.looks == 0


def test_what_the_embedding_process_held_before_is_not_ours():
    cache = FakeCache(100, 100)
    world = World(cache, budget=FIXED + 100 * MIB, held=FIXED + 3000 * MIB)
    world.more = 3000 * MIB
    assert world.tick() == 0
    world.more += 100 * MIB
    assert world.tick() == 92 * MIB, "down to the floor"


def test_the_meter_reads_groups_and_pressure(tmp_path):
    root = tree(tmp_path, V1_MOUNTS, OWN_V1)
    v1(root, "/docker/abc", 1000 * MIB, 700 * MIB, active=100 * MIB)
    v1(root, "/docker", 1 << 62, 700 * MIB)
    (root / "proc/pressure").mkdir()
    (root / "proc/pressure/memory").write_text("some avg10=1.00 avg60=0 total=1\nfull avg10=31.25 avg60=0 total=1\n")
    reading = Meter(root)()
    machine, group = reading.places
    assert reading.held > 10 * MIB and machine.stalled == 31.25 and 0 < machine.left < machine.limit
    assert group == Place("in control group /docker/abc", 1000 * MIB, 400 * MIB)
    assert group.room == 400 * MIB - memory.reserve(1000 * MIB)


# ---- with a model ----------------------------------------------------------------------------------------------------

# A process with an engine on argv[1], whose budget shrinks to argv[2] bytes below what it holds after argv[3] tokens.
RUN = """
import json, sys
from coli import memory
from coli.engine import Engine
from coli.session import Request, Session
from coli.settings import load
model, less, after, flags = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
with Engine.open(load({"model": model, "threads": 1} | flags, {})[0]) as engine:
    said = []
    engine.say = said.append
    before = sum(store.nbytes for store in engine.stores)
    session = Session(engine)
    pieces = session.generate(Request(tuple(range(2, 40)), max_tokens=60, stop_ids=frozenset()))
    for number, _ in enumerate(pieces):
        if less and number == after:
            engine.guard._margin, engine.guard._due = 0, 0.0
            engine.guard.budget = memory.resident() - less
    print(json.dumps({
        "ids": session.report.token_ids, "said": said, "given": engine.guard.given, "before": before,
        "kept": sum(store.nbytes for store in engine.stores), "caps": [store.cap for store in engine.stores],
    }))
"""


def _run(*arguments) -> dict:
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_process_over_its_budget_shrinks_and_goes_on_with_the_same_tokens(tmp_path):
    config = tiny36_config("qwen3_5_moe_text", hidden_size=256, moe_intermediate_size=256, num_experts=16)
    folder = write_tiny36(tmp_path / "model", config)
    flags = json.dumps({"mtp": True, "drafts": "3", "gate": False})
    free = _run(folder, 0, 0, flags)
    assert free["said"] == [] and free["given"] == 0
    for less in (20 * MIB, 10_000 * MIB):
        seen = _run(folder, less, 9, flags)
        assert seen["ids"] == free["ids"]
        assert len(seen["said"]) == 1 and "cache shrinks" in seen["said"][0]
        assert seen["given"] == seen["before"] - seen["kept"] >= min(less, seen["before"] * 3 // 4)
        assert all(cap >= 1 for cap in seen["caps"])


def test_a_cache_that_shrinks_at_every_wait_for_experts_gives_the_same_tokens(tmp_path):
    folder = write_tiny36(tmp_path / "model", tiny36_config("qwen3_next", num_experts=32))
    request = Request(tuple(range(2, 90)), max_tokens=30, stop_ids=frozenset())
    flags = {"mtp": True, "drafts": "2", "gate": False, "prefill_chunk": 32, "warm_start": False, "usage_save": False}
    with Opened(folder, **flags) as opened:
        list((session := Session(opened.engine)).generate(request))
        free = session.report.token_ids
    with Opened(folder, **flags) as opened:
        engine, looks, during = opened.engine, itertools.count(), []

        def read() -> Reading:
            """One slot less than there is room for, whenever it is asked."""
            during.append(engine.model.player.program.step[0])
            filled, every = (sum(getattr(s, name) for s in engine.stores) for name in ("filled_bytes", "nbytes"))
            return Reading(filled, (Place("here", 0, memory.reserve(0) + every - filled - 1),))

        engine.guard = Guard(1 << 40, NOTHING, engine.stores, say=engine.say, read=read,
                             clock=lambda: 10.0 * next(looks))  # fmt: skip
        engine.model.player.on_wait = engine.guard.tick
        list((session := Session(engine)).generate(request))
        assert session.report.token_ids == free
        assert engine.guard.given > 0 and all(1 <= store.cap < 32 for store in engine.stores)
        assert during.count(32) > 2 * 3, "a prompt of three pieces is watched between its layers"


def test_the_engine_has_a_guard_of_its_plan(tmp_path, monkeypatch):
    folder = write_tiny36(tmp_path / "model", tiny36_config("qwen3_moe"))
    with Opened(folder) as opened:
        engine = opened.engine
        assert engine.guard.budget == engine.plan.budget and list(engine.guard.caches) == engine.stores
        engine.say("something")
        assert engine.notes[-1] == "something"
    monkeypatch.setattr(memory, "available", lambda: 300 * MIB)
    with Opened(folder, ram=8) as opened:
        assert opened.engine.plan.budget < 500 * MIB
        assert any("--ram 8 lowered to" in note for note in opened.engine.notes)
    with Opened(folder, guard=False) as opened:
        assert opened.engine.guard.tick() is None and opened.engine.guard.given == 0
