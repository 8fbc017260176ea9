import numpy as np
import pytest

from fa4.errors import ArgumentError
from fa4.reference import (
    AttentionOptions,
    Flash4Options,
    Tiles,
    flash1_attention,
    flash1_operand_traffic,
    flash2_attention,
    flash2_attention_backward,
    flash2_operand_traffic,
    flash3_attention,
    flash4_attention,
    standard_attention,
    standard_intermediate_traffic,
    standard_operand_traffic,
)
from fa4.reference.ledger import DeviceMemory, Ledger

from .support import operands

SIZES = [(32, 8, 8, 8), (48, 16, 16, 8), (96, 4, 8, 32), (64, 8, 64, 64), (64, 8, 1, 4)]  # n, d, tile rows, tile columns


@pytest.fixture(params=SIZES, ids=str)
def case(request):
    n, d, rows, columns = request.param
    return n, d, Tiles(rows, columns), operands(0, batch=2, sq=n, sk=n, hq=4, hkv=2, d=d, dv=d)


def test_standard_attention_matches_algorithm_0(case):
    n, d, _, tensors = case
    ledger = standard_attention(*tensors).ledger
    assert ledger.heads == 8
    assert ledger.operands == ledger.heads * standard_operand_traffic(n, d)
    assert ledger.intermediates == ledger.heads * standard_intermediate_traffic(n)
    assert ledger.statistics == ledger.heads * n
    assert ledger.total == ledger.operands + ledger.intermediates + ledger.statistics
    assert ledger.largest_intermediate == n * n


def test_flash1_matches_its_formula(case):
    n, d, tiles, tensors = case
    ledger = flash1_attention(*tensors, tiles=tiles).ledger
    assert ledger.operands == ledger.heads * flash1_operand_traffic(n, d, tiles.columns)
    assert ledger.operands * tiles.columns == ledger.heads * (2 * n * d * tiles.columns + 3 * n * n * d)  # as published
    assert ledger.intermediates == 0
    assert ledger.statistics == ledger.heads * 4 * n * (n // tiles.columns)  # row_max and row_sum, read and written
    assert ledger.initialised == {"O": ledger.heads * n * d, "row_max": ledger.heads * n, "row_sum": ledger.heads * n}
    assert ledger.largest_intermediate == tiles.rows * tiles.columns


@pytest.mark.parametrize("algorithm", [flash2_attention, flash3_attention, flash4_attention])
def test_flash2_and_its_successors_match_its_formula(case, algorithm):
    n, d, tiles, tensors = case
    ledger = algorithm(*tensors, tiles=tiles).ledger
    assert ledger.operands == ledger.heads * flash2_operand_traffic(n, d, tiles.rows)
    assert ledger.operands * tiles.rows == ledger.heads * (2 * n * d * tiles.rows + 2 * n * n * d)  # as published
    assert ledger.intermediates == 0
    assert ledger.statistics == ledger.heads * n
    assert ledger.largest_intermediate == tiles.rows * tiles.columns


def test_flash2_backward_traffic(case):
    n, d, tiles, tensors = case
    forward = flash2_attention(*tensors, tiles=tiles)
    ledger = flash2_attention_backward(*tensors, forward, np.ones(forward.out.shape), tiles=tiles).ledger
    key_tiles = n // tiles.columns
    # K, V read and dK, dV written once; Q, dO, dQ read and dQ written for each key tile; O and dO read once for delta.
    assert ledger.operands == ledger.heads * (4 * n * d + 4 * n * d * key_tiles + 2 * n * d)
    assert ledger.intermediates == 0
    assert ledger.statistics == ledger.heads * (2 * n + 2 * n * key_tiles)


def test_a_causal_mask_skips_hidden_tiles():
    tensors = operands(1, sq=64, sk=64, hq=1, d=8, dv=8)
    ledger = flash2_attention(*tensors, options=AttentionOptions(causal=True), tiles=Tiles(16, 16)).ledger
    assert ledger.reads["K"] == (1 + 2 + 3 + 4) * 16 * 8


def test_conditional_rescaling_counts_every_warp_and_tile_after_the_first():
    tensors = operands(2, sq=80, sk=64, hq=1)
    ledger = flash4_attention(*tensors, tiles=Tiles(40, 16), flash4=Flash4Options(warp=32)).ledger
    assert ledger.rescales_done + ledger.rescales_skipped == 2 * 2 * 3  # query tiles, warps (32 and 8 rows), key tiles but one


def test_formulas_refuse_tiles_that_do_not_divide():
    with pytest.raises(ArgumentError, match="tile_columns=7"):
        flash1_operand_traffic(64, 8, 7)
    with pytest.raises(ArgumentError, match="tile_rows=0"):
        flash2_operand_traffic(64, 8, 0)


def test_a_single_extra_read_shows():
    """The equality above can fail: one row of Q read twice is one row too many."""
    ledger = Ledger()
    memory = DeviceMemory(ledger, {"Q": np.zeros((8, 4))})
    memory.read("Q")
    assert ledger.operands == 8 * 4
    memory.read("Q", slice(0, 1))
    assert ledger.operands == 8 * 4 + 4


def test_reading_what_was_never_written_gives_nan():
    memory = DeviceMemory(Ledger(), {})
    memory.allocate("S", (2, 2))
    memory.write("S", np.ones((1, 2)), slice(0, 1))
    assert np.isnan(memory.read("S")).tolist() == [[False, False], [True, True]]
