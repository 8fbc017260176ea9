"""The end: dV and dK by the compute warps to shared memory, by the epilogue warp to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from fa4.config import TMEM_LANES, padded_head_dim
from fa4.kernels.blackwell.backward.context import Context, Work
from fa4.kernels.common.barrier import Barrier
from fa4.kernels.common.tensor_memory import load_columns
from fa4.kernels.common.tma import Tma


def run(c: Context, work: Work, softmax_scale: Float32, half: Int32, thread: Int32) -> None:
    """Round dV and dK; a key for each thread, half of the columns for each warpgroup. Zeros where no query sees the keys.

    Warps: the eight compute warps, after their last tile.
    Owns: sV from dv_full on, sdK from dk_full on.
    Waits: dv_full, dk_full.
    Signals: dv_ready, dk_ready.
    Order: dV, dK times softmax_scale.
    """
    b, shared = c.barriers, c.shared
    if c.config.needed.dv:
        finish(c, work, (b.dv_full, b.dv_ready), (c.columns.dV, shared.sV), Float32(1.0), (half, thread))
    if c.config.needed.dk:
        finish(c, work, (b.dk_full, b.dk_ready), (c.columns.dK, shared.sdK), softmax_scale, (half, thread))


@cute.jit
def finish(
    c: Context,
    work: Work,
    barriers: tuple[Barrier, Barrier],
    place: tuple[cutlass.Constexpr[int], cute.Tensor],
    factor: Float32,
    who: tuple[Int32, Int32],
) -> None:
    """One gradient, from the columns ``place[0]`` on to the tile ``place[1]``, times ``factor``."""
    (full, ready), (column, tile), (half, thread) = barriers, place, who
    columns = cute.size(tile, mode=[1]) // 2
    size = next(n for n in (32, 16, 8) if columns % n == 0)
    if work.steps > 0:
        full.wait(0, 0)
    for at in cutlass.range_constexpr(0, columns, size):
        values = cute.make_rmem_tensor(size, Float32)
        values.fill(0.0)
        if work.steps > 0:
            load_columns(column + half * columns + at, values, thread)
        result = cute.make_rmem_tensor(size, c.dtype)
        result.store((values.load() * factor).to(c.dtype))
        for i in cutlass.range_constexpr(size // 8):
            source = cute.make_tensor(result.iterator + i * 8, cute.make_layout(8))
            cute.autovec_copy(source, cute.local_tile(tile[thread, None, 0], (8,), ((half * columns + at) // 8 + i,)))
    cute.arch.fence_proxy("async.shared", space="cta")
    ready.arrive(0)


@cute.jit
def store(c: Context, work: Work, *gradients: Tma) -> None:
    """The epilogue warp: dV, then dK, those that are needed, to the rows that exist; tensors (Sk, D, head, batch).

    Warps: one.
    Owns: nothing; reads sV and sdK.
    Waits: dv_ready, dk_ready.
    Signals: nothing.
    Order: dV is on its way before dK is waited for.
    """
    sources = (c.barriers.dv_ready, c.shared.sV, c.head_dims[1]), (c.barriers.dk_ready, c.shared.sdK, c.head_dims[0])
    present = (source for source, there in zip(sources, (c.config.needed.dv, c.config.needed.dk), strict=True) if there)
    for (ready, tile, head_dim), (atom, tensor) in zip(present, gradients, strict=True):
        shape = (TMEM_LANES, padded_head_dim(head_dim))
        gX = cute.local_tile(tensor[None, None, work.head, work.batch], shape, (None, 0))
        source, to = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(gX, 0, 2))
        ready.wait(0, 0)
        with cute.arch.elect_one():  # a copy to global memory, unlike one from it, does not elect by itself; groups are a lane's own
            cute.copy(atom, source[None, 0], to[None, work.first_key // TMEM_LANES])
            cute.arch.cp_async_bulk_commit_group()
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)
