"""Disks that fail: a request whose expert cannot be read errors by name, all others give what a sound disk gives.

Faults are injected below everything, in os.preadv, for the byte ranges of random experts of the plan."""

from __future__ import annotations

import bisect
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import ReadError
from coli.experts import reader as expert_reader
from coli.session import Request, Session
from coli.settings import load
from tests.tiny import write_tiny
from tests.tiny36 import tiny36_config, write_tiny36

TOKENS = 12
END = -1  # a file that ends before the record does
NAMED = re.compile(r"(?P<file>[^/]+): cannot read expert (?P<expert>\d+) of layer (?P<layer>\d+): (?P<why>.*) "
                   r"\(errno (?P<errno>\d+)\)")  # fmt: skip
Expert = tuple[int, int]

FORMS = {
    "qwen38, fused": (write_tiny, dict(dtype="BF16", shards=3), {}),
    "qwen38, fp8 one by one": (write_tiny, dict(dtype="FP8", shards=2), {}),
    "qwen38, past the page cache": (write_tiny, dict(dtype="BF16"), dict(page_cache="drop")),
    "qwen36": (write_tiny36, dict(config=tiny36_config("qwen3_5_moe_text"), dtype="BF16"), {}),
}


class Faults:
    """os.preadv that fails inside the records of `bad`, experts by layer and number, as `bad` says: an errno, or END.

    `once`: only the first read of a record fails, and sound reads are cut short. `copies`: whether files other than the
    checkpoint's own fail as well. `failed`: experts some read of which has failed."""

    def __init__(self, engine: Engine) -> None:
        self.bad: dict[Expert, int] = {}
        self.once = False
        self.failed: set[Expert] = set()
        self.reads = 0
        self._real = os.preadv
        self._starts: dict[tuple[int, int], list[tuple[int, int, Expert]]] = {}
        self.experts: list[Expert] = []
        for layer, places in enumerate(engine.plan.survey.experts.layers):
            for expert in range(engine.geometry.experts):
                self.experts.append((layer, expert))
                for piece in (piece for located in places.located for piece in located.pieces(expert)):
                    stat, start = piece.tensor.path.stat(), piece.tensor.offset + piece.start
                    spans = self._starts.setdefault((stat.st_dev, stat.st_ino), [])
                    spans.append((start, start + piece.nbytes, (layer, expert)))
        for spans in self._starts.values():
            spans.sort()

    def __call__(self, fd, buffers, offset, *flags):
        stat, wanted = os.fstat(fd), sum(memoryview(buffer).nbytes for buffer in buffers)
        hit = [e for e in self._inside(self._starts.get((stat.st_dev, stat.st_ino), []), offset, offset + wanted)
               if e in self.bad]  # fmt: skip
        self.reads += bool(hit)
        if self.once:
            hit = [expert for expert in hit if expert not in self.failed]
        if not hit:
            cut = self.once and self.reads % 3 == 0 and wanted > 8192
            return self._real(fd, [memoryview(buffers[0])[:4096]] if cut else buffers, offset, *flags)
        self.failed.update(hit)
        memoryview(buffers[0])[:] = b"\x7c" * memoryview(buffers[0]).nbytes  # what was read is rubbish
        if self.bad[hit[0]] == END:
            return 0
        raise OSError(self.bad[hit[0]], os.strerror(self.bad[hit[0]]))

    @staticmethod
    def _inside(spans: list[tuple[int, int, Expert]], start: int, end: int) -> Iterator[Expert]:
        for at in range(max(0, bisect.bisect_left(spans, (start,)) - 1), len(spans)):
            if spans[at][0] >= end:
                return
            if spans[at][1] > start:
                yield spans[at][2]

    @contextmanager
    def on(self, bad: dict[Expert, int], monkeypatch, *, once: bool = False) -> Iterator[None]:
        self.bad, self.once, self.failed, self.reads = bad, once, set(), 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", self)
            yield


@pytest.fixture(scope="module", params=FORMS, ids=lambda name: name)
def folder(request, tmp_path_factory) -> tuple[Path, dict]:
    write, form, flags = FORMS[request.param]
    return write(tmp_path_factory.mktemp("faults") / "model", **form), flags


@pytest.fixture(autouse=True)
def every_range_counts(monkeypatch):
    monkeypatch.setattr(expert_reader, "SMALL", 1)


@contextmanager
def opened(folder: Path, **flags) -> Iterator[Engine]:
    quiet = dict(prefetch="off", warm_start=False, usage_save=False, page_cache="keep")  # every read was waited for
    flags = {"model": str(folder), "threads": 2, "cap": 3, "mtp": False, "ctx": 128} | quiet | flags
    with Engine.open(load(flags, {})[0]) as engine:
        yield engine


def answer(engine: Engine, request: Request) -> tuple[int, ...]:
    session = Session(engine)
    for _ in session.generate(request):
        pass
    return session.report.token_ids


def requests(count: int) -> list[Request]:
    """Long ones, which need nearly every expert, and every second one so short that it needs a few."""
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(2, 250, 1 if i % 2 else 9).tolist()) for i in range(count)]
    return [Request(prompt, 1 if i % 2 else TOKENS, stop_ids=frozenset({-1})) for i, prompt in enumerate(prompts)]


def check_named(error: ReadError, engine: Engine, bad: dict[Expert, int]) -> None:
    """The message names an expert that is bad, a file it lies in, and why."""
    found = NAMED.search(str(error))
    assert found, str(error)
    expert = int(found["layer"]), int(found["expert"])
    assert expert in bad
    located = engine.plan.survey.experts.layers[expert[0]].located
    assert found["file"] in {piece.tensor.path.name for place in located for piece in place.pieces(expert[1])}
    assert int(found["errno"]) == max(0, bad[expert])
    assert found["why"] == ("unexpected end of file" if bad[expert] == END else os.strerror(bad[expert]))


def test_affected_requests_error_by_name_and_the_others_are_right(folder, monkeypatch):
    path, flags = folder
    asked, rng, outcomes = requests(4), np.random.default_rng(11), {"error": 0, "right": 0}
    with opened(path, **flags) as engine:
        sound = [answer(engine, request) for request in asked]
        faults = Faults(engine)
        for turn in range(30):
            count = [1, 2, 8][turn % 3]
            chosen = rng.choice(len(faults.experts), count, replace=False)
            bad = {faults.experts[i]: int(rng.choice([errno.EIO, errno.ENODATA, END])) for i in chosen}
            number = int(rng.integers(len(asked)))
            with faults.on(bad, monkeypatch):
                try:
                    assert answer(engine, asked[number]) == sound[number]
                except ReadError as error:
                    check_named(error, engine, bad)
                    assert faults.failed
                    outcomes["error"] += 1
                else:
                    if not flags:  # a direct read fails with its neighbour's sector, and is read another way
                        assert not faults.failed, "an expert that could not be read was needed"
                    outcomes["right"] += 1
                for layer, expert in bad:
                    if (layer, expert) in faults.failed and not flags:
                        assert engine.store.table[layer, expert] == 0
            number = (number + 1) % len(asked)
            assert answer(engine, asked[number]) == sound[number], "the next request is right"
    assert min(outcomes.values()) >= 3, outcomes


def test_faults_that_pass_are_not_noticed(folder, monkeypatch):
    """Every record fails once, and every third read of the others is cut short."""
    path, flags = folder
    asked = requests(3)
    with opened(path, **flags) as engine:
        sound = [answer(engine, request) for request in asked]
        faults = Faults(engine)
        for number, request in enumerate(asked):
            with faults.on(dict.fromkeys(faults.experts, errno.EIO), monkeypatch, once=True):
                assert answer(engine, request) == sound[number]
                assert faults.reads > len(faults.failed) > 0


def test_a_session_goes_on_while_anothers_request_fails(folder, monkeypatch):
    """Two answers on one engine, a token of each in turn."""
    path, flags = folder
    asked = requests(3)[::2]
    with opened(path, **flags) as engine:
        sound = [answer(engine, request) for request in asked]
        faults, failures = Faults(engine), 0
        for seed in range(6):
            rng = np.random.default_rng(seed)
            sessions = [Session(engine) for _ in asked]
            running = [session.generate(request) for session, request in zip(sessions, asked, strict=True)]
            bad = {faults.experts[i]: errno.EIO for i in rng.choice(len(faults.experts), 6, replace=False)}
            alive = True
            while len(sessions[1].report.token_ids if sessions[1].report else ()) < TOKENS:
                if alive:
                    with faults.on(bad, monkeypatch):
                        try:
                            alive = next(running[0], None) is not None
                        except ReadError as error:
                            check_named(error, engine, bad)
                            alive, failures = False, failures + 1
                next(running[1], None)
            assert sessions[1].report.token_ids == sound[1]
        assert failures


def test_a_mirror_stands_in_for_a_disk_that_fails_everywhere(folder, monkeypatch):
    path, flags = folder
    asked, mirror = requests(2), path.parent / "mirror"
    if not mirror.exists():
        shutil.copytree(path, mirror)
    with opened(path, mirror=mirror, **flags) as engine:
        faults = Faults(engine)
        with opened(path, **flags) as plain:
            sound = [answer(plain, request) for request in asked]
        with faults.on(dict.fromkeys(faults.experts, errno.EIO), monkeypatch):
            assert [answer(engine, request) for request in asked] == sound
            assert faults.failed


AHEAD = dict(prefetch="on", warm_start=True, usage_save=True, mtp=True, lookup=True)


def test_reads_ahead_that_fail_harm_nobody(folder, tmp_path, monkeypatch):
    """Drafts, prefetch and a warm start from a history: an expert that nobody came to need may be unreadable."""
    path, flags = folder
    flags = flags | AHEAD | dict(usage=tmp_path / "usage")
    asked, rng, outcomes = requests(4), np.random.default_rng(12), {"error": 0, "right": 0}
    with opened(path, **flags) as engine:
        sound = [answer(engine, request) for request in asked]
    for turn in range(4):
        with opened(path, **flags) as engine:
            faults = Faults(engine)
            for step in range(6):
                chosen = rng.choice(len(faults.experts), [1, 2, 5][step % 3], replace=False)
                bad = {faults.experts[i]: int(rng.choice([errno.EIO, END])) for i in chosen}
                number = (turn + step) % len(asked)
                with faults.on(bad, monkeypatch):
                    try:
                        assert answer(engine, asked[number]) == sound[number]
                        outcomes["right"] += 1
                    except ReadError as error:
                        check_named(error, engine, bad)
                        outcomes["error"] += 1
                assert answer(engine, asked[number]) == sound[number]
    assert min(outcomes.values()) >= 1, outcomes


def test_the_engine_tells_its_reader_what_was_wished(tmp_path):
    """--direct, --mirror and --page-cache reach it, its notes reach the engine's, at open and later."""
    model = write_tiny(tmp_path / "model", dtype="BF16", mtp=False)
    (tmp_path / "mirror").mkdir()
    with opened(model, cap=3, page_cache="auto") as engine:
        assert engine.reader._release and not engine.reader.notes
    with opened(model, cap=8, page_cache="auto") as engine:
        assert not engine.reader._release
    with opened(model, cap=8, page_cache="drop", direct=True, mirror=tmp_path / "mirror") as engine:
        assert engine.reader._release and engine.reader._wished
        assert any("none of the mirror" in note for note in engine.notes)
        engine.reader.say("later")
        assert "later" in engine.notes
    dense = write_tiny36(tmp_path / "dense", tiny36_config("qwen3_5_text"), dtype="BF16", mtp=False)
    with Engine.open(load({"model": str(dense), "mirror": tmp_path / "mirror", "ctx": 64}, {})[0]) as engine:
        assert engine.reader is None and "--mirror has no effect: the model has no experts" in engine.notes
