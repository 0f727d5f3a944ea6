"""What control groups leave a process, on trees of files as Linux shows them; and on the tree that is really there."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from coli import cgroup, memory

MIB = 1 << 20
NO_LIMIT = 9223372036854771712  # what version 1 writes for none

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 {top} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2_MOUNTS = "30 23 0:26 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def tree(root: Path, mounts: str, own: str, *, top: str = "/") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts.format(top=top))
    (root / "proc/self/cgroup").write_text(own)
    return root


def v1(root: Path, path: str, limit: int, used: int, *, inactive=0, active=0, mapped=0) -> None:
    folder = root / "sys/fs/cgroup/memory" / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"cache 1\nmapped_file 1\ninactive_file 1\nactive_file 1\nhierarchical_memory_limit {limit}\n"
        f"total_cache {inactive + active}\ntotal_mapped_file {mapped}\ntotal_inactive_file {inactive}\n"
        f"total_active_file {active}\n"
    )


def v2(root: Path, path: str, limit: object, used: int, *, high="max", inactive=0, active=0, mapped=0, stall=None):
    folder = root / "sys/fs/cgroup" / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nfile {inactive + active}\nfile_mapped {mapped}\ninactive_file {inactive}\nactive_file {active}\n"
    )
    if stall is not None:
        (folder / "memory.pressure").write_text(
            f"some avg10=99.00 avg60=1.00 avg300=0.00 total=9\nfull avg10={stall:.2f} avg60=0.00 avg300=0.00 total=5\n"
        )


OWN_V1 = "5:devices:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/\n0::/\n"


def test_version_1_counts_what_the_kernel_cannot_take_back(tmp_path):
    root = tree(tmp_path, V1_MOUNTS, OWN_V1)
    v1(root, "/docker/abc", 1000 * MIB, 700 * MIB, inactive=150 * MIB, active=50 * MIB, mapped=30 * MIB)
    v1(root, "/docker", NO_LIMIT, 900 * MIB)
    v1(root, "/", NO_LIMIT, 2000 * MIB)
    own, docker, top = cgroup.groups(root)
    assert [group.path for group in (own, docker, top)] == ["/docker/abc", "/docker", "/"]
    assert own.used == (700 - 150 - 50 + 30) * MIB
    assert own.left == 470 * MIB and docker.left is None is top.limit
    assert memory.available(root) == 470 * MIB
    v1(root, "/docker", 1000 * MIB, 900 * MIB)  # a parent's limit, set meanwhile
    assert memory.available(root) == 100 * MIB
    v1(root, "/docker/abc", 300 * MIB, 700 * MIB)
    assert own.left == -400 * MIB and memory.available(root) == 0


@pytest.mark.parametrize("own, top, paths", [
    ("/docker/abc", "/docker/abc", ["/"]),  # a container that sees only its own part
    ("/docker/abc/inner", "/docker/abc", ["/inner", "/"]),
    ("/", "/", ["/"]),  # a namespace of its own
    ("/../other", "/", ["/"]),
    ("/elsewhere", "/docker/abc", ["/"]),
])  # fmt: skip
def test_a_container_sees_its_part_of_the_tree(tmp_path, own, top, paths):
    root = tree(tmp_path, V1_MOUNTS, f"4:memory:{own}\n", top=top)
    for path in ("/", "/inner"):
        v1(root, path, 64 * MIB, 1 * MIB)
    assert [group.path for group in cgroup.groups(root)] == paths
    assert memory.available(root) == 63 * MIB


def test_version_2_has_words_for_no_limit_and_a_second_limit(tmp_path):
    root = tree(tmp_path, V2_MOUNTS, "0::/user.slice/run.scope\n")
    v2(root, "/user.slice", "max", 900 * MIB)
    v2(root, "/user.slice/run.scope", "max", 400 * MIB, inactive=80 * MIB, active=20 * MIB, mapped=300 * MIB, stall=2.5)
    own, parent = cgroup.groups(root)  # the topmost group has no such files
    assert (own.limit, own.left, parent.left) == (None, None, None)
    assert own.used == 400 * MIB, "more is mapped than cached: nothing can be taken back"
    assert (own.pressure, parent.pressure) == (2.5, 0.0)
    v2(root, "/user.slice/run.scope", 1000 * MIB, 400 * MIB, high=500 * MIB, active=100 * MIB)
    assert (own.limit, own.left) == (500 * MIB, 200 * MIB) and memory.available(root) == 200 * MIB


def test_what_cannot_be_read_limits_nothing(tmp_path):
    assert cgroup.groups(tmp_path / "no Linux") == ()
    root = tree(tmp_path, V1_MOUNTS, OWN_V1)
    v1(root, "/docker/abc", 1 * MIB, 0)
    own = cgroup.groups(root)[0]
    (own.folder / "memory.limit_in_bytes").write_text("garbage\n")
    assert own.left is None
    (own.folder / "memory.limit_in_bytes").write_bytes(b"\xff\xfe")
    assert own.left is None
    assert cgroup.stalled(root / "proc/pressure/memory") == 0.0
    assert abs(memory.available(root) - psutil.virtual_memory().available) < 0.2 * psutil.virtual_memory().total


def test_a_mount_with_blanks_is_found(tmp_path):
    root = tree(tmp_path, V2_MOUNTS.replace("/sys/fs/cgroup", "/my\\040groups"), "0::/a\n")
    (root / "my groups").symlink_to(root / "sys/fs/cgroup")
    v2(root, "/a", 64 * MIB, 1 * MIB)
    assert [group.left for group in cgroup.groups(root)] == [63 * MIB]


@pytest.mark.parametrize("quota, period, cpus", [(150000, 100000, 1.5), (-1, 100000, None), (50000, 0, None)])
def test_cpus_of_version_1(tmp_path, quota, period, cpus):
    mounts = V1_MOUNTS.replace("rw,cpu\n", "rw,cpu,cpuacct\n")
    root = tree(tmp_path, mounts, OWN_V1.replace("cpuacct:/", "cpuacct:/a/b"))
    folder = root / "sys/fs/cgroup/cpu/a"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert cgroup.cpus(root) is None, "half a limit is none"
    (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
    assert cgroup.cpus(root) == cpus


def test_cpus_of_version_2_are_the_least_of_all_parents(tmp_path):
    root = tree(tmp_path, V2_MOUNTS, "0::/a/b\n")
    assert cgroup.cpus(root) is None
    for path, text in (("a", "400000 100000\n"), ("a/b", "max 100000\n")):
        (root / "sys/fs/cgroup" / path).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / path / "cpu.max").write_text(text)
    assert cgroup.cpus(root) == 4.0
    (root / "sys/fs/cgroup/a/b/cpu.max").write_text("50000 100000\n")
    assert cgroup.cpus(root) == 0.5


@pytest.mark.skipif(not os.path.exists("/proc/self/cgroup"), reason="Linux")
def test_our_own_groups_answer():
    for group in cgroup.groups():
        assert group.folder.is_dir() and group.used >= 0 and group.pressure >= 0
        assert group.limit is None or group.limit > 0


def test_a_budget_is_granted_as_far_as_there_is_memory(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000 * MIB)
    monkeypatch.setattr(memory, "resident", lambda: 100 * MIB)
    assert memory.granted(900 * MIB) == (900 * MIB, [])
    most, notes = memory.granted(2000 * MIB)
    assert most == (1000 + 100) * MIB - memory.reserve((1000 + 100) * MIB)
    assert notes == ["--ram 2.097 lowered to 1.117: no more memory is available"]
    assert memory.granted(64000 * MIB)[0] == most, "who asks for more does not get less"
    monkeypatch.setattr(memory, "resident", lambda: 5000 * MIB)  # of a program that has coli built in
    there = 1000 * MIB + memory.PROCESS
    assert memory.granted(2000 * MIB)[0] == there - memory.reserve(there)
