"""GEMV tiles: y[r][j] = sum_i W[j, i] * x[r][i] for a few activation rows r, unrolled from short templates.

    tile(w, s, xs, ys, j0, j1, n, k, a, b)     all int64, nothing returned

    w, s       addresses of the weights and, for FP8, of the scales
    xs, ys     addresses of R int64 addresses: rows of x (float32; prepared rows for int8 and int4) and rows of y
    j0, j1     weight rows to do; a block of rows never reaches beyond j1, so threads never write each other's rows
    n, k       rows and columns of the weight; a, b: rows and columns of an FP8 scale block

*Invariant*: every (weight row, activation row) has accumulators of its own, and the order of additions depends on k
(and b) only. More activation rows only add accumulators: a row has the same bits in every tile, next to any other row
and for any split j0..j1 (tests/kernels/test_linear.py, bitwise). No fastmath, one fixed tree for horizontal sums.

*Layouts* (kernels/packing.py). Natural rows: lanes run along k, J weight rows at a time so that one load of x serves
J of them; while J rows are computed the next J are prefetched front to back, as the one stream that they are in memory
(prefetching each row beside itself, J streams, reads 10 % slower). N16: 16 weight rows side by side in the lanes, x is
broadcast, no horizontal sums, one stream anyway, prefetched 4 KB ahead.

*Templates*: an `each r:` line repeats its indented block with {r} = 0..R-1 (j: weight rows, u: vectors of one pass);
{expression} is evaluated, everything else is plain Python of the vector vocabulary (kernels/simd.py). A tile keeps
its unrolled text in `.source`, and tracebacks show it.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping
from functools import cache

from coli.kernels import simd

NATURAL = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    row = k * {width}
    full = k - k % {16 * U}
    for top in range(j0, j1, {J}):
        each j:
            w{j} = w + min(top + {j}, j1 - 1) * row
            each r:
                sum{j}_{r} = zero_f()
        next = w0 + {J} * row
        for i in range(0, full, {16 * U}):
            each line:
                prefetch(next + i * {J * width} + {64 * line})
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
        each r:
            each j:
                st1_f32(y{r} + min(top + {j}, j1 - 1) * 4, hsum(sum{j}_{r}))
"""

# The products of one scale block are summed alone and join the row's sum times the scale (and times 2**8, which
# ld_e4m3 leaves out).
FP8 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    blocks = (k + b - 1) // b
    for top in range(j0, j1, {J}):
        each j:
            w{j} = w + min(top + {j}, j1 - 1) * k
            s{j} = s + min(top + {j}, j1 - 1) // a * blocks * 4
            each r:
                sum{j}_{r} = zero_f()
        next = w0 + {J} * k
        for block in range(blocks):
            first = block * b
            end = min(first + b, k)
            full = end - (end - first) % {16 * U}
            each j:
                each r:
                    part{j}_{r} = zero_f()
            for i in range(first, full, {16 * U}):
                each line:
                    prefetch(next + i * {J} + {64 * line})
                each u:
                    each j:
                        v{j} = ld_e4m3(w{j} + i + {16 * u})
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
        each r:
            each j:
                st1_f32(y{r} + min(top + {j}, j1 - 1) * 4, hsum(sum{j}_{r}))
"""

# Prepared rows (packing.py): codes | scales | corrections. The integer sum starts at the correction, which takes the
# weights' offset off exactly; two integer chains hide the latency.
INT8 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    for top in range(j0, j1, 16):
        p = w + top // 16 * (groups * 1024 + 64)
        each r:
            sum{r} = zero_f()
        for g in range(groups):
            each r:
                dot0_{r} = splat_i32_at(x{r} + groups * 68 + g * 4)
                dot1_{r} = zero_i()
            each u:
                prefetch(p + {64 * u} + {AHEAD})
                v = ld_b(p + {64 * u})
                each r:
                    dot{u % 2}_{r} = dpbusd(dot{u % 2}_{r}, v, as_bytes(splat_i32_at(x{r} + g * 64 + {4 * u})))
            each r:
                sum{r} = fma(to_f32(add_i(dot0_{r}, dot1_{r})), splat_at(x{r} + groups * 64 + g * 4), sum{r})
            p += 1024
        scale = ld_f32(p)
        each r:
            st_f32_tail(y{r} + top * 4, mul(sum{r}, scale), j1 - top)
"""

INT4 = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    low = splat_b(15)
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    for top in range(j0, j1, 16):
        p = w + top // 16 * (groups * 576)
        each r:
            sum{r} = zero_f()
        for g in range(groups):
            prefetch(p + 512 + {AHEAD})
            each r:
                dot0_{r} = splat_i32_at(x{r} + groups * 68 + g * 4)
                dot1_{r} = zero_i()
            each u:
                prefetch(p + {64 * u} + {AHEAD})
                v = ld_b(p + {64 * u})
                v0 = and_b(v, low)
                v1 = high_nibbles(v)
                each r:
                    dot0_{r} = dpbusd(dot0_{r}, v0, as_bytes(splat_i32_at(x{r} + g * 64 + {8 * u})))
                    dot1_{r} = dpbusd(dot1_{r}, v1, as_bytes(splat_i32_at(x{r} + g * 64 + {8 * u + 4})))
            each r:
                scale = mul(ld_f32(p + 512), splat_at(x{r} + groups * 64 + g * 4))
                sum{r} = fma(to_f32(add_i(dot0_{r}, dot1_{r})), scale, sum{r})
            p += 576
        each r:
            st_f32_tail(y{r} + top * 4, sum{r}, j1 - top)
"""

# The same weights with float32 activations (COLI_ACT=f32): a code is cut out of its lane and made a float32.
INT8F = """
def tile(w, s, xs, ys, j0, j1, n, k, a, b):
    groups = (k + 63) // 64
    sign = splat_b(128)
    each r:
        x{r} = ai(xs, {r})
        y{r} = ai(ys, {r})
    for top in range(j0, j1, 16):
        p = w + top // 16 * (groups * 1024 + 64)
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
            total = add(add(sum0_{r}, sum1_{r}), add(sum2_{r}, sum3_{r}))
            st_f32_tail(y{r} + top * 4, mul(total, scale), j1 - top)
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


def unroll(template: str, counts: Mapping[str, int], values: Mapping[str, object]) -> str:
    """Repeat every `each name:` block counts[name] times and evaluate the {expressions}, `values` at hand."""
    return "\n".join(_unroll(template.strip("\n").split("\n"), counts, dict(values))) + "\n"


def _unroll(lines: list[str], counts: Mapping[str, int], values: dict[str, object]) -> list[str]:
    out: list[str] = []
    while lines:
        line, lines = lines[0], lines[1:]
        each = re.fullmatch(r"( *)each (\w+):", line)
        if not each:
            out.append(re.sub(r"\{([^}]*)\}", lambda m: str(eval(m[1], {}, values)), line))
            continue
        size = next((i for i, body in enumerate(lines) if not body.startswith(each[1] + "    ")), len(lines))
        body, lines = [text[4:] for text in lines[:size]], lines[size:]
        for number in range(counts[each[2]]):
            out += _unroll(body, counts, {**values, each[2]: number})
    return out


def _natural(template: str, load: str, width: int, rows: int) -> str:
    # 4 weight rows and 6 activation rows fill 24 of the 32 vector registers; 32 weights a pass
    counts = {"r": rows, "j": 4, "u": 2, "line": 2 * width}  # lines: 4 rows x 32 weights x width / 64 bytes
    return unroll(template, counts, {"J": 4, "U": 2, "load": load, "width": width})


def _n16(template: str, vectors: int, rows: int) -> str:
    return unroll(template, {"r": rows, "u": vectors}, {"AHEAD": 4096})


SOURCES: dict[str, Callable[[int], str]] = {
    "f32": lambda rows: _natural(NATURAL, "ld_f32", 4, rows),
    "f16": lambda rows: _natural(NATURAL, "ld_f16", 2, rows),
    "bf16": lambda rows: _natural(NATURAL, "ld_bf16", 2, rows),
    "fp8": lambda rows: _natural(FP8, "ld_e4m3", 1, rows),
    "int8": lambda rows: _n16(INT8, 16, rows),
    "int4": lambda rows: _n16(INT4, 8, rows),
    "int8f": lambda rows: _n16(INT8F, 4, rows),
    "int4f": lambda rows: _n16(INT4F, 8, rows),
}


@cache
def tile(kind: str, rows: int) -> Callable:
    """The uncompiled tile of `kind` for exactly `rows` activation rows, named like `tile_bf16_6`."""
    name = f"tile_{kind}_{rows}"
    source = SOURCES[kind](rows).replace("def tile(", f"def {name}(", 1)
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace = dict(vars(simd))
    exec(compile(source, filename, "exec"), namespace)
    function = namespace[name]
    function.source = source
    return function
