"""A session ends an answer at the first cause, streams what it reports, and survives failures and cancels."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from coli.engine import Engine
from coli.errors import DoesNotFit, ModelError, PromptTooLong, ReadError, UsageError
from coli.sampling import Sampling
from coli.session import Request, Session
from coli.settings import load
from tests.models.bench_model import Opened
from tests.tiny import write_tiny

PROMPT = "Tell me a short story about a fox."


@pytest.fixture(scope="module")
def engine():
    with Engine.open(load({"threads": 2}, {})[0]) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(engine):
    text = engine.chat.render([{"role": "user", "content": PROMPT}], thinking=None, effort=None)
    return tuple(engine.tokenizer.encode(text))


def answer(session, request):
    pieces = list(session.generate(request))
    assert all(pieces) and "".join(pieces) == session.report.text
    return session.report


def test_the_stop_token_ends_it_and_counts(engine, prompt):
    report = answer(Session(engine), Request(prompt))
    assert report.finish_reason == "stop" and report.token_ids[-1] in engine.stop_ids
    assert report.completion_tokens == len(report.token_ids)
    assert report.text == engine.tokenizer.decode(report.token_ids[:-1])
    shorter = answer(Session(engine), Request(prompt, max_tokens=len(report.token_ids)))
    assert (shorter.finish_reason, shorter.token_ids) == ("stop", report.token_ids)
    cut = answer(Session(engine), Request(prompt, max_tokens=len(report.token_ids) - 1))
    assert (cut.finish_reason, cut.token_ids) == ("length", report.token_ids[:-1])


def test_a_stop_string_ends_it_and_is_not_shown(engine, prompt):
    whole = answer(Session(engine), Request(prompt)).text
    report = answer(Session(engine), Request(prompt, stop=("valley", "never seen")))
    assert report.finish_reason == "stop" and report.text == whole[: whole.index("valley")]


def test_answers_do_not_depend_on_earlier_ones(engine, prompt):
    fresh = answer(Session(engine), Request(prompt, max_tokens=40))
    session = Session(engine)
    answer(session, Request(prompt[:9], max_tokens=13))
    assert answer(session, Request(prompt, max_tokens=40)).token_ids == fresh.token_ids


def test_equal_seeds_sample_the_same_answer(engine, prompt):
    runs = [
        answer(Session(engine), Request(prompt, 30, Sampling(temperature=1.2, top_k=50, seed=seed))).token_ids
        for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_cancel_between_tokens_keeps_the_text_so_far(engine, prompt):
    session, pieces = Session(engine), []
    for piece in session.generate(Request(prompt)):
        pieces.append(piece)
        if len(pieces) == 5:
            session.cancel()
    report = session.report
    assert report.finish_reason == "cancelled" and report.text == "".join(pieces)
    assert report.completion_tokens <= 6
    assert answer(session, Request(prompt, max_tokens=3)).finish_reason == "length"


def test_cancel_during_prefill_ends_before_a_token(engine, prompt, monkeypatch):
    session = Session(engine)
    forward, calls = engine.model.forward, []

    def counted(*args, **kwargs):
        calls.append(1)
        session.cancel()
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", counted)
    report = answer(session, Request(prompt * 20))
    assert (report.finish_reason, report.completion_tokens, len(calls)) == ("cancelled", 0, 1)


def test_a_consumer_that_leaves_still_gets_a_report(engine, prompt):
    session = Session(engine)
    running = session.generate(Request(prompt))
    next(running)
    running.close()
    assert session.report.finish_reason == "cancelled" and session.report.completion_tokens >= 1


def test_a_prompt_that_leaves_no_room_is_refused_with_both_counts(engine):
    session = Session(engine)
    fits = answer(session, Request((5,) * (engine.ctx - 1)))
    assert (fits.finish_reason, fits.completion_tokens) in (("length", 1), ("stop", 1))
    for tokens in (engine.ctx, engine.ctx + 1):
        with pytest.raises(PromptTooLong, match=rf"{tokens:,} tokens.*{engine.ctx:,}"):
            list(session.generate(Request((5,) * tokens)))
    with pytest.raises(UsageError):
        list(session.generate(Request(())))
    with pytest.raises(UsageError):
        list(session.generate(Request((5,), max_tokens=0)))


def test_ids_outside_the_vocabulary_are_refused_before_work(engine):
    with pytest.raises(UsageError, match="vocabulary"):
        list(Session(engine).generate(Request((5, engine.geometry.vocab))))


def test_a_failed_read_names_the_expert_and_the_next_request_goes_on(tmp_path, monkeypatch):
    with Opened(write_tiny(tmp_path, dtype="BF16"), cap=1) as opened:
        session = Session(opened.engine)
        expected = answer(session, Request((3, 4, 5), max_tokens=6)).token_ids
        real, broken = os.preadv, opened.engine.checkpoint.fd(
            opened.engine.checkpoint["layers.0.mlp.experts.down_proj"])  # fmt: skip

        def fail(fd, buffers, offset, *flags):
            if fd == broken and buffers[0].nbytes > 512:
                raise OSError(errno.EIO, "Input/output error")
            return real(fd, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ReadError, match=r"expert \d+ of layer \d+"):
            list(session.generate(Request((9, 8, 7), max_tokens=6)))
        monkeypatch.setattr(os, "preadv", real)
        assert answer(session, Request((3, 4, 5), max_tokens=6)).token_ids == expected


def test_a_failed_open_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    folder = write_tiny(tmp_path / "a", dtype="F32")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        Opened(folder)
    with pytest.raises(DoesNotFit):
        Opened(write_tiny(tmp_path / "b", dtype="F32"), ram=0.001)
    with Opened(write_tiny(tmp_path / "c", dtype="F32")) as opened:
        opened.engine.model.forward([3, 4], opened.state)
        assert set(threading.enumerate()) - before
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


def test_a_cancelled_prefill_reports_what_was_read(engine, prompt, monkeypatch):
    session, forward = Session(engine), engine.model.forward

    def cancelling(*args, **kwargs):
        session.cancel()
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", cancelling)
    report = answer(session, Request(prompt * 20))
    assert report.timings.prefill_tok_s == pytest.approx(engine.limit / report.timings.prefill_s)


def test_another_model_type_is_named(tmp_path):
    folder = write_tiny(tmp_path, dtype="F32")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("qwen4_exp", "llama_exp"))
    with pytest.raises(ModelError, match="llama_exp"):
        Opened(folder)


def test_a_context_beyond_the_model_is_refused_and_the_default_is_cut(engine):
    assert engine.ctx == engine.geometry.max_context == 2048
    with pytest.raises(UsageError, match="2,048"):
        Engine.open(load({"ctx": 2049}, {})[0])
