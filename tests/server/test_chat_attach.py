"""`coli chat` with a live `coli serve`: the same conversation as with an engine of its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import Coli
from tests.server.live import Live

SCRIPT = "/system Be brief.\nTell me a story.\n/think on\nAnd then?\n/think auto\nWhat is 2 + 2?\n"
FLAGS = ("--temp", "0", "--max-tokens", "96")


def footers(talk: str) -> list[tuple[str, ...]]:
    """Tokens, and what of the prompt was cached, of each answer."""
    return re.findall(r"^(\d+) tokens? .* (\d+) of (\d+) prompt tokens cached", talk, re.MULTILINE)


def test_a_server_answers_as_an_engine_of_ones_own(coli: Coli, server: Live, nano: Path) -> None:
    served = coli("chat", "--url", server.base_url, *FLAGS, input=SCRIPT)
    own = coli("chat", "--model", str(nano), *FLAGS, input=SCRIPT)
    assert served.returncode == own.returncode == 0, served.stderr + own.stderr
    assert served.stdout == own.stdout and served.stdout.count("\n") >= 3
    assert "tokens/forward" in served.stderr and f"nano at {server.base_url}" in served.stderr
    mine, theirs = footers(own.stderr), footers(served.stderr)
    assert len(mine) == 3
    assert [(tokens, prompt) for tokens, _, prompt in theirs] == [(tokens, prompt) for tokens, _, prompt in mine]
    assert all(int(cached) > 0 for _, cached, _ in mine[1:] + theirs[1:])
    reasoning = [talk.partition("thinking: on\n")[2].partition(" tokens · ")[0].rpartition("\n")[0]
                 for talk in (own.stderr, served.stderr)]  # fmt: skip
    assert reasoning[0] == reasoning[1] != ""


def test_every_wish_is_one_that_the_server_knows(coli: Coli, server: Live) -> None:
    everything = ["--top-p", "0.9", "--top-k", "5", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "1",
                  "--presence-penalty", "0.1", "--frequency-penalty", "0.1", "--max-tokens", "4"]  # fmt: skip
    for how in (["--no-think"], ["--effort", "low"]):
        done = coli("chat", "--url", server.base_url, *everything, *how, "-q", input="hello\n")
        assert done.returncode == 0 and done.stderr == ""
        assert bool(done.stdout) == (how == ["--no-think"]), "four tokens of reasoning are no answer"
    done = coli("chat", "--url", server.base_url, "--no-think", "--effort", "low", "-q", input="hello\n")
    assert done.returncode == 2 and "contradict each other" in done.stderr


def test_a_prompt_too_long_is_the_servers_error(coli: Coli, server: Live) -> None:
    done = coli("chat", "--url", server.base_url, "-q", input="word " * 4000 + "\nhello\n")
    assert done.returncode == 2 and done.stdout == ""
    assert "maximum context length is 2048" in done.stderr and done.stderr.count("\n") == 1
