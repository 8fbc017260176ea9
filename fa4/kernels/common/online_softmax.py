"""Online softmax over tiles of keys (FlashAttention-2, section 3.1): scores in log2 units, one division at the end.

State per row of a thread: ``row_max``, the largest visible score so far in log2 units, and ``row_sum``, this thread's share of
the sum of ``exp2(score - row_max)``. The four lanes of a row agree on the maximum at every tile, on the sum only at the end.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from fa4.kernels.common.fragments import by_row, quad_max, quad_sum


@cute.jit
def reset(row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
    """State before the first tile: no key seen."""
    row_max.fill(-Float32.inf)
    row_sum.fill(0.0)


@cute.jit
def update(
    acc_S: cute.Tensor,
    acc_O: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    scale_log2: Float32 | None,
    masked: cutlass.Constexpr[bool],
) -> None:
    """Turn a tile of scores into P = exp2(scale_log2 * score - row_max), rescaling what earlier tiles left in acc_O and row_sum.

    ``scale_log2`` is positive, so that the largest score has the largest scaled score; None means that scores are in log2 units.
    ``masked`` tiles may leave a row without any visible key so far. Its maximum stays -inf, but 0 is subtracted in its place:
    every P is then exp2(-inf) = 0, and no (-inf) - (-inf) arises. A row that has seen a key has P = 1 at its maximum.
    """
    S, O = by_row(acc_S), by_row(acc_O)
    columns = cute.size(S, mode=[1])
    for r in cutlass.range_constexpr(cute.size(row_max)):
        tile_max = S[r, 0]
        for c in cutlass.range_constexpr(1, columns):
            tile_max = cute.arch.fmax(tile_max, S[r, c])
        tile_max = quad_max(tile_max)
        if const_expr(scale_log2 is not None):
            tile_max = tile_max * scale_log2
        old_max = row_max[r]
        new_max = cute.arch.fmax(old_max, tile_max)
        row_max[r] = new_max
        if const_expr(masked):
            new_max = Float32(0.0) if new_max == -Float32.inf else new_max
        shrink = cute.math.exp2(old_max - new_max, fastmath=True)
        for c in cutlass.range_constexpr(cute.size(O, mode=[1])):
            O[r, c] = O[r, c] * shrink
        total = row_sum[r] * shrink
        for c in cutlass.range_constexpr(columns):
            score = S[r, c]
            if const_expr(scale_log2 is not None):
                score = score * scale_log2
            P = cute.math.exp2(score - new_max, fastmath=True)
            S[r, c] = P
            total = total + P
        row_sum[r] = total


@cute.jit
def finish(acc_O: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
    """Divide acc_O by the sum over keys and leave the natural logarithm of the sum of exponentials in ``row_max``.

    A row that saw no key has sum 0: out 0 (whatever was multiplied by P = 0, even NaN) and lse -inf + log2(0) = -inf.
    """
    O = by_row(acc_O)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        total = quad_sum(row_sum[r])
        empty = Boolean(total == 0.0)
        inverse = cute.arch.rcp_approx(total)
        for c in cutlass.range_constexpr(cute.size(O, mode=[1])):
            O[r, c] = Float32(0.0) if empty else O[r, c] * inverse
        row_max[r] = (row_max[r] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
