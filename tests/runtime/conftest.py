"""The executors of GPU kernels that a test of the forward runs on."""

from __future__ import annotations

import pytest
import torch
from forward_check import on_gpu, on_virtual_gpu


@pytest.fixture
def gpu():
    """A real one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


# Architectures that have a forward kernel of their own.
ARCHS = ("sm_80", "sm_100a")


@pytest.fixture(params=[*(pytest.param(arch, marks=pytest.mark.vgpu) for arch in ARCHS), pytest.param("cuda", marks=pytest.mark.gpu)])
def attention(request):
    """``attention(q, k, v, **options) -> (out, lse)`` of CPU tensors, on the virtual GPU and on a real one."""
    if request.param in ARCHS:
        return on_virtual_gpu(request.param)
    request.getfixturevalue("gpu")
    return on_gpu
