"""Keeping cheap loop-invariant arithmetic inside the loop, so that its results take no registers through it."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@cute.jit
def opaque(address: Int32) -> Int32:
    """The same number, which the compiler must take as new at every trip of a loop.

    A shared-memory access adds a constant to its address register at no cost. NVVM however hoists ``address + constant`` out of the
    loop for every constant, and the dozens of registers that takes are spilled. A value it cannot know stays inside.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[address])


@cute.jit
def opaque64(address: Int64) -> Int64:
    """The same for addresses in global memory: sums of a pointer and a stride stay sums, multiples of the stride are not kept."""
    return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[address])


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The thread's index in x, read where it is asked for: what follows from it is computed again at every trip."""
    # cute.arch.inline_ptx cannot name a special register.
    read = llvm.inline_asm(
        T.i32(), [], "mov.u32 $0, %tid.x;", "=r", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip
    )
    return Int32(read)
