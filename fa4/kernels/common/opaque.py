"""Keeping loop-invariant address arithmetic where the hardware does it for free."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64


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
