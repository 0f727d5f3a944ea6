"""Seconds from process start: `coli --help`, a warm and a cold `coli run` on nano, and nano's decode rate.

    python -m tests.bench.startup

The first token of a run is timed from outside: from the start of the process to the first byte on its stdout. The
cold run has an empty kernel cache (COLI_CACHE in a fresh folder).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COLI = [str(Path(sys.executable).with_name("coli"))]
PROMPT = "Tell me a short story about a fox."


def seconds_of(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def first_byte(command: list[str], **env: str) -> float:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | env)
    assert process.stdout is not None
    os.read(process.stdout.fileno(), 1)
    seconds = time.perf_counter() - start
    process.communicate()
    return seconds


def decode_rate(threads: int) -> float:
    command = [*COLI, "run", "--json", "--quiet", "--threads", str(threads), PROMPT]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["timings"]["decode_tok_s"]


def run(times: int = 7) -> dict:
    seconds_of([*COLI, "run", "--quiet", PROMPT])  # the kernel cache and the page cache are warm from here on
    with tempfile.TemporaryDirectory() as empty:
        cold = first_byte([*COLI, "run", PROMPT], COLI_CACHE=empty)
    out = {
        "help_s": statistics.median(seconds_of([*COLI, "--help"]) for _ in range(times)),
        "warm_first_token_s": statistics.median(first_byte([*COLI, "run", PROMPT]) for _ in range(times)),
        "cold_first_token_s": cold,
        "nano_decode_tok_s": statistics.median(decode_rate(2) for _ in range(times)),
    }
    return {name: round(value, 3) for name, value in out.items()}


if __name__ == "__main__":
    print(json.dumps(run()))
