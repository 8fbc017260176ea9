"""Failures that were reported against attention implementations, each as a test of ``fa4.attention`` on the CPU backend.

The numbers are those of the project's list of reported failures. Both CPU paths run every case.
"""

from __future__ import annotations

import math

import pytest
import torch
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


@pytest.fixture(params=["auto", "tiled"], autouse=True)
def cpu_path(request):
    with fa4.settings(cpu_path=request.param):
        yield


def with_lse(q, k, v, **options):
    return fa4.attention(q, k, v, return_lse=True, **options)


def check(shape, dtype=torch.bfloat16, *, factor=1.0, layout="contiguous", **options):
    """With a gradient of lse; without one, see tests/cpu/test_accuracy.py and the cases that call ``check_attention`` themselves."""
    return check_attention(with_lse, make_inputs(shape, dtype, layout=layout).scaled(factor), use_dlse=True, **options)


def assert_rows_see_nothing(inputs, rows, **options):
    leaves = inputs.leaves()
    out, lse = with_lse(*leaves, **options)
    assert torch.equal(out[:, rows], torch.zeros_like(out[:, rows]))
    assert (lse[:, :, rows] == -math.inf).all()
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    assert torch.equal(dq[:, rows], torch.zeros_like(dq[:, rows]))
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    return dk, dv


def test_1_causal_with_an_open_window_is_causal():
    inputs = make_inputs(AttentionShape(2, 256, 256, 8, 8, 128), torch.bfloat16)
    plain = with_lse(inputs.q, inputs.k, inputs.v, causal=True)
    windowed = with_lse(inputs.q, inputs.k, inputs.v, causal=True, window_size=(-1, 0))
    assert all(torch.equal(a, b) for a, b in zip(plain, windowed, strict=True))
    check(AttentionShape(1, 130, 130, 1, 1, 128), causal=True, window_size=(-1, 0))


def test_2_window_that_hides_every_key():
    inputs = make_inputs(AttentionShape(1, 64, 64, 2, 2, 32), torch.bfloat16)
    dk, dv = assert_rows_see_nothing(inputs, slice(None), window_size=WINDOWS_ALL_HIDDEN)
    assert not dk.any()
    assert not dv.any()


@pytest.mark.parametrize("window", WINDOWS_NEAREST_HIDDEN, ids=str)
def test_2_window_that_hides_the_nearest_keys(window):
    check(AttentionShape(1, 64, 80, 2, 2, 32), window_size=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS_OPEN, ids=str)
def test_3_one_rule_for_windows(window, causal):
    check(AttentionShape(1, 48, 65, 2, 1, 32), window_size=window, causal=causal)


def test_3_window_zero_is_the_diagonal():
    inputs = make_inputs(AttentionShape(1, 48, 48, 1, 1, 32), torch.float32)
    assert torch.allclose(fa4.attention(inputs.q, inputs.k, inputs.v, window_size=(0, 0)), inputs.v)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (100, 50), (300, 77)])
def test_5_first_rows_see_nothing_under_causal(seqlen_q, seqlen_k):
    shape = AttentionShape(2, seqlen_q, seqlen_k, 2, 1, 64)
    assert_rows_see_nothing(make_inputs(shape, torch.bfloat16), slice(0, seqlen_q - seqlen_k), causal=True)
    check(shape, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_6_no_keys(causal):
    inputs = make_inputs(AttentionShape(2, 7, 0, 2, 1, 32), torch.bfloat16)
    dk, dv = assert_rows_see_nothing(inputs, slice(None), causal=causal)
    assert dk.shape == dv.shape == (2, 0, 1, 32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [AttentionShape(2, 0, 9, 2, 1, 32), AttentionShape(0, 7, 9, 2, 1, 32), AttentionShape(0, 0, 0, 2, 1, 32)], ids=str
)
def test_7_no_queries_or_no_batch(shape, causal):
    inputs = make_inputs(shape, torch.float16)
    leaves = inputs.leaves()
    out, lse = with_lse(*leaves, causal=causal)
    assert (out.shape, lse.shape) == (inputs.q.shape, (shape.batch, 2, shape.seqlen_q))
    for gradient, leaf in zip(torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)), leaves, strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


def test_14_dout_with_large_outer_strides():
    shape = AttentionShape(2, 33, 40, 4, 2, 64)
    inputs = make_inputs(shape, torch.bfloat16)
    wide = torch.full((2, 33, 9728), math.nan, dtype=torch.bfloat16)
    view = wide.as_strided((2, 33, 4, 64), (33 * 9728, 9728, 64, 1))
    view.copy_(inputs.dout)
    expanded = inputs.dout[:1, :1, :1, :1].expand_as(inputs.dout)
    for dout in (view, expanded):
        results = []
        for contiguous in (False, True):
            leaves = inputs.leaves()
            out = fa4.attention(*leaves, causal=True)
            results.append(torch.autograd.grad(out, leaves, dout.contiguous() if contiguous else dout))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_14_offsets_beyond_32_bits():
    """A view whose rows lie 2**31 elements apart; untouched pages of the storage cost no memory."""
    step = 1 << 31
    storage = torch.empty(2 * step, dtype=torch.bfloat16)
    inputs = make_inputs(AttentionShape(1, 2, 8, 1, 1, 16), torch.bfloat16)
    far = storage.as_strided((1, 2, 1, 16), (0, step, 16, 1))
    far.copy_(inputs.q)
    assert torch.equal(fa4.attention(far, inputs.k, inputs.v), fa4.attention(inputs.q, inputs.k, inputs.v))
    far.copy_(inputs.dout)
    results = []
    for dout in (far, inputs.dout):
        leaves = inputs.leaves()
        results.append(torch.autograd.grad(fa4.attention(*leaves), leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_16_strided_inputs(layout):
    check(AttentionShape(2, 33, 40, 4, 2, 64), layout=layout, causal=True)


def test_16_last_stride_not_one():
    inputs = make_inputs(AttentionShape(2, 33, 40, 4, 2, 64), torch.bfloat16)
    check_attention(with_lse, v_with_last_stride_not_one(inputs), causal=True)


def test_20_offsets_of_a_batch_beyond_32_bits():
    """B * Sq * H * D past 2**31, without the memory: batches are views of one another, the last one of its own values."""
    inputs = make_inputs(AttentionShape(1, 512, 512, 1, 1, 64), torch.bfloat16)
    batch = (1 << 31) // (512 * 64) + 2
    q, k, v = (x.expand(batch, -1, -1, -1)[-2:] for x in (inputs.q, inputs.k, inputs.v))
    out = fa4.attention(q, k, v, causal=True)
    assert torch.equal(out[0], out[1])


def test_21_large_batch():
    inputs = make_inputs(AttentionShape(65536, 4, 4, 1, 1, 8), torch.float16)
    leaves = inputs.leaves()
    out, lse = with_lse(*leaves, causal=True)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    last = type(inputs)(*(x[-3:] for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))
    leaves = last.leaves()
    few, few_lse = with_lse(*leaves, causal=True)
    few_gradients = torch.autograd.grad(few, leaves, last.dout)
    for many, one in zip((out, lse, *gradients), (few, few_lse, *few_gradients), strict=True):
        torch.testing.assert_close(many[-3:], one, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_22_softcap_gradients(causal):
    check(AttentionShape(1, 70, 90, 2, 2, 64), softcap=10.0, causal=causal, factor=5.0)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 3.0), (torch.bfloat16, 30.0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_23_large_logits(dtype, factor, causal):
    check(AttentionShape(1, 128, 128, 2, 2, 64), dtype, factor=factor, causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_26_row_maximum_that_keeps_rising(dtype):
    check_attention(with_lse, stepping_row_maximum(32, 64, dtype), softmax_scale=1.0)


def test_30_lse_is_the_natural_logarithm():
    q = torch.zeros(1, 3, 1, 8)
    _, lse = with_lse(q, q, q)
    assert torch.allclose(lse, torch.full((1, 1, 3), math.log(3)))


def test_32_number_of_results_is_stable():
    inputs = make_inputs(AttentionShape(), torch.float16)
    for tensors in ((inputs.q, inputs.k, inputs.v), inputs.leaves()):
        assert isinstance(fa4.attention(*tensors), torch.Tensor)
        assert len(with_lse(*tensors)) == 2


@pytest.mark.parametrize("ratio", RATIOS)
def test_33_grouped_heads(ratio):
    heads_kv = 2 if ratio < 128 else 1
    check(AttentionShape(1, 13, 17, heads_kv * ratio, heads_kv, 32), causal=True)


@pytest.mark.parametrize(
    "dims",
    [8, 40, 160, 512, (192, 128), (128, 96), 1, 13, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (24, 72, 80, 96))],
    ids=str,
)
def test_34_head_dims(dims):
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    check(AttentionShape(1, 33, 40, 2, 1, dim, dim_v), causal=True)


@pytest.mark.parametrize("scale", [0, -0.3, 2], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_scale_of_any_sign(scale, causal):
    check(AttentionShape(1, 40, 40, 2, 2, 32), softmax_scale=scale, causal=causal)


@pytest.mark.parametrize("seqlen_k", [1, 5, 15, 16, 40])
def test_nan_in_a_query_shows_in_its_row_only(seqlen_k):
    inputs = make_inputs(AttentionShape(2, 6, seqlen_k, 2, 2, 16), torch.float32)
    inputs.q[1, 3, 0, 5] = math.nan
    out, lse = with_lse(inputs.q, inputs.k, inputs.v)
    spoilt = torch.zeros(2, 6, 2, dtype=torch.bool)
    spoilt[1, 3, 0] = True
    assert torch.equal(out.isnan().any(dim=3), spoilt)
    assert torch.equal(lse.isnan(), spoilt.transpose(1, 2))
