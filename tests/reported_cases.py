"""Inputs of failures that were reported against attention implementations, shared by the tests of every backend.

The numbers are those of the project's list of reported failures.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import replace

import torch

from fa4.testing import AttentionShape, make_inputs

WINDOWS_ALL_HIDDEN = (7, -8)
WINDOWS_NEAREST_HIDDEN = [(70, -8), (-8, 70), (7, -7), (3, -90)]
WINDOWS_OPEN = [(-1, -1), (None, None), (None, 0), (0, -1), (0, 0)]
RATIOS = [3, 5, 6, 7, 9, 128]


def v_with_last_stride_not_one(inputs):
    """Case 16: the same values, v a view of a tensor whose sequence and head dim are the other way round."""
    v = inputs.v.transpose(1, 3).contiguous().transpose(1, 3)
    assert v.stride(3) != 1
    return replace(inputs, v=v)


def stepping_row_maximum(blocks, block, dtype, rising=True):
    """Case 26: from block to block of keys every row's maximum rises by 7.9 or by 8.1 in log2 units, in turn; or falls.

    For ``softmax_scale`` 1. A level is the sum of two columns of k, since 16 bits alone would round 7.9 and 8.1 to one number.
    """
    inputs = make_inputs(AttentionShape(1, 16, blocks * block, 1, 1, 64), dtype)
    level = torch.tensor([7.9, 8.1]).repeat(blocks // 2).cumsum(0) * math.log(2)
    if not rising:
        level = level.flip(0)
    level = level.repeat_interleave(block)[None, :, None]
    q, k = 0.05 * inputs.q, 0.05 * inputs.k
    k[..., 0] = level.to(dtype)
    k[..., 1] = (level - k[..., 0].float()).to(dtype)
    q[..., :2] = 1
    return replace(inputs, q=q, k=k)


def mapped(dtype, elements):
    """A flat tensor of zeros of any size: memory that is mapped, but not there until it is written."""
    no_reserve = 0x4000  # MAP_NORESERVE, mmap(2)
    memory = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(memory, dtype=dtype)


def far_apart(x):
    """Case 14: the values of x in a view whose sequences lie more than 2^31 elements apart."""
    batch, _, heads, dim = x.shape
    stride = (1 << 31) + 9728
    view = mapped(x.dtype, stride * (batch - 1) + x[0].numel()).as_strided(x.shape, (stride, heads * dim, dim, 1))
    return view.copy_(x)
