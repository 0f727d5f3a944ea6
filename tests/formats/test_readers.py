"""The reading threads do every job once and end when asked."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from coli.formats.readers import ReadPool


def test_every_job_is_done_once_and_threads_end():
    before = threading.active_count()
    pool, done = ReadPool(3, "test"), SimpleQueue()
    assert threading.active_count() == before
    for i in range(500):
        pool.submit(done.put, i)
    assert sorted(done.get() for _ in range(500)) == list(range(500))
    pool.close()
    pool.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError):
        pool.submit(print)


def test_close_finishes_what_was_given():
    pool, done = ReadPool(1, "test"), []
    for i in range(100):
        pool.submit(done.append, i)
    pool.close()
    assert done == list(range(100))


def test_a_pool_needs_a_thread():
    with pytest.raises(ValueError):
        ReadPool(0, "test")
