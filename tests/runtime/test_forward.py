"""The forward kernel through ``fa4.attention``, host code included, against float64, on the virtual GPU and on a real one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from forward_check import LENGTHS, MASKS, SCHEDULES, check

import fa4
from fa4.testing import AttentionShape, check_attention, make_inputs

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(attention, lengths):
    check(attention, AttentionShape(2, *lengths, 4, 2, 64), causal=True)


@pytest.mark.parametrize("ratio", [1, 3, 5, 8])
def test_grouped_heads(attention, ratio):
    check(attention, AttentionShape(1, 65, 129, ratio, 1, 64), causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0, 2.0])
@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_scale_of_any_sign_and_large_logits(attention, scale, factor):
    check(attention, AttentionShape(1, 65, 129, 1, 1, 64), softmax_scale=scale, factor=factor, causal=True)


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_strides(attention, layout):
    check(attention, AttentionShape(2, 65, 129, 4, 2, 64), layout=layout, causal=True)


def test_last_stride_not_one(attention):
    inputs = make_inputs(AttentionShape(1, 65, 65, 2, 2, 64))
    v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    check_attention(attention, replace(inputs, v=v), backward=False, causal=True)


def test_views_of_one_tensor(attention):
    qkv = torch.randn(2, 70, 3, 2, 64).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    inputs = replace(make_inputs(AttentionShape(2, 70, 70, 2, 2, 64)), q=q, k=k, v=v)
    check_attention(attention, inputs, backward=False, causal=True)


@pytest.mark.parametrize("window", [(7, -8), (-1, 0), (0, 0), (None, -300), (10**12, 0)], ids=str)
def test_windows(attention, window):
    """Case 1 to 3 of the reported failures: no key in range, one rule for open sides, offsets of any size."""
    check(attention, AttentionShape(1, 64, 80, 2, 1, 64), window_size=window)


def test_rows_without_keys(attention):
    shape = AttentionShape(1, 300, 77, 1, 1, 64)
    inputs = make_inputs(shape)
    out, lse = attention(inputs.q, inputs.k, inputs.v, causal=True)
    assert not out[:, :223].any()
    assert (lse[:, :, :223] == -math.inf).all()


def test_row_maximum_that_keeps_rising(attention):
    blocks, block = 8, 64
    inputs = make_inputs(AttentionShape(1, 16, blocks * block, 1, 1, 64))
    rise = torch.tensor([7.9, 8.1]).repeat(blocks // 2).cumsum(0) * math.log(2)
    k, q = 0.1 * inputs.k, 0.1 * inputs.q
    k[..., 0] = rise.repeat_interleave(block)[None, :, None].to(k.dtype)
    q[..., 0] = 1
    check_attention(attention, replace(inputs, q=q, k=k), backward=False, softmax_scale=1.0, causal=True)


def test_nan_in_memory_that_no_row_may_see_does_not_leak(attention):
    """Rows before and after each sequence are NaN: padding rows of a tile must be zeroed, not read."""
    shape = AttentionShape(1, 70, 90, 2, 1, 64)
    inputs = make_inputs(shape)

    def embedded(x):
        padded = torch.full((1, x.shape[1] + 128, *x.shape[2:]), math.nan, dtype=x.dtype)
        padded[:, 64 : 64 + x.shape[1]] = x
        return padded[:, 64 : 64 + x.shape[1]]

    padded = replace(inputs, q=embedded(inputs.q), k=embedded(inputs.k), v=embedded(inputs.v))
    check_attention(attention, padded, backward=False, causal=True)


@pytest.mark.parametrize("dims", [8, 40, 128, (128, 96), 192], ids=str)
def test_head_dims(attention, dims):
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    check(attention, AttentionShape(1, 65, 129, 2, 1, dim, dim_v), causal=True)


@pytest.mark.parametrize("mask", ["full", "softcap"])
def test_masks_in_float16(attention, mask):
    check(attention, AttentionShape(1, 65, 129, 2, 1, 64), torch.float16, **MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72, 96, 128, 192, 256, (64, 128), (192, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_matrix(attention, dim, dtype, mask):
    """Every head dim, dtype and mask; lengths, ratios, layouts and schedules in turn over each."""
    dim, dim_v = dim if isinstance(dim, tuple) else (dim, 0)
    turns = zip(
        LENGTHS, itertools.cycle([1, 3, 5, 8]), itertools.cycle(["contiguous", "padded", "heads_first"]), itertools.cycle(SCHEDULES)
    )
    for lengths, ratio, layout, (schedule, seed) in turns:
        with fa4.settings(vgpu_schedule=schedule, vgpu_seed=seed):
            check(attention, AttentionShape(1, *lengths, ratio, 1, dim, dim_v), dtype, layout=layout, **MASKS[mask])
