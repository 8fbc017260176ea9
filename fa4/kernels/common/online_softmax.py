"""Online softmax over tiles of keys (FlashAttention-2, section 3.1): scores in log2 units, one division at the end.

State per row of a thread: ``row_max``, a reference in log2 units, and ``row_sum``, this thread's share of the sum of
``exp2(score - row_max)``. The four lanes of a row agree on the reference at every tile, on the sum only at the end.

The reference follows the largest visible score lazily (FlashAttention-4, arXiv 2603.05451, conditional rescaling): any number will do
as long as nothing overflows, so a warp rescales only when a row of it has outgrown its reference by more than ``RESCALE_THRESHOLD``.
Then all its rows take their new maxima. After the first tiles that is rare, and a tile costs no multiplication of O.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

from fa4.kernels.common.fragments import by_row, quad_max, quad_sum

RESCALE_THRESHOLD = 8.0
"""In log2 units: P stays at or below 2**8, far from the largest float16, and a sum of 2**22 of them far from the largest float32."""


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
    scale_log2: Float32,
    masked: cutlass.Constexpr[bool],
) -> None:
    """Turn a tile of scores into P = exp2(scale_log2 * score - row_max), and rescale acc_O and row_sum where the maximum grew much.

    ``scale_log2`` is positive, so that the largest score has the largest scaled score. A ``masked`` tile may leave a row without any
    visible key so far: its maximum stays -inf, but 0 is subtracted in its place, so that P is exp2(-inf) = 0 and no (-inf) - (-inf)
    arises. The first visible key is an infinite growth.
    """
    S, O = by_row(acc_S), by_row(acc_O)
    rows, columns = cute.size(row_max), cute.size(S, mode=[1])
    new_max = cute.make_rmem_tensor(rows, Float32)
    grew = Boolean(False)
    for r in cutlass.range_constexpr(rows):
        largest = S[r, 0]
        for c in cutlass.range_constexpr(1, columns):
            largest = cute.arch.fmax(largest, S[r, c])
        new_max[r] = cute.arch.fmax(row_max[r], quad_max(largest) * scale_log2)
        grew = grew | (new_max[r] - row_max[r] > RESCALE_THRESHOLD)
    if cute.arch.vote_any_sync(grew):
        for r in cutlass.range_constexpr(rows):
            shrink = cute.math.exp2(row_max[r] - _subtrahend(new_max[r], masked), fastmath=True)
            row_max[r] = new_max[r]
            row_sum[r] = row_sum[r] * shrink
            O[r, None].store(O[r, None].load() * shrink)
    for r in cutlass.range_constexpr(rows):
        subtrahend = _subtrahend(row_max[r], masked)
        total = row_sum[r]
        for c in cutlass.range_constexpr(columns):
            P = cute.math.exp2(S[r, c] * scale_log2 - subtrahend, fastmath=True)
            S[r, c] = P
            total = total + P
        row_sum[r] = total


@cute.jit
def _subtrahend(maximum: Float32, masked: cutlass.Constexpr[bool]) -> Float32:
    """What is subtracted from scores: the maximum, or 0 where a mask has hidden every key so far."""
    result = maximum
    if const_expr(masked):
        result = Float32(0.0) if maximum == -Float32.inf else maximum
    return result


@cute.jit
def finish(acc_O: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor) -> None:
    """Divide acc_O by the sum over keys and leave the natural logarithm of the sum of exponentials in ``row_max``.

    A row that saw no key has sum 0: out 0 (whatever was multiplied by P = 0, even NaN) and lse -inf + log2(0) = -inf.
    """
    O = by_row(acc_O)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        total = quad_sum(row_sum[r])
        O[r, None].store(O[r, None].load() * cute.arch.rcp_approx(total))
        if total == 0.0:
            O[r, None].fill(0.0)
        row_max[r] = (row_max[r] + cute.math.log2(total, fastmath=True)) * math.log(2.0)
