"""Minimax coefficients for 2^f on [0, 1], found in three steps; ``python -m fa4.emulate_exp --derive`` repeats them.

1. Remez exchange with p(0) = 1 fixed. Not the error of the exact polynomial is made equal at its extremes, but that error plus an
   envelope: the most that float32 Horner steps can add to it (times a factor, since they rarely add up).
2. Coefficients are rounded to float32 one after the other, c1 first, up and down, and the exchange is repeated for those not yet
   rounded: 2^degree candidates for each envelope.
3. The candidates are compared by what float32 arithmetic makes of them, on some fractions f. The best is improved by small steps of its
   coefficients, then tried on all fractions; the worst of those join the comparison, until its winner's worst is among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4.emulate_exp.twin import polynomial

Float64Array = npt.NDArray[np.float64]
Coefficients = tuple[float, ...]
Envelope = Callable[[Float64Array], Float64Array]

FRACTION_BITS = 24
"""f = x - floor(x) of a float32 x <= 0 is a multiple of 2^-24."""

_GRID = np.linspace(0, 1, 20001)
_ENVELOPE_FACTORS = (0.0, 0.5, 0.8, 1.0, 1.2)
_STEPS = [sign * size for size in (1, 2, 4, 16, 64, 256, 1024) for sign in (1, -1)]
_FIRST_FRACTIONS = 1021  # one in so many; a prime, so that no bit of f is always the same
_WORST = 300


def derive(degree: int) -> Coefficients:
    """The coefficients (c0, ..., c_degree), each a float32 number; the same on every run."""
    fractions = (np.arange(2**FRACTION_BITS + 1) / 2**FRACTION_BITS).astype(np.float32)
    exact = np.exp2(fractions.astype(np.float64))
    compared = np.arange(0, len(fractions), _FIRST_FRACTIONS)
    candidates = list(dict.fromkeys(c for factor in _ENVELOPE_FACTORS for c in _rounded(degree, _envelope(factor))))
    best, least = candidates[0], np.inf
    while True:
        f, target = fractions[compared], exact[compared]
        winner, promised = _improve(min(candidates, key=lambda c: largest_error(c, f, target)), f, target)
        candidates.append(winner)
        errors = np.abs(polynomial(fractions, winner) / exact - 1)
        if errors.max() < least:
            best, least = winner, errors.max()
        if promised >= least:
            return best
        compared = np.unique(np.concatenate([compared, np.argpartition(-errors, _WORST)[:_WORST]]))


def largest_error(coefficients: Sequence[float], f: npt.NDArray[np.float32], target: Float64Array) -> float:
    """Largest relative error of the float32 polynomial at the fractions ``f``, whose powers of two are ``target``."""
    return float(np.abs(polynomial(f, coefficients) / target - 1).max())


def remez(fixed: Sequence[float], degree: int, envelope: Envelope | None = None) -> Coefficients:
    """Minimax polynomial for 2^f on [0, 1] in relative error: ``fixed`` are its lowest coefficients, the others are found.

    The largest sum of abs(error) and ``envelope`` is made as small as possible, by Remez exchange on a grid: with m free coefficients
    that sum takes its largest value at m + 1 points, where the error has alternating signs.
    """
    envelope = envelope or np.zeros_like
    free = range(len(fixed), degree + 1)
    signs = (-1.0) ** np.arange(len(free) + 1)
    points = 0.5 - 0.5 * np.cos(np.pi * (np.arange(len(signs)) + 0.5) / len(signs))  # zeros of a Chebyshev polynomial
    found: Coefficients = tuple(fixed)
    bound = _GRID * 0 + envelope(_GRID)
    for _ in range(60):
        scale = np.exp2(-points)  # error = p(f) / 2^f - 1
        system = np.stack([*(points**j * scale for j in free), -signs], axis=1)
        known = 1 - np.polyval(list(reversed(fixed)), points) * scale - signs * envelope(points)
        *solution, level = np.linalg.solve(system, known)
        found = (*fixed, *map(float, solution))
        error = np.polyval(found[::-1], _GRID) * np.exp2(-_GRID) - 1
        total = np.abs(error) + bound
        extremes = _alternating(error, total, len(signs))
        if len(extremes) < len(signs) or total.max() <= abs(level) * (1 + 1e-6):
            break
        points = _GRID[extremes]
    return found


def _alternating(error: npt.NDArray[Any], total: npt.NDArray[Any], count: int) -> list[int]:
    """Where ``total`` is largest in each run of one sign of ``error``; the smaller end is dropped while there are more than ``count``."""
    runs = np.split(np.arange(len(error)), np.flatnonzero(np.diff(np.where(error < 0, -1, 1))) + 1)
    peaks = [int(run[np.argmax(total[run])]) for run in runs]
    while len(peaks) > count:
        peaks.pop(0 if total[peaks[0]] < total[peaks[-1]] else -1)
    return peaks


def _envelope(factor: float) -> Envelope:
    """Relative error that rounding Horner's last two steps can add: half a unit of p in [1, 2], and of c1 + ... in [1/2, 1], times f."""
    return lambda f: factor * 2.0**-24 * (1 + f / 2) * np.exp2(-f)


def _rounded(degree: int, envelope: Envelope, fixed: Coefficients = (1.0,)) -> Iterable[Coefficients]:
    """All ways to round one coefficient after the other to a neighbouring float32, the others adapting."""
    if len(fixed) == degree + 1:
        yield fixed
        return
    value = remez(fixed, degree, envelope)[len(fixed)]
    nearest = np.float32(value)
    other = np.nextafter(nearest, np.float32(np.inf if nearest < value else -np.inf))
    for choice in (nearest, other):
        yield from _rounded(degree, envelope, (*fixed, float(choice)))


def _improve(start: Coefficients, f: npt.NDArray[np.float32], target: Float64Array) -> tuple[Coefficients, float]:
    """Follow steps of one coefficient that lower the largest error until there is none; return where that ends, and the error."""
    best, least = start, largest_error(start, f, target)
    improved = True
    while improved:
        improved = False
        for index in range(1, len(best)):
            for step in _STEPS:
                moved = (np.float32(best[index]).view(np.int32) + np.int32(step)).view(np.float32)
                candidate = (*best[:index], float(moved), *best[index + 1 :])
                error = largest_error(candidate, f, target)
                if error < least:
                    best, least, improved = candidate, error, True
    return best, least


def derive_continuous(iterations: int = 4000) -> Coefficients:
    """Minimax coefficients of degree 3 with p(1) = 2 besides p(0) = 1, each a float32 number: 1 + f + f (1 - f) (a + b f).

    Lawson's algorithm finds a and b: least squares whose weights are multiplied by the error until the largest is least. Then c2 and c3
    are tried near their rounded values, with the c1 that makes the float32 p(1) exactly 2, and judged by float32 arithmetic.
    """
    f = _GRID[1:-1]
    basis = np.stack([f * (1 - f), f * f * (1 - f)], axis=1) * np.exp2(-f)[:, None]
    target = 1 - (1 + f) * np.exp2(-f)
    weights = np.full_like(f, 1 / len(f))
    best, least = (0.0, 0.0), np.inf
    for _ in range(iterations):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(basis * root[:, None], target * root, rcond=None)[0]
        error = np.abs(basis @ found - target)
        if error.max() < least:
            best, least = (float(found[0]), float(found[1])), error.max()
        weights = weights * error / (weights * error).sum()
    a, b = best
    fractions = (np.arange(0, 2**FRACTION_BITS, _FIRST_FRACTIONS) / 2**FRACTION_BITS).astype(np.float32)
    exact = np.exp2(fractions.astype(np.float64))
    return min(_reaching_two(b - a, -b), key=lambda c: largest_error(c, fractions, exact))


def _reaching_two(c2: float, c3: float) -> Iterable[Coefficients]:
    """Float32 coefficients near c2 and c3 with a c1 for which Horner's scheme gives p(1) = 2."""
    for i in range(-24, 25):
        for j in range(-40, 41, 5):
            near2, near3 = ((np.float32(c).view(np.int32) + np.int32(step)).view(np.float32) for c, step in ((c2, i), (c3, j)))
            upper = float(near2 + near3)
            c1 = float(np.float32(1 - upper))
            if c1 + upper == 1:
                yield (1.0, c1, float(near2), float(near3))
