"""From what a user calls a model to the folder or the GGUF file it lies in.

A reference is, in this order: a folder; a `.gguf` file (of a split model the first part); a Hugging Face id `org/name`
or `org/name@revision`, looked up in the local hub cache only (nothing is ever downloaded). No reference is the nano
model that ships inside the package.
Hub cache layout (huggingface_hub): `models--org--name/refs/<revision>` holds a commit, whose files lie in
`snapshots/<commit>`. Its place: HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else
~/.cache/huggingface/hub.
Guarded by tests/cli/test_find.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from coli.errors import ModelError

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano"
_ID = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_FORMS = "give a checkpoint folder, a .gguf file, or the id org/name of a model in the local Hugging Face cache"


def find(reference: str | None, environ: Mapping[str, str] | None = None) -> Path:
    """The folder or `.gguf` file of a model reference; None is the shipped nano model.

    Raises ModelError that says what was tried."""
    if reference is None:
        if not NANO.is_dir():
            raise ModelError("the shipped model is missing", NANO, "install coli again, or give --model")
        return NANO
    try:
        path = _home(Path(reference))
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        raise ModelError("not a usable path", ascii(reference[:200]), _FORMS) from None
    if path.suffix.lower() == ".gguf":
        if not is_file:
            raise ModelError("no such file", reference, _FORMS)
        return path
    if is_file:
        raise ModelError("a file, where a folder or a .gguf file is needed", reference,
                         "give the folder that holds config.json")  # fmt: skip
    match = _ID.fullmatch(reference)
    if match is None:
        raise ModelError("no such folder", reference, _FORMS)
    return _in_hub_cache(reference, match, os.environ if environ is None else environ)


def _home(path: Path) -> Path:
    """`path` with a leading ~ replaced; as it is where there is no such home."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps its downloads under `environ`."""
    if environ.get("HF_HUB_CACHE"):
        return _home(Path(environ["HF_HUB_CACHE"]))
    if environ.get("HF_HOME"):
        return _home(Path(environ["HF_HOME"])) / "hub"
    base = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else Path("~/.cache")
    return _home(base) / "huggingface" / "hub"


def _in_hub_cache(reference: str, match: re.Match[str], environ: Mapping[str, str]) -> Path:
    org, name, revision = match[1], match[2], match[3] or "main"
    if ".." in revision.split("/"):
        raise ModelError("not a usable revision", reference, _FORMS)
    repo = hub_cache(environ) / f"models--{org}--{name}"
    snapshots = repo / "snapshots"
    try:
        commit = (repo / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    if re.fullmatch(r"[\w.-]+", commit) and commit.strip(".") and (snapshots / commit).is_dir():
        return snapshots / commit
    held = sorted(entry.name for entry in snapshots.iterdir()) if snapshots.is_dir() else []
    if held:
        raise ModelError(f"the local cache {repo} has no revision {revision}, only {', '.join(held[:3])}", reference,
                         f"give {org}/{name}@REVISION, or download the model again")  # fmt: skip
    raise ModelError(f"neither a folder nor a model in the local cache (tried {Path(reference).absolute()} and {repo})",
                     reference, f"download it first: hf download {org}/{name}")  # fmt: skip
