import numpy as np
import pytest

from fa4.reference import AttentionOptions, Fp8Options, Tiles, flash3_attention, standard_attention
from fa4.reference.flash3 import fp8_scale, quantise, random_rotation, rotate

from .support import operands


@pytest.mark.parametrize("features", [1, 2, 3, 24, 64, 80])
def test_rotation_keeps_dot_products(features):
    rotation = random_rotation(features, seed=1)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(len(rotation)), atol=1e-14)
    x, y = np.random.default_rng(2).standard_normal((2, 5, features))
    np.testing.assert_allclose(rotate(x, rotation) @ rotate(y, rotation).T, x @ y.T, rtol=1e-12, atol=1e-13)


def test_rotation_spreads_an_outlier():
    x = np.zeros((1, 64))
    x[0, 5] = 40.0
    np.testing.assert_allclose(np.abs(rotate(x, random_rotation(64, seed=0))), 40.0 / 8)


def test_quantisation_error_is_half_a_step_of_three_mantissa_bits():
    x = np.random.default_rng(3).uniform(0.01, 1.0, 1000)  # at this scale 0.01 is 4.48, well above the denormal numbers of e4m3
    quantised = quantise(x)
    relative = np.abs(quantised.codes * np.float64(quantised.scale) / x - 1)
    assert relative.max() <= 2.0**-4 * (1 + 1e-6)
    assert relative.max() > 2.0**-5
    assert np.abs(quantised.codes).max() == 448


def test_scale_of_nothing_is_one():
    assert fp8_scale(np.zeros((0, 4))) == 1
    assert fp8_scale(np.zeros((3, 4))) == 1


@pytest.mark.parametrize("fp8", [Fp8Options(block_scales=b, rotation=r) for b in (False, True) for r in (False, True)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (9, -2)}, {"softcap": 1.0, "softmax_scale": -0.3}, {"window_size": (2, -3)}],
    ids=str,
)
def test_close_to_standard_attention_under_all_options(options, fp8):
    tensors = operands(4, batch=2, sq=37, sk=41, hq=4, hkv=2, d=24, dv=16)
    exact = standard_attention(*tensors, **options)
    result = flash3_attention(*tensors, options=AttentionOptions(**options), tiles=Tiles(16, 8), fp8=fp8)
    # An element of e4m3 is off by at most 2^-4; a score, a sum over D of products of two, by a few times 2^-4 at most.
    np.testing.assert_array_equal(result.lse == -np.inf, exact.lse == -np.inf)
    seen = exact.lse > -np.inf
    assert np.abs(result.lse[seen] - exact.lse[seen]).max(initial=0.0) < 0.25
    assert np.abs(result.out - exact.out).max(initial=0.0) < 0.4
    assert (result.out.swapaxes(1, 2)[~seen] == 0).all()


def test_rounding_to_fp8_is_there():
    tensors = operands(5, sq=16, sk=16, d=16)
    assert np.abs(flash3_attention(*tensors).out - standard_attention(*tensors).out).max() > 1e-3


@pytest.mark.parametrize("empty", [{"sq": 0}, {"sk": 0}, {"batch": 0}])
def test_empty_inputs(empty):
    tensors = operands(6, **empty)
    result, exact = flash3_attention(*tensors), standard_attention(*tensors)
    np.testing.assert_array_equal(result.out, exact.out)
    np.testing.assert_array_equal(result.lse, exact.lse)
