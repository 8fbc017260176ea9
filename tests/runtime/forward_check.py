"""The matrix of the forward, and how to run it on CPU tensors wherever a kernel runs."""

from __future__ import annotations

import torch

import fa4
from fa4.testing import check_attention, make_inputs

LENGTHS = [(1, 17), (65, 129), (127, 128), (192, 320), (300, 77), (0, 5), (5, 0)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 9)},
    "softcap": {"softcap": 10.0},
}
SCHEDULES = [("round_robin", 0), ("random", 1), ("priority", 2), ("priority", 3)]


def on_virtual_gpu(arch="sm_80"):
    def attention(q, k, v, **options):
        return fa4.attention(q, k, v, return_lse=True, backend="vgpu", arch=arch, **options)

    return attention


def on_gpu(q, k, v, **options):
    """On the first GPU, with the kernel of its architecture."""
    out, lse = fa4.attention(*map(moved, (q, k, v)), return_lse=True, **options)
    return out.cpu(), lse.cpu()


def moved(x, index=0):
    """On a GPU, with strides and what lies between the elements."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.to(f"cuda:{index}").as_strided(x.shape, x.stride(), x.storage_offset())


def check(attention, shape, dtype=torch.bfloat16, *, layout="contiguous", factor=1.0, **options):
    inputs = make_inputs(shape, dtype, layout=layout).scaled(factor)
    return check_attention(attention, inputs, backward=False, **options)
