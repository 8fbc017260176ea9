"""What only a real GPU can show: streams, CUDA graphs, several devices. The results' matrix is in test_forward.py."""

from __future__ import annotations

import pytest
import torch
from forward_check import check, moved, on_gpu

import fa4
from fa4.testing import AttentionShape, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def inputs_on_gpu(shape, seed=0, index=0):
    inputs = make_inputs(shape, seed=seed)
    return [moved(x, index) for x in (inputs.q, inputs.k, inputs.v)]


def test_lengths_of_practice():
    check(on_gpu, AttentionShape(2, 1000, 2049, 8, 2, 128), causal=True)


def test_the_same_bits_each_time():
    q, k, v = inputs_on_gpu(AttentionShape(4, 2048, 2048, 8, 2, 128))
    first = fa4.attention(q, k, v, causal=True, deterministic=True)
    for _ in range(30):
        assert torch.equal(fa4.attention(q, k, v, causal=True, deterministic=True), first)
    assert torch.equal(fa4.attention(q[1:2], k[1:2], v[1:2], causal=True, deterministic=True), first[1:2])


def test_the_current_stream_is_used():
    """A stream on which the inputs arrive late: a launch elsewhere would read what was there before."""
    q, k, v = inputs_on_gpu(AttentionShape(1, 512, 512, 4, 4, 64))
    expected = fa4.attention(q, k, v, causal=True)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        out = fa4.attention(late, k, v, causal=True)
    assert not stream.query(), "the call waited"
    stream.synchronize()
    assert torch.equal(out, expected)


def test_a_captured_call_replays_on_new_inputs():
    shape = AttentionShape(2, 300, 300, 4, 2, 64)
    q, k, v = inputs_on_gpu(shape)
    fa4.attention(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa4.attention(q, k, v, causal=True, return_lse=True)
    for seed in (1, 2):
        fresh = inputs_on_gpu(shape, seed)
        for old, new in zip((q, k, v), fresh, strict=True):
            old.copy_(new)
        graph.replay()
        expected = fa4.attention(*fresh, causal=True, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


def test_46_a_tensor_on_another_device_launches_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    shape = AttentionShape(1, 300, 300, 4, 2, 64)
    on_second = inputs_on_gpu(shape, index=1)
    with torch.cuda.device(0):
        out = fa4.attention(*on_second, causal=True)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    if torch.cuda.get_device_capability(0) == torch.cuda.get_device_capability(1):
        assert torch.equal(out.cpu(), fa4.attention(*inputs_on_gpu(shape), causal=True).cpu())


def test_parameters_that_require_grad_under_no_grad():
    q, k, v = inputs_on_gpu(AttentionShape(1, 70, 70, 1, 1, 64))
    with torch.no_grad():
        assert torch.equal(fa4.attention(q.requires_grad_(), k, v), fa4.attention(q.detach(), k, v))


def test_under_torch_compile():
    q, k, v = inputs_on_gpu(AttentionShape(2, 130, 130, 4, 2, 64))
    compiled = torch.compile(lambda *x: fa4.attention(*x, causal=True), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), fa4.attention(q, k, v, causal=True))
