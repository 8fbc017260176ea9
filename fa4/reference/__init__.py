"""The definition of correctness: attention in float64, and FlashAttention-1 to -4 as readable tiled algorithms.

``standard_attention`` and ``standard_attention_backward`` define what every kernel must compute. The others show how each
generation gets there, and count what it moves. Nothing here is fast. Read in this order: ``mask``, ``standard``, ``online``,
``flash1``, ``flash2``, ``flash3``, ``flash4``; ``docs/concepts/algorithms.md`` derives them.
"""

from fa4.reference.flash1 import flash1_attention
from fa4.reference.flash2 import flash2_attention, flash2_attention_backward
from fa4.reference.flash3 import Fp8Options, flash3_attention
from fa4.reference.flash4 import Flash4Options, flash4_attention
from fa4.reference.ledger import (
    Ledger,
    flash1_operand_traffic,
    flash2_operand_traffic,
    standard_intermediate_traffic,
    standard_operand_traffic,
)
from fa4.reference.mask import visible
from fa4.reference.problem import AttentionOptions, AttentionResult, Gradients, MaskMod, ScoreMod, Tiles
from fa4.reference.standard import standard_attention, standard_attention_backward

__all__ = [
    "AttentionOptions",
    "AttentionResult",
    "Flash4Options",
    "Fp8Options",
    "Gradients",
    "Ledger",
    "MaskMod",
    "ScoreMod",
    "Tiles",
    "flash1_attention",
    "flash1_operand_traffic",
    "flash2_attention",
    "flash2_attention_backward",
    "flash2_operand_traffic",
    "flash3_attention",
    "flash4_attention",
    "standard_attention",
    "standard_attention_backward",
    "standard_intermediate_traffic",
    "standard_operand_traffic",
    "visible",
]
