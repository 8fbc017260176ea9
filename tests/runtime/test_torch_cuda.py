"""CPU tensors that pass for CUDA tensors inside ``attach``, and torch as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from dsl_kernels import scale_anything

from fa4.vgpu import LaunchError, attach, torch_cuda


def test_needs_an_attached_gpu():
    with (
        pytest.raises(LaunchError, match=r"no virtual GPU is attached; write `with fa4.vgpu.attach\(arch\), fa4.vgpu.torch_cuda\(\):`"),
        torch_cuda(),
    ):
        pass
    assert not torch.zeros(1).is_cuda


@pytest.mark.parametrize(("arch", "capability", "processors"), [("sm_90a", (9, 0), 132), ("sm_100a", (10, 0), 148)])
def test_torch_describes_the_attached_gpu(arch, capability, processors):
    with attach(arch), torch_cuda():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_capability("cuda:0") == capability
        assert torch.cuda.get_device_properties(0).multi_processor_count == processors
        assert arch in torch.cuda.get_device_name()
        assert torch.cuda.current_stream().cuda_stream == 0
        torch.cuda.synchronize()
        with torch.cuda.device(0):
            pass


def test_requests_for_cuda_give_host_memory():
    x = torch.arange(6.0).reshape(2, 3)
    with attach("sm_80"), torch_cuda():
        made = [
            torch.zeros(3, device="cuda"),
            torch.tensor([1.0, 2.0], device=torch.device("cuda", 0)),
            x.to("cuda:0"),
            x.to(device="cuda", dtype=torch.float64),
            x.cuda(),
            x.new_empty(3, device="cuda"),
            torch.nn.Linear(2, 2, device="cuda").weight,
            torch.empty_like(x[:, :2]),
        ]
        assert all(t.is_cuda and t.device.type == "cpu" for t in made)
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert all(torch.isnan(t).all() for t in (made[5], made[7], torch.empty(4, device="cuda")))


def test_kernels_use_the_memory():
    x = torch.arange(100, dtype=torch.float32)
    with attach("sm_80"), torch_cuda():
        y = torch.empty(100, device="cuda")
        scale_anything(x.cuda(), y, 3.0)
    assert torch.equal(y, 3 * x)


class Doubled(torch.autograd.Function):
    """Like the functions of an interface for GPUs: both directions insist on CUDA."""

    @staticmethod
    def forward(ctx, x):
        assert x.is_cuda
        out = 2 * x
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        assert all(t.is_cuda for t in (*ctx.saved_tensors, dout))
        assert torch.isnan(torch.empty_like(dout)).all()
        return 2 * dout


def test_backward():
    with attach("sm_80"), torch_cuda():
        x = torch.ones(3, device="cuda", requires_grad=True)
        Doubled.apply(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))
        (grad,) = torch.autograd.grad(Doubled.apply(x).sum(), x)
        assert torch.equal(grad, x.grad)


def test_torch_is_as_before_also_after_an_error():
    names = ["is_available", "device_count", "current_device", "get_device_capability", "device", "synchronize"]
    before = [getattr(torch.cuda, name) for name in names], dict(torch.Tensor.__dict__), torch.empty
    with pytest.raises(ZeroDivisionError), attach("sm_80"), torch_cuda():
        raise ZeroDivisionError
    assert ([getattr(torch.cuda, name) for name in names], dict(torch.Tensor.__dict__), torch.empty) == before
    assert not torch.zeros(1).is_cuda
