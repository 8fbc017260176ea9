"""Figures that others published of flash-attn-4, by the preset; docs/performance-model.md has the intervals."""

from __future__ import annotations

from functools import cache
from importlib import metadata

import pytest

from fa4.errors import UnsupportedError
from fa4.perfmodel import Request, predict, preset
from fa4.perfmodel.peer import record_peer
from fa4.testing.witness import PEER, VERSION


def installed():
    try:
        return metadata.version(PEER) == VERSION
    except metadata.PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.compile,
    pytest.mark.vgpu,
    pytest.mark.skipif(not installed(), reason=f"flash-attn-4 {VERSION} is not installed: pip install '.[peer]'"),
]

PUBLISHED = {
    Request("sm_100a", pairs=False): 1535,
    Request("sm_100a"): 1608,
    Request("sm_100a", causal=True): 1418,
    Request("sm_100a", backward=True, pairs=False): 1248,
    Request("sm_100a", backward=True): 1360,
    Request("sm_100a", backward=True, causal=True): 1209,
}


@cache
def predicted(request):
    found = predict(request, record_peer(request), [preset(request.arch)])
    assert found.report.unaligned == 0
    return found.tflops[0]


@pytest.mark.slow
@pytest.mark.parametrize("request_", PUBLISHED, ids=str)
def test_within_a_tenth(request_):
    assert predicted(request_) == pytest.approx(PUBLISHED[request_], rel=0.1)


@pytest.mark.slow
def test_pairs_pay_in_the_backward():
    """Published as 1.09 times as fast."""
    assert predicted(Request("sm_100a", backward=True)) > 1.05 * predicted(Request("sm_100a", backward=True, pairs=False))


def test_what_is_not_recorded_is_refused():
    with pytest.raises(UnsupportedError, match="the forward for sm_90a"):
        record_peer(Request("sm_80"))
