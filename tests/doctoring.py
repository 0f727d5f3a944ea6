"""What the tests of `coli doctor` share: an examination without a process of its own, and words about its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coli.doctor.examine import CHECKS, examine
from coli.doctor.finding import ERROR, OK, WARN, Check, Finding, Patient, Report
from coli.settings import load_sound

OF_THE_MODEL = tuple(check for check in CHECKS[: [c.name for c in CHECKS].index("memory")])
SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]


def of(model: Path | str | None, *, deep: bool = False, checks: tuple[Check, ...] = OF_THE_MODEL,
       say: Callable[[str], None] = lambda text: None, **environ: str) -> Report:  # fmt: skip
    settings, warnings, refused = load_sound({"model": None if model is None else str(model)}, environ)
    return examine(Patient(settings, deep=deep, say=say, refused=tuple(refused), warnings=tuple(warnings)), checks)


def named(*names: str) -> tuple[Check, ...]:
    """These checks, behind those that open the model."""
    return tuple(check for check in CHECKS if check.name in (*names, "path", "files", "config", "tensors", "experts"))


def only(report: Report, check: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.check == check]
    return finding


def bad(report: Report) -> list[tuple[str, str]]:
    """(check, text) of what is not ok; each says what to do."""
    found = [finding for finding in report.findings if finding.status != OK]
    assert all(finding.hint and finding.status in (WARN, ERROR) for finding in found)
    return [(finding.check, finding.what) for finding in found]


def contents(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
            for path in paths}  # fmt: skip
