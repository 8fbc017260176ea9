"""Failures that were reported against attention implementations, for the backward kernels; the numbers are those of the project's list.

Cases 14 and 40 are in test_backward.py, case 39 in tests/test_determinism.py. Where a case does not depend on dtype and head dim, its
kernels are those of test_backward.py, so that they are compiled once: bfloat16 with a causal mask, float16 without.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from forward_check import on_virtual_gpu
from reported_cases import RATIOS, mapped

import fa4
from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import get
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.testing import AttentionShape, check_attention, make_inputs
from fa4.vgpu import Gpu

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

ARCH = "sm_100a"
attention = on_virtual_gpu(ARCH)


def check(shape, dtype=torch.bfloat16, *, factor=1.0, **options):
    return check_attention(attention, make_inputs(shape, dtype).scaled(factor), use_dlse=True, **options)


def gradients(inputs, **options):
    leaves = inputs.leaves()
    return torch.autograd.grad(attention(*leaves, **options)[0], leaves, inputs.dout)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 77)])
def test_5_first_rows_see_nothing_under_causal(seqlen_q, seqlen_k):
    shape = AttentionShape(2, seqlen_q, seqlen_k, 2, 1, 64)
    dq, _, _ = gradients(make_inputs(shape), causal=True)
    assert not dq[:, : seqlen_q - seqlen_k].any()
    assert dq[:, seqlen_q - seqlen_k :].any()
    check(shape, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_6_no_keys(causal):
    inputs = make_inputs(AttentionShape(2, 7, 0, 2, 2, 64), torch.bfloat16 if causal else torch.float16)
    dq, dk, dv = gradients(inputs, causal=causal)
    assert not dq.any()
    assert (dk.shape, dv.shape) == (inputs.k.shape, inputs.v.shape)


def test_20_sums_beyond_32_bits():
    """The main kernel, told that a head's sums of dq take 2^31 floats, as those of a batch do: the second head lies beyond."""
    inputs = make_inputs(AttentionShape(1, 70, 90, 2, 2, 64))
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    problem = AttentionProblem("backward", "bfloat16", 64, 64, causal=True)
    artifact = get(problem, tuning.config(problem, get_arch(ARCH)), ARCH)
    _, lse = attention(q, k, v, causal=True)
    results = []
    for rows in (128, (1 << 31) // 64):
        statistics, sums = (mapped(torch.float32, 2 * rows * columns).view(1, 2, rows, columns) for columns in (2, 64))
        statistics = statistics.flatten(2)  # of the first tile of 128 rows lse in log2 units, then delta, here 0
        statistics[:, :, :128] = math.inf
        statistics[:, :, :70] = lse * math.log2(math.e)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        virtual.run(Gpu(ARCH), artifact, (q, k, v, dout, statistics), (dk, dv), (64**-0.5, None, None, None), updated=(sums, None))
        results.append((sums[:, :, :128].clone(), dk, dv))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0][0, 1].any()


@pytest.mark.slow
def test_22_softcap_under_causal():
    """By default test_modified_backward.py has softcap in both directions, and tests/test_cases.py this case on the CPU."""
    check(AttentionShape(1, 65, 129, 2, 1, 64), causal=True, softcap=10.0)


@pytest.mark.parametrize(("dtype", "factor", "causal"), [(torch.float16, 3.0, False), (torch.bfloat16, 30.0, True)], ids=str)
def test_23_large_logits(dtype, factor, causal):
    check(AttentionShape(1, 128, 200, 2, 2, 64), dtype, factor=factor, causal=causal)


@pytest.mark.parametrize("ratio", [ratio if ratio in (3, 7) else pytest.param(ratio, marks=pytest.mark.slow) for ratio in RATIOS])
def test_33_grouped_heads(ratio):
    check(AttentionShape(1, 13, 17, ratio, 1, 64), causal=True)


@pytest.mark.parametrize(
    "dims", [40, 128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (8, 24, 72, 80, 96, (192, 128), (128, 96)))], ids=str
)
def test_34_head_dims(dims):
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    # Of D 128 the deterministic kernel, which test_blackwell_backward.py runs too, and forward kernels for long queries.
    inputs = make_inputs(AttentionShape(1, 130, 129, 2, 1, dim, dim_v))
    check_attention(partial(attention, deterministic=dims == 128), inputs, use_dlse=True, causal=True)


@pytest.mark.parametrize(("dim", "rule"), [(512, "from 8 to 256"), (256, "columns of tensor memory"), (44, "multiple of 8")])
def test_34_head_dims_without_a_kernel_are_refused(dim, rule):
    inputs = make_inputs(AttentionShape(1, 33, 40, 2, 1, dim))
    with pytest.raises(fa4.UnsupportedError, match=rule):
        gradients(inputs, causal=True)
