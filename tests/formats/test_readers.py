"""The reading threads do every job once and end when asked."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from threading import Event

import pytest

from coli.formats.readers import NOW, SOMETIME, SOON, ReadPool


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


def held() -> tuple[ReadPool, Event, list]:
    """A pool whose one thread waits for the event."""
    pool, go, done = ReadPool(1, "test"), Event(), []
    begun = Event()
    pool.submit(lambda: (begun.set(), go.wait(60)))
    assert begun.wait(60)
    return pool, go, done


def test_earlier_ranks_go_first():
    pool, go, done = held()
    for job, rank in (("a", SOMETIME), ("b", SOON), ("c", NOW), ("d", SOON), ("e", NOW), ("f", SOMETIME)):
        pool.submit(done.append, job, rank=rank)
    go.set()
    pool.close()
    assert done == list("cebdaf")


def test_a_hastened_job_is_done_once_and_a_cancelled_one_never():
    pool, go, done = held()
    tasks = [pool.submit(done.append, i, rank=SOMETIME) for i in range(5)]
    pool.hasten(tasks[3])
    assert tasks[1].cancel() and not tasks[1].cancel()
    go.set()
    pool.close()
    assert done == [3, 0, 2, 4]
    assert not tasks[3].cancel() and not tasks[0].cancel()


def test_many_threads_lose_no_job():
    """Hastened, cancelled and plain jobs, from several threads."""
    pool, done = ReadPool(4, "test"), SimpleQueue()
    cancelled = SimpleQueue()

    def give(first: int) -> None:
        for i in range(first, first + 500):
            task = pool.submit(done.put, i, rank=i % 3)
            if i % 5 == 0:
                pool.hasten(task)
            if i % 7 == 0 and task.cancel():
                cancelled.put(i)

    pool.submit(done.put, -1)  # its threads have begun
    givers = [threading.Thread(target=give, args=(500 * i,)) for i in range(3)]
    for thread in givers:
        thread.start()
    for thread in givers:
        thread.join()
    pool.close()
    found = [queue.get() for queue in (done, cancelled) for _ in range(queue.qsize())]
    assert sorted(found) == list(range(-1, 1500))
