import numpy as np
import pytest

from fa4.emulate_exp import RELATIVE_ERROR
from fa4.reference import AttentionOptions, Flash4Options, Tiles, flash4_attention, standard_attention
from fa4.reference.flash4 import emulated_columns
from fa4.reference.online import finite

from .support import assert_close, operands

BLOCKS, COLUMNS, ROWS = 32, 4, 8


def rising_maximum(rises):
    """Operands for which the row maximum rises by ``rises[t]`` log2 units at key tile t + 1.

    Each key is its score in log2 units times ln 2 in its one feature, each query is 1, the scale is 1. The maximum of a tile is
    its last key; the others lie 1 to 3 units below.
    """
    peaks = np.concatenate([[0.0], np.cumsum(rises)])
    log2_scores = (peaks[:, None] - np.arange(COLUMNS)[::-1]).ravel()
    q = np.ones((1, ROWS, 1, 1))
    v = np.random.default_rng(0).standard_normal((1, len(log2_scores), 1, 5))
    return q, log2_scores[None, :, None, None] * np.log(2), v


def run_rising(rises, tau=8.0):
    tensors = rising_maximum(rises)
    flash4 = Flash4Options(tau=tau, warp=4, emulated_share=0.0)
    result = flash4_attention(*tensors, options=AttentionOptions(softmax_scale=1.0), tiles=Tiles(ROWS, COLUMNS), flash4=flash4)
    expected = standard_attention(*tensors, softmax_scale=1.0)
    assert_close(result.out, expected.out)
    assert_close(result.lse, expected.lse)
    warps = ROWS // 4
    return result.ledger.rescales_skipped / warps, result.ledger.rescales_done / warps


def test_rises_of_8_1_always_rescale():
    assert run_rising([8.1] * (BLOCKS - 1)) == (0, 31)


def test_rises_of_7_9_skip_every_second_rescale():
    # 7.9 above the reference: skip. 15.8 above: rescale, and the reference is the true maximum again. 31 decisions begin with a skip.
    assert run_rising([7.9] * (BLOCKS - 1)) == (16, 15)


def test_rises_of_7_9_then_8_1_in_turn():
    # Skip at 7.9, rescale at 16.0, and again: as above. Beginning with 8.1: rescale, then skip at 7.9, rescale at 16.0, and so on.
    assert run_rising(([7.9, 8.1] * BLOCKS)[: BLOCKS - 1]) == (16, 15)
    assert run_rising(([8.1, 7.9] * BLOCKS)[: BLOCKS - 1]) == (15, 16)


def test_a_maximum_that_does_not_rise_skips_all():
    assert run_rising([0.0] * (BLOCKS - 1)) == (31, 0)
    assert run_rising([-5.0] * (BLOCKS - 1)) == (31, 0)


def test_small_rises_add_up():
    # Eight rises of 1 stay at 8.0 above the reference, which is not more than tau; the ninth makes 9 and rescales.
    assert run_rising([1.0] * 27) == (24, 3)


def test_tau_zero_rescales_always():
    assert run_rising([-5.0] * (BLOCKS - 1), tau=0.0) == (0, 31)


def test_a_warp_decides_as_one():
    """One row of the first warp of four needs a rescale; the second warp needs none."""
    q, k, v = rising_maximum([9.0])
    q[0, 1:] = 0.1
    flash4 = Flash4Options(warp=4, emulated_share=0.0)
    result = flash4_attention(q, k, v, options=AttentionOptions(softmax_scale=1.0), tiles=Tiles(ROWS, COLUMNS), flash4=flash4)
    assert (result.ledger.rescales_done, result.ledger.rescales_skipped) == (1, 1)
    assert_close(result.out, standard_attention(q, k, v, softmax_scale=1.0).out)


@pytest.mark.parametrize("fault", ["forget the output", "move the reference without rescaling"])
def test_a_faulty_rescale_is_caught(monkeypatch, fault):
    def faulty(state, scores, rescale):
        new_max = np.where(rescale, np.maximum(state.row_max, scores.max(axis=1)), state.row_max)
        factor = np.where(rescale, np.exp2(state.row_max - finite(new_max)), 1.0)
        state.row_max = new_max
        if fault == "forget the output":
            state.row_sum = factor * state.row_sum

    monkeypatch.setattr("fa4.reference.flash4.apply_rescale", faulty)
    with pytest.raises(AssertionError):
        run_rising([8.1] * 3)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_emulated_columns_are_the_share_asked_for_and_spread(share):
    marked = emulated_columns(128, share)
    assert marked.sum() == int(128 * share)
    gaps = np.diff(np.flatnonzero(marked))
    assert gaps.size == 0 or gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"window_size": (20, -3)}], ids=str)
@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("tau", [0.0, 8.0])
def test_effect_of_emulation_is_bounded(options, share, tau):
    """Emulation multiplies each weight p_j by 1 + e_j with abs(e_j) <= e.

    out' - out = sum p_j (1 + e_j) v_j / sum p_j (1 + e_j) - out = sum p_j e_j (v_j - out) / sum p_j (1 + e_j), for p_j that add
    up to 1, so that abs(out' - out) <= e / (1 - e) * max_j abs(v_j - out); and abs(lse' - lse) <= -log(1 - e).

    e is the error of the polynomial plus that of rounding the exponent x to float32, abs(x) * 2^-24 * ln 2, here with abs(x) < 64.
    """
    q, k, v = operands(1, batch=1, sq=50, sk=70, hq=2, hkv=1, d=16, dv=6)
    exact = standard_attention(q, k, v, **options)
    flash4 = Flash4Options(tau=tau, emulated_share=share)
    result = flash4_attention(q, k, v, options=AttentionOptions(**options), tiles=Tiles(16, 16), flash4=flash4)
    e = RELATIVE_ERROR[3] + 64 * 2.0**-24 * np.log(2)
    spread = np.abs(v[:, None, :, :, :] - exact.out[:, :, None]).max(axis=2)  # over keys; broadcast from one head to two
    difference = np.abs(result.out - exact.out)
    assert (difference <= e / (1 - e) * spread + 1e-14).all()
    assert difference.max() > 1e-7  # it was emulated
    seen = exact.lse > -np.inf
    assert np.abs(result.lse[seen] - exact.lse[seen]).max() <= -np.log1p(-e)


def test_the_emulation_bound_can_fail():
    """An exp2 that is off by one part in a hundred breaks it."""
    q, k, v = operands(1, sq=50, sk=70, d=16)

    def bad_exp2(x):
        return np.exp2(x) * np.where(x < -1, np.float32(1.01), np.float32(1.0))

    exact = standard_attention(q, k, v)
    result = flash4_attention(q, k, v, flash4=Flash4Options(emulated_share=1.0, exp2=bad_exp2))
    assert np.abs(result.lse - exact.lse).max() > -np.log1p(-RELATIVE_ERROR[3])


def test_an_exp2_that_clamps_does_not_leak_hidden_keys():
    """A kernel clamps the exponent, so that minus infinity gives a tiny positive number: hidden keys must count 0 all the same."""
    tensors = operands(2, sq=9, sk=9)

    def clamped(x):
        return np.exp2(np.maximum(x, np.float32(-100)))

    options = {"window_size": (3, -4)}
    result = flash4_attention(*tensors, options=AttentionOptions(**options), flash4=Flash4Options(emulated_share=1.0, exp2=clamped))
    exact = standard_attention(*tensors, **options)
    np.testing.assert_array_equal(result.lse == -np.inf, exact.lse == -np.inf)
    assert (result.out[:, :4] == 0).all()


@pytest.mark.parametrize("empty", [{"sq": 0}, {"sk": 0}, {"batch": 0}, {"hq": 0, "hkv": 0}])
def test_empty_inputs(empty):
    tensors = operands(3, **empty)
    result, exact = flash4_attention(*tensors), standard_attention(*tensors)
    np.testing.assert_array_equal(result.out, exact.out)
    np.testing.assert_array_equal(result.lse, exact.lse)
    assert result.ledger.rescales_done == result.ledger.rescales_skipped == 0
