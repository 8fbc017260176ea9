from __future__ import annotations

import pytest
import torch

import fa4
from fa4.arch import ARCHS, get_arch
from fa4.dispatch import IMPLEMENTATIONS, kernel, kernel_support, load
from fa4.problem import AttentionProblem


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
        ({"head_dim": 256, "backend": "cuda", "direction": "backward"}, "no backward kernel for any GPU"),
        ({"head_dim": 256, "arch": "sm_100a", "direction": "backward"}, "head_dim 256, head_dim_v 256 need dV 256 + dK 256"),
        ({"head_dim": 64, "dtype": "float32", "backend": "cuda"}, "float32 is not one of float16, bfloat16"),
        ({"head_dim": 64, "arch": "sm_80", "backend": "vgpu", "direction": "backward"}, "no backward kernel for sm_80 yet"),
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
        problem = AttentionProblem(direction, "bfloat16", 128, 128)
        rows = {(direction, family) for family in ("ampere", get_arch(arch).family)}
        assert bool(kernel_support(problem, arch)) == bool(rows & set(IMPLEMENTATIONS))
        served = kernel_support(problem, arch)
        for backend in (None, "vgpu", "cuda"):
            assert bool(fa4.supports(head_dim=128, arch=arch, direction=direction, backend=backend)) == bool(served)
        assert fa4.supports(head_dim=128, direction=direction, backend="cuda"), "for some GPU"


def test_gradients_without_a_backward_kernel_are_refused_before_the_forward_runs():
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(fa4.UnsupportedError, match=r"no backward kernel for sm_80 yet.*torch.no_grad"):
        fa4.attention(q, q.detach(), q.detach(), backend="vgpu", arch="sm_80")


def test_an_architecture_without_its_own_kernel_uses_the_ampere_kernel(monkeypatch):
    problem = AttentionProblem("forward", "bfloat16", 128, 128)
    assert kernel(problem, "sm_90a") == kernel(problem, "sm_80") == IMPLEMENTATIONS["forward", "ampere"]
    served = kernel_support(problem, "sm_90a")
    assert (served.ok, served.native) == (True, False)
    assert "sm_90a has no forward kernel of its own" in served.reason
    monkeypatch.setitem(IMPLEMENTATIONS, ("forward", "hopper"), "somewhere:Hopper")
    assert kernel(problem, "sm_90a") == "somewhere:Hopper"
    assert kernel_support(problem, "sm_90a").native


@pytest.mark.parametrize(
    ("dims", "arithmetic"),
    [
        ((256, 256), "2 x (S 128 + O 256) = 768 columns of tensor memory, which has 512"),
        ((128, 136), "2 x (S 128 + O 144) = 544 columns"),
        ((256, 128), "3072 + (Q 256 x 256 + 2 stages x 128 x 256 + O 0 x 128) x 2 = 265216 bytes of shared memory, of 232448"),
    ],
    ids=str,
)
def test_head_dims_beyond_the_blackwell_kernel_say_why_and_get_the_ampere_kernel(dims, arithmetic):
    served = fa4.supports(head_dim=dims[0], head_dim_v=dims[1], arch="sm_100a")
    assert (served.ok, served.native) == (True, False)
    assert arithmetic in served.reason
    assert "the Ampere kernel serves this request" in served.reason
    assert kernel(AttentionProblem("forward", "bfloat16", *dims), "sm_100a") == IMPLEMENTATIONS["forward", "ampere"]
    assert fa4.supports(head_dim=192, head_dim_v=128, arch="sm_100a").native


@pytest.mark.parametrize("key", IMPLEMENTATIONS, ids=str)
def test_every_implementation_can_be_loaded(key):
    assert callable(load(*key))
