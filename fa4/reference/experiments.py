"""Small experiments behind the figures and tables of ``docs/concepts/algorithms.md``: the page and its test both call them.

Each takes seconds or less. Inputs come from numpy's default generator with a fixed seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from fa4.reference.flash1 import flash1_attention
from fa4.reference.flash2 import flash2_attention
from fa4.reference.flash3 import Fp8Options, flash3_attention
from fa4.reference.flash4 import Flash4Options, flash4_attention
from fa4.reference.ledger import Ledger
from fa4.reference.problem import FloatArray, Tiles
from fa4.reference.standard import standard_attention

Operands = tuple[FloatArray, FloatArray, FloatArray]

TILES = Tiles(128, 128)

FP8_VARIANTS = {
    "per tensor": Fp8Options(block_scales=False, rotation=False),
    "block scales": Fp8Options(block_scales=True, rotation=False),
    "rotation": Fp8Options(block_scales=False, rotation=True),
    "both": Fp8Options(block_scales=True, rotation=True),
}
"""What FlashAttention-3 adds to FP8, one at a time."""


@dataclass(frozen=True)
class Size:
    """Lengths in tokens, heads, and features per head; the batch is 1 and query and key heads are as many."""

    seqlen_q: int
    seqlen_k: int
    heads: int
    head_dim: int


FP8_SIZE = Size(seqlen_q=256, seqlen_k=8192, heads=2, head_dim=128)
FLASH4_SIZE = Size(seqlen_q=256, seqlen_k=2048, heads=2, head_dim=128)


def normal_inputs(size: Size, seed: int = 0) -> Operands:
    """Return Q, K, V with entries from N(0, 1): the scores Q K^T / sqrt(D) then have a standard deviation of 1."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((1, size.seqlen_q, size.heads, size.head_dim))
    k, v = rng.standard_normal((2, 1, size.seqlen_k, size.heads, size.head_dim))
    return q, k, v


def outlier_inputs(size: Size, seed: int = 0) -> Operands:
    """Return Q, K, V with entries N(0, 1) + N(0, 100) * Bernoulli(0.001), outliers as in arXiv 2407.08608, section 4.3."""
    rng = np.random.default_rng(seed)

    def tensor(length: int) -> FloatArray:
        shape = (1, length, size.heads, size.head_dim)
        return rng.standard_normal(shape) + rng.normal(0.0, math.sqrt(100.0), shape) * (rng.random(shape) < 0.001)

    return tensor(size.seqlen_q), tensor(size.seqlen_k), tensor(size.seqlen_k)


def rms(values: npt.NDArray[Any]) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def traffic(seqlen: int, head_dim: int = 128, tiles: Tiles = TILES) -> dict[str, Ledger]:
    """Run standard attention, FlashAttention-1 and -2 on one head of ``seqlen`` queries and keys; return their ledgers."""
    operands = normal_inputs(Size(seqlen, seqlen, 1, head_dim))
    return {
        "standard": standard_attention(*operands).ledger,
        "FlashAttention-1": flash1_attention(*operands, tiles=tiles).ledger,
        "FlashAttention-2": flash2_attention(*operands, tiles=tiles).ledger,
    }


def fp8_errors(seed: int, variants: tuple[str, ...] = tuple(FP8_VARIANTS), size: Size = FP8_SIZE) -> dict[str, float]:
    """Return the root mean square error of the output by FP8 variant, on inputs with outliers."""
    operands = outlier_inputs(size, seed)
    exact = standard_attention(*operands).out
    return {name: rms(flash3_attention(*operands, tiles=TILES, fp8=FP8_VARIANTS[name]).out - exact) for name in variants}


def emulation_errors(shares: tuple[float, ...], tau: float = 8.0, size: Size = FLASH4_SIZE) -> dict[float, float]:
    """Return the root mean square error of FlashAttention-4's output by share of emulated exp2, relative to that of the output."""
    operands = normal_inputs(size)
    exact = standard_attention(*operands).out
    errors = {}
    for share in shares:
        out = flash4_attention(*operands, tiles=TILES, flash4=Flash4Options(tau=tau, emulated_share=share)).out
        errors[share] = rms(out - exact) / rms(exact)
    return errors


def bfloat16_error(size: Size = FLASH4_SIZE) -> float:
    """Return the relative error that rounding the exact output to bfloat16 makes: the yardstick for the others."""
    exact = standard_attention(*normal_inputs(size)).out
    return rms(exact.astype(ml_dtypes.bfloat16).astype(np.float64) - exact) / rms(exact)


def skipped_share(tau: float, score_deviation: float, size: Size = FLASH4_SIZE) -> float:
    """Return the share of rescales that a threshold skips, 0 to 1.

    Args:
        tau: threshold in log2 units.
        score_deviation: standard deviation of the scores, natural-log units: how peaked the softmax is.
        size: lengths, heads, features.
    """
    q, k, v = normal_inputs(size)
    ledger = flash4_attention(q * score_deviation, k, v, tiles=TILES, flash4=Flash4Options(tau=tau, emulated_share=0.0)).ledger
    return ledger.rescales_skipped / (ledger.rescales_done + ledger.rescales_skipped)
