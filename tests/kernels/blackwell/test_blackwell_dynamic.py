"""The dynamic order on the virtual GPU: every tile once, by whichever CTA asks first, with the bits of the lpt order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from canaries import changed_canaries, embedded
from forward_call import Options, attention, compiled
from test_blackwell_forward import ARCH, CAUSAL, FULL, assert_moves, bits, run, tuned

from fa4.testing import AttentionShape, make_inputs
from fa4.tuning import with_pair
from fa4.vgpu import Gpu

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

WINDOW = Options(window_size=(140, 30))
HIDDEN = Options(window_size=(None, -300))
MASKS = {"causal": CAUSAL, "full": FULL, "window": WINDOW, "hidden": HIDDEN}
# (schedule, seed, delay, resident clusters)
RUNS = [("round_robin", 0, "late", 1), ("random", 1, "late", 2), ("priority", 2, "late", 3), ("priority", 3, "early", 4)]

ASK = "clusterlaunchcontrol.try_cancel"


def configured(inputs, options, pair=False, **fields):
    """As tuned, with or without pairs."""
    config = with_pair(tuned(inputs, options.causal), pair, inputs.q.shape[3], inputs.v.shape[3])
    return replace(config, **fields)


def tiles_of(shape, config):
    """Tiles of a call; a pair has one together, and so have heads that are packed."""
    heads = shape.heads_kv if config.pack_heads > 1 else shape.heads_q
    return -(-shape.seqlen_q // (config.cluster * config.q_tiles * config.positions)) * heads * shape.batch


def asked(report):
    """How many requests were made."""
    return sum(count for opcode, count in report.by_opcode.items() if opcode.startswith(ASK))


def assert_same_bits(shape, options, runs, pair=False, **fields):
    """In every schedule the results are those of the lpt order, and each tile was asked for once, or was the first of its CTA."""
    inputs = make_inputs(shape)
    config = configured(inputs, options, pair, **fields)
    expected = attention(Gpu(ARCH), inputs.q, inputs.k, inputs.v, options, replace(config, order="lpt"))
    config = replace(config, order="dynamic")
    artifact = compiled(inputs.q, inputs.v, options, config, ARCH)
    assert artifact.kernels[0].resources.stack == 0
    tiles = tiles_of(shape, config)
    for schedule, seed, delay, resident in runs:
        gpu = Gpu(ARCH, schedule=schedule, seed=seed, delay=delay, resident=resident * config.cluster, checks="isa")
        results = attention(gpu, inputs.q, inputs.k, inputs.v, options, artifact=artifact)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results, expected, strict=True)), (schedule, seed, delay, resident)
        # One request in each tile; a CTA's last is in vain.
        assert asked(gpu.reports[0]) == tiles, (schedule, seed, delay, resident)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_bits_are_those_of_lpt(mask):
    """Three tiles of each of two heads, by two and three CTAs."""
    assert_same_bits(AttentionShape(1, 530, 270, 2, 1, 64), MASKS[mask], RUNS[1:3])


@pytest.mark.slow
def test_a_pair_asks_together():
    assert_same_bits(AttentionShape(1, 1100, 300, 1, 1, 64), CAUSAL, RUNS[1:3], pair=True)


@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
def test_every_tile_is_computed_once(pair):
    """To the byte, and nothing beside the outputs; some tiles have no keys. One CTA, or pair, does all tiles."""
    shape, options = AttentionShape(2, 700, 200, 2, 1, 64), CAUSAL
    inputs = make_inputs(shape)
    config = configured(inputs, options, pair, order="dynamic")
    whole_out, out = embedded((2, 700, 2, 64), (1, 3, 1, 8), torch.bfloat16)
    whole_lse, lse = embedded((2, 2, 700), (1, 1, 5), torch.float32)
    found = run(inputs, options, config, (out, lse), checks="isa", resident=config.cluster)
    assert_moves(found)
    assert changed_canaries(whole_out, out) == changed_canaries(whole_lse, lse) == 0
    assert asked(found.report) == tiles_of(shape, config)
    started = {warp: sum(n for (w, block), n in found.blocks.entries.items() if w == warp and block == 0) for warp in range(16)}
    assert set(started.values()) == {config.cluster}


DIMS = [(64, 64), (128, 128), (192, 128), (40, 40)]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_matrix(dims, mask, pair):
    if pair and dims[1] % 32:
        dims = (64, 32)
    assert_same_bits(AttentionShape(2, 700, 500, 2, 1, *dims), MASKS[mask], RUNS, pair)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"q_tiles": 1}, {"q_tiles": 1, "pack_heads": 2}, {"stages": 2, "v_apart": False}], ids=str)
def test_settings(fields):
    assert_same_bits(AttentionShape(1, 400, 300, 2, 1, 64), CAUSAL, RUNS, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize("schedule", ["random", "priority"])
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
def test_twenty_seeds_do_not_change_a_bit(pair, schedule, delay):
    shape = AttentionShape(1, 1300, 300, 1, 1, 64) if pair else AttentionShape(2, 500, 500, 2, 1, 64)
    assert_same_bits(shape, CAUSAL, [(schedule, seed, delay, 1 + seed % 4) for seed in range(20)], pair)
