"""The tiled algorithms against standard attention, forward and backward."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.errors import ArgumentError, ShapeError
from fa4.reference import (
    AttentionOptions,
    Flash4Options,
    Tiles,
    flash1_attention,
    flash2_attention,
    flash2_attention_backward,
    flash4_attention,
    heads,
    online,
    standard_attention,
    standard_attention_backward,
)

from .support import assert_close, operands, options_of

FORWARD = {
    "flash1": flash1_attention,
    "flash2": flash2_attention,
    "flash4, tau 0": functools.partial(flash4_attention, flash4=Flash4Options(tau=0.0, emulated_share=0.0)),
    "flash4, tau 8": functools.partial(flash4_attention, flash4=Flash4Options(tau=8.0, emulated_share=0.0)),
    "flash4, tau 8, warp 3": functools.partial(flash4_attention, flash4=Flash4Options(tau=8.0, warp=3, emulated_share=0.0)),
}
MASKS = [
    {},
    {"causal": True},
    {"window_size": (5, 3)},
    {"window_size": (4, 9), "causal": True},
    {"window_size": (None, -3)},
    {"window_size": (9, -4)},
    {"window_size": (2, -3)},
]
SHAPES = [  # sq, sk, hq, hkv
    (33, 33, 2, 2),
    (17, 40, 4, 2),
    (40, 17, 3, 1),
    (1, 29, 2, 1),
    (29, 1, 1, 1),
]


def assert_same_result(actual, expected):
    assert_close(actual.out, expected.out)
    assert_close(actual.lse, expected.lse)


@pytest.mark.parametrize("algorithm", FORWARD)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("sq", "sk", "hq", "hkv"), SHAPES)
def test_forward_matrix(algorithm, mask, sq, sk, hq, hkv):
    tensors = operands(0, batch=2, sq=sq, sk=sk, hq=hq, hkv=hkv, d=8, dv=5)
    assert_same_result(FORWARD[algorithm](*tensors, options=options_of(mask), tiles=Tiles(8, 7)), standard_attention(*tensors, **mask))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("sq", "sk", "hq", "hkv"), SHAPES)
def test_backward_matrix(mask, sq, sk, hq, hkv):
    tensors = operands(1, batch=2, sq=sq, sk=sk, hq=hq, hkv=hkv, d=8, dv=5)
    assert_same_gradients(tensors, mask | {"softcap": 1.3}, Tiles(8, 7))


def assert_same_gradients(tensors, options, tiles):
    rng = np.random.default_rng(2)
    forward = flash2_attention(*tensors, options=options_of(options), tiles=tiles)
    dout, dlse = rng.standard_normal(forward.out.shape), rng.standard_normal(forward.lse.shape)
    actual = flash2_attention_backward(*tensors, forward, dout, dlse, options=options_of(options), tiles=tiles)
    expected = standard_attention_backward(*tensors, dout, dlse, **options)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(actual, name), getattr(expected, name))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_shape_mask_and_tile(data):
    hkv = data.draw(st.integers(1, 2))
    sizes = {
        "sq": st.integers(0, 20),
        "sk": st.integers(0, 20),
        "d": st.integers(1, 9),
        "dv": st.integers(1, 6),
        "batch": st.integers(0, 2),
    }
    tensors = operands(
        data.draw(st.integers(0, 99)), hq=hkv * data.draw(st.integers(1, 3)), hkv=hkv, **data.draw(st.fixed_dictionaries(sizes))
    )
    bound = st.none() | st.integers(-6, 12)
    options = {
        "causal": data.draw(st.booleans()),
        "window_size": data.draw(st.tuples(bound, bound)),
        "softcap": data.draw(st.sampled_from([0.0, 0.9])),
        "softmax_scale": data.draw(st.sampled_from([None, 0.0, -1.1, 4.0])),
    }
    tiles = Tiles(data.draw(st.integers(1, 24)), data.draw(st.integers(1, 24)))
    expected = standard_attention(*tensors, **options)
    for algorithm in FORWARD.values():
        assert_same_result(algorithm(*tensors, options=options_of(options), tiles=tiles), expected)
    assert_same_gradients(tensors, options, tiles)


def test_rows_without_keys_keep_gradients_at_zero_whatever_they_hold():
    q, k, v = operands(3, sq=5, sk=2)
    options = AttentionOptions(causal=True)
    dout = np.ones((1, 5, 2, 3))
    clean = flash2_attention_backward(q, k, v, flash2_attention(q, k, v, options=options), dout, options=options)
    q[:, 0], dout[:, 1] = np.nan, np.inf
    forward = flash2_attention(q, k, v, options=options)
    dirty = flash2_attention_backward(q, k, v, forward, dout, options=options, tiles=Tiles(2, 1))
    assert (forward.out[:, :3] == 0).all()
    assert (forward.lse[..., :3] == -np.inf).all()
    assert (dirty.dq[:, :3] == 0).all()
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(dirty, name), getattr(clean, name))


def test_gradient_of_lse_alone():
    tensors = operands(4, sq=12, sk=12)
    forward = flash2_attention(*tensors)
    dlse = np.random.default_rng(5).standard_normal(forward.lse.shape)
    actual = flash2_attention_backward(*tensors, forward, None, dlse, tiles=Tiles(5, 4))
    expected = standard_attention_backward(*tensors, None, dlse)
    assert_close(actual.dq, expected.dq)
    assert not actual.dv.any()


def forget_to_rescale(state, scores):
    p, factor = online.online_softmax(state, scores)
    return p, np.ones_like(factor)


def forget_to_correct_the_sum(state, scores):
    old_sum = state.row_sum
    p, factor = online.online_softmax(state, scores)
    state.row_sum = old_sum + p.sum(axis=1)
    return p, factor


def forget_the_guard_for_minus_infinity(state, scores):
    row_max = np.maximum(state.row_max, scores.max(axis=1))
    p, factor = np.exp(scores - row_max[:, None]), np.exp(state.row_max - row_max)
    state.row_max, state.row_sum = row_max, factor * state.row_sum + p.sum(axis=1)
    return p, factor


@pytest.mark.parametrize("fault", [forget_to_rescale, forget_to_correct_the_sum, forget_the_guard_for_minus_infinity])
def test_a_faulty_online_softmax_is_caught(monkeypatch, fault):
    tensors = operands(6, sq=33, sk=33, d=8)
    options = {"window_size": (2, -1)}
    expected = standard_attention(*tensors, **options)
    assert_same_result(flash2_attention(*tensors, options=options_of(options), tiles=Tiles(16, 8)), expected)
    monkeypatch.setattr("fa4.reference.flash2.online_softmax", fault)
    with pytest.raises(AssertionError):
        assert_same_result(flash2_attention(*tensors, options=options_of(options), tiles=Tiles(16, 8)), expected)


def test_skipping_a_tile_too_many_is_caught(monkeypatch):
    tensors = operands(7, sq=33, sk=33)
    monkeypatch.setattr(heads.Head, "is_empty", lambda self, rows, columns: not self.seen(rows, columns).all())
    with pytest.raises(AssertionError):
        assert_same_result(
            flash2_attention(*tensors, options=AttentionOptions(causal=True), tiles=Tiles(8, 8)), standard_attention(*tensors, causal=True)
        )


def test_arguments_are_checked():
    q, k, v = operands(8)
    with pytest.raises(ArgumentError, match="rows=0"):
        Tiles(0, 8)
    with pytest.raises(ArgumentError, match="tau"):
        Flash4Options(tau=-1.0)
    with pytest.raises(ArgumentError, match="warp"):
        Flash4Options(warp=0)
    with pytest.raises(ArgumentError, match="emulated_share"):
        Flash4Options(emulated_share=1.5)
    with pytest.raises(ShapeError, match="forward"):
        flash2_attention_backward(q, k, v, flash2_attention(q[:, :2], k, v), np.ones((1, 5, 2, 3)))
