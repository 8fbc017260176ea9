"""Hypothesis strategies for attention problems: odd sizes, empty ones, every kind of mask."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fa4.testing.inputs import AttentionShape


@st.composite
def shapes(draw: st.DrawFn, *, max_seqlen: int = 160, max_heads_kv: int = 2) -> AttentionShape:
    """Shapes with lengths from 0, head ratios from 1 to 9 and head dims that are multiples of 8, Dv included."""
    length = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129]), st.integers(0, max_seqlen))
    heads_kv = draw(st.integers(1, max_heads_kv))
    return AttentionShape(
        batch=draw(st.integers(0, 2)),
        seqlen_q=min(draw(length), max_seqlen),
        seqlen_k=min(draw(length), max_seqlen),
        heads_q=heads_kv * draw(st.sampled_from([1, 2, 3, 5, 7, 9])),
        heads_kv=heads_kv,
        head_dim=8 * draw(st.integers(1, 12)),
        head_dim_v=8 * draw(st.integers(0, 12)),
    )


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of attention: mask, softcap and scale (negative and zero included)."""
    bound = st.one_of(st.none(), st.just(-1), st.integers(-80, 80))
    return {
        "causal": draw(st.booleans()),
        "window_size": draw(st.one_of(st.just((None, None)), st.tuples(bound, bound))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, None, 0.1, -0.2, 0])),
    }
