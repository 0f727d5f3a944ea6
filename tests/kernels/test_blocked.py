"""Block-quantised weights: `decode` against the gguf package bit for bit, and packing against itself."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from coli.kernels.blocked import BLOCKED, blocked_bytes, decode, pack_blocks, pack_groups, unpack_blocks
from tests.kernels.harness import same_bits

GGML = [kind for kind in BLOCKED if not kind.startswith("g")]
F16_CORNERS = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7D55], np.uint16
)  # zeros, denormals, the least and largest normal numbers, infinities, NaNs (a signalling one too)


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Any bytes whatever, uint8 [n, file bytes of a row]."""
    layout = BLOCKED[kind]
    rng = np.random.default_rng([seed, n, k])
    return rng.integers(0, 256, (n, k // layout.elements * layout.nbytes)).astype(np.uint8)


def plain_blocks(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Any codes, with block scales such as weights have."""
    layout, raw = BLOCKED[kind], random_blocks(kind, n, k, seed)
    rng = np.random.default_rng([seed, 1])
    blocks = raw.reshape(-1, layout.nbytes)
    for at in float_places(kind):
        size = (rng.random((len(blocks), 1)) + 0.1) * rng.choice([-0.02, 0.02], (len(blocks), 1))
        stored = size.astype(np.float32 if kind.startswith("g") else np.float16).view(np.uint8)
        blocks[:, at : at + stored.shape[1]] = stored
    return raw


def float_places(kind: str) -> list[int]:
    """Where a file block of this kind holds floats."""
    if kind.startswith("g"):
        return [0]
    return [first for first, size, _ in BLOCKED[kind].parts if size == 2 and not (kind == "iq4_xs" and first == 2)]


def reference(kind: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])


@pytest.mark.parametrize("kind", GGML)
def test_sizes_are_those_of_the_gguf_package(kind: str) -> None:
    elements, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    assert (BLOCKED[kind].elements, BLOCKED[kind].nbytes) == (elements, nbytes)


@pytest.mark.parametrize("kind", BLOCKED)
def test_the_parts_are_the_whole_block(kind: str) -> None:
    layout = BLOCKED[kind]
    covered = sorted(byte for first, size, _ in layout.parts for byte in range(first, first + size))
    assert covered == list(range(layout.nbytes))


@pytest.mark.parametrize("kind", GGML)
def test_decode_equals_the_gguf_package_on_any_bytes(kind: str) -> None:
    raw = random_blocks(kind, 64, 2048)
    assert same_bits(decode(kind, raw), reference(kind, raw))


@pytest.mark.parametrize("kind", GGML)
def test_decode_equals_the_gguf_package_in_every_corner(kind: str) -> None:
    """All pairs of remarkable scales and minimums, over all codes zero, all ones and random ones."""
    layout, places = BLOCKED[kind], float_places(kind)
    corners = np.stack(np.meshgrid(*[F16_CORNERS] * len(places)), axis=-1).reshape(-1, len(places))
    for fill in (0, 0xFF, None):
        raw = random_blocks(kind, len(corners), layout.elements)
        if fill is not None:
            raw[:] = fill
        for i, at in enumerate(places):
            raw[:, at : at + 2] = np.ascontiguousarray(corners[:, i : i + 1]).view(np.uint8)
        assert same_bits(decode(kind, raw), reference(kind, raw)), fill


@pytest.mark.parametrize("kind", BLOCKED)
@pytest.mark.parametrize("n", [1, 16, 35])
def test_packing_moves_bytes_and_loses_none(kind: str, n: int) -> None:
    k = 3 * BLOCKED[kind].elements
    raw = random_blocks(kind, n, k)
    out = np.full(blocked_bytes(kind, n, k), 7, np.uint8)
    pack_blocks(kind, raw, out)
    assert np.array_equal(unpack_blocks(kind, out, n, k), raw)
    assert np.bincount(out, minlength=256)[1:].tolist() == np.bincount(raw.ravel(), minlength=256)[1:].tolist()
    if n % 16 == 0:
        assert out.nbytes == raw.nbytes


def test_a_vector_is_one_unit_of_sixteen_rows() -> None:
    raw = random_blocks("q4_0", 16, 64)
    out = np.zeros(raw.nbytes, np.uint8)
    pack_blocks("q4_0", raw, out)
    rows = raw.reshape(16, 2, 18)
    second = out[288:]
    assert np.array_equal(second[:64].reshape(16, 4), rows[:, 1, 2:6])
    assert np.array_equal(second[256:].reshape(16, 2), rows[:, 1, :2])


@pytest.mark.parametrize(("kind", "low", "high"), [("g8_32", -128, 127), ("g4_32", -8, 7)])
def test_groups_of_our_own(kind: str, low: int, high: int) -> None:
    rng = np.random.default_rng(3)
    codes = rng.integers(low, high + 1, (21, 96)).astype(np.int8)
    scales = rng.standard_normal((21, 3), dtype=np.float32)
    out = np.zeros(blocked_bytes(kind, 21, 96), np.uint8)
    pack_groups(kind, codes, scales, out)
    expected = codes.astype(np.float32) * np.repeat(scales, 32, axis=1)
    assert same_bits(decode(kind, unpack_blocks(kind, out, 21, 96)), expected)


def test_a_width_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 256"):
        blocked_bytes("q4_k", 16, 128)
