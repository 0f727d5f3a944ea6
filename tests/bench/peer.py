"""Side by side with llama.cpp on the same file: decode, verify cost and prefill, alternating.

    python -m tests.bench.peer [--types q8_0,q4_0] [--layers 8] [--threads 2] [--rounds 5] [--folder DIR]

Builds llama.cpp once (tests/bench/peer_build.py), writes one random-weight file a type once (peer_files.py: 7.3 GB for
q8_0, 3.9 GB for q4_0), then runs rounds: llama-bench and coli (peer_coli.py), each a process of its own, one after the
other, the first one changing every round. Figures are medians over the rounds, ratios medians of the rounds' ratios.

Before that, both go on from one prompt greedily: that the first tokens agree shows that both compute the same model
(later ones need not: the two round activations in their own ways).

llama-bench runs tg32, pp1 to pp6 and pp512 as it comes: weights repacked at load, OpenMP's threads spinning. Its pp n
computes the logits of the last row only; a verify needs those of all, so coli's T(n)/T(1) is that of verifies, and the
same for the last row only is shown beside it. Spinning threads suffer badly from company: a round in which anything
else used more than a tenth of a core is run again, for a while; `quiet` says whether that was enough, without which no
bar counts as met. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from tests.bench import peer_build, peer_files

DECODE, SIZES, PREFILL = 32, range(1, 7), 512  # tokens of what both sides time
WARM_UP = 64  # prompt tokens of llama-bench's first test: every expert's page is mapped when the others come
PROMPT, WORDS = "hello", 8  # and the tokens both put after it; the first is likeliest by far in both types
Figures: TypeAlias = dict[str, Any]  # of one side in one round: seconds
BARS = {"decode": 1.2, "T(3)/T(1)": 1.0, "T(6)/T(1)": 1.0, "prefill": 0.7}  # coli to llama.cpp: issue 4
COMPANY = 0.1  # cores that anything else may use
PATIENCE, TIMEOUT = 120, 600  # seconds to wait for that before a round, and for a program
ATTEMPTS = 3  # times the rounds asked for
REPEATS = 24  # of the short calls, in every round


# ---- one round -------------------------------------------------------------------------------------------------------


def llama(bin_folder: Path, file: Path, threads: int) -> Figures:
    """llama-bench's medians: `rows` of 1..6, `decode` of 32 tokens, `prefill` of 512."""
    sizes = ",".join(map(str, [WARM_UP, *SIZES]))
    short = _llama_bench(bin_folder, file, threads, "-p", sizes, "-n", str(DECODE), "-r", str(REPEATS))
    long = _llama_bench(bin_folder, file, threads, "-p", str(PREFILL), "-n", "0", "-r", "3")
    rows = [short[rows, 0] for rows in SIZES]
    return {"decode": short[0, DECODE], "rows": rows, "verify": rows, "prefill": long[PREFILL, 0]}


def _llama_bench(bin_folder: Path, file: Path, threads: int, *args: str) -> dict[tuple[int, int], float]:
    """Median seconds by (prompt tokens, generated tokens)."""
    command = [str(bin_folder / "llama-bench"), "-m", str(file), "-t", str(threads), "-o", "jsonl", *args]
    tests = [json.loads(line) for line in _output(command).splitlines()]
    return {(t["n_prompt"], t["n_gen"]): statistics.median(t["samples_ns"]) / 1e9 for t in tests}


def llama_text(bin_folder: Path, file: Path, threads: int) -> bytes:
    """The WORDS likeliest tokens after PROMPT."""
    options = ["-no-cnv", "--no-warmup", "-c", "512", "--ignore-eos", "--temp", "0", "-n", str(WORDS), "-p", PROMPT]
    command = [str(bin_folder / "llama-completion"), "-m", str(file), "-t", str(threads), *options]
    return _output(command, OMP_WAIT_POLICY="passive").removeprefix(PROMPT.encode()).removesuffix(b"\n\n")


def coli(file: Path, threads: int, chunk: int) -> Figures:
    options = ["--threads", str(threads), "--chunk", str(chunk), "--repeats", str(REPEATS)]
    return json.loads(_output([sys.executable, "-m", "tests.bench.peer_coli", str(file), *options]))


def _output(command: list[str], **env: str) -> bytes:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        done = subprocess.run(command, **pipes, timeout=TIMEOUT, env=os.environ | env)
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command)} took {TIMEOUT} s: the machine is too busy for this") from error
    if done.returncode:
        said = done.stderr[-2000:].decode(errors="replace")
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{said}")
    return done.stdout


def wait_for_quiet() -> None:
    """Until nothing else runs, but not for ever: the round will say who was there."""
    end = time.monotonic() + PATIENCE
    while company(lambda: time.sleep(2))[1] > COMPANY and time.monotonic() < end:
        pass


def company(run: Callable[[], Any]) -> tuple[Any, float]:
    """(what `run` gives, cores that processes other than its children used meanwhile)."""

    def clocks() -> tuple[float, float, float]:
        machine, children = psutil.cpu_times(), resource.getrusage(resource.RUSAGE_CHILDREN)
        idle = machine.idle + getattr(machine, "iowait", 0.0)
        return sum(machine) - idle, children.ru_utime + children.ru_stime + time.process_time(), time.perf_counter()

    before = clocks()
    out = run()
    busy, ours, seconds = (after - start for after, start in zip(clocks(), before, strict=True))
    return out, (busy - ours) / seconds


# ---- all rounds ------------------------------------------------------------------------------------------------------


def ratios(pair: dict[str, Figures]) -> dict[str, float]:
    """coli to llama.cpp in one round; speeds: above 1 is faster, T(n)/T(1): below 1 is cheaper."""
    ours, theirs = pair["coli"], pair["llama.cpp"]
    out = {name: theirs[name] / ours[name] for name in ("decode", "prefill")}
    for rows in (3, 6):
        cost = {side: pair[side]["verify"][rows - 1] / pair[side]["verify"][0] for side in pair}
        out[f"T({rows})/T(1)"] = cost["coli"] / cost["llama.cpp"]
    return out


def met(name: str, ratio: float) -> bool:
    return ratio <= BARS[name] if name.startswith("T(") else ratio >= BARS[name]


def compare(sides: dict[str, Callable[[], Figures]], rounds: int, show: Callable[[str], None]) -> Figures:
    """Run the rounds; {"pairs": both sides' figures by round, "quiet", "company"}."""
    measured: list[tuple[dict[str, Figures], float]] = []
    undisturbed: list[tuple[dict[str, Figures], float]] = []
    while len(measured) < ATTEMPTS * rounds and len(undisturbed) < rounds:
        wait_for_quiet()
        names = list(sides)[:: -1 if len(measured) % 2 else 1]
        pair, others = company(lambda names=names: {name: sides[name]() for name in names})
        measured.append((pair, others))
        if others <= COMPANY:
            undisturbed.append(measured[-1])
        found = " ".join(f"{name} {ratio:.2f}" for name, ratio in ratios(pair).items())
        show(f"  round {len(measured)}: {found}  (others {others:.2f} cores)")
    quiet = len(undisturbed) == rounds
    used = undisturbed if quiet else measured
    return {
        "pairs": [pair for pair, _ in used], "quiet": quiet, "company": round(statistics.mean(o for _, o in used), 3),
    }  # fmt: skip


def summary(found: Figures, g: peer_files.Geometry, kind: str) -> Figures:
    """What is reported of one type: each side's medians, the ratios round by round, the bars."""
    pairs = found.pop("pairs")
    out: Figures = found | {name: _side([pair[name] for pair in pairs], g, kind) for name in pairs[0]}
    by_round = [ratios(pair) for pair in pairs]
    for name, bar in BARS.items():
        values = [round(one[name], 3) for one in by_round]
        middle = statistics.median(values)
        out[name] = {"ratio": middle, "rounds": values, "bar": bar, "met": met(name, middle)}
    return out


def _side(rounds: list[Figures], g: peer_files.Geometry, kind: str) -> Figures:
    seconds = {name: statistics.median(one[name] for one in rounds) for name in ("decode", "prefill")}
    out = {
        "decode_tok_s": round(DECODE / seconds["decode"], 2),
        "gb_s": round(DECODE / seconds["decode"] * peer_files.moved(g, kind) / 1e9, 2),
        "prefill_tok_s": round(PREFILL / seconds["prefill"], 1),
    }
    for way in ("verify", "rows"):
        times = [statistics.median(one[way][i] for one in rounds) for i in range(len(SIZES))]
        out |= {f"{way}_ms": [round(t * 1e3, 2) for t in times], f"{way}_cost": [round(t / times[0], 2) for t in times]}
        moved = [peer_files.moved(g, kind, rows) for rows in SIZES]
        out[f"{way}_gb_s"] = [round(m / t / 1e9, 1) for m, t in zip(moved, times, strict=True)]
    extras = {name: statistics.median(one[name] for one in rounds) for name in ("load", "rss") if name in rounds[0]}
    return out | extras


def lines(kind: str, result: Figures) -> Iterable[str]:
    """The result of one type for a person."""
    for side in ("llama.cpp", "coli"):
        r = result[side]
        yield (
            f"{kind} {side:9s} decode {r['decode_tok_s']:6.1f} tok/s ({r['gb_s']:.1f} GB/s)  "
            f"prefill {r['prefill_tok_s']:6.1f} tok/s"
        )
        for way in ("verify", "rows") if side == "coli" else ("rows",):
            pairs = zip(r[f"{way}_ms"], r[f"{way}_cost"], strict=True)
            costs = " ".join(f"{ms:.1f} ({cost:.2f}x)" for ms, cost in pairs)
            yield f"{kind} {side:9s} {way} of 1..6, ms: {costs}"
    for name, bar in BARS.items():
        r = result[name]
        relation = "at most" if name.startswith("T(") else "at least"
        yield (
            f"{kind} {name}: coli to llama.cpp {r['ratio']:.2f} ({min(r['rounds']):.2f} to {max(r['rounds']):.2f}), "
            f"{relation} {bar}: {'met' if r['met'] else 'MISSED'}"
        )
    yield f"{kind} greedy text: the first {result['same_text'][0]} of {result['same_text'][1]} bytes are the same"
    if not result["quiet"]:
        yield f"{kind} NOT QUIET: others used {result['company']:.2f} cores"


def run(types: list[str], layers: int, threads: int, rounds: int, folder: Path, chunk: int) -> Figures:
    programs = peer_build.programs(folder)
    out: Figures = {"bench": "peer", "llama.cpp": peer_build.RELEASE, "threads": threads, "layers": layers}
    out |= {"prefill_chunk": chunk, "types": {}}
    for kind in types:
        g = peer_files.Geometry(layers=layers)
        file = peer_files.write(folder / "models" / f"{peer_files.ARCH}-{kind}-L{layers}.gguf", g, kind)
        print(f"{file.name}: {file.stat().st_size / 1e9:.2f} GB, {peer_files.moved(g, kind) / 1e6:.0f} MB a token, "
              f"{threads} threads, load {os.getloadavg()[0]:.2f}", flush=True)  # fmt: skip
        sides = {
            "llama.cpp": lambda file=file: llama(programs, file, threads),
            "coli": lambda file=file: coli(file, threads, chunk),
        }
        text = llama_text(programs, file, threads)
        found = compare(sides, rounds, lambda line: print(line, flush=True))
        same = len(os.path.commonprefix([text, bytes.fromhex(found["pairs"][0]["coli"]["text"])]))
        out["types"][kind] = summary(found, g, kind) | {"same_text": [same, len(text)]}
        print("\n".join(lines(kind, out["types"][kind])), flush=True)
    results = out["types"].values()
    out["bars_met"] = all(result["quiet"] and result[name]["met"] for result in results for name in BARS)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="q8_0,q4_0", help="of " + ", ".join(peer_files.TYPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=peer_build.default_folder())
    parser.add_argument("--chunk", type=int, default=512, help="coli's prompt tokens computed together")
    args = parser.parse_args()
    print(json.dumps(run(args.types.split(","), args.layers, args.threads, args.rounds, args.folder, args.chunk)))


if __name__ == "__main__":
    main()
