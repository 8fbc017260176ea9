"""Both paths against float64: masks, scales, softcap, head ratios, head dims, lengths, layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4.cpu import tiles, torch_flash
from fa4.testing import AttentionShape, check_attention, make_inputs
from fa4.testing import strategies as fa4_strategies

from .support import attention_by, gradients, options_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    AttentionShape(2, 100, 100, 4, 4, 64),
    AttentionShape(3, 67, 67, 6, 2, 40),  # more batches than key heads, grouped
    AttentionShape(1, 200, 200, 6, 2, 64),  # fewer
]


@pytest.mark.parametrize("path", ["flash", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_requests_on_both_paths(path, dtype, causal, shape):
    check_attention(attention_by(path), make_inputs(shape, dtype), causal=causal)


@pytest.mark.parametrize("products", [False, True], ids=["copies", "products"])
@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float16_with_and_without_its_products(shape, factor, products, monkeypatch):
    """Which of the two a CPU takes depends on its instructions; either is right on every CPU."""
    asked = []
    kernel = torch_flash._flash
    monkeypatch.setattr(torch_flash, "_FLOAT16_PRODUCTS", products)
    monkeypatch.setattr(torch_flash, "_flash", lambda q, *rest, **more: asked.append(q.dtype) or kernel(q, *rest, **more))
    check_attention(attention_by("flash"), make_inputs(shape, torch.float16).scaled(factor), causal=True)
    assert set(asked) == {torch.float16 if products else torch.float32}


@pytest.mark.parametrize("threads", [2, 5], indirect=True)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("path", ["flash", "tiled"])
def test_threads(threads, heads_kv, path):
    check_attention(attention_by(path), make_inputs(AttentionShape(2, 100, 100, 4, heads_kv, 32), torch.bfloat16), causal=True)


@pytest.mark.parametrize("seed", range(8))
def test_bfloat16_gradients_of_long_sums(seed):
    """A sum of gradients that is rounded after every block of rows leaves the bound for some of these."""
    check_attention(attention_by("chosen"), make_inputs(AttentionShape(1, 512, 512, 4, 4, 64), torch.bfloat16, seed=seed), causal=True)


@pytest.mark.parametrize("path", ["flash", "tiled"])
def test_temporaries_in_several_pieces(path, monkeypatch):
    """The same results when a call has to be cut into blocks of one pair."""
    monkeypatch.setattr(torch_flash, "EXTRA_BYTES", 1 << 18)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1 << 12)
    for heads in (1, 2, 4):
        check_attention(attention_by(path), make_inputs(AttentionShape(2, 70, 70, 4, heads, 16), torch.bfloat16), causal=True)


@given(fa4_strategies.shapes(), fa4_strategies.options(), st.sampled_from(DTYPES), st.booleans())
def test_any_request(shape, options, dtype, use_dlse):
    check_attention(attention_by("chosen"), make_inputs(shape, dtype), use_dlse=use_dlse, **options)


@pytest.mark.parametrize("seqlens", [(300, 700), (700, 300), (5, 2), (1, 1100), (1100, 1)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (40, 0), (17, 30), (-3, 20), (30, -8), (600, 5)], ids=str)
def test_several_tiles(seqlens, window):
    shape = AttentionShape(1, *seqlens, 3, 1, 16, 24)
    check_attention(attention_by("chosen"), make_inputs(shape, torch.float32), use_dlse=True, window_size=window)


def test_several_key_blocks(monkeypatch):
    """dk and dv are summed over blocks of keys, and dq over the blocks."""
    monkeypatch.setattr("fa4.cpu.backward.SUM_ELEMENTS", 1)
    shape = AttentionShape(1, 700, 700, 2, 1, 16)
    for window in ((None, None), (100, 500)):
        check_attention(attention_by("tiled"), make_inputs(shape, torch.float32), window_size=window)


@pytest.mark.parametrize("ratio", [3, 5, 6, 7, 9, 128, 300])
@pytest.mark.parametrize("path", ["flash", "tiled"])
def test_head_ratios(ratio, path):
    check_attention(attention_by(path), make_inputs(AttentionShape(1, 33, 33, ratio, 1, 16), torch.bfloat16), causal=True)


@pytest.mark.parametrize(
    "dims", [(8, 8), (24, 24), (40, 40), (72, 72), (80, 80), (96, 96), (192, 128), (128, 96), (160, 160), (512, 512), (1, 3)]
)
def test_head_dims(dims):
    check_attention(attention_by("chosen"), make_inputs(AttentionShape(1, 70, 70, 2, 1, *dims), torch.bfloat16), causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0, 1e-6, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    check_attention(
        attention_by("chosen"), make_inputs(AttentionShape(1, 90, 90, 2, 2, 32), torch.float32), softmax_scale=scale, causal=causal
    )


def test_softcap_backward():
    check_attention(attention_by("chosen"), make_inputs(AttentionShape(1, 300, 300, 2, 1, 64)), softcap=10.0, causal=True, use_dlse=True)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 3), (torch.bfloat16, 30)], ids=str)
@pytest.mark.parametrize("path", ["flash", "tiled"])
@pytest.mark.parametrize("causal", [False, True])
def test_large_logits(dtype, factor, path, causal):
    check_attention(attention_by(path), make_inputs(AttentionShape(1, 256, 256, 2, 2, 64), dtype).scaled(factor), causal=causal)


@pytest.mark.parametrize("path", ["flash", "tiled"])
@pytest.mark.parametrize("step", [7.9, 8.1])
def test_rising_maximum(path, step):
    """The maximum of every row rises by ``step`` (in units of log2) at each of 32 blocks of keys."""
    shape = AttentionShape(1, 64, 2048, 1, 1, 16)
    inputs = make_inputs(shape, torch.float32)
    ramp = torch.arange(32).repeat_interleave(64) * step * 0.6931471805599453
    inputs.k[..., 0] = ramp[None, :, None]
    inputs.q[..., 0] = 4.0  # times the scale, 1 / 4: the ramp itself
    inputs.q[..., 1:] *= 0.1
    check_attention(attention_by(path), inputs)


@pytest.mark.parametrize("path", ["flash", "tiled"])
@pytest.mark.parametrize("layout", ["heads_first", "padded"])
@pytest.mark.parametrize("group", [1, 2])
def test_layouts(path, layout, group):
    check_attention(
        attention_by(path), make_inputs(AttentionShape(2, 80, 80, 4, 4 // group, 32), torch.bfloat16, layout=layout), causal=True
    )


def test_transposed_v():
    """Also one whose last dimension is not contiguous."""
    inputs = make_inputs(AttentionShape(2, 64, 64, 2, 2, 32), torch.float32)
    strided = inputs.v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert strided.stride(3) != 1
    assert not torch_flash.fits_forward(inputs.q, inputs.k, strided, options_of(32))
    check_attention(attention_by("chosen"), type(inputs)(inputs.q, inputs.k, strided, inputs.dout, inputs.dlse))


@pytest.mark.parametrize("path", ["flash", "tiled"])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_strides_of_dout(path, heads_kv):
    """Expanded with a stride of 0, and a view with an outer stride of its own."""
    inputs = make_inputs(AttentionShape(2, 38, 38, 4, heads_kv, 32), torch.bfloat16)
    wide = torch.randn(2, 38 * 4 * 32 * 2).bfloat16()[:, : 38 * 4 * 32].unflatten(1, (38, 4, 32))
    for dout in (wide, torch.ones((), dtype=torch.bfloat16).expand(2, 38, 4, 32), wide[:, :1].expand(2, 38, 4, 32)):
        strided = type(inputs)(inputs.q, inputs.k, inputs.v, dout, inputs.dlse)
        check_attention(attention_by(path), strided, causal=True)


def test_expanded_inputs():
    """Every row the same query, every head the same key."""
    inputs = make_inputs(AttentionShape(2, 50, 50, 4, 4, 16), torch.float32)
    views = type(inputs)(inputs.q[:, :1].expand_as(inputs.q), inputs.k[:, :, :1].expand_as(inputs.k), inputs.v, inputs.dout, inputs.dlse)
    check_attention(attention_by("chosen"), views, causal=True)


def test_dlse_alone():
    inputs = make_inputs(AttentionShape(1, 90, 120, 2, 1, 32), torch.float32)
    q, k, v = inputs.leaves()
    _, lse = attention_by("chosen")(q, k, v, causal=True)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), inputs.dlse)
    zero = type(inputs)(inputs.q, inputs.k, inputs.v, torch.zeros_like(inputs.dout), inputs.dlse)
    _, _, dq_both, dk_both, _ = gradients("chosen", zero, dlse=inputs.dlse, causal=True)
    check_attention(attention_by("chosen"), zero, use_dlse=True, causal=True)
    assert torch.equal(dq, dq_both)
    assert torch.equal(dk, dk_both)
    assert not dv.any()


@pytest.mark.parametrize(("path", "shape"), [("tiled", (4, 4, 2, 1)), ("flash", (16, 16, 1, 1))], ids=str)
def test_many_batches(path, shape):
    """More (batch, head) pairs than a GPU's grid has blocks in its small dimensions."""
    inputs = make_inputs(AttentionShape(65536, *shape, 8), torch.bfloat16)
    whole = gradients(path, inputs, causal=True)
    last = type(inputs)(*(x[-3:] for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))
    check_attention(attention_by(path), last, causal=True)
    for all_of_it, part in zip(whole, gradients(path, last, causal=True), strict=True):
        torch.testing.assert_close(all_of_it[-3:], part)
