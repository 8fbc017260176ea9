"""This project's backward kernel as a recording."""

from __future__ import annotations

import pytest

from fa4.errors import UnsupportedError
from fa4.perfmodel import Request, predict, preset, record
from fa4.perfmodel.recording import lengths


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.vgpu
@pytest.mark.parametrize("causal", [False, True])
def test_backward(causal):
    request = Request("sm_100a", 64, backward=True, causal=causal)
    found = predict(request, record(request), [preset(request.arch)])
    assert found.report.unaligned == 0
    assert 100 < found.tflops[0] < 2250
    assert found.at(seqlen=1024, batch=32).tflops[0] < found.tflops[0]


def test_problems_that_are_recorded():
    """Two lengths of a tile, and several tiles of one CTA where it goes on to the next; of a triangle one problem has all lengths."""
    assert lengths(256, 128, causal=False, stays=True) == [(256, 1024, 1), (256, 2048, 1), (768, 1024, 3)]
    assert lengths(256, 128, causal=False, stays=False) == [(256, 1024, 1), (256, 2048, 1)]
    assert lengths(256, 128, causal=True, stays=True) == lengths(256, 128, causal=False, stays=True)
    assert lengths(128, 256, causal=False, stays=False, backward=True) == [(1024, 256, 1), (2048, 256, 1)]
    assert lengths(128, 256, causal=True, stays=False, backward=True) == [(1536, 1536, 1)]


def test_a_kernel_that_does_not_exist_is_refused():
    with pytest.raises(UnsupportedError):
        record(Request("sm_80", backward=True))
