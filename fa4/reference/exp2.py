"""2^x by multiply-add: the emulation that FlashAttention-4 uses, in float32 (arXiv 2603.05451).

Cody and Waite's reduction: x = n + f with n = floor(x) and 0 <= f < 1, so that 2^x = 2^n * 2^f. 2^f comes from a polynomial, and
the factor 2^n is an integer addition to the exponent field of the float32 number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXP2_COEFFICIENTS = (1.0, 0.6951167583465576, 0.22764499485492706, 0.07706703990697861)
"""p(f) = c0 + c1 f + c2 f^2 + c3 f^3 close to 2^f on [0, 1).

The three free coefficients minimise the largest relative error under p(0) = 1 (so that the row maximum gives exactly 1), found by
Remez exchange and rounded to float32. The largest relative error is 8.56e-5.
"""

EXP2_RELATIVE_ERROR = 8.6e-5
"""Bound on the relative error of ``emulated_exp2`` for x in [-126, 128), float32 rounding of the polynomial included."""

_MANTISSA_BITS = 23


def emulated_exp2(x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Compute 2^x elementwise in float32.

    Args:
        x: any shape; converted to float32.

    Returns:
        float32, the shape of x: within ``EXP2_RELATIVE_ERROR`` of 2^x for -126 <= x < 128, 0 below (no denormal numbers), inf
        above, NaN for NaN.
    """
    x = np.asarray(x, dtype=np.float32)
    inside = (x >= -126) & (x < 128)
    argument = np.where(inside, x, np.float32(0))
    whole = np.floor(argument)
    fraction = argument - whole  # exact, but for tiny negative x, where it rounds to 1
    c0, c1, c2, c3 = (np.float32(c) for c in EXP2_COEFFICIENTS)
    mantissa = c0 + fraction * (c1 + fraction * (c2 + fraction * c3))
    bits = mantissa.view(np.int32) + (whole.astype(np.int32) << _MANTISSA_BITS)
    outside = np.where(x < 0, np.float32(0), np.where(x >= 128, np.float32(np.inf), np.float32(np.nan)))
    return np.asarray(np.where(inside, bits.view(np.float32), outside))
