"""The torch side: opcheck, fakes, torch.compile, autocast, which gradients are computed, double backward, determinism flags."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fa4
import fa4.ops  # registers the ops
from fa4 import dispatch
from fa4.testing import AttentionShape, make_inputs

SHAPE = AttentionShape(batch=2, seqlen_q=9, seqlen_k=17, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=24)
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (5, 2), "softcap": 5.0, "softmax_scale": -0.3},
    {"causal": True, "deterministic": True},
]


def with_lse(q, k, v, **options):
    return fa4.attention(q, k, v, return_lse=True, **options)


def gradients(function, inputs, **options):
    leaves = inputs.leaves()
    out, lse = function(*leaves, **options)
    return (out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse)))


def opcheck_cases():
    """By default each of the arguments with one dtype."""
    arguments = [
        (None, None, None, 0.0, False, "cpu", None),
        (0.3, None, 0, 0.0, True, "cpu", None),
        (-0.2, 5, 2, 10.0, False, "cpu", None),
    ]
    for i, each in enumerate(arguments):
        for j, dtype in enumerate((torch.float32, torch.bfloat16)):
            yield pytest.param(each, dtype, marks=() if j == i % 2 else pytest.mark.slow)


def assert_bitwise_equal(left, right):
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a.view(torch.uint8) if a.numel() else a, b.view(torch.uint8) if b.numel() else b)


@pytest.mark.parametrize(("arguments", "dtype"), list(opcheck_cases()), ids=str)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself, in torch 2.14
def test_opcheck(arguments, dtype):
    """Schema, fakes, autograd registration and AOT dispatch with dynamic shapes, of both ops."""
    inputs = make_inputs(SHAPE, dtype)
    leaves = inputs.leaves()
    torch.library.opcheck(torch.ops.fa4.attention_forward.default, (*leaves, *arguments))
    out, lse = torch.ops.fa4.attention_forward(*leaves, *arguments)
    for dout, dlse, needed in ((inputs.dout, None, [True] * 3), (None, inputs.dlse, [False, True, False])):
        saved = [x.detach() for x in (*leaves, out, lse)]
        torch.library.opcheck(torch.ops.fa4.attention_backward.default, (dout, dlse, *saved, needed, *arguments))


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
@pytest.mark.parametrize("same_dim", [True, False], ids=["D=Dv", "D!=Dv"])
def test_fake_results_have_the_strides_of_real_ones(layout, same_dim):
    shape = AttentionShape(2, 9, 9, 2, 2, 16, 0 if same_dim else 24)
    inputs = make_inputs(shape, torch.bfloat16, layout=layout)
    arguments = (None, None, 0, 0.0, False, "cpu", None)
    real = torch.ops.fa4.attention_forward(inputs.q, inputs.k, inputs.v, *arguments)
    real += torch.ops.fa4.attention_backward(inputs.dout, None, inputs.q, inputs.k, inputs.v, *real, [True] * 3, *arguments)
    assert all(x.is_contiguous() for x in real)


def test_fake_tensors_and_meta_tensors():
    with FakeTensorMode():
        x = make_inputs(SHAPE, torch.float16)
        leaves = x.leaves()
        out, lse = with_lse(*leaves, causal=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 9, 4, 24), torch.float16, (2, 4, 9), torch.float32)
        dq, _, dv = torch.autograd.grad(out, leaves, x.dout)
        assert (dq.shape, dv.shape) == (leaves[0].shape, leaves[2].shape)
    q = torch.empty(1, 1 << 20, 8, 128, dtype=torch.bfloat16, device="meta")
    assert fa4.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_compile_fullgraph_equals_eager(options):
    compiled = torch.compile(with_lse, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((9, 17), (33, 20), (5, 5)):
        inputs = make_inputs(AttentionShape(2, *lengths, 4, 2, 16), torch.bfloat16)
        assert_bitwise_equal(gradients(compiled, inputs, **options), gradients(with_lse, inputs, **options))


def test_compile_with_dynamic_shapes_compiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: fa4.attention(*x, causal=True), fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for batch, seqlen in ((2, 9), (5, 33), (4, 20), (7, 64)):
        # Sizes that differ from one another: torch takes equal ones for the same symbol.
        x = make_inputs(AttentionShape(batch, seqlen, seqlen + 3, 6, 3, 16), torch.bfloat16)
        compiled(x.q, x.k, x.v)
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 4  # torch itself may trace the first call twice (it specialises symbolic floats on the way)


def test_compile_window_that_depends_on_a_length():
    def windowed(q, k, v):
        return fa4.attention(q, k, v, window_size=(q.shape[1] // 2, 1))

    compiled = torch.compile(windowed, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (9, 33):
        x = make_inputs(AttentionShape(1, seqlen, seqlen, 1, 1, 16), torch.float32)
        assert_bitwise_equal([compiled(x.q, x.k, x.v)], [windowed(x.q, x.k, x.v)])


def test_compile_shows_the_error_of_bad_input():
    compiled = torch.compile(fa4.attention, fullgraph=True, backend="aot_eager")
    x = make_inputs(SHAPE, torch.float32)
    with pytest.raises(Exception, match=r"head_dim") as caught:
        compiled(x.q, x.k[..., :8], x.v)
    assert "only v may have a head_dim of its own" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    inputs = make_inputs(SHAPE, torch.float32)
    q, k, v = inputs.leaves()
    with torch.autocast("cpu", dtype):
        out, lse = with_lse(q, k.to(dtype), v, causal=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    expected = fa4.attention(*(x.to(dtype) for x in (q, k, v)), causal=True)
    assert_bitwise_equal([out], [expected])
    dq, dk = torch.autograd.grad(out, (q, k), inputs.dout.to(dtype))
    assert dq.dtype == dk.dtype == torch.float32


@pytest.mark.parametrize("path", ["auto", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_inside_autocast(dtype, path):
    """The ops compute in float32 where they mean to; gradients are the same as those taken outside."""
    inputs = make_inputs(SHAPE, dtype)
    results = []
    for inside in (True, False):
        leaves = inputs.leaves()
        with fa4.settings(cpu_path=path):
            with torch.autocast("cpu", torch.bfloat16):
                out = fa4.attention(*leaves, causal=True)
                if inside:
                    out.backward(inputs.dout.to(out.dtype))
            if not inside:
                out.backward(inputs.dout.to(out.dtype))
        results.append([out, *(leaf.grad for leaf in leaves)])
    assert_bitwise_equal(*results)


def test_autocast_under_compile():
    inputs = make_inputs(SHAPE, torch.float32)

    def run(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return fa4.attention(q, k, v)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal([compiled(inputs.q, inputs.k, inputs.v)], [run(inputs.q, inputs.k, inputs.v)])
    outside = torch.compile(fa4.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert outside(inputs.q, inputs.k, inputs.v).dtype == torch.bfloat16
    assert outside(inputs.q, inputs.k, inputs.v).dtype == torch.float32


def test_autocast_leaves_float64_to_the_dtype_check():
    inputs = make_inputs(SHAPE, torch.float64)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fa4.DtypeError, match="float64"):
        fa4.attention(inputs.q, inputs.k, inputs.v)


@pytest.mark.parametrize("needed", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_needed_gradients_are_computed(needed, monkeypatch):
    asked = []
    original = dispatch.load

    def spy(direction, target):
        implementation = original(direction, target)
        if direction == "forward":
            return implementation

        def backward(*arguments, needed):
            asked.append(needed)
            return implementation(*arguments, needed=needed)

        return backward

    monkeypatch.setattr(dispatch, "load", spy)
    inputs = make_inputs(SHAPE, torch.float32)
    everything = gradients(with_lse, inputs)[2:]
    asked.clear()
    leaves = [x.detach().requires_grad_(bool(n)) for x, n in zip((inputs.q, inputs.k, inputs.v), needed, strict=True)]
    out, lse = with_lse(*leaves)
    assert out.requires_grad == lse.requires_grad == any(needed)
    if any(needed):
        torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
        assert asked == [tuple(map(bool, needed))]
    for leaf, need, expected in zip(leaves, needed, everything, strict=True):
        if need:
            torch.testing.assert_close(leaf.grad, expected)
        else:
            assert leaf.grad is None


def test_results_do_not_depend_on_return_lse_or_grad():
    inputs = make_inputs(SHAPE, torch.bfloat16)
    plain = fa4.attention(inputs.q, inputs.k, inputs.v)
    assert isinstance(plain, torch.Tensor)
    with_grad = fa4.attention(*inputs.leaves())
    out, lse = fa4.attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    out_grad, lse_grad = fa4.attention(*inputs.leaves(), return_lse=True)
    with torch.inference_mode():
        inference = fa4.attention(inputs.q, inputs.k, inputs.v)
    assert_bitwise_equal([plain] * 4, [with_grad, out, out_grad, inference])
    assert_bitwise_equal([lse], [lse_grad])


def test_double_backward_raises_a_clear_error():
    inputs = make_inputs(SHAPE, torch.float32)
    leaves = inputs.leaves()
    out = fa4.attention(*leaves)
    (dq,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(fa4.UnsupportedError, match=r"differentiable once.*math backend"):
        dq.sum().backward()


def test_gradients_accumulate_and_the_graph_is_released():
    inputs = make_inputs(SHAPE, torch.float32)
    leaves = inputs.leaves()
    fa4.attention(*leaves).backward(inputs.dout)
    once = leaves[0].grad.clone()
    out = fa4.attention(*leaves)
    out.backward(inputs.dout)
    torch.testing.assert_close(leaves[0].grad, 2 * once)
    released = weakref.ref(out.grad_fn)
    del out
    gc.collect()
    assert released() is None


def spy_on_determinism(monkeypatch):
    seen = []
    original = dispatch.load

    def load(direction, target):
        def run(*arguments, **needed):
            options = next(a for a in arguments if hasattr(a, "deterministic"))
            seen.append((direction, options.deterministic))
            return original(direction, target)(*arguments, **needed)

        return run

    monkeypatch.setattr(dispatch, "load", load)
    return seen


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["argument", "torch flag", "neither"])
def test_deterministic_flag_reaches_forward_and_backward(how, compiled, monkeypatch):
    seen = spy_on_determinism(monkeypatch)
    torch._dynamo.reset()

    def run(*x):
        return fa4.attention(*x, deterministic=how == "argument")

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    inputs = make_inputs(SHAPE, torch.float32)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(how == "torch flag")
    try:
        function(*inputs.leaves()).backward(inputs.dout)
    finally:
        torch.use_deterministic_algorithms(before)
    assert seen == [("forward", how != "neither"), ("backward", how != "neither")]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_deterministic_results_are_bitwise_equal_alone_and_in_a_batch(compiled):
    def run(*x, **options):
        return with_lse(*x, deterministic=True, **options)

    function = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    inputs = make_inputs(AttentionShape(3, 77, 77, 4, 2, 40), torch.bfloat16)
    together = gradients(function, inputs, causal=True)
    assert_bitwise_equal(together, gradients(function, inputs, causal=True))
    for b in range(3):
        alone = type(inputs)(*(x[b : b + 1] for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))
        assert_bitwise_equal(gradients(function, alone, causal=True), [x[b : b + 1].contiguous() for x in together])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, when forward mode is first used
def test_forward_mode_raises_instead_of_giving_no_tangent():
    x = make_inputs(SHAPE, torch.float32)
    with pytest.raises(fa4.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: fa4.attention(q, x.k, x.v), (x.q,), (torch.ones_like(x.q),))


@pytest.mark.parametrize("needs_grad", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_may_be_modified_in_place(options, needs_grad):
    """On every path: what an op returns must not be a view."""
    shape = AttentionShape(2, 33, 33, 4, 4, 16)
    leaves = make_inputs(shape, torch.float32).leaves()
    if not needs_grad:
        with torch.no_grad():
            out, lse = with_lse(*leaves, **options)
        for result in (out, lse):
            weight = torch.ones_like(result, requires_grad=True)
            (kept,) = torch.autograd.grad(result.mul_(weight).sum(), weight)
            assert kept.shape == result.shape
        return
    out, lse = with_lse(*leaves, **options)
    (out.sum() + lse.sum()).backward()
    out.zero_()
    lse.zero_()
    assert not any(x._is_view() for x in (out.detach_(), *(leaf.grad for leaf in leaves)))


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["contiguous", "heads_first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_short_way_equals_the_op(dtype, layout, monkeypatch):
    """Without gradients and observers the CPU backend is called past the dispatcher; an observer sees the op."""
    x = make_inputs(AttentionShape(2, 33, 33, 4, 2, 16), dtype, layout=layout)
    op = fa4.ops.attention._forward_op
    through_op = op(x.q, x.k, x.v, None, None, 0, 0.0, False, "cpu", None)
    with Calls() as calls:
        fa4.attention(x.q, x.k, x.v, causal=True)
    assert calls.names[0] == "fa4.attention_forward.default"
    graph = make_fx(lambda *operands: fa4.attention(*operands, causal=True))(x.q, x.k, x.v)
    assert "torch.ops.fa4.attention_forward" in graph.code
    monkeypatch.setattr(fa4.ops.attention, "_forward_op", None)
    short = with_lse(x.q, x.k, x.v, causal=True)
    assert_bitwise_equal(short, through_op)
    assert all(result.is_contiguous() for result in short)
    assert torch.equal(fa4.attention(x.q, x.k, x.v, causal=True), short[0])
