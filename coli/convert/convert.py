"""`convert`: from a checkpoint to integer experts, a file at a time, resumable after a kill at any instant.

Order: source opened and checked, folder taken (coli/convert/state.py), room on the disk counted, then every file that
is not whole yet, then the small files. Room is needed for what is still to be written; the bytes announced are an upper
bound, for the dtype of a dense tensor is only known once its values were read.
Guarded by tests/convert/.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coli.convert import container, sidecar
from coli.convert.files import PART, Job, publish, sync_folder, write_error, write_part, write_whole
from coli.convert.plan import Plan
from coli.convert.report import Options, Progress, Report
from coli.convert.source import Source
from coli.convert.state import State, fingerprint
from coli.errors import ColiError, UsageError
from coli.report import size

SPARE = 16 << 20  # small files, and what a file system needs for itself


def convert(
    path: Path, out: Path, options: Options, *, threads: int = 2,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Report:  # fmt: skip
    """Convert the checkpoint at `path` into `out`. `on_progress` hears of every piece written and may raise.

    Raises ColiError (ModelError for a source or a folder that will not do). Whatever ends it, the same call goes on
    where it ended."""
    start = time.monotonic()
    source = Source.open(path)
    try:
        plan = _plan(source, Path(out), options)
        state = State(plan.root, fingerprint(source.files()), options, plan.format)
        try:
            run = _Run(plan, state, on_progress)
            run.check_room()
            with ThreadPoolExecutor(threads, "convert") as pool:
                run.write(pool, ahead=threads + 1 if threads > 1 else 1)
            return run.report(time.monotonic() - start)
        finally:
            state.close()
    finally:
        source.close()


def _plan(source: Source, out: Path, options: Options) -> Plan:
    if source.family == "qwen38":
        return sidecar.plan(source, out, options)
    if not source.is_gguf and out.resolve() == source.checkpoint.folder.resolve():
        raise UsageError("is the source itself", f"OUT {out}", "give another folder: a container is a model of its own")
    return container.plan(source, out, options)


@dataclass
class _Run:
    plan: Plan
    state: State
    on_progress: Callable[[Progress], None]

    def __post_init__(self) -> None:
        self.kept = {job.name for job in self.plan.jobs if self.state.finished(job.name)}
        self.left = [job for job in self.plan.jobs if job.name not in self.kept]
        self._total = sum(job.nbytes for job in self.plan.jobs)
        self._done = self._total - sum(job.nbytes for job in self.left)
        self.written_bytes = 0

    def check_room(self) -> None:
        """Raise ColiError unless the disk holds what is still to be written."""
        if not self.left:
            return
        self.state.sweep(job.name for job in self.left)
        needed, free = sum(job.nbytes for job in self.left) + SPARE, shutil.disk_usage(self.plan.root).free
        if needed > free:
            if self.state.new:
                self.plan.root.rmdir()
            raise ColiError(f"needs {size(needed)}, the disk has {size(free)} free", self.plan.root,
                            f"make room ({size(needed - free)}), or give a folder on another disk")  # fmt: skip

    def write(self, pool: ThreadPoolExecutor, ahead: int) -> None:
        if not self.state.complete:
            self.state.save()
        try:
            for job in self.left:
                self._job(job, pool, ahead)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        self._finish()

    def _job(self, job: Job, pool: ThreadPoolExecutor, ahead: int) -> None:
        path = self.plan.root / job.name
        part = path.with_name(path.name + PART)
        base, written = self._done, 0

        def advance(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            self.on_progress(Progress(job.label, base + min(written, job.nbytes), self._total))

        self._folder(path.parent)
        tally = write_part(job, part, pool, ahead, advance)
        self.state.record(job.name, written, tally)
        publish(part, path)
        self._done = base + job.nbytes
        self.written_bytes += written

    def _folder(self, folder: Path) -> None:
        try:
            if not folder.is_dir():
                folder.mkdir()
                sync_folder(folder.parent)
        except OSError as error:
            raise write_error(error, folder) from error

    def _finish(self) -> None:
        """The small files, the one that makes it a model last; where an earlier run came to its end, those that are
        gone since."""
        done = self.state.complete and not self.left
        for name, data in self.plan.finals:
            path = self.plan.root / name
            if not (done and path.is_file()):
                self._folder(path.parent)
                write_whole(path, data)
        if done:
            return
        self.state.complete = True
        self.state.save()

    def report(self, seconds: float) -> Report:
        names = [job.name for job in self.plan.jobs]
        return Report(
            path=str(self.plan.root), format=self.plan.words, errors=self.state.tally(names).relative(),
            source_bytes=sum(job.source_bytes for job in self.plan.jobs),
            stored_bytes=sum(self.state.nbytes(name) for name in names), files=len(names), written=len(self.left),
            written_bytes=self.written_bytes, read_bytes=sum(job.source_bytes for job in self.left), seconds=seconds,
        )  # fmt: skip
