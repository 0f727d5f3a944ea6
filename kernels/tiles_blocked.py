"""GEMV tiles of block-quantised weights (kernels/blocked.py): two templates, and per kind the few lines that differ.

A superblock is done in chunks of V vectors of the file's bytes. A vector yields one vector of codes or, from nibbles,
two *parts*, which lie in the same group of 32 inputs (`together`) or in two groups with scales of their own. A kind
says

    place    of chunk c in superblock g: the group q0 (and q1) of its part(s); `half`: which half where it is one
    codes    the vector at byte `here` of the chunk, u further, of block j -> code{j}_0 (and code{j}_1): the weights'
             codes + OFFSET, bytes 0..255
    scales   -> scale{j}_0 (and scale{j}_1), and min{j}_0 (min{j}_1) where the kind has minimums: float32 by weight row

`INTEGER` multiplies int8 codes of x (`dpbusd`) and applies weight scale * x scale per group. The integer sum starts at
-OFFSET * the sum of x's codes, which takes the offset off exactly; a minimum multiplies that sum itself. `FLOAT`
decodes every weight to the float32 that `blocked.decode` gives and multiplies float32 x; its vectors are a loop where
they can be, for it is long.

*Invariant*: rows are independent, as in kernels/tiles.py. Integer sums are exact, so two chains of them (few rows: to
hide latency) or one (many rows: to stay in registers) give the same bits; every other sum is one chain per (weight row,
activation row), in an order that depends on k alone (tests/kernels/test_blocked_tiles.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from coli.kernels.access import BLOCKED_AHEAD, BLOCKS, LISTED_BLOCKS
from coli.kernels.blocked import BLOCKED, base_kind
from coli.kernels.unroll import unroll

INTEGER = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    supers = k // {ELEMENTS}
    size = supers * {BYTES}
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    use blocks
        each j:
            each r:
                sum{j}_{r} = zero_f()
        for g in range(supers):
            use ahead
            for c in range({CHUNKS}):
                here = 0
                use place
                each j:
                    each line:
                        prefetch(f{j} + c * {BYTES // CHUNKS} + {64 * line})
                each r:
                    use start
                each u:
                    each j:
                        use codes
                    each part:
                        each r:
                            e = as_bytes(splat_i32_at(x{r} + {at(part, 48, 16)} + {first(u, part)}))
                            each j:
                                dot{j}_{dot(u, part)}_{r} = dpbusd(dot{j}_{dot(u, part)}_{r}, code{j}_{part}, e)
                each j:
                    use scales
                each d:
                    each r:
                        e = splat_at(x{r} + q{d} * 48 + 32)
                        each j:
                            sum{j}_{r} = fma(to_f32({whole(j, d, r)}), mul(scale{j}_{d}, e), sum{j}_{r})
                        use minimum
            each j:
                w{j} += {BYTES}
        each j:
            each r:
                total = sum{j}_{r}
                use store
"""

FLOAT = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    supers = k // {ELEMENTS}
    size = supers * {BYTES}
    offset = splat_b({OFFSET})
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    use blocks
        each r:
            each byte:
                sum{byte}_{r} = zero_f()
        for g in range(supers):
            use ahead
            for c in range({CHUNKS}):
                use place
                each line:
                    prefetch(f0 + c * {BYTES // CHUNKS} + {64 * line})
                each j:
                    use scales
                for here in range(0, {64 * V}, {64 * U}):
                    each u:
                        each j:
                            use codes
                        each part:
                            v = sub_b(code0_{part}, offset)
                            each byte:
                                value = mul(field(v, {24 - 8 * byte}, 24), scale0_{of(part)})
                                use minimum
                                each r:
                                    e = splat_at(x{r} + {at(part, 128, 64)} + here // 4 + {4 * (first(u, part) + byte)})
                                    sum{byte}_{r} = fma(value, e, sum{byte}_{r})
            w0 += {BYTES}
        each j:
            each r:
                total = add(add(sum0_{r}, sum1_{r}), add(sum2_{r}, sum3_{r}))
                use store
"""

# where the integer sums of a row begin: kinds with an offset (SHIFT: its power of two) and kinds with a minimum
OFFSET_TOGETHER = """
start = shl_i(splat_i32_at(x{r} + q0 * 48 + 40), {SHIFT})
each j:
    dot{j}_0_{r} = start
    each extra:
        dot{j}_1_{r} = zero_i()
"""
OFFSET_HALVES = """
each d:
    start = shl_i(splat_i16_at(x{r} + q{d} * 48 + 44 + 2 * half), {SHIFT})
    each j:
        dot{j}_{d}_{r} = start
"""
ZERO = """
each j:
    each d:
        dot{j}_{d}_{r} = zero_i()
    each extra:
        dot{j}_1_{r} = zero_i()
"""
INTEGER_MINIMUM = """
e = splat_at(x{r} + q{d} * 48 + 36)
each j:
    sum{j}_{r} = fma(min{j}_{d}, e, sum{j}_{r})
"""
FLOAT_MINIMUM = """
value = add(value, min0_{of(part)})
"""

PLACE_32 = """
q0 = g
"""
PLACE_XS = """
q0 = g * 8 + c
"""
PLACE_K = """
q0 = g * 8 + c * 2
q1 = q0 + 1
"""
PLACE_Q6 = """
half = c & 1
q0 = g * 8 + (c & 4) + (c >> 1 & 1)
q1 = q0 + 2
"""

WHOLE = """
code{j}_0 = xor_b(ld_b(w{j} + here + {64 * u}), splat_b(128))
"""
NIBBLES = """
v = ld_b(w{j} + c * {64 * V} + here + {64 * u})
code{j}_0 = and_b(v, splat_b(15))
code{j}_1 = high_nibbles(v)
"""
TABLE = """
use nibbles
code{j}_0 = lookup_iq4(code{j}_0)
code{j}_1 = lookup_iq4(code{j}_1)
"""
FIFTH = """
use nibbles
v = ld_b(w{j} + 256)
code{j}_0 = or_b(code{j}_0, spread{4 * u}(v))
code{j}_1 = or_b(code{j}_1, spread{16 + 4 * u}(v))
"""
FIFTH_K = """
use nibbles
v = ld_b(w{j} + 2048 + here + {64 * u})
code{j}_0 = or_b(code{j}_0, and_b(rotl_b(v, (4 - 2 * c) & 31), splat_b(16)))
code{j}_1 = or_b(code{j}_1, and_b(rotl_b(v, (3 - 2 * c) & 31), splat_b(16)))
"""
SIXTH = """
use nibbles
v = ld_b(w{j} + 2048 + (c >> 2) * 512 + half * 256 + here + {64 * u})
code{j}_0 = or_b(code{j}_0, and_b(rotl_b(v, 4 - (c & 2)), splat_b(48)))
code{j}_1 = or_b(code{j}_1, and_b(rotl_b(v, -(c & 2) & 31), splat_b(48)))
"""

SCALE_F16 = """
scale{j}_0 = ld_f16(w{j} + {SCALES})
"""
SCALE_F32 = """
scale{j}_0 = ld_f32(w{j} + {SCALES})
"""
SCALE_MIN = """
scale{j}_0 = ld_f16(w{j} + {SCALES})
min{j}_0 = ld_f16(w{j} + {SCALES + 32})
"""
# 6-bit scales and minimums of eight groups in three 32-bit lanes: four of each in the first two, and of the other four
# the low bits in the third and the high ones on top of the first four (blocked._k_scales).
SCALES_K = """
factors = ld_i32(w{j} + {SCALES})
leasts = ld_i32(w{j} + {SCALES + 64})
if c >= 2:
    third = ld_i32(w{j} + {SCALES + 128})
    factors = or_i(and_i(third, splat_i(0x0F0F0F0F)), and_i(shr_i(factors, 2), splat_i(0x30303030)))
    leasts = or_i(and_i(shr_i(third, 4), splat_i(0x0F0F0F0F)), and_i(shr_i(leasts, 2), splat_i(0x30303030)))
scale = ld_f16(w{j} + {SCALES + 192})
least = sub(zero_f(), ld_f16(w{j} + {SCALES + 224}))
each d:
    scale{j}_{d} = mul(scale, to_f32(and_i(shr_i(factors, (c & 1) * 16 + {8 * d}), splat_i(63))))
    min{j}_{d} = mul(least, to_f32(and_i(shr_i(leasts, (c & 1) * 16 + {8 * d}), splat_i(63))))
"""
SCALES_Q6 = """
scale = ld_f16(w{j} + {SCALES + 256})
each d:
    v = ld_b(w{j} + {SCALES} + ((c & 4) >> 1) * 64 + {64 * d})
    scale{j}_{d} = mul(scale, field(v, 24 - 8 * (c & 3), 24))
"""
SCALES_XS = """
factor = and_i(shr_i(ld_i32(w{j} + {SCALES}), 4 * c), splat_i(15))
factor = or_i(factor, shl_i(and_i(shr_i(ld_u16(w{j} + {SCALES + 64}), 2 * c), splat_i(3)), 4))
scale{j}_0 = mul(ld_f16(w{j} + {SCALES + 96}), sub(to_f32(factor), splat(np.float32(32.0))))
"""


@dataclass(frozen=True)
class Kind:
    """What a kind puts into the templates. `vectors` of a chunk, `chunks` of a superblock, `scales`: where they begin
    in an N16 superblock; `offset` of the codes, None: there is a minimum instead."""

    codes: str
    scale: str
    scales: int
    offset: int | None
    vectors: int = 4
    chunks: int = 1
    parts: int = 2
    place: str = PLACE_32
    together: bool = True


KINDS = {
    "q8_0": Kind(WHOLE, SCALE_F16, 512, 128, vectors=8, parts=1),
    "q4_0": Kind(NIBBLES, SCALE_F16, 256, 8),
    "q4_1": Kind(NIBBLES, SCALE_MIN, 256, None),
    "q5_0": Kind(FIFTH, SCALE_F16, 320, 16),
    "q5_1": Kind(FIFTH, SCALE_MIN, 320, None),
    "q4_k": Kind(NIBBLES, SCALES_K, 2048, None, vectors=8, chunks=4, place=PLACE_K, together=False),
    "q5_k": Kind(FIFTH_K, SCALES_K, 2560, None, vectors=8, chunks=4, place=PLACE_K, together=False),
    "q6_k": Kind(SIXTH, SCALES_Q6, 3072, 32, chunks=8, place=PLACE_Q6, together=False),
    "iq4_nl": Kind(TABLE, SCALE_F16, 256, 128),
    "iq4_xs": Kind(TABLE, SCALES_XS, 2048, 128, chunks=8, place=PLACE_XS),
    "g8_32": Kind(WHOLE, SCALE_F32, 512, 128, vectors=8, parts=1),
    "g4_32": Kind(NIBBLES, SCALE_F32, 256, 8),
}


def source(name: str, rows: int, listed: bool = False) -> str:
    """The tile of GEMV kind `name` ("q4_0", or "q4_0f" for float32 activations) for so many activation rows."""
    kind, layout, floats = KINDS[base_kind(name)], BLOCKED[base_kind(name)], name.endswith("f")
    size, halves = 16 * layout.nbytes, kind.place == PLACE_Q6
    chains = 2 if rows <= 3 and kind.together else 1
    start = ZERO if kind.offset is None else OFFSET_HALVES if halves else OFFSET_TOGETHER

    def at(part: int, group: int, half: int) -> str:
        """Bytes from a row of x, with groups of so many bytes, to the inputs of a part."""
        return f"q{0 if kind.together else part} * {group}" + (f" + half * {half}" if halves else "")

    def first(u: int, part: int) -> int:
        """The first input of code vector u there."""
        return 4 * u + (16 * part if kind.together else 0)

    def dot(u: int, part: int) -> int:
        return part if not kind.together else (u * kind.parts + part) % chains

    def whole(j: int, d: int, r: int) -> str:
        return f"add_i(dot{j}_0_{r}, dot{j}_1_{r})" if chains == 2 else f"dot{j}_{d}_{r}"

    streams = 1 if floats or (halves and rows >= 6) else 2  # q6_k in six rows: two streams do not fit the registers
    unrolled = 1 if floats and kind.codes != FIFTH else kind.vectors  # FIFTH's words name a vector
    values = {
        "J": streams, "V": kind.vectors, "U": unrolled, "AHEAD": 4096, "ELEMENTS": layout.elements, "BYTES": size,
        "CHUNKS": kind.chunks, "SCALES": kind.scales, "OFFSET": kind.offset or 0,
        "SHIFT": (kind.offset or 1).bit_length() - 1, "place": kind.place, "codes": kind.codes, "nibbles": NIBBLES,
        "scales": kind.scale, "start": start, "at": at, "first": first, "dot": dot, "whole": whole,
        "of": lambda part: 0 if kind.together else part, "minimum": "",
        **(LISTED_BLOCKS if listed else BLOCKS), **(BLOCKED_AHEAD if listed else {}),
    }  # fmt: skip
    if kind.offset is None:
        values["minimum"] = FLOAT_MINIMUM if floats else INTEGER_MINIMUM
    counts = {
        "r": rows, "j": streams, "u": unrolled, "byte": 4, "line": -(-size // kind.chunks // 64), "extra": chains - 1,
        "part": kind.parts, "d": 1 if kind.together else 2,
    }  # fmt: skip
    return unroll(FLOAT if floats else INTEGER, counts, values)

