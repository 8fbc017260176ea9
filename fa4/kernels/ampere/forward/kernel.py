"""FlashAttention-2 forward for sm_80 and later (arXiv 2307.08691, algorithm 1 and section 3.3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, memory

from fa4.config import AmpereForwardConfig, ampere_forward_shared_memory, padded_head_dim
from fa4.kernels.ampere.forward.epilogue import store_lse, store_output
from fa4.kernels.ampere.forward.layouts import tile_layout, tiled_mma
from fa4.kernels.ampere.forward.load import TileLoad
from fa4.kernels.ampere.forward.mainloop import Mainloop
from fa4.kernels.ampere.forward.mma import operands
from fa4.kernels.common import online_softmax
from fa4.kernels.common.host import DTYPES, Limits, call_limits, forward_arguments, kernel_name
from fa4.kernels.common.mask import Band
from fa4.kernels.common.modifier import modifiers
from fa4.kernels.common.opaque import opaque
from fa4.kernels.common.score import ScoreScalars, score_scalars
from fa4.problem import AttentionProblem


class Divisors(NamedTuple):
    """Exact divisions by run-time counts: query tiles, query heads, and query heads per key head."""

    tiles: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2


class AmpereForward:
    """One compiled forward kernel: a problem class with a configuration.

    A block of ``config.threads`` computes ``tile_m`` queries of one (batch, head); blocks are flattened into grid x, tiles fastest, so that
    neighbours share keys, and where the right side is bounded the longest tile of a head comes first.
    """

    def __init__(self, problem: AttentionProblem, config: AmpereForwardConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        config = self.config
        return kernel_name("ampere", self.problem, f"m{config.tile_m}n{config.tile_n}s{config.stages}t{config.threads}")

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
        """Launch on ``stream``; nothing is launched where there is no query.

        Args:
            mQ: (B, Sq, Hq, D), 16-byte aligned, last stride 1, other strides multiples of 8 elements; so are K, V and O.
            mK: (B, Sk, Hkv, D) with Hq a multiple of Hkv.
            mV: (B, Sk, Hkv, Dv).
            mO: (B, Sq, Hq, Dv), written: 0 in rows that see no key.
            mLSE: (B, Hq, Sq) float32, last stride 1, written: natural logarithm, -inf in rows that see no key.
            softmax_scale: any finite number.
            softcap: positive, or None where ``problem.softcap`` is not set.
            window_left: None where ``problem.window[0]`` is not set; any 32-bit number.
            window_right: None where ``problem.window[1]`` is not set; any 32-bit number. ``problem.causal`` stands for 0, and cuts it to 0.
            stream: CUDA stream.
            aux: tensors of ``problem.score_mod``, then of ``problem.mask_mod``, the last stride 1.

        ``Sq + Sk`` must be below 2**31 - tile, and so must be the number of blocks, ``ceil(Sq / tile_m) * Hq * B``.
        """
        batch, seqlen_q, heads_q, _ = mQ.shape
        seqlen_k, heads_kv = mK.shape[1], mK.shape[2]
        tiles = cute.ceil_div(seqlen_q, self.config.tile_m)
        blocks = tiles * heads_q * batch
        if blocks > 0:
            divisors = Divisors(
                cute.FastDivmodDivisorV2(tiles), cute.FastDivmodDivisorV2(heads_q), cute.FastDivmodDivisorV2(heads_q // heads_kv)
            )
            limits = call_limits(self.problem, (seqlen_q, seqlen_k), window_left, window_right)
            AmpereForward.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            scalars = score_scalars(softmax_scale, softcap, self.problem.score_mod is not None, aux)
            self.kernel(mQ, mK, mV, mO, mLSE, scalars, limits, divisors).launch(
                grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        scalars: ScoreScalars,
        limits: Limits,
        divisors: Divisors,
    ) -> None:
        """One query tile: find its keys, visit them, write O and lse."""
        config, problem = self.config, self.problem
        tidx = cute.arch.thread_idx()[0]
        query_tile, head, batch = self._locate(mQ.shape[1], limits, divisors)
        head_kv = head // divisors.group
        first_row = query_tile * config.tile_m
        band = Band(mQ.shape[1], mK.shape[1], limits.left, limits.right)
        tiles = band.key_tiles(first_row, config.tile_m, config.tile_n)

        sQ, sK, sV, sO = self._shared()
        mma = tiled_mma(self.dtype, config.threads)
        acc_O = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((config.tile_m, padded_head_dim(problem.head_dim_v))), Float32)
        rows = 2 * cute.size(acc_O, mode=[1])
        row_max, row_sum = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        acc_O.fill(0.0)
        online_softmax.reset(row_max, row_sum)
        if tiles.end > tiles.begin:
            load_Q = TileLoad.of(mQ[batch, None, head, None], sQ, config.threads, tidx)
            load_K = TileLoad.of(mK[batch, None, head_kv, None], sK, config.threads, tidx)
            load_V = TileLoad.of(mV[batch, None, head_kv, None], sV, config.threads, tidx)
            Q, K, V = operands(sQ, sK, sV, (problem.head_dim, problem.head_dim_v), tidx)
            user = modifiers(problem, scalars, (mQ.shape[1], mK.shape[1]))
            loop = Mainloop(load_K, load_V, Q, K, V, mma, acc_O, row_max, row_sum, band, scalars, config, user, (batch, head))
            loop.run(load_Q, query_tile, tiles)
        online_softmax.finish(acc_O, row_max, row_sum)
        # Computed again, so that no register holds them through the loop.
        query_tile, head, batch = self._locate(mQ.shape[1], limits, divisors)
        store_lse(mLSE[batch, head, None], row_max, mma, config.tile_m, query_tile * config.tile_m)
        store_output(mO[batch, None, head, None], acc_O, sO, mma, query_tile, padded_head_dim(problem.head_dim))

    @cute.jit
    def _locate(self, seqlen_q: Int32, limits: Limits, divisors: Divisors) -> tuple[Int32, Int32, Int32]:
        """(query tile, head, batch) of this block; where the right side is bounded the longest tile of a head comes first."""
        head_block, query_tile = divmod(opaque(cute.arch.block_idx()[0]), divisors.tiles)
        batch, head = divmod(head_block, divisors.heads)
        if const_expr(limits.right is not None):
            query_tile = cute.ceil_div(seqlen_q, self.config.tile_m) - 1 - query_tile
        return query_tile, head, batch

    def _shared(self) -> tuple[cute.Tensor, ...]:
        """First slots of Q, the ring of K and the ring of V; O lies over all of them."""
        problem, config = self.problem, self.config
        size = ampere_forward_shared_memory(config, problem.head_dim, problem.head_dim_v).size
        base = memory.SmemAllocator().allocate_array(self.dtype, size // 2, byte_alignment=128)
        layout_Q = tile_layout(config.tile_m, problem.head_dim)
        layout_K = tile_layout(config.tile_n, problem.head_dim)
        layout_V = tile_layout(config.tile_n, problem.head_dim_v)
        layout_O = tile_layout(config.tile_m, problem.head_dim_v)
        at_K = cute.cosize(layout_Q)
        at_V = at_K + config.stages * cute.cosize(layout_K)
        places = ((0, layout_Q), (at_K, layout_K), (at_V, layout_V), (0, layout_O))
        return tuple(cute.make_tensor(base + at, layout) for at, layout in places)
