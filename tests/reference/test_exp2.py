import numpy as np
import pytest

from fa4.reference import EXP2_COEFFICIENTS, EXP2_RELATIVE_ERROR, emulated_exp2


def relative_error(x, coefficients=None):
    if coefficients is None:
        return np.abs(emulated_exp2(x).astype(np.float64) / np.exp2(x.astype(np.float64)) - 1)
    return np.abs(np.polyval(coefficients[::-1], x) / np.exp2(x) - 1)


def test_error_bound_over_every_float32_in_one_octave_of_fractions():
    """[1, 2) holds each fraction that has 23 bits once: all of them, in pieces, are 2^23 numbers."""
    largest = 0.0
    for start in range(0, 2**23, 2**21):
        x = (np.arange(start, start + 2**21, dtype=np.int32) + np.int32(0x3F800000)).view(np.float32)
        largest = max(largest, relative_error(x).max())
    assert 8.5e-5 < largest < EXP2_RELATIVE_ERROR < 1e-4


@pytest.mark.parametrize(("low", "high"), [(-126, -120), (-20, 0), (-1e-3, 1e-3), (0, 8), (120, 127.999)])
def test_error_bound_over_the_range(low, high):
    assert relative_error(np.linspace(low, high, 50_001).astype(np.float32)).max() < EXP2_RELATIVE_ERROR


def test_powers_of_two_are_exact():
    exponents = np.arange(-126, 128)
    np.testing.assert_array_equal(emulated_exp2(exponents), np.ldexp(np.float32(1), exponents))


def test_outside_the_range():
    x = np.array([-np.inf, -1e9, -126.5, 128.0, np.inf, np.nan, -0.0], dtype=np.float32)
    np.testing.assert_array_equal(emulated_exp2(x), np.array([0, 0, 0, np.inf, np.inf, np.nan, 1], dtype=np.float32))


def test_coefficients_are_the_best_ones():
    """At a minimax solution the error takes its extreme value with alternating sign, once more than there are free coefficients."""
    x = np.linspace(0, 1, 100_001)
    error = np.polyval(EXP2_COEFFICIENTS[::-1], x) / np.exp2(x) - 1
    largest = np.abs(error).max()
    extremes = np.sign(error[np.abs(error) > 0.99 * largest])
    assert np.count_nonzero(np.diff(extremes)) + 1 == len(EXP2_COEFFICIENTS)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_wrong_coefficient_breaks_the_bound(index):
    wrong = [c * (1.0005 if i == index else 1.0) for i, c in enumerate(EXP2_COEFFICIENTS)]
    assert relative_error(np.linspace(0, 1, 1001), wrong).max() > EXP2_RELATIVE_ERROR
