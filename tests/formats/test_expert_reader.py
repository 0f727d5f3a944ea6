"""Reads of experts: the file's bytes whatever the way, another way when one fails, and no second copy in memory."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.experts import page_cache
from coli.experts import reader as expert_reader
from coli.experts.mirror import Choice, Disk
from coli.experts.reader import ExpertReader
from coli.formats.checkpoint import Checkpoint
from coli.formats.sidecar import open_sidecar
from coli.models.qwen38_layout import geometry
from tests.containers import write_sidecar
from tests.gguf_files import write_gguf
from tests.tiny import tiny_config, tiny_weights, write_tiny

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config = tiny_config(num_experts=16, moe_intermediate_size=256, num_hidden_layers=4, ple_layer_ids=[],
                         layer_types=["linear_attention"] * 3 + ["full_attention"])  # fmt: skip
    return write_tiny(tmp_path_factory.mktemp("reader") / "model", config, dtype="BF16", mtp=False)


@pytest.fixture(scope="module")
def mirror(folder) -> Path:
    return shutil.copytree(folder, folder.parent / "copy")


@pytest.fixture(autouse=True)
def small_ranges_count(monkeypatch):
    """What these tests read is small; a bounce buffer of three sectors makes their ranges take several turns."""
    monkeypatch.setattr(expert_reader, "SMALL", 1)
    monkeypatch.setattr(expert_reader, "BOUNCE", 3 * 4096)


@pytest.fixture
def opened(folder):
    """`opened(**options)`: a reader of the checkpoint in `folder`, closed at the end."""
    readers: list[tuple[ExpertReader, Checkpoint]] = []

    def call(where: Path = folder, **options) -> ExpertReader:
        checkpoint = Checkpoint.open(where)
        readers.append((ExpertReader(checkpoint, **options), checkpoint))
        return readers[-1][0]

    yield call
    for reader, checkpoint in readers:
        reader.close()
        checkpoint.close()


def has_direct_reads(folder: Path) -> bool:
    try:
        os.close(os.open(folder / FILE, os.O_RDONLY | getattr(os, "O_DIRECT", 1 << 40)))
    except (OSError, OverflowError):
        return False
    return True


def read(reader: ExpertReader, path: Path, offset: int, lengths: list[int]) -> bytes:
    """What the reader puts into buffers of these lengths, at no particular addresses."""
    memory = np.full(sum(lengths) + 64 * len(lengths) + 3, 0xA5, np.uint8)
    at, buffers = 3, []
    for length in lengths:
        buffers.append(memory[at : at + length])
        at += length + 64
    assert reader.read(path, [buffer.data for buffer in buffers], offset) == sum(lengths)
    assert (memory[:3] == 0xA5).all() and (memory[at - 64 : at] == 0xA5).all()
    return b"".join(buffer.tobytes() for buffer in buffers)


WAYS = [dict(direct=d, dropped=r, twice=t) for d in (False, True) for r in (False, True) for t in (False, True)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(name for name, on in way.items() if on) or "plain")
def test_every_way_gives_the_files_bytes(folder, mirror, opened, way, monkeypatch):
    if not way["direct"]:
        monkeypatch.setattr(expert_reader, "_O_DIRECT", 0)
    reader = opened(direct=way["direct"], release=way["dropped"], mirror=mirror if way["twice"] else None)
    path, whole = folder / FILE, (folder / FILE).read_bytes()
    assert len(whole) % 4096

    @settings(deadline=None, max_examples=60)
    @given(st.integers(0, len(whole) - 1), st.lists(st.integers(0, 30_000), min_size=1, max_size=4))
    def same(offset, lengths):
        while sum(lengths) > len(whole) - offset:
            lengths[lengths.index(max(lengths))] //= 2
        assert read(reader, path, offset, lengths) == whole[offset : offset + sum(lengths)]

    same()
    assert read(reader, path, 0, [len(whole)]) == whole
    assert read(reader, path, len(whole) - 1, [1]) == whole[-1:]
    assert reader.read_bytes > len(whole)
    with pytest.raises(OSError, match="unexpected end"):
        read(reader, path, len(whole) - 10, [11])


def test_many_threads_at_once(folder, mirror, opened):
    reader = opened(direct=True, mirror=mirror, release=True)
    path, whole, wrong = folder / FILE, (folder / FILE).read_bytes(), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            offset = int(rng.integers(len(whole) - 40_000))
            if read(reader, path, offset, [20_000, 19_000]) != whole[offset : offset + 39_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and reader.read_bytes == 8 * 60 * 39_000


# ---- faults ----------------------------------------------------------------------------------------------------------


class Disturbed:
    """os.preadv that fails as `errors` say, one a call: an errno, 0 for one byte only, None for a sound read."""

    def __init__(self, monkeypatch, errors: list[int | None]) -> None:
        self.errors, self.fds, self._real = errors, [], os.preadv
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd, buffers, offset):
        self.fds.append(fd)
        error = self.errors.pop(0) if self.errors else None
        if error is None:
            return self._real(fd, buffers, offset)
        if error == 0:
            return min(self._real(fd, buffers, offset), 1)
        buffers[0][:] = b"\xee" * buffers[0].nbytes
        raise OSError(error, os.strerror(error))


def test_a_failed_read_is_tried_once_more(folder, opened, monkeypatch):
    reader, whole = opened(), (folder / FILE).read_bytes()
    disturbed = Disturbed(monkeypatch, [errno.EIO])
    assert read(reader, folder / FILE, 100, [500, 600]) == whole[100:1200]
    assert len(disturbed.fds) == 2 and reader.read_bytes == 1100 and reader.notes == []
    disturbed = Disturbed(monkeypatch, [errno.EIO, errno.ENODATA])
    with pytest.raises(OSError) as failed:
        read(reader, folder / FILE, 100, [500, 600])
    assert failed.value.errno == errno.ENODATA and len(disturbed.fds) == 2 and reader.read_bytes == 1100


def test_short_reads_are_gone_on_with(folder, opened, monkeypatch):
    whole = (folder / FILE).read_bytes()
    Disturbed(monkeypatch, [0, 0, None])
    assert read(opened(), folder / FILE, 100, [2, 600]) == whole[100:702]


def test_a_direct_read_that_fails_or_falls_short_goes_through_the_page_cache(folder, opened, monkeypatch):
    reader, whole = opened(direct=True), (folder / FILE).read_bytes()
    for error in (errno.EIO, 0):
        disturbed = Disturbed(monkeypatch, [error])
        assert read(reader, folder / FILE, 100, [500, 600]) == whole[100:1200]
        assert disturbed.fds[0] != disturbed.fds[-1] or not has_direct_reads(folder)
    assert reader.notes == [] or not has_direct_reads(folder)


def test_a_file_system_that_refuses_direct_reads_is_noted_once(folder, opened, monkeypatch):
    whole, flag, real = (folder / FILE).read_bytes(), getattr(os, "O_DIRECT", 0), os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & flag:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing)
        reader = opened(direct=True)
    assert read(reader, folder / FILE, 5, [9000]) == whole[5:9005]
    assert [note[:15] for note in reader.notes] == ["no direct reads"]
    if not has_direct_reads(folder):
        return
    reader = opened(direct=True)
    disturbed = Disturbed(monkeypatch, [errno.EINVAL])
    for _ in range(3):
        assert read(reader, folder / FILE, 5, [9000]) == whole[5:9005]
    assert [note[:15] for note in reader.notes] == ["no direct reads"] and len(set(disturbed.fds[1:])) == 1


# ---- the mirror ------------------------------------------------------------------------------------------------------


def test_the_mirror_is_read_while_the_originals_disk_is_busy(folder, mirror, opened, monkeypatch):
    reader, whole, real = opened(mirror=mirror), (folder / FILE).read_bytes(), os.preadv
    inside, leave, fds = threading.Event(), threading.Event(), []

    def preadv(fd, buffers, offset):
        fds.append(fd)
        if len(fds) == 1:
            inside.set()
            assert leave.wait(60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    busy = threading.Thread(target=read, args=(reader, folder / FILE, 50, [200_000]))
    busy.start()
    assert inside.wait(60) and read(reader, folder / FILE, 9, [1000]) == whole[9:1009]
    leave.set()
    busy.join()
    assert len(set(fds)) == 2 and reader.read_bytes == 201_000
    assert len(reader.notes) == 1 and "same file system" in reader.notes[0]  # true of a test's folders


def test_a_read_goes_where_it_ends_first():
    choice = Choice()
    assert choice.best(100) == 0
    choice.disks[0].start(100, now=0.0)
    assert choice.best(100) == 1
    choice.disks[1].start(150, now=0.0)
    assert choice.best(100) == 0


def test_a_slow_disk_is_asked_less_and_forgiven():
    slow, fast = Disk(), Disk()
    for disk, seconds in ((slow, 10.0), (fast, 0.5)):
        disk.start(1 << 30, now=5.0)
        disk.end(1 << 30, now=5.0 + seconds, good=True)
    assert slow.wait(1 << 20) > 10 * fast.wait(1 << 20)
    fast.start(4 << 20, now=20.0)
    assert slow.wait(1 << 20) > fast.wait(1 << 20)
    fast.end(4 << 20, now=20.002, good=True)
    for _ in range(12):
        slow.fade()
        fast.fade()
    assert slow.wait(1 << 20) == pytest.approx(fast.wait(1 << 20), rel=0.05)
    failing = Disk()
    failing.start(1 << 30, now=0.0)
    failing.end(1 << 30, now=1.0, good=False)
    assert failing.wait(1 << 20) > Disk().wait(1 << 20)


@pytest.fixture
def mirror_first(monkeypatch):
    monkeypatch.setattr(Choice, "best", lambda self, nbytes: 1)


@pytest.mark.usefixtures("mirror_first")
@pytest.mark.parametrize("direct", [False, True])
def test_a_failing_mirror_is_noted_and_left_alone_after_three_errors(folder, mirror, opened, monkeypatch, direct):
    reader, whole = opened(mirror=mirror, direct=direct), (folder / FILE).read_bytes()
    said: list[str] = []
    reader.say = said.append
    for _ in range(3):
        disturbed = Disturbed(monkeypatch, [errno.EIO])
        assert read(reader, folder / FILE, 7, [3000]) == whole[7:3007]
        assert len(set(disturbed.fds)) == 2
    assert len(said) == 2 and "is read instead" in said[0] and "only the original" in said[1]
    disturbed = Disturbed(monkeypatch, [])
    assert read(reader, folder / FILE, 7, [3000]) == whole[7:3007] and len(disturbed.fds) == 1
    disturbed = Disturbed(monkeypatch, [errno.EIO, errno.ENXIO, errno.EREMOTEIO])
    with pytest.raises(OSError) as failed:
        read(reader, folder / FILE, 7, [3000])
    assert failed.value.errno == errno.ENXIO, "the original's error, for the original's name is in the message"


def test_the_mirror_stands_in_for_an_original_that_cannot_be_read(folder, mirror, opened, monkeypatch):
    reader, whole = opened(mirror=mirror), (folder / FILE).read_bytes()
    disturbed = Disturbed(monkeypatch, [errno.EIO, errno.EIO])
    assert read(reader, folder / FILE, 7, [3000]) == whole[7:3007]
    assert disturbed.fds[0] == disturbed.fds[1] != disturbed.fds[2]


def test_only_files_with_the_originals_size_and_header_stand_in(tmp_path, opened, monkeypatch):
    config = tiny_config(num_experts=4, num_hidden_layers=4, ple_layer_ids=[],
                         layer_types=["linear_attention"] * 3 + ["full_attention"])  # fmt: skip
    model = write_tiny(tmp_path / "model", config, dtype="BF16", shards=3, per_expert=True, mtp=False)
    copy = shutil.copytree(model, tmp_path / "copy")
    names = sorted(path.name for path in model.glob("*.safetensors"))
    assert opened(model, mirror=copy).notes[0].startswith(f"{copy} is on the same file system")
    with open(copy / names[0], "r+b") as file:
        file.seek(30)
        file.write(b"?")
    with open(copy / names[1], "ab") as file:
        file.write(b"more")
    reader = opened(model, mirror=copy)
    assert len(reader.notes) == 1 and "1 of 3" in reader.notes[0] and names[2] not in reader.notes[0]
    assert names[0] in reader.notes[0] and names[1] in reader.notes[0]
    for name in names:  # what differs is not read; an original that fails has no one to stand in for it
        with monkeypatch.context() as patch:
            Disturbed(patch, [errno.EIO, errno.EIO])
            if name == names[2]:
                assert read(reader, model / name, 0, [64]) == (model / name).read_bytes()[:64]
            else:
                with pytest.raises(OSError):
                    read(reader, model / name, 0, [64])
    for empty in (tmp_path / "nothing", model):
        notes = opened(model, mirror=empty).notes
        assert len(notes) == 1 and "none" in notes[0], "a mirror without a file, and one that is the model itself"


def test_another_model_of_the_same_shapes_does_not_stand_in(tmp_path, opened):
    """Size and header are the same; its experts would give other tokens."""
    model, other = (write_tiny(tmp_path / name, tiny_config(), seed=seed, dtype="BF16")
                    for seed, name in enumerate(("model", "other")))  # fmt: skip
    assert (model / FILE).stat().st_size == (other / FILE).stat().st_size
    reader = opened(model, mirror=other)
    assert len(reader.notes) == 1 and "none" in reader.notes[0] and FILE in reader.notes[0]


@pytest.mark.parametrize("form", ["gguf in two files", "sidecar"])
def test_copies_of_other_forms_lie_under_the_same_relative_names(tmp_path, opened, monkeypatch, form):
    config = tiny_config(num_experts=4, num_hidden_layers=4, ple_layer_ids=[],
                         layer_types=["linear_attention"] * 3 + ["full_attention"])  # fmt: skip
    (tmp_path / "model").mkdir()
    if form == "sidecar":
        model = write_tiny(tmp_path / "model", config, dtype="BF16", mtp=False)
        write_sidecar(model, tiny_weights(config, mtp=False))
    else:
        model = write_gguf(tmp_path / "model" / "m.gguf", config, tiny_weights(config, mtp=False), splits=2, mtp=False)
    copy = shutil.copytree(tmp_path / "model", tmp_path / "copy")
    checkpoint = Checkpoint.open(model)
    if form == "sidecar":
        open_sidecar(checkpoint, model / "experts-int4g64", geometry(checkpoint.config))
    expected = {path for path in (tmp_path / "model").rglob("*.*") if path.suffix in (".gguf", ".safetensors")}
    reader = ExpertReader(checkpoint, mirror=copy)
    for path in expected:
        Disturbed(monkeypatch, [errno.EIO, errno.EIO])
        assert read(reader, path, 40, [3000]) == path.read_bytes()[40:3040]
    assert len(expected) >= 2
    reader.close()
    checkpoint.close()


# ---- the page cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def cold(folder, opened):
    """`cold(**options)`: a reader whose file has no page in memory."""

    def call(**options) -> ExpertReader:
        reader = opened(**options)  # opening reads some
        fd = os.open(folder / FILE, os.O_RDONLY)
        os.fsync(fd)
        page_cache.drop(fd, 0, os.fstat(fd).st_size)
        os.close(fd)
        if reader.cached_bytes():
            pytest.skip("this file system's pages cannot be dropped")
        return reader

    return call


def test_cached_bytes_are_those_that_were_read(folder, cold):
    reader = cold()
    read(reader, folder / FILE, 1 << 20, [1 << 18])
    assert 1 << 18 <= reader.cached_bytes() <= (1 << 18) + 8192 and reader.released_bytes == 0


@pytest.mark.parametrize("edge", [0, 1, 4095])
def test_released_ranges_are_in_memory_once(folder, cold, edge, monkeypatch):
    """Neighbours share a page, and some shared ones are read twice. Without direct reads what was read is dropped."""
    for dropped in (False, True):
        with monkeypatch.context() as patch:
            if dropped:
                patch.setattr(expert_reader, "_O_DIRECT", 0)
            reader = cold(release=True)
        for turn in (2, 0, 1, 3):
            read(reader, folder / FILE, (1 << 20) + edge + turn * 100_001, [60_000, 40_001])
        assert reader.cached_bytes() == 0 and reader.notes == []
        assert reader.released_bytes == 4 * 100_001 * (dropped or not has_direct_reads(folder))


def test_direct_reads_leave_nothing_in_the_page_cache(folder, cold):
    if not has_direct_reads(folder):
        pytest.skip("no direct reads on this file system")
    reader = cold(direct=True)
    read(reader, folder / FILE, (1 << 20) + 77, [1 << 18])
    assert reader.cached_bytes() == 0 and reader.notes == []


def test_small_ranges_stay_in_the_page_cache(folder, cold, monkeypatch):
    monkeypatch.setattr(expert_reader, "SMALL", 5000)
    reader = cold(direct=True, release=True)
    read(reader, folder / FILE, 1 << 20, [4999])
    assert reader.cached_bytes() == 8192 and reader.released_bytes == 0


def test_a_system_without_any_of_it_reads_all_the_same(folder, opened, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    monkeypatch.setattr(expert_reader, "_O_DIRECT", 0)
    reader = opened(direct=True, release=True)
    assert read(reader, folder / FILE, 3, [9000]) == (folder / FILE).read_bytes()[3:9003]
    assert len(reader.notes) == 1 and "not on this system" in reader.notes[0] and reader.released_bytes == 0


def test_nothing_stays_open(folder, mirror):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc")
    before = descriptors()
    with Checkpoint.open(folder) as checkpoint:
        between = descriptors()
        reader = ExpertReader(checkpoint, direct=True, mirror=mirror)
        assert descriptors() > between
        reader.close()
        assert descriptors() == between
    assert descriptors() == before
