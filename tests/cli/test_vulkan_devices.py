"""What a Vulkan loader says, read from a loader made here: in C, with the structs of the specification as a compiler
lays them out, and in Python, where there is no compiler. One that crashes or hangs ends its child process, never ours.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coli.doctor import child
from coli.doctor.vulkan_devices import Device, Vulkan, answer, ask, devices
from coli.errors import ColiError, DeviceError

GB = 1 << 30
CC = shutil.which("cc")

SOURCE = r"""
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { uint32_t apiVersion, driverVersion, vendorID, deviceID, deviceType; char deviceName[256];
                 uint8_t pipelineCacheUUID[16]; uint64_t limits[63]; uint32_t sparse[5]; } Properties;
typedef struct { uint32_t sType; void *pNext; Properties properties; } Properties2;
typedef struct { uint32_t sType; void *pNext; uint32_t driverID; char driverName[256], driverInfo[256];
                 uint8_t conformance[4]; } Driver;
typedef struct { uint32_t typeCount; struct { uint32_t flags, heap; } types[32];
                 uint32_t heapCount; struct { uint64_t size; uint32_t flags; } heaps[16]; } Memory;
typedef struct { uint32_t sType; const void *pNext; uint32_t flags; const void *application; uint32_t layers;
                 const char *const *layerNames; uint32_t extensions; const char *const *names; } Info;
typedef struct { char name[256]; uint32_t version; } Extension;

int vkEnumerateInstanceVersion(uint32_t *version) { *version = 1 << 22 | 3 << 12 | 275; return 0; }
int vkEnumerateInstanceExtensionProperties(const char *layer, uint32_t *count, Extension *out) {
    *count = 2;
    if (out) { strcpy(out[0].name, "VK_KHR_surface"); strcpy(out[1].name, "VK_KHR_portability_enumeration"); }
    return 0;
}
int vkCreateInstance(const Info *info, const void *allocator, void **instance) {
    if (MODE == 1) *(volatile int *)0 = 1;
    if (MODE == 2) sleep(60);
    if (MODE == 3) return -3;
    if (MODE == 5) return -9;
    puts("chatter of a driver");
    fflush(stdout);
    if (info->sType != 1 || info->flags != 1 || info->extensions != 1) return -7;
    if (strcmp(info->names[0], "VK_KHR_portability_enumeration")) return -7;
    *instance = (void *)0x1234567890;
    return 0;
}
void vkDestroyInstance(void *instance, const void *allocator) {}
int vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **out) {
    if (instance != (void *)0x1234567890) return -3;
    *count = MODE == 4 ? 0 : 2;
    if (MODE != 4) { out[0] = (void *)0xabcdef0011; out[1] = (void *)2; }
    return 0;
}
static void fill(void *device, Properties *p) {
    int card = device == (void *)0xabcdef0011;
    *p = (Properties){ .apiVersion = card ? 1 << 22 | 3 << 12 | 290 : 1 << 22, .driverVersion = 0x1234,
                       .deviceType = card ? 2 : 4 };
    strcpy(p->deviceName, card ? "Big Card" : "Slow one");
}
void vkGetPhysicalDeviceProperties(void *device, Properties *p) { fill(device, p); }
void vkGetPhysicalDeviceProperties2(void *device, Properties2 *p) {
    fill(device, &p->properties);
    Driver *d = p->pNext;
    if (p->sType == 1000059001 && d->sType == 1000196000) {
        strcpy(d->driverName, "radv");
        strcpy(d->driverInfo, "Mesa 25");
    }
}
void vkGetPhysicalDeviceMemoryProperties(void *device, Memory *m) {
    memset(m, 0xff, sizeof *m);
    m->heapCount = 3;
    for (int i = 0; i < 3; i++) { m->heaps[i].size = (uint64_t)(i + 1) << 30; m->heaps[i].flags = i != 1; }
}
"""
HEAPS = ((GB, True), (2 * GB, False), (3 * GB, True))
CARDS = (Device("Big Card", "discrete", "1.3.290", "radv Mesa 25", 4 * GB, HEAPS),
         Device("Slow one", "cpu", "1.0.0", "version 0x1234", 4 * GB, HEAPS))  # fmt: skip


def build(folder: Path, mode: int) -> str:
    (folder / "fake.c").write_text(SOURCE)
    library = folder / f"libfake{mode}.so"
    command = [str(CC), "-w", "-shared", "-fPIC", f"-DMODE={mode}", "-o", str(library), str(folder / "fake.c")]
    subprocess.run(command, check=True)
    return str(library)


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_a_loader_in_c(tmp_path: Path) -> None:
    library = build(tmp_path, 0)
    assert devices(["libthere-is-none.so", library]) == Vulkan(library, "1.3.275", CARDS)
    for mode in (4, 5):  # a driver without a device, a loader without a driver
        empty = build(tmp_path, mode)
        assert devices([empty]) == Vulkan(empty, "1.3.275", ())


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
@pytest.mark.parametrize("mode, words", [(1, "crash (SIGSEGV)"), (2, "no answer within 2 s"),
                                         (3, "vkCreateInstance failed (-3)")])  # fmt: skip
def test_a_loader_that_fails_is_an_error_with_a_name(tmp_path: Path, mode: int, words: str) -> None:
    with pytest.raises(DeviceError) as caught:
        devices([build(tmp_path, mode)], timeout=2.0)
    assert words in str(caught.value) and caught.value.hint


def test_no_loader_and_a_library_that_is_none() -> None:
    assert devices(["libthere-is-none.so"]) == Vulkan(None)
    other = ctypes.util.find_library("m") or "libm.so.6"
    with pytest.raises(DeviceError) as caught:
        devices([other])
    assert "vkEnumerateInstanceExtensionProperties" in str(caught.value) and other in str(caught.value)


class Loader:
    """A loader of version 1.0, written down as bytes."""

    def __init__(self, devices: int = 1, result: int = 0) -> None:
        self.devices, self.result, self.destroyed = devices, result, False

    def vkEnumerateInstanceExtensionProperties(self, layer: None, count: Any, out: Any) -> int:
        count._obj.value = 0
        return 0

    def vkCreateInstance(self, info: Any, allocator: None, instance: Any) -> int:
        assert info._obj.type == 1 and not info._obj.flags and info._obj.extension_count == 0
        instance._obj.value = 77
        return 0

    def vkDestroyInstance(self, instance: Any, allocator: None) -> None:
        assert instance.value == 77
        self.destroyed = True

    def vkEnumeratePhysicalDevices(self, instance: Any, count: Any, out: Any) -> int:
        assert count._obj.value >= self.devices
        count._obj.value = self.devices
        for number in range(self.devices):
            out[number] = 1000 + number
        return self.result

    def vkGetPhysicalDeviceProperties(self, device: Any, out: Any) -> None:
        raw = struct.pack("<5I", 1 << 22 | 5, 0xBEEF, 1, 2, 1) + "Größe".encode() + b"\0trash"
        ctypes.memmove(out, raw, len(raw))

    def vkGetPhysicalDeviceMemoryProperties(self, device: Any, out: Any) -> None:
        raw = struct.pack("<I", 1) + bytes(256) + struct.pack("<I", 1) + struct.pack("<QI", 5 * GB, 1)
        ctypes.memmove(out, raw, len(raw))


def test_a_loader_of_the_first_version() -> None:
    loader = Loader(devices=2)
    api, found = ask(loader)
    assert api == "1.0.0" and len(found) == 2 and loader.destroyed
    assert found[0] == {"name": "Größe", "kind": "integrated", "api": "1.0.5", "driver": "version 0xbeef",
                        "memory": 5 * GB, "heaps": [(5 * GB, True)]}  # fmt: skip
    assert len(ask(Loader(devices=64, result=5))[1]) == 64, "VK_INCOMPLETE: as many as there was room for"


def test_what_answers_in_the_child() -> None:
    assert answer(["libthere-is-none.so"]) == {"loader": None, "api": "", "devices": []}


@pytest.mark.parametrize("code, words", [
    ("import os; os.kill(os.getpid(), 6)", "a crash (SIGABRT)"), ("import sys; sys.exit(3)", "no answer (exit 3)"),
    ("raise ValueError('why')", "ValueError: why"), ("import time; time.sleep(30)", "no answer within 1 s"),
    ("", "no answer (exit 0)"),
])  # fmt: skip
def test_a_question_that_is_not_answered(code: str, words: str) -> None:
    with pytest.raises(ColiError) as caught:
        child.ask(["-c", code], 1.0)
    assert words in str(caught.value)


def test_a_question_that_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert child.ask(["-c", "print('chatter'); print('last')"], 20.0) == "last"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ColiError, match="no process could be started"):
        child.ask(["-c", ""], 1.0)
