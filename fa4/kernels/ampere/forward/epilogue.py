"""Registers to global memory: O through shared memory for 16-byte stores, lse straight."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fa4.kernels.ampere.forward.layouts import CHUNK, copy_threads
from fa4.kernels.common.fragments import by_row
from fa4.kernels.common.opaque import thread_index


@cute.jit
def store_lse(mLSE: cute.Tensor, lse: cute.Tensor, tiled_mma: cute.TiledMma, tile_m: cutlass.Constexpr[int], first_row: Int32) -> None:
    """Write the rows of ``mLSE`` (Sq); of the four lanes that share a row the first one writes."""
    coords = cute.make_identity_tensor((tile_m, 8))
    thread_row, thread_column = tiled_mma.get_slice(thread_index()).partition_C(coords)[0]
    steps = by_row(tiled_mma.get_slice(0).partition_C(coords))
    if thread_column == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = first_row + thread_row + steps[r, 0][0]
            if row < mLSE.shape[0]:
                mLSE[row] = lse[r]


@cute.jit
def store_output(
    mO: cute.Tensor, acc_O: cute.Tensor, sO: cute.Tensor, tiled_mma: cute.TiledMma, query_tile: Int32, columns_Q: cutlass.Constexpr[int]
) -> None:
    """Round acc_O to 16 bits and write the rows of ``mO`` (Sq, Dv) that exist, through ``sO`` (tile_m, padded Dv).

    ``sO`` lies over Q, with ``columns_Q`` columns, and where they differ over K and V: then all warps must be done with those. Where they
    are equal a warp overwrites only rows that it alone has read, and needs no barrier before.
    """
    tidx = thread_index()
    rows, columns, head_dim = cute.size(sO, mode=[0]), cute.size(sO, mode=[1]), mO.shape[1]
    rO = cute.make_rmem_tensor_like(acc_O, mO.element_type)
    rO.store(acc_O.load().to(mO.element_type))
    if const_expr(columns != columns_Q):
        cute.arch.sync_threads()
    cute.autovec_copy(rO, tiled_mma.get_slice(tidx).partition_C(sO))
    cute.arch.sync_threads()

    down, along = copy_threads(rows, head_dim, cute.size(tiled_mma))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mO.element_type, num_bits_per_copy=128)
    copy = cute.make_tiled_copy_tv(atom, cute.make_layout((down, along), stride=(along, 1)), cute.make_layout((1, CHUNK)))
    thread = copy.get_slice(tidx)
    tOsO = thread.partition_S(sO)
    tOgO = thread.partition_D(cute.local_tile(mO, (rows, columns), (query_tile, 0)))
    rows_left = mO.shape[0] - query_tile * rows - tidx // along
    columns_left = head_dim - tidx % along * CHUNK
    for r in cutlass.range_constexpr(cute.size(tOsO, mode=[1])):
        for block in cutlass.range_constexpr(cute.size(tOsO, mode=[2])):
            inside = Boolean(r * down < rows_left)
            if const_expr((block + 1) * along * CHUNK > head_dim):
                inside = inside & (block * along * CHUNK < columns_left)
            if inside:
                chunk = cute.make_rmem_tensor_like(tOsO[None, r, block])
                cute.copy(atom, tOsO[None, r, block], chunk)
                cute.copy(atom, chunk, tOgO[None, r, block])
