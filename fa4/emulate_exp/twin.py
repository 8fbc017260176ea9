"""The numpy twin of the device code: the same bits for every float32 that is not NaN.

Cody and Waite's reduction: x = n + f with n = floor(x) and 0 <= f <= 1, so that 2^x = 2^n * 2^f. A polynomial p gives 2^f, and the
factor 2^n is an integer addition to the exponent field of the float32 number. p(0) = 1 exactly, so that the row maximum weighs 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fa4.emulate_exp.coefficients import COEFFICIENTS, CONTINUOUS, coefficients
from fa4.errors import ArgumentError

Float32Array = npt.NDArray[np.float32]
Form = Literal["full", "fast", "unclamped"]

FORMS: tuple[Form, ...] = ("full", "fast", "unclamped")
LOWEST = {"full": -150.0, "fast": -127.0}
"""Smaller arguments, -inf included, are replaced by this one, whose result is 0."""
FULL_BIAS = 64
"""The full form computes 2^(x + 64), a normal number for every x that has a result, and multiplies it by 2^-64 in the end."""
MANTISSA_BITS = 23

_DISCARDED_BITS = np.uint64((1 << 29) - 1)  # of a float64, when it is rounded to float32
_TIE = np.uint64(1 << 28)


def emulated_exp2(x: npt.ArrayLike, degree: int = 3, form: Form = "fast", continuous: bool = False) -> Float32Array:
    """2^x elementwise in float32, bit for bit what the device code computes.

    Args:
        x: any shape; converted to float32.
        degree: of the polynomial, 1 to 6.
        form: "fast": for every x < 128, -inf included. From -126 the relative error is at most ``RELATIVE_ERROR[degree]``; below
            -127 the result is 0; between them it is a subnormal number, at most 2^-127 away. "unclamped": the same bits for
            -127 <= x < 128, garbage below. "full": for every x < 64, and right below -126, too: results are rounded to the
            subnormal numbers, 0 from -150. NaN gives NaN in the full form, and in the others the largest float32
            (0x7FFFFFFF, which is what arithmetic makes of every NaN, one exponent lower).
        continuous: with ``CONTINUOUS`` coefficients, and ``CONTINUOUS_ERROR``: no step at integers. Of degree 3 only.

    Returns:
        float32, the shape of x.

    Raises:
        ArgumentError: an unknown degree or form.
    """
    check(degree, form, continuous)
    x = np.asarray(x, dtype=np.float32)
    invalid = np.isnan(x)
    value = np.where(invalid, np.float32(0), x)
    if form != "unclamped":
        value = np.maximum(value, np.float32(LOWEST[form]))
    whole = np.floor(value)
    fraction = value - whole  # exact, but just below 0, where it rounds to at most 1
    exponent = whole.astype(np.int64) + (FULL_BIAS if form == "full" else 0)
    bits = polynomial(fraction, coefficients(degree, continuous)).view(np.int32).astype(np.int64) + (exponent << MANTISSA_BITS)
    result = bits.astype(np.uint32).view(np.float32)  # modulo 2^32, as the device adds
    if form == "full":
        return np.asarray(np.where(invalid, np.float32(np.nan), result * np.float32(2.0**-FULL_BIAS)))
    return np.asarray(np.where(invalid, np.finfo(np.float32).max, result))


def check(degree: int, form: str, continuous: bool = False) -> None:
    """Raise ArgumentError for a degree or form that there is not."""
    if continuous and degree not in CONTINUOUS:
        raise ArgumentError("degree", degree, "there are continuous coefficients for degree 3 alone", "use 3")
    if degree not in COEFFICIENTS:
        raise ArgumentError("degree", degree, "there are coefficients for degrees 1 to 6", "use 3, whose error a 16-bit P hides")
    if form not in FORMS:
        raise ArgumentError("form", form, "is unknown", f"use one of {', '.join(FORMS)}")


def polynomial(f: Float32Array, coefficients: Sequence[float]) -> Float32Array:
    """c0 + f (c1 + f (c2 + ...)) by Horner's scheme, each step one float32 multiply-add; f in [0, 1]."""
    result = np.full_like(f, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = fma(result, f, np.float32(coefficient))
    return result


def fma(a: Float32Array, b: Float32Array, c: Any) -> Float32Array:
    """A * b + c, rounded once to float32, where the result is a normal number.

    The product of two float32 is exact in float64, the sum is not. Rounding it twice, to float64 and then to float32, goes wrong only
    where the float64 is a tie that the exact sum is not; there the float64 is moved to the side of the exact sum.
    """
    product = a.astype(np.float64) * b
    wide = product + c
    ties = np.flatnonzero((wide.view(np.uint64) & _DISCARDED_BITS) == _TIE)
    if ties.size:
        s, p, addend = wide.ravel()[ties], product.ravel()[ties], np.broadcast_to(c, wide.shape).ravel()[ties].astype(np.float64)
        back = s - p
        rest = (p - (s - back)) + (addend - back)  # exact sum - s (Knuth's two-sum)
        wide.ravel()[ties] = np.where(rest == 0, s, np.nextafter(s, np.where(rest > 0, np.inf, -np.inf)))
    return np.asarray(wide.astype(np.float32))
