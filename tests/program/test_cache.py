"""The compile cache: warm starts without Numba, damage, read-only folders, two processes at once."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from coli.errors import ColiError
from coli.kernels.packing import LISTED_KINDS, TILE_KINDS, tile_name, tile_rows
from coli.program import compile as compiler
from coli.program.cache import Kernels, cache_key, warmup
from coli.settings import load

NAMES = ("publish", "todo")


def _load(folder: Path, extra: str = "") -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom pathlib import Path\nfrom coli.program.cache import Kernels\n"
        f"k = Kernels(Path({str(folder)!r}))\nk.load({NAMES!r})\n{extra}\n"
        "print(k.compiled, k.reused, 'numba' in sys.modules, len(k.notes), min(k[n] for n in " + repr(NAMES) + ") > 0)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_warm_start_compiles_nothing_and_never_imports_numba(tmp_path):
    assert _load(tmp_path).stdout.split() == ["2", "0", "False", "0", "True"]
    assert _load(tmp_path).stdout.split() == ["0", "2", "False", "0", "True"]


def test_a_damaged_object_is_made_again(tmp_path):
    _load(tmp_path)
    path = tmp_path / cache_key(True) / "todo.ko"
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"\x00" * 40, whole[:-1] + b"\xff"):
        path.write_bytes(damage)
        assert compiler.read(path) is None
        assert _load(tmp_path).stdout.split() == ["1", "1", "False", "0", "True"]
        assert compiler.read(path) is not None


def test_two_processes_at_once_share_the_work(tmp_path):
    code = (
        "from pathlib import Path\nfrom coli.program.cache import Kernels\n"
        f"k = Kernels(Path({str(tmp_path)!r}))\nk.load({NAMES!r})\nprint(k.compiled)"
    )
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate(timeout=60)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(counts) == len(NAMES), "a kernel was compiled twice"
    left = sorted(path.name for path in (tmp_path / cache_key(True)).iterdir())
    assert left == ["lock", "publish.ko", "todo.ko"]


def test_an_unwritable_folder_costs_one_note_and_still_runs(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    kernels = Kernels(blocked)
    kernels.load(NAMES)
    assert kernels["todo"] and len(kernels.notes) == 1 and "not writable" in kernels.notes[0]
    with pytest.raises(ColiError, match="not writable"):
        warmup(load({"cache_dir": blocked}, {})[0])


def test_a_complete_cache_is_used_where_nothing_can_be_written(tmp_path, monkeypatch):
    _load(tmp_path)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    kernels = Kernels(tmp_path)
    kernels.load(NAMES)
    assert (kernels.compiled, kernels.reused, kernels.notes) == (0, 2, [])


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_nobody_compiles_on_for_a_coli_that_was_ended(tmp_path, name):
    env = os.environ | {"COLI_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "coli.commands.app", "warmup"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    while not (workers := psutil.Process(process.pid).children()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(name)
    assert process.wait(30) == 128 + name
    assert len(process.communicate()[1].splitlines()) <= 2
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive


@pytest.mark.parametrize("number, words", [(9, "killed by signal 9, as when memory runs out"), (11, "signal 11 (Segm")])
def test_a_compiling_process_that_was_killed_is_named(tmp_path, number, words):
    """complaints.md 60c: the system's killer leaves no message, so coli has one; its own exit code stays."""
    env = os.environ | {"COLI_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "coli.commands.app", "warmup"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    while process.poll() is None:
        for worker in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(number)
        time.sleep(0.02)
    errors = process.communicate()[1]
    assert process.returncode == 1
    assert words in errors.splitlines()[-1] and "Traceback" not in errors


@pytest.mark.slow
def test_the_plain_build_has_no_wide_registers(tmp_path):
    """COLI_SIMD=0 compiles for this CPU without AVX-512: a zmm register would be an illegal instruction elsewhere."""
    if not shutil.which("objdump"):
        pytest.skip("needs binutils")
    kernels = Kernels(tmp_path, simd=False)
    kernels.load(["tile_bf16_6", "tile_int8_3", "attention", "deltanet", "router", "stream_mix"])
    for path in kernels.folder.glob("*.ko"):
        code = tmp_path / "object.o"
        code.write_bytes(compiler.read(path)[1])
        listing = subprocess.run(["objdump", "-d", str(code)], capture_output=True, text=True, check=True).stdout
        assert "ymm" in listing and "zmm" not in listing, path.name


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/usr/bin/setpriv").exists(), reason="needs another user")
def test_another_user_without_home_and_cache_can_run(tmp_path):
    """complaints.md 62a: a read-only tree and no HOME must not end in an exception."""
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    env = {key: value for key, value in os.environ.items() if key != "XDG_CACHE_HOME"} | {"HOME": "/nonexistent"}
    code = (
        "from coli.program.cache import Kernels\nk = Kernels()\n"
        f"k.load({NAMES!r})\nprint(k['todo'] > 0, len(k.notes))"
    )
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if "Permission denied" in done.stderr and "python" in done.stderr.lower():
        pytest.skip("the other user cannot run this Python")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "1"]


def test_objects_need_nothing_of_numba(tmp_path):
    """A symbol of Numba's runtime left in an object would crash the process that loads it without Numba."""
    kernels = Kernels(tmp_path)
    kernels.load(["attention", "grouped", "linear", "listed", "draft_sums", "quantize", "lead", "worker"])
    for path in kernels.folder.glob("*.ko"):
        _, code = compiler.read(path)
        assert not any(name in code for name in (b"numba_gil", b"PyErr_", b"NRT_")), path.name


def test_every_kernel_is_found_once():
    names = [name for module in compiler.MODULES for table in ("KERNELS", "ENTRIES")
             for name in getattr(importlib.import_module(f"coli.kernels.{module}"), table, {})]  # fmt: skip
    names += [tile_name(kind, rows) for kind in TILE_KINDS + LISTED_KINDS for rows in tile_rows(kind)]
    assert len(names) == len(set(names)) == len(compiler.signatures(compiler.tile_names()))
