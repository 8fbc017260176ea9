"""The two products of a tile: ldmatrix feeds mma.sync m16n8k16, fp32 accumulators stay in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warp

from fa4.config import WARP, AmpereForwardConfig, padded_head_dim
from fa4.kernels.ampere.forward.layouts import address, matrices_of_a, matrices_of_b, matrices_of_b_transposed, step
from fa4.kernels.common.fragments import as_operand_a, by_n16


@dataclass(frozen=True)
class Operand:
    """A tile in shared memory as ldmatrix x4 sees it: ``at`` is this thread's address for its first 16 rows and 16 columns."""

    at: Int32
    rows: int
    head_dim: int
    dtype: Any
    transpose: bool

    @property
    def column_steps(self) -> int:
        """Steps of 16 columns, padding included."""
        return padded_head_dim(self.head_dim) // 16

    @cute.jit
    def load(self, fragment: cute.Tensor, at: Int32, row: cutlass.Constexpr[int], column_step: cutlass.Constexpr[int]) -> None:
        """Fill eight registers' halves from the 16x16 block at ``row`` and the given step of columns; ``at`` is ``self.at`` of a slot."""
        flip, offset = step(self.rows, self.head_dim, row, column_step)
        place = at if cutlass.const_expr(flip == 0) else at ^ flip
        source = cute.make_ptr(self.dtype, place + offset, cute.AddressSpace.smem, assumed_align=16)
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=self.transpose, num_matrices=4), self.dtype)
        eight = cute.make_layout(8)
        cute.copy(atom, cute.make_tensor(source, eight), cute.make_tensor(fragment.iterator, eight))


def operands(sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, head_dims: tuple[int, int], tidx: Int32) -> tuple[Operand, ...]:
    """Q, K and V; every warp reads its own rows of Q and all of K and V."""
    lane, warp_row = tidx % WARP, tidx // WARP * 16
    places = (
        (sQ, head_dims[0], matrices_of_a, warp_row, False),
        (sK, head_dims[0], matrices_of_b, 0, False),
        (sV, head_dims[1], matrices_of_b_transposed, 0, True),
    )
    result = []
    for tile, head_dim, matrices, first_row, transpose in places:
        row, column = matrices(lane)
        rows = cute.size(tile, mode=[0])
        result.append(Operand(address(tile, row + first_row, column), rows, head_dim, tile.element_type, transpose))
    return tuple(result)


@cute.jit
def scores(
    acc_S: cute.Tensor,
    tiled_mma: cute.TiledMma,
    Q: Operand,
    at_Q: Int32,
    K: Operand,
    at_K: Int32,
    config: cutlass.Constexpr[AmpereForwardConfig],
) -> None:
    """acc_S += Q K^T: per k16 step the rows of Q once, then 16 keys at a time."""
    acc = by_n16(acc_S)
    blocks_m = cute.size(acc_S, mode=[1])
    for k in cutlass.range_constexpr(Q.column_steps):
        tSrQ = cute.make_rmem_tensor(((2, 2, 2), blocks_m), Q.dtype)
        for m in cutlass.range_constexpr(blocks_m):
            Q.load(tSrQ[None, m], at_Q, m * (config.tile_m // blocks_m), k)
        for n in cutlass.range_constexpr(config.tile_n // 16):
            tSrK = cute.make_rmem_tensor(((2, 2), 2), K.dtype)
            K.load(tSrK, at_K, n * 16, k)
            cute.gemm(tiled_mma, acc[None, None, (None, n)], tSrQ, tSrK, acc[None, None, (None, n)])


@cute.jit
def values(acc_O: cute.Tensor, tiled_mma: cute.TiledMma, P: cute.Tensor, V: Operand, at_V: Int32) -> None:
    """acc_O += P V with P rounded to 16 bits: per 16 keys, 16 columns of V at a time."""
    rP = cute.make_rmem_tensor_like(P, V.dtype)
    rP.store(P.load().to(V.dtype))
    tOrP, acc = as_operand_a(rP), by_n16(acc_O)
    for k in cutlass.range_constexpr(cute.size(tOrP, mode=[2])):
        for n in cutlass.range_constexpr(V.column_steps):
            tOrV = cute.make_rmem_tensor(((2, 2), 2), V.dtype)
            V.load(tOrV, at_V, k * 16, n)
            cute.gemm(tiled_mma, acc[None, None, (None, n)], tOrP[None, None, k], tOrV, acc[None, None, (None, n)])
