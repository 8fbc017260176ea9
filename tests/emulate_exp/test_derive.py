"""The coefficients can be found again, and the way to them does what it says."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulate_exp import COEFFICIENTS, __main__
from fa4.emulate_exp.coefficients import CONTINUOUS
from fa4.emulate_exp.derive import derive, derive_continuous, remez


@pytest.mark.parametrize("degree", COEFFICIENTS)
def test_exchange_ends_where_the_error_alternates(degree):
    """At a minimax solution the error takes its extreme value with alternating sign, once more than there are free coefficients."""
    x = np.linspace(0, 1, 100_001)
    error = np.polyval(remez([1.0], degree)[::-1], x) / np.exp2(x) - 1
    largest = np.abs(error).max()
    extremes = np.sign(error[np.abs(error) > 0.99 * largest])
    assert np.count_nonzero(np.diff(extremes)) + 1 == degree + 1
    assert error[0] == 0


def test_least_error_of_degree_3_with_p_of_0_fixed_and_free():
    x = np.linspace(0, 1, 100_001)
    fixed, free = (np.abs(np.polyval(remez(c, 3)[::-1], x) / np.exp2(x) - 1).max() for c in ([1.0], []))
    assert fixed == pytest.approx(8.56e-5, rel=1e-3)
    assert free == pytest.approx(7.5e-5, rel=1e-2)


def test_a_fixed_coefficient_stays():
    assert remez([1.0, 0.7], 3)[:2] == (1.0, 0.7)


def test_coefficients_are_float32():
    for coefficients in COEFFICIENTS.values():
        assert coefficients[0] == 1
        assert all(float(np.float32(c)) == c for c in coefficients)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6])
def test_each_is_found_again(degree):
    assert derive(degree) == COEFFICIENTS[degree]


@pytest.mark.slow
def test_the_continuous_ones_are_found_again():
    assert derive_continuous() == CONTINUOUS[3]


def test_command_compares_with_what_is_in_use(monkeypatch, capsys):
    """With derivations that other tests make."""
    monkeypatch.setattr("fa4.emulate_exp.derive.derive", lambda degree: COEFFICIENTS[degree])
    monkeypatch.setattr("fa4.emulate_exp.derive.derive_continuous", lambda: CONTINUOUS[3])
    assert __main__.main(["--derive", "--degree", "3"]) == 0
    assert "as in use" in capsys.readouterr().out
    monkeypatch.setattr("fa4.emulate_exp.derive.derive", lambda _degree: (1.0, 0.5))
    assert __main__.main(["--derive", "--degree", "3"]) == 1
    assert "IN USE: (1.0, 0.695" in capsys.readouterr().out


def test_command_reports(capsys):
    assert __main__.main(["--report", "--stride", "4999"]) == 0
    out = capsys.readouterr().out
    assert "every 4999th float32" in out
    assert "sm_100a, D 128" in out
