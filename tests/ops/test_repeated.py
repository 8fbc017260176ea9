"""Calls like one before: the same results, and nobody who would notice an op is passed by."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.cpu import torch_flash
from fa4.ops import attention, repeated
from fa4.testing import AttentionShape, make_inputs

SHAPE = AttentionShape(batch=2, seqlen_q=40, seqlen_k=40, heads_q=4, heads_kv=2, head_dim=16)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(repeated, "_calls", {})


@pytest.fixture
def counted(monkeypatch):
    """How often a call was served as one like before."""
    calls = []

    def count(*arguments):
        out = again(*arguments)
        calls.append(out is not None)
        return out

    again = attention.attention_again
    monkeypatch.setattr(fa4.ops, "attention_again", count)
    return calls


def operands(dtype=torch.float32, requires_grad=False):
    inputs = make_inputs(SHAPE, dtype, seed=1)
    return [x.detach().clone().requires_grad_(requires_grad) for x in (inputs.q, inputs.k, inputs.v)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.7}, {"causal": True, "window_size": (None, None)}], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
def test_the_second_call_returns_what_the_first_did(dtype, options, requires_grad, counted):
    q, k, v = operands(dtype, requires_grad)
    results = []
    for _ in range(3):
        out = fa4.attention(q, k, v, **options)
        assert out.is_contiguous()
        assert out.dtype == dtype
        assert not out._is_view()
        results.append((out, *(torch.autograd.grad(out, (q, k, v), out.detach()) if requires_grad else ())))
    served = dtype != torch.float16 or torch_flash._FLOAT16_PRODUCTS
    assert counted == [False, served, served]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("changed", ["length", "stride", "heads", "dtype", "scale", "causal"])
def test_another_kind_is_found_anew(changed, counted):
    q, k, v = operands()
    fa4.attention(q, k, v)
    options = {"scale": {"softmax_scale": 0.3}, "causal": {"causal": True}}.get(changed, {})
    if changed == "length":
        k, v = k[:, :30], v[:, :30]
    elif changed == "stride":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif changed == "heads":
        q = q[:, :, :2]
    elif changed == "dtype":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    out = fa4.attention(q, k, v, **options)
    assert counted == [False, False]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.float().transpose(1, 2) for x in (q, k, v)),
        is_causal=changed == "causal",
        scale=options.get("softmax_scale"),
        enable_gqa=True,
    )
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), rtol=0.02, atol=0.02)


def test_what_is_remembered_has_an_end(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST", 3)
    q, k, v = operands()
    for length in range(20, 30):
        fa4.attention(q[:, :length], k, v)
        assert 1 <= len(repeated._calls) <= 3


class Record(TorchDispatchMode):
    """The names of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_op():
    q, k, v = operands()
    for _ in range(2):
        fa4.attention(q, k, v)
    with Record() as record:
        fa4.attention(q, k, v)
    assert record.names[0] == "fa4.attention_forward.default"
    with FlopCounterMode(display=False):
        fa4.attention(q, k, v)


def test_a_mode_around_the_backward_sees_the_op():
    leaves = operands(requires_grad=True)
    for _ in range(2):
        out = fa4.attention(*leaves)
    with Record() as record:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert "fa4.attention_backward.default" in record.names


@pytest.mark.parametrize("what", ["autocast", "settings", "deterministic algorithms"])
def test_a_changed_surrounding_is_found_anew(what, counted):
    q, k, v = operands()
    plain = fa4.attention(q, k, v)
    torch.use_deterministic_algorithms(what == "deterministic algorithms")
    try:
        with {"autocast": torch.autocast("cpu", dtype=torch.bfloat16), "settings": fa4.settings(cpu_path="tiled")}.get(what, nullcontext()):
            out = fa4.attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counted == [False, False]
    assert out.dtype == (torch.bfloat16 if what == "autocast" else torch.float32)
    torch.testing.assert_close(out.float(), plain, rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch itself, at its first dual tensor
def test_dual_tensors_are_refused_as_ever():
    q, k, v = operands()
    for _ in range(2):
        fa4.attention(q, k, v)
    with forward_ad.dual_level(), pytest.raises(fa4.UnsupportedError, match="forward-mode"):
        fa4.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_double_backward_is_refused_as_ever():
    leaves = operands(requires_grad=True)
    for _ in range(2):
        out = fa4.attention(*leaves)
    (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(fa4.UnsupportedError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), leaves[:1])


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True)], ids=str)
def test_only_gradients_that_are_needed(needed):
    q, k, v = (x.requires_grad_(need) for x, need in zip(operands(), needed, strict=True))
    for _ in range(2):
        fa4.attention(q, k, v).sum().backward()
        assert [x.grad is not None for x in (q, k, v)] == list(needed)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inference_mode_and_strange_tensors(counted):
    q, k, v = operands()
    fa4.attention(q, k, v)
    with torch.inference_mode():
        assert fa4.attention(q, k, v).is_inference()
    fa4.attention(torch.nn.Parameter(q), k, v)
    with pytest.raises(fa4.DtypeError, match="dense"):
        fa4.attention(q.to_sparse(), k, v)
    with pytest.raises(fa4.DtypeError, match="dense"):
        fa4.attention(torch.nested.nested_tensor([q[0], q[1]]), k, v)
    with pytest.raises(fa4.DeviceError):
        fa4.attention(q, k.to("meta"), v)
    assert counted == [False, True, False, False, False, False]
