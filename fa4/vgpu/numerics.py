"""Floating-point arithmetic as PTX defines it, where numpy does not offer it: fused, directed, 16 bits wide, approximate.

The way to results that are rounded once: compute in float64 with *rounding to odd* (an inexact result gets its last bit set), then round
to the narrower type. Two more bits than the target has are enough for that to be exact in every direction (Boldo and Melquiond 2008).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

TINY32 = np.float32(2.0**-126)
_LOW_29 = np.uint64((1 << 29) - 1)
_TINY_NORMAL = np.float64(2.0**-125)
_TIE_29 = np.uint64(1 << 28)


def odd_sum(p: Array, c: Array) -> Array:
    """P + c of float64, rounded to odd."""
    s = p + c
    back = s - p
    error = (p - (s - back)) + (c - back)
    inexact = (error != 0) & np.isfinite(s) & np.isfinite(error)
    even = (s.view(np.uint64) & np.uint64(1)) == 0
    return np.where(inexact & even, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)


def narrow(x: Array, mode: str) -> Array:
    """float64, exact or rounded to odd, to float32: rn, rz, rm (down) or rp (up)."""
    r = x.astype(np.float32)
    if mode == "rn":
        return r
    y = r.astype(np.float64)
    infinite = np.isinf(x)
    if mode == "rm":
        return np.where((y > x) & ~infinite, np.nextafter(r, np.float32(-np.inf)), r)
    if mode == "rp":
        return np.where((y < x) & ~infinite, np.nextafter(r, np.float32(np.inf)), r)
    return np.where((np.abs(y) > np.abs(x)) & ~infinite, np.nextafter(r, np.float32(0)), r)


def flush(x: Array) -> Array:
    """Subnormal float32 to zero of the same sign (``.ftz``)."""
    return np.asarray(np.where(np.abs(x) < TINY32, np.copysign(np.float32(0), x), x))


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN becomes 0 (``.sat``)."""
    return np.asarray(np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)))


def fma32(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """A * b + c of float32 with one rounding."""
    wide = a.astype(np.float64) * b  # exact: 48 bits
    s = wide + c
    if mode == "rn":
        # Rounding twice differs only next to a tie of the second rounding, or where float32 has fewer bits.
        tie = (s.view(np.uint64) & _LOW_29) == _TIE_29
        if not np.count_nonzero(tie) and not np.count_nonzero(np.abs(s) < _TINY_NORMAL):
            return s.astype(np.float32)
    return _zero_sum(narrow(odd_sum(wide, c.astype(np.float64)), mode), wide, c, mode)


def add32(a: Array, b: Array, mode: str) -> Array:
    """A + b of float32, rounded once in any direction."""
    return _zero_sum(narrow(odd_sum(a.astype(np.float64), b.astype(np.float64)), mode), a, b, mode)


def _zero_sum(result: Array, a: Array, b: Array, mode: str) -> Array:
    """A sum of opposite numbers is -0 when rounding down, +0 otherwise (IEEE 754, 6.3)."""
    if mode != "rm":
        return result
    return np.where((result == 0) & (a == -b) & (np.signbit(a) != np.signbit(b)), result.dtype.type(-0.0), result)


def multiply32(a: Array, b: Array, mode: str) -> Array:
    """A * b of float32: exact in float64, rounded once."""
    return narrow(a.astype(np.float64) * b, mode)


def divide32(a: Array, b: Array, mode: str) -> Array:
    """A / b of float32 in any direction: the nearest one, corrected by the sign of its remainder, which float64 holds exactly."""
    q = a / b
    if mode == "rn":
        return q
    rest = (a.astype(np.float64) - q.astype(np.float64) * b) * np.sign(b)
    overflow = np.isinf(q) & np.isfinite(a) & (b != 0)
    return _correct(q, np.where(overflow, -np.sign(q), rest), mode)


def sqrt32(a: Array, mode: str) -> Array:
    """Square root of float32 in any direction."""
    r = np.sqrt(a)
    if mode == "rn":
        return r
    return _correct(r, a.astype(np.float64) - r.astype(np.float64) ** 2, mode)


def _correct(q: Array, rest: Array, mode: str) -> Array:
    """Q moved by one unit where the exact value lies on the other side of it; ``rest`` has the sign of exact - q."""
    exact = np.where(np.isfinite(rest), rest, 0.0)
    down = exact < 0
    up = exact > 0
    if mode == "rz":
        down, up = down & (q > 0), up & (q < 0)
        return np.where(down | up, np.nextafter(q, q.dtype.type(0)), q)
    if mode == "rm":
        return np.where(down, np.nextafter(q, q.dtype.type(-np.inf)), q)
    return np.where(up, np.nextafter(q, q.dtype.type(np.inf)), q)


def exact64(
    operation: Callable[..., Fraction], fallback: Array, operands: tuple[Array, ...], mode: str, opposite: Array | None = None
) -> Array:
    """A float64 operation by exact rationals, lane by lane, where all operands are finite; ``fallback`` elsewhere.

    ``opposite`` says where the operation is a sum of numbers of opposite sign, see ``_zero_sum``.

    Slow, but float64 is rare in the kernels this machine is for.
    """
    result = np.array(fallback, np.float64)
    for i, values in enumerate(zip(*(np.broadcast_to(x, result.shape).tolist() for x in operands), strict=True)):
        if not all(map(math.isfinite, values)):
            continue
        try:
            exact = operation(*map(Fraction, values))
        except ZeroDivisionError:
            continue
        if exact != 0:
            result[i] = _round64(exact, mode)
        elif opposite is not None and mode == "rm" and opposite[i]:
            result[i] = -0.0
    return result


def _round64(exact: Fraction, mode: str) -> float:
    try:
        value = float(exact)
    except OverflowError:
        value = math.inf if exact > 0 else -math.inf
    if mode == "rn":
        return value
    above = (math.isinf(value) and value > 0) or (not math.isinf(value) and Fraction(value) > exact)
    below = (math.isinf(value) and value < 0) or (not math.isinf(value) and Fraction(value) < exact)
    if above and (mode == "rm" or (mode == "rz" and exact > 0)):
        return math.nextafter(value, -math.inf)
    if below and (mode == "rp" or (mode == "rz" and exact < 0)):
        return math.nextafter(value, math.inf)
    return value


def minmax(a: Array, b: Array, nan: bool = False, largest: bool = False) -> Array:
    """Min or max: one NaN is ignored unless ``nan``, and -0 is less than +0 (PTX ISA 9.7.3.11)."""
    r = (np.maximum if largest else np.minimum)(a, b) if nan else (np.fmax if largest else np.fmin)(a, b)
    if np.count_nonzero(r) != r.size:  # faster than r.all()
        zeros = (a == 0) & (b == 0)
        negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
        r = np.where(zeros, np.copysign(r.dtype.type(0), np.where(negative, r.dtype.type(-1), r.dtype.type(1))), r)
    return r


# 16-bit types. bfloat16 values travel as uint16 bits.


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits to float32."""
    return np.asarray((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 to bfloat16 bits, rn or rz; NaN becomes 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) if mode == "rn" else np.uint32(0)
    rounded = (bits + half) >> np.uint32(16)
    if np.isnan(x).any():
        rounded = np.where(np.isnan(x), np.uint32(0x7FFF), rounded)
    return np.asarray(rounded.astype(np.uint16))


def odd32(x: Array) -> Array:
    """float64 to float32, rounded to odd, ready to be rounded once more."""
    r = narrow(x, "rz")
    inexact = np.isfinite(x) & (r.astype(np.float64) != x)
    return np.asarray((r.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32))


def to_f16(x: Array, mode: str = "rn") -> Array:
    """float32 or float64 to float16, rn or rz."""
    r = x.astype(np.float16)
    if mode == "rz":
        over = np.abs(r.astype(np.float64)) > np.abs(x.astype(np.float64))
        r = np.where(over & ~np.isinf(x), np.nextafter(r, np.float16(0)), r)
    return r


def to_tf32(x: Array, mode: str) -> Array:
    """float32 to tf32 bits: 10 bits of mantissa, to nearest (rna: ties away from zero, rn: to even) or rz."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    if mode == "rna":
        rounded = bits + np.uint32(0x1000)
    elif mode == "rn":
        rounded = bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    else:
        rounded = bits
    return np.where(np.isfinite(x), rounded & np.uint32(0xFFFFE000), np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))


# Approximate functions


def _mix(bits: Array, seed: int) -> Array:
    """A well-mixed 64-bit number from each input, so that the same input always deviates by the same amount."""
    x = bits.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15) & (2**64 - 1))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(31)))


def deviate(exact: Array, bits: Array, seed: int, relative: float, absolute: float = 0.0) -> Array:
    """``exact`` (float64) moved by a pseudo-random share of the error that the ISA allows."""
    share = _mix(bits, seed).view(np.int64).astype(np.float64) * 2.0**-63
    moved = exact + share * (np.abs(exact) * relative + absolute)
    return np.where(np.isfinite(exact), moved, exact)
