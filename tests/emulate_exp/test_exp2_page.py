"""Numbers on docs/exp2.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fa4.emulate_exp.coefficients import POLYNOMIAL_ERROR
from fa4.emulate_exp.report import SPREADS, attention_errors, measure

PAGE = (Path(__file__).parents[2] / "docs" / "exp2.md").read_text(encoding="utf-8")


def rows(first):
    """Cells of the table whose header starts with ``first``, below it."""
    block = re.search(rf"^\| {first} \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]


def states(cell, value, tolerance=0.0):
    """Whether the cell is the value, rounded to the digits that it shows, give or take one of the last and a relative tolerance."""
    digits, _, exponent = cell.rstrip("%").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(float(cell.rstrip("%")) - value) <= 1.01 * unit + tolerance * abs(value)


def test_states_can_say_no():
    assert states("1.0%", 0.991)
    assert states("8.56e-5", 8.5643e-5)
    assert not states("8.56e-5", 8.59e-5)
    assert not states("23.9%", 24.2)


def test_whole_attention():
    table = rows("exponentials")
    assert len(table) == 4
    for column, spread in enumerate(SPREADS, start=1):
        errors = list(attention_errors(spread, (0.125, 0.25, 1.0)).values())
        for cells, error in zip(table, errors, strict=True):
            assert states(cells[column], error), (cells, spread, error)


def check_errors(stride, tolerance):
    table = {int(cells[0]): cells[1:] for cells in rows("degree")}
    for result in measure(stride=stride):
        polynomial, _, largest, *shares = table.pop(result.degree)
        assert states(polynomial, POLYNOMIAL_ERROR[result.degree])
        assert states(largest, result.largest, tolerance)
        for cell, name in zip(shares, ("bfloat16", "float16", "float32"), strict=True):
            # A share of 1 in 100,000 cannot be seen in a sample of some ten thousand.
            assert (stride > 1 and result.wrong[name] < 0.01) or states(cell, 100 * result.wrong[name], tolerance), (cell, name, result)
    assert not table


def test_errors_by_degree_on_a_sample():
    check_errors(997, 0.1)


@pytest.mark.slow
def test_errors_by_degree():
    check_errors(1, 0.0)
