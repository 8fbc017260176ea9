"""Functions on scores in the definition of correctness: against numpy written out, and gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.errors import ArgumentError
from fa4.reference import (
    AttentionOptions,
    ScoreMod,
    Tiles,
    flash2_attention,
    flash2_attention_backward,
    flash4_attention,
    standard_attention,
    standard_attention_backward,
)

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((2, 7, 4, 5)), RNG.standard_normal((2, 9, 2, 5)), RNG.standard_normal((2, 9, 2, 3))
WEIGHT = RNG.standard_normal((2, 4, 7, 9))


def bent(scores, batch, head, queries, keys):
    return scores + 0.3 * WEIGHT[batch, head, queries, keys] * scores**2


def bent_gradient(dscores, scores, batch, head, queries, keys):
    return dscores * (1 + 0.6 * WEIGHT[batch, head, queries, keys] * scores)


def some(batch, head, queries, keys):
    """Row 2 sees nothing."""
    return ((queries + keys + head + batch) % 3 != 0) & (queries != 2)


OPTIONS = {"softcap": 2.0, "softmax_scale": 0.7, "causal": True, "score_mod": ScoreMod(bent, bent_gradient), "mask_mod": some}


def by_hand(q, k, v):
    """The same from the formulas, head by head: scale, softcap, function, masks, softmax."""
    out, lse = np.zeros((2, 7, 4, 3)), np.full((2, 4, 7), -np.inf)
    for batch, head, i in np.ndindex(2, 4, 7):
        seen = [j for j in range(9) if j <= i + 2 and some(batch, head, i, j)]
        if not seen:
            continue
        s = np.array([2.0 * np.tanh(0.7 * q[batch, i, head] @ k[batch, j, head // 2] / 2.0) for j in seen])
        s = s + 0.3 * WEIGHT[batch, head, i, seen] * s**2
        weights = np.exp(s)
        lse[batch, head, i] = np.log(weights.sum())
        out[batch, i, head] = weights / weights.sum() @ v[batch, seen, head // 2]
    return out, lse


def test_forward():
    out, lse = by_hand(Q, K, V)
    found = standard_attention(Q, K, V, **OPTIONS)
    np.testing.assert_allclose(found.out, out, atol=1e-13)
    np.testing.assert_allclose(found.lse, lse, atol=1e-13)
    assert (found.out[:, 2] == 0).all()


def test_the_tiled_algorithms_agree():
    options = AttentionOptions(OPTIONS["softmax_scale"], True, (None, None), 2.0, OPTIONS["score_mod"], some)
    expected = standard_attention(Q, K, V, **OPTIONS)
    forward = flash2_attention(Q, K, V, options=options, tiles=Tiles(3, 4))
    for result, atol in ((forward, 1e-12), (flash4_attention(Q, K, V, options=options, tiles=Tiles(4, 4)), 1e-3)):
        np.testing.assert_allclose(result.out, expected.out, atol=atol)
        np.testing.assert_allclose(result.lse, expected.lse, atol=atol)
    dout, dlse = RNG.standard_normal((2, 7, 4, 3)), RNG.standard_normal((2, 4, 7))
    exact = standard_attention_backward(Q, K, V, dout, dlse, **OPTIONS)
    tiled = flash2_attention_backward(Q, K, V, forward, dout, dlse, options=options, tiles=Tiles(3, 4))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(tiled, name), getattr(exact, name), atol=1e-12)


def test_gradients_are_finite_differences():
    dout, dlse = RNG.standard_normal((2, 7, 4, 3)), RNG.standard_normal((2, 4, 7))

    def loss(*operands):
        result = standard_attention(*operands, **OPTIONS)
        return (result.out * dout).sum() + (np.where(result.lse == -np.inf, 0.0, result.lse) * dlse).sum()

    found = standard_attention_backward(Q, K, V, dout, dlse, **OPTIONS)
    assert (found.dq[:, 2] == 0).all()
    for which, gradient in enumerate((found.dq, found.dk, found.dv)):
        for index in [tuple(RNG.integers(n) for n in gradient.shape) for _ in range(12)]:
            moved = [[x.copy() for x in (Q, K, V)] for _ in range(2)]
            moved[0][which][index] += 1e-5
            moved[1][which][index] -= 1e-5
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
            assert abs(slope - gradient[index]) < 1e-7


def test_a_backward_needs_the_gradient():
    with pytest.raises(ArgumentError, match="has no gradient"):
        standard_attention_backward(Q, K, V, np.ones((2, 7, 4, 3)), score_mod=ScoreMod(bent))
