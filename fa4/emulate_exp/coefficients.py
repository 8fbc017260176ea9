"""Coefficients (c0, ..., c_n) of polynomials close to 2^f on [0, 1], c0 = 1: found by ``python -m fa4.emulate_exp --derive``."""

from __future__ import annotations

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    1: (1.0, 0.9235568046569824),
    2: (1.0, 0.665960967540741, 0.3299323618412018),
    3: (1.0, 0.6951166987419128, 0.22764530777931213, 0.07706679403781891),
    4: (1.0, 0.6930448412895203, 0.2412802278995514, 0.05224243551492691, 0.013426709920167923),
    5: (1.0, 0.6931511163711548, 0.24016661942005157, 0.055792927742004395, 0.009025679901242256, 0.0018634818261489272),
    6: (
        1.0,
        0.6931470632553101,
        0.24022908508777618,
        0.05548618361353874,
        0.009673775173723698,
        0.0012482288293540478,
        0.00021565984934568405,
    ),
}
"""By degree; every number is a float32."""

POLYNOMIAL_ERROR: dict[int, float] = {1: 3.823e-2, 2: 2.054e-3, 3: 8.565e-5, 4: 2.955e-6, 5: 1.389e-7, 6: 6.084e-8}
"""Bounds on abs(p(f) / 2^f - 1) in float32 arithmetic, by degree, over all multiples f of 2^-24 in [0, 1]."""

RELATIVE_ERROR: dict[int, float] = {1: 3.823e-2, 2: 2.054e-3, 3: 8.568e-5, 4: 2.971e-6, 5: 1.595e-7, 6: 7.72e-8}
"""Bounds on the relative error of 2^x, by degree, over all float32 x in [-126, 0]; for -1/2 < x < 0, f itself is rounded."""

CONTINUOUS: dict[int, tuple[float, ...]] = {3: (1.0, 0.6954242587089539, 0.2263079583644867, 0.07826778292655945)}
"""With p(1) = 2 as well, in float32 arithmetic, so that 2^x has no step at integers.

Just below 0, where the scores of equal keys lie once they are rounded, the others are off by their largest error: the sum of a row would
be, too. That no step costs a fifth more error elsewhere.
"""

CONTINUOUS_ERROR: dict[int, float] = {3: 1.032e-4}
"""As ``RELATIVE_ERROR``."""


def coefficients(degree: int, continuous: bool) -> tuple[float, ...]:
    """The polynomial in use."""
    return (CONTINUOUS if continuous else COEFFICIENTS)[degree]
