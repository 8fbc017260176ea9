"""Registers to global memory: O through shared memory for 16-byte stores, lse straight."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from fa4.kernels.ampere.forward.layouts import CHUNK, copy_threads, tiled_copy
from fa4.kernels.common.fragments import by_row


@cute.jit
def store_lse(mLSE: cute.Tensor, lse: cute.Tensor, tiled_mma: cute.TiledMma, tile_m: cutlass.Constexpr[int], first_row: Int32) -> None:
    """Write the rows of ``mLSE`` (Sq); of the four lanes that share a row the first one writes."""
    coords = cute.make_identity_tensor((tile_m, 8))
    thread_row, thread_column = tiled_mma.get_slice(cute.arch.thread_idx()[0]).partition_C(coords)[0]
    steps = by_row(tiled_mma.get_slice(0).partition_C(coords))
    if thread_column == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            row = first_row + thread_row + steps[r, 0][0]
            if row < mLSE.shape[0]:
                mLSE[row] = lse[r]


@cute.jit
def store_output(
    mO: cute.Tensor, acc_O: cute.Tensor, sO: cute.Tensor, tiled_mma: cute.TiledMma, query_tile: Int32, threads: cutlass.Constexpr[int]
) -> None:
    """Round acc_O to 16 bits and write the rows of ``mO`` (Sq, Dv) that exist, through ``sO`` (tile_m, padded Dv, 1).

    ``sO`` lies over Q, K and V: all warps must be done with them, hence a barrier before as well as after.
    """
    tidx = cute.arch.thread_idx()[0]
    rows, columns, head_dim = cute.size(sO, mode=[0]), cute.size(sO, mode=[1]), mO.shape[1]
    rO = cute.make_rmem_tensor_like(acc_O, mO.element_type)
    rO.store(acc_O.load().to(mO.element_type))
    cute.arch.sync_threads()
    cute.autovec_copy(rO, tiled_mma.get_slice(tidx).partition_C(sO[None, None, 0]))
    cute.arch.sync_threads()

    down, along = copy_threads(rows, head_dim, threads)
    copy = tiled_copy(cute.nvgpu.CopyUniversalOp(), mO.element_type, rows, head_dim, threads).get_slice(tidx)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), mO.element_type, num_bits_per_copy=CHUNK * mO.element_type.width)
    tOsO = copy.partition_S(sO[None, None, 0])
    tOgO = copy.partition_D(cute.local_tile(mO, (rows, columns), (query_tile, 0)))
    rows_left = mO.shape[0] - query_tile * rows - tidx // along
    columns_left = head_dim - tidx % along * CHUNK
    for r in cutlass.range_constexpr(cute.size(tOsO, mode=[1])):
        for c in cutlass.range_constexpr(cute.size(tOsO, mode=[2])):
            inside = Boolean(r * down < rows_left)
            if const_expr((c + 1) * along * CHUNK > head_dim):
                inside = inside & (c * along * CHUNK < columns_left)
            if inside:
                chunk = cute.make_rmem_tensor_like(tOsO[None, r, c])
                cute.copy(atom, tOsO[None, r, c], chunk)
                cute.copy(atom, chunk, tOgO[None, r, c])
