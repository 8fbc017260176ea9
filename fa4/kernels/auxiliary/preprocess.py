"""Before the main kernel of a backward: what it needs of a row, and zeros for what it adds to (arXiv 2307.08691, Algorithm 2, line 4)."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4.config import ROW_TILE, PreprocessConfig
from fa4.kernels.auxiliary.rows import CHUNK, LANES, Divisors, Tile, address, global_tensor, load, locate, operand, passes
from fa4.kernels.common.host import DTYPES, kernel_name
from fa4.kernels.common.score import LOG2_E
from fa4.problem import AttentionProblem

ZEROS = 4
"""Words of 32 bits in one store of zeros."""


class Preprocess:
    """One compiled kernel: dtype and head dim of out, and whether lse has a gradient.

    Rows in ``[Sq, Sq rounded)`` and rows that see no key (lse -inf) get lse_log2 +inf, which makes P = exp2(score - lse_log2) zero, and
    delta 0, whatever dout and dlse hold there.
    """

    def __init__(self, problem: AttentionProblem, config: PreprocessConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        return kernel_name("any", self.problem, ("dlse_" if self.config.dlse else "") + f"t{self.config.threads}")

    def compile_arguments(self) -> tuple[Any, ...]:
        """Arguments for ``cute.compile``: lengths and strides are dynamic."""
        batch, seqlen, heads, rounded = (cute.sym_int() for _ in range(4))
        out, dout = (operand(self.dtype, (batch, seqlen, heads), self.problem.head_dim_v) for _ in range(2))

        def by_row(length: Any) -> Any:
            return make_fake_tensor(
                Float32, (batch, heads, length), (cute.sym_int64(), cute.sym_int64(), cute.sym_int64()), assumed_align=4
            )

        zeros = make_fake_tensor(Float32, (cute.sym_int64(divisibility=ZEROS),), (1,), assumed_align=16)
        dlse = by_row(seqlen) if self.config.dlse else None
        return out, dout, by_row(seqlen), dlse, by_row(rounded), zeros, make_fake_stream()

    @cute.jit
    def __call__(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStatistics: cute.Tensor,
        mZeros: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``; nothing is launched where there is no row.

        Args:
            mO: (B, Sq, Hq, Dv), 16-byte aligned, last stride 1, other strides multiples of 8 elements; so is dO.
            mdO: (B, Sq, Hq, Dv).
            mLSE: (B, Hq, Sq) float32, natural logarithm, any strides; so are the other tensors by row.
            mdLSE: (B, Hq, Sq) float32, or None where lse has no gradient.
            mStatistics: (B, Hq, 2 * Sq rounded) float32, written: for each tile of 128 rows lse in log2 units, see the class, then delta,
                the row sum of O * dO, minus dlse. Sq is rounded up to a multiple of 128.
            mZeros: float32, a multiple of 4 elements, 16-byte aligned, written: zeros. As integers they are zeros too.
            stream: CUDA stream.
        """
        batch, seqlen, heads, _ = mO.shape
        tiles = cute.ceil_div(seqlen, ROW_TILE)
        blocks = tiles * heads * batch
        if blocks > 0:
            divisors = Divisors(cute.FastDivmodDivisorV2(tiles), cute.FastDivmodDivisorV2(heads))
            Preprocess.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.kernel(mO, mdO, mLSE, mdLSE, mStatistics, mZeros, divisors).launch(
                grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream
            )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStatistics: cute.Tensor,
        mZeros: cute.Tensor,
        divisors: Divisors,
    ) -> None:
        """128 rows, and a share of the zeros."""
        thread = cute.arch.thread_idx()[0]
        lane, seqlen = thread % LANES, mO.shape[1]
        tile = locate(divisors)
        for p in cutlass.range_constexpr(passes(self.config.threads)):
            local = p * (self.config.threads // LANES) + thread // LANES
            row, at = tile.index * ROW_TILE + local, tile.index * (2 * ROW_TILE) + local
            # Rows beyond the last read that one, so that all loads of a thread are under way at once.
            there = cutlass.min(row, seqlen - 1)
            total = self._product(mO, mdO, tile, there, lane)
            if lane == 0:
                lse = Float32(mLSE[tile.batch, tile.head, there])
                gone = row >= seqlen or lse == -Float32.inf
                if const_expr(mdLSE is not None):
                    total = total - Float32(mdLSE[tile.batch, tile.head, there])  # type: ignore[index]  # it is there
                mStatistics[tile.batch, tile.head, at] = Float32.inf if gone else lse * LOG2_E
                mStatistics[tile.batch, tile.head, at + ROW_TILE] = Float32(0.0) if gone else total
        self._clear(mZeros, thread)

    @cute.jit
    def _product(self, mO: cute.Tensor, mdO: cute.Tensor, tile: Tile, row: Int32, lane: Int32) -> Float32:
        """Sum of O * dO over a row, in an order that depends on nothing: every lane of the row gets it."""
        chunks = self.problem.head_dim_v // CHUNK
        total = Float32(0.0)
        for turn in cutlass.range_constexpr(-(-chunks // LANES)):
            chunk = lane + turn * LANES
            cut = (turn + 1) * LANES > chunks
            column = (cutlass.min(chunk, chunks - 1) if const_expr(cut) else chunk) * CHUNK
            O = load(self.dtype, address(mO, tile.batch, row, tile.head, column), CHUNK)
            dO = load(self.dtype, address(mdO, tile.batch, row, tile.head, column), CHUNK)
            part = total
            for i in cutlass.range_constexpr(CHUNK):
                part = part + Float32(O[i]) * Float32(dO[i])
            if const_expr(cut):
                part = part if chunk < chunks else total
            total = part
        for step in (4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=step)
        return total

    @cute.jit
    def _clear(self, mZeros: cute.Tensor, thread: Int32) -> None:
        """Zeros, 16 bytes a thread, blocks side by side."""
        zeros = cute.make_rmem_tensor(ZEROS, Float32)
        zeros.fill(0.0)
        words = Int64(mZeros.shape[0]) // ZEROS
        step = Int64(cute.arch.grid_dim()[0]) * self.config.threads
        word = Int64(cute.arch.block_idx()[0]) * self.config.threads + thread
        while word < words:
            cute.autovec_copy(zeros, global_tensor(Float32, mZeros.iterator.toint() + word * (4 * ZEROS), ZEROS))
            word = word + step
