import itertools

import numpy as np
import pytest

from fa4.reference import standard_attention, visible

from .support import assert_close, naive_attention, naive_sees, operands

WINDOWS = [
    (None, None),
    (-1, -1),
    (None, 0),
    (0, -1),
    (0, 0),
    (2, 1),
    (-1, 0),
    (3, -2),
    (-3, None),
    (-2, 5),
    (None, -4),
    (7, -8),
    (0, None),
]


def matrix(sq, sk, **mask):
    return visible(np.arange(sq), np.arange(sk), offset=sk - sq, **mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize(("sq", "sk"), [(6, 6), (3, 8), (8, 3), (1, 5), (5, 1)])
def test_every_entry_is_what_the_rule_in_words_says(sq, sk, window_size, causal):
    seen = matrix(sq, sk, causal=causal, window_size=window_size)
    for i, j in itertools.product(range(sq), range(sk)):
        assert seen[i, j] == naive_sees(i, j, sq, sk, causal, window_size)


def test_window_of_zero_is_the_diagonal():
    np.testing.assert_array_equal(matrix(64, 64, window_size=(0, 0)), np.eye(64, dtype=bool))


def test_causal_with_an_open_left_window_is_causal():
    np.testing.assert_array_equal(matrix(9, 9, causal=True, window_size=(-1, 0)), matrix(9, 9, causal=True))
    q, k, v = operands(0, sq=9, sk=9)
    np.testing.assert_array_equal(
        standard_attention(q, k, v, causal=True, window_size=(-1, 0)).out, standard_attention(q, k, v, causal=True).out
    )


def test_causal_clamps_right_but_keeps_negative_right():
    np.testing.assert_array_equal(matrix(9, 9, causal=True, window_size=(4, 3)), matrix(9, 9, window_size=(4, 0)))
    np.testing.assert_array_equal(matrix(9, 9, causal=True, window_size=(4, -2)), matrix(9, 9, window_size=(4, -2)))


def test_bounds_larger_than_any_length():
    assert matrix(4, 4, window_size=(2**40, 2**40)).all()
    assert not matrix(4, 4, window_size=(None, -(2**40))).any()


def test_empty_offset_window_gives_no_attention_instead_of_full_attention():
    q, k, v = operands(1, sq=64, sk=64)
    result = standard_attention(q, k, v, window_size=(7, -8))
    assert (result.out == 0).all()
    assert (result.lse == -np.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", WINDOWS)
def test_standard_attention_against_scalar_loops(window_size, causal):
    q, k, v = operands(2, sq=6, sk=9, hq=2, hkv=1)
    result = standard_attention(q, k, v, causal=causal, window_size=window_size)
    out, lse = naive_attention(q, k, v, causal=causal, window_size=window_size)
    assert_close(result.out, out)
    assert_close(result.lse, lse)
