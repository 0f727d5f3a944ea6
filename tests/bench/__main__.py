"""Every bar of the speed, one after another: `make bench`, or `python -m tests.bench [--quick] [--folder DIR]`.

Start-up, `coli plan` of a large checkpoint, prompt lookup, GEMV kernels, a head's listed rows, DeltaNet, then a whole
decode step of the real per-layer geometry with all experts resident (4 layers: 14 GB of memory, 3 GB of disk) and one
with experts from disk (6 GB; `--quick` leaves both out, `--folder` keeps the first one's checkpoint). Wants a quiet
machine with two free cores. The last line is JSON. By hand: tests.bench.peer (llama.cpp), prefetch, cgroup (as root).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.bench import decode, deltanet, gemv, listed, lookup, plan_speed, startup, streaming


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    found: dict[str, object] = {"startup": startup.run()}
    print(json.dumps(found), flush=True)
    with tempfile.TemporaryDirectory(prefix="coli-plan-") as temporary:
        found["plan"] = plan_speed.run(Path(temporary) / "model", False, 5)
    print(json.dumps(found["plan"]), flush=True)
    found["lookup"] = lookup.run()
    print(json.dumps(found["lookup"]), flush=True)
    found["gemv"] = gemv.run()
    found["listed"] = listed.run()
    found["deltanet"] = deltanet.run()
    print(json.dumps(found["deltanet"]), flush=True)
    found["undo"] = deltanet.run_undo()
    print(json.dumps(found["undo"]), flush=True)
    if not args.quick:
        with tempfile.TemporaryDirectory(prefix="coli-bench-") as temporary:
            folder = args.folder or Path(temporary)
            found["decode"] = decode.run(folder, rival=True)
            found["decode_int8_trunk"] = decode.run(folder, trunk_int8=True)
        with tempfile.TemporaryDirectory(prefix="coli-bench-") as temporary:
            found["streaming"] = streaming.run(Path(temporary))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
