"""tcgen05.mma on tiles as ``common.tma.tile_layout`` lays them: descriptors and instructions.

A tile (rows, columns) of 16-bit elements lies in shared memory in blocks of 64, 32 or 16 columns, whose rows of 128, 64 or 32 bytes are
swizzled by as much: TMA writes it so, and the tensor core reads it so. Formats: PTX ISA, sections "Shared memory descriptor" and
"Instruction descriptor" of tcgen05.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.config import ELEMENT_BYTES, swizzle_columns

K_STEP = 16
"""Elements of K that one instruction multiplies, for 16-bit operands."""

_SWIZZLE = {128: 2, 64: 4, 32: 6}  # descriptor's code by bytes of a swizzled row
_VERSION = 1 << 46


def _fields(width: int, leading: int) -> int:
    """A descriptor without its start address: rows of ``width`` elements in groups of eight, ``leading`` bytes between column blocks."""
    row = width * ELEMENT_BYTES
    return (leading >> 4) << 16 | (8 * row >> 4) << 32 | _VERSION | _SWIZZLE[row] << 61


def descriptor(tile: Int32, rows: int, columns: int) -> Int64:
    """Descriptor of the tile at shared-memory address ``tile``, whichever of its dimensions is K."""
    width = swizzle_columns(columns)
    start = Int64((tile & 0x3FFFF) >> 4)
    constant = _fields(width, rows * width * ELEMENT_BYTES)
    return start | Int64(constant - (1 << 64) if constant >> 63 else constant)


def k_offset(rows: int, columns: int, along_rows: bool, step: int) -> int:
    """What a step of ``K_STEP`` elements along K adds to a descriptor; K runs along a row, or ``along_rows`` from row to row."""
    width = swizzle_columns(columns)
    row = width * ELEMENT_BYTES
    if along_rows:
        return step * K_STEP * row >> 4
    block, within = divmod(step * K_STEP, width)
    return block * rows * row + within * ELEMENT_BYTES >> 4


def n_offset(rows: int, columns: int, k_along_rows: bool, first: int) -> int:
    """What a descriptor gains where the other dimension, not K, begins at ``first``, at a swizzle atom (eight rows, or its width)."""
    assert first % (swizzle_columns(columns) if k_along_rows else 8) == 0
    return first * (rows if k_along_rows else swizzle_columns(columns)) * ELEMENT_BYTES >> 4


def instruction(dtype: Any, m: int, n: int, b_along_rows: bool = False, a_along_rows: bool = False) -> int:
    """Instruction descriptor of kind f16: A (m, K), B (n, K) of ``dtype``, float32 sums; K along a row of their tiles, or across."""
    kind = {cutlass.Float16: 0, cutlass.BFloat16: 1}[dtype]
    return 1 << 4 | kind << 7 | kind << 10 | int(a_along_rows) << 15 | int(b_along_rows) << 16 | n // 8 << 17 | m // 16 << 24


NEGATE_A = 1 << 13
"""Bit of an instruction descriptor: the product with -A."""


@cute.jit
def fence_before_sync() -> None:
    """Before a thread hands on what it did in tensor memory (PTX ISA, section "tcgen05.fence")."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


@cute.jit
def fence_after_sync() -> None:
    """After a thread waited for what others did in tensor memory."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


_MULTIPLY = (
    "{{ .reg .pred keep; setp.ne.b32 keep, {{$r4}}, 0; tcgen05.mma.cta_group::{ctas}.kind::f16 [{{$r0}}], {a}, {{$r2}}, {{$r3}}, keep; }}"
)


@cute.jit
def multiply_ss(d: Int32, a: Int64, b: Int64, instruction: Int32, accumulate: Int32, ctas: cutlass.Constexpr[int] = 1) -> None:
    """D (+)= A B^T: D in tensor memory, A and B in shared memory; for one elected thread.

    With 2 ``ctas``, for a thread of the even one, each CTA of the pair has half the rows of A, B and D, at the same offsets.
    """
    cute.arch.inline_ptx(_MULTIPLY.format(a="{$r1}", ctas=ctas), read_only_args=[d, a, b, instruction, accumulate])


@cute.jit
def multiply_ts(d: Int32, a: Int32, b: Int64, instruction: Int32, accumulate: Int32, ctas: cutlass.Constexpr[int] = 1) -> None:
    """D (+)= A B^T with A in tensor memory."""
    cute.arch.inline_ptx(_MULTIPLY.format(a="[{$r1}]", ctas=ctas), read_only_args=[d, a, b, instruction, accumulate])
