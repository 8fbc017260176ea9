"""FlashAttention-4 backward for sm_100a and sm_103a (arXiv 2603.05451): the main kernel, a CTA or a pair of them for each key tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from fa4.config import ELEMENT_BYTES, TMEM_LANES, WARP, BlackwellBackwardConfig, Needed, check_blackwell_backward, swizzle_columns
from fa4.kernels.blackwell.backward import compute, epilogue, exchange, load, mma, reduce
from fa4.kernels.blackwell.backward.context import Context, Tiles
from fa4.kernels.blackwell.backward.storage import allocate, tile_shapes
from fa4.kernels.common.barrier import LEADER, initialise, rank_of_cta, sync_cluster
from fa4.kernels.common.host import DTYPES, backward_arguments, call_limits, kernel_name
from fa4.kernels.common.modifier import modifiers
from fa4.kernels.common.score import ScoreScalars, score_scalars
from fa4.kernels.common.tensor_memory import allocate_columns, tear_down
from fa4.kernels.common.tma import Source, Tma, by_head, kept_map, tile_layout
from fa4.problem import AttentionProblem
from fa4.schedule.device import section_size, tile_order

MMA, LOAD, EPILOGUE, RELAY = 12, 13, 14, 15
"""Warps, after those of the compute (0-7) and reduce (8-11) warpgroups."""
THREADS = 512


class Rows(NamedTuple):
    """What there is of each query: lse and delta (B, Hq, 2 * Sq rounded), the dQ accumulator, the semaphores of its blocks."""

    mStatistics: cute.Tensor
    mdQ: cute.Tensor | None
    mSemaphore: cute.Tensor | None


class BlackwellBackward:
    """One compiled backward kernel: a problem class with a configuration."""

    def __init__(self, problem: AttentionProblem, config: BlackwellBackwardConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]
        self.head_dims = problem.head_dim, problem.head_dim_v
        check_blackwell_backward(config, *self.head_dims)

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        suffix = f"s{self.config.stages}" + "pair" * self.config.cta_pair + "ordered" * self.problem.deterministic
        if self.config.needed != Needed():
            suffix += f"_{self.config.needed.names}"
        return kernel_name("blackwell", self.problem, suffix)

    def compile_arguments(self) -> tuple[Any, ...]:
        """Arguments for ``cute.compile``."""
        return backward_arguments(self.problem, self.config.needed)

    @cute.jit
    def __call__(  # the tensors of a backward pass
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mdO: cute.Tensor,
        mStatistics: cute.Tensor,
        mdQ: cute.Tensor | None,
        mSemaphore: cute.Tensor | None,
        mdK: cute.Tensor | None,
        mdV: cute.Tensor | None,
        softmax_scale: Float32,
        softcap: Float32 | None,
        window_left: Int32 | None,
        window_right: Int32 | None,
        stream: cuda.CUstream,
        *aux: cute.Tensor,
    ) -> None:
        """Launch on ``stream``.

        Args:
            mQ: queries (B, Sq, Hq, D) of the dtype.
            mK: keys (B, Sk, Hkv, D).
            mV: values (B, Sk, Hkv, Dv).
            mdO: gradient of out (B, Sq, Hq, Dv).
            mStatistics: (B, Hq, 2 * Sq rounded up to 128), float32: of each tile of 128 rows lse in log2 units, +inf in rows that see no
                key, or do not exist; then delta = rowsum(out * dout) - dlse, 0 in rows that do not exist.
            mdQ: accumulator of dQ without scale (B, Hq, Sq rounded, D rounded), float32, zeroed; see ``fa4.kernels.common.dq_layout``. None
                unless needed.
            mSemaphore: int32 (B, Hq, Sq rounded / 32), zeroed; None unless deterministic and dq is needed.
            mdK: gradient of k (B, Sk, Hkv, D), written; None unless needed.
            mdV: gradient of v (B, Sk, Hkv, Dv), likewise.
            softmax_scale: factor on Q K^T.
            softcap: as in the forward, None without.
            window_left: likewise.
            window_right: likewise.
            stream: CUDA stream.
            aux: as in the forward, what functions on scores read.
        """
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_kv = mK.shape[1], mK.shape[2]
        config = self.config
        rows, blocks = heads_kv * batch, cute.ceil_div(seqlen_k, config.cluster * TMEM_LANES)
        if blocks * rows > 0:
            group = heads_q // heads_kv
            operands = Int64(seqlen_q) * Int64(group) * (sum(self.head_dims) * ELEMENT_BYTES)
            section = section_size(operands, Int64(rows), Int64(1), config.l2_budget)
            order = tile_order(Int64(blocks), Int64(heads_kv), Int64(batch), section, config.order)
            limits = call_limits(self.problem, (seqlen_q, seqlen_k), window_left, window_right)
            load_op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO if config.cta_pair else tcgen05.CtaGroup.ONE)
            shapes, store_op = tile_shapes(config, self.head_dims), cpasync.CopyBulkTensorTileS2GOp()
            moves = [(mK, shapes.K, load_op), (mV, shapes.V, load_op), (mQ, shapes.Q, load_op), (mdO, shapes.dO, load_op)]
            if const_expr(config.cta_pair):
                moves += [(mQ, shapes.Qt, load_op), (mdO, shapes.dOt, load_op), (mK, shapes.Kt, load_op)]
            moves += [(x, tile, store_op) for x, tile in ((mdV, shapes.V), (mdK, shapes.K)) if x is not None]
            views = ((op, by_head(x, swizzle_columns(tile[1])), tile) for x, tile, op in moves)
            atoms = tuple(Tma(*cpasync.make_tiled_tma_atom(op, view, tile_layout(*tile, self.dtype), tile)) for op, view, tile in views)
            BlackwellBackward.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            scalars = score_scalars(softmax_scale, softcap, self.problem.score_mod is not None, aux)
            numbers = softmax_scale, scalars, Tiles(order, group, limits)
            self.kernel(atoms, Rows(mStatistics, mdQ, mSemaphore), *numbers).launch(
                grid=[blocks * rows * config.cluster, 1, 1],
                block=[THREADS, 1, 1],
                cluster=[config.cluster, 1, 1] if const_expr(config.cta_pair) else None,
                stream=stream,
                min_blocks_per_mp=1,
            )

    @cute.kernel
    def kernel(self, moves: tuple[Tma, ...], per_row: Rows, softmax_scale: Float32, scalars: ScoreScalars, tiles: Tiles) -> None:
        """Allocate, and hand each warp to its role."""
        K, V, Q, dO = moves[:4]
        config = self.config
        gradients = config.needed.dv + config.needed.dk  # at the end of moves, dV first
        others, stores = moves[4 : len(moves) - gradients], moves[len(moves) - gradients :]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread = cute.arch.thread_idx()[0] % (4 * WARP)
        shared = allocate(config, self.head_dims, self.dtype)
        rank = rank_of_cta(config)

        seqlens = Q.tensor.shape[0], K.tensor.shape[0]
        user = modifiers(self.problem, scalars, seqlens)
        c = Context(config, self.head_dims, self.dtype, shared, rank, tiles, seqlens, scalars, user)
        if warp < 8:
            cute.arch.setmaxregister_increase(config.registers[0])
            half = warp // 4
            work = c.begin()
            compute.run(c, work, half, thread)
            epilogue.run(c, work, softmax_scale, half, thread)
        elif warp < 12:
            cute.arch.setmaxregister_increase(config.registers[1])
            work = c.begin()
            if const_expr(config.needed.dq):
                reduce.run(c, work, per_row.mdQ, per_row.mSemaphore, thread)
        else:
            cute.arch.setmaxregister_decrease(config.registers[2])
            if warp == MMA:
                if const_expr(config.cta_pair):
                    allocate_columns(shared, config)
                work = c.begin()
                if const_expr(not config.cta_pair):
                    allocate_columns(shared, config)
                if rank == LEADER:
                    mma.run(c, work)
            elif warp == LOAD:
                for move in moves:
                    cpasync.prefetch_descriptor(move.atom)
                places = (shared.sK, shared.sV, shared.sQ, shared.sdO, shared.sQt, shared.sdOt, shared.sKt)
                more = others if const_expr(config.cta_pair) else (Q, dO, K)
                maps = (None, None, *(kept_map(x.atom) for x in (Q, dO, *more[:2])), None)  # of what each query tile has
                loads = zip((K, V, Q, dO, *more), places, tile_shapes(config, self.head_dims), maps, strict=True)
                load.run(c, c.begin(), load.Sources(per_row.mStatistics, *(Source(*x, to, shape, kept) for x, to, shape, kept in loads)))
            elif warp == EPILOGUE:
                initialise(shared.barriers, config)
                sync_cluster(config.cluster)
                epilogue.store(c, c.work(), *stores)
            elif warp == RELAY:
                work = c.begin()
                if const_expr(config.cta_pair and config.needed.dq):
                    exchange.relay(c, work)
        tear_down(config, warp == MMA)
