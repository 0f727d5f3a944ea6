"""More of the vector vocabulary (kernels/simd.py): what only the tiles of block-quantised weights need.

Words for scales that are packed into a few bits of a 32-bit lane, words for codes whose high bits lie apart, and the
table of the iq4 types as byte shuffles (AVX-512 or AVX2) or, anywhere else, as a choice by the index's bits: the same
values, so the same bits (tests/kernels/test_portable.py).
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from coli.kernels.abi import I8, I16, I32, call_llvm, memory, pointer
from coli.kernels.blocked import IQ4
from coli.kernels.simd import VB, VI, _binary, _const, _shuffle, _splat, has  # the private ones: this is its other half

_LI, _LB = VI.llvm, VB.llvm
_SHUFFLED = 64 if has("avx512bw") else 32 if has("avx2") else 0  # bytes that one table lookup serves

ld_i32, _ = memory(VI, _LI)
and_i, or_i = _binary("and_", VI), _binary("or_", VI)
or_b, sub_b = _binary("or_", VB), _binary("sub", VB)


@intrinsic
def splat_i(typingctx, x):
    return VI(types.int64), lambda ctx, b, s, a: _splat(b, b.trunc(a[0], I32), 16)


@intrinsic
def splat_i16_at(typingctx, address):
    return VI(types.intp), lambda ctx, b, s, a: _splat(b, b.sext(b.load(pointer(b, a[0], I16), align=1), I32), 16)


@intrinsic
def ld_u16(typingctx, address):
    """16 unsigned words as int32."""
    words = ir.VectorType(I16, 16)
    return VI(types.intp), lambda ctx, b, s, a: b.zext(b.load(pointer(b, a[0], words), align=1), _LI)


def _shift(op: str):
    @intrinsic
    def fn(typingctx, x, n):
        return VI(VI, types.int64), lambda ctx, b, s, a: getattr(b, op)(a[0], _splat(b, b.trunc(a[1], I32), 16))

    return fn


shl_i, shr_i = _shift("shl"), _shift("lshr")  # of every lane by the same 0..31 bits; zeros come in


@intrinsic
def rotl_b(typingctx, x, n):
    """Every 32-bit lane rotated left by n, 0..31, bits."""

    def gen(ctx, b, s, a):
        lanes = b.bitcast(a[0], _LI)
        return b.bitcast(call_llvm(b, "llvm.fshl.v16i32", _LI, [lanes, lanes, _splat(b, b.trunc(a[1], I32), 16)]), _LB)

    return VB(VB, types.int64), gen


def _spread(first: int):
    """Bits first..first+3 of every 32-bit lane, each as bit 4 of one of the lane's bytes."""

    @intrinsic
    def fn(typingctx, x):
        def gen(ctx, b, s, a):
            bytes_ = _shuffle(b, a[0], [lane // 4 * 4 + first // 8 for lane in range(64)])
            bits = b.and_(bytes_, ir.Constant(_LB, [1 << (first % 8 + lane % 4) for lane in range(64)]))
            return b.select(b.icmp_unsigned("!=", bits, _const(_LB, 0)), _const(_LB, 16), _const(_LB, 0))

        return VB(VB), gen

    return fn


spread0, spread4, spread8, spread12, spread16, spread20, spread24, spread28 = (_spread(4 * i) for i in range(8))


def _byte_table(values: tuple[int, ...]):
    """lookup(x): values[x[i]] for bytes x[i] of 0..15."""

    def shuffled(b, x, name: str, width: int):
        part, out = ir.VectorType(I8, width), None
        table = ir.Constant(part, list(values) * (width // 16))
        for at in range(0, 64, width):
            piece = call_llvm(b, name, part, [table, _shuffle(b, x, list(range(at, at + width)))])
            out = piece if out is None else b.shuffle_vector(out, piece, _lanes(2 * width))
        return out

    def portable(b, x):
        """Four times halved by a bit of the index."""
        left = [_const(_LB, value) for value in values]
        for bit in (1, 2, 4, 8):
            odd = b.icmp_unsigned("!=", b.and_(x, _const(_LB, bit)), _const(_LB, 0))
            left = [b.select(odd, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
        return left[0]

    @intrinsic
    def fn(typingctx, x):
        def gen(ctx, b, s, a):
            if _SHUFFLED == 64:
                return shuffled(b, a[0], "llvm.x86.avx512.pshuf.b.512", 64)
            return shuffled(b, a[0], "llvm.x86.avx2.pshuf.b", 32) if _SHUFFLED else portable(b, a[0])

        return VB(VB), gen

    return fn


def _lanes(count: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, count), list(range(count)))


lookup_iq4 = _byte_table(tuple(value + 128 for value in IQ4))
