"""Inputs, the one error bound and hypothesis strategies, shared by this project's tests and by users who check kernels of their own.

``fa4.testing.strategies`` needs hypothesis (the ``test`` extra); the rest needs core dependencies only.
"""

from fa4.testing.check import check_attention, compare_attention
from fa4.testing.compare import Comparison, compare
from fa4.testing.inputs import AttentionInputs, AttentionShape, make_inputs
from fa4.testing.torch_attention import torch_attention

__all__ = [
    "AttentionInputs",
    "AttentionShape",
    "Comparison",
    "check_attention",
    "compare",
    "compare_attention",
    "make_inputs",
    "torch_attention",
]
