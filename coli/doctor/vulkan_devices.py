"""Which Vulkan devices this machine has, asked of the loader through ctypes: no package, no device is opened.

Idea: a loader and its drivers are foreign code that may crash or hang, so the question is put in a child process
(`python -m coli.doctor.vulkan_devices LIBRARY...`), which answers with one line of JSON. Whatever ends the child is one
`DeviceError` that says so; a machine without a loader is an answer, `Vulkan(loader=None)`.
Layout: Vulkan fills C structs whose size depends on no platform (64-bit pointers aside, which only the structs that go
in have). Those that come out are bytes here, read at the offsets of the specification; each lies in more room than it
needs.
Invariant: a device is listed with what its driver says, even where a newer question (the driver's name) is unknown.
Guarded by tests/cli/test_vulkan_devices.py (a loader in Python, one in C where there is a compiler, crashes).
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

from coli.doctor import child
from coli.errors import ColiError, DeviceError

LIBRARIES = {
    "win32": ("vulkan-1.dll",),
    "darwin": ("libvulkan.1.dylib", "/opt/homebrew/lib/libvulkan.1.dylib", "/usr/local/lib/libvulkan.1.dylib",
               "libMoltenVK.dylib", "/opt/homebrew/lib/libMoltenVK.dylib"),
}  # fmt: skip
"""Names of the loader by platform; Linux and its like have libvulkan.so.1."""
_TIMEOUT = 30.0  # seconds; drivers that wake a sleeping card take a few
_TYPES = ("other", "integrated", "discrete", "virtual", "cpu")
_DEVICE_LOCAL = 1
_INSTANCE, _APPLICATION, _PROPERTIES2, _DRIVER = 1, 0, 1000059001, 1000196000  # VkStructureType
_PORTABILITY = b"VK_KHR_portability_enumeration"  # without it a loader hides MoltenVK
_INCOMPLETE, _NO_DRIVER = 5, -9  # VkResults: there is more than was asked for; a loader without a driver
_MOST = 64  # devices listed


@dataclass(frozen=True)
class Device:
    """`kind`: discrete, integrated, cpu, virtual or other; `memory`: bytes of its own heaps; `heaps`: (bytes, whether
    it is the device's own) of all."""

    name: str
    kind: str
    api: str
    driver: str
    memory: int
    heaps: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Vulkan:
    """`loader`: the library that answered, None where there is none; `api`: the newest version it knows."""

    loader: str | None
    api: str = ""
    devices: tuple[Device, ...] = ()


def devices(libraries: Sequence[str] = (), timeout: float = _TIMEOUT) -> Vulkan:
    """Ask in a child process; `libraries` are tried in turn, by default the platform's names of the loader.

    Raises DeviceError where a loader is there but fails, crashes or hangs."""
    hint = "update the graphics driver; coli runs without it"
    try:
        answer = json.loads(child.ask(["-m", __name__, *(libraries or _names())], timeout))
    except (ColiError, ValueError) as error:
        raise DeviceError(f"asked for devices, it gave {error}", "the Vulkan loader", hint) from None
    if "error" in answer:
        raise DeviceError(answer["error"], answer["loader"], hint)
    found = (Device(**{**entry, "heaps": tuple(map(tuple, entry["heaps"]))}) for entry in answer["devices"])
    return Vulkan(answer["loader"], answer["api"], tuple(found))


def _names() -> tuple[str, ...]:
    return LIBRARIES.get(sys.platform, ("libvulkan.so.1",))


# ---- in the child ----------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A call of the loader failed."""


class _Application(ctypes.Structure):
    _fields_ = [("type", c_uint32), ("next", c_void_p), ("name", c_char_p), ("version", c_uint32),
                ("engine", c_char_p), ("engine_version", c_uint32), ("api", c_uint32)]  # fmt: skip


class _InstanceInfo(ctypes.Structure):
    _fields_ = [("type", c_uint32), ("next", c_void_p), ("flags", c_uint32), ("application", POINTER(_Application)),
                ("layer_count", c_uint32), ("layers", POINTER(c_char_p)), ("extension_count", c_uint32),
                ("extensions", POINTER(c_char_p))]  # fmt: skip


class _Chained(ctypes.Structure):
    """A struct that comes out: its type, the next one, and room for what it holds."""

    _fields_ = [("type", c_uint32), ("next", c_void_p), ("room", ctypes.c_uint8 * 2048)]


def ask(library: Any) -> tuple[str, list[dict[str, Any]]]:
    """(version, devices as JSON values) of an open loader. Raises _Refused or AttributeError for what is none."""
    api = _api(library)
    instance = _instance(library, api)
    if instance is None:
        return _version(api), []
    try:
        return _version(api), [_device(library, device, api) for device in _handles(library, instance)]
    finally:
        library.vkDestroyInstance(instance, None)


def _call(library: Any, name: str, *arguments: Any, allow: int = 0) -> int:
    result = getattr(library, name)(*arguments)
    if result < 0 and result != allow:
        raise _Refused(f"{name} failed ({result})")
    return result


def _api(library: Any) -> int:
    version = c_uint32(1 << 22)  # 1.0 has no function that would say so
    if hasattr(library, "vkEnumerateInstanceVersion"):
        _call(library, "vkEnumerateInstanceVersion", byref(version))
    return version.value


def _instance(library: Any, api: int) -> c_void_p | None:
    """An instance of the loader; None where it has no driver."""
    portable = _PORTABILITY in _extensions(library)
    names = (c_char_p * 1)(_PORTABILITY)
    application = _Application(type=_APPLICATION, name=b"coli", api=api)
    info = _InstanceInfo(type=_INSTANCE, flags=int(portable), application=ctypes.pointer(application),
                         extension_count=int(portable), extensions=names if portable else None)  # fmt: skip
    instance = c_void_p()
    result = _call(library, "vkCreateInstance", byref(info), None, byref(instance), allow=_NO_DRIVER)
    return None if result == _NO_DRIVER else instance


def _extensions(library: Any) -> set[bytes]:
    """Names of what an instance can be given; an entry is a name of 256 bytes and a number."""
    count = c_uint32()
    _call(library, "vkEnumerateInstanceExtensionProperties", None, byref(count), None)
    entries = ctypes.create_string_buffer(260 * max(count.value, 1))
    _call(library, "vkEnumerateInstanceExtensionProperties", None, byref(count), entries)
    return {entries.raw[260 * i :][:256].split(b"\0")[0] for i in range(count.value)}


def _handles(library: Any, instance: c_void_p) -> list[c_void_p]:
    count, handles = c_uint32(_MOST), (c_void_p * _MOST)()
    result = _call(library, "vkEnumeratePhysicalDevices", instance, byref(count), handles)
    if result not in (0, _INCOMPLETE):
        raise _Refused(f"vkEnumeratePhysicalDevices failed ({result})")
    return [c_void_p(handles[i]) for i in range(count.value)]


def _device(library: Any, device: c_void_p, api: int) -> dict[str, Any]:
    """VkPhysicalDeviceProperties: five numbers (API, driver, vendor, device, type), then the name in 256 bytes.
    VkPhysicalDeviceMemoryProperties: 32 memory types in 4 + 256 bytes, the number of heaps, heaps of (u64, u32, -)."""
    room = ctypes.create_string_buffer(2048)
    library.vkGetPhysicalDeviceProperties(device, room)
    version, driver, _, _, kind = struct.unpack_from("<5I", room.raw)
    name = _text(room.raw[20:276])
    memory = ctypes.create_string_buffer(1024)
    library.vkGetPhysicalDeviceMemoryProperties(device, memory)
    (count,) = struct.unpack_from("<I", memory.raw, 260)
    heaps = [struct.unpack_from("<QI", memory.raw, 264 + 16 * i) for i in range(min(count, 16))]
    own = [(nbytes, bool(flags & _DEVICE_LOCAL)) for nbytes, flags in heaps]
    named = _driver(library, device) if min(api, version) >= _at_least(1, 1) else ""
    return {
        "name": name, "kind": _TYPES[kind] if kind < len(_TYPES) else "other", "api": _version(version),
        "driver": named or f"version {driver:#x}", "memory": sum(nbytes for nbytes, local in own if local),
        "heaps": own,
    }  # fmt: skip


def _driver(library: Any, device: c_void_p) -> str:
    """VkPhysicalDeviceDriverProperties: an id, a name and more about it in 256 bytes each; left empty by those who do
    not know the struct."""
    driver = _Chained(type=_DRIVER)
    properties = _Chained(type=_PROPERTIES2, next=ctypes.addressof(driver))
    library.vkGetPhysicalDeviceProperties2(device, byref(properties))
    raw = bytes(driver.room)
    return " ".join(filter(None, (_text(raw[4:260]), _text(raw[260:516]))))


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("utf-8", "replace")


def _at_least(major: int, minor: int) -> int:
    return major << 22 | minor << 12


def _version(number: int) -> str:
    return f"{number >> 22 & 0x7F}.{number >> 12 & 0x3FF}.{number & 0xFFF}"


def answer(names: Sequence[str]) -> dict[str, Any]:
    """What the first of these libraries that can be opened says, as JSON values."""
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        try:
            api, found = ask(library)
        except (_Refused, AttributeError) as error:
            return {"loader": name, "error": str(error)}
        return {"loader": name, "api": api, "devices": found}
    return {"loader": None, "api": "", "devices": []}


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1:])))
