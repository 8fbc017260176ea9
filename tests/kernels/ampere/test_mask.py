"""Device code that is plain arithmetic runs on the CPU as host code: key ranges and score numbers against their definitions."""

from __future__ import annotations

import itertools
import math

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack

from fa4.kernels.common.mask import Band, band_limits
from fa4.kernels.common.score import score_scalars

TILE_M, TILE_N = 16, 8
FAR = 2**31 - 1


@cute.jit
def ranges(out: cute.Tensor, seqlen_q: Int32, seqlen_k: Int32, left: Int32 | None, right: Int32 | None):
    band = Band(seqlen_q, seqlen_k, *band_limits(seqlen_q, seqlen_k, left, right))
    for tile in cutlass.range(cute.ceil_div(seqlen_q, TILE_M), unroll=1):
        tiles = band.key_tiles(tile * TILE_M, TILE_M, TILE_N)
        out[tile, 0] = tiles.begin
        out[tile, 1] = tiles.full_begin
        out[tile, 2] = tiles.full_end
        out[tile, 3] = tiles.end


def host(tensor):
    return from_dlpack(tensor).mark_layout_dynamic(leading_dim=1)


@pytest.fixture(scope="module", params=list(itertools.product([False, True], repeat=2)), ids=["open", "right", "left", "window"])
def compiled(request):
    has_left, has_right = request.param
    bounds = (Int32(0) if has_left else None, Int32(0) if has_right else None)
    function = cute.compile(ranges, host(torch.zeros(1, 4, dtype=torch.int32)), Int32(1), Int32(1), *bounds)

    def run(seqlen_q, seqlen_k, left, right):
        out = torch.zeros(-(-seqlen_q // TILE_M), 4, dtype=torch.int32)
        function(host(out), seqlen_q, seqlen_k, left, right)
        return out.tolist()

    return has_left, has_right, run


def visible(seqlen_q, seqlen_k, left, right):
    """The definition: which key each query sees; None is an open side."""
    i, j = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)[None, :]
    diagonal = i + seqlen_k - seqlen_q
    low = diagonal - (FAR if left is None else left)
    high = diagonal + (FAR if right is None else right)
    return (low <= j) & (j <= high)


BOUNDS = (0, 1, 7, -8, 20, 100, -100, FAR, -FAR - 1)


def test_key_tiles_against_the_definition(compiled):
    has_left, has_right, run = compiled
    for seqlen_q, seqlen_k in itertools.product((1, 15, 16, 40), (0, 1, 8, 9, 24, 50)):
        for left, right in itertools.product(BOUNDS if has_left else (None,), BOUNDS if has_right else (None,)):
            seen = visible(seqlen_q, seqlen_k, left, right)
            for tile, (begin, full_begin, full_end, end) in enumerate(run(seqlen_q, seqlen_k, left, right)):
                rows = seen[tile * TILE_M : (tile + 1) * TILE_M]
                case = (seqlen_q, seqlen_k, left, right, tile)
                assert 0 <= begin <= full_begin <= full_end <= end <= -(-seqlen_k // TILE_N), case
                assert not rows[:, : begin * TILE_N].any(), case
                assert not rows[:, end * TILE_N :].any(), case
                assert rows[:, full_begin * TILE_N : full_end * TILE_N].all(), case
                assert full_end * TILE_N <= max(seqlen_k, begin * TILE_N), case
                if begin < end and not (has_left and has_right):
                    # No tile is visited, and none masked, for nothing. (A window can be empty for every row yet span a tile.)
                    per_tile = [rows[:, n * TILE_N : (n + 1) * TILE_N] for n in range(begin, end)]
                    assert all(part.any() for part in per_tile), case
                    whole = [n for n, part in enumerate(per_tile, begin) if part.shape[1] == TILE_N and part.all()]
                    assert whole == list(range(full_begin, full_end)), case


def test_key_tiles_of_four_million_keys(compiled):
    """Sums stay inside 32 bits at the limits of what a call may ask for."""
    has_left, has_right, run = compiled
    seqlen_q, seqlen_k = 40, 2**31 - 1000
    left, right = (0 if has_left else None), (0 if has_right else None)
    last = run(seqlen_q, seqlen_k, left, right)[-1]
    diagonal_tile = (seqlen_k - seqlen_q + 32) // TILE_N
    assert last[3] == -(-seqlen_k // TILE_N)
    assert last[0] == (diagonal_tile if has_left else 0)


@cute.jit
def numbers(out: cute.Tensor, flips: cute.Tensor, scale: Float32, softcap: Float32 | None):
    scalars = score_scalars(scale, softcap)
    out[0, 0] = scalars.scale_log2
    if cutlass.const_expr(softcap is not None):
        out[0, 1] = scalars.gain
    else:
        flips[0, 0] = scalars.flip_q


def score_numbers(scale, softcap):
    out, flips = torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.int32)
    function = cute.compile(numbers, host(out), host(flips), Float32(1), None if softcap is None else Float32(1))
    function(host(out), host(flips), scale, softcap)
    return out[0].tolist(), flips.item() & 0xFFFFFFFF


@pytest.mark.parametrize(("scale", "flip"), [(0.125, 0), (-0.125, 0x80008000), (0.0, 0)])
def test_scale_is_positive_and_the_sign_goes_to_q(scale, flip):
    (scale_log2, _), flips = score_numbers(scale, None)
    assert scale_log2 == pytest.approx(max(abs(scale) * math.log2(math.e), 2.0**-126), rel=1e-6)
    assert flips == flip


@pytest.mark.parametrize("scale", [0.125, -0.125, 0.0])
def test_softcap_numbers_give_tanh(scale):
    (scale_log2, gain), _ = score_numbers(scale, 10.0)
    products = np.linspace(-3000, 3000, 101)
    with np.errstate(over="ignore"):
        scores = scale_log2 * (0.5 - 1 / (1 + np.exp2(products * gain)))
    np.testing.assert_allclose(scores * math.log(2), 10.0 * np.tanh(scale * products / 10.0), atol=1e-5)
