"""Runs of 2,000 tokens in a control group hardly larger than the budget: nobody is killed, and the tokens stay.

    python -m tests.bench.cgroup [--times 20] [--tokens 2000] [--only NAME] [--folder DIR]

A generated model whose experts do not fit its budget answers with drafts through `coli run`, every time from a disk
whose pages were dropped, in a memory group (version 1 or 2, wherever root may make one) with a limit of

    tight       budget + 10 %: the bar
    below       0.85 of the budget, which --ram promises all the same
    neighbour   budget + 10 %, and another process takes a quarter of the budget once the cache is full
    unguarded   the same with COLI_GUARD=0: shows that the kernel does kill (once)

What is looked at: the exit code (signal 9), the group's count of kills, whether the answer is that of a free run, what
the guard and --ram said. The last line is JSON; the exit code is 1 where a guarded run was killed or gave other tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coli import cgroup
from tests.conftest import clean_env
from tests.tiny36 import tiny36_config, write_tiny36

BUDGET = 600_000_000
LIMITS = {"tight": 1.10, "below": 0.85, "neighbour": 1.10, "unguarded": 1.10}
NEIGHBOUR = 0.25  # of the budget
RATE = 60 << 20  # bytes a second that the neighbour takes
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4

# Waits until the group at argv[1] holds argv[2] bytes that cannot be taken back, then takes argv[3] more, slowly.
TAKE = """
import sys, time
from pathlib import Path
from coli.cgroup import groups
own = next(group for group in groups() if group.folder == Path(sys.argv[1]))
while own.used < int(sys.argv[2]):
    time.sleep(0.1)
kept, step = [], 4 << 20
while sum(map(len, kept)) < int(sys.argv[3]):
    kept.append(bytearray(b"x") * step)
    time.sleep(step / int(sys.argv[4]))
print("taken", flush=True)
time.sleep(3600)
"""


# ---- a group ---------------------------------------------------------------------------------------------------------


class Box:
    """A memory group below the mounted one, of either version, for the time of a `with`."""

    def __init__(self, limit: int) -> None:
        top = next((group for group in reversed(cgroup.groups()) if group.path == "/"), None)
        top_folder = Path("/sys/fs/cgroup") if top is None else top.folder  # version 2 has no figures at its top
        self.v1 = (top_folder / "memory.limit_in_bytes").exists()
        self.folder, self.limit = top_folder / f"coli-bench-{os.getpid()}", limit
        if not self.v1:
            (top_folder / "cgroup.subtree_control").write_text("+memory")

    def __enter__(self) -> Box:
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if self.v1 else "memory.max")).write_text(str(self.limit))
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(100):  # a process that has just ended may still be counted
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)
        raise OSError(f"{self.folder} cannot be removed")

    def join(self) -> None:
        """Of a child process, before its program starts."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def kills(self) -> int:
        text = (self.folder / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    @property
    def peak(self) -> int:
        """The most it ever held, page cache and all (version 2 before Linux 5.19: unknown, 0)."""
        path = self.folder / ("memory.max_usage_in_bytes" if self.v1 else "memory.peak")
        return int(path.read_text()) if path.exists() else 0


# ---- a run -----------------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """9 layers, the head's included, of 24 experts, 3.1 MB each: 0.7 GB, two thirds of which the budget holds. Some
    experts are wanted more than others, as in trained models, and no answer ever ends by itself."""
    config = tiny36_config(
        "qwen3_5_moe_text", hidden_size=1024, moe_intermediate_size=512, num_experts=24, num_experts_per_tok=2,
        max_position_embeddings=8192,
    )  # fmt: skip

    def shape(weights: dict[str, np.ndarray]) -> None:
        weights["lm_head.weight"][256:] = 0  # special tokens are never the likeliest
        for name in weights:
            if name.endswith("mlp.gate.weight"):
                weights[name] /= 1 + np.arange(24, dtype=np.float32)[:, None] / 1.5

    if not (folder / "config.json").exists():
        write_tiny36(folder, config, dtype="BF16", change=shape)
    return folder


def drop_pages(folder: Path) -> None:
    """Take the model out of the page cache, so that its pages count for the group that reads them."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def answer(folder: Path, tokens: int, box: Box | None, *, guard: bool = True) -> dict:
    """One `coli run`; what came of it."""
    drop_pages(folder)
    command = [
        sys.executable, "-m", "coli.commands.app", "run", "--model", str(folder), "--raw", "--json", "--ctx", "4096",
        "--max-tokens", str(tokens), "--ram", str(BUDGET / 1e9), "--mtp", "--drafts", "2", "--no-gate",
        "--threads", "1", PROMPT,  # memory is what is looked at: let it run beside other work
    ]  # fmt: skip
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_env(COLI_GUARD=str(int(guard))),
        preexec_fn=box.join if box else None,
    )  # fmt: skip
    out, errors = process.communicate()
    seen = {"code": process.returncode, "seconds": round(time.perf_counter() - start, 1), "notes": _notes(errors)}
    if process.returncode:
        return seen | {"errors": errors.splitlines()[-1:]}
    report = json.loads(out)
    return seen | {
        "ids": report["token_ids"], "peak_rss": report["memory"]["peak_rss_bytes"], "experts": report["experts"],
        "tok_s": round(report["timings"]["decode_tok_s"], 1), "forwards": report["speculation"]["forwards"],
    }  # fmt: skip


def _notes(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if "memory" in line and ("lowered" in line or "runs short" in line)]


@contextlib.contextmanager
def neighbour(box: Box) -> Iterator[subprocess.Popen]:
    """Another process in the group, which grows when the cache has filled."""
    taken = int(NEIGHBOUR * BUDGET)
    command = [sys.executable, "-c", TAKE, *map(str, (box.folder, int(0.8 * BUDGET), taken, RATE))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=box.join)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def boxed(folder: Path, tokens: int, variant: str) -> dict:
    with Box(int(LIMITS[variant] * BUDGET)) as box, contextlib.ExitStack() as opened:
        other = opened.enter_context(neighbour(box)) if LIMITS[variant] > 1 and variant != "tight" else None
        seen = answer(folder, tokens, box, guard=variant != "unguarded")
        seen |= {"kills": box.kills, "group_peak": box.peak}
        if other is not None:
            seen["neighbour"] = "killed" if other.poll() is not None else "lived"
        return seen


def run(folder: Path, times: int, tokens: int, variants: list[str]) -> dict:
    found: dict[str, dict] = {}
    free = answer(write_model(folder), tokens, None)
    if free["code"]:
        raise SystemExit(f"the free run failed: {free['errors']}")
    print(json.dumps({"free": {name: value for name, value in free.items() if name != "ids"}}), flush=True)
    for variant in variants:
        runs = []
        for _ in range(1 if variant == "unguarded" else times):
            seen = boxed(folder, tokens, variant)
            seen["same"] = seen.pop("ids", None) == free["ids"]
            runs.append(seen)
            print(json.dumps({variant: seen}), flush=True)
        found[variant] = {
            "runs": len(runs), "limit": int(LIMITS[variant] * BUDGET), "kills": sum(seen["kills"] for seen in runs),
            "ended_by_signal_9": sum(seen["code"] == -9 for seen in runs),
            "finished": sum(seen["code"] == 0 for seen in runs), "same_tokens": sum(seen["same"] for seen in runs),
            "said": sum(bool(seen["notes"]) for seen in runs),
            "most_rss": max((seen.get("peak_rss", 0) for seen in runs), default=0),
        }  # fmt: skip
    return {"budget": BUDGET, "tokens": tokens, "free_tok_s": free["tok_s"]} | found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--only", choices=LIMITS)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coli-bench-") as temporary:
        variants = [args.only] if args.only else list(LIMITS)
        found = run(args.folder or Path(temporary), args.times, args.tokens, variants)
    print(json.dumps(found))
    guarded = [found[variant] for variant in variants if variant != "unguarded"]
    return int(any(one["kills"] or one["same_tokens"] < one["runs"] for one in guarded))


if __name__ == "__main__":
    sys.exit(main())
