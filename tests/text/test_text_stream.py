"""Streamed text equals the whole text cut at its stop, whatever the tokens and stops (complaints F 52, 53, 54)."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coli.errors import UsageError
from coli.stream import TextStream


class Pieces:
    """A vocabulary whose token i is the i-th run of bytes; token -1 is the control token <end>."""

    special_ids = frozenset({-1})

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id == -1 else self.pieces[token_id]

    def token_id(self, token: str) -> int | None:
        return -1 if token == "<end>" else None


def reference(whole: bytes, stops: list[str]) -> tuple[str, bool]:
    """Every prefix of the text is tried: the shortest that ends in a stop is cut before the longest such stop."""
    text = whole.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


def stream(pieces: list[bytes], stops: list[str]) -> tuple[list[str], TextStream]:
    out = TextStream(Pieces(pieces), stops)
    given = [out.push(i) for i in range(len(pieces))]
    return [*given, out.flush()], out


def characters(pieces: list[bytes]) -> list[tuple[int, int]]:
    """The characters of each piece: the one it begins in, and the end of the one it ends in."""
    decoder, read, found = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for piece in pieces:
        first, read = read, read + len(decoder.decode(piece))
        found.append((first, read + bool(decoder.getstate()[0])))
    return found


def check(pieces: list[bytes], stops: list[str]) -> None:
    given, out = stream(pieces, stops)
    whole = b"".join(pieces)
    text, stopped = reference(whole, stops)
    cut = len(text)
    begun = sum(first < cut or end <= cut for first, end in characters(pieces)) if stopped else len(pieces)
    assert out.delivered == begun
    assert "".join(given) == out.text == text and out.stopped == stopped
    assert out.flush() == "" and out.text == text
    if out.stopped:
        assert out.push(0) == "" and out.text == text


def split(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]


alphabet = st.sampled_from(["a", "b", "ab", "ё", "中", "👩‍👩‍👧", "🇩", "\ufffd", " ha", "\n"])
letters = st.lists(alphabet, max_size=25).map("".join)
stop_lists = st.lists(st.lists(alphabet, min_size=1, max_size=4).map("".join), max_size=3)
cut_lists = st.lists(st.integers(0, 80), max_size=20)


@settings(max_examples=400)
@given(letters, stop_lists, cut_lists)
def test_any_split_of_text(text: str, stops: list[str], cuts: list[int]) -> None:
    check(split(text.encode(), cuts), stops)


@settings(max_examples=400)
@given(st.lists(st.one_of(st.binary(max_size=5), letters.map(str.encode)), max_size=12), stop_lists)
def test_any_bytes(pieces: list[bytes], stops: list[str]) -> None:
    check(pieces, stops)


@settings(max_examples=200)
@given(letters, stop_lists, st.integers(1, 40))
def test_only_the_longest_beginning_of_a_stop_is_held(text: str, stops: list[str], count: int) -> None:
    seen = text[:count]
    out = TextStream(Pieces([character.encode() for character in seen]), stops)
    given = "".join(out.push(i) for i in range(len(seen)))
    if not out.stopped:
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((n for n in range(len(seen) + 1) if seen[len(seen) - n :] in beginnings), default=0)
        assert given == seen[: len(seen) - held]


@pytest.mark.parametrize("text", ["👩‍👩‍👧", "ёжик в тумане", "中文字符", "e\u0301", "🇩🇪"])
def test_characters_never_break(text: str) -> None:
    given, _ = stream([bytes([byte]) for byte in text.encode()], [])
    assert "".join(given) == text and "\ufffd" not in "".join(given)
    assert [piece for piece in given if piece] == list(text)


def test_an_unfinished_character_becomes_one_mark_at_the_end() -> None:
    given, _ = stream([b"a", b"\xf0\x9f", b"\x91"], [])
    assert given == ["a", "", "", "\ufffd"]
    given, out = stream([b"a", b"\xf0\x9f"], ["\ufffd"])
    assert given == ["a", "", ""] and out.stopped  # flush goes through the router


def test_stop_prefix_is_held_and_released() -> None:
    given, _ = stream([b"ABC", b"DEF", b"GHI", b"X"], ["DEFGHIJ"])
    assert given == ["ABC", "", "", "DEFGHIX", ""]
    given, out = stream([b"ABC", b"DEF", b"GHI"], ["DEFGHIJ"])
    assert given == ["ABC", "", "", "DEFGHI"] and not out.stopped
    given, out = stream([b"ABCD", b"EFGHIJK", b"more"], ["DEFGHIJ"])
    assert given == ["ABC", "", "", ""] and out.stopped


def test_one_stop_is_the_beginning_of_another() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        assert stream([b"xabcy"], stops)[1].text == "x"
        assert stream([b"xa", b"b", b"c"], stops)[0] == ["x", "", "", ""]
    assert stream([b"xabcd"], ["bc", "abcd"])[1].text == "xa"  # complete first
    for stops in (["cd", "abcd"], ["abcd", "cd"]):
        assert stream([b"xabcd"], stops)[1].text == "x"  # complete together: the longer


def test_a_stop_that_overlaps_itself() -> None:
    given, out = stream([b"aab", b"aab", b"aac"], ["aabaac"])
    assert given[:2] == ["", "aab"] and out.text == "aab" and out.stopped


def test_control_tokens_add_nothing_but_can_be_stops() -> None:
    out = TextStream(Pieces([b"\xd1", b"\x91", b"a"]), ("ab",))
    assert [out.push(i) for i in (0, -1, 1, 2, -1)] == ["", "", "ё", "", ""] and out.flush() == "a"
    out = TextStream(Pieces([b"a"]), ("ab", "<end>"))
    assert [out.push(0), out.push(-1), out.push(0), out.flush()] == ["", "a", "", ""] and out.stopped


def test_long_stops_cost_linear_work() -> None:
    stop = "a" * 200_000 + "b"
    out = TextStream(Pieces([b"a"] * 3), [stop])
    assert [out.push(i) for i in range(3)] == ["", "", ""] and out.flush() == "aaa"


def test_an_empty_stop_is_refused_and_one_string_is_one_stop() -> None:
    with pytest.raises(UsageError, match="empty"):
        TextStream(Pieces([]), ("a", ""))
    assert TextStream(Pieces([b"ba"]), "ba").push(0) == ""


@settings(max_examples=200)
@given(letters, stop_lists, cut_lists)
def test_a_token_is_delivered_with_its_last_character(text: str, stops: list[str], cuts: list[int]) -> None:
    """While it runs: of the tokens delivered every character is out, and of the next one not."""
    pieces = split(text.encode(), cuts)
    out, ends, read = TextStream(Pieces(pieces), stops), [], b""
    for piece in pieces:
        read += piece
        ends.append(len(read.decode("utf-8", "replace")))
    for i in range(len(pieces)):
        out.push(i)
        if out.stopped:
            break
        assert all(end <= len(out.text) for end in ends[: out.delivered])
        assert out.delivered == i + 1 or ends[out.delivered] > len(out.text)
