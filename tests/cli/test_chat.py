"""`coli chat` through a pipe: a line a turn, answers on stdout, all else on stderr; who answers; exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coli.conversation import Conversation, Turn, TurnFacts, Wishes
from tests.cli.chat_server import Script, serving
from tests.conftest import CLI, Coli, clean_env

SLOW = (sys.executable, str(Path(__file__).with_name("slow_chat.py")))
OWN = ("chat", "--model")  # a model given: no server is looked for


@pytest.fixture
def script() -> Script:
    return Script()


def test_a_script_talks_with_its_own_engine(coli: Coli, nano: Path, tmp_path: Path) -> None:
    lines = ["/system You are a helper.", "Tell me a story about a fox.", "", "/save first.json", "Who was it about?",
             "/reset", "/load first.json", "Who was it about?", "/save second.json", "/stats"]  # fmt: skip
    done = coli(*OWN, str(nano), "--temp", "0", "--max-tokens", "24", input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first = Conversation.from_json((tmp_path / "first.json").read_text(), "first")
    second = Conversation.from_json((tmp_path / "second.json").read_text(), "second")
    one, two = (turn.content for turn in second.turns)
    assert first.turns == second.turns[:1] and first.system == "You are a helper."
    assert done.stdout == "".join(f"{text}\n" for text in (one, two, two))
    assert done.stderr.count(" prompt tokens cached") == 5 and "\n3 answers: " in done.stderr  # 3 footers, /stats
    assert "\ncontext " in done.stderr


def test_later_turns_read_only_what_is_new(nano: Path) -> None:
    """What this template keeps of a turn is the prompt up to its answer; the third question, asked again, is known."""
    from coli.engine import Engine
    from coli.own_engine import CHECKPOINTS, OwnEngine
    from coli.settings import Settings

    with Engine.open(Settings(model=str(nano), usage_save=False), snapshots=CHECKPOINTS) as engine:
        partner, conversation = OwnEngine(engine, Wishes(max_tokens=12, temperature=0.0)), Conversation("Be brief.")
        seen: list[TurnFacts] = []
        for question in ("Tell me a story.", "And then?", "And then?"):
            said = "".join(delta.text for delta in partner.answer(conversation, question))
            assert partner.facts is not None
            seen.append(partner.facts)
            conversation.turns.append(Turn(question, said))
        answers = [len(engine.tokenizer.encode(turn.content)) for turn in conversation.turns]
        assert seen[0].cached_tokens == 0
        for before, facts, answer in zip(seen, seen[1:], answers, strict=False):
            opening = before.prompt_tokens - len(engine.tokenizer.encode("<think>\n\n</think>\n\n"))
            assert facts.cached_tokens == opening
            assert facts.prompt_tokens - facts.cached_tokens < answer + 30
        conversation.turns.pop()
        again = "".join(delta.text for delta in partner.answer(conversation, "And then?"))
        assert partner.facts is not None and partner.facts.cached_tokens == seen[2].prompt_tokens
        assert again == said
        warm = again
    with Engine.open(Settings(model=str(nano), usage_save=False)) as engine:
        cold = OwnEngine(engine, Wishes(max_tokens=12, temperature=0.0))
        assert "".join(delta.text for delta in cold.answer(conversation, "And then?")) == warm
        cold.cancel()  # it has ended: nothing is to be stopped
        assert "".join(delta.text for delta in cold.answer(conversation, "And then?")) == warm
        stopped = cold.answer(conversation, "And then?")
        cold.cancel()
        assert list(stopped) == [] and cold.facts is not None and cold.facts.finish_reason == "cancelled"


def test_json_is_a_document_an_answer(coli: Coli, script: Script) -> None:
    script.pieces = [{"reasoning_content": "hm"}, {"content": "two\nlines"}]
    with serving(script) as url:
        done = coli("chat", "--url", url, "--json", "-q", input="a\nb\n")
    assert done.returncode == 0 and done.stderr == ""
    for line in done.stdout.splitlines():
        document = json.loads(line)
        assert (document["content"], document["reasoning_content"]) == ("two\nlines", "hm")
        assert document["facts"]["cached_tokens"] == 13
    assert done.stdout.count("\n") == 2


def test_stdout_has_the_answers_and_nothing_else(coli: Coli, script: Script) -> None:
    script.pieces = [{"reasoning_content": "let "}, {"reasoning_content": "see"}, {"content": "Hi"}, {"content": "!"}]
    with serving(script) as url:
        done = coli("chat", "--url", url, input="hello\n/think\n/bogus\nagain")
        quiet = coli("chat", "--url", url, "--quiet", input="hello\n/think\n/bogus\nagain")
    assert done.stdout == quiet.stdout == "Hi!\nHi!\n" and done.returncode == quiet.returncode == 2
    assert f"coli chat: scripted at {url}\nlet see\n5 tokens" in done.stderr and "\x1b" not in done.stderr
    assert quiet.stderr.startswith("coli: /bogus: no such command (") and quiet.stderr.count("\n") == 1


def test_reasoning_on_stderr_steers_no_terminal(coli: Coli, script: Script) -> None:
    script.pieces = [{"reasoning_content": "a\x1b[2Jb\x9b\r\n"}, {"content": "Hi"}]
    with serving(script) as url:
        done = coli("chat", "--url", url, input="hello\n")
    assert "a␛[2Jb\ufffd␍\n" in done.stderr and "\x1b" not in done.stderr


@pytest.mark.parametrize("key", ["é-s3cret", "s3cret\nX: y", "s3 cret", "ключ-s3cret", ""])
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_key_that_no_header_carries_is_refused_unseen(coli: Coli, command: str, key: str) -> None:
    for done in (coli(command, "--api-key", key, input=""), coli(command, input="", env={"COLI_API_KEY": key})):
        assert done.returncode == 2 and "the key is out of range (give printable ASCII" in done.stderr
        assert "cret" not in done.stdout + done.stderr and done.stderr.count("\n") == 1


def test_a_person_behind_a_pipe(coli: Coli, script: Script) -> None:
    """`-i`: prompts on stderr, a failed turn is told and undone, the exit code is that of leaving."""
    script.refusals = [(429, {"error": {"message": "full"}}, {"Retry-After": "2"})]
    with serving(script) as url:
        done = coli("chat", "--url", url, "-i", input="hello\n/bogus\nagain\n")
    assert (done.returncode, done.stdout) == (0, "Hi there.\n")
    assert done.stderr.count("> ") == 4 and "full (ask again in 2 s)" in done.stderr
    assert script.asked[1]["messages"] == [{"role": "user", "content": "again"}]


@pytest.mark.parametrize(("kind", "code"), [(400, 2), (401, 2), (429, 1), (500, 1)])
def test_a_refused_turn_ends_a_script(coli: Coli, script: Script, kind: int, code: int) -> None:
    script.refusals = [(kind, {"error": {"message": "no such luck"}}, {})]
    with serving(script) as url:
        done = coli("chat", "--url", url, "-q", input="hello\nagain\n")
    assert (done.returncode, done.stdout) == (code, "") and len(script.asked) == 1
    assert done.stderr.startswith("coli: http://") and "no such luck" in done.stderr and done.stderr.count("\n") == 1


def test_a_prompt_too_long_for_the_context(coli: Coli, nano: Path) -> None:
    done = coli(*OWN, str(nano), "--ctx", "32", "-q", input="word " * 40 + "\nhello\n")
    assert done.returncode == 2 and done.stdout == "" and "the context holds 32" in done.stderr
    done = coli(*OWN, str(nano), "--ctx", "32", "-q", "-i", "--temp", "0", input="word " * 40 + "\nhello\n")
    assert done.returncode == 0 and done.stdout.strip() and "the context holds 32" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "nowhere"], "is no address"), (["--url", "http://127.0.0.1:1", "--ctx", "64"], "--ctx"),
        (["--url", "http://127.0.0.1:1", "--model", "x"], "--model"), (["--temp", "-1"], "--temp"),
        (["--top-p", "0"], "--top-p"), (["--seed", "-1"], "--seed"), (["--effort", "huge"], "--effort"),
        (["--stop", ""], "--stop"), (["--max-tokens", "0"], "--max-tokens"), (["--bogus"], "--bogus"),
    ],
)  # fmt: skip
def test_usage_errors_are_one_line_and_2(coli: Coli, flags: list[str], words: str) -> None:
    done = coli("chat", *flags, input="hello\n")
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr.splitlines()[-1]


def test_input_that_is_no_text(coli: Coli, script: Script) -> None:
    with serving(script) as url:
        done = coli("chat", "--url", url, "-q", input=b"hello\n\xff\xfe\n", text=False)
    assert done.returncode == 2 and done.stdout == b"Hi there.\n" and b"line 2 of stdin" in done.stderr


def test_no_input_is_no_turn(coli: Coli, script: Script) -> None:
    with serving(script) as url:
        assert coli("chat", "--url", url).stdout == "" and script.asked == []


def test_who_answers(coli: Coli, script: Script, nano: Path) -> None:
    with serving(script) as url:
        named = coli("chat", input="hello\n", env={"COLI_URL": url, "COLI_API_KEY": "k"})
        own = coli(*OWN, str(nano), "--max-tokens", "2", input="hello\n", env={"COLI_URL": url})
    assert named.stdout == "Hi there.\n" and f"scripted at {url}" in named.stderr
    assert script.headers[-1]["Authorization"] == "Bearer k" and len(script.asked) == 1
    assert own.returncode == 0 and "nano" in own.stderr and "scripted" not in own.stderr
    gone = coli("chat", input="hello\n", env={"COLI_URL": url})
    assert gone.returncode == 1 and "no server answers there" in gone.stderr


def test_a_server_of_this_machine_is_found_where_no_model_is_named(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from coli.commands import chat
    from coli.commands._output import Output
    from coli.settings import load

    def found(**environ: str) -> str:
        return str(chat._address(load({}, environ)[0], Output()))

    with serving(script) as url:
        monkeypatch.setattr(chat, "LOCAL", url)
        assert (found(), found(COLI_MODEL="x"), capsys.readouterr().err) == (url, "None", "")
        script.version = {"version": "somebody else's"}
        assert found() == "None" and f"no coli server at {url}" in capsys.readouterr().err


def test_wishes_without_effect_are_told(coli: Coli, nano: Path) -> None:
    done = coli(*OWN, str(nano), "--effort", "low", "--max-tokens", "2", input="hello\n/think on\n")
    assert done.returncode == 0 and done.stderr.count("does not read reasoning_effort") == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_script_with_the_answer_so_far(tmp_path: Path, nano: Path, number: int, code: int) -> None:
    process = subprocess.Popen(
        [*SLOW, *OWN, str(nano), "--temp", "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=tmp_path, env=clean_env(), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"Tell me a story.\nAnd another.\n")
        process.stdin.flush()
        begun = process.stdout.read(1)
        time.sleep(0.2)
        process.send_signal(number)
        rest, talk = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code, talk
    text = (begun + rest).decode()
    assert text.endswith("\n") and len(text) > 1 and b"stopped" in talk and b"Traceback" not in talk


def test_a_reader_that_had_enough(tmp_path: Path, nano: Path) -> None:
    process = subprocess.Popen(
        [*CLI, *OWN, str(nano)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env=clean_env(),
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(b"hello\n" * 3, timeout=60)[1].count(b"coli:") == 0
    assert process.returncode == 0
