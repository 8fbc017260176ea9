"""From products to scores: softmax_scale and softcap as run-time numbers, folded on the host."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126
"""Stands in for 0: products times it vanish beside 1, while -inf, a hidden key, stays -inf (0 * -inf would be NaN)."""


class ScoreScalars(NamedTuple):
    """Run-time numbers of a score in log2 units.

    Without softcap: ``scale_log2`` = abs(softmax_scale) * log2(e) > 0, and ``flip_q`` = 0x80008000 where the scale is negative, else 0: Q
    is negated instead, so that the largest product has the largest score.
    With softcap: ``cap_log2`` = softcap * log2(e) and ``gain`` = 2 * log2(e) * softmax_scale / softcap; either sign will do.
    """

    scale_log2: Float32 | None
    flip_q: Int32 | None
    cap_log2: Float32 | None
    gain: Float32 | None


@cute.jit
def score_scalars(softmax_scale: Float32, softcap: Float32 | None) -> ScoreScalars:
    """Host side: the numbers that the kernel is given."""
    scale_log2 = None
    flip_q = None
    cap_log2 = None
    gain = None
    if const_expr(softcap is not None):
        cap_log2 = softcap * LOG2_E
        gain = softmax_scale / softcap * (2.0 * LOG2_E)
    else:
        negative = softmax_scale < 0.0
        scale_log2 = max((-softmax_scale if negative else softmax_scale) * LOG2_E, Float32(SMALLEST_SCALE))
        flip_q = Int32(-0x7FFF8000) if negative else Int32(0)
    return ScoreScalars(scale_log2, flip_q, cap_log2, gain)


@cute.jit
def cap(acc_S: cute.Tensor, scalars: ScoreScalars) -> None:
    """Replace products by softcap * tanh(softmax_scale * product / softcap), in log2 units.

    tanh(x) = 1 - 2 / (1 + exp(2 x)) needs one exp2 and one reciprocal, and has an absolute error of a few 2**-24 where tanh.approx has
    2**-11 relative: as wrong as a score rounded to 16 bits. Where exp2 overflows, the reciprocal is 0 and the score the cap.
    """
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        grown = cute.math.exp2(acc_S[i] * scalars.gain, fastmath=True)
        acc_S[i] = scalars.cap_log2 - (2.0 * scalars.cap_log2) * cute.arch.rcp_approx(1.0 + grown)
