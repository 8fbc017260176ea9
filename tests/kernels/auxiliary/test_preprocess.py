"""What the backward needs of every row, and zeros for what it adds to: on the virtual GPU against float64 under a derived bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from canaries import changed_canaries, embedded
from reported_cases import far_apart

from fa4.arch import get_arch
from fa4.compiler import get
from fa4.config import PreprocessConfig
from fa4.errors import ArgumentError
from fa4.problem import AttentionProblem
from fa4.runtime import virtual
from fa4.testing import AttentionShape, make_inputs
from fa4.tuning import config
from fa4.vgpu import Gpu, OutOfBoundsError

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

UNIT = 2.0**-24  # of rounding in float32


def artifact(dtype, dim, dlse, arch="sm_100a"):
    problem = AttentionProblem("preprocess", str(dtype).removeprefix("torch."), dim, dim)
    return get(problem, PreprocessConfig(dlse=dlse), arch)


def rounded(seqlen):
    return -(-seqlen // 128) * 128


def rows(shape, dtype, layout="contiguous", hidden=0.2):
    """out, dout, lse, dlse; some rows see no key: their lse is -inf, and dout and dlse hold NaN there."""
    inputs = make_inputs(shape, dtype, layout=layout)
    lse = 20 * torch.randn(inputs.dlse.shape)
    unseen = torch.rand(lse.shape) < hidden
    lse[unseen] = -math.inf
    by_row = unseen.transpose(1, 2)
    return inputs.q.masked_fill(by_row[..., None], 0.0), inputs.dout.masked_fill(by_row[..., None], math.nan), lse, inputs.dlse, unseen


def run(out, dout, lse, dlse, zeros=8, results=None, gpu=None):
    """(lse in log2 units, delta, zeros); ``results`` is where the first two go, for each tile of 128 rows side by side."""
    batch, heads, seqlen = lse.shape
    made = torch.empty(batch, heads, 2 * rounded(seqlen)) if results is None else results
    cleared = torch.empty(zeros)
    gpu = gpu or Gpu("sm_100a", checks="hazards")
    virtual.run(gpu, artifact(out.dtype, out.shape[3], dlse is not None, gpu.arch), (out, dout, lse, dlse), (made, cleared), ())
    return (*(x.flatten(2) for x in made.unflatten(2, (-1, 2, 128)).unbind(3)), cleared)


def assert_right(results, out, dout, lse, dlse, unseen):
    """|error| <= (steps + 1) u sum |o do| + 2 u |delta|: products are exact in float32, a lane's chain and three shuffles are rounded."""
    lse_log2, delta, zeros = (x.double().numpy() for x in results)
    seqlen, dim = out.shape[1], out.shape[3]
    products = (out.double() * dout.double()).transpose(1, 2).masked_fill(unseen[..., None], 0.0).numpy()
    seen = ~unseen.numpy()
    expected = products.sum(3) - (0.0 if dlse is None else np.where(seen, dlse.double().numpy(), 0.0))
    steps = 8 * -(-dim // 64) + 3
    bound = (steps + 1) * UNIT * np.abs(products).sum(3) + 2 * UNIT * np.abs(expected)
    assert (np.abs(delta[:, :, :seqlen] - expected) <= bound).all()
    # lse * log2(e): the constant and the product are rounded.
    exact = lse.double().numpy() / math.log(2)
    finite = np.where(seen, exact, 0.0)
    assert (np.abs(np.where(seen, lse_log2[:, :, :seqlen], 0.0) - finite) <= 2.01 * UNIT * np.abs(finite)).all()
    assert (lse_log2[:, :, :seqlen][~seen] == math.inf).all()
    assert (delta[:, :, :seqlen][~seen] == 0).all()
    assert (lse_log2[:, :, seqlen:] == math.inf).all()
    assert (delta[:, :, seqlen:] == 0).all()
    assert not zeros.any()


# Kernels that tests of the whole backward compile too.
CASES = [
    (AttentionShape(2, 130, 1, 3, 3, 64), torch.bfloat16, "contiguous", True),
    (AttentionShape(1, 1, 1, 1, 1, 64), torch.bfloat16, "padded", True),
    (AttentionShape(2, 257, 1, 2, 1, 64), torch.bfloat16, "heads_first", True),
    (AttentionShape(1, 70, 1, 2, 1, 64), torch.float16, "padded", True),
    (AttentionShape(1, 70, 1, 2, 1, 40), torch.bfloat16, "padded", True),
    (AttentionShape(1, 70, 1, 2, 1, 64), torch.bfloat16, "padded", False),
    (AttentionShape(1, 128, 1, 1, 1, 128), torch.bfloat16, "contiguous", True),
]


@pytest.mark.parametrize(("shape", "dtype", "layout", "with_dlse"), CASES, ids=str)
def test_rows(shape, dtype, layout, with_dlse):
    out, dout, lse, dlse, unseen = rows(shape, dtype, layout)
    dlse = dlse.masked_fill(unseen, math.nan) if with_dlse else None
    assert_right(run(out, dout, lse, dlse), out, dout, lse, dlse, unseen)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_matrix(dim, dtype, with_dlse):
    for seqlen, layout, arch in ((1, "padded", "sm_80"), (129, "heads_first", "sm_90a"), (300, "contiguous", "sm_100a")):
        out, dout, lse, dlse, unseen = rows(AttentionShape(2, seqlen, 1, 3, 3, dim), dtype, layout)
        gpu = Gpu(arch, checks="hazards", schedule="priority", seed=dim)
        dlse = dlse if with_dlse else None
        assert_right(run(out, dout, lse, dlse, gpu=gpu), out, dout, lse, dlse, unseen)


def test_the_check_sees_a_wrong_sum():
    """Its fault: the gradient of lse left out."""
    out, dout, lse, dlse, unseen = rows(CASES[0][0], torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_right(run(out, dout, lse, None), out, dout, lse, dlse, unseen)


@pytest.mark.parametrize("words", [0, 4, 1024, 4 * 256 * 3 + 4])
def test_zeros_of_any_size(words):
    """Fewer than the threads, more than all of them, none: what is beside them is another buffer."""
    out, dout, lse, dlse, _ = rows(AttentionShape(1, 5, 1, 1, 1, 64), torch.bfloat16)
    *_, zeros = run(out, dout, lse, dlse, zeros=words)
    assert zeros.numel() == words
    assert not zeros.view(torch.int32).any()


def test_too_few_zeros_are_not_overrun():
    out, dout, lse, dlse, _ = rows(AttentionShape(1, 5, 1, 1, 1, 64), torch.bfloat16)
    memory = torch.full((64,), 7.0)
    virtual.run(Gpu("sm_100a"), artifact(out.dtype, 64, True), (out, dout, lse, dlse), (torch.empty(1, 1, 256), memory[16:32]), ())
    assert (memory[:16] == 7).all()
    assert (memory[32:] == 7).all()
    assert (memory[16:32] == 0).all()


def test_nothing_beside_the_outputs_is_written():
    out, dout, lse, dlse, unseen = rows(CASES[0][0], torch.bfloat16)
    memory, results = embedded((2, 3, 512), (1, 1, 5), torch.float32)
    assert_right(run(out, dout, lse, dlse, results=results), out, dout, lse, dlse, unseen)
    assert changed_canaries(memory, results) == 0


def test_results_that_are_not_padded_are_out_of_bounds():
    """The bounds of buffers are exact: a result without its padding is noticed."""
    out, dout, lse, dlse, _ = rows(AttentionShape(1, 5, 1, 1, 1, 64), torch.bfloat16)
    with pytest.raises(OutOfBoundsError):
        run(out, dout, lse, dlse, results=torch.empty(1, 1, 10))


@pytest.mark.parametrize("shape", [AttentionShape(0, 5, 1, 1, 1, 64), AttentionShape(2, 0, 1, 1, 1, 64)], ids=str)
def test_no_rows_no_launch(shape):
    inputs = make_inputs(shape)
    gpu = Gpu("sm_100a")
    results = torch.empty(shape.batch, 1, 2 * rounded(shape.seqlen_q))
    arguments = (inputs.q, inputs.dout, inputs.dlse, inputs.dlse), (results, torch.empty(4)), ()
    virtual.run(gpu, artifact(torch.bfloat16, 64, True), *arguments)
    assert gpu.reports == []


def test_14_offsets_beyond_32_bits():
    out, dout, lse, dlse, unseen = rows(AttentionShape(2, 3, 1, 2, 2, 64), torch.bfloat16)
    assert_right(run(far_apart(out), far_apart(dout), lse, dlse, gpu=Gpu("sm_100a")), out, dout, lse, dlse, unseen)


def test_configuration():
    assert config(AttentionProblem("preprocess", "bfloat16", 64, 64), get_arch("sm_90a")) == PreprocessConfig()
    with pytest.raises(ArgumentError, match="whole passes"):
        PreprocessConfig(threads=96)
