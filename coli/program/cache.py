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
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from coli.errors import ColiError
from coli.kernels.packing import tile_name, tile_rows
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
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """One compiling process at a time per cache folder (POSIX; elsewhere the renames alone keep it sound)."""
    with open(folder / "lock", "a") as handle:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting for another coli that is compiling the kernels")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Kernels:
    """Addresses of compiled kernels by name: `kernels.load(names)`, then `kernels[name]`.

    `folder` is where they are looked for; it needs to be writable only when one is missing. `notes` collects warnings
    for the user; `compiled` and `reused` count what load() did."""

    def __init__(self, folder: Path | None = None, *, simd: bool = True, on_progress: Progress | None = None) -> None:
        self.simd, self.compiled, self.reused = simd, 0, 0
        self.notes: list[str] = []
        self.folder = (folder or default_folder()) / cache_key(simd)
        self._progress = on_progress or (lambda text: None)
        self._addresses: dict[str, int] = {}
        self._engine: Any = None
        self._output: Path | None = None

    def __getitem__(self, name: str) -> int:
        return self._addresses[name]

    def load(self, names: Iterable[str]) -> None:
        """Make every kernel of `names` ready, compiling what the cache lacks."""
        wanted = sorted(set(names) - set(self._addresses))
        if not wanted:
            return
        objects = self._read(self.folder, wanted)
        missing = [name for name in wanted if name not in objects]
        self.reused += len(objects)
        if missing:
            output = self._writable()
            with _locked(output, self._progress):
                self._compile(output, [name for name in missing if name not in self._read(output, missing)])
            objects |= self._read(output, missing)
        lost = set(wanted) - set(objects)
        if lost:
            raise ColiError(f"compiled kernels vanished: {', '.join(sorted(lost))}", self.folder, "run it again")
        self._link(objects)

    @staticmethod
    def _read(folder: Path, names: Iterable[str]) -> dict[str, tuple[str, bytes]]:
        """The (symbol, object code) of those that are there and whole."""
        found = ((name, compiler.read(folder / f"{name}.ko")) for name in names)
        return {name: entry for name, entry in found if entry is not None}

    def _writable(self) -> Path:
        """Where to compile to: the cache folder, or for this run only a temporary one."""
        if self._output is None:
            self._output = self.folder
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder), open(self.folder / "lock", "a"):
                    pass
            except OSError as error:
                temporary = tempfile.mkdtemp(prefix="coli-kernels-")
                atexit.register(shutil.rmtree, temporary, ignore_errors=True)
                self._output = Path(temporary)
                self.notes.append(
                    f"kernel cache {self.folder} is not writable ({error.strerror}): compiling for this run only; "
                    "COLI_CACHE names another folder"
                )
        return self._output

    @property
    def kept(self) -> bool:
        """Whether what was compiled stays for the next run."""
        return self._output in (None, self.folder)

    def _compile(self, folder: Path, names: list[str]) -> None:
        if not names:
            return
        # tiles of many rows take longest: deal them out in turn, longest first
        order = sorted(names, key=lambda name: (name.startswith("tile"), name[-1]), reverse=True)
        workers = max(1, min(4, os.cpu_count() or 1, len(order)))
        env = dict(os.environ, NUMBA_NUM_THREADS="1")
        if not self.simd:
            env["NUMBA_CPU_NAME"], env["NUMBA_CPU_FEATURES"] = _cpu(False)
        processes: list[subprocess.Popen[str]] = []
        try:
            for i in range(workers):
                command = [sys.executable, "-P", "-m", "coli.program.compile", str(folder), *order[i::workers]]
                pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                processes.append(subprocess.Popen(command, text=True, env=env, **pipes))  # type: ignore[call-overload]
            self._watch(processes, len(names))
            for process in processes:
                errors = process.communicate()[1].strip()
                if process.returncode:
                    raise _failed(process.returncode, errors, folder)
        finally:  # also on Ctrl-C and SIGTERM: nobody goes on compiling for a coli that has left
            for process in processes:
                process.kill()
                process.communicate()
        self.compiled += len(names)

    def _watch(self, processes: list[subprocess.Popen[str]], total: int) -> None:
        """Say how far the compiling processes are until all have closed their output."""
        start, done = time.monotonic(), 0
        with selectors.DefaultSelector() as ready:
            for process in processes:
                assert process.stdout is not None
                ready.register(process.stdout, selectors.EVENT_READ)
            self._progress(f"compiling kernels for this CPU, once: 0/{total}")
            while ready.get_map():
                for key, _ in ready.select():
                    if key.fileobj.readline():  # type: ignore[union-attr]
                        done += 1
                        seconds = time.monotonic() - start
                        self._progress(f"compiling kernels for this CPU, once: {done}/{total}, {seconds:.0f} s")
                    else:
                        ready.unregister(key.fileobj)

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
            if not self._addresses[name]:
                raise ColiError(f"{name}.ko holds no {symbol}", self.folder, "delete that folder and run again")

    def tiles(self, kind: str) -> list[str]:
        """Names of the GEMV tiles of one weight kind."""
        return [tile_name(kind, rows) for rows in tile_rows(kind)]


def _failed(code: int, errors: str, folder: Path) -> ColiError:
    """What ended a compiling process: a signal by its name, else the last line it wrote."""
    if code == -9:  # SIGKILL: nobody but the system does that unasked
        what, hint = "killed by signal 9, as when memory runs out", "free some memory: what is compiled stays"
    elif code < 0:
        what, hint = f"ended by signal {-code} ({signal.strsignal(-code)})", "run it again: what is compiled stays"
    else:
        what, hint = errors.splitlines()[-1] if errors else f"exit {code}", "COLI_DEBUG=1 shows more"
    return ColiError(f"compiling kernels failed: {what}", folder, hint)


def warmup(settings: Any, on_progress: Progress | None = None) -> WarmupReport:
    """Compile every kernel the engines can use. Raises ColiError where they cannot be kept."""
    start = time.monotonic()
    kernels = Kernels(settings.cache_dir, simd=settings.simd, on_progress=on_progress)
    kernels.load(compiler.signatures(compiler.tile_names()))
    if not kernels.kept:
        raise ColiError(kernels.notes[0], "warmup", "a warm-up that is not kept is of no use")
    return WarmupReport(kernels.compiled, kernels.reused, time.monotonic() - start, str(kernels.folder))
