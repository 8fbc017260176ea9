"""The correction warpgroup, and the epilogue warp."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa4.config import TMEM_LANES, BlackwellForwardConfig, blackwell_columns, padded_head_dim
from fa4.kernels.blackwell.forward.context import Context, Work, each_tile
from fa4.kernels.blackwell.forward.pipelines import take_factor
from fa4.kernels.blackwell.forward.storage import tile_shapes
from fa4.kernels.common.opaque import thread_index
from fa4.kernels.common.tensor_memory import load_columns, store_columns

FINISHED = 32
"""Columns of O in registers at a time, where they are divided and rounded, which needs registers twice."""


def rescaled(config: BlackwellForwardConfig) -> int:
    """The same where they are rescaled: 32 where with 64 ptxas spills in softmax, which emulates all exponentials or has few registers."""
    return 32 if config.exp2.share == 1 or config.registers[0] < 192 else 64


def chunks_of(columns: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of the columns of O that are in registers at a time: powers of two, as instructions take, at most ``most``."""
    chunks, at = [], 0
    while at < columns:
        size = min(most, 1 << (columns - at).bit_length() - 1)
        chunks.append((at, size))
        at += size
    return chunks


def run(c: Context, mO: cute.Tensor, thread: Int32) -> None:
    """Rescale O where a reference grew; at the end divide it. Rows of tiles that see no key become 0 at once.

    Warps: four, for all query tiles in turn; a thread has a row of each.
    Owns: O in tensor memory between the product before and p_ready; sO.
    Waits: factor (the S of that key tile was complete, hence the product before it); at the end total_full, o_full, o_empty; work_full.
    Signals: p_ready; at the end total_empty, o_ready; work_empty.
    Order: for each key tile and query tile: factor; where a lane of the warp has one other than 1, O times factor; p_ready.
    """
    each_tile(c, visit, Int32(0), mO, thread)


@cute.jit
def visit(c: Context, work: Work, used: Int32, mO: cute.Tensor, thread: Int32) -> Int32:
    """The rows of one step of the launch; ``used`` counts query tiles with keys."""
    config, barriers, count = c.config, c.barriers, work.count
    if count > 0:  # the product of the first key tile takes the place of O
        for stage in cutlass.range_constexpr(config.q_tiles):
            take_factor(stage, thread)
            barriers.p_ready.arrive(stage)
    else:
        for stage in cutlass.range_constexpr(config.q_tiles):
            query = c.query(work, stage * TMEM_LANES + thread)
            if query.exists:
                clear(mO[work.batch, query.position, query.head, None])
    for _ in cutlass.range(count - 1, unroll=1):
        for stage in cutlass.range_constexpr(config.q_tiles):
            take_factor(stage, thread)
            factor = c.shared.factor[thread, stage]
            if const_expr(config.rescale == "select"):
                rescale(c, stage, thread, factor)
            else:
                if cute.arch.vote_any_sync(factor < 1.0):
                    rescale(c, stage, thread, factor)
            barriers.p_ready.arrive(stage)
    if count > 0:
        for stage in cutlass.range_constexpr(config.q_tiles):
            barriers.total_full.wait(stage, used & 1)
            total = c.shared.total[thread, stage]
            barriers.total_empty.arrive(stage)
            barriers.o_full.wait(stage, used & 1)
            barriers.o_empty.wait(stage, used & 1 ^ 1)
            finish(c, stage, thread, total)
            cute.arch.fence_proxy("async.shared", space="cta")
            barriers.o_ready.arrive(stage)
    return used + Int32(count > 0)


@cute.jit
def clear(row: cute.Tensor) -> None:
    """Zeros to a row of Dv; in a loop, since it is rare."""
    zeros = cute.make_rmem_tensor(8, row.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(cute.size(row) // 8, unroll=1):
        cute.autovec_copy(zeros, cute.local_tile(row, (8,), (i,)))


@cute.jit
def rescale(c: Context, stage: cutlass.Constexpr[int], thread: Int32, factor: Float32) -> None:
    """O times ``factor``, in tensor memory."""
    address = Int32(blackwell_columns(c.config, c.head_dims[1]).O[stage])
    for at, size in chunks_of(padded_head_dim(c.head_dims[1]), rescaled(c.config)):
        O = cute.make_rmem_tensor(size, Float32)
        load_columns(address + at, O, thread)
        for i in cutlass.range_constexpr(0, size, 2):
            O[i], O[i + 1] = cute.arch.mul_packed_f32x2((O[i], O[i + 1]), (factor, factor))
        store_columns(address + at, O, thread)
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def finish(c: Context, stage: cutlass.Constexpr[int], thread: Int32, total: Float32) -> None:
    """O divided by the row's sum, rounded, to shared memory; 0 in a row that saw no key, whatever O holds."""
    address = Int32(blackwell_columns(c.config, c.head_dims[1]).O[stage])
    row = thread_index() % TMEM_LANES  # read again: addresses that follow from it are worked out here, not kept in registers
    inverse = cute.arch.rcp_approx(total)
    for at, size in chunks_of(padded_head_dim(c.head_dims[1]), FINISHED):
        O = cute.make_rmem_tensor(size, Float32)
        load_columns(address + at, O, thread)
        rO = cute.make_rmem_tensor(size, c.dtype)
        for i in cutlass.range_constexpr(0, size, 2):
            left, right = cute.arch.mul_packed_f32x2((O[i], O[i + 1]), (inverse, inverse))
            rO[i], rO[i + 1] = left.to(c.dtype), right.to(c.dtype)
        for i in cutlass.range_constexpr(size // 8):
            source = cute.make_tensor(rO.iterator + i * 8, cute.make_layout(8))
            cute.autovec_copy(source, cute.local_tile(c.shared.sO[row, None, stage], (8,), (at // 8 + i,)))
    if total == 0.0:  # a NaN that a row sees stays one
        clear(c.shared.sO[row, None, stage])


def store(c: Context, atom: cute.CopyAtom, mO: cute.Tensor) -> None:
    """The epilogue: tiles of O from shared memory to the rows of ``mO`` (Sq, Dv, head, batch) that exist.

    Warps: one.
    Owns: nothing; reads sO.
    Waits: o_ready; work_full.
    Signals: o_empty, and where O leaves through sQ q_empty; work_empty.
    Order: both tiles are on their way before the first is waited for, until shared memory is read; the end of the kernel does the rest.
    """
    each_tile(c, leave, Int32(0), atom, mO)


@cute.jit
def leave(c: Context, work: Work, used: Int32, atom: cute.CopyAtom, mO: cute.Tensor) -> Int32:
    """The tiles of one step of the launch."""
    count = c.config.q_tiles
    gO = cute.local_tile(mO[None, None, work.head, work.batch], tile_shapes(c.config, c.head_dims).O, (None, 0))
    source, to = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(c.shared.sO, 0, 2), cute.group_modes(gO, 0, 2))
    if work.count > 0:
        with cute.arch.elect_one():  # a copy to global memory, unlike one from it, does not elect by itself; groups are a lane's own
            for stage in cutlass.range_constexpr(count):
                c.barriers.o_ready.wait(stage, used & 1)
                cute.copy(atom, source[None, stage], to[None, c.query_tile(work, stage)])
                cute.arch.cp_async_bulk_commit_group()
            for stage in cutlass.range_constexpr(count):
                cute.arch.cp_async_bulk_wait_group(count - 1 - stage, read=True)
                c.barriers.o_empty.arrive(stage)
                if const_expr(c.config.o_over_q):
                    c.barriers.q_empty.arrive(stage)
    return used + Int32(work.count > 0)
