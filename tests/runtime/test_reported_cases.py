"""Failures that were reported against attention implementations, for the forward kernels; tests/test_cases.py has them for the CPU.

The numbers are those of the project's list of reported failures. Where a case does not depend on dtype and head dim, its kernels are
those of test_forward.py and of the tests of compiled code, so that they are compiled once: bfloat16 with a mask, float16 without.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from forward_check import check, on_virtual_gpu
from reported_cases import (
    RATIOS,
    WINDOWS_ALL_HIDDEN,
    WINDOWS_NEAREST_HIDDEN,
    WINDOWS_OPEN,
    stepping_row_maximum,
    v_with_last_stride_not_one,
)

import fa4
from fa4.testing import AttentionShape, check_attention, make_inputs

pytestmark = pytest.mark.compile


def assert_rows_see_nothing(attention, inputs, rows, **options):
    out, lse = attention(inputs.q, inputs.k, inputs.v, **options)
    assert torch.equal(out[:, rows], torch.zeros_like(out[:, rows]))
    assert (lse[:, :, rows] == -math.inf).all()


def test_1_causal_with_an_open_window_is_causal(attention):
    inputs = make_inputs(AttentionShape(2, 200, 200, 2, 2, 64))
    plain = attention(inputs.q, inputs.k, inputs.v, causal=True)
    windowed = attention(inputs.q, inputs.k, inputs.v, causal=True, window_size=(-1, 0))
    assert all(torch.equal(a, b) for a, b in zip(plain, windowed, strict=True))
    assert torch.isfinite(plain[1]).all()


def test_2_window_that_hides_every_key(attention):
    inputs = make_inputs(AttentionShape(1, 120, 130, 1, 1, 64))
    assert_rows_see_nothing(attention, inputs, slice(None), window_size=WINDOWS_ALL_HIDDEN)


@pytest.mark.parametrize("window", WINDOWS_NEAREST_HIDDEN, ids=str)
def test_2_window_that_hides_the_nearest_keys(attention, window):
    check(attention, AttentionShape(1, 120, 150, 1, 1, 64), window_size=window)


# A left bound alone is a kernel of its own. By default left bounds come with right ones: of 0 here, of 9 in test_forward.py.
@pytest.mark.parametrize(
    ("window", "causal"),
    [
        pytest.param(window, causal, marks=pytest.mark.slow if (window, causal) == ((0, -1), False) else ())
        for window in WINDOWS_OPEN
        for causal in (False, True)
    ],
    ids=str,
)
def test_3_one_rule_for_windows(attention, window, causal):
    unmasked = not causal and window in ((-1, -1), (None, None))
    heads_kv, dtype = (2, torch.float16) if unmasked else (1, torch.bfloat16)
    check(attention, AttentionShape(1, 48, 65, 2, heads_kv, 64), dtype, window_size=window, causal=causal)


@pytest.mark.parametrize(("seqlen", "heads"), [(60, 2), pytest.param(140, 1, marks=pytest.mark.slow)])
def test_3_window_zero_is_the_diagonal(attention, seqlen, heads):
    inputs = make_inputs(AttentionShape(1, seqlen, seqlen, heads, 1, 64))
    out, _ = attention(inputs.q, inputs.k, inputs.v, window_size=(0, 0))
    assert torch.equal(out, inputs.v.expand_as(out))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 77)])
def test_5_first_rows_see_nothing_under_causal(attention, seqlen_q, seqlen_k):
    shape = AttentionShape(2, seqlen_q, seqlen_k, 2, 1, 64)
    assert_rows_see_nothing(attention, make_inputs(shape), slice(0, seqlen_q - seqlen_k), causal=True)
    check(attention, shape, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_6_no_keys(attention, causal):
    inputs = make_inputs(AttentionShape(2, 7, 0, 2, 2, 64), torch.bfloat16 if causal else torch.float16)
    assert_rows_see_nothing(attention, inputs, slice(None), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [AttentionShape(2, 0, 9, 2, 1, 64), AttentionShape(0, 7, 9, 2, 1, 64), AttentionShape(0, 0, 0, 2, 1, 64)], ids=str
)
def test_7_no_queries_or_no_batch(attention, shape, causal):
    inputs = make_inputs(shape)
    out, lse = attention(inputs.q, inputs.k, inputs.v, causal=causal)
    assert (out.shape, lse.shape) == (inputs.q.shape, (shape.batch, 2, shape.seqlen_q))


def test_11_used_part_of_a_cache(attention):
    """A call for each sequence, on views of its cache up to the used length; what lies beyond is NaN."""
    used = [32, 64, 96, 48]
    cache = make_inputs(AttentionShape(len(used), 1, 128, 4, 2, 64))
    for i, length in enumerate(used):
        cache.k[i, length:] = cache.v[i, length:] = math.nan
    for i, length in enumerate(used):
        one = slice(i, i + 1)
        inputs = replace(cache, q=cache.q[one], k=cache.k[one, :length], v=cache.v[one, :length])
        check_attention(attention, inputs, backward=False, causal=True)


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_16_strided_inputs(attention, layout):
    check(attention, AttentionShape(2, 65, 129, 4, 2, 64), layout=layout, causal=True)


def test_16_last_stride_not_one(attention):
    inputs = make_inputs(AttentionShape(1, 65, 65, 2, 2, 64))
    check_attention(attention, v_with_last_stride_not_one(inputs), backward=False, causal=True)


@pytest.mark.parametrize(("dtype", "factor", "causal"), [(torch.float16, 3.0, False), (torch.bfloat16, 30.0, True)], ids=str)
def test_23_large_logits(attention, dtype, factor, causal):
    check(attention, AttentionShape(1, 128, 200, 2, 2, 64), dtype, factor=factor, causal=causal)


@pytest.mark.parametrize(("blocks", "rising"), [(32, False), (8, True)])
def test_26_row_maximum_in_steps(attention, blocks, rising):
    """Blocks are as long as the longest key tile of a kernel, and kernels visit keys from the last to the first."""
    check_attention(attention, stepping_row_maximum(blocks, 128, torch.bfloat16, rising), backward=False, softmax_scale=1.0, causal=True)


def test_30_lse_is_the_natural_logarithm(attention):
    x = torch.zeros(1, 130, 1, 64, dtype=torch.bfloat16)
    _, lse = attention(x, x, x, causal=True)
    torch.testing.assert_close(lse, torch.arange(1, 131).log().reshape(1, 1, 130), rtol=1e-6, atol=1e-6)


# Of 9 heads, in 16 places, the kernel has two query tiles.
@pytest.mark.parametrize("ratio", [pytest.param(ratio, marks=pytest.mark.slow) if ratio == 9 else ratio for ratio in RATIOS if ratio < 128])
def test_33_grouped_heads(attention, ratio):
    check(attention, AttentionShape(1, 13, 17, ratio, 1, 64), causal=True)


@pytest.mark.vgpu
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_33_128_query_heads_to_one(arch):
    check(on_virtual_gpu(arch), AttentionShape(1, 13, 17, 128, 1, 64), causal=True)


@pytest.mark.parametrize(
    "dims",
    [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (8, 24, 40, 72, 80, 96, 160, (128, 96), (192, 128)))],
    ids=str,
)
def test_34_head_dims(attention, dims):
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    check(attention, AttentionShape(1, 130, 129, 1, 1, dim, dim_v), causal=True)


@pytest.mark.parametrize("dim", [4, 44, 512])
def test_34_head_dims_without_a_kernel_are_refused(attention, dim):
    inputs = make_inputs(AttentionShape(1, 33, 40, 2, 1, dim))
    with pytest.raises(fa4.UnsupportedError, match=rf"head_dim {dim}.* must be a multiple of 8 from 8 to 256"):
        attention(inputs.q, inputs.k, inputs.v, causal=True)
