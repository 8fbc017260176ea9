"""Shared-memory layouts and how threads cover tiles: everything here is known when the kernel is traced.

A tile of Q, K, V or O is rows x padded head dim, row by row inside column blocks of 64, 32 or 16 elements::

    block 0 (64 columns)            block 1
    row 0   c0 c1 c2 c3 c4 c5 c6 c7   row 0 ...        c = chunk of 8 elements (16 bytes)
    row 1   c1 c0 c3 c2 c5 c4 c7 c6                    chunk c of row r sits at place c ^ (r % 8)
    row 2   c2 c3 c0 c1 c6 c7 c4 c5
    ...

so that the eight chunks an ldmatrix phase reads (one column of chunks, eight rows) and the eight chunks a quarter warp writes (one
row) each touch all 32 banks once. Blocks of 32 and 16 columns fold several rows into 128 bytes and swizzle by fewer bits.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warp

from fa4.config import WARP, padded_head_dim, swizzle_columns

CHUNK = 8
"""Elements of one 16-byte copy."""


def tile_layout(rows: int, head_dim: int, stages: int) -> cute.ComposedLayout:
    """Swizzled layout (rows, padded head dim, stages); column blocks of a stage lie one after the other."""
    columns = padded_head_dim(head_dim)
    width = swizzle_columns(columns)
    bits = {64: 3, 32: 2, 16: 1}[width]
    atom = cute.make_composed_layout(cute.make_swizzle(bits, 3, 3), 0, cute.make_layout((8, width), stride=(width, 1)))
    return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))


def transposed(tile: cute.Tensor) -> cute.Tensor:
    """View (columns, rows, stages) of a tile: V as operand B of P V, whose "n" is the head dim."""
    rows, columns, stages = (cute.size(tile, mode=[i]) for i in range(3))
    return cute.composition(tile, cute.make_layout((columns, rows, stages), stride=(rows, 1, rows * columns)))


def copy_threads(rows: int, head_dim: int, threads: int) -> tuple[int, int]:
    """Threads (down rows, along chunks) that cover a tile: a row of a column block per group, idle threads where rows run out."""
    along = swizzle_columns(padded_head_dim(head_dim)) // CHUNK
    return min(threads // along, rows), along


def tiled_copy(op: Any, dtype: Any, rows: int, head_dim: int, threads: int) -> cute.TiledCopy:
    """16-byte copies between a tile in shared memory and global memory."""
    down, along = copy_threads(rows, head_dim, threads)
    atom = cute.make_copy_atom(op, dtype, num_bits_per_copy=CHUNK * dtype.width)
    return cute.make_tiled_copy_tv(atom, cute.make_layout((down, along), stride=(along, 1)), cute.make_layout((1, CHUNK)))


def load_op() -> Any:
    """cp.async that bypasses L1, because no other block of the SM wants the tile from there."""
    return cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL)


def tiled_mma(dtype: Any, threads: int) -> cute.TiledMma:
    """mma.sync m16n8k16, the warps one below the other; 16 columns of n, so that one ldmatrix x4 feeds two atoms."""
    warps = threads // WARP
    return cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16)), (warps, 1, 1), permutation_mnk=(warps * 16, 16, 16))


def ldmatrix(dtype: Any, transpose: bool) -> cute.CopyAtom:
    """Four 8x8 matrices per instruction; transposed for V, which lies key by key while the product wants it by head dim."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)
