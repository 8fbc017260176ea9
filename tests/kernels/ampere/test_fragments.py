"""The rows and columns that lanes hand to ldmatrix give the products: one warp, with ldmatrix and mma as the PTX ISA defines them."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.kernels.ampere.forward.layouts import matrices_of_a, matrices_of_b, matrices_of_b_transposed

LANES = range(32)


def ldmatrix(tile, matrices, transpose):
    """Eight values per lane: lane 8 i + r names row r of matrix i, and every lane gets two values of each matrix."""
    result = np.zeros((32, 8))
    for i in range(4):
        matrix = np.zeros((8, 8))
        for r in range(8):
            row, column = matrices(8 * i + r)
            matrix[r] = tile[row, column : column + 8]
        if transpose:
            matrix = matrix.T
        for lane in LANES:
            result[lane, 2 * i : 2 * i + 2] = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    return result


def mma(a, b):
    """m16n8k16 (PTX ISA, Matrix Fragments for mma.m16n8k16): gather the operands, multiply, scatter the accumulator."""
    A, B, result = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((32, 4))
    for lane in LANES:
        group, pair = lane // 4, 2 * (lane % 4)
        for i in range(8):
            A[group + 8 * (i // 2 % 2), pair + i % 2 + 8 * (i // 4)] = a[lane, i]
        for i in range(4):
            B[pair + i % 2 + 8 * (i // 2), group] = b[lane, i]
    C = A @ B
    for lane in LANES:
        for i in range(4):
            result[lane, i] = C[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
    return result


def matrix_of(blocks):
    """Accumulators of two n8 blocks as a 16 x 16 matrix."""
    C = np.zeros((16, 16))
    for n, block in enumerate(blocks):
        for lane in LANES:
            for i in range(4):
                C[lane // 4 + 8 * (i // 2), 8 * n + 2 * (lane % 4) + i % 2] = block[lane, i]
    return C


@pytest.fixture
def tiles():
    return np.random.default_rng(0).integers(-4, 5, (3, 16, 16)).astype(float)


def test_scores(tiles):
    Q, K, _ = tiles
    a, b = ldmatrix(Q, matrices_of_a, False), ldmatrix(K, matrices_of_b, False)
    np.testing.assert_array_equal(matrix_of([mma(a, b[:, :4]), mma(a, b[:, 4:])]), Q @ K.T)


def test_values_with_accumulators_as_operand(tiles):
    Q, K, V = tiles
    a, b = ldmatrix(Q, matrices_of_a, False), ldmatrix(K, matrices_of_b, False)
    P = np.concatenate([mma(a, b[:, :4]), mma(a, b[:, 4:])], axis=1)
    v = ldmatrix(V, matrices_of_b_transposed, True)
    np.testing.assert_array_equal(matrix_of([mma(P, v[:, :4]), mma(P, v[:, 4:])]), Q @ K.T @ V)


def test_swapped_halves_are_noticed(tiles):
    Q, K, _ = tiles
    a, b = ldmatrix(Q, matrices_of_a, False), ldmatrix(K, matrices_of_a, False)
    assert not np.array_equal(matrix_of([mma(a, b[:, :4]), mma(a, b[:, 4:])]), Q @ K.T)
