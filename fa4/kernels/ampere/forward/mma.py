"""The two products of a tile: ldmatrix feeds mma.sync m16n8k16, fp32 accumulators stay in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kernels.ampere.forward.layouts import ldmatrix, transposed
from fa4.kernels.common.fragments import as_operand_a


@dataclass(frozen=True)
class Products:
    """Operands of S = Q K^T and O += P V as this thread sees them.

    ``tSsQ`` (.., m, k), ``tSsK`` (.., n, k, stage) and ``tOsVt`` (.., n, k, stage) are ldmatrix sources; ``tSrQ``, ``tSrK``, ``tOrVt`` the
    registers of one k16 step.
    """

    tiled_mma: cute.TiledMma
    copy_Q: Any
    copy_K: Any
    copy_V: Any
    tSsQ: cute.Tensor
    tSsK: cute.Tensor
    tOsVt: cute.Tensor
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrVt: cute.Tensor

    @staticmethod
    def of(tiled_mma: cute.TiledMma, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, tidx: Int32) -> Products:
        """Partition the tiles; every shape is static."""
        thread = tiled_mma.get_slice(tidx)
        dtype = sQ.element_type
        sQ, sVt = sQ[None, None, 0], transposed(sV)
        copy_Q = cute.make_tiled_copy_A(ldmatrix(dtype, False), tiled_mma).get_slice(tidx)
        copy_K = cute.make_tiled_copy_B(ldmatrix(dtype, False), tiled_mma).get_slice(tidx)
        copy_V = cute.make_tiled_copy_B(ldmatrix(dtype, True), tiled_mma).get_slice(tidx)
        return Products(
            tiled_mma,
            copy_Q,
            copy_K,
            copy_V,
            copy_Q.partition_S(sQ),
            copy_K.partition_S(sK),
            copy_V.partition_S(sVt),
            thread.make_fragment_A(thread.partition_A(sQ)),
            thread.make_fragment_B(thread.partition_B(sK[None, None, 0])),
            thread.make_fragment_B(thread.partition_B(sVt[None, None, 0])),
        )

    @cute.jit
    def scores(self, acc_S: cute.Tensor, stage: Int32) -> None:
        """acc_S += Q K^T, the ldmatrix of a k16 step ahead of the products of the one before."""
        tSsK = self.tSsK[None, None, None, stage]
        to_Q, to_K = self.copy_Q.retile(self.tSrQ), self.copy_K.retile(self.tSrK)
        steps = cute.size(self.tSsQ, mode=[2])
        cute.copy(self.copy_Q, self.tSsQ[None, None, 0], to_Q[None, None, 0])
        cute.copy(self.copy_K, tSsK[None, None, 0], to_K[None, None, 0])
        for k in cutlass.range_constexpr(steps):
            if cutlass.const_expr(k + 1 < steps):
                cute.copy(self.copy_Q, self.tSsQ[None, None, k + 1], to_Q[None, None, k + 1])
                cute.copy(self.copy_K, tSsK[None, None, k + 1], to_K[None, None, k + 1])
            cute.gemm(self.tiled_mma, acc_S, self.tSrQ[None, None, k], self.tSrK[None, None, k], acc_S)

    @cute.jit
    def values(self, acc_O: cute.Tensor, P: cute.Tensor, stage: Int32) -> None:
        """acc_O += P V with P as it came out of the softmax, rounded to 16 bits."""
        rP = cute.make_rmem_tensor_like(P, self.tSrQ.element_type)
        rP.store(P.load().to(self.tSrQ.element_type))
        tOrP = as_operand_a(rP)
        tOsVt = self.tOsVt[None, None, None, stage]
        to_V = self.copy_V.retile(self.tOrVt)
        steps = cute.size(tOrP, mode=[2])
        cute.copy(self.copy_V, tOsVt[None, None, 0], to_V[None, None, 0])
        for k in cutlass.range_constexpr(steps):
            if cutlass.const_expr(k + 1 < steps):
                cute.copy(self.copy_V, tOsVt[None, None, k + 1], to_V[None, None, k + 1])
            cute.gemm(self.tiled_mma, acc_O, tOrP[None, None, k], self.tOrVt[None, None, k], acc_O)
