"""FlashAttention-4 forward for sm_100a and sm_103a (arXiv 2603.05451)."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from fa4.config import (
    ELEMENT_BYTES,
    WARP,
    BlackwellForwardConfig,
    check_blackwell_forward,
    swizzle_columns,
)
from fa4.kernels.blackwell.forward import correction, load, mma, softmax
from fa4.kernels.blackwell.forward.context import Context, Tiles
from fa4.kernels.blackwell.forward.storage import allocate, tile_shapes
from fa4.kernels.common.barrier import LEADER, initialise, rank_of_cta, sync_cluster
from fa4.kernels.common.host import DTYPES, call_limits, forward_arguments, kernel_name
from fa4.kernels.common.modifier import modifiers
from fa4.kernels.common.score import ScoreScalars, score_scalars
from fa4.kernels.common.tensor_memory import allocate_columns, tear_down
from fa4.kernels.common.tma import Source, Tma, by_group, by_head, kept_map, tile_layout
from fa4.problem import AttentionProblem
from fa4.schedule.device import section_size, tile_order

MMA, LOAD, EPILOGUE = 12, 13, 14
"""Warps, after those of the softmax (0-7) and correction (8-11) warpgroups."""
THREADS = 512


class BlackwellForward:
    """One compiled forward kernel: a problem class with a configuration."""

    def __init__(self, problem: AttentionProblem, config: BlackwellForwardConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]
        self.head_dims = problem.head_dim, problem.head_dim_v
        check_blackwell_forward(config, *self.head_dims)

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        config = self.config
        suffix = f"q{config.q_tiles}n{config.tile_n}s{config.stages}" + "v" * config.v_apart + "pair" * config.cta_pair
        suffix += f"h{config.pack_heads}" if config.pack_heads > 1 else ""
        return kernel_name("blackwell", self.problem, suffix)

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
        *aux: cute.Tensor,
    ) -> None:
        """Launch on ``stream``; arguments as in ``AmpereForward``."""
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_kv = mK.shape[1], mK.shape[2]
        config = self.config
        packed = config.pack_heads > 1
        heads = heads_kv if const_expr(packed) else heads_q
        rows, groups = heads * batch, heads_kv * batch
        blocks = cute.ceil_div(seqlen_q, config.cluster * config.q_tiles * config.positions)
        if blocks * rows > 0:
            operands = Int64(seqlen_k) * (sum(self.head_dims) * ELEMENT_BYTES)
            section = section_size(operands, Int64(groups), Int64(heads // heads_kv), config.l2_budget)
            order = tile_order(Int64(blocks), Int64(heads), Int64(batch), section, config.order)
            grid = blocks * rows * config.cluster
            if const_expr(config.order == "persistent"):
                grid = cutlass.min(grid, config.ctas)
            limits = call_limits(self.problem, (seqlen_q, seqlen_k), window_left, window_right)
            load_op = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.TWO if config.cta_pair else tcgen05.CtaGroup.ONE)
            shapes = tile_shapes(config, self.head_dims)
            moves = []
            for x, group, tile, op in (
                (mQ, heads_q // heads_kv, shapes.Q, load_op),
                (mK, None, shapes.K, load_op),
                (mV, None, shapes.V, load_op),
                (mO, heads_q // heads_kv, shapes.O, cpasync.CopyBulkTensorTileS2GOp()),
            ):
                view = by_group(x, group) if const_expr(packed and group is not None) else by_head(x, swizzle_columns(tile[1]))
                moves.append(Tma(*cpasync.make_tiled_tma_atom(op, view, tile_layout(*tile, self.dtype), tile)))
            BlackwellForward.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            tiles = Tiles(order, cute.FastDivmodDivisorV2(heads_q // heads_kv), limits)
            scalars = score_scalars(softmax_scale, softcap, self.problem.score_mod is not None, aux)
            self.kernel(*moves, mO, mLSE, scalars, tiles).launch(
                grid=[grid, 1, 1],
                block=[THREADS, 1, 1],
                cluster=[config.cluster, 1, 1] if const_expr(config.cta_pair) else None,
                stream=stream,
                min_blocks_per_mp=1,
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
            initialise(shared.barriers, config)
            allocate_columns(shared, config)
        sync_cluster(config.cluster)
        rank = rank_of_cta(config)

        seqlens = mO.shape[1], K.tensor.shape[0]
        user = modifiers(self.problem, scalars, seqlens)
        c = Context(config, self.head_dims, self.dtype, shared, rank, tiles, seqlens, scalars, user)
        if warp < 8:
            if const_expr(config.q_tiles == 1):
                if warp < 4:
                    cute.arch.setmaxregister_increase(config.registers[0])
                    softmax.run(c, mLSE, Int32(0), thread)
                else:  # idle
                    cute.arch.setmaxregister_decrease(config.registers[2])
            else:
                cute.arch.setmaxregister_increase(config.registers[0])
                if const_expr(tiles.limits.left is None and user.score is None):
                    softmax.run(c, mLSE, warp // 4, thread)
                else:  # a copy for each query tile: with both bounds, or scores that change, its number would be one register too many
                    for stage in cutlass.range_constexpr(config.q_tiles):
                        if warp // 4 == stage:
                            softmax.run(c, mLSE, Int32(stage), thread)
        elif warp < 12:
            cute.arch.setmaxregister_decrease(config.registers[1])
            correction.run(c, mO, thread)
        else:
            cute.arch.setmaxregister_decrease(config.registers[2])
            if warp == MMA:
                if rank == LEADER:
                    mma.run(c)
            elif warp == LOAD:
                shapes = tile_shapes(config, self.head_dims)
                sources = (
                    Source(x.atom, x.tensor, to, shape, kept_map(x.atom))
                    for x, to, shape in ((Q, shared.sQ, shapes.Q), (K, shared.sK, shapes.K), (V, shared.sV, shapes.V))
                )
                load.run(c, *sources)
            elif warp == EPILOGUE:
                correction.store(c, O.atom, O.tensor)
        tear_down(config, warp == MMA)
