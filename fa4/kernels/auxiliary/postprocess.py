"""After the main kernel of a backward: the float32 sums of dQ become dQ."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4.config import ROW_TILE, PostprocessConfig, padded_head_dim
from fa4.kernels.auxiliary.rows import CHUNK, LANES, Divisors, address, global_tensor, locate, operand, passes
from fa4.kernels.common.dq_layout import VECTOR, dq_offset
from fa4.kernels.common.host import DTYPES, kernel_name
from fa4.problem import AttentionProblem


class Postprocess:
    """One compiled kernel: dtype and head dim of dQ. The sums lie as ``fa4.kernels.common.dq_layout`` says, in rows padded to 128."""

    def __init__(self, problem: AttentionProblem, config: PostprocessConfig) -> None:
        self.problem = problem
        self.config = config
        self.dtype = DTYPES[problem.dtype]

    @property
    def name(self) -> str:
        """Stable name of the device function, without the suffix that the DSL adds."""
        return kernel_name("any", self.problem, f"t{self.config.threads}")

    def compile_arguments(self) -> tuple[Any, ...]:
        """Arguments for ``cute.compile``: lengths and strides are dynamic."""
        sums = make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16)
        sizes = cute.sym_int(), cute.sym_int(), cute.sym_int()
        return sums, operand(self.dtype, sizes, self.problem.head_dim), Float32(1.0), make_fake_stream()

    @cute.jit
    def __call__(self, mSums: cute.Tensor, mdQ: cute.Tensor, scale: Float32, stream: cuda.CUstream) -> None:
        """Launch on ``stream``; nothing is launched where there is no row.

        Args:
            mSums: float32, flat, 16-byte aligned: (B, Hq, Sq rounded to 128, D padded) in the layout of the class.
            mdQ: (B, Sq, Hq, D), 16-byte aligned, last stride 1, other strides multiples of 8 elements, written: the sums times ``scale``.
            scale: softmax_scale, any number.
            stream: CUDA stream.
        """
        batch, seqlen, heads, _ = mdQ.shape
        tiles = cute.ceil_div(seqlen, ROW_TILE)
        blocks = tiles * heads * batch
        if blocks > 0:
            divisors = Divisors(cute.FastDivmodDivisorV2(tiles), cute.FastDivmodDivisorV2(heads))
            Postprocess.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
            self.kernel(mSums, mdQ, scale, divisors).launch(grid=[blocks, 1, 1], block=[self.config.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mdQ: cute.Tensor, scale: Float32, divisors: Divisors) -> None:
        """128 rows. Four rows of a warp, eight lanes each, read 64 bytes that lie together, and write 128 of every row."""
        thread = cute.arch.thread_idx()[0]
        columns, chunks = padded_head_dim(self.problem.head_dim), self.problem.head_dim // CHUNK
        tile = locate(divisors)
        sums = mSums.iterator.toint() + Int64(cute.arch.block_idx()[0]) * (4 * ROW_TILE * columns)
        for p in cutlass.range_constexpr(passes(self.config.threads)):
            local = p * (self.config.threads // LANES) + thread // LANES
            row = tile.index * ROW_TILE + local
            for turn in cutlass.range_constexpr(-(-chunks // LANES)):
                column = (thread % LANES + turn * LANES) * CHUNK
                if row < mdQ.shape[1] and column < self.problem.head_dim:
                    values = cute.make_rmem_tensor((VECTOR, CHUNK // VECTOR), Float32)
                    for part in cutlass.range_constexpr(CHUNK // VECTOR):
                        at = sums + 4 * dq_offset(local, column + part * VECTOR, columns)
                        cute.autovec_copy(global_tensor(Float32, at, VECTOR), values[None, part])
                    result = cute.make_rmem_tensor((VECTOR, CHUNK // VECTOR), self.dtype)
                    result.store((values.load() * scale).to(self.dtype))
                    flat = cute.make_tensor(result.iterator, cute.make_layout(CHUNK))
                    cute.autovec_copy(flat, global_tensor(self.dtype, address(mdQ, tile.batch, row, tile.head, column), CHUNK))
