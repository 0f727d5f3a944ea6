"""What the API costs: decode tokens a second through `coli serve` against `coli run`, on nano, in turn.

    python -m tests.bench.serve_speed [--rounds 7]

Two prompts, greedy, so both ways give the same tokens (compared): a story of 130 and a table of 190 tokens, nano's
longest answers. Each once with drafts and once without; without, both ways run the very same
forwards, while with them the server's gate has learned from the turns before, as it does in use. Compared are
    stream   (tokens - 1) / (last text - first text) seen by the client, with the run's decode tokens a second
    whole    tokens / (answer - request) of an answer in one piece, with the run's from request to end
The server holds none of the prompt (`cached_tokens` is 0): it keeps one checkpoint, and that of another prompt by then.
A ratio is the median over the rounds; the bar is 0.9 for each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.serve_client import Answer, Client
from tests.bench.startup import COLI
from tests.conftest import clean_env
from tests.server.live import live

BAR = 0.9
PROMPTS = {
    "story": "Write a short story about Irene the goose.",
    "table": "Convert this Markdown table to JSON.\n\n| age | name | job | score |\n| --- | --- | --- | --- |\n"
             "| 50 | Oscar | farmer | 39 |\n| 69 | Wendy | lawyer | 38 |\n| 39 | George | doctor | 31 |\n"
             "| 83 | Anna | teacher | 39 |\n| 72 | Max | nurse | 80 |",
}  # fmt: skip
MOST = 600  # tokens
PLAIN = ("--no-mtp", "--no-lookup")


def run_once(prompt: str, drafts: bool) -> dict[str, Any]:
    """The report of a `coli run`."""
    command = [*COLI, "run", "--json", "--quiet", "--max-tokens", str(MOST), *(() if drafts else PLAIN), prompt]
    done = subprocess.run(command, check=True, capture_output=True, env=clean_env(USAGE_SAVE="0"))
    return json.loads(done.stdout)


async def ask(client: Client, prompt: str, drafts: bool, stream: bool) -> Answer:
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.chat(
        model="nano", messages=[{"role": "user", "content": prompt}], temperature=0, max_tokens=MOST,
        speculative={"enabled": drafts}, **fields,
    )  # fmt: skip
    if answer.error:
        raise RuntimeError(answer.error)
    if answer.cached_tokens:
        raise RuntimeError(f"the server had read {answer.cached_tokens} tokens of the prompt before")
    return answer


def rates(report: dict[str, Any], stream: Answer, whole: Answer) -> dict[str, float]:
    """Tokens a second of one round, and the ratios."""
    for answer in (stream, whole):
        if (answer.text, answer.tokens) != (report["text"], report["completion_tokens"]):
            raise RuntimeError(f"another answer than the run's: {answer.text!r}, not {report['text']!r}")
    times, tokens = report["timings"], report["completion_tokens"]
    run_whole = tokens / (times["ttft_s"] + times["decode_s"])
    streamed, answered = (tokens - 1) / stream.decode_s, tokens / whole.whole_s
    return {
        "tokens": tokens, "run_tok_s": times["decode_tok_s"], "stream_tok_s": streamed,
        "stream_ratio": streamed / times["decode_tok_s"], "run_whole_tok_s": run_whole, "whole_tok_s": answered,
        "whole_ratio": answered / run_whole,
    }  # fmt: skip


async def forget(client: Client) -> None:
    """Put another prompt into the place of the last one."""
    await client.chat(model="nano", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)


async def measure(port: int, rounds: int) -> dict[tuple[str, bool], list[dict[str, float]]]:
    """Rows by prompt and drafts; the three ways of one row come right after each other."""
    found: dict[tuple[str, bool], list[dict[str, float]]] = {}
    async with Client(port) as client:
        for number in range(rounds + 1):
            for name, drafts in itertools.product(PROMPTS, (True, False)):
                report, answers = run_once(PROMPTS[name], drafts), []
                for stream in (True, False):
                    await forget(client)
                    answers.append(await ask(client, PROMPTS[name], drafts, stream))
                if number:  # the first round warms up
                    found.setdefault((name, drafts), []).append(rates(report, *answers))
    return found


def run(rounds: int = 7) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="coli-speed-") as folder, \
            live(Path(folder), "--checkpoints", "1", "--pins", "0", "--model-id", "nano") as server:  # fmt: skip
        found = asyncio.run(measure(server.port, rounds))
    out: dict[str, Any] = {}
    for (name, drafts), rows in found.items():
        medians = {field: statistics.median(row[field] for row in rows) for field in rows[0]}
        out[f"{name}, {'drafts' if drafts else 'plain'}"] = {
            field: round(value, 3 if field.endswith("ratio") else 1) for field, value in medians.items()
        }
    ratios = [row[field] for row in out.values() for field in ("stream_ratio", "whole_ratio")]
    return out | {"least_ratio": min(ratios), "bar": BAR, "ok": min(ratios) >= BAR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    print(json.dumps(run(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
