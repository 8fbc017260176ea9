"""What each argument means: windows, rows without keys, empty inputs, needed gradients, NaN where nothing looks."""

from __future__ import annotations

import itertools

import pytest
import torch

from fa4.cpu.backward import attention_backward
from fa4.cpu.forward import attention_forward
from fa4.cpu.tiles import Band
from fa4.problem import AttentionOptions
from fa4.testing import AttentionShape, check_attention, make_inputs

from .support import ALL, attention_by, gradients

INF = float("inf")


def test_left_open_window_is_plain_causal():
    inputs = make_inputs(AttentionShape(2, 128, 128, 2, 2, 32))
    for a, b in zip(gradients("chosen", inputs, causal=True), gradients("chosen", inputs, causal=True, window_size=(-1, 0)), strict=True):
        assert torch.equal(a, b)


def test_window_that_hides_every_near_key():
    inputs = make_inputs(AttentionShape(1, 64, 64, 1, 1, 32), torch.float32)
    out, lse, *grads = gradients("chosen", inputs, dlse=inputs.dlse, window_size=(7, -8))
    assert not out.any()
    assert (lse == -INF).all()
    assert not any(g.any() for g in grads)
    check_attention(attention_by("chosen"), inputs, window_size=(9, -8))


@pytest.mark.parametrize("window", [(-1, -1), (None, None), (None, 0), (0, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_window_values(window, causal):
    check_attention(
        attention_by("chosen"), make_inputs(AttentionShape(1, 20, 30, 1, 1, 16), torch.float32), window_size=window, causal=causal
    )


def test_band_against_its_definition():
    bounds = [None, -40, -7, -3, -2, 0, 1, 4, 9, 40, 10**30, -(10**30)]
    for rows, keys, left, right in itertools.product([1, 3, 7], [0, 1, 4, 9], bounds, bounds):
        band = Band.of(rows, keys, AttentionOptions(1.0, left, right))
        low, high = (INF if x is None else x for x in (left, right))
        grid = [[i + keys - rows - low <= j <= i + keys - rows + high for j in range(keys)] for i in range(rows)]
        seen = torch.tensor(grid, dtype=torch.bool).view(rows, keys)
        assert list(band.live) == [i for i in range(rows) if any(grid[i])]
        assert keys == 0 or band.full == bool(seen.all())
        assert not band.square_causal or torch.equal(seen, torch.ones(rows, keys, dtype=torch.bool).tril())
        assert keys == 0 or list(band.seeing(range(keys))) == list(band.live)
        for j in range(keys):
            assert list(band.seeing(range(j, j + 1))) == [i for i in range(rows) if grid[i][j]]
        if band.live:
            visible = band.visible(band.live)
            assert seen.any(0).nonzero().flatten().tolist() == list(visible)
            hidden = band.hidden(range(rows), range(keys))
            assert torch.equal(seen, torch.ones_like(seen) if hidden is None else ~hidden[:, 0])


@pytest.mark.parametrize("bounds", [(10**30, 10**30), (None, 10**30), (10**30, None)], ids=str)
def test_huge_bounds_are_open(bounds):
    inputs = make_inputs(AttentionShape(1, 20, 30, 1, 1, 16))
    out, lse = attention_forward(inputs.q, inputs.k, inputs.v, AttentionOptions(0.25))
    wide = attention_forward(inputs.q, inputs.k, inputs.v, AttentionOptions(0.25, *bounds))
    assert torch.equal(out, wide[0])
    assert torch.equal(lse, wide[1])


@pytest.mark.parametrize("bounds", [(-(10**30), None), (None, -(10**30)), (-(10**30), 10**30 + 5)], ids=str)
def test_very_negative_bounds_hide_everything(bounds):
    inputs = make_inputs(AttentionShape(1, 20, 30, 1, 1, 16))
    out, lse = attention_forward(inputs.q, inputs.k, inputs.v, AttentionOptions(0.25, *bounds))
    assert not out.any()
    assert (lse == -INF).all()


@pytest.mark.parametrize("shape", [AttentionShape(1, 600, 300, 2, 1, 16), AttentionShape(1, 5, 2, 2, 1, 16)], ids=str)
def test_rows_without_keys(shape):
    """Whatever arrives there, NaN included, is not read."""
    inputs = make_inputs(shape, torch.float32)
    empty = shape.seqlen_q - shape.seqlen_k
    expected = gradients("chosen", inputs, dlse=inputs.dlse.clone(), causal=True)
    assert not expected[0][:, :empty].any()
    assert (expected[1][:, :, :empty] == -INF).all()
    assert not expected[2][:, :empty].any()
    inputs.q[:, :empty] = float("nan")
    inputs.dout[:, :empty] = float("nan")
    inputs.dlse[:, :, :empty] = INF
    for a, b in zip(gradients("chosen", inputs, dlse=inputs.dlse, causal=True), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_empty(causal, sizes, heads):
    out, lse, dq, dk, dv = gradients("chosen", make_inputs(AttentionShape(*sizes, *heads, 16)), causal=causal)
    assert out.shape == dq.shape == (sizes[0], sizes[1], heads[0], 16)
    assert dk.shape == dv.shape == (sizes[0], sizes[2], heads[1], 16)
    assert not any(x.any() for x in (out, dq, dk, dv))
    assert lse.shape == (sizes[0], heads[0], sizes[1])
    assert (lse == -INF).all()


@pytest.mark.parametrize("dims", [(0, 8), (8, 0), (0, 0)], ids=str)
def test_empty_head_dims(dims):
    q, v = torch.randn(2, 5, 2, dims[0]), torch.randn(2, 5, 2, dims[1])
    out, lse = attention_forward(q, q, v, AttentionOptions(1.0, None, 0))
    grads = attention_backward(out, None, q, q, v, out, lse, AttentionOptions(1.0, None, 0), needed=ALL)
    assert [g.shape for g in grads] == [q.shape, q.shape, v.shape]
    if dims[0] == 0:  # every score is 0
        torch.testing.assert_close(lse, torch.arange(1.0, 6).log().expand(2, 2, 5))


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("window_right", [0, 3], ids=["flash", "tiled"])
def test_needed_gradients_only(needed, heads_kv, window_right):
    inputs = make_inputs(AttentionShape(2, 40, 40, 4, heads_kv, 16), torch.float32)
    options = AttentionOptions(0.25, None, window_right)
    out, lse = attention_forward(inputs.q, inputs.k, inputs.v, options)
    saved = inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, options
    for some, need, full in zip(attention_backward(*saved, needed=needed), needed, attention_backward(*saved, needed=ALL), strict=True):
        assert (some is not None) == need
        assert some is None or torch.equal(some, full)


def test_nan_in_keys_that_no_row_sees():
    """Keys 0 to 63 lie left of every window."""
    shape = AttentionShape(1, 64, 256, 2, 1, 16)
    inputs = make_inputs(shape, torch.float32)
    expected = gradients("chosen", inputs, window_size=(128, 0))
    inputs.k[:, :64] = float("nan")
    inputs.v[:, :64] = INF
    for a, b in zip(gradients("chosen", inputs, window_size=(128, 0)), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["flash", "tiled"])
def test_nan_stays_in_its_sequence_and_is_not_swallowed(path):
    inputs = make_inputs(AttentionShape(2, 300, 300, 2, 2, 16), torch.float32)
    inputs.k[1, 7, 1] = float("nan")
    out, lse, *grads = gradients(path, inputs)
    assert all(torch.isfinite(x[0]).all() for x in (out, lse, *grads))
    assert torch.isfinite(out[1, :, 0]).all()
    assert torch.isnan(out[1, :, 1]).all()
    assert torch.isnan(lse[1, 1]).all()


def test_lse_is_a_natural_logarithm():
    """Equal scores of 0 over n keys."""
    q, k = torch.zeros(1, 3, 1, 8), torch.zeros(1, 50, 1, 8)
    for options in (AttentionOptions(1.0), AttentionOptions(1.0, softcap=5.0)):
        _, lse = attention_forward(q, k, k, options)
        torch.testing.assert_close(lse, torch.full((1, 1, 3), 3.912023))
