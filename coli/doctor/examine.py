"""The table of checks, and the loop that goes through them.

Idea: checks are independent rows. What goes wrong inside one (a named error or a fault of ours) becomes an error
finding of that check, and the others go on.
Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coli.doctor import checksums, files, machine, model, software
from coli.doctor.finding import ERROR, Check, Finding, Patient, Report
from coli.errors import ColiError

CHECKS = (
    Check("settings", model.settings),
    Check("path", model.path),
    Check("files", files.files, ("path",)),
    Check("leftovers", files.leftovers, ("path",)),
    Check("checksums", checksums.checksums, ("path",)),
    Check("config", model.config, ("path",)),
    Check("tensors", model.tensors, ("checkpoint", "geometry")),
    Check("tokenizer", model.tokenizer, ("path",)),
    Check("template", model.template, ("tokenizer",)),
    Check("stop tokens", model.stops, ("checkpoint", "tokenizer")),
    Check("experts", model.experts, ("sound",)),
    Check("sidecars", model.sidecars, ("checkpoint", "geometry")),
    Check("mirror", model.mirror, ("checkpoint",)),
    Check("histories", model.histories, ("family", "geometry")),
    Check("memory", machine.memory),
    Check("plan", model.plan, ("survey",)),
    Check("disk space", machine.disk_space),
    Check("disk speed", machine.disk_speed, ("checkpoint",)),
    Check("cache", machine.cache),
    Check("cpu", machine.cpu),
    Check("simd", machine.simd),
    Check("limits", machine.limits),
    Check("numba", software.numba),
    Check("vulkan", software.vulkan),
    Check("versions", software.versions),
)


def examine(patient: Patient, checks: Sequence[Check] = CHECKS) -> Report:
    """Make every check that can be made."""
    found: list[Finding] = []
    skipped: list[str] = []
    try:
        for check in checks:
            ready = all(getattr(patient, name) for name in check.needs)
            findings = list(_look(check, patient)) if ready else []
            found += findings
            skipped += [check.name] * (not findings)
    finally:
        patient.close()
    return Report(patient.path, patient.deep, tuple(found), tuple(skipped))


def _look(check: Check, patient: Patient) -> Iterator[Finding]:
    try:
        for finding in check.look(patient):
            yield replace(finding, check=check.name)
    except ColiError as fault:
        what = f"{fault.where}: {fault.what}" if fault.where else fault.what
        yield Finding(check.name, ERROR, what, fault.hint)
    except OSError as fault:
        what = f"{fault.filename or 'the system refused'}: {fault.strerror or fault}"
        yield Finding(check.name, ERROR, what, "check its permissions, and the disk")
    except Exception as fault:
        yield Finding(
            check.name, ERROR, f"the check itself failed, {type(fault).__name__}: {fault}",
            "a fault of coli or of this Python installation; the facts of --json have the traceback",
            {"traceback": "".join(traceback.format_exception(fault))},
        )  # fmt: skip
