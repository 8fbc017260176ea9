"""Functions on scores on the torch side: opcheck, fakes, torch.compile with handles and names."""

from __future__ import annotations

import attention_modifiers as examples
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
import fa4.ops  # registers the ops
from fa4.testing import AttentionShape, make_inputs

SHAPE = AttentionShape(batch=2, seqlen_q=9, seqlen_k=17, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24)
OPTIONS = (0.3, None, 0, 5.0, False, "cpu", None)


def aux_of(shape):
    documents = [torch.arange(n, dtype=torch.int32).expand(shape.batch, n) // 4 for n in (shape.seqlen_q, shape.seqlen_k)]
    return {"slopes": examples.alibi_slopes(shape.heads_q), "q_document": documents[0], "k_document": documents[1]}


def modified(q, k, v, slopes, q_document, k_document):
    aux = {"slopes": slopes, "q_document": q_document, "k_document": k_document}
    return fa4.attention(q, k, v, causal=True, return_lse=True, score_mod="alibi", mask_mod=examples.same_document, aux=aux)


def gradients(function, inputs, aux):
    leaves = inputs.leaves()
    results = function(*leaves, **aux)
    return (*results, *torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself, in torch 2.14
@pytest.mark.parametrize(
    "names", [("alibi", "same_document"), pytest.param(("alibi", None), marks=pytest.mark.slow), (None, None)], ids=str
)
def test_opcheck(names):
    """Schema, fakes, autograd registration and AOT dispatch with dynamic shapes, of both ops, also without any tensor."""
    inputs = make_inputs(SHAPE, torch.float32)
    leaves = inputs.leaves()
    aux = list(aux_of(SHAPE).values())[: sum({"alibi": 1, "same_document": 2, None: 0}[name] for name in names)]
    torch.library.opcheck(torch.ops.fa4.modified_attention_forward.default, (*leaves, *names, aux, *OPTIONS))
    out, lse = torch.ops.fa4.modified_attention_forward(*leaves, *names, aux, *OPTIONS)
    saved = [x.detach() for x in (*leaves, out, lse)]
    arguments = (inputs.dout, inputs.dlse, *saved, [True, False, True], *names, aux, *OPTIONS)
    torch.library.opcheck(torch.ops.fa4.modified_attention_backward.default, arguments)


def test_compile_fullgraph_equals_eager():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(modified, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for lengths in ((9, 17), (33, 20), (5, 6)):
        shape = AttentionShape(2, *lengths, 4, 2, 16)
        inputs = make_inputs(shape, torch.bfloat16)
        found, expected = (gradients(function, inputs, aux_of(shape)) for function in (compiled, modified))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 3


def test_compile_shows_where_bad_input_is_refused():
    torch._dynamo.reset()
    x = make_inputs(SHAPE, torch.float32)
    aux = aux_of(SHAPE)
    with pytest.raises(Exception, match="raise ShapeError"):
        torch.compile(modified, fullgraph=True, backend="aot_eager")(x.q, x.k, x.v, **aux | {"slopes": aux["slopes"][:2]})


def test_fake_tensors_and_meta_tensors():
    with FakeTensorMode():
        x = make_inputs(SHAPE, torch.float16)
        leaves = x.leaves()
        out, lse = modified(*leaves, **aux_of(SHAPE))
        assert (out.shape, out.dtype, lse.shape) == ((2, 9, 4, 24), torch.float16, (2, 4, 9))
        dq, dk, dv = torch.autograd.grad(out, leaves, x.dout)
        assert (dq.shape, dk.shape, dv.shape) == tuple(leaf.shape for leaf in leaves)
    q = torch.empty(1, 1 << 20, 8, 128, dtype=torch.bfloat16, device="meta")
    assert fa4.attention(q, q, q, score_mod="alibi", aux={"slopes": torch.empty(8, device="meta")}).shape == q.shape


def test_second_derivatives_are_refused():
    q, k, v = make_inputs(SHAPE, torch.float32).leaves()
    out, _ = modified(q, k, v, **aux_of(SHAPE))
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(fa4.UnsupportedError, match="differentiable once"):
        dq.sum().backward()


def test_autocast():
    inputs = make_inputs(SHAPE, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = modified(*inputs.leaves(), **aux_of(SHAPE))
        out.backward(inputs.dout.to(out.dtype))
    expected, _ = modified(*(x.to(torch.bfloat16) for x in (inputs.q, inputs.k, inputs.v)), **aux_of(SHAPE))
    assert torch.equal(out, expected)


def test_a_name_is_looked_up_when_a_graph_runs():
    """A graph holds names: one that is not registered where it runs is an error there, not a wrong result."""
    x = make_inputs(SHAPE, torch.float32)
    with pytest.raises(fa4.ArgumentError, match="no score_mod is registered under this name in this process"):
        torch.ops.fa4.modified_attention_forward(x.q, x.k, x.v, "of another process", None, [], *OPTIONS)
