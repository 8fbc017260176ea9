"""The backward kernels through ``fa4.attention`` and autograd, on the virtual GPU with its checks of order, against float64."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from forward_check import MASKS, SCHEDULES, on_virtual_gpu
from reported_cases import far_apart
from torch._subclasses.fake_tensor import FakeTensorMode

import fa4
from fa4.runtime import virtual
from fa4.testing import AttentionShape, check_attention, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

ARCH = "sm_100a"
SMALL = AttentionShape(1, 65, 129, 2, 1, 64)
attention = on_virtual_gpu(ARCH)


def gradients(inputs, needed=(True, True, True), dout=None, dlse=None, **options):
    """Of a call with ``return_lse``; None for those that are not asked for."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip((inputs.q, inputs.k, inputs.v), needed, strict=True)]
    out, lse = attention(*leaves, **options)
    pairs = [(y, g) for y, g in ((out, dout), (lse, dlse)) if g is not None]
    torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
    return [leaf.grad for leaf in leaves]


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels that were launched, without what comes after the operation."""
    seen = []
    original = virtual.launch

    def launch(gpu, program, request):
        seen.append(request.kernel.split("_")[2])
        original(gpu, program, request)

    monkeypatch.setattr(virtual, "launch", launch)
    return seen


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        (SMALL, torch.bfloat16, {"causal": True}),
        (AttentionShape(2, 130, 70, 3, 3, 64), torch.float16, {}),
        (AttentionShape(1, 1, 17, 3, 1, 64), torch.bfloat16, {"causal": True, "softmax_scale": -0.3}),
    ],
    ids=str,
)
def test_gradients(shape, dtype, options):
    with fa4.settings(vgpu_checks="hazards"):
        check_attention(attention, make_inputs(shape, dtype), use_dlse=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [64, 96, 128, (192, 128), 40, (64, 128)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_matrix(dims, mask, deterministic):
    """Every head dim, mask and mode; lengths, ratios, layouts, dtypes and schedules in turn over each, with all checks of order."""
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    lengths = [(65, 129), (128, 256), (300, 77), (1, 17), (256, 640)]
    turns = zip(lengths, itertools.cycle([1, 4, 3]), itertools.cycle(["contiguous", "padded", "heads_first"]), itertools.cycle(SCHEDULES))
    dtype = torch.float16 if deterministic else torch.bfloat16
    for (seqlen_q, seqlen_k), ratio, layout, (schedule, seed) in turns:
        inputs = make_inputs(AttentionShape(1, seqlen_q, seqlen_k, ratio, 1, dim, dim_v), dtype, layout=layout)
        with fa4.settings(vgpu_checks="hazards", vgpu_schedule=schedule, vgpu_seed=seed):
            check_attention(partial(attention, deterministic=deterministic), inputs, use_dlse=True, **MASKS[mask])


def test_only_a_gradient_of_lse():
    inputs = make_inputs(AttentionShape(1, 40, 50, 1, 1, 64))
    seen = gradients(inputs, dlse=inputs.dlse, causal=True)
    both = gradients(inputs, dout=torch.zeros_like(inputs.dout), dlse=inputs.dlse, causal=True)
    assert_same_bits(seen, both)
    assert not seen[2].any()
    assert seen[0].any()


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_strided_operands(layout):
    check_attention(attention, make_inputs(SMALL, layout=layout), causal=True)


def test_14_any_strides_of_dout():
    """Views, expanded along any dimension, also with offsets beyond 2^31: the bits of a contiguous dout."""
    inputs = make_inputs(AttentionShape(2, 40, 50, 2, 1, 64))
    dout = inputs.dout
    wide = torch.full((2, 40, 9728), math.nan, dtype=dout.dtype)
    wide[..., 64:192] = dout.flatten(2)
    one_row = dout[:, :1].expand(-1, 40, -1, -1)
    variants = [
        (dout, [wide[..., 64:192].unflatten(2, (2, 64)), dout.transpose(1, 3).contiguous().transpose(1, 3), far_apart(dout)]),
        (one_row.contiguous(), [one_row]),
        (torch.ones_like(dout), [torch.ones((), dtype=dout.dtype).expand(dout.shape)]),
    ]
    for contiguous, views in variants:
        expected = gradients(inputs, dout=contiguous, causal=True)
        for view in views:
            assert not view.is_contiguous()
            assert_same_bits(gradients(inputs, dout=view, causal=True), expected)


SUBSETS = [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (True, False, True), (True, True, False)]
# Those whose kernels tests/kernels/blackwell/test_backward_needed.py compiles too; in deterministic mode one with sums.
FEW = {False: [(False, False, True)], True: [(True, False, False)]}


@pytest.mark.parametrize(
    ("needed", "deterministic"),
    [
        pytest.param(needed, mode, id=f"{needed}-{'deterministic' if mode else 'fast'}", marks=() if needed in few else pytest.mark.slow)
        for mode, few in FEW.items()
        for needed in SUBSETS
    ],
)
def test_only_needed_gradients(needed, deterministic, launches, monkeypatch):
    """What ``requires_grad`` asks for is what the kernel is compiled for, and what has memory."""
    inputs = make_inputs(AttentionShape(1, 40, 50, 1, 1, 64))
    everything = gradients(inputs, dout=inputs.dout, causal=True)
    calls, run = {}, virtual.run

    def recorded(gpu, artifact, read, written, numbers, *aux, **more):
        calls[artifact.kernels[0].name.split("_")[2]] = artifact, written, more.get("updated", ())
        run(gpu, artifact, read, written, numbers, *aux, **more)

    monkeypatch.setattr(virtual, "run", recorded)
    launches.clear()
    found = gradients(inputs, needed, dout=inputs.dout, causal=True, deterministic=deterministic)
    assert launches == ["forward", "preprocess", "backward", *(["postprocess"] if needed[0] else [])]
    assert_same_bits(found, [x if need else None for x, need in zip(everything, needed, strict=True)])

    artifact, written, updated = calls["backward"]
    name = artifact.kernels[0].name
    assert f"_{''.join(x for x, need in zip(('dq', 'dk', 'dv'), needed, strict=True) if need)}_" in name
    ordered = deterministic and needed[0]
    assert ("ordered" in name) == ordered
    assert [x is not None for x in written] == [*needed[1:]]
    assert [x is not None for x in updated] == [needed[0], ordered]
    zeros = calls["preprocess"][1][-1]
    assert zeros.numel() == 128 * 64 * needed[0] + 4 * ordered


def test_no_gradient_is_no_launch(launches):
    x = make_inputs(AttentionShape(1, 40, 50, 1, 1, 64))
    arguments = (None, None, 0, 0.0, False, "vgpu", ARCH)
    out, lse = torch.ops.fa4.attention_forward(x.q, x.k, x.v, *arguments)
    launches.clear()
    found = torch.ops.fa4.attention_backward(x.dout, None, x.q, x.k, x.v, out, lse, [False] * 3, *arguments)
    assert [g.numel() for g in found] == [0, 0, 0]
    assert launches == []


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_inputs(lengths, batch, launches):
    inputs = make_inputs(AttentionShape(batch, *lengths, 2, 1, 64))
    found = gradients(inputs, dout=inputs.dout, dlse=inputs.dlse, causal=True)
    for gradient, x in zip(found, (inputs.q, inputs.k, inputs.v), strict=True):
        assert gradient.shape == x.shape
        assert not gradient.any()
    assert set(launches) <= {"forward"}


def test_rows_and_keys_without_partners_have_no_gradient():
    """Whatever their gradients hold; the others are right."""
    inputs = make_inputs(AttentionShape(1, 200, 70, 2, 1, 64))
    unseen = slice(0, 130)
    dlse = inputs.dlse.clone()
    dlse[:, :, unseen] = math.nan
    dq, dk, dv = gradients(inputs, dout=inputs.dout, dlse=dlse, causal=True)
    assert not dq[:, unseen].any()
    expected = gradients(inputs, dout=inputs.dout, dlse=inputs.dlse, causal=True)
    assert_same_bits((dq, dk, dv), expected)


def test_deterministic_flags(launches, monkeypatch):
    """The argument and torch's own flag lead to the same kernel, also through torch.compile and with a graph traced before the flag."""
    names = []
    original = virtual.launch
    monkeypatch.setattr(virtual, "launch", lambda gpu, program, request: (names.append(request.kernel), original(gpu, program, request)))
    inputs = make_inputs(AttentionShape(1, 40, 50, 1, 1, 64))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")

    def run(function, **options):
        names.clear()
        leaves = inputs.leaves()
        out, _ = function(*leaves, causal=True, **options)
        found = torch.autograd.grad(out, leaves, inputs.dout)
        return ["ordered" in name for name in names if "_backward_" in name], found

    for function in (attention, compiled):
        assert run(function)[0] == [False]
        asked, expected = run(function, deterministic=True)
        assert asked == [True]
        torch.use_deterministic_algorithms(True)
        try:
            flagged, found = run(function)
        finally:
            torch.use_deterministic_algorithms(False)
        assert flagged == [True]
        assert_same_bits(found, expected)


def test_compile_fullgraph_and_autocast_equal_eager():
    inputs = make_inputs(SMALL, torch.float32)

    def run(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, k, v, causal=True)

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)):
        leaves = inputs.leaves()
        out, lse = function(*leaves)
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (inputs.dout.to(out.dtype), inputs.dlse))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][2].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck itself, in torch 2.14
def test_opcheck():
    inputs = make_inputs(AttentionShape(1, 9, 17, 2, 1, 64))
    arguments = (None, None, 0, 0.0, False, "vgpu", ARCH)
    out, lse = torch.ops.fa4.attention_forward(inputs.q, inputs.k, inputs.v, *arguments)
    for dout, dlse, needed in ((inputs.dout, None, [True] * 3), (None, inputs.dlse, [False, False, True])):
        saved = (inputs.q, inputs.k, inputs.v, out, lse)
        torch.library.opcheck(torch.ops.fa4.attention_backward.default, (dout, dlse, *saved, needed, *arguments))


def test_fake_tensors(launches):
    with FakeTensorMode():
        x = make_inputs(SMALL)
        leaves = x.leaves()
        out, _ = attention(*leaves, causal=True)
        assert [g.shape for g in torch.autograd.grad(out, leaves, x.dout)] == [leaf.shape for leaf in leaves]
    assert launches == []


def test_what_no_backward_kernel_serves_is_refused_before_the_forward(launches):
    x = make_inputs(AttentionShape(1, 9, 9, 1, 1, 256))
    with pytest.raises(fa4.UnsupportedError, match=r"columns of tensor memory.*backend 'cpu' serves this request.*torch.no_grad"):
        attention(*x.leaves())
    assert launches == []
