"""A safetensors header is checked whole: any damage is one ModelError that names the file."""

from __future__ import annotations

import json
import os
import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coli.errors import ModelError
from coli.formats.safetensors import STORAGE, Tensor, read_header
from tests.tiny import write_safetensors

QUICK = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pack(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: object = "F32", shape: object = (2,), span: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


GOOD = pack({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", [1, 2], [8, 12])}, bytes(12))


def refuse(path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert caught.value.where == str(path) and caught.value.hint
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_dtype_lands_where_it_was_written(tmp_path):
    rng = np.random.default_rng(1)
    arrays = {
        "f": ("F32", rng.standard_normal((3, 2)).astype(np.float32)),
        "h": ("F16", np.zeros((0, 4), np.float16)),
        "b": ("BF16", rng.integers(0, 1 << 16, (5,)).astype(np.uint16)),
        "q": ("F8_E4M3", rng.integers(0, 256, (3, 3)).astype(np.uint8)),
        "i": ("I64", np.array(7)),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, arrays)
    found = read_header(path)
    raw = path.read_bytes()
    assert found.keys() == arrays.keys()
    for name, (dtype, array) in arrays.items():
        t = found[name]
        assert t == Tensor(name, dtype, array.shape, path, t.offset, array.nbytes)
        assert raw[t.offset : t.offset + t.nbytes] == array.tobytes()


def test_metadata_is_no_tensor_and_an_empty_file_is_fine(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    assert list(read_header(path)) == ["a", "b"]
    path.write_bytes(pack({}))
    assert read_header(path) == {}


HOSTILE = {
    "not an object": ([1], "not an object"),
    "not JSON": (b"{'a': 1}", "JSON"),
    "not UTF-8": (b'{"\xff": 1}', "UTF-8"),
    "endless nesting": (b'{"a":' + b"[" * 100_000, "JSON"),
    "a number of 10,000 digits": (b'{"a":' + b"9" * 10_000 + b"}", "JSON"),
    "a tensor twice": (b'{"a": {}, "a": {}}', "a is listed twice"),
    "a key of a tensor twice": (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "dtype is listed twice"),
    "entry is a list": ({"a": []}, "tensor a"),
    "entry is empty": ({"a": {}}, "tensor a: unknown dtype"),
    "unknown dtype": ({"a": entry("F7")}, "tensor a: unknown dtype F7"),
    "dtype is a list": ({"a": entry(["F32"])}, "tensor a"),
    "negative size": ({"a": entry(shape=[-2])}, "tensor a: shape"),
    "two negative sizes": ({"a": entry(shape=[-1, -2])}, "tensor a: shape"),
    "size is true": ({"a": entry(shape=[True, 2])}, "tensor a: shape"),
    "size is a float": ({"a": entry(shape=[2.0])}, "tensor a: shape"),
    "shape is a number": ({"a": entry(shape=2)}, "tensor a: shape"),
    "shape is missing": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, "tensor a: shape"),
    "too many dimensions": ({"a": entry(shape=[1] * 1000)}, "tensor a: shape"),
    "absurd size": ({"a": entry(shape=[1 << 63])}, "tensor a: shape"),
    "sizes that overflow": ({"a": entry(shape=[1 << 32, 1 << 32])}, "tensor a"),
    "offsets backwards": ({"a": entry(span=[8, 0])}, "tensor a"),
    "offsets negative": ({"a": entry(span=[-8, 0])}, "tensor a: data_offsets"),
    "three offsets": ({"a": entry(span=[0, 8, 9])}, "tensor a: data_offsets"),
    "size and span differ": ({"a": entry(shape=[3])}, "tensor a: F32 .3. takes 12 bytes"),
    "outside the file": ({"a": entry(span=[16, 24])}, "tensor a: truncated"),
    "overlap": ({"a": entry(), "b": entry(span=[4, 12])}, "tensor b: its bytes overlap those of a"),
    "same bytes twice": ({"a": entry(), "b": entry()}, "overlap"),
    "a name with a newline": ({"a\nb": []}, r"a\\nb"),
    "a name that is no text": (b'{"\\ud800": []}', r"ud800"),
}


@pytest.mark.parametrize(("header", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_headers(tmp_path, header, message):
    text = refuse(tmp_path / "x.safetensors", pack(header, bytes(12)))
    assert re.search(message, text), text


def test_a_file_cut_anywhere_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    for length in range(len(GOOD)):
        refuse(path, GOOD[:length])


def test_joined_files_and_absurd_lengths(tmp_path):
    path = tmp_path / "x.safetensors"
    assert "joined" in refuse(path, GOOD + GOOD)
    assert "limit" in refuse(path, b"\xff" * 64)
    assert "needs" in refuse(path, struct.pack("<Q", 1 << 20) + b"{}")
    assert "git lfs pull" in refuse(path, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def test_what_is_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", tmp_path / "a\0b"):
        with pytest.raises(ModelError):
            read_header(path)


def assert_sound(path) -> None:
    """Either a ModelError, or tensors that lie inside the file and do not share a byte."""
    try:
        found = read_header(path)
    except ModelError as error:
        assert str(path) in str(error)
        return
    spans = sorted((t.offset, t.offset + t.nbytes) for t in found.values() if t.nbytes)
    assert all(0 <= a < b <= path.stat().st_size for a, b in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for t in found.values():
        assert int(np.prod(t.shape, dtype=object)) * STORAGE[t.dtype].itemsize == t.nbytes


@QUICK
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_random_bytes_changed(tmp_path, changes):
    content = bytearray(GOOD)
    for at, value in changes:
        content[at] = value
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert_sound(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(STORAGE)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(list(STORAGE)) | JSON,
    "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
    "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
})  # fmt: skip


@QUICK
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=4), st.binary(max_size=40))
def test_random_headers(tmp_path, header, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(header, data))
    assert_sound(path)


@QUICK
@given(st.binary(max_size=80))
def test_random_files(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert_sound(path)
