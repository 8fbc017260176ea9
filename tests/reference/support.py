"""Shared by the tests of the reference: operands, an independent definition of attention, and comparison."""

from __future__ import annotations

import math

import numpy as np

from fa4.reference import AttentionOptions

RELATIVE = 1e-12


def operands(seed, batch=1, sq=5, sk=7, hq=2, hkv=1, d=4, dv=3):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((batch, sq, hq, d)), rng.standard_normal((batch, sk, hkv, d)), rng.standard_normal((batch, sk, hkv, dv))


def options_of(keywords):
    return AttentionOptions(**keywords)


def assert_close(actual, expected, relative=RELATIVE):
    """Equal where infinite, and close relative to the largest finite magnitude."""
    assert actual.shape == expected.shape
    assert actual.dtype == np.float64
    assert not np.isnan(actual).any()
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    size = np.abs(expected[finite]).max(initial=1.0)
    assert np.abs(actual[finite] - expected[finite]).max(initial=0.0) <= relative * size


def naive_sees(i, j, sq, sk, causal, window_size):
    """State the mask again in words: every bound that is not open must hold, and causal is a bound of its own."""
    position = i + sk - sq
    left, right = window_size
    if left not in (None, -1) and j < position - left:
        return False
    if right not in (None, -1) and j > position + right:
        return False
    return not (causal and j > position)


def naive_attention(q, k, v, *, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0):
    """Attention by scalar loops over Python floats, sharing no code with the package."""
    (batch, sq, hq, d), (_, sk, hkv, _), dv = q.shape, k.shape, v.shape[3]
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    out, lse = np.zeros((batch, sq, hq, dv)), np.full((batch, hq, sq), -math.inf)
    for b in range(batch):
        for h in range(hq):
            g = h * hkv // hq
            for i in range(sq):
                weights = {}
                for j in range(sk):
                    if naive_sees(i, j, sq, sk, causal, window_size):
                        score = scale * math.fsum(float(q[b, i, h, x]) * float(k[b, j, g, x]) for x in range(d))
                        weights[j] = math.exp(softcap * math.tanh(score / softcap) if softcap else score)
                if weights:
                    total = math.fsum(weights.values())
                    lse[b, h, i] = math.log(total)
                    for x in range(dv):
                        out[b, i, h, x] = math.fsum(w * float(v[b, j, g, x]) for j, w in weights.items()) / total
    return out, lse
