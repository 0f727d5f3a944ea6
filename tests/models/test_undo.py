"""Taking rows back: forward R rows, keep r, go on: byte for byte as if the rest had never been seen. Every test runs
with both ways of coli/recurrent.py."""

from __future__ import annotations

import numpy as np
import pytest

from coli import recurrent
from coli.errors import DoesNotFit
from coli.recurrent import STANDING
from coli.state import State, StateSpec
from tests.models.bench_model import Opened, random_ids
from tests.tiny import odd_config, write_tiny

UNDO = ["slots", "log"]


@pytest.fixture(scope="module", params=UNDO)
def opened(request, tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("undo"), seed=2, dtype="F32")
    with Opened(folder, undo=request.param) as opened:
        yield opened


def _plain(opened, ids):
    """Logits and state of running `ids` one by one."""
    state = opened.engine.model.new_state()
    logits = [opened.engine.model.forward([token], state).logits.copy() for token in ids]
    return np.concatenate(logits), state


def _is_log(opened) -> bool:
    return opened.engine.settings.undo == "log"


def _verify(opened, state, ids, kept):
    answer = opened.engine.model.forward(ids, state, want="all", undoable=True).logits.copy()
    state.keep(kept)
    return answer


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
        answer = _verify(opened, state, verify, kept)
        expected, plain = _plain(opened, np.concatenate([prompt, verify[:kept]]))
        assert answer[:kept].tobytes() == expected[before:].tobytes()
        assert state.content() == plain.content()
        # go on: another verify, taken back too, then plain rows
        _verify(opened, state, after[:5], 2)
        model.forward(after[2:], state)
        expected, plain = _plain(opened, np.concatenate([prompt, verify[:kept], after[:2], after[2:]]))
        assert state.content() == plain.content()


def _a_hundred_verifies(opened):
    """Random sizes, now and then without keep (all rows stand) or with plain rows between; state bytes at times."""
    rng = np.random.default_rng(4)
    model, ids, answers = opened.engine.model, [], []
    state = model.new_state()
    for turn in range(100):
        rows = random_ids(int(rng.integers(1, 9)), opened.engine.model_path, 100 + turn)
        undoable = turn % 7 != 3
        answer = model.forward(rows, state, want="all", undoable=undoable).logits.copy()
        kept = len(rows)
        if undoable and turn % 11:
            kept = int(rng.integers(1, len(rows) + 1))
            state.keep(kept)
        ids += rows[:kept].tolist()
        answers.append(answer[:kept])
        if turn in (10, 50, 99):
            expected, plain = _plain(opened, ids)
            assert np.concatenate(answers).tobytes() == expected.tobytes()
            assert state.content() == plain.content()


def test_a_hundred_random_verifies(opened):
    _a_hundred_verifies(opened)


@pytest.mark.parametrize("undo", UNDO)
@pytest.mark.parametrize("threads, chunk", [(1, 1), (3, 5)])
def test_odd_sizes_any_threads_and_chunks_smaller_than_a_verify(tmp_path, undo, threads, chunk):
    folder = write_tiny(tmp_path, odd_config(max_position_embeddings=600), seed=3, dtype="F32")
    with Opened(folder, undo=undo, threads=threads, prefill_chunk=chunk) as opened:
        _a_hundred_verifies(opened)


def test_a_verify_of_one_row_is_a_plain_step(opened):
    state = opened.engine.model.new_state()
    bare = state.nbytes
    _verify(opened, state, [5], 1)
    _verify(opened, state, [6], 1)
    assert state.nbytes == bare, "nothing to undo, no memory for it"
    assert state.cells[STANDING] == 0


class _Refusing:
    """Stands in for `recurrent.zeros`: the allocation number `failing` finds no memory."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls, self.make = failing, 0, recurrent.zeros

    def __call__(self, floats: int) -> np.ndarray:
        self.calls += 1
        if self.calls - 1 == self.failing:
            raise MemoryError
        return self.make(floats)


@pytest.mark.parametrize("first", [0, 3], ids=["from nothing", "adding deeper ones"])
def test_memory_comes_on_first_use_and_any_failed_allocation_leaves_everything(opened, monkeypatch, first):
    model = opened.engine.model
    ids, more = random_ids(6, opened.engine.model_path), random_ids(8, opened.engine.model_path, 6)
    state = model.new_state()
    model.forward(ids[:2], state)
    if first:
        _verify(opened, state, ids[:first], 2)
    history = [*ids[:2], *ids[: 2 if first else 0]]
    needed = {"slots": 7 - max(first - 1, 0), "log": 0 if first else 2}[opened.engine.settings.undo]
    bytes_before, cells, content = state.nbytes, state.cells.copy(), state.content()
    for failing in range(needed):
        with monkeypatch.context() as patch:
            patch.setattr(recurrent, "zeros", _Refusing(failing))
            with pytest.raises(DoesNotFit):
                model.forward(more, state, want="all", undoable=True)
        assert state.nbytes == bytes_before and np.array_equal(state.cells, cells)
        assert state.content() == content
    with monkeypatch.context() as patch:
        refusing = _Refusing(needed)
        patch.setattr(recurrent, "zeros", refusing)
        answer = _verify(opened, state, more, 5)
        assert refusing.calls == needed
    expected, plain = _plain(opened, [*history, *more[:5]])
    assert answer[:5].tobytes() == expected[-5:].tobytes()
    assert state.content() == plain.content()
    assert state.recurrent.undo_bytes == opened.engine.model.spec.undo_bytes(opened.engine.settings.undo, 7)


def test_after_a_failed_allocation_plain_steps_and_shallower_verifies_go_on(opened, monkeypatch):
    model, ids = opened.engine.model, random_ids(12, opened.engine.model_path)
    state = model.new_state()
    _verify(opened, state, ids[:3], 3)
    with monkeypatch.context() as patch:
        patch.setattr(recurrent, "zeros", _Refusing(0))
        if _is_log(opened):
            _verify(opened, state, ids[3:9], 1)
        else:
            with pytest.raises(DoesNotFit):
                model.forward(ids[3:9], state, want="all", undoable=True)
            model.forward(ids[3:4], state)
        _verify(opened, state, ids[4:7], 2)
    assert state.content() == _plain(opened, ids[:6])[1].content()


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


@pytest.mark.parametrize("kept", [None, 1, 3, 6])
def test_a_snapshot_between_a_verify_and_what_follows(opened, kept):
    """Taken before keep (kept None: all rows) or after it: it holds the rows, and taking it changes nothing."""
    model, ids, after = opened.engine.model, *(random_ids(n, opened.engine.model_path, n) for n in (16, 5))
    state = model.new_state()
    model.forward(ids[:10], state)
    model.forward(ids[10:], state, want="all", undoable=True)
    if kept:
        state.keep(kept)
    cells, live = state.cells.copy(), state.recurrent.live.copy()
    snapshot = state.copy()
    assert np.array_equal(state.cells, cells) and np.array_equal(state.recurrent.live, live)
    plain = _plain(opened, ids[: 10 + (kept or 6)])[1]
    assert snapshot.recurrent.tobytes() == plain.copy().recurrent.tobytes()
    if _is_log(opened) and kept != 1:
        assert state.cells[STANDING] and snapshot.recurrent.tobytes() != live.tobytes(), "rows wait in the log"
    if not kept:
        state.keep(kept := 2)
    model.forward(after, state)
    expected = _plain(opened, [*ids[: 10 + kept], *after])[1]
    assert state.content() == expected.content()
    if snapshot.length == 10 + kept:  # and back, past a verify whose rows wait
        model.forward(after, state, want="all", undoable=True)
        state.load(snapshot)
        assert state.content() == plain.content()
        model.forward(after, state)
        assert state.content() == expected.content()


def test_reset_and_an_error_forget_what_waits(opened, monkeypatch):
    model, ids = opened.engine.model, random_ids(9, opened.engine.model_path)
    state, empty = model.new_state(), model.new_state()
    _verify(opened, state, ids[:6], 5)
    state.reset()
    assert state.content() == empty.content()
    _verify(opened, state, ids[:6], 4)
    with monkeypatch.context() as patch:
        patch.setattr(state, "append", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward(ids[6:], state)
    assert state.content() == empty.content()
    model.forward(ids, state)
    assert state.content() == _plain(opened, ids)[1].content()


def test_two_states_share_a_model(opened):
    """What stands in one state's log is never added to another's S."""
    model, ids = opened.engine.model, random_ids(24, opened.engine.model_path)
    one, two = model.new_state(), model.new_state()
    for at in (0, 6, 12):
        _verify(opened, one, ids[at : at + 6], 6)
        _verify(opened, two, ids[::-1][at : at + 6], 6)
        assert two.copy().length == at + 6
    assert one.content() == _plain(opened, ids[:18])[1].content()
    assert two.content() == _plain(opened, ids[::-1][:18])[1].content()


def _spec(**overrides):
    sizes = dict(attention_layers=1, kv_heads=1, head_dim=4, index_dim=4, index_ratio=4, recurrent_layers=0,
                 recurrent_width=0, rings=())  # fmt: skip
    return StateSpec(**sizes | overrides)


_RECURRENT = {"recurrent_layers": 1, "recurrent_width": 16, "log_width": 9}


def test_undo_is_one_of_two_and_a_log_needs_its_settling():
    for undo in ("log", "copy"):
        with pytest.raises(ValueError):
            State(_spec(**_RECURRENT), 32, undo=undo)
