"""Rows 13 to 19, and 31: the ends of a verify and its logprobs as a client of the API gets them.

Each answer is asked for streamed and not, with drafts and without; a `prediction` that is the answer itself makes the
verifies long, so that stops and limits fall into the middle of them. All must be what a cold session without drafts
says (tests/complaints/over_http.py): text, reason, counts, and every token with its logprobs, bit for bit."""

from __future__ import annotations

import itertools
import json
from contextlib import closing

import pytest

from coli.sampling import Sampling
from tests.complaints.over_http import ask, expected, idle, prompt_ids

ASKED = [{"role": "user", "content": "Tell me a short story about a fox."}]
LENGTH = 40


@pytest.fixture(scope="module")
def story(plain_nano):
    """The plain greedy answer."""
    return expected(plain_nano, ASKED, max_tokens=LENGTH)


def ways(answer):
    """Every way to ask for it: streamed or not, with which drafts."""
    drafts = ({"speculative": {"enabled": False}}, {}, {"prediction": {"type": "content", "content": answer}},
              {"speculative": {"max_drafts": 1}})  # fmt: skip
    for stream, wish in itertools.product((False, True), drafts):
        yield {"stream": stream, "messages": ASKED, **wish}


def stops(story):
    """(tokens until it is complete, a stop string) wherever the text has one that it did not have before."""
    whole = story.text
    for last in range(2, 16):
        text = b"".join(token[0] for token in story.tokens[:last]).decode("utf-8", "replace")
        stop = next((text[-n:] for n in range(2, len(text)) if whole.find(text[-n:]) + n == len(text)), None)
        if stop is not None:
            yield last, stop


def test_row_13_the_earliest_cause_ends_it(server, plain_nano, story):
    """A stop string complete with the i-th token, and at most m tokens, m before i, at it and after it."""
    seen, accepted = set(), 0
    for last, stop in list(stops(story))[::3]:
        for most in (last - 1, last, last + 1):
            right = expected(plain_nano, ASKED, max_tokens=most, stop=[stop, "never seen"])
            for way in ways(story.text):
                found, usage = ask(server, max_tokens=most, stop=[stop, "never seen"], **way)
                assert found == right, (last, stop, most, way)
                accepted += usage.accepted
            seen.add((right.finish, most - last))
    assert seen == {("length", -1), ("stop", 0), ("stop", 1)} and accepted > 0


def test_rows_14_and_15_text_tokens_and_counts_are_cut_at_the_same_place(server, plain_nano, story):
    found_in_a_token = 0
    for _, stop in stops(story):
        right = expected(plain_nano, ASKED, max_tokens=LENGTH, stop=[stop])
        spelled = b"".join(token[0] for token in right.tokens).decode()
        before = b"".join(token[0] for token in right.tokens[:-1]).decode()
        assert right.text == story.text[: story.text.find(stop)] and right.finish == "stop"
        assert spelled.startswith(right.text) and len(before) < len(right.text)
        assert right.completion == len(right.tokens)
        found_in_a_token += spelled != right.text
        for way in itertools.islice(ways(story.text), 1, None, 3):
            assert ask(server, max_tokens=LENGTH, stop=stop, **way)[0] == right, (stop, way)
    assert found_in_a_token > 0


@pytest.mark.parametrize("end", (3, 6, 9, 12))
def test_row_16_a_turn_that_ended_mid_verify_is_continued(server, plain_nano, story, end):
    """The next turn of the conversation, on whatever state the cut one left."""
    prediction = {"type": "content", "content": story.text}
    for stream in (False, True):
        first, _ = ask(server, stream=stream, messages=ASKED, max_tokens=end, prediction=prediction)
        assert first == expected(plain_nano, ASKED, max_tokens=end)
        talk = [*ASKED, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
        found, usage = ask(server, stream=stream, messages=talk, max_tokens=LENGTH)
        assert found == expected(plain_nano, talk, max_tokens=LENGTH)
        common = [one == other for one, other in zip(prompt_ids(plain_nano, ASKED), prompt_ids(plain_nano, talk),
                                                     strict=False)]  # fmt: skip
        assert usage.cached >= (common + [False]).index(False) > 0, "the first turn is not read again"


@pytest.mark.parametrize("drafts", range(6))
def test_row_17_resumed_behind_a_prefix_with_any_number_of_drafts(server, plain_nano, drafts):
    """Prefixes that end around an edge of the chunks a prompt is read in (128)."""
    words = "the fox ran to the old tree and the bear saw it again " * 12
    for size in (30, 127, 128, 129, 255, 256, 257):
        text = plain_nano.tokenizer.decode(plain_nano.tokenizer.encode(words)[:size])
        talk = [{"role": "user", "content": text}]
        right = expected(plain_nano, talk, max_tokens=8)
        for _ in range(2):  # read, then resumed
            found, usage = ask(server, stream=False, messages=talk, max_tokens=8, pin=True,
                               speculative={"max_drafts": drafts})  # fmt: skip
            assert found == right, (drafts, size)
        assert usage.cached == usage.prompt
        assert drafts > 0 or usage.accepted + usage.rejected == 0


def test_row_19_a_client_that_leaves_at_any_token(server, story):
    """Its slot is free again and the next answer right, however far a verify had come."""
    body = json.dumps({"model": "nano", "messages": ASKED, "temperature": 0, "max_tokens": 2000, "stream": True,
                       "prediction": {"type": "content", "content": story.text}})  # fmt: skip
    for pieces in range(12):
        with closing(server.connect()) as connection:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200
            for _ in range(2 * pieces):
                answer.readline()
            connection.sock.close()
            answer.close()
        assert ask(server, stream=False, messages=ASKED, max_tokens=LENGTH)[0] == story
    idle(server)


# ---- 31: logprobs come from the row that made the pick ---------------------------------------------------------------


@pytest.mark.parametrize("sampled", (False, True))
def test_row_31_logprobs_are_the_same_with_drafts_and_without(server, plain_nano, story, sampled):
    wish = {"temperature": 0.9, "seed": 11, "top_p": 1.0, "top_k": 0, "min_p": 0.0} if sampled else {}
    sampling = Sampling(temperature=0.9, seed=11) if sampled else Sampling()
    right = expected(plain_nano, ASKED, max_tokens=LENGTH, sampling=sampling)
    accepted = 0
    for way in ways(right.text):
        found, usage = ask(server, max_tokens=LENGTH, **wish, **way)
        assert found == right, way
        accepted += usage.accepted
    assert accepted > 0, "no token came from a draft's row"
    for spelled, logprob, top in right.tokens:
        assert -60 < logprob < 0 and len(top) == 5 and [each for _, each in top] == sorted((e for _, e in top))[::-1]
        assert sampled or (top[0] == (spelled, logprob))
