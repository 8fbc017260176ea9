"""Where things lie in shared memory, and which thread touches what: all of it known when the kernel is traced.

A tile of Q, K, V or O is rows x padded head dim, row by row inside column blocks of 64, 32 or 16 elements::

    block 0 (64 columns)              block 1
    row 0   c0 c1 c2 c3 c4 c5 c6 c7   row 0 ...        c = chunk of 8 elements (16 bytes)
    row 1   c1 c0 c3 c2 c5 c4 c7 c6                    chunk c of row r lies at place c ^ (r % 8)
    row 2   c2 c3 c0 c1 c6 c7 c4 c5
    ...

The eight chunks that one 8x8 matrix of an ldmatrix reads (a column of chunks, eight rows) and the eight that a quarter warp writes (a
row) then each touch all 32 banks once. Blocks of 32 and 16 columns put several rows in 128 bytes and swizzle by fewer bits.

Because the swizzle only permutes the chunks of a row, the address of a k16 step is the thread's first address with one exclusive or:
``at ^ (step % steps per block) * 32``, plus the constant offset of the block. That needs one register per operand.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from fa4.config import ELEMENT_BYTES, WARP, padded_head_dim, swizzle_columns

CHUNK = 8
"""Elements of a 16-byte copy, and of a row of an 8x8 matrix."""


def tile_layout(rows: int, head_dim: int) -> cute.ComposedLayout:
    """Swizzled layout (rows, padded head dim); column blocks lie one after the other."""
    columns = padded_head_dim(head_dim)
    width = swizzle_columns(columns)
    bits = {64: 3, 32: 2, 16: 1}[width]
    atom = cute.make_composed_layout(cute.make_swizzle(bits, 3, 3), 0, cute.make_layout((8, width), stride=(width, 1)))
    return cute.tile_to_shape(atom, (rows, columns), (0, 1))


def block_bytes(rows: int, head_dim: int) -> int:
    """Distance between column blocks of a tile."""
    return ELEMENT_BYTES * rows * swizzle_columns(padded_head_dim(head_dim))


def step(rows: int, head_dim: int, row: int, column_step: int) -> tuple[int, int]:
    """(exclusive or, then sum) that leads from an address in the first 16x16 block to the same place of another one.

    That is ``row`` rows, a multiple of 8, down and ``column_step`` steps of 16 columns to the right.
    """
    width = swizzle_columns(padded_head_dim(head_dim))
    block, inside = divmod(column_step, width // 16)
    return inside * 16 * ELEMENT_BYTES, block * block_bytes(rows, head_dim) + row * width * ELEMENT_BYTES


def address(tile: cute.Tensor, row: Int32, column: Int32) -> Int32:
    """Shared-memory address of an element of a tile."""
    return tile.iterator.toint() + ELEMENT_BYTES * tile.layout((row, column))


def copy_threads(rows: int, head_dim: int, threads: int) -> tuple[int, int]:
    """Threads (down rows, along chunks) that copy a tile together, one column block wide; the others idle.

    ``down`` divides the rows and is a multiple of 8, so that a thread's chunks lie a constant distance apart in spite of the swizzle.
    """
    along = swizzle_columns(padded_head_dim(head_dim)) // CHUNK
    return max(down for down in range(8, threads // along + 1, 8) if rows % down == 0), along


def tiled_mma(dtype: Any, threads: int) -> cute.TiledMma:
    """mma.sync m16n8k16 with fp32 accumulators, the warps one below the other."""
    warps = threads // WARP
    return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (warps, 1, 1), permutation_mnk=(warps * 16, 16, 16))


def matrices_of_a(lane: Int32) -> tuple[Int32, Int32]:
    """(row, column) whose address a lane gives to ldmatrix x4 for an m16k16 operand A: rows first, then the upper k8 half."""
    return lane % 16, lane // 16 * CHUNK


def matrices_of_b(lane: Int32) -> tuple[Int32, Int32]:
    """The same for two n8k16 operands B stored row by row in n: the k8 halves of the first n8, then those of the second."""
    return lane % 8 + lane // 16 * 8, lane // 8 % 2 * CHUNK


def matrices_of_b_transposed(lane: Int32) -> tuple[Int32, Int32]:
    """The same where the operand is stored row by row in k (V): ldmatrix transposes, rows are k and columns n."""
    return lane % 16, lane // 16 * CHUNK
