"""What every kernel is made with besides vectors: its arguments, the step block, scalars in memory, its share of the
work, calls through an address, and the atomics the thread team meets with.

A kernel (op) is a plain function `(p, tid, nt)`: p is the address of its arguments (int64 cells; `ai` reads a number
or an address, `af` a float kept as float64 bits), tid this thread's number among nt. The *step block* holds what
changes from call to call, one int64 each: rows, position of the first row, first row whose logits are wanted, whether
the rows must be undoable.
"""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

F32, F64 = ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))


def call_llvm(b, name: str, ret, args):
    """Call the LLVM function or intrinsic `name`."""
    fn = cgutils.get_or_insert_function(b.module, ir.FunctionType(ret, [a.type for a in args]), name)
    return b.call(fn, args)


def pointer(b, address, to):
    """An integer address as a pointer to `to`."""
    return b.inttoptr(address, to.as_pointer())


def memory(nb_type, llvm_type):
    """(load, store) of one value, a scalar or a vector, at any address."""

    @intrinsic
    def load(typingctx, address):
        return nb_type(types.intp), lambda ctx, b, s, a: b.load(pointer(b, a[0], llvm_type), align=1)

    @intrinsic
    def store(typingctx, address, value):
        def gen(ctx, b, s, a):
            b.store(a[1], pointer(b, a[0], llvm_type), align=1)
            return ctx.get_dummy_value()

        return types.void(types.intp, nb_type), gen

    return load, store


ld1_f32, st1_f32 = memory(types.float32, F32)
ld1_i64, st1_i64 = memory(types.int64, I64)
ld1_i32, st1_i32 = memory(types.int32, I32)
_ld1_f64, _ = memory(types.float64, F64)


@njit(inline="always")
def ai(p, i):
    """Integer argument i of a kernel."""
    return ld1_i64(p + 8 * i)


@njit(inline="always")
def af(p, i):
    """Float argument i of a kernel."""
    return np.float32(_ld1_f64(p + 8 * i))


@njit(inline="always")
def share(total, tid, nt):
    """This thread's part [first, last) of `total` units of work: fixed by (total, tid, nt) alone."""
    return total * tid // nt, total * (tid + 1) // nt


@njit(inline="always")
def columns(n, tid, nt):
    """This thread's blocks [first, last) of 16 features out of n, in every row: those of the weight rows that `linear`
    gives it, so what works feature by feature needs no barrier behind a product."""
    return share((n + 15) // 16, tid, nt)


@njit(inline="always")
def block_end(ids, at, end):
    """The first place behind `at` of a list (int64, up to `end`) whose id lies in another block of 16 weight rows."""
    if at < end:
        block = ld1_i64(ids + 8 * at) >> 4
        while at < end and ld1_i64(ids + 8 * at) >> 4 == block:
            at += 1
    return at


@intrinsic
def load_acquire(typingctx, address):
    return types.int64(types.intp), lambda ctx, b, s, a: b.load_atomic(pointer(b, a[0], I64), "acquire", 8)


@intrinsic
def store_release(typingctx, address, value):
    def gen(ctx, b, s, a):
        b.store_atomic(a[1], pointer(b, a[0], I64), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.intp, types.int64), gen


@intrinsic
def exchange(typingctx, address, value):
    """Store `value`, return what was there; a full fence on both sides."""
    return types.int64(types.intp, types.int64), lambda ctx, b, s, a: b.atomic_rmw(
        "xchg", pointer(b, a[0], I64), a[1], "seq_cst"
    )


@intrinsic
def cpu_pause(typingctx):
    """Tell the core that this is a spin loop (x86; nothing elsewhere)."""
    x86 = llvm.get_default_triple().startswith(("x86", "i386", "i686", "amd64"))

    def gen(ctx, b, s, a):
        if x86:
            call_llvm(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return ctx.get_dummy_value()

    return types.void(), gen


@intrinsic
def call_kernel(typingctx, fn, p, tid, nt):
    """Call the compiled kernel at address `fn`."""

    def gen(ctx, b, s, a):
        b.call(pointer(b, a[0], ir.FunctionType(ir.VoidType(), [I64] * 3)), a[1:])
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 4), gen


@intrinsic
def call_tile(typingctx, fn, w, s, xs, ys, j0, j1, n, k, a, b):
    """Call the compiled GEMV tile at address `fn` (kernels/linear.py)."""

    def gen(ctx, b, s, args):
        b.call(pointer(b, args[0], ir.FunctionType(ir.VoidType(), [I64] * 10)), args[1:])
        return ctx.get_dummy_value()

    return types.void(*[types.int64] * 11), gen


@njit(inline="always")
def rows(step):
    """Rows of this call (cell 0 of the step block)."""
    return ld1_i64(step)


def _cell(index: int):
    @intrinsic
    def get(typingctx, step):
        return types.int64(types.int64), lambda ctx, b, s, a: b.load(
            pointer(b, b.add(a[0], I64(8 * index)), I64), align=1
        )

    return get


pos = _cell(1)  # position of the first row of this call
first = _cell(2)  # first row whose logits are wanted
undoable = _cell(3)  # 1 when the state after every row of this call must be kept


@njit(inline="always")
def in_row(u0, u1, r, units):
    """The part of the work [u0, u1) that lies in row r, where every row has `units` units."""
    return max(u0 - r * units, 0), min(u1 - r * units, units)
