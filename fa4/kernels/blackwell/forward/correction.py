"""The correction warpgroup, and the epilogue warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import blackwell_columns, padded_head_dim
from fa4.kernels.blackwell.forward.context import Context
from fa4.kernels.blackwell.forward.softmax import load_columns, store_columns
from fa4.kernels.blackwell.forward.storage import TILE_M


def chunk_of(columns: int) -> int:
    """Columns of O in registers at a time."""
    return 32 if columns % 32 == 0 else 16


@cute.jit
def run(c: Context, thread: Int32) -> None:
    """Rescale O where a reference grew; at the end divide it.

    Warps: four, for all query tiles in turn; a thread has a row of each.
    Owns: O in tensor memory between the product before and p_ready; sO.
    Waits: scale_full (the S of that key tile was complete, hence the product before it); o_full at the end.
    Signals: p_ready; o_ready at the end.
    Order: for each key tile and query tile: factor; where a lane of the warp has one other than 1, O times factor; p_ready.
    """
    config, barriers, count = c.config, c.barriers, c.work.count
    for step in cutlass.range(count, unroll=1):
        for stage in cutlass.range_constexpr(config.q_tiles):
            barriers.scale_full.wait(stage, step & 1)
            factor = c.shared.factor[thread, stage]
            if step > 0:
                if cute.arch.vote_any_sync(factor < 1.0):
                    rescale(c, stage, thread, factor)
            barriers.p_ready.arrive(stage)
    for stage in cutlass.range_constexpr(config.q_tiles):
        barriers.scale_full.wait(stage, count & 1)
        total = c.shared.total[thread, stage]
        if count > 0:
            barriers.o_full.wait(stage, Int32(0))
        finish(c, stage, thread, total)
        barriers.o_ready.arrive(stage)


@cute.jit
def rescale(c: Context, stage: cutlass.Constexpr[int], thread: Int32, factor: Float32) -> None:
    """O times ``factor``, in tensor memory."""
    address = c.tmem + blackwell_columns(c.config, c.head_dims[1]).O[stage]
    columns = padded_head_dim(c.head_dims[1])
    size = chunk_of(columns)
    for at in cutlass.range_constexpr(0, columns, size):
        O = cute.make_rmem_tensor(size, Float32)
        load_columns(address + at, O, thread)
        for i in cutlass.range_constexpr(0, size, 2):
            O[i], O[i + 1] = cute.arch.mul_packed_f32x2((O[i], O[i + 1]), (factor, factor))
        store_columns(address + at, O, thread)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def finish(c: Context, stage: cutlass.Constexpr[int], thread: Int32, total: Float32) -> None:
    """O divided by the row's sum, rounded, to shared memory; 0 in a row that saw no key, whatever O holds."""
    address = c.tmem + blackwell_columns(c.config, c.head_dims[1]).O[stage]
    inverse = cute.arch.rcp_approx(total)
    columns = padded_head_dim(c.head_dims[1])
    size = chunk_of(columns)
    for at in cutlass.range_constexpr(0, columns, size):
        O = cute.make_rmem_tensor(size, Float32)
        O.fill(0.0)
        if c.work.count > 0:
            load_columns(address + at, O, thread)
        rO = cute.make_rmem_tensor(size, c.dtype)
        for i in cutlass.range_constexpr(size):
            rO[i] = (O[i] * inverse if total > 0.0 else Float32(0.0)).to(c.dtype)
        for i in cutlass.range_constexpr(size // 8):
            source = cute.make_tensor(rO.iterator + i * 8, cute.make_layout(8))
            cute.autovec_copy(source, cute.local_tile(c.shared.sO[thread, None, stage], (8,), (at // 8 + i,)))
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store(c: Context, atom: cute.CopyAtom, mO: cute.Tensor) -> None:
    """The epilogue: tiles of O from shared memory to the rows of ``mO`` (Sq, Dv) that exist.

    Warps: one.
    Owns: nothing; reads sO.
    Waits: o_ready.
    Signals: nothing; it returns when global memory is written.
    """
    columns = padded_head_dim(c.head_dims[1])
    tiles = cute.local_tile(mO, (TILE_M, columns), (None, 0))
    source, to = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(c.shared.sO, 0, 2), cute.group_modes(tiles, 0, 2))
    for stage in cutlass.range_constexpr(c.config.q_tiles):
        c.barriers.o_ready.wait(stage, Int32(0))
        cute.copy(atom, source[None, stage], to[None, c.work.first_row // TILE_M + stage])
        cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=False)
