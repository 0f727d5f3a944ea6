"""`make soak`: a million tokens through the exactness harness, one JSON line at the end.

    python -m tests.soak [TOKENS] [FIRST]

FIRST: number of the first recording, for other walks than those of `make test`. A difference is told on stderr with
what replays it (`tests.speculation.harness.fuzz`), the engine's walks go on behind it, and the exit code is 1."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.speculation.engines import QUOTAS, QUOTAS36, QUOTAS_FILES, WALKS, Engines
from tests.speculation.harness import Compared


def main(tokens: int = 1_000_000, first: int = 1000) -> int:
    quotas = QUOTAS | QUOTAS36 | QUOTAS_FILES
    start, differences, share = time.perf_counter(), 0, tokens / sum(quotas.values())
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder))
        for name, quota in quotas.items():
            target, begun, number = Compared.tokens + -int(-quota * share // 1), time.perf_counter(), first
            while Compared.tokens < target:
                try:
                    engines.walk(name, target - Compared.tokens, number)
                except AssertionError as difference:
                    differences += 1
                    number = engines.last + 1
                    print(difference, file=sys.stderr)
            print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        engines.close()
    print(json.dumps({
        "tokens": Compared.tokens, "verifies": Compared.verifies, "differences": differences,
        "walks_each": WALKS, "seconds": round(time.perf_counter() - start, 1),
    }))  # fmt: skip
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
