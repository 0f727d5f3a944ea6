"""The vector vocabulary: 16-lane LLVM vectors as first-class Numba values, so a kernel stays readable Python.

Every function here becomes one or two instructions. The vectors are plain LLVM types, not x86 intrinsics: a CPU
with AVX-512 gets one zmm instruction, one with AVX2 two ymm instructions, an ARM four NEON ones, with the *same
bits* (each lane's arithmetic and every reduction tree are fixed here). Only `dpbusd` and the table lookup
(kernels/simd_blocked.py) have x86 spellings of their own, VNNI and byte shuffles, beside a portable one; all are exact
integer arithmetic. So one kernel source serves every machine, and `COLI_SIMD=0` (compile for a CPU without AVX-512)
must reproduce the fast variant bit for bit (tests/kernels/test_portable.py).

Addresses are int64 (kernels/abi.py).
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic, models, register_model

from coli.kernels.abi import F32, I8, I16, I32, I64, call_llvm, memory, pointer

F16 = ir.HalfType()


class VecType(types.Type):
    """A Numba type for `lanes` values of LLVM type `element`."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.llvm)


VF = VecType("v16f32", F32, 16)
VI = VecType("v16i32", I32, 16)
VB = VecType("v64i8", I8, 64)
_LF, _LI, _LB = VF.llvm, VI.llvm, VB.llvm
_V16 = {16: ir.VectorType(I16, 16), 8: ir.VectorType(I8, 16)}
_MASK = ir.VectorType(ir.IntType(1), 16)


def has(feature: str) -> bool:
    """Does the CPU that Numba compiles for have this x86 feature? NUMBA_CPU_FEATURES decides where it is set (empty:
    no); NUMBA_CPU_NAME alone does not, because Numba adds the host's features to any name but "generic"."""
    settings: Any = config  # Numba fills this module at import
    if settings.CPU_FEATURES is not None:
        return "+" + feature in settings.CPU_FEATURES.split(",")
    return bool(settings.ENABLE_AVX) and llvm.get_host_cpu_features().get(feature, False)


def has_vnni() -> bool:
    """AVX-512 VNNI, for `dpbusd`."""
    return has("avx512vnni")


_VNNI = has_vnni()


def _const(vec: ir.VectorType, value) -> ir.Constant:
    return ir.Constant(vec, [value] * vec.count)


def _splat(b, value, lanes: int):
    vec = ir.VectorType(value.type, lanes)
    one = b.insert_element(ir.Constant(vec, ir.Undefined), value, I32(0))
    return b.shuffle_vector(one, ir.Constant(vec, ir.Undefined), _const(ir.VectorType(I32, lanes), 0))


def _shuffle(b, v, index):
    return b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), ir.Constant(ir.VectorType(I32, len(index)), index))


def _lane_mask(b, count):
    """Lanes 0..count-1 set."""
    lanes = ir.Constant(ir.VectorType(I64, 16), list(range(16)))
    return b.icmp_signed("<", lanes, _splat(b, count, 16))


def _masked_load(b, address, element, count):
    vec = ir.VectorType(element, 16)
    name = f"llvm.masked.load.v16{ {F32: 'f32', I16: 'i16', I8: 'i8'}[element] }.p0"
    zero = ir.Constant(vec, [0.0 if element is F32 else 0] * 16)
    ptr = pointer(b, address, vec)
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(vec, [ptr.type, I32, _MASK, vec]), name)
    return b.call(fn, [ptr, I32(1), _lane_mask(b, count), zero])


def _masked_store(b, address, v, count):
    ptr = pointer(b, address, _LF)
    fn = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_LF, ptr.type, I32, _MASK]), "llvm.masked.store.v16f32.p0"
    )
    b.call(fn, [v, ptr, I32(1), _lane_mask(b, count)])


def _load(b, args, element):
    if len(args) == 1:
        return b.load(pointer(b, args[0], ir.VectorType(element, 16)), align=1)
    return _masked_load(b, args[0], element, args[1])


def _loader(element, widen):
    """Two intrinsics: all 16 lanes, and the first `count` lanes with zeros behind (a row's tail)."""

    @intrinsic
    def full(typingctx, address):
        return VF(types.intp), lambda ctx, b, s, a: widen(b, _load(b, a, element))

    @intrinsic
    def tail(typingctx, address, count):
        return VF(types.intp, types.intp), lambda ctx, b, s, a: widen(b, _load(b, a, element))

    return full, tail


def _from_bf16(b, v):
    return b.bitcast(b.shl(b.zext(v, _LI), _const(_LI, 16)), _LF)


def _from_f16(b, v):
    return b.fpext(b.bitcast(v, ir.VectorType(F16, 16)), _LF)


def _from_e4m3(b, v):
    # sign to the top, exponent and mantissa to f16's places: the value times 2**-8, subnormals included, without
    # ever building a float32 denormal (kernels.md section 3). Codes 0x7F and 0xFF (NaN) are refused at load.
    half = b.and_(b.shl(b.sext(v, _V16[16]), _const(_V16[16], 7)), _const(_V16[16], 0xBFFF - 65536))
    return b.fpext(b.bitcast(half, ir.VectorType(F16, 16)), _LF)


ld_f32, ld_f32_tail = _loader(F32, lambda b, v: v)
ld_bf16, ld_bf16_tail = _loader(I16, _from_bf16)
ld_f16, ld_f16_tail = _loader(I16, _from_f16)
ld_e4m3, ld_e4m3_tail = _loader(I8, _from_e4m3)  # times 2**-8


ld_b, _ = memory(VB, _LB)  # 64 bytes
_, st_f32 = memory(VF, _LF)


@intrinsic
def st_f32_tail(typingctx, address, v, count):
    def gen(ctx, b, s, a):
        _masked_store(b, a[0], a[1], a[2])
        return ctx.get_dummy_value()

    return types.void(types.intp, VF, types.intp), gen


@intrinsic
def splat(typingctx, x):
    return VF(types.float32), lambda ctx, b, s, a: _splat(b, a[0], 16)


@intrinsic
def splat_at(typingctx, address):
    """The float32 at `address` in every lane (folds into an embedded broadcast)."""
    return VF(types.intp), lambda ctx, b, s, a: _splat(b, b.load(pointer(b, a[0], F32), align=1), 16)


@intrinsic
def splat_i32_at(typingctx, address):
    return VI(types.intp), lambda ctx, b, s, a: _splat(b, b.load(pointer(b, a[0], I32), align=1), 16)


@intrinsic
def zero_f(typingctx):
    return VF(), lambda ctx, b, s, a: _const(_LF, 0.0)


@intrinsic
def zero_i(typingctx):
    return VI(), lambda ctx, b, s, a: _const(_LI, 0)


@intrinsic
def fma(typingctx, x, y, z):
    """x*y + z; one rounding where the CPU has FMA (every CPU of the last ten years)."""
    return VF(VF, VF, VF), lambda ctx, b, s, a: call_llvm(b, "llvm.fmuladd.v16f32", _LF, a)


def _binary(op: str, vec: VecType):
    @intrinsic
    def fn(typingctx, x, y):
        return vec(vec, vec), lambda ctx, b, s, a: getattr(b, op)(a[0], a[1])

    return fn


add, sub, mul, div = (_binary(op, VF) for op in ("fadd", "fsub", "fmul", "fdiv"))
add_i = _binary("add", VI)
and_b, xor_b = _binary("and_", VB), _binary("xor", VB)


def _choose(op: str):
    @intrinsic
    def fn(typingctx, x, y):
        return VF(VF, VF), lambda ctx, b, s, a: b.select(b.fcmp_ordered(op, a[0], a[1]), a[0], a[1])

    return fn


vmax, vmin = _choose(">"), _choose("<")  # a NaN in x gives y


@intrinsic
def vabs(typingctx, x):
    return VF(VF), lambda ctx, b, s, a: call_llvm(b, "llvm.fabs.v16f32", _LF, a)


@intrinsic
def to_f32(typingctx, x):
    return VF(VI), lambda ctx, b, s, a: b.sitofp(a[0], _LF)


@intrinsic
def as_bytes(typingctx, x):
    return VB(VI), lambda ctx, b, s, a: b.bitcast(a[0], _LB)


@intrinsic
def splat_b(typingctx, x):
    """One byte value in all 64 lanes."""
    return VB(types.int64), lambda ctx, b, s, a: _splat(b, b.trunc(a[0], I8), 64)


@intrinsic
def high_nibbles(typingctx, x):
    """The upper four bits of every byte."""
    return VB(VB), lambda ctx, b, s, a: b.lshr(a[0], _const(_LB, 4))


@intrinsic
def dpbusd(typingctx, acc, u8, s8):
    """acc[i] + sum over j < 4 of u8[4i+j] * s8[4i+j], exact in int32."""

    def vnni(ctx, b, s, a):
        return call_llvm(b, "llvm.x86.avx512.vpdpbusd.512", _LI, a)

    def portable(ctx, b, s, a):
        out = a[0]
        for j in range(4):
            lanes = list(range(j, 64, 4))
            out = b.add(out, b.mul(b.zext(_shuffle(b, a[1], lanes), _LI), b.sext(_shuffle(b, a[2], lanes), _LI)))
        return out

    return VI(VI, VB, VB), vnni if _VNNI else portable


@intrinsic
def hsum(typingctx, v):
    """Sum of the lanes in a fixed tree: 16 -> 8 -> 4 -> 2 -> 1."""

    def gen(ctx, b, s, a):
        v, n = a[0], 16
        while n > 1:
            n //= 2
            v = b.fadd(_shuffle(b, v, list(range(n))), _shuffle(b, v, list(range(n, 2 * n))))
        return b.extract_element(v, I32(0))

    return types.float32(VF), gen


@intrinsic
def hmax(typingctx, v):
    def gen(ctx, b, s, a):
        v, n = a[0], 16
        while n > 1:
            n //= 2
            x, y = _shuffle(b, v, list(range(n))), _shuffle(b, v, list(range(n, 2 * n)))
            v = b.select(b.fcmp_ordered(">", x, y), x, y)
        return b.extract_element(v, I32(0))

    return types.float32(VF), gen


@intrinsic
def lane0(typingctx, v):
    return types.float32(VF), lambda ctx, b, s, a: b.extract_element(a[0], I32(0))


@intrinsic
def lane(typingctx, v, i):
    """Lane i, 0..15, of v."""
    return types.float32(VF, types.int64), lambda ctx, b, s, a: b.extract_element(a[0], a[1])


@intrinsic
def where_ge(typingctx, x, y, v):
    """v in the lanes where x >= y, 0 in the others (a NaN is not)."""

    def gen(ctx, b, s, a):
        return b.select(b.fcmp_ordered(">=", a[0], a[1]), a[2], _const(_LF, 0.0))

    return VF(VF, VF, VF), gen


@intrinsic
def _scale_by_power(typingctx, x, n):
    """x * 2**n for a whole-numbered n (given as float32) between -126 and 127."""

    def gen(ctx, b, s, a):
        bits = b.shl(b.add(b.fptosi(a[1], _LI), _const(_LI, 127)), _const(_LI, 23))
        return b.fmul(a[0], b.bitcast(bits, _LF))

    return VF(VF, VF), gen


_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to the nearest whole number


@njit(inline="always")
def vexp(x):
    """e**x, relative error below 2e-7 (range reduction and the Cephes expf polynomial); x is clamped to +-87, a NaN
    stays one (it has to reach the check of stream_inject)."""
    x = vmin(splat(np.float32(87.0)), vmax(splat(np.float32(-87.0)), x))
    n = sub(add(mul(x, splat(np.float32(1.44269504088896341))), splat(_ROUND)), splat(_ROUND))
    r = fma(n, splat(np.float32(-0.693359375)), x)
    r = fma(n, splat(np.float32(2.12194440e-4)), r)
    p = fma(splat(np.float32(1.9875691500e-4)), r, splat(np.float32(1.3981999507e-3)))
    p = fma(p, r, splat(np.float32(8.3334519073e-3)))
    p = fma(p, r, splat(np.float32(4.1665795894e-2)))
    p = fma(p, r, splat(np.float32(1.6666665459e-1)))
    p = fma(p, r, splat(np.float32(5.0000001201e-1)))
    p = add(fma(p, mul(r, r), r), splat(np.float32(1.0)))
    return _scale_by_power(p, n)


@njit(inline="always")
def vsigmoid(x):
    one = splat(np.float32(1.0))
    return div(one, add(one, vexp(sub(zero_f(), x))))


@njit(inline="always")
def exp1(x):
    """Scalar e**x with the vector function's bits."""
    return lane0(vexp(splat(x)))


@njit(inline="always")
def sigmoid1(x):
    return lane0(vsigmoid(splat(x)))


@intrinsic
def prefetch(typingctx, address):
    def gen(ctx, b, s, a):
        ptr = pointer(b, a[0], I8)
        fn = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(ir.VoidType(), [ptr.type, I32, I32, I32]), "llvm.prefetch.p0"
        )
        b.call(fn, [ptr, I32(0), I32(3), I32(1)])
        return ctx.get_dummy_value()

    return types.void(types.intp), gen




# ---- for the linear tiles --------------------------------------------------------------------------------------
@intrinsic
def st_i8(typingctx, address, v):
    """Store the lanes, whole numbers between -128 and 127, as 16 bytes."""
    vec = ir.VectorType(I8, 16)

    def gen(ctx, b, s, a):
        b.store(b.trunc(b.fptosi(a[1], _LI), vec), pointer(b, a[0], vec), align=1)
        return ctx.get_dummy_value()

    return types.void(types.intp, VF), gen


@intrinsic
def field(typingctx, x, left, right):
    """The signed bit field of each 32-bit lane that `left` shifts to the top and `right` down to the bottom."""

    def gen(ctx, b, s, a):
        left, right = (_splat(b, b.trunc(n, I32), 16) for n in a[1:])
        return b.sitofp(b.ashr(b.shl(b.bitcast(a[0], _LI), left), right), _LF)

    return VF(VB, types.int64, types.int64), gen


def _hsums(b, v):
    """hsum of four vectors in lanes 0, 4, 8 and 12: `hsum`'s own tree for each, the shuffles shared."""

    def pair(x, y, part):  # of every `part` long piece the lower half plus the upper half, x's then y's
        low = [i + j for i in range(0, 16, part) for j in range(part // 2)]
        both = low + [16 + i for i in low]
        index = ir.VectorType(I32, 16)
        return b.fadd(
            b.shuffle_vector(x, y, ir.Constant(index, both)),
            b.shuffle_vector(x, y, ir.Constant(index, [i + part // 2 for i in both])),
        )

    out = pair(pair(v[0], v[1], 16), pair(v[2], v[3], 16), 8)  # 4 lanes each of v0, v1, v2, v3
    for step in (2, 1):
        out = b.fadd(out, _shuffle(b, out, [i ^ step for i in range(16)]))
    return out


@intrinsic
def st_hsum4(typingctx, address, v0, v1, v2, v3):
    """Store hsum(v0..v3), four floats, at `address`."""

    def gen(ctx, b, s, a):
        four = _shuffle(b, _hsums(b, a[1:]), [0, 4, 8, 12])
        b.store(four, pointer(b, a[0], four.type), align=1)
        return ctx.get_dummy_value()

    return types.void(types.intp, VF, VF, VF, VF), gen


@intrinsic
def st1_hsum4(typingctx, a0, a1, a2, a3, v0, v1, v2, v3):
    """Store hsum(v0..v3), each float at an address of its own."""

    def gen(ctx, b, s, a):
        sums = _hsums(b, a[4:])
        for i in range(4):
            b.store(b.extract_element(sums, I32(4 * i)), pointer(b, a[i], F32), align=1)
        return ctx.get_dummy_value()

    return types.void(*[types.intp] * 4, *[VF] * 4), gen


@intrinsic
def bits_gt(typingctx, x, y):
    """Bit i is set where x[i] > y[i]."""

    def gen(ctx, b, s, a):
        return b.zext(b.bitcast(b.fcmp_ordered(">", a[0], a[1]), I16), I64)

    return types.int64(VF, VF), gen


@intrinsic
def popcount(typingctx, x):
    return types.int64(types.int64), lambda ctx, b, s, a: b.ctpop(a[0])


@intrinsic
def lowest_bit(typingctx, x):
    """Index of the lowest set bit (64 when there is none)."""
    return types.int64(types.int64), lambda ctx, b, s, a: b.cttz(a[0], ir.Constant(ir.IntType(1), 0))


@intrinsic
def f32_of_bits(typingctx, x):
    """The float32 with these bits (taken from the low half of an int64)."""
    return types.float32(types.int64), lambda ctx, b, s, a: b.bitcast(b.trunc(a[0], I32), F32)


@intrinsic
def ld_part(typingctx, address, count):
    """16 floats, or the first `count` with zeros behind where fewer are left."""

    def gen(ctx, b, s, a):
        with b.if_else(b.icmp_signed(">=", a[1], I64(16))) as (whole, tail):
            with whole:
                full = b.load(pointer(b, a[0], _LF), align=1)
                from_whole = b.block
            with tail:
                part = _masked_load(b, a[0], F32, a[1])
                from_tail = b.block
        out = b.phi(_LF)
        out.add_incoming(full, from_whole)
        out.add_incoming(part, from_tail)
        return out

    return VF(types.intp, types.intp), gen


@intrinsic
def st_part(typingctx, address, v, count):
    """Store 16 floats, or the first `count` where fewer are left."""

    def gen(ctx, b, s, a):
        with b.if_else(b.icmp_signed(">=", a[2], I64(16))) as (whole, tail):
            with whole:
                b.store(a[1], pointer(b, a[0], _LF), align=1)
            with tail:
                _masked_store(b, a[0], a[1], a[2])
        return ctx.get_dummy_value()

    return types.void(types.intp, VF, types.intp), gen


@njit(inline="always")
def vsilu(x):
    return mul(x, vsigmoid(x))


@intrinsic
def first_lanes(typingctx, v, count):
    """The first `count` lanes of v, zeros behind."""
    return VF(VF, types.intp), lambda ctx, b, s, a: b.select(_lane_mask(b, a[1]), a[0], _const(_LF, 0.0))


VH = VecType("v32f16", F16, 32)


@intrinsic
def ld_e4m3x32(typingctx, address):
    """32 e4m3 codes as float16, times 2**-8: what ld_e4m3 gives for both halves, with fewer instructions."""
    bytes32, words = ir.VectorType(I8, 32), ir.VectorType(I16, 32)

    def gen(ctx, b, s, a):
        wide = b.sext(b.load(pointer(b, a[0], bytes32), align=1), words)
        half = b.and_(b.shl(wide, _const(words, 7)), _const(words, 0xBFFF - 65536))
        return b.bitcast(half, VH.llvm)

    return VH(types.intp), gen


def _half(first: int):
    @intrinsic
    def fn(typingctx, x):
        return VF(VH), lambda ctx, b, s, a: b.fpext(_shuffle(b, a[0], list(range(first, first + 16))), _LF)

    return fn


low_half, high_half = _half(0), _half(16)  # 16 of the 32 float16 as float32
