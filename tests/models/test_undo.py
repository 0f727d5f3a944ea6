"""Taking rows back: forward R rows, keep r, go on: byte for byte as if the rest had never been seen."""

from __future__ import annotations

import numpy as np
import pytest

from coli.errors import DoesNotFit
from tests.models.bench_model import Opened, random_ids
from tests.tiny import write_tiny


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    with Opened(write_tiny(tmp_path_factory.mktemp("undo"), seed=2, dtype="F32")) as opened:
        yield opened


def _plain(opened, ids):
    """Logits and state of running `ids` one by one."""
    state = opened.engine.model.new_state()
    logits = [opened.engine.model.forward([token], state).logits.copy() for token in ids]
    return np.concatenate(logits), state


# before: how many rows come first; block edges of the index (ratio 4), ring wrap-around and the index budget inside
@pytest.mark.parametrize("before", [0, 1, 3, 22, 41])
@pytest.mark.parametrize("rows", [1, 2, 6, 8])
def test_keeping_any_number_of_rows_equals_never_having_seen_the_rest(opened, before, rows):
    model = opened.engine.model
    folder = opened.engine.model_path
    prompt, verify, after = (random_ids(n, folder, seed) for n, seed in ((before, 1), (rows, 2), (9, 3)))
    for kept in range(1, rows + 1):
        state = model.new_state()
        if before:
            model.forward(prompt, state)
        answer = model.forward(verify, state, want="all", undoable=True).logits.copy()
        state.keep(kept)
        expected, plain = _plain(opened, np.concatenate([prompt, verify[:kept]]))
        assert answer[:kept].tobytes() == expected[before:].tobytes()
        assert state.content() == plain.content()
        # go on: another verify, taken back too, then plain rows
        model.forward(after[:5], state, want="all", undoable=True)
        state.keep(2)
        model.forward(after[2:], state)
        expected, plain = _plain(opened, np.concatenate([prompt, verify[:kept], after[:2], after[2:]]))
        assert state.content() == plain.content()


def test_a_hundred_random_verifies(opened):
    rng = np.random.default_rng(4)
    model, kept_ids = opened.engine.model, []
    state = model.new_state()
    for turn in range(100):
        ids = random_ids(int(rng.integers(1, 7)), opened.engine.model_path, 100 + turn)
        model.forward(ids, state, want="all", undoable=True)
        kept = int(rng.integers(1, len(ids) + 1))
        state.keep(kept)
        kept_ids += ids[:kept].tolist()
    assert state.content() == _plain(opened, kept_ids)[1].content()


def test_slots_come_on_first_use_and_a_failed_allocation_leaves_everything(opened, monkeypatch):
    model = opened.engine.model
    ids = random_ids(6, opened.engine.model_path)
    state = model.new_state()
    assert not state.slots
    model.forward(ids[:3], state, want="all", undoable=True)
    assert len(state.slots) == 2
    content, slots = state.content(), list(state.slots)
    make = state._recurrent
    for failing in range(3):
        calls = iter(range(9))

        def allocate(failing=failing, calls=calls):
            if next(calls) == failing:
                raise MemoryError
            return make()

        monkeypatch.setattr(state, "_recurrent", allocate)
        with pytest.raises(DoesNotFit):
            model.forward(ids, state, want="all", undoable=True)
        assert state.content() == content and [s is t for s, t in zip(state.slots, slots, strict=True)] == [True, True]
    monkeypatch.setattr(state, "_recurrent", make)
    model.forward(ids, state, want="all", undoable=True)
    assert len(state.slots) == 5


def test_keep_is_refused_where_it_means_nothing(opened):
    state = opened.engine.model.new_state()
    with pytest.raises(ValueError):
        state.keep(1)
    opened.engine.model.forward([3, 4], state, want="all", undoable=True)
    for wrong in (0, 3, -1):
        with pytest.raises(ValueError):
            state.keep(wrong)
    state.keep(1)
    with pytest.raises(ValueError):
        state.keep(1)
    opened.engine.model.forward([3], state)
    with pytest.raises(ValueError):
        state.keep(1)


def test_a_snapshot_brings_the_state_back(opened):
    model = opened.engine.model
    first, second = (random_ids(n, opened.engine.model_path, n) for n in (30, 12))
    state = model.new_state()
    model.forward(first, state)
    content, snapshot = state.content(), state.copy()
    model.forward(second, state)
    state.load(snapshot)
    assert state.content() == content
    again = model.forward(second, state).logits.copy()
    state.reset()
    model.forward(first, state)
    assert model.forward(second, state).logits.tobytes() == again.tobytes()
