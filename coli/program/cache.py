"""Compiled kernels: made once per machine, loaded by llvmlite alone.

A warm start needs no Numba: the object files are handed to LLVM's loader and give addresses in about 0.1 s, against
0.8 s through `import numba` (kernels.md section 2). The folder is chosen by us (COLI_CACHE, else the user's cache
folder), never in the source tree; its name is a hash of the kernel sources, the CPU and its features, and the
versions of Numba and llvmlite, so an edit or another machine gets a folder of its own. Missing kernels are compiled
in up to four side processes under a file lock. An unwritable folder costs one warning and a temporary folder for
this run.

`COLI_SIMD=0` compiles for a CPU without AVX-512 (kernels/simd.py says why one source is enough).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from coli.errors import ColiError, ModelError
from coli.kernels.packing import TILE_ROWS, tile_name
from coli.program import compile as compiler

Progress: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class WarmupReport:
    """What `coli warmup` did: kernels compiled and found ready, seconds, cache folder."""

    compiled: int
    reused: int
    seconds: float
    folder: str


def default_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("coli")) / "kernels"


def _kernel_sources() -> list[Path]:
    import coli.kernels

    return sorted(path for folder in coli.kernels.__path__ for path in Path(folder).glob("*.py"))


def _cpu(simd: bool) -> tuple[str, str]:
    """(name, features) to compile for, in LLVM's spelling."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if not simd:
        for name in features:
            if name.startswith(("avx512", "avx10")) or name == "evex512":
                features[name] = False
    return llvm.get_host_cpu_name(), features.flatten()


def cache_key(simd: bool) -> str:
    digest = hashlib.sha256()
    for path in _kernel_sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (*_cpu(simd), *(importlib.metadata.version(name) for name in ("numba", "llvmlite"))):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One compiling process at a time per cache folder (POSIX; elsewhere the renames alone keep it sound)."""
    with open(folder / "lock", "a") as handle:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Kernels:
    """Addresses of compiled kernels by name: `kernels.load(names)`, then `kernels[name]`.

    `notes` collects warnings for the user; `compiled` and `reused` count what load() did."""

    def __init__(self, folder: Path | None = None, *, simd: bool = True, on_progress: Progress | None = None) -> None:
        self.simd, self.compiled, self.reused = simd, 0, 0
        self.notes: list[str] = []
        self._progress = on_progress or (lambda text: None)
        self._addresses: dict[str, int] = {}
        self._engine: Any = None
        self.folder = self._writable((folder or default_folder()) / cache_key(simd))

    def _writable(self, folder: Path) -> Path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            temporary = tempfile.mkdtemp(prefix="coli-kernels-")
            atexit.register(shutil.rmtree, temporary, ignore_errors=True)
            self.notes.append(
                f"kernel cache {folder} is not writable ({error.strerror}): compiling for this run only; "
                "COLI_CACHE names another folder"
            )
            return Path(temporary)

    def __getitem__(self, name: str) -> int:
        return self._addresses[name]

    def load(self, names: Iterable[str]) -> None:
        """Make every kernel of `names` ready, compiling what the cache lacks."""
        wanted = sorted(set(names) - set(self._addresses))
        if not wanted:
            return
        objects = {name: compiler.read(self.folder / f"{name}.ko") for name in wanted}
        missing = [name for name in wanted if objects[name] is None]
        self.reused += len(wanted) - len(missing)
        if missing:
            with _locked(self.folder):
                missing = [name for name in missing if compiler.read(self.folder / f"{name}.ko") is None]
                self._compile(missing)
            self.compiled += len(missing)
            objects = {name: compiler.read(self.folder / f"{name}.ko") for name in wanted}
        self._link({name: entry for name, entry in objects.items() if entry is not None})
        lost = set(wanted) - set(self._addresses)
        if lost:
            raise ColiError(f"compiled kernels vanished: {', '.join(sorted(lost))}", self.folder, "run it again")

    def _compile(self, names: list[str]) -> None:
        if not names:
            return
        # tiles of many rows take longest: deal them out in turn, longest first
        order = sorted(names, key=lambda name: (name.startswith("tile"), name[-1]), reverse=True)
        workers = max(1, min(4, os.cpu_count() or 1, len(order)))
        env = dict(os.environ, NUMBA_NUM_THREADS="1")
        if not self.simd:
            env["NUMBA_CPU_NAME"], env["NUMBA_CPU_FEATURES"] = _cpu(False)
        start = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "coli.program.compile", str(self.folder), *order[i::workers]],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, stdin=subprocess.DEVNULL,
            )
            for i in range(workers)
        ]
        with selectors.DefaultSelector() as ready:
            for process in processes:
                assert process.stdout is not None
                ready.register(process.stdout, selectors.EVENT_READ)
            done = 0
            self._progress(f"compiling kernels for this CPU, once: 0/{len(names)}")
            while ready.get_map():
                for key, _ in ready.select():
                    if key.fileobj.readline():  # type: ignore[union-attr]
                        done += 1
                        seconds = time.monotonic() - start
                        self._progress(f"compiling kernels for this CPU, once: {done}/{len(names)}, {seconds:.0f} s")
                    else:
                        ready.unregister(key.fileobj)
        for process in processes:
            errors = process.communicate()[1]
            if process.returncode:
                last = errors.strip().splitlines()[-1] if errors.strip() else f"exit {process.returncode}"
                raise ColiError(f"compiling kernels failed: {last}", self.folder, "COLI_DEBUG=1 shows more")

    def _link(self, objects: dict[str, tuple[str, bytes]]) -> None:
        import llvmlite.binding as llvm

        if self._engine is None:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine()
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for _, code in objects.values():
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for name, (symbol, _) in objects.items():
            self._addresses[name] = self._engine.get_function_address(symbol)

    def tiles(self, kind: str) -> list[str]:
        """Names of the GEMV tiles of one weight kind."""
        return [tile_name(kind, rows) for rows in TILE_ROWS]


def warmup(settings: Any, on_progress: Progress | None = None) -> WarmupReport:
    """Compile every kernel the engines can use."""
    if importlib.util.find_spec("numba") is None:
        raise ModelError("Numba is not installed", "coli warmup", "pip install numba")
    start = time.monotonic()
    kernels = Kernels(settings.cache_dir, simd=settings.simd, on_progress=on_progress)
    kernels.load(compiler.signatures())
    return WarmupReport(kernels.compiled, kernels.reused, time.monotonic() - start, str(kernels.folder))
