"""How far the emulation is from 2^x, over every float32 number from -126 to 0, and what whole attention notices of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fa4._table import format_table
from fa4.arch import ARCHS
from fa4.emulate_exp.coefficients import COEFFICIENTS, POLYNOMIAL_ERROR
from fa4.emulate_exp.cost import EMULATION_ALU, best_share, emulation_fma, tile_cycles
from fa4.emulate_exp.twin import emulated_exp2
from fa4.errors import Fa4Error
from fa4.reference import Flash4Options, Tiles, flash4_attention, standard_attention
from fa4.reference.experiments import Size, normal_inputs, rms

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

PRECISIONS = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Significant bits of a normal number."""

ROUNDING_BINADE = 0
"""Shares of wrongly rounded results are counted over -2 < x <= -1: each fraction of 23 bits once, and results normal in every type."""

_BINADE = 2**23
_CHUNK = 2**20
# From -127 (the clamp) up to the binade in which x - floor(x) is 1 for every x: closer to 0, all results are the same.
BINADES = range(6, -27, -1)


@dataclass
class DegreeError:
    """Relative error of one degree, and the share of results, 0 to 1, that differ from the correctly rounded one, by type.

    ``largest`` is over all x seen, at ``at``; ``rounded`` is the largest relative error after rounding to a type, ``best`` that of the
    correctly rounded results.
    """

    degree: int
    largest: float = 0.0
    at: float = 0.0
    wrong: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


def measure(degrees: Sequence[int] = tuple(COEFFICIENTS), stride: int = 1) -> list[DegreeError]:
    """Errors by degree over every ``stride``-th float32 number from -126 to 0; 1 takes minutes, 97 a second or two."""
    results = [DegreeError(degree) for degree in degrees]
    for binade in BINADES:
        for x in numbers(binade, stride):
            exact = np.exp2(x.astype(np.float64))
            for result in results:
                value = emulated_exp2(x, result.degree)
                error = np.abs(value / exact - 1)
                worst = int(np.argmax(error))
                if error[worst] > result.largest:
                    result.largest, result.at = float(error[worst]), float(x[worst])
                if binade == ROUNDING_BINADE:
                    _count_rounding(result, value.astype(np.float64), exact, stride)
    return results


def numbers(binade: int, stride: int = 1) -> Iterator[Float32Array]:
    """The float32 numbers from -2^(binade + 1), exclusive, to -2^binade, none below -126, in pieces."""
    for start in range(0, _BINADE, _CHUNK * stride):
        patterns = np.arange(start, min(start + _CHUNK * stride, _BINADE), stride, dtype=np.int64) + ((127 + binade) << 23)
        x = -patterns.astype(np.uint32).view(np.float32)
        kept = x[x >= -126]
        if kept.size:
            yield kept


def _count_rounding(result: DegreeError, value: Float64Array, exact: Float64Array, stride: int) -> None:
    for name, bits in PRECISIONS.items():
        got, wanted = round_to(value, bits), round_to(exact, bits)
        result.wrong[name] = result.wrong.get(name, 0.0) + np.count_nonzero(got != wanted) * stride / _BINADE
        for errors, numbers_ in ((result.rounded, got), (result.best, wanted)):
            errors[name] = max(errors.get(name, 0.0), float(np.abs(numbers_ / exact - 1).max()))


def round_to(x: Float64Array, bits: int) -> Float64Array:
    """Round positive float64 to ``bits`` significant bits, ties to even.

    A power of two with a fractional exponent is irrational, so it is no tie; and float64, 29 bits longer than float32, is close enough
    to it to tell on which side of one it lies but for one number in hundreds of millions.
    """
    dropped = np.uint64(53 - bits)
    pattern = x.view(np.uint64)
    half = (np.uint64(1) << (dropped - np.uint64(1))) - np.uint64(1)
    rounded = (pattern + half + ((pattern >> dropped) & np.uint64(1))) >> dropped << dropped
    return np.asarray(rounded.view(np.float64))


def exact_error(x: float, degree: int) -> float:
    """Relative error at one x against 2^x in 60 digits.

    Raises:
        Fa4Error: mpmath is not installed.
    """
    try:
        import mpmath
    except ImportError:
        raise Fa4Error("the report checks its worst points with mpmath, which is not installed; pip install mpmath") from None
    with mpmath.workdps(60):
        value = mpmath.mpf(float(emulated_exp2(x, degree)))
        return float(abs(value / mpmath.power(2, mpmath.mpf(float(np.float32(x)))) - 1))


SPREADS = (1.0, 3.0, 6.0, 12.0)
ATTENTION_SIZE = Size(seqlen_q=256, seqlen_k=2048, heads=2, head_dim=128)


def attention_errors(spread: float, shares: Sequence[float], size: Size = ATTENTION_SIZE) -> dict[str, float]:
    """Relative RMS error of whole attention by what was done to the exponentials; logits have standard deviation ``spread``.

    Everything else is float64. "P in bfloat16" rounds each exact exponential to bfloat16, as a kernel does before the second product.
    """
    import ml_dtypes

    q, k, v = normal_inputs(size)
    exact = standard_attention(q * spread, k, v).out

    def error(share: float, **options: Any) -> float:
        flash4 = Flash4Options(emulated_share=share, **options)
        return rms(flash4_attention(q * spread, k, v, tiles=Tiles(128, 128), flash4=flash4).out - exact) / rms(exact)

    def rounded(x: Float32Array) -> Float32Array:
        return np.exp2(x.astype(np.float64)).astype(ml_dtypes.bfloat16).astype(np.float32)

    return {f"{100 * share:g}% emulated": error(share) for share in shares} | {"P in bfloat16": error(1.0, exp2=rounded)}


def error_table(results: Sequence[DegreeError]) -> str:
    """The errors by degree, each largest one checked with mpmath."""
    header = ["degree", "polynomial", "2^x in float32", "at x", "by mpmath"]
    header += [f"{name} differs" for name in PRECISIONS] + ["bfloat16 error", "float16 error"]
    rows = []
    for result in results:
        row = [str(result.degree), f"{POLYNOMIAL_ERROR[result.degree]:.3e}", f"{result.largest:.4e}", f"{result.at:.9g}"]
        row += [f"{exact_error(result.at, result.degree):.4e}"] + [f"{100 * result.wrong[name]:.3g}%" for name in PRECISIONS]
        rows.append([*row, *(f"{result.rounded[name]:.3e}" for name in ("bfloat16", "float16"))])
    best = results[0].best
    rows.append(
        ["rounded 2^x", "", f"{best['float32']:.4e}", "", "", "0%", "0%", "0%", f"{best['bfloat16']:.3e}", f"{best['float16']:.3e}"]
    )
    return format_table(header, rows)


def attention_table() -> str:
    """Whole attention by spread of the logits."""
    columns = {spread: attention_errors(spread, (0.125, 0.25, 1.0)) for spread in SPREADS}
    names = list(columns[SPREADS[0]])
    rows = [[name, *(f"{columns[spread][name]:.1e}" for spread in SPREADS)] for name in names]
    return format_table(["exponentials", *(f"deviation {spread:g}" for spread in SPREADS)], rows)


def cycle_table() -> str:
    """Clocks per tile by emulated share, and the best share, for each architecture."""
    shares = (0.0, 0.125, 0.1875, 0.25)
    rows = []
    for arch in ARCHS.values():
        for head_dim in (64, 128):
            best = best_share(arch, head_dim)
            cycles = [f"{tile_cycles(arch, head_dim, share).total:.0f}" for share in (*shares, best)]
            rows.append([f"{arch.name}, D {head_dim}", *cycles, f"{100 * best:.1f}%"])
    return format_table(["forward tile, clocks", *(f"{100 * share:g}%" for share in shares), "at best", "best share"], rows)


def report(stride: int) -> str:
    """The whole report, as text."""
    seen = "every" if stride == 1 else f"every {stride}th"
    parts = [
        f"Relative error of the emulated 2^x, over {seen} float32 number from -126 to 0; polynomial: over all fractions.\n"
        "differs: share of results that are not the correctly rounded ones, over -2 < x <= -1",
        error_table(measure(stride=stride)),
        f"Whole attention, relative RMS error ({ATTENTION_SIZE.seqlen_q} queries, {ATTENTION_SIZE.seqlen_k} keys, D 128), degree 3,\n"
        "by standard deviation of the logits; everything else in float64",
        attention_table(),
        "Clocks of a tile of 128 x 128 by emulated share (fa4.emulate_exp.cost). An emulated element takes "
        f"{emulation_fma(3):g} multiply-add results\nand {EMULATION_ALU:g} on the ALU; benchmarks/exp2.py counts them in machine code",
        cycle_table(),
    ]
    return "\n\n".join(parts)
