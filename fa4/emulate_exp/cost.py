"""Clocks per tile as a function of the emulated share, from the rates in ``fa4.arch``: which share is worth it.

The model, for tiles of 128 queries by 128 keys of which an SM works on two in turns, as FlashAttention-3 and -4 do:

* tensor cores: 4 M N D FLOP per tile;
* special-function unit (MUFU), multiply-add pipe, ALU: results per element of the score matrix, as counted below;
* chain: a tile's softmax waits for its products, and its next products for its softmax. Of the softmax, the row maxima come first and
  overlap with nothing of it; then exponentials, scaling and conversion overlap with each other. The row sums are off the chain.

Two tiles take as long as the busiest unit needs for two, or as one tile's chain, whichever is longer. Waiting times of barriers and
memories are left out, so this is a lower bound; what it gets right is where a unit stops being the bottleneck.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.arch import Arch

TILE = 128

# Results per element, by pipe; tests/emulate_exp/test_exp2_machine_code.py counts them in the compiled code.
EMULATION_ALU = 2.0  # the clamp, and shift and addition to the exponent in one instruction
REDUCTION_FMA = 3.0  # add ROUNDER, subtract it, subtract from x
# Of the softmax around it: scale and subtract, add to the row sum; a maximum; a conversion of two elements to 16 bits at once.
SOFTMAX_FMA = 2.0
SUM_FMA = 1.0  # of these, off the chain
CONVERSION_ALU = 0.5
MASK_ALU = 1.0  # one select


def emulation_fma(degree: int) -> float:
    """Multiply-add results per emulated element."""
    return REDUCTION_FMA + degree


@dataclass(frozen=True)
class Cycles:
    """Clocks of one tile by what it waits for; the tile takes the largest."""

    mma: float
    mufu: float
    fma: float
    alu: float
    chain: float

    @property
    def total(self) -> float:
        """Clocks per tile."""
        return max(self.mma, self.mufu, self.fma, self.alu, self.chain)


def tile_cycles(arch: Arch, head_dim: float, share: float, degree: int = 3, masked: float = 0.0) -> Cycles:
    """Clocks of a forward tile at an emulated share, 0 to 1.

    Args:
        arch: its rates.
        head_dim: mean of D and Dv.
        share: emulated share of the exponentials.
        degree: of the polynomial.
        masked: share of the tiles that a mask cuts.
    """
    elements = TILE * TILE
    mma = 4 * elements * head_dim / arch.bf16_flop.value
    mufu = elements * (1 - share) / arch.exp2.value
    emulation = share * emulation_fma(degree)
    fma = elements * (SOFTMAX_FMA + emulation) / arch.fp32_fma.value
    # Blackwell's maximum takes three inputs, so that one instruction takes in two elements.
    maximum = 0.5 if arch.family == "blackwell" else 1.0
    first = elements * (maximum + masked * MASK_ALU) / arch.alu.value
    rest = elements * (CONVERSION_ALU + share * EMULATION_ALU) / arch.alu.value
    exponentials = max(mufu, elements * (SOFTMAX_FMA - SUM_FMA + emulation) / arch.fp32_fma.value, rest)
    return Cycles(mma, mufu, fma, first + rest, (mma + first + exponentials) / 2)


def best_share(arch: Arch, head_dim: float, degree: int = 3, masked: float = 0.0, steps: int = 1000) -> float:
    """The smallest share, in multiples of 1 / steps, at which a tile takes its least clocks: more would only cost accuracy."""
    totals = [tile_cycles(arch, head_dim, i / steps, degree, masked).total for i in range(steps + 1)]
    return totals.index(min(totals)) / steps
