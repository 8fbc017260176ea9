"""Shared-memory layouts and address steps, evaluated while tracing: what the kernel computes is what the layout says."""

from __future__ import annotations

import cutlass.cute as cute
import pytest

from fa4.config import padded_head_dim, swizzle_columns
from fa4.kernels.ampere.forward.layouts import block_bytes, copy_threads, step, tile_layout

CHUNK_BYTES = 16
BANK_ROW = 128


def read_layout(rows, head_dim):
    layout = tile_layout(rows, head_dim)
    return {(row, column): 2 * layout((row, column)) for row in range(rows) for column in range(0, padded_head_dim(head_dim), 8)}


def byte_addresses(rows, head_dim):
    """{(row, column): byte} of a tile, read off the CuTe layout at trace time."""
    result = {}

    @cute.jit
    def trace():
        result.update(read_layout(rows, head_dim))

    trace()
    return result


@pytest.fixture(scope="module", params=[(64, 128), (48, 96), (32, 80), (128, 64), (16, 8), (16, 256)], ids=str)
def tile(request):
    rows, head_dim = request.param
    return rows, head_dim, byte_addresses(rows, head_dim)


def test_chunks_fill_the_tile_once(tile):
    rows, head_dim, address = tile
    assert sorted(address.values()) == list(range(0, 2 * rows * padded_head_dim(head_dim), CHUNK_BYTES))


def test_an_8x8_matrix_touches_every_bank_once(tile):
    rows, head_dim, address = tile
    for row in range(0, rows, 8):
        for column in range(0, padded_head_dim(head_dim), 8):
            assert len({address[row + i, column] % BANK_ROW for i in range(8)}) == 8


def test_a_row_of_a_block_touches_every_bank_at_most_once(tile):
    rows, head_dim, address = tile
    width = swizzle_columns(padded_head_dim(head_dim))
    per_phase = BANK_ROW // (2 * width)
    for row in range(0, rows, per_phase):
        chunks = [address[row + r, c] % BANK_ROW for r in range(per_phase) for c in range(0, width, 8)]
        assert len(set(chunks)) == 8


def test_steps_of_ldmatrix_follow_the_layout(tile):
    rows, head_dim, address = tile
    for lane_row in range(16):
        for lane_column in (0, 8):
            for row in range(0, rows, 16):
                for k in range(padded_head_dim(head_dim) // 16):
                    flip, offset = step(rows, head_dim, row, k)
                    assert (address[lane_row, lane_column] ^ flip) + offset == address[lane_row + row, lane_column + 16 * k]


@pytest.mark.parametrize("threads", [64, 128, 256])
def test_copies_cover_the_tile(tile, threads):
    rows, head_dim, address = tile
    down, along = copy_threads(rows, head_dim, threads)
    assert down * along <= threads
    width = 8 * along
    covered = set()
    for thread in range(down * along):
        first_row, first_column = thread // along, thread % along * 8
        for r in range(rows // down):
            for block in range(padded_head_dim(head_dim) // width):
                place = (first_row + r * down, first_column + block * width)
                target = address[first_row, first_column] + block * block_bytes(rows, head_dim) + r * down * 2 * width
                assert target == address[place]
                covered.add(place)
    assert covered == set(address)
