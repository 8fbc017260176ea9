"""The checker itself: it accepts good results, and catches planted faults."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given

from fa4.testing import AttentionShape, check_attention, compare, make_inputs, torch_attention
from fa4.testing.strategies import options as any_options
from fa4.testing.strategies import shapes

SHAPE = AttentionShape(batch=2, seqlen_q=33, seqlen_k=40, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_baseline_passes_its_own_check(dtype):
    results = check_attention(torch_attention, make_inputs(SHAPE, dtype), use_dlse=True, causal=True, softcap=5.0)
    assert [r.name for r in results] == ["out", "lse", "dq", "dk", "dv"]
    assert all(r.error > 0 and r.bound >= 2 * r.error for r in results)


@given(shape=shapes(max_seqlen=40), options=any_options())
def test_the_baseline_agrees_with_float64_everywhere(shape, options):
    """Two independent implementations of the semantics, numpy's and torch's, within float32 rounding of each other."""
    results = check_attention(torch_attention, make_inputs(shape, torch.float32), use_dlse=True, **options)
    assert max(r.error for r in results) < 2e-4


def faulty(change, before=lambda q, k, v: (q, k, v)):
    """torch_attention with its inputs or its results changed."""
    return lambda q, k, v, **options: change(*torch_attention(*before(q, k, v), **options))


def keep(out, lse):
    return out, lse


def last_rows(count, faulty):
    """Right but for the last rows, which see one key too many, or lack something."""

    def run(q, k, v, **options):
        out, lse = torch_attention(q, k, v, **options)
        bad, bad_lse = faulty(q, k, v, **options)
        rows = torch.arange(q.shape[1]) >= q.shape[1] - count
        return torch.where(rows[:, None, None], bad, out), torch.where(rows, bad_lse, lse)

    return run


FAULTS = {
    "scale off by 2%": faulty(keep, lambda q, k, v: (q * 1.02, k, v)),
    "heads swapped": faulty(keep, lambda q, k, v: (q, k.flip(2), v)),
    "mask off by one": lambda q, k, v, **_: torch_attention(q, k, v, window_size=(None, 1)),
    "lse in log2 units": faulty(lambda out, lse: (out, lse / math.log(2))),
    "last row lost": faulty(lambda out, lse: (out * (torch.arange(33) != 32)[:, None, None], lse)),
    "dv half": faulty(keep, lambda q, k, v: (q, k, v * 0.5 + v.detach() * 0.5)),
    "dlse ignored": faulty(lambda out, lse: (out, lse.detach() + 0 * out.sum())),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    with pytest.raises(AssertionError, match="WRONG"):
        check_attention(FAULTS[fault], make_inputs(SHAPE, torch.bfloat16), use_dlse=True, causal=True)


LATE_FAULTS = {
    "mask one too far in the last 64 rows": last_rows(64, lambda q, k, v, **_: torch_attention(q, k, v, window_size=(None, 1))),
    "last keys lost in the last 64 rows": last_rows(
        64, lambda q, k, v, **o: torch_attention(q, k, v * (torch.arange(k.shape[1]) < k.shape[1] - 48)[:, None, None], **o)
    ),
    "lse off by 1e-2 in the last row": faulty(lambda out, lse: (out, lse + 1e-2 * (torch.arange(lse.shape[2]) == lse.shape[2] - 1))),
    "dv of the last 16 keys lost": faulty(
        keep, lambda q, k, v: (q, k, torch.where((torch.arange(v.shape[1]) < v.shape[1] - 16)[:, None, None], v, v.detach()))
    ),
}


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_faults_in_the_late_rows_of_a_long_sequence_are_caught(fault):
    """Late causal rows average over many keys and are small: a bound from the first rows would let them be anything."""
    with pytest.raises(AssertionError, match="WRONG"):
        check_attention(LATE_FAULTS[fault], make_inputs(AttentionShape(1, 500, 500, 1, 1, 64), torch.bfloat16), causal=True)


def test_report_says_how_wrong_and_where():
    reference = np.ones((2, 3))
    baseline = torch.ones(2, 3, dtype=torch.bfloat16)
    actual = baseline.clone()
    actual[1, 2] = 1.5
    result = compare("out", actual, reference, baseline)
    assert not result.ok
    assert (result.error, result.index, result.ulp) == (0.5, (1, 2), 64.0)  # a bfloat16 ulp at 1 is 2**-7
    assert str(result) == f"out: WRONG: worst error 0.5 at (1, 2) (64 ulp), bound {result.bound:.3g}"


@pytest.mark.parametrize(("length", "bound"), [(128, 0.0), (129, 8.0), (160, 8.0), (161, 0.0)])
def test_a_short_last_block_joins_the_one_before(length, bound):
    """Of one row, say, whose value the baseline hits by luck. Here it does so from row 64 on, or 128."""
    baseline, actual = torch.zeros(length), torch.zeros(length)
    baseline[: length - 1 >> 6 << 6] = 1.0
    actual[-1] = bound + 0.5
    result = compare("lse", actual, np.zeros(length), baseline, axis=0)
    assert result.index == (length - 1,)
    assert not result.ok
    assert abs(result.bound - bound) < 1e-6
    half = compare("out", actual.half(), np.zeros(length), baseline.half(), axis=0)
    assert half.bound < 1e-2, "16-bit results keep their blocks"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_results_are_never_within_the_bound(value):
    reference = np.zeros((4,))
    baseline = torch.zeros(4)
    actual = torch.tensor([0.0, value, 0.0, 0.0])
    result = compare("out", actual, reference, baseline, axis=0)
    assert not result.ok
    assert result.mismatches == 1
    assert result.index == (1,)


def test_infinities_must_match_exactly():
    reference = np.array([-np.inf, 1.0])
    right, wrong = torch.tensor([-math.inf, 1.0]), torch.tensor([math.inf, 1.0])
    assert compare("lse", right, reference, right, axis=0).ok
    assert not compare("lse", wrong, reference, right, axis=0).ok
    assert not compare("lse", torch.tensor([-1e30, 1.0]), reference, right, axis=0).ok


def test_an_overflowing_baseline_gives_no_bound():
    reference = np.array([1e6])
    with pytest.raises(AssertionError, match="no bound"):
        compare("out", torch.tensor([1.0], dtype=torch.float16), reference, torch.tensor([math.inf], dtype=torch.float16), axis=0)


def test_empty_results_compare():
    assert compare("out", torch.zeros(0, 3), np.zeros((0, 3)), torch.zeros(0, 3)).ok


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "padded"])
def test_layouts_hold_the_same_values(layout):
    x, y = make_inputs(SHAPE, layout=layout, seed=3), make_inputs(SHAPE, seed=3)
    assert all(torch.equal(a, b) for a, b in zip((x.q, x.k, x.v), (y.q, y.k, y.v), strict=True))
    assert x.q.is_contiguous() == (layout == "contiguous")
    assert not torch.equal(x.q, make_inputs(SHAPE, seed=4).q)
