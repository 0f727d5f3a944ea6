"""Rows 50 to 54: reasoning, whole characters, streams and stop strings, as a session lets them out and as a client of
the API gets them. The filters' own tests, against plain references, are in tests/text.

Where a test needs the shipped model to say something, it is held to a JSON schema of that one string."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from coli.answer import AnswerRouter
from coli.chat import ChatTemplate, reasoning_state
from coli.sampling import Sampler, Sampling
from coli.session import Request, Session
from coli.speculation.options import Speculation
from coli.stream import TextStream
from tests.complaints.over_http import ask, expected, frames
from tests.server import tool_model
from tests.server.live import live

ASKED = [{"role": "user", "content": "Tell me a short story about a fox."}]
FAMILY = "👩‍👩‍👧 ё 中"


def said(text):
    """A request that leaves the model nothing else to say than this text, in quotes."""
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": {"const": text}}}
    return {"messages": ASKED, "response_format": form, "max_tokens": 200}


# ---- 50: where the answer begins ------------------------------------------------------------------------------------

HEAD = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant{{ '\n' }}")  # fmt: skip
TEMPLATES = {  # what each of them writes behind that, by enable_thinking
    "open": "<think>\n",
    "closed": "<think>\n\n</think>\n\n",
    "none": "",
    "by the flag, on": "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}"
                       "<think>\n\n</think>\n\n{% endif %}",
    "by the flag, off": "{% if enable_thinking is defined and enable_thinking %}<think>\n{% else %}"
                        "<think>\n\n</think>\n\n{% endif %}",
    "by the flag, none": "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("thinking", (None, True, False))
@pytest.mark.parametrize("name", TEMPLATES)
def test_row_50_the_prompts_tail_says_where_the_answer_begins(plain_nano, tmp_path, name, thinking):
    """Each template, flag and cut of the answer: no reasoning in the content, no content in the reasoning."""
    (tmp_path / "chat_template.jinja").write_text(HEAD + TEMPLATES[name])
    chat = ChatTemplate.load(tmp_path, plain_nano.tokenizer)
    prompt = chat.render([{"role": "user", "content": "Is <think> a word? So is </think>."}], thinking=thinking)
    tail = prompt.rpartition("<|im_start|>assistant\n")[2]
    opened = "<think>" in tail and "</think>" not in tail
    answers = {"Why not.\n</think>\n\nIt is.": ("Why not.", "It is."), "Hm\n</think>\n\n": ("Hm", "")}
    if not opened:
        answers = {"It is.": ("", "It is."), "": ("", "")}
        if not tail:  # a model that opens its own
            answers |= {"<think>\nWhy not.\n</think>\n\nIt is.": ("Why not.", "It is.")}
    for (answer, parts), size in itertools.product(answers.items(), (1, 2, 3, 100)):
        router = AnswerRouter(reasoning_state(prompt))
        deltas = [delta for at in range(0, len(answer), size) for delta in router.push(answer[at : at + size])]
        deltas += router.flush()
        found = tuple("".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content"))
        assert found == parts, (answer, size)


def parted(raw, opened):
    """(reasoning, content) of nano's text."""
    if not opened:
        return "", raw
    thought, _, content = raw.partition("</think>")
    return thought.removesuffix("\n"), content.removeprefix("\n").removeprefix("\n")


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize("thinking", (None, True, False))
def test_row_50_reasoning_and_content_over_the_api(server, plain_nano, thinking, stream):
    right = expected(plain_nano, ASKED, max_tokens=200, thinking=thinking)
    wish = {} if thinking is None else {"enable_thinking": thinking}
    found, _ = ask(server, stream=stream, messages=ASKED, max_tokens=200, **wish)
    assert (found.reasoning, found.text) == parted(right.text, thinking)
    assert isinstance(found.text, str) and bool(found.reasoning) == bool(thinking)
    assert found.tokens == right.tokens and found.completion == right.completion


@pytest.mark.parametrize("stream", (False, True))
def test_row_50_a_template_without_tags_and_a_model_that_writes_them(tmp_path, plain_nano, stream):
    """The same weights behind a prompt that ends before the tag."""
    model = tool_model.write(tmp_path)
    (model / "chat_template.jinja").write_text(HEAD)
    (tmp_path / "server").mkdir()
    with live(tmp_path / "server", "--model-id", "nano", model=model) as server:
        found, _ = ask(server, stream=stream, messages=ASKED, max_tokens=120)
    raw = b"".join(token[0] for token in found.tokens).decode()
    assert raw.startswith("<think>\n"), "nano does not open its reasoning itself"
    assert (found.reasoning, found.text) == parted(raw.removeprefix("<think>\n"), "</think>" in raw)


# ---- 52: whole characters --------------------------------------------------------------------------------------------


def speaking(engine, monkeypatch, spelled, options, **wishes):
    """(steps, session) of a byte-level model that says these bytes, its drafts right wherever it has any."""
    said = iter(spelled)
    monkeypatch.setattr(Sampler, "pick", lambda sampler, *_: next(said))
    prompt = tuple(range(40, 50))
    session = Session(engine, options, reference=[*prompt, *spelled])
    request = Request(prompt, len(spelled), stop_ids=frozenset({-1}), **wishes)
    return list(session.steps(request)), session


@pytest.mark.parametrize("options", (Speculation.off(), Speculation(mtp=False, gate=False, lookup_force="accept")))
def test_row_52_characters_split_over_tokens_and_verifies(engines, monkeypatch, options):
    engine = engines["f32"]
    for shift in range(6):  # the bytes of a character lie in one verify, or over two, at every row
        text = "a" * shift + FAMILY
        steps, session = speaking(engine, monkeypatch, text.encode(), options)
        pieces = [step.text for step in steps]
        assert "".join(pieces) == text == session.report.text and "\ufffd" not in "".join(pieces)
        given = shown = ""
        for step in steps:  # tokens come with the text they make
            given += bytes(token.id for token in step.tokens).decode()
            shown += step.text
            assert given == shown
        assert session.report.token_ids == tuple(text.encode())


@pytest.mark.parametrize("options", (Speculation.off(), Speculation(mtp=False, gate=False, lookup_force="accept")))
def test_row_52_a_stop_and_a_limit_inside_a_character(engines, monkeypatch, options):
    engine, spelled = engines["f32"], FAMILY.encode()
    for end in range(1, len(spelled)):  # max_tokens ends it: what is unfinished is U+FFFD, once
        steps, session = speaking(engine, monkeypatch, spelled[:end], options)
        right = spelled[:end].decode("utf-8", "replace")
        assert "".join(step.text for step in steps) == right == session.report.text and right.count("\ufffd") <= 1
        assert session.report.completion_tokens == end
    for stop in ("\u200d👧", "ё", "中", " "):
        steps, session = speaking(engine, monkeypatch, spelled, options, stop=(stop,))
        right = FAMILY[: FAMILY.index(stop)]
        assert "".join(step.text for step in steps) == right == session.report.text
        assert session.report.token_ids == tuple(right.encode()) and session.report.finish_reason == "stop"


def test_row_52_no_half_character_goes_over_the_wire(server):
    whole, _ = ask(server, stream=False, **said(FAMILY))
    assert json.loads(whole.text) == FAMILY and max(len(token[0]) for token in whole.tokens) < 12
    assert any(b"\xff" not in token[0] and not _decodes(token[0]) for token in whole.tokens), "no character was split"
    body = {"model": "nano", "temperature": 0, "stream": True, **said(FAMILY)}
    for drafts in ({}, {"speculative": False}, {"prediction": {"type": "content", "content": whole.text}}):
        pieces = [choice["delta"].get("content") or "" for frame in
                  frames(server.post("/v1/chat/completions", body | drafts).body) for choice in frame["choices"]]
        assert "".join(pieces) == whole.text and not any("\ufffd" in piece for piece in pieces)


def _decodes(spelled):
    try:
        return bool(spelled.decode()) or True
    except UnicodeDecodeError:
        return False


# ---- 53: a stream joined is the answer -------------------------------------------------------------------------------


def test_row_53_streams_of_random_bytes_in_random_steps():
    """Through both filters, the tokens cut anywhere: text and reasoning are those of the whole in one piece."""
    rng = np.random.default_rng(53)
    parts = [b"<think>", b"</think>", b"\n", "ё".encode(), "中".encode(), "👩‍👩‍👧".encode(), b"a", b"\xff", b"</thi",
             b" ha", b"<", b"\xf0\x9f"]  # fmt: skip
    starts, found = ("open", "closed", "none"), 0
    for turn in range(1000):
        spelled = b"".join(parts[i] for i in rng.integers(0, len(parts), rng.integers(1, 20)))
        start, stop = starts[turn % 3], [[], [" ha"], ["ё", "\n\n"]][turn % 7 % 3]
        cuts = sorted({0, len(spelled), *rng.integers(0, len(spelled) + 1, rng.integers(0, 12)).tolist()})
        pieces = [spelled[a:b] for a, b in itertools.pairwise(cuts)]
        assert routed(pieces, start, stop) == routed([spelled], start, stop), (turn, spelled)
        found += len(pieces) > 2
    assert found > 500


class Pieces:
    special_ids: frozenset[int] = frozenset()

    def __init__(self, pieces):
        self.pieces = pieces

    def text_bytes(self, token):
        return self.pieces[token]

    def token_id(self, text):
        return None


def routed(pieces, start, stop):
    stream, router = TextStream(Pieces(pieces), stop), AnswerRouter(start)
    texts = [stream.push(token) for token in range(len(pieces))]
    deltas = [delta for text in [*texts, stream.flush()] for delta in router.push(text)] + router.flush()
    return tuple("".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content"))


@pytest.mark.parametrize("thinking", (False, True))
def test_row_53_streamed_and_not_over_the_api(server, thinking):
    """Sampled hot, so that odd texts come, with drafts of every source."""
    for seed in range(6):
        wish = {"messages": ASKED, "max_tokens": 60, "temperature": 1.6, "seed": seed, "enable_thinking": thinking}
        whole, _ = ask(server, stream=False, **wish)
        told = {"type": "content", "content": whole.text or "x"}
        for drafts in ({}, {"speculative": {"enabled": False}}, {"prediction": told}):
            assert ask(server, stream=True, **wish, **drafts)[0] == whole, (seed, drafts)


# ---- 54: stop strings ------------------------------------------------------------------------------------------------

LETTERS = "ABCDEFGHIJKLM"
STOPS = [
    (["DEFGHIJ"], "ABC"), (["DEF", "DEFGHIJ"], "ABC"), (["DEFGHIJ", "DEF"], "ABC"), (["EFG", "DEFGH"], "ABCD"),
    (["DEFGHIX"], LETTERS), (["M\"X", "LMN"], LETTERS), (["ABCDEFGHIJKLMN", "A"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("stops", "left"), STOPS)
def test_row_54_only_what_may_become_a_stop_is_held(stops, left):
    for size in range(1, 8):
        pieces = [LETTERS[at : at + size].encode() for at in range(0, len(LETTERS), size)]
        stream, given = TextStream(Pieces(pieces), stops), ""
        for token in range(len(pieces)):
            given += stream.push(token)
            if stream.stopped:
                break
            known = LETTERS[: size * (token + 1)]
            waiting = max(n for stop in stops for n in range(len(stop)) if known.endswith(stop[:n]))
            assert given == known[: len(known) - waiting], (size, token)
        assert given + stream.flush() == left and stream.stopped == (left != LETTERS)


@pytest.mark.parametrize("stream", (False, True))
@pytest.mark.parametrize(("stops", "left"), STOPS)
def test_row_54_stop_strings_over_the_api(server, stops, left, stream):
    found, _ = ask(server, stream=stream, stop=stops, **said(LETTERS))
    stopped = left != LETTERS
    assert found.text == (f'"{left}' if stopped else json.dumps(LETTERS)) and found.finish == "stop"
    assert found.completion - len(found.tokens) == (not stopped), "the stop token is counted, a stop string is not"


@pytest.mark.parametrize("stream", (False, True))
def test_row_54_what_was_held_comes_at_the_end(server, stream):
    """The limit ends the answer while the beginning of a stop is held: it was text, all of it, through the router."""
    whole, _ = ask(server, stream=False, **said(LETTERS))
    held = 0
    for most in range(1, len(whole.tokens)):
        text = b"".join(token[0] for token in whole.tokens[:most]).decode()
        found, _ = ask(server, stream=stream, **said(LETTERS) | {"max_tokens": most, "stop": ["DEFGHIJKLMN"]})
        assert (found.text, found.finish, found.tokens) == (text, "length", whole.tokens[:most])
        held += "D" in text
    assert held > 0


def test_row_54_sampling_does_not_care_for_stops(plain_nano):
    """Of a sampled answer, too, the text is the whole one up to the stop."""
    sampling = Sampling(temperature=1.0, seed=5)
    whole = expected(plain_nano, ASKED, max_tokens=60, sampling=sampling)
    cut = expected(plain_nano, ASKED, max_tokens=60, sampling=sampling, stop=["e", "never seen"])
    assert cut.text == whole.text[: whole.text.index("e")] and cut.tokens == whole.tokens[: len(cut.tokens)]
