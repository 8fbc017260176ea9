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


@pytest.mark.parametrize(("seqlen_q", "ratio"), [(65, 1), (15, 8), pytest.param(65, 8, marks=pytest.mark.slow)])
def test_grouped_heads(attention, seqlen_q, ratio):
    check(attention, AttentionShape(1, seqlen_q, 129, ratio, 1, 64), causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0, 2.0])
@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_scale_of_any_sign_and_large_logits(attention, scale, factor):
    check(attention, AttentionShape(1, 65, 129, 1, 1, 64), softmax_scale=scale, factor=factor, causal=True)


def test_views_of_one_tensor(attention):
    qkv = torch.randn(2, 70, 3, 2, 64).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    inputs = replace(make_inputs(AttentionShape(2, 70, 70, 2, 2, 64)), q=q, k=k, v=v)
    check_attention(attention, inputs, backward=False, causal=True)


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        (AttentionShape(1, 120, 150, 1, 1, 64), (40, 9)),
        (AttentionShape(1, 120, 150, 1, 1, 64), (10**12, 9)),
        pytest.param(AttentionShape(1, 130, 150, 2, 1, 64), (40, 9), marks=pytest.mark.slow),
        pytest.param(AttentionShape(1, 130, 150, 2, 1, 64), (10**12, 9), marks=pytest.mark.slow),
        pytest.param(AttentionShape(1, 64, 80, 2, 1, 64), (10**12, 0), marks=pytest.mark.slow),
        pytest.param(AttentionShape(1, 64, 80, 2, 1, 64), (None, -300), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_windows(attention, shape, window):
    check(attention, shape, window_size=window)


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


def test_nan_reaches_the_rows_that_see_it_and_no_other(attention):
    inputs = make_inputs(AttentionShape(1, 100, 100, 1, 1, 64), torch.bfloat16)
    inputs.k[0, 50] = math.nan
    out, lse = attention(inputs.q, inputs.k, inputs.v, causal=True)
    assert out[0, 50:].isnan().all()
    assert lse[0, 0, 50:].isnan().all()
    assert not out[0, :50].isnan().any()
    assert not lse[0, 0, :50].isnan().any()


@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        (AttentionShape(1, 130, 129, 2, 1, 64), "full"),
        (AttentionShape(1, 120, 129, 1, 1, 64), "softcap"),
        pytest.param(AttentionShape(1, 130, 129, 2, 1, 64), "softcap", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks_in_float16(attention, shape, mask):
    check(attention, shape, torch.float16, **MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_few_queries_of_grouped_heads(attention, dtype, mask):
    """Which the Blackwell kernel packs into one tile or two."""
    for lengths, ratio in (((1, 300), 5), ((40, 150), 3), ((60, 130), 2)):
        check(attention, AttentionShape(1, *lengths, ratio, 1, 64), dtype, **MASKS[mask])


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
