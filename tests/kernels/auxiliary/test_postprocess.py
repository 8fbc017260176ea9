"""From the float32 sums of dQ to dQ, on the virtual GPU: to the bit what numpy and torch make of them."""

from __future__ import annotations

import pytest
import torch
from canaries import changed_canaries, embedded

from fa4.arch import get_arch
from fa4.compiler import get
from fa4.config import PostprocessConfig, padded_head_dim
from fa4.errors import ArgumentError
from fa4.kernels.common.dq_layout import dq_offset
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.tuning import config
from fa4.vgpu import Gpu, OutOfBoundsError

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def artifact(dtype, dim, arch):
    return get(AttentionProblem("postprocess", str(dtype).removeprefix("torch."), dim, dim), PostprocessConfig(), arch)


def sums(batch, seqlen, heads, dim):
    """(values (B, Sq, Hq, D), the same as the main kernel leaves them: flat, NaN where there is no element)."""
    columns, rounded = padded_head_dim(dim), -(-seqlen // 128) * 128
    values = 3 * torch.randn(batch, seqlen, heads, dim)
    flat = torch.full((batch, heads, rounded * columns), torch.nan)
    at = dq_offset(torch.arange(seqlen)[:, None], torch.arange(dim)[None, :], columns)
    flat[:, :, at] = values.transpose(1, 2)
    return values, flat.reshape(-1)


def run(flat, dq, scale, gpu=None):
    gpu = gpu or Gpu("sm_100a", checks="hazards")
    virtual.run(gpu, artifact(dq.dtype, dq.shape[3], gpu.arch), (flat,), (dq,), (scale,))


def check(batch, seqlen, heads, dim, dtype, scale, gpu=None):
    values, flat = sums(batch, seqlen, heads, dim)
    memory, dq = embedded((batch, seqlen, heads, dim), (1, 2, 1, 8), dtype)
    run(flat, dq, scale, gpu)
    assert torch.equal(dq, (values * torch.tensor(scale)).to(dtype))
    assert changed_canaries(memory, dq) == 0


@pytest.mark.parametrize(
    ("sizes", "dtype", "scale"),
    [
        ((2, 130, 3, 64), torch.bfloat16, 0.125),
        ((1, 1, 1, 64), torch.bfloat16, -0.3),
        ((1, 257, 2, 64), torch.float16, 1e4),  # also beyond what float16 can hold
        ((1, 257, 2, 40), torch.bfloat16, 0.7),
        ((1, 70, 1, 128), torch.bfloat16, 0.0),
    ],
    ids=str,
)
def test_sums_become_dq(sizes, dtype, scale):
    check(*sizes, dtype, scale)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrix(dim, dtype):
    for seqlen, arch in ((1, "sm_80"), (129, "sm_90a"), (300, "sm_100a")):
        check(2, seqlen, 3, dim, dtype, 0.37, Gpu(arch, checks="hazards", schedule="priority", seed=dim))


@pytest.mark.parametrize("sizes", [(0, 5, 1, 64), (2, 0, 1, 64)], ids=str)
def test_no_rows_no_launch(sizes):
    gpu = Gpu("sm_100a")
    run(torch.empty(0), torch.empty(sizes, dtype=torch.bfloat16), 1.0, gpu)
    assert gpu.reports == []


def test_sums_that_are_not_there_are_noticed():
    _, flat = sums(1, 130, 1, 64)
    with pytest.raises(OutOfBoundsError):
        run(flat[: 128 * 64], torch.empty(1, 130, 1, 64, dtype=torch.bfloat16), 1.0)


def test_configuration():
    assert config(AttentionProblem("postprocess", "bfloat16", 64, 64), get_arch("sm_90a")) == PostprocessConfig()
    with pytest.raises(ArgumentError, match="whole passes"):
        PostprocessConfig(threads=100)
