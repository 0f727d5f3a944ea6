"""Rows 32 to 38: hybrid models and prefix reuse. A prompt is continued from an exact checkpoint of its state, or read;
whatever was found there, the answer and every byte of state are those of a session that has seen nothing before.

Each turn here is answered twice, by the session that has a past and by a new one without drafts, and `ask` compares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from coli.engine import Engine
from coli.errors import UsageError
from coli.session import Request, Session
from coli.settings import load
from coli.speculation.options import Speculation
from tests.tiny36 import tiny36_config, write_tiny36

NO_STOPS = frozenset({-1})
FORMS = ("f32", "int8 trunk, log", "fp8", "moe f32", "dense int8 trunk, log")  # undo by slots and by a log
DRAFTS = {
    "plain": Speculation.off(),
    "copied": Speculation(mtp=False, gate=False),
    "head": Speculation(drafts=3, gate=False, lookup=False),
    "both": Speculation(drafts=2),
}
TEXT = np.random.default_rng(3).integers(20, 250, 400).tolist()


class Talk:
    """One session and its turns, each judged by a cold one."""

    def __init__(self, engine, options=None, checkpoints=8, pins=4):
        self.engine, self.read = engine, 0
        self.session = Session(engine, options, checkpoints=checkpoints, pins=pins)
        prefill = self.session.decoder.prefill

        def counted(tokens):
            self.read += len(tokens)
            return prefill(tokens)

        self.session.decoder.prefill = counted

    def ask(self, prompt, most=4, cached=None, **wishes):
        """The reply's ids. `cached`: tokens of the prompt that must not be read again."""
        request, self.read = Request(tuple(prompt), most, stop_ids=NO_STOPS, **wishes), 0
        known = self.session.reusable(prompt)
        steps = list(self.session.steps(request))
        report = self.session.report
        assert "".join(step.text for step in steps) == report.text
        assert known == report.cached_tokens and self.read == len(prompt) - known
        if cached is not None:
            assert known == cached, (len(prompt), known, cached)
        cold = Session(self.engine, Speculation.off())
        "".join(cold.generate(request))
        assert frame(self.session) == frame(cold)
        return list(report.token_ids)


def frame(session):
    report = session.report
    return (report.token_ids, report.text, report.finish_reason, report.completion_tokens,
            session.last_logits.tobytes(), session.state.content())  # fmt: skip


@pytest.fixture(scope="module")
def nano():
    with Engine.open(load({"threads": 2, "ctx": 512}, {})[0]) as engine:
        yield engine


# ---- 32: a conversation costs its new tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("form", FORMS)
def test_row_32_a_turn_reads_only_what_is_new(engines, form, options):
    talk, prompt, there = Talk(engines[form], DRAFTS[options]), TEXT[:9], 0
    for turn in range(9):
        reply = talk.ask(prompt, 5, cached=there)
        there = len(prompt) + len(reply) - 1  # the last token was picked and never fed
        prompt = [*prompt, *reply, *TEXT[50 + 9 * turn :][: 3 + turn % 4]]


def test_row_32_in_a_chat_of_the_shipped_model(nano):
    """Through its template, which writes a turn's opening otherwise once an answer follows it: what comes before is not
    read again."""

    def ids(*messages):
        return nano.tokenizer.encode(nano.chat.render(messages, thinking=False, effort=None))

    talk, messages, there = Talk(nano), [], 0
    for said in ("Tell me a story about a fox.", "And what did the bear say?", "Go on."):
        messages.append({"role": "user", "content": said})
        prompt = ids(*messages)
        later = ids(*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"})
        parting = next(at for at, (one, other) in enumerate(zip(prompt, later, strict=False)) if one != other)
        reply = talk.ask(prompt, 20, cached=there, marks=(parting,))
        messages.append({"role": "assistant", "content": nano.tokenizer.decode(reply)})
        there = parting
        assert len(prompt) - 8 < there < len(prompt)


# ---- 33: a checkpoint matches by position and ids, however short -----------------------------------------------------


@pytest.mark.parametrize("form", ("f32", "moe f32"))
def test_row_33_prompts_of_1_to_70_tokens_are_reused(engines, form):
    engine = engines[form]
    for length in range(1, 71):
        talk = Talk(engine, checkpoints=8)
        prompt = TEXT[length : 2 * length]
        reply = talk.ask(prompt, 3, cached=0)
        talk.ask([*prompt, *reply, 7], 2, cached=length + 2)
        talk.ask(prompt, 2, cached=length)
        other = [*prompt[:-1], (prompt[-1] + 1) % 250]
        talk.ask(other, 1, cached=0)  # the same but for its last token
        talk.ask(prompt, 1, cached=0)  # whose row the other one has overwritten


def test_row_33_neither_the_ids_elsewhere_nor_other_ids_there_match(engines):
    talk, prompt = Talk(engines["f32"]), TEXT[:30]
    talk.ask(prompt, 4, marks=(10, 20))
    assert talk.session.reusable(prompt) == 30 and talk.session.reusable([5, *prompt]) == 0
    assert talk.session.reusable(prompt[1:]) == 0 and talk.session.reusable([]) == 0
    for parting in range(30):
        edited = [*prompt[:parting], prompt[parting] + 1, *prompt[parting + 1 :]]
        assert talk.session.reusable(edited) == parting // 10 * 10
    talk.ask([*prompt[:25], 9, 9, 9], 4, cached=20)
    talk.ask([*prompt[:12], 8, 8], 4, cached=10)
    talk.ask(prompt, 4, cached=10)


# ---- 35: what a hit finds is what was read ---------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", (1, 2, 3))
@pytest.mark.parametrize("form", ("f32", "int8 trunk, log", "moe f32"))
def test_row_35_a_needle_behind_a_hit(engines, form, drafts):
    """The needle lies in the reused prefix, the question behind it. That the answer's logits depend on the needle is
    part of the test: with another one they are others."""
    engine, options = engines[form], Speculation(drafts=drafts, gate=False, lookup=False)
    last = []
    for needle in ([201, 202, 203], [203, 201, 202]):
        talk = Talk(engine, options)
        prefix = [*TEXT[:5], *needle, *TEXT[10:60]]
        talk.ask(prefix, 6, cached=0)
        for question in (TEXT[70:78], TEXT[80:84]):
            talk.ask([*prefix, *question], 20, cached=len(prefix))
            assert talk.session.report.speculation.mtp.verifies > 0
        last.append(talk.session.last_logits.tobytes())
    assert last[0] != last[1], "the needle does not matter to this model, so this test would see nothing"


@pytest.mark.parametrize("drafts", (1, 2, 3))
def test_row_35_no_tool_call_leaks_out_of_a_prefix(nano, drafts):
    """A conversation full of calls is reused; the next answer is what a cold session without drafts says."""
    talk = Talk(nano, Speculation(drafts=drafts, gate=False))
    text = "<tool_call>\n<function=look>\n<parameter=what>\nfox\n</parameter>\n</function>\n</tool_call>\n" * 2
    prefix = nano.tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n")
    talk.ask(prefix, 4)
    for said in ("Say it again.", "Tell me about the fox."):
        prompt = [*prefix, *nano.tokenizer.encode(f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n")]
        talk.ask(prompt, 40, cached=len(prefix))


# ---- 36: a pin holds as long as its rows do --------------------------------------------------------------------------

A, B = TEXT[:40], TEXT[100:150]


@pytest.mark.parametrize("options", DRAFTS)
@pytest.mark.parametrize("form", FORMS)
def test_row_36_another_prompt_overwrites_a_pins_rows(engines, form, options):
    talk = Talk(engines[form], DRAFTS[options])
    talk.ask(A, 6, pins=(40,))
    assert talk.session.prefixes.pinned == 1
    talk.ask(B, 6, cached=0)
    assert talk.session.prefixes.pinned == 0, "its rows hold the other prompt"
    talk.ask(A, 6, cached=0)
    talk.ask(A, 6, cached=40)


@pytest.mark.parametrize("options", DRAFTS)
def test_row_36_a_shorter_branch_overwrites_its_end(engines, options):
    """The branch parts from the pinned prompt inside it and is shorter: the rows behind its end are still the old ones,
    those before it are not. A pin that was good by its last rows alone would be taken for whole."""
    talk = Talk(engines["int8 trunk, log"], DRAFTS[options])
    talk.ask(A, 6, marks=(16,), pins=(16, 40))
    assert talk.session.prefixes.pinned == 2
    talk.ask([*A[:16], *B[:6]], 3, cached=16)
    assert talk.session.prefixes.pinned == 1
    talk.ask(A, 6, cached=16)
    talk.ask(A, 6, cached=40)


@pytest.mark.parametrize("options", DRAFTS)
def test_row_36_reading_the_same_tokens_again_leaves_a_pin_good(engines, options):
    talk = Talk(engines["f32"], DRAFTS[options])
    talk.ask(A, 6, marks=(16, 32), pins=(40,))
    talk.ask(A[:32], 1, cached=32)
    talk.ask(A, 6, cached=40)
    assert talk.session.prefixes.pinned == 1
    reply = talk.ask(A[:32], 6, cached=32)
    same = next((at for at, token in enumerate(reply[:5]) if token != A[32 + at]), 5)
    talk.ask(A, 6, cached=32 if same < 5 else 40)


@pytest.mark.parametrize("options", DRAFTS)
def test_row_36_sibling_pins_share_what_they_share(engines, options):
    talk = Talk(engines["moe f32"], DRAFTS[options])
    system, left, right = TEXT[:20], TEXT[30:50], TEXT[60:75]
    talk.ask([*system, *left], 4, marks=(20,), pins=(20, 40))
    talk.ask([*system, *right], 4, cached=20, pins=(35,))
    talk.ask([*system, *right], 4, cached=35)
    talk.ask([*system, *left], 4, cached=20)
    talk.ask(system, 4, cached=20)


def test_row_36_pins_outlive_what_is_not_pinned(engines):
    """Room for two states and one of them pinned: branch after branch, the pinned prefix is never read again."""
    talk = Talk(engines["f32"], checkpoints=1, pins=1)
    talk.ask(A[:20], 2, cached=0, pins=(20,))
    for branch in range(10):
        talk.ask([*A[:20], *TEXT[200 + branch :][:10]], 4, cached=20)
    assert talk.session.prefixes.nbytes <= talk.session.prefixes.budget


# ---- 38: on a hybrid drafts are on, or one line says why not ---------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_row_38_what_is_on_runs_and_is_reported(engines, form):
    engine = engines[form]
    assert engine.geometry is not None and engine.model.spec.recurrent_layers > 0, "no hybrid"
    for options, source in ((DRAFTS["head"], "mtp"), (DRAFTS["copied"], "lookup")):
        talk, prompt = Talk(engine, options), TEXT[:24]
        for cached in (0, len(prompt)):  # and behind a prefix
            prediction = tuple(plain_reply(engine, prompt))
            talk.ask(prompt, 30, cached=cached, prediction=prediction)
            report = talk.session.report.speculation
            assert getattr(report, source).verifies > 0 and report.lines()


def plain_reply(engine, prompt):
    session = Session(engine, Speculation.off())
    "".join(session.generate(Request(tuple(prompt), 30, stop_ids=NO_STOPS)))
    return session.report.token_ids


def test_row_38_what_cannot_be_is_refused_in_one_line(coli, tmp_path):
    headless = write_tiny36(tmp_path / "headless", tiny36_config("qwen3_5_text"), dtype="F32", mtp=False)
    for words, code, says in ((("--mtp", "--model", str(headless)), 3, "no draft head"),
                              (("--drafts", "9"), 2, "--drafts")):  # fmt: skip
        done = coli("run", "hi", "--quiet", *words)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert says in done.stderr and done.stderr.count("\n") == 1
    off = coli("run", "hi", "--json", "--max-tokens", "4", "--no-lookup", "--model", str(headless))
    assert json.loads(off.stdout)["speculation"] is None and off.stderr.count("no draft head") == 1
    with pytest.raises(UsageError, match="drafts"):
        Speculation(drafts=9)
