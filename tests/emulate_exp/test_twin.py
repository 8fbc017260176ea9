"""The numpy twin: its error, its edges, and that its multiply-add rounds once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fa4.emulate_exp import COEFFICIENTS, RELATIVE_ERROR, emulated_exp2
from fa4.emulate_exp.coefficients import CONTINUOUS, CONTINUOUS_ERROR, POLYNOMIAL_ERROR
from fa4.emulate_exp.report import BINADES, measure, numbers, round_to
from fa4.emulate_exp.twin import FORMS, fma, polynomial
from fa4.errors import ArgumentError

PUBLISHED = {1: 3.9e-2, 2: 2.1e-3, 3: 8.8e-5, 4: 3.1e-6, 5: 1.4e-7}
"""Largest relative errors of FlashAttention-4's polynomials (arXiv 2603.05451)."""
FLOAT32_HALF_ULP = 2.0**-24


def relative_error(x, degree=3, form="fast"):
    return np.abs(emulated_exp2(x, degree, form).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_polynomial_over_every_fraction(degree):
    """x - floor(x) is a multiple of 2^-24: all of them, in pieces."""
    largest = 0.0
    for start in range(0, 2**24 + 1, 2**21):
        f = (np.arange(start, min(start + 2**21, 2**24 + 1)) / 2**24).astype(np.float32)
        largest = max(largest, np.abs(polynomial(f, COEFFICIENTS[degree]) / np.exp2(f.astype(np.float64)) - 1).max())
    assert 0.999 * POLYNOMIAL_ERROR[degree] < largest <= POLYNOMIAL_ERROR[degree]


def test_errors_are_at_or_below_the_published_ones():
    for degree, published in PUBLISHED.items():
        assert POLYNOMIAL_ERROR[degree] <= published
    # Rounding a value just above 1 to float32 already costs half a unit; degree 6 is that close to it.
    assert POLYNOMIAL_ERROR[6] < 1.03 * FLOAT32_HALF_ULP


def test_error_over_a_sample_of_all_numbers():
    for result in measure(stride=997):
        assert 0.9 * RELATIVE_ERROR[result.degree] < result.largest <= RELATIVE_ERROR[result.degree]


@pytest.mark.slow
def test_error_over_every_float32():
    for result in measure():
        assert 0.999 * RELATIVE_ERROR[result.degree] < result.largest <= RELATIVE_ERROR[result.degree]


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_closer_to_0_than_those_all_results_are_the_same(degree):
    last = np.float32(-(2.0 ** BINADES[-1]))
    x = np.concatenate([[last], -np.geomspace(2.0**-140, 2.0**-26, 999), -(np.float32(2) ** np.arange(-149, -26))]).astype(np.float32)
    assert len(np.unique(emulated_exp2(x, degree))) == 1
    assert relative_error(x, degree).max() <= RELATIVE_ERROR[degree]


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_wrong_coefficient_breaks_the_bound(index, monkeypatch):
    wrong = tuple(c * (1.0005 if i == index else 1.0) for i, c in enumerate(COEFFICIENTS[3]))
    monkeypatch.setitem(COEFFICIENTS, 3, wrong)
    assert relative_error(np.linspace(-1, 0, 1001).astype(np.float32)).max() > RELATIVE_ERROR[3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_powers_of_two_are_exact(form, degree):
    exponents = np.arange(-126, 64)
    np.testing.assert_array_equal(emulated_exp2(exponents, degree, form), np.ldexp(np.float32(1), exponents))
    assert emulated_exp2(-0.0, degree, form) == 1


def test_forms_agree_where_both_are_defined():
    x = np.linspace(-126, 63.99, 100_003).astype(np.float32)
    fast, full, unclamped = (emulated_exp2(x, form=form) for form in ("fast", "full", "unclamped"))
    np.testing.assert_array_equal(fast, full)
    np.testing.assert_array_equal(fast, unclamped)
    x = np.linspace(-127, 127.99, 100_003).astype(np.float32)
    np.testing.assert_array_equal(emulated_exp2(x), emulated_exp2(x, form="unclamped"))


def test_fast_form_below_the_normal_range():
    below = np.array([-np.inf, -3e38, -1e9, -150, -127], np.float32)
    np.testing.assert_array_equal(emulated_exp2(below), np.zeros(5, np.float32))
    x = np.linspace(-127, -126, 10_001).astype(np.float32)
    result = emulated_exp2(x)
    assert np.abs(result - np.exp2(x.astype(np.float64))).max() <= 2.0**-127
    assert (np.diff(result) >= 0).all()


def test_full_form_is_right_below_the_normal_range():
    x = np.linspace(-151, -126, 100_003).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    # Half a unit of a subnormal number, and the error of the polynomial.
    assert (np.abs(emulated_exp2(x, form="full") - exact) <= 2.0**-150 + RELATIVE_ERROR[3] * exact).all()
    np.testing.assert_array_equal(emulated_exp2(np.array([-np.inf, -150]), form="full"), [0, 0])
    assert emulated_exp2(-149.0, form="full") == 2.0**-149
    assert np.isnan(emulated_exp2(np.nan, form="full"))


def test_nan_is_loud_in_the_other_forms():
    for form in ("fast", "unclamped"):
        assert emulated_exp2(np.nan, form=form) == np.finfo(np.float32).max


@pytest.mark.parametrize(("arguments", "name"), [({"degree": 7}, "degree"), ({"degree": 0}, "degree"), ({"form": "quick"}, "form")])
def test_bad_arguments(arguments, name):
    with pytest.raises(ArgumentError, match=name):
        emulated_exp2(0.0, **arguments)


def round_fraction(exact: Fraction) -> float:
    """The nearest float32 of a positive rational in the normal range, ties to even."""
    exponent = 0
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    while Fraction(2) ** exponent > exact:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return float(round(exact / unit) * unit)


# (a, b, c) with a * b + c at a tie of float32, or so little beside one, 2^-70, that float64 cannot tell.
TIES = [
    (2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1.0),
    (2.0**-24 * (1 + 2.0**-23), 1 + 2.0**-23, 1.0),
    (2.0**-24, 1.0, 1.0),
    (2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1 + 2.0**-23),
    (2.0**-24, 1.0, 1 + 2.0**-23),
]


def test_multiply_add_rounds_once():
    a, b, c = np.concatenate([np.random.default_rng(0).random((3000, 3)), TIES]).astype(np.float32).T
    expected = [round_fraction(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(fma(a, b, c), np.array(expected, np.float32))


def test_rounding_twice_would_be_caught():
    a, b, c = (np.array(column, np.float32) for column in zip(*TIES, strict=True))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != fma(a, b, c)).any()


def test_rounding_to_fewer_bits():
    import ml_dtypes

    x = np.random.default_rng(0).random(100_000).astype(np.float32) + np.float32(0.5)
    x[:3] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20  # ties, and just above one
    np.testing.assert_array_equal(round_to(x.astype(np.float64), 8), x.astype(ml_dtypes.bfloat16).astype(np.float64))
    np.testing.assert_array_equal(round_to(x.astype(np.float64), 11), x.astype(np.float16).astype(np.float64))


def test_numbers_of_a_binade_are_all_there():
    x = np.concatenate(list(numbers(0)))
    assert len(x) == len(np.unique(x)) == 2**23
    assert (x.min(), x.max()) == (np.nextafter(np.float32(-2), np.float32(0)), -1)


def test_continuous_coefficients_have_no_step_at_integers():
    (coefficients,) = CONTINUOUS.values()
    f = (np.arange(0, 2**24 + 1, 7) / 2**24).astype(np.float32)
    error = np.abs(polynomial(f, coefficients) / np.exp2(f.astype(np.float64)) - 1)
    assert 0.99 * CONTINUOUS_ERROR[3] < error.max() <= CONTINUOUS_ERROR[3]
    assert polynomial(np.array([0, 1], np.float32), coefficients).tolist() == [1.0, 2.0]
    below = -np.logspace(-12, -6, 100).astype(np.float32)
    assert np.abs(emulated_exp2(below, continuous=True) - 1.0).max() < 1e-6
    assert np.abs(emulated_exp2(below) - 1.0).max() > 8e-5
    with pytest.raises(ArgumentError, match="degree 3 alone"):
        emulated_exp2(below, 4, continuous=True)
