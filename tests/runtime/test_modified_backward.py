"""Gradients with functions on scores by the Blackwell kernels, on the virtual GPU with hazard checks on, against float64."""

from __future__ import annotations

import itertools
from functools import partial

import attention_modifiers as examples
import pytest
import torch
from forward_check import on_virtual_gpu
from score_functions import BENT, BOUNDED, OTHER_TWIN, ROOTED
from test_modified_forward import options

import fa4
from fa4.testing import AttentionShape, check_attention, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

ARCH = "sm_100a"
attention = on_virtual_gpu(ARCH)


def chosen(shape, *handles, **others):
    """Arguments of a call with functions, and with the tensors that they read."""
    own = [handle for handle in handles if handle in (BENT, OTHER_TWIN)]
    found = options(shape, *(handle for handle in handles if handle not in own), **others)
    if own:
        found["score_mod"] = own[0]
        found["aux"]["weight"] = torch.randn(shape.heads_q, 3, generator=torch.Generator().manual_seed(1))
    return found


def run(shape, dtype, *, deterministic=False, **arguments):
    with fa4.settings(vgpu_checks="hazards"):
        check_attention(partial(attention, deterministic=deterministic), make_inputs(shape, dtype), use_dlse=True, **arguments)


def gradients(function, inputs, **arguments):
    leaves = inputs.leaves()
    out, _ = function(*leaves, **arguments)
    return torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype))


# Three heads of a group, as in test_modified_forward.py: the forward that has its functions is compiled once.
GROUPED, PAIR = AttentionShape(2, 37, 150, 3, 1, 64), AttentionShape(1, 140, 150, 1, 1, 128)
# One query tile, whose forward compiles in half of the time; the matrix has several.
BENT_SHAPE = AttentionShape(1, 120, 150, 1, 1, 64)
CAPPED = {"softcap": 3.0, "deterministic": True}


@pytest.mark.parametrize(
    ("shape", "dtype", "handles", "how"),
    [
        pytest.param(GROUPED, torch.bfloat16, [examples.alibi], {"causal": True}, marks=pytest.mark.slow),
        (BENT_SHAPE, torch.float16, [BENT, examples.same_document], CAPPED),
        pytest.param(
            PAIR,
            torch.bfloat16,
            [BOUNDED, examples.same_document],
            {"window_size": (100, 20), "deterministic": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["alibi", "bent", "pair"],
)
def test_gradients(shape, dtype, handles, how):
    """Grouped heads and aux; a derivative that reads the score, softcap before it; a pair. Lengths that end within tiles."""
    run(shape, dtype, **chosen(shape, *handles, **how))


def test_a_wrong_derivative_is_noticed():
    """The kernels of test_gradients, whose derivative is not that of this twin: the same scores, half of the slope's second term."""
    with pytest.raises(AssertionError, match="dq: WRONG") as caught:
        run(BENT_SHAPE, torch.float16, **chosen(BENT_SHAPE, OTHER_TWIN, examples.same_document, **CAPPED))
    assert "out: WRONG" not in str(caught.value)


def test_what_a_mask_hides_has_no_gradient():
    """Rows that see nothing, whatever dlse holds there, and keys that nobody sees: exact zeros; the others are right."""
    shape = BENT_SHAPE
    ends = {"q_ends": (7,), "k_ends": (0, 90)}
    arguments = chosen(shape, BENT, examples.same_document, **ends, **CAPPED)
    run(shape, torch.float16, **arguments)
    inputs = make_inputs(shape, torch.float16)
    leaves = inputs.leaves()
    out, lse = attention(*leaves, **arguments)
    dlse = inputs.dlse.clone()
    dlse[:, :, :7] = torch.nan
    dq, dk, dv = torch.autograd.grad((out, lse), leaves, (inputs.dout, dlse))
    assert not dq[:, :7].any()
    assert dq[:, 7:].any()
    for x in (dk, dv):
        assert not x[:, 90:].any()
        assert x[:, :90].any()


@pytest.mark.slow
def test_a_slope_of_what_is_hidden_does_not_matter():
    """NaN, here: by the root of a negative number."""
    run(AttentionShape(1, 70, 70, 1, 1, 64), torch.bfloat16, score_mod=ROOTED, window_size=(None, -2))


def test_compile_fullgraph_and_autocast_equal_eager():
    inputs, arguments = make_inputs(BENT_SHAPE, torch.float32), chosen(BENT_SHAPE, BENT, examples.same_document, **CAPPED)
    aux = arguments.pop("aux")

    def function(q, k, v, aux):
        with torch.autocast("cpu", torch.float16):
            return attention(q, k, v, **arguments, aux=aux)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = [gradients(each, inputs, aux=aux) for each in (function, compiled)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][0].dtype == torch.float32


def test_aux_of_any_strides():
    """The bits of a contiguous tensor."""
    inputs, arguments = make_inputs(BENT_SHAPE, torch.float16), chosen(BENT_SHAPE, BENT, examples.same_document, **CAPPED)
    aux = arguments.pop("aux")
    wide = {name: x.repeat_interleave(2, -1)[..., ::2] for name, x in aux.items()}
    assert not any(x.is_contiguous() for x in wide.values())
    found = [gradients(attention, inputs, **arguments, aux=each) for each in (aux, wide)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dims", [64, 96, 128, (192, 128), 112], ids=str)
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (70, 9)}, {"softcap": 10.0, "causal": True}, {"softmax_scale": -0.2}], ids=str
)
@pytest.mark.parametrize(
    "handles",
    [(examples.alibi,), (examples.prefix,), (BENT,), (examples.alibi, examples.same_document), (BOUNDED, examples.same_document)],
    ids=str,
)
def test_matrix(deterministic, dims, mask, handles):
    """Every kernel with whole and broken tiles on either side; head counts take turns."""
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    dtype = torch.float16 if deterministic else torch.bfloat16
    for lengths, heads in zip([(129, 141), (40, 300), (256, 256)], itertools.cycle([1, 3]), strict=False):
        shape = AttentionShape(1, *lengths, heads, 1, dim, dim_v)
        run(shape, dtype, deterministic=deterministic, **chosen(shape, *handles, **mask))
