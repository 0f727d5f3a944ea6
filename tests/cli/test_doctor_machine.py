"""`coli doctor` on the machine and the software, most of it on machines made up for the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coli.doctor import machine, software
from coli.doctor.finding import ERROR, OK, WARN, Finding
from coli.errors import ColiError
from coli.planning import probe
from tests.conftest import CLI, clean_env
from tests.doctoring import contents, named, of, only

# ---- the machine -----------------------------------------------------------------------------------------------------


def test_the_speed_of_the_disk(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, dict[str, Any]]] = []

    def disk(path: Path, **options: Any) -> probe.DiskSpeed:
        asked.append((path, options))
        return probe.DiskSpeed(120e6, True, options["record"], options["threads"], 1, 1.0, "/", "m", "d")

    monkeypatch.setattr(probe, "disk", disk)
    finding = only(of(model, checks=named("plan", "disk speed")), "disk speed")
    record = only(of(model), "experts").facts["record_bytes"]
    assert finding.status == OK and "120 MB/s" in finding.what and asked[0][0] == model
    assert asked[0][1]["record"] == record == 3 * 32 * 64 * 2 and asked[0][1]["seconds"] < 1
    slow = only(of(model, checks=named("plan", "disk speed"), COLI_CAP="3"), "disk speed")
    assert slow.status == WARN and "NVMe" in slow.hint

    def hollow(path: Path, **options: Any) -> probe.DiskSpeed:
        raise ColiError("there are no weights", path, "download the model first")

    monkeypatch.setattr(probe, "disk", hollow)
    assert only(of(model, checks=named("disk speed")), "disk speed").status == WARN


def test_little_room(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert [f.status for f in of(model, checks=named("disk space")).findings if f.check == "disk space"] == [WARN, WARN]
    monkeypatch.setattr("coli.memory.available", lambda: 10**8)
    assert only(of(model, checks=named("memory")), "memory").status == WARN


def test_the_cache_folder(model: Path, tmp_path: Path) -> None:
    def cache(folder: Path) -> Finding:
        return only(of(model, checks=named("cache"), COLI_CACHE=str(folder)), "cache")

    new = tmp_path / "new" / "er"
    assert cache(new).status == OK and not new.parent.exists(), "nothing is made"
    new.mkdir(parents=True)
    assert cache(new).status == OK and list(new.iterdir()) == []
    (tmp_path / "file").write_text("x")
    assert cache(tmp_path / "file").status == ERROR and "not a folder" in cache(tmp_path / "file").what
    before = contents(model)
    assert cache(model).status == OK and contents(model) == before, "not even a file that is gone at once"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where root cannot write either")
def test_a_cache_folder_that_only_seems_writable(model: Path) -> None:
    finding = only(of(model, checks=named("cache"), COLI_CACHE="/proc/self"), "cache")
    assert finding.status == ERROR and "not writable" in finding.what and "COLI_CACHE" in finding.hint


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/usr/bin/setpriv").exists(), reason="needs another user")
def test_another_users_cache_folder(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> None:

    place = tmp_path_factory.mktemp("theirs")
    place.chmod(0o555)
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    done = subprocess.run([*prefix, *CLI, "doctor", "--json"], capture_output=True, text=True, cwd="/",
                          env=clean_env(COLI_CACHE=str(place / "kernels"), HOME="/nonexistent"))  # fmt: skip
    report = json.loads(done.stdout)
    finding = next(finding for finding in report["findings"] if finding["check"] == "cache")
    assert done.returncode == 1 and finding["status"] == ERROR and "Permission denied" in finding["what"]


def test_cpu_simd_and_limits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    import llvmlite.binding as llvm

    monkeypatch.setattr(machine, "usable_cpus", lambda: 8)
    assert only(of(model, checks=named("cpu"), COLI_THREADS="8"), "cpu").status == OK
    assert "--threads 8" in only(of(model, checks=named("cpu"), COLI_THREADS="9"), "cpu").hint
    monkeypatch.setattr(machine.cgroup, "cpus", lambda: 1.5)
    finding = only(of(model, checks=named("cpu"), COLI_THREADS="8"), "cpu")
    assert finding.status == WARN and "gives 1.5 of them" in finding.what and "--threads 2" in finding.hint

    def simd(features: str, **environ: str) -> Finding:
        monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: dict.fromkeys(features.split(), True))
        return only(of(model, checks=named("simd"), **environ), "simd")

    assert simd("avx2 fma avx512f avx512vnni").facts["level"] == "AVX-512 with VNNI"
    assert simd("avx2 fma avx512f").facts["level"] == "AVX-512 without VNNI"
    assert simd("avx2 fma").status == OK == simd("neon dotprod").status
    off = simd("avx2 fma avx512f avx512vnni", COLI_SIMD="0")
    assert off.status == WARN and off.facts["level"] == "AVX2" and off.hint == "unset COLI_SIMD"
    assert simd("avx2 fma", COLI_SIMD="0").status == OK and simd("sse2").status == WARN

    limits = {resource.RLIMIT_NOFILE: 60, resource.RLIMIT_AS: 1 << 30}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], limits[which]))
    found = [finding for finding in of(model, checks=named("limits")).findings if finding.check == "limits"]
    assert [finding.hint for finding in found] == ["ulimit -n 4096", "ulimit -v unlimited"]


# ---- software --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, needs, meets", [
    ("0.68.1", ">=0.68,<0.69", True), ("0.69.0", ">=0.68,<0.69", False), ("0.67.9", "<0.69,>=0.68", False),
    ("2.4.6", ">=2.0", True), ("2", ">=2.0", True), ("10.0", ">=9.1", True), ("3.11.7", ">=3.11,<3.14", True),
    ("1.2rc1", "", True), ("1.2", "!=1.2.0", False), ("1.2", "==1.2.0", True),
])  # fmt: skip
def test_ranges_of_versions(version: str, needs: str, meets: bool) -> None:
    assert software.meets(version, needs) is meets


def test_versions_out_of_range_and_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = software._version
    monkeypatch.setattr(software, "_version", lambda name: {"numba": "0.70.0", "jinja2": None}.get(name, real(name)))
    report = of(None, checks=named("versions", "numba"))
    errors = [finding for finding in report.findings if finding.status == ERROR]
    assert [finding.facts["name"] for finding in errors] == ["numba", "jinja2"]
    assert errors[0].hint == 'pip install "numba<0.69,>=0.68"' and "not installed" in errors[1].what
    monkeypatch.setattr(software, "_version", lambda name: None)
    assert only(of(None, checks=named("numba")), "numba").status == ERROR


def test_numba_is_imported_by_a_child_under_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(of(None, deep=True, checks=named("numba")), "numba").facts["imported"] is True
    monkeypatch.setattr(software, "_IMPORT", "import os; os.kill(os.getpid(), 11)")
    assert "SIGSEGV" in only(of(None, deep=True, checks=named("numba")), "numba").what
    monkeypatch.setattr(software, "_IMPORT", "import numba.nowhere")
    assert "numba.nowhere" in only(of(None, deep=True, checks=named("numba")), "numba").what
