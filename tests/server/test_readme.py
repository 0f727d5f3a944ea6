"""The examples of README's "Serve it" are run as they stand there, but for the port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import Live

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README[README.index("### Serve it") : README.index("### Chat")]


def example(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    assert len(found) == 1
    return found[0]


@pytest.fixture
def here(server: Live):
    """An example that speaks to the test's server."""
    return lambda text: text.replace("http://127.0.0.1:8000", server.url)


def test_curl(here):
    done = subprocess.run(["sh", "-c", here(example("sh"))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 5 and last["coli"]["forwards"] > 0


def test_the_python_client(here):
    done = subprocess.run([sys.executable, "-c", here(example("python"))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "def " in done.stdout and re.search(r"^\d+ tokens of the prompt were there already$", done.stdout, re.M)


def test_the_editors_settings(here, server):
    """What an editor makes of them: a streamed chat at its address, with its model."""
    from openai import OpenAI

    (provider,) = json.loads(here(example("json")))["language_models"]["openai_compatible"].values()
    (model,) = provider["available_models"]
    with OpenAI(base_url=provider["api_url"], api_key="any") as client:
        assert model["max_tokens"] == client.models.retrieve(model["name"]).max_model_len
        chunks = client.chat.completions.create(
            model=model["name"], messages=[{"role": "user", "content": "Say hello."}], stream=True, max_tokens=12,
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.strip()


def test_the_table_of_paths_is_whole(server):
    """Every path named there answers, and no other is served."""
    named = set(re.findall(r"`(?:GET|POST)? ?(/[\w/]+)`", SECTION))
    answers = {path: server.request("OPTIONS", path).status for path in named}
    assert set(answers.values()) == {405} and len(named) == 10
    assert server.request("GET", "/v1/embeddings").status == 404
