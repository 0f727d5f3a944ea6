"""GEMV tiles: y[r][j] = sum_i W[j, i] * x[r][i] for a few activation rows r, unrolled from short templates.

    tile(w, s, xs, ys, j0, j1, n, k, a, b)     all int64, nothing returned

    w, s       addresses of the weights and, for FP8, of the scales
    xs, ys     addresses of R int64 addresses: rows of x (float32; prepared rows for int8 and int4) and rows of y
    j0, j1     weight rows to do; a block of rows never reaches beyond j1, so threads never write each other's rows
    n, k       rows and columns of the weight; a, b: rows and columns of an FP8 scale block

    A listed tile computes the weight rows that a list names: j0, j1 are places of the list (and of y), n is the address
    of its ids (int64, any order; ascending is fast).

*Invariant*: every (weight row, activation row) has accumulators of its own, and the order of additions depends on k
(and b) only. More activation rows only add accumulators: a row has the same bits in every tile, next to any other row
and for any split j0..j1 (tests/kernels/test_linear.py, bitwise). No fastmath, one fixed tree for horizontal sums.

*Layouts* (kernels/packing.py). Natural rows: lanes run along k, J = 4 weight rows at a time so that one load of x
serves four of them; 4 x 6 sums fill 24 of the 32 vector registers. The four end in one tree of shared shuffles, which
for a k of 32 or 64 costs as much as the products do. N16: 16 weight rows side by side in the lanes, x is
broadcast, no horizontal sums, J = 2 blocks at a time.

*Streams*: the J rows (blocks) computed together come from J equal parts of j0..j1, so memory is read as J long streams,
each prefetched AHEAD bytes in front. Measured on one Zen 5 core against neighbouring rows (blocks) prefetched one block
ahead: bf16 76 -> 88 % of a bare read loop at one row, int8 69 -> 85 % at six.

*Templates* (kernels/unroll.py): `each r:` stands for every activation row, j for the weight rows or blocks done
together, u for the vectors of one pass; the words are the vector vocabulary (kernels/simd.py). A tile keeps its
unrolled text in `.source`, and tracebacks show it. The block-quantised kinds have templates of their own
(kernels/tiles_blocked.py).
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from functools import cache, partial

from coli.kernels import abi, simd, simd_blocked, tiles_blocked
from coli.kernels.access import BLOCK, BLOCKS, LISTED_BLOCK, LISTED_BLOCKS, LISTED_ROWS, ROWS
from coli.kernels.packing import BLOCKED_KINDS, LISTED
from coli.kernels.unroll import unroll

NATURAL = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    row = k * {width}
    full = k - k % {16 * U}
    part = (j1 - j0 + {J - 1}) // {J}
    for top in range(j0, j0 + part):
        each j:
            at{j} = min(top + {j} * part, j1 - 1)
            use row
            w{j} = w + row{j} * row
            each r:
                sum{j}_{r} = zero_f()
        for i in range(0, full, {16 * U}):
            use ahead
            each j:
                each line:
                    prefetch(f{j} + {64 * line})
            each u:
                each j:
                    v{j} = {load}(w{j} + (i + {16 * u}) * {width})
                each r:
                    e = ld_f32(x{r} + (i + {16 * u}) * 4)
                    each j:
                        sum{j}_{r} = fma(v{j}, e, sum{j}_{r})
        for i in range(full, k, 16):
            each j:
                v{j} = {load}_tail(w{j} + i * {width}, k - i)
            each r:
                e = ld_f32_tail(x{r} + i * 4, k - i)
                each j:
                    sum{j}_{r} = fma(v{j}, e, sum{j}_{r})
        each j:
            to{j} = at{j} * 4
        each r:
            st1_hsum4(y{r} + to0, y{r} + to1, y{r} + to2, y{r} + to3, sum0_{r}, sum1_{r}, sum2_{r}, sum3_{r})
"""

# The products of one scale block are summed alone and join the row's sum times the scale (and times 2**8, which
# ld_e4m3 leaves out).
FP8 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    row = k
    blocks = (k + b - 1) // b
    part = (j1 - j0 + {J - 1}) // {J}
    for top in range(j0, j0 + part):
        each j:
            at{j} = min(top + {j} * part, j1 - 1)
            use row
            w{j} = w + row{j} * row
            s{j} = s + row{j} // a * blocks * 4
            each r:
                sum{j}_{r} = zero_f()
        for block in range(blocks):
            first = block * b
            end = min(first + b, k)
            full = end - (end - first) % {16 * U}
            each j:
                each r:
                    part{j}_{r} = zero_f()
            for i in range(first, full, {16 * U}):
                use ahead
                each j:
                    prefetch(f{j})
                use open
                each u:
                    use convert
                    each r:
                        e = ld_f32(x{r} + (i + {16 * u}) * 4)
                        each j:
                            part{j}_{r} = fma(v{j}, e, part{j}_{r})
            for i in range(full, end, 16):
                each j:
                    v{j} = ld_e4m3_tail(w{j} + i, end - i)
                each r:
                    e = ld_f32_tail(x{r} + i * 4, end - i)
                    each j:
                        part{j}_{r} = fma(v{j}, e, part{j}_{r})
            each j:
                scale = mul(splat_at(s{j} + block * 4), splat(np.float32(256.0)))
                each r:
                    sum{j}_{r} = fma(part{j}_{r}, scale, sum{j}_{r})
        each j:
            to{j} = at{j} * 4
        each r:
            st1_hsum4(y{r} + to0, y{r} + to1, y{r} + to2, y{r} + to3, sum0_{r}, sum1_{r}, sum2_{r}, sum3_{r})
"""

# Two ways to the same float32 weights: converting 32 codes at once is 8 % faster, but takes registers that 6 rows need.
PAIRS = {
    "open": """
each j:
    h{j} = ld_e4m3x32(w{j} + i)
""",
    "convert": """
each j:
    v{j} = {("low", "high")[u]}_half(h{j})
""",
}
SINGLES = {
    "open": "",
    "convert": """
each j:
    v{j} = ld_e4m3(w{j} + i + {16 * u})
""",
}

# Prepared rows (packing.py): codes | scales | corrections. The integer sum starts at the correction, which takes the
# weights' offset off exactly; two integer chains hide the latency.
INT8 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    size = groups * 1024 + 64
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    use blocks
        each j:
            each r:
                sum{j}_{r} = zero_f()
        for g in range(groups):
            use ahead
            each j:
                each r:
                    dot{j}_0_{r} = splat_i32_at(x{r} + groups * 68 + g * 4)
                    dot{j}_1_{r} = zero_i()
            each u:
                each j:
                    prefetch(f{j} + {64 * u})
                    v{j} = ld_b(w{j} + {64 * u})
                each r:
                    e = as_bytes(splat_i32_at(x{r} + g * 64 + {4 * u}))
                    each j:
                        dot{j}_{u % 2}_{r} = dpbusd(dot{j}_{u % 2}_{r}, v{j}, e)
            each r:
                e = splat_at(x{r} + groups * 64 + g * 4)
                each j:
                    sum{j}_{r} = fma(to_f32(add_i(dot{j}_0_{r}, dot{j}_1_{r})), e, sum{j}_{r})
            each j:
                w{j} += 1024
        each j:
            scale = ld_f32(w{j})
            each r:
                total = mul(sum{j}_{r}, scale)
                use store
"""

INT4 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    size = groups * 576
    low = splat_b(15)
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    part = ((j1 - j0 + 15) // 16 + {J - 1}) // {J} * 16
    for top in range(j0, j0 + part, 16):
        each j:
            top{j} = min(top + {j} * part, (j1 - 1) // 16 * 16)
            w{j} = w + top{j} // 16 * size
            each r:
                sum{j}_{r} = zero_f()
        for g in range(groups):
            each j:
                prefetch(w{j} + 512 + {AHEAD})
                each r:
                    dot{j}_0_{r} = splat_i32_at(x{r} + groups * 68 + g * 4)
                    dot{j}_1_{r} = zero_i()
            each u:
                each j:
                    prefetch(w{j} + {64 * u} + {AHEAD})
                    v = ld_b(w{j} + {64 * u})
                    low{j} = and_b(v, low)
                    high{j} = high_nibbles(v)
                each r:
                    e = as_bytes(splat_i32_at(x{r} + g * 64 + {8 * u}))
                    each j:
                        dot{j}_0_{r} = dpbusd(dot{j}_0_{r}, low{j}, e)
                    e = as_bytes(splat_i32_at(x{r} + g * 64 + {8 * u + 4}))
                    each j:
                        dot{j}_1_{r} = dpbusd(dot{j}_1_{r}, high{j}, e)
            each r:
                e = splat_at(x{r} + groups * 64 + g * 4)
                each j:
                    scale = mul(ld_f32(w{j} + 512), e)
                    sum{j}_{r} = fma(to_f32(add_i(dot{j}_0_{r}, dot{j}_1_{r})), scale, sum{j}_{r})
            each j:
                w{j} += 576
        each j:
            each r:
                st_f32_tail(y{r} + top{j} * 4, sum{j}_{r}, j1 - top{j})
"""

# The same weights with float32 activations (COLI_ACT=f32): a code is cut out of its lane and made a float32.
INT8F = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    sign = splat_b(128)
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    use block
        each r:
            each u:
                sum{u}_{r} = zero_f()
        for q in range(k // 4):
            prefetch(p + q * 64 + {AHEAD})
            v = xor_b(ld_b(p + q * 64), sign)
            each u:
                c = field(v, {24 - 8 * u}, 24)
                each r:
                    sum{u}_{r} = fma(c, splat_at(x{r} + q * 16 + {4 * u}), sum{u}_{r})
        for i in range(k - k % 4, k):
            v = xor_b(ld_b(p + i // 4 * 64), sign)
            c = field(v, 24 - i % 4 * 8, 24)
            each r:
                sum0_{r} = fma(c, splat_at(x{r} + i * 4), sum0_{r})
        scale = ld_f32(p + groups * 1024)
        each r:
            total = mul(add(add(sum0_{r}, sum1_{r}), add(sum2_{r}, sum3_{r})), scale)
            use store
"""

INT4F = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    sign = splat_b(136)
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    for top in range(j0, j1, 16):
        p = w + top // 16 * (groups * 576)
        each r:
            sum{r} = zero_f()
        for g in range(groups):
            each r:
                part0_{r} = zero_f()
                part1_{r} = zero_f()
            whole = min(k - g * 64, 64) // 8
            for q in range(whole):
                prefetch(p + q * 64 + {AHEAD})
                v = xor_b(ld_b(p + q * 64), sign)
                each u:
                    c = field(v, {28 - 8 * (u % 4) - 4 * (u // 4)}, 28)
                    each r:
                        part{u % 2}_{r} = fma(c, splat_at(x{r} + g * 256 + q * 32 + {4 * u}), part{u % 2}_{r})
            for i in range(whole * 8, min(k - g * 64, 64)):
                v = xor_b(ld_b(p + i // 8 * 64), sign)
                c = field(v, 28 - i % 4 * 8 - i % 8 // 4 * 4, 28)
                each r:
                    part0_{r} = fma(c, splat_at(x{r} + (g * 64 + i) * 4), part0_{r})
            scale = ld_f32(p + 512)
            each r:
                sum{r} = fma(add(part0_{r}, part1_{r}), scale, sum{r})
            p += 576
        each r:
            st_f32_tail(y{r} + top * 4, sum{r}, j1 - top)
"""


def _natural(load: str, width: int, rows: int, access: Mapping[str, str]) -> str:
    values = {"J": 4, "U": 2, "AHEAD": 2048, "load": load, "width": width, **access}
    return unroll(NATURAL, {"r": rows, "j": 4, "u": 2, "line": width // 2}, values)


def _fp8(rows: int, access: Mapping[str, str]) -> str:
    weights = PAIRS if rows <= 4 else SINGLES
    return unroll(FP8, {"r": rows, "j": 4, "u": 2}, {"J": 4, "U": 2, "AHEAD": 2048, "width": 1, **weights, **access})


def _n16(template: str, vectors: int, rows: int, access: Mapping[str, str]) -> str:
    return unroll(template, {"r": rows, "j": 2, "u": vectors}, {"J": 2, "AHEAD": 4096, **access})


SOURCES: dict[str, Callable[[int], str]] = {
    "f32": lambda rows: _natural("ld_f32", 4, rows, ROWS),
    "f16": lambda rows: _natural("ld_f16", 2, rows, ROWS),
    "bf16": lambda rows: _natural("ld_bf16", 2, rows, ROWS),
    "fp8": lambda rows: _fp8(rows, ROWS),
    "int8": lambda rows: _n16(INT8, 16, rows, BLOCKS),
    "int4": lambda rows: _n16(INT4, 8, rows, {}),
    "int8f": lambda rows: _n16(INT8F, 4, rows, BLOCK),
    "int4f": lambda rows: _n16(INT4F, 8, rows, {}),
    "listed_f32": lambda rows: _natural("ld_f32", 4, rows, LISTED_ROWS),
    "listed_f16": lambda rows: _natural("ld_f16", 2, rows, LISTED_ROWS),
    "listed_bf16": lambda rows: _natural("ld_bf16", 2, rows, LISTED_ROWS),
    "listed_fp8": lambda rows: _fp8(rows, LISTED_ROWS),
    "listed_int8": lambda rows: _n16(INT8, 16, rows, LISTED_BLOCKS),
    "listed_int8f": lambda rows: _n16(INT8F, 4, rows, LISTED_BLOCK),
    **{kind: partial(tiles_blocked.source, kind) for kind in BLOCKED_KINDS},
    **{LISTED + kind: partial(tiles_blocked.source, kind, listed=True) for kind in BLOCKED_KINDS},
}


@cache
def tile(kind: str, rows: int) -> Callable:
    """The uncompiled tile of `kind` for exactly `rows` activation rows, named like `tile_bf16_6`."""
    name = f"tile_{kind}_{rows}"
    source = SOURCES[kind](rows).replace("def tile(", f"def {name}(", 1)
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace = vars(abi) | vars(simd) | vars(simd_blocked)
    exec(compile(source, filename, "exec"), namespace)
    function = namespace[name]
    function.source = source
    return function
