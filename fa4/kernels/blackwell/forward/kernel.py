"""FlashAttention-4 forward for sm_100a and sm_103a (arXiv 2603.05451)."""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pl
from cutlass import Float32, Int32, Int64, const_expr, memory
from cutlass.cute.nvgpu import cpasync

from fa4.config import ELEMENT_BYTES, TMEM_LANES, WARP, BlackwellForwardConfig, padded_head_dim, swizzle_columns
from fa4.kernels.blackwell.forward import correction, load, mma, softmax
from fa4.kernels.blackwell.forward.context import Context, Tiles
from fa4.kernels.blackwell.forward.storage import allocate, tile_layout
from fa4.kernels.common.host import DTYPES, call_limits, forward_arguments, kernel_name
from fa4.kernels.common.score import ScoreScalars, score_scalars
from fa4.problem import AttentionProblem
from fa4.schedule.device import section_size, tile_order

MMA, LOAD, EPILOGUE = 12, 13, 14
"""Warps, after those of the softmax (0-7) and correction (8-11) warpgroups."""
THREADS = 512


class Tma(NamedTuple):
    """A copy between tiles in shared memory and a tensor in global memory, by coordinates (sequence, head dim, head, batch)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def whole_boxes(layout: cute.Layout) -> cute.Layout:
    """A (batch, sequence, head, D) layout with D as (columns of a swizzled block, blocks), where blocks divide it.

    A copy's box then has all blocks of a tile: one instruction, where a flat D takes one for each block.
    """
    d = layout.shape[3]
    width = swizzle_columns(padded_head_dim(d))
    if d % width or d == width:
        return layout
    return cute.make_layout((*layout.shape[:3], (width, d // width)), stride=(*layout.stride[:3], (1, width)))


class BlackwellForward:
    """One compiled forward kernel: a problem class with a configuration."""

    def __init__(self, problem: AttentionProblem, config: BlackwellForwardConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]
        self.head_dims = problem.head_dim, problem.head_dim_v

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        return kernel_name("blackwell", self.problem, f"q{self.config.q_tiles}n{self.config.tile_n}s{self.config.stages}")

    def compile_arguments(self) -> tuple[Any, ...]:
        """Arguments for ``cute.compile``."""
        return forward_arguments(self.problem)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        softcap: Float32 | None,
        window_left: Int32 | None,
        window_right: Int32 | None,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``; arguments as in ``AmpereForward``."""
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_kv = mK.shape[1], mK.shape[2]
        config = self.config
        rows, groups = heads_q * batch, heads_kv * batch
        blocks = cute.ceil_div(seqlen_q, config.q_tiles * TMEM_LANES)
        if blocks * rows > 0:
            operands = Int64(seqlen_k) * (sum(self.head_dims) * ELEMENT_BYTES)
            section = section_size(operands, Int64(groups), Int64(heads_q // heads_kv), config.l2_budget)
            order = tile_order(Int64(blocks), Int64(heads_q), Int64(batch), section, config.order)
            grid = blocks * rows
            if const_expr(config.order == "persistent"):
                grid = cutlass.min(grid, config.ctas)
            limits = call_limits(self.problem, (seqlen_q, seqlen_k), window_left, window_right)
            moves = []
            for x, tile_rows, op in (
                (mQ, TMEM_LANES, cpasync.CopyBulkTensorTileG2SOp()),
                (mK, config.tile_n, cpasync.CopyBulkTensorTileG2SOp()),
                (mV, config.tile_n, cpasync.CopyBulkTensorTileG2SOp()),
                (mO, TMEM_LANES, cpasync.CopyBulkTensorTileS2GOp()),
            ):
                by_head = cute.make_tensor(x.iterator, cute.select(whole_boxes(x.layout), mode=[1, 3, 2, 0]))
                tile = (tile_rows, padded_head_dim(x.shape[3]))
                moves.append(Tma(*cpasync.make_tiled_tma_atom(op, by_head, tile_layout(tile_rows, x.shape[3], self.dtype), tile)))
            BlackwellForward.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            tiles = Tiles(order, cute.FastDivmodDivisorV2(heads_q // heads_kv), limits)
            self.kernel(*moves, mO, mLSE, score_scalars(softmax_scale, softcap), tiles).launch(
                grid=[grid, 1, 1], block=[THREADS, 1, 1], stream=stream, min_blocks_per_mp=1
            )

    @cute.kernel
    def kernel(
        self,
        Q: Tma,
        K: Tma,
        V: Tma,
        O: Tma,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scalars: ScoreScalars,
        tiles: Tiles,
    ) -> None:
        """Allocate, and hand each warp to its role."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0] % (4 * WARP)
        shared = allocate(config, self.head_dims, self.dtype)
        if warp == LOAD:
            for x in (Q, K, V, O):
                cpasync.prefetch_descriptor(x.atom)
        if warp == MMA:
            with cute.arch.elect_one():
                shared.barriers.initialise(config)
            cute.arch.mbarrier_init_fence()
        columns = memory.TmemAllocator(
            shared.tmem_address, barrier_for_retrieve=pl.NamedBarrier(barrier_id=1, num_threads=THREADS), allocator_warp_id=MMA
        )
        columns.allocate(512)
        columns.wait_for_alloc()
        start = columns.retrieve_ptr(Float32)
        cute.arch.sync_threads()

        seqlens = Q.tensor.shape[0], K.tensor.shape[0]
        c = Context(config, self.head_dims, self.dtype, shared, Int32(start.toint()), tiles, seqlens, scalars)
        if warp < 8:
            cute.arch.setmaxregister_increase(config.registers[0])
            if warp < 4 * config.q_tiles:
                softmax.run(c, mLSE, warp // 4, thread)
        elif warp < 12:
            cute.arch.setmaxregister_decrease(config.registers[1])
            correction.run(c, mO, thread)
        else:
            cute.arch.setmaxregister_decrease(config.registers[2])
            if warp == MMA:
                mma.run(c)
            elif warp == LOAD:
                sources = (load.Source(x.atom, x.tensor, to) for x, to in ((Q, shared.sQ), (K, shared.sK), (V, shared.sV)))
                load.run(c, *sources)
            elif warp == EPILOGUE:
                correction.store(c, O.atom, O.tensor)
        cute.arch.sync_threads()
        columns.relinquish_alloc_permit()
        columns.free(start)
