"""Every bar of the speed, one after another: `make bench`, or `python -m tests.bench [--quick] [--folder DIR]`.

Start-up, prompt lookup, GEMV kernels, a head's listed rows, DeltaNet, then a whole decode step of the real per-layer
geometry with all experts resident (4 layers: 14 GB of memory, 3 GB of disk; `--quick` leaves that one out, `--folder`
keeps its checkpoint). Wants a quiet machine with two free cores. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.bench import decode, deltanet, gemv, listed, lookup, startup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    found: dict[str, object] = {"startup": startup.run()}
    print(json.dumps(found), flush=True)
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
    print(json.dumps(found))


if __name__ == "__main__":
    main()
