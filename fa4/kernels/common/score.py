"""From products to scores: softmax_scale and softcap as run-time numbers, folded on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fa4.kernels.common.fragments import by_row

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126
"""Stands in for 0: products times it vanish beside 1, while -inf, a hidden key, stays -inf (0 * -inf would be NaN)."""


class ScoreScalars(NamedTuple):
    """Run-time numbers that turn a product into a score in log2 units, ``scale_log2 * x`` with ``scale_log2`` > 0.

    Without softcap x is the product, and ``flip_q`` = 0x80008000 where the scale is negative, else 0: Q is negated instead, so that
    the largest product always has the largest score. With softcap x is what ``capped`` makes of it. Where a user's function changes
    scores, x is what it returns, in natural units, and ``factor`` turns product or capped product into what it is given. ``aux`` are
    the tensors that users' functions read.
    """

    scale_log2: Float32
    flip_q: Int32 | None
    gain: Float32 | None
    factor: Float32 | None = None
    aux: tuple[cute.Tensor, ...] = ()


@cute.jit
def score_scalars(
    softmax_scale: Float32,
    softcap: Float32 | None,
    modified: cutlass.Constexpr[bool] = False,
    aux: tuple[cute.Tensor, ...] = (),
) -> ScoreScalars:
    """Host side: what the kernel is given; ``modified`` where a user's function changes scores."""
    if const_expr(modified):
        if const_expr(softcap is not None):
            return ScoreScalars(Float32(LOG2_E), None, softmax_scale / softcap * (2.0 * LOG2_E), Float32(softcap) * 2.0, aux)
        return ScoreScalars(Float32(LOG2_E), None, None, Float32(softmax_scale), aux)
    if const_expr(softcap is not None):
        return ScoreScalars(Float32(softcap) * (2.0 * LOG2_E), None, softmax_scale / softcap * (2.0 * LOG2_E), None, aux)
    negative = softmax_scale < 0.0
    scale_log2 = max((-softmax_scale if negative else softmax_scale) * LOG2_E, Float32(SMALLEST_SCALE))
    return ScoreScalars(scale_log2, Int32(-0x7FFF8000) if negative else Int32(0), None, None, aux)


def capped(product: Float32, gain: Float32) -> Float32:
    """tanh(softmax_scale * product / softcap) / 2; ``gain`` = 2 * log2(e) * softmax_scale / softcap, of either sign.

    tanh(x) / 2 = 1 / 2 - 1 / (1 + exp(2 x)) needs one exp2 and one reciprocal, and has an absolute error of about 2**-24 where
    tanh.approx has 2**-11 relative: as wrong as a score rounded to 16 bits. Where exp2 overflows, the reciprocal is 0.
    """
    return 0.5 - cute.arch.rcp_approx(1.0 + cute.math.exp2(product * gain, fastmath=True))


@cute.jit
def cap(acc_S: cute.Tensor, gain: Float32) -> None:
    """Replace the products of an mma.sync accumulator by ``capped`` ones."""
    S = by_row(acc_S)
    for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
        for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
            S[r, c] = capped(S[r, c], gain)
