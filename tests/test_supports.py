from __future__ import annotations

import pytest
import torch

import fa4
from fa4.arch import ARCHS
from fa4.dispatch import IMPLEMENTATIONS, load


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16, "float16"], ids=str)
def test_cpu_serves_everything(direction, dtype):
    request = {"head_dim": 40, "head_dim_v": 72, "causal": True, "window_size": (8, None), "softcap": 3.0, "deterministic": True}
    support = fa4.supports(**request, dtype=dtype, direction=direction)
    assert support
    assert support == fa4.Support(ok=True)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"head_dim": 0}, "head_dim 0 must be at least 1"),
        ({"head_dim": 64, "dtype": "float64"}, "float64 is not one of float16, bfloat16, float32"),
        ({"head_dim": 64, "dtype": "float32", "arch": "sm_90a"}, "float32 is not one of float16, bfloat16"),
        ({"head_dim": 264, "arch": "sm_90a"}, "head_dim 264 must be a multiple of 8 from 8 to 256"),
        ({"head_dim": 64, "head_dim_v": 4, "arch": "sm_90a"}, "head_dim_v 4 must be a multiple of 8"),
        ({"head_dim": 64, "backend": "cuda"}, "no forward kernel for any GPU"),
    ],
    ids=str,
)
def test_what_is_not_served_says_why(request_, reason):
    support = fa4.supports(**request_)
    assert not support
    assert reason in support.reason


@pytest.mark.parametrize(
    ("request_", "argument"),
    [
        ({"direction": "sideways"}, "direction"),
        ({"backend": "tpu"}, "backend"),
        ({"arch": "sm_1"}, "arch"),
        ({"arch": "sm_80", "backend": "cpu"}, "arch"),
        ({"backend": "vgpu"}, "arch"),
        ({"window_size": (1,)}, "window_size"),
        ({"softcap": -1}, "softcap"),
    ],
    ids=str,
)
def test_malformed_requests_raise(request_, argument):
    with pytest.raises(fa4.ArgumentError) as caught:
        fa4.supports(head_dim=64, **request_)
    assert caught.value.argument == argument


@pytest.mark.parametrize("arch", ARCHS)
def test_supports_agrees_with_the_table(arch):
    for direction in ("forward", "backward"):
        served = (direction, ARCHS[arch].family) in IMPLEMENTATIONS
        assert bool(fa4.supports(head_dim=128, arch=arch, direction=direction)) == served


@pytest.mark.parametrize("key", IMPLEMENTATIONS, ids=str)
def test_every_implementation_can_be_loaded(key):
    assert callable(load(*key))
