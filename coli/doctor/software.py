"""What is asked of the software: Numba, the Vulkan loader, versions.

Nothing is imported that a question does not need: Numba least of all (its version is in its metadata; under --deep a
child process imports it). Guarded by tests/cli/test_doctor.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict

from coli.doctor import child, vulkan_devices
from coli.doctor.finding import Finding, Patient, error, ok, warn
from coli.errors import ColiError, DeviceError
from coli.report import size

_IMPORT = "import llvmlite.binding, numba; print(numba.__version__)"
_PATIENCE = 120.0  # seconds; a cold disk takes ten


def numba(patient: Patient) -> Iterator[Finding]:
    version = _version("numba")
    if version is None:
        yield error("Numba is not installed: no kernel can be compiled", "install coli again", version=None)
    elif not patient.deep:
        yield ok(f"Numba {version}", version=version, imported=False)
    else:
        patient.say("importing Numba")
        try:
            child.ask(["-c", _IMPORT], _PATIENCE)
            yield ok(f"Numba {version}, can be imported", version=version, imported=True)
        except ColiError as fault:
            yield error(f"Numba {version} cannot be imported: {fault}", "install coli again", version=version,
                        imported=False)  # fmt: skip


def vulkan(patient: Patient) -> Iterator[Finding]:
    """A warning at most: this version computes on the CPU."""
    patient.say("asking for Vulkan devices")
    try:
        found = vulkan_devices.devices()
    except DeviceError as fault:
        yield warn(f"{fault.where}: {fault.what}", fault.hint)
        return
    if found.loader is None:
        yield warn("no Vulkan loader; coli runs on the CPU",
                   "for a GPU install the loader and its driver, on Debian libvulkan1 and mesa-vulkan-drivers",
                   **asdict(found))  # fmt: skip
    elif not found.devices:
        yield warn(f"{found.loader} (Vulkan {found.api}) knows no device", "install the graphics card's Vulkan driver",
                   **asdict(found))  # fmt: skip
    else:
        words = (f"{d.name} ({d.kind}, Vulkan {d.api}, {size(d.memory)}, {d.driver})" for d in found.devices)
        yield ok("; ".join(words), **asdict(found))


def versions(patient: Patient) -> Iterator[Finding]:
    """What is installed, held against what coli asks for."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    wanted = dict(_requirements())
    found = {"python": platform.python_version(), "coli": _version("coli")}
    found |= {name: _version(name) for name in wanted if name != "python"}
    for name, needs in wanted.items():
        version = found[name]
        if version is None or not meets(version, needs):
            state = "is not installed" if version is None else f"is {version}"
            hint = "use another Python" if name == "python" else f'pip install "{name}{needs}"'
            yield error(f"{name} {state}, coli needs {needs or 'it'}", hint, name=name, version=version, needs=needs)
    words = ", ".join(f"{name} {version or '-'}" for name, version in found.items())
    yield ok(f"{words}; {system}", packages=found, system=system)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str]]:
    """(name, range) of what this installation says it needs, Python first; extras are not asked for."""
    yield "python", importlib.metadata.metadata("coli")["Requires-Python"] or ""
    for line in importlib.metadata.requires("coli") or ():
        if "extra ==" not in line and (match := re.match(r"([\w.-]+)\s*\(?([^;)]*)", line)):
            yield match[1], match[2].replace(" ", "")


def meets(version: str, needs: str) -> bool:
    """Whether a version is in a range such as ">=0.68,<0.69": numbers only, which is all that coli asks for."""
    have = _numbers(version)
    for sign, bound in re.findall(r"(>=|<=|==|!=|<|>)([\d.]+)", needs):
        want = _numbers(bound)
        width = max(len(have), len(want))
        a, b = (part + (0,) * (width - len(part)) for part in (have, want))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
