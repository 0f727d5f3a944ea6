"""What is asked of the machine: memory, disks, the cache of kernels, CPU, limits. Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from coli import cgroup
from coli import memory as memory_terms
from coli.doctor.finding import Finding, Patient, error, ok, warn
from coli.errors import ColiError
from coli.formats.readers import reading_threads
from coli.formats.strict import counted
from coli.planning import probe
from coli.program.cache import cache_key, default_folder
from coli.program.cpu import default_threads, usable_cpus
from coli.report import size

_LITTLE_MEMORY = 1 << 30
_LITTLE_DISK = {"the model": 64 << 20, "the cache": 256 << 20}  # histories; kernels of a CPU are some 10 MB
_SLOW = 500e6  # bytes a second; SATA disks give as much
_RECORD = 4 << 20  # read where a model has no experts
_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512vnni", "avx512bf16", "avx512vbmi",
             "neon", "dotprod", "i8mm", "sve")  # fmt: skip


def memory(patient: Patient) -> Iterator[Finding]:
    machine, free = psutil.virtual_memory(), memory_terms.available()
    limited = [(left, group) for group in cgroup.groups() if (left := group.left) is not None]
    facts: dict[str, Any] = {"total": machine.total, "available": free, "group": None}
    words = f"{size(free)} of {size(machine.total)} free"
    if limited:
        left, group = min(limited, key=lambda pair: pair[0])
        facts["group"] = {"path": group.path, "limit": group.limit, "left": left}
        words += f"; the control group {group.path} allows {size(group.limit or 0)}"
    little = free < _LITTLE_MEMORY
    yield warn(words, "close other programs, or raise the group's limit", **facts) if little else ok(words, **facts)


# ---- disks -----------------------------------------------------------------------------------------------------------


def disk_space(patient: Patient) -> Iterator[Finding]:
    places = {"the cache": _there(cache_folder(patient))}
    if patient.path is not None:
        places = {"the model": patient.path} | places
    for name, place in places.items():
        free = shutil.disk_usage(place).free
        words, facts = f"{size(free)} free where {name} is ({place})", {"path": str(place), "free": free}
        if free < _LITTLE_DISK[name]:
            yield warn(words, "make room: histories and kernels are kept there", **facts)
        else:
            yield ok(words, **facts)


def disk_speed(patient: Patient) -> Iterator[Finding]:
    """Reads records of the experts' size, as decoding does. Of a model that memory holds it says how fast it loads."""
    assert patient.path is not None
    slots = patient.survey.slots if patient.survey is not None else ()
    threads = reading_threads(patient.settings.threads or default_threads())  # as the expert store reads
    patient.say("reading from the model's disk")
    try:
        speed = probe.disk(patient.path, record=max(slots, default=_RECORD), threads=threads,
                           seconds=2.0 if patient.deep else 0.3)  # fmt: skip
    except ColiError as fault:
        yield warn(f"could not be measured: {fault.what}", fault.hint)
        return
    facts = {"bytes_per_s": round(speed.bytes_per_s), "direct": speed.direct, "record": speed.record,
             "threads": threads}  # fmt: skip
    way = "past the page cache" if speed.direct else "through the page cache"
    words = f"{size(round(speed.bytes_per_s))}/s in records of {size(speed.record)}, {way}"
    streams = patient.plan is not None and patient.plan.residency < 1
    if streams and speed.bytes_per_s < _SLOW:
        yield warn(f"{words}; experts are read from there while it decodes",
                   "put the model on an NVMe disk, or keep more of it in memory (--ram, smaller experts)",
                   **facts)  # fmt: skip
    else:
        yield ok(words, **facts)


def cache_folder(patient: Patient) -> Path:
    return patient.settings.cache_dir or default_folder()


def _there(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def cache(patient: Patient) -> Iterator[Finding]:
    """Whether kernels can be kept, and how many are."""
    folder = cache_folder(patient)
    place, ours = _there(folder), folder / cache_key(patient.settings.simd)
    ready = len(list(ours.glob("*.ko"))) if ours.is_dir() else 0
    refused = _refused(ours if ours.is_dir() else place, patient.path)
    facts = {"folder": str(folder), "kernels": ready, "writable": not refused}
    if not refused:
        words = f"{counted(ready, 'kernel')} ready for this CPU" if ready else "the first run compiles its kernels"
        yield ok(f"{folder}: {words}", **facts)
        return
    fault, words = (warn, "no kernel can be added") if ready else (error, "every run compiles its kernels anew")
    yield fault(f"{place} is not writable ({refused}): {words}", "COLI_CACHE names another folder", **facts)


def _refused(place: Path, model: Path | None) -> str:
    """Why nothing can be written into the folder `place`; "" where it can. A file is made there and is gone at once,
    but never inside the model."""
    if not place.is_dir():
        return "not a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return os.strerror(errno.EACCES)
    if model is not None and place.resolve().is_relative_to(model.resolve()):
        return ""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""


# ---- the CPU, and what the shell allows ------------------------------------------------------------------------------


def cpu(patient: Patient) -> Iterator[Finding]:
    from coli.bench.environment import cpu_model

    usable, quota = usable_cpus(), cgroup.cpus()
    threads = patient.settings.threads or default_threads()
    facts = {"model": cpu_model(), "physical": psutil.cpu_count(logical=False), "logical": psutil.cpu_count(),
             "usable": usable, "group": quota, "threads": threads}  # fmt: skip
    words = f"{facts['model']}, {usable} of {counted(facts['logical'] or usable, 'CPU')} usable, "
    words += counted(threads, "thread")
    if quota is not None:
        words += f"; the control group gives {quota:g} of them"
    most = min(usable, math.ceil(quota)) if quota is not None else usable
    if threads > most:
        yield warn(f"{words}: threads wait for each other", f"give --threads {max(1, most)}", **facts)
    else:
        yield ok(words, **facts)


def simd(patient: Patient) -> Iterator[Finding]:
    """What kernels are compiled for: LLVM's view of the CPU, less what COLI_SIMD=0 takes away."""
    import llvmlite.binding as llvm

    have, on = llvm.get_host_cpu_features(), patient.settings.simd
    features = [name for name in _FEATURES if have.get(name)]
    wide = "avx512f" in features
    level = "AVX2" if "avx2" in features else "NEON" if "neon" in features else "no vectors wider than 128 bits"
    if wide and on:
        level = f"AVX-512 {'with' if 'avx512vnni' in features else 'without'} VNNI"
    facts = {"cpu": llvm.get_host_cpu_name(), "level": level, "features": features, "COLI_SIMD": int(on)}
    words = f"{level} on {facts['cpu']}, which has {' '.join(features) or 'none of the features kernels use'}"
    if wide and not on:
        yield warn(f"COLI_SIMD=0 leaves AVX-512 unused: {words}", "unset COLI_SIMD", **facts)
    elif not features:
        yield warn(words, "a CPU with AVX2 or NEON is several times as fast", **facts)
    else:
        yield ok(words, **facts)


def limits(patient: Patient) -> Iterator[Finding]:
    """What the shell (ulimit) leaves a process: open files, address space."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    none = resource.RLIM_INFINITY
    files, space = (None if soft == none else soft for soft, _ in
                    map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)))  # fmt: skip
    held = () if patient.checkpoint is None else {tensor.path for tensor in patient.checkpoint.tensors.values()}
    mapped = 0 if patient.checkpoint is None else patient.checkpoint.nbytes
    facts, well = {"open_files": files, "address_space": space}, True
    if files is not None and files < 2 * len(held) + 64:  # the model's, a mirror's, our own
        yield warn(f"{files} files may be open, the model has {len(held)}", "ulimit -n 4096", **facts)
        well = False
    if space is not None and space < mapped + (8 << 30):
        yield warn(f"{size(space)} of address space; the model's files alone take {size(mapped)} of it",
                   "ulimit -v unlimited", **facts)  # fmt: skip
        well = False
    if well:
        yield ok(f"{'any number of' if files is None else files} open files", **facts)
