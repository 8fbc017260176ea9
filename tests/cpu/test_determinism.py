"""deterministic=True: the same bits across runs, batches, head counts and layouts."""

from __future__ import annotations

import pytest
import torch

from fa4.testing import AttentionInputs, AttentionShape, make_inputs

from .support import gradients


def part(inputs, batch, heads, heads_kv):
    """One sequence and its first heads, as fresh tensors."""
    q, dout = (x[batch : batch + 1, :, :heads].clone() for x in (inputs.q, inputs.dout))
    k, v = (x[batch : batch + 1, :, :heads_kv].clone() for x in (inputs.k, inputs.v))
    return AttentionInputs(q, k, v, dout, inputs.dlse[batch : batch + 1, :heads].clone())


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, AttentionShape(3, 301, 301, 4, 2, 40)),
        (torch.bfloat16, AttentionShape(3, 130, 301, 4, 2, 40)),
        (torch.float32, AttentionShape(3, 37, 611, 3, 3, 8)),
        (torch.bfloat16, AttentionShape(3, 1, 77, 4, 1, 24)),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (50, 20)}, {}, {"softcap": 5.0}], ids=str)
def test_alone_and_in_a_batch(dtype, shape, options):
    inputs = make_inputs(shape, dtype)
    whole = gradients("chosen", inputs, dlse=inputs.dlse, deterministic=True, **options)
    group = shape.heads_q // shape.heads_kv
    for batch, heads_kv in ((0, shape.heads_kv), (1, 1), (2, shape.heads_kv)):
        alone = part(inputs, batch, heads_kv * group, heads_kv)
        results = gradients("chosen", alone, dlse=alone.dlse, deterministic=True, **options)
        for together, single in zip(whole, results, strict=True):
            heads = single.shape[1 if together.ndim == 3 else 2]
            same = together[batch : batch + 1]
            assert torch.equal(same[:, :heads] if same.ndim == 3 else same[:, :, :heads], single)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("causal", [False, True])
def test_across_runs(causal, threads):
    inputs = make_inputs(AttentionShape(1, 300, 300, 2, 1, 64))
    first = gradients("chosen", inputs, causal=causal, deterministic=True)
    for _ in range(2):
        garbage = [torch.randn(n) for n in (1001, 17)]  # so that the allocator's state differs
        for a, b in zip(gradients("chosen", inputs, causal=causal, deterministic=True), first, strict=True):
            assert torch.equal(a, b)
        del garbage


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_layout_changes_no_bit(layout):
    shape = AttentionShape(2, 133, 133, 4, 2, 40)
    first = gradients("chosen", make_inputs(shape, torch.float32), causal=True, deterministic=True)
    for a, b in zip(
        gradients("chosen", make_inputs(shape, torch.float32, layout=layout), causal=True, deterministic=True), first, strict=True
    ):
        assert torch.equal(a, b)


def test_alignment_changes_no_bit():
    shape = AttentionShape(1, 133, 133, 2, 2, 40)
    inputs = make_inputs(shape, torch.float32)
    shifted = [torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape) for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)]
    first = gradients("chosen", inputs, causal=True, deterministic=True)
    for a, b in zip(gradients("chosen", AttentionInputs(*shifted), causal=True, deterministic=True), first, strict=True):
        assert torch.equal(a, b)
