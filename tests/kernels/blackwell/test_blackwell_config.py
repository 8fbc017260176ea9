"""Configurations of the Blackwell forward: what they cost, which problem gets which, and what is refused. Pure functions."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from score_functions import BENT

from fa4.arch import get_arch
from fa4.config import (
    TMEM_COLUMNS,
    BlackwellForwardConfig,
    blackwell_columns,
    blackwell_forward_refusal,
    blackwell_forward_shared_memory,
    check_blackwell_forward,
    padded_head_dim,
)
from fa4.errors import ArgumentError, UnsupportedError
from fa4.problem import AttentionProblem
from fa4.tuning import LONG, Queries, blackwell_forward_config, with_pair, with_stages

HEAD_DIMS = range(8, 257, 8)
ARCHS = [get_arch("sm_100a"), get_arch("sm_103a")]


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_every_head_dim_has_a_config_that_fits_or_is_refused(arch):
    served = 0
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        problem = AttentionProblem("forward", "bfloat16", d, dv)
        if blackwell_forward_refusal(d, dv):
            with pytest.raises(UnsupportedError, match="the Ampere kernel serves it"):
                blackwell_forward_config(problem, arch)
            continue
        config = blackwell_forward_config(problem, arch)
        assert blackwell_forward_shared_memory(config, d, dv).size <= int(arch.smem_per_block)
        assert blackwell_columns(config, dv).end <= TMEM_COLUMNS
        served += 1
    assert served == 28 * 16  # D up to 224, Dv up to 128


@given(d=st.sampled_from(HEAD_DIMS[:16]), data=st.data())
def test_what_decides(d, data):
    """Tiles and memory: the head dims alone. Order, emulation, early P: also whether there is a mask. Dtype and softcap: nothing."""
    flag = st.booleans()
    causal, window = data.draw(flag), (data.draw(flag), data.draw(flag))
    problem = AttentionProblem("forward", data.draw(st.sampled_from(["float16", "bfloat16"])), d, d, causal, window, data.draw(flag))
    found = blackwell_forward_config(problem, ARCHS[0])
    masked = causal or any(window)
    assert found == blackwell_forward_config(AttentionProblem("forward", "float16", d, d, causal=masked), ARCHS[0])
    plain = blackwell_forward_config(AttentionProblem("forward", "float16", d, d), ARCHS[0])  # below D 128 without pairs
    assert (found.stages, found.q_tiles, found.tile_n, found.o_over_q) == (plain.stages, plain.q_tiles, plain.tile_n, plain.o_over_q)
    assert found.order == ("dynamic" if masked else "persistent")
    assert found.early_keys == (96 if masked else 64)


@given(q_tiles=st.sampled_from([1, 2]), dv=st.sampled_from(HEAD_DIMS[:16]))
def test_columns_lie_side_by_side(q_tiles, dv):
    config = BlackwellForwardConfig(stages=2, q_tiles=q_tiles)
    columns = blackwell_columns(config, dv)
    pieces = [(start, config.tile_n) for start in columns.S] + [(start, padded_head_dim(dv)) for start in columns.O]
    at = 0
    for start, size in sorted(pieces):
        assert start == at
        at += size
    assert columns.end == at


def test_columns_show_their_arithmetic():
    columns = blackwell_columns(BlackwellForwardConfig(stages=3), 72)
    assert (columns.S, columns.O, columns.end) == ((0, 128), (256, 336), 416)
    assert columns.arithmetic == "2 x (S 128 + O 80) = 416 columns of tensor memory"


def test_budget_shows_its_arithmetic():
    need = blackwell_forward_shared_memory(BlackwellForwardConfig(stages=3), 72, 40)
    assert need.size == 3072 + 2 * (256 * 80 + 3 * 128 * 80 + 256 * 48)
    assert need.arithmetic == "3072 + (Q 256 x 80 + 3 stages x 128 x 80 + O 256 x 48) x 2 = 130048 bytes"


def test_each_cta_of_a_pair_has_half_of_a_tile():
    need = blackwell_forward_shared_memory(BlackwellForwardConfig(stages=6, cta_pair=True), 128, 128)
    assert need.arithmetic == "3072 + (Q 256 x 128 + 6 stages x 64 x 128 + O 256 x 128) x 2 = 232448 bytes"
    assert need.size == blackwell_forward_shared_memory(BlackwellForwardConfig(stages=3), 128, 128).size


def test_a_slot_of_its_own_for_v():
    """Where two slots for either fit, but not three, and a third as large as V does."""
    config = with_stages(BlackwellForwardConfig(2), 192, 128)
    assert config == BlackwellForwardConfig(3, o_over_q=True, v_apart=True)
    need = blackwell_forward_shared_memory(config, 192, 128)
    assert need.arithmetic == "3072 + (Q 256 x 192 + 2 K x 128 x 192 + V 128 x 128 + O 0 x 128) x 2 = 232448 bytes"
    assert with_pair(config, True, 192, 128) == BlackwellForwardConfig(5, o_over_q=True, cta_pair=True)
    assert not with_stages(BlackwellForwardConfig(2), 224, 128).v_apart


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("q_tiles", [1, 2])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (224, 128)], ids=str)
def test_no_stage_more_fits(dims, q_tiles, pair):
    config = with_stages(BlackwellForwardConfig(2, q_tiles=q_tiles, cta_pair=pair), *dims)
    check_blackwell_forward(config, *dims)
    assert config.stages >= (3 if pair or q_tiles == 1 else 2)
    if config.stages < 6:
        with pytest.raises(UnsupportedError, match="use fewer stages"):
            check_blackwell_forward(replace(config, stages=config.stages + (not config.v_apart), v_apart=False), *dims)


def test_pairs_are_for_wide_heads_and_long_queries_without_a_window():
    def pair(*dims, queries=LONG, **mask):
        return blackwell_forward_config(AttentionProblem("forward", "bfloat16", *dims, **mask), ARCHS[0], queries).cta_pair

    assert pair(192, 128)
    assert pair(192, 128, causal=True)
    assert not pair(192, 128, causal=True, score_mod=BENT.for_backward())
    assert not pair(192, 128, window=(True, False))
    assert not pair(128, 128)
    assert not pair(192, 80)
    assert not pair(192, 128, queries=Queries(2))
    assert not pair(192, 128, queries=Queries(3, 8))


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
@pytest.mark.parametrize("queries", [Queries(1), Queries(2), Queries(1, 8), Queries(3, 128)], ids=str)
def test_configurations_of_short_queries_fit(arch, queries):
    for d, dv in itertools.product(range(8, 225, 8), range(8, 129, 8)):
        config = blackwell_forward_config(AttentionProblem("forward", "bfloat16", d, dv), arch, queries)
        check_blackwell_forward(config, d, dv)
        assert (config.q_tiles, config.pack_heads) == (min(queries.tiles, 2), queries.pack_heads)


@pytest.mark.parametrize(
    ("config", "dims", "reason"),
    [
        (BlackwellForwardConfig(3, cta_pair=True), (64, 40), "takes 48 columns, and a pair's product has a multiple of 32"),
        (BlackwellForwardConfig(3), (64, 136), "tensor memory"),
        (BlackwellForwardConfig(7, cta_pair=True), (128, 128), "of shared memory, of 232448"),
    ],
    ids=["columns", "tensor memory", "shared memory"],
)
def test_what_does_not_fit_is_refused(config, dims, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_blackwell_forward(config, *dims)


@pytest.mark.parametrize("dims", [(192, 128), (64, 128), (128, 128)], ids=str)
def test_o_over_q_saves_the_smaller_of_the_two(dims):
    d, dv = dims
    apart, over = (blackwell_forward_shared_memory(BlackwellForwardConfig(stages=2, o_over_q=flag), d, dv).size for flag in (False, True))
    assert apart - over == 2 * 256 * min(d, dv)


@pytest.mark.parametrize(
    ("dims", "reason"),
    [
        ((256, 256), r"head_dim_v 256 needs 2 x \(S 128 \+ O 256\) = 768 columns of tensor memory, which has 512"),
        ((64, 136), r"head_dim_v 136 needs 2 x \(S 128 \+ O 144\) = 544 columns"),
        ((232, 128), r"head_dim 232 needs .* bytes of shared memory, of 232448"),
    ],
    ids=str,
)
def test_refusals_show_their_arithmetic(dims, reason):
    with pytest.raises(UnsupportedError, match=reason):
        blackwell_forward_config(AttentionProblem("forward", "bfloat16", *dims), ARCHS[0])


@pytest.mark.parametrize(
    ("fields", "argument", "rule"),
    [
        ({"stages": 1}, "stages", "K and V of a tile are in the ring at once"),
        ({"v_apart": True, "stages": 4}, "v_apart", "K has two slots and V one"),
        ({"v_apart": True, "cta_pair": True}, "v_apart", "K has two slots and V one"),
        ({"q_tiles": 3}, "q_tiles", "tensor memory holds S and O of at most two tiles"),
        ({"q_tiles": 0}, "q_tiles", "use 1 or 2"),
        ({"tile_n": 64}, "tile_n", "use 128"),
        ({"early_keys": 128}, "early_keys", "use 32, 64 or 96"),
        ({"registers": (200, 80, 48)}, "registers", r"128 x \(2 x 200 \+ 80 \+ 48\) = 67584 of 65536"),
        ({"registers": (256, 208, 48), "q_tiles": 1}, "registers", r"128 x \(1 x 256 \+ 208 \+ 2 x 48\) = 71680 of 65536"),
        ({"registers": (190, 80, 48)}, "registers", "each a multiple of 8 from 24 to 256"),
        ({"registers": (192, 80, 16)}, "registers", "each a multiple of 8 from 24 to 256"),
        ({"rescale_threshold": -1.0}, "rescale_threshold", "use 0 to 8"),
        ({"rescale_threshold": 8.5}, "rescale_threshold", "P must stay small in 16 bits"),
        ({"cta_pair": True, "ctas": 147}, "ctas", "use a multiple of 2"),
        ({"pack_heads": 3}, "pack_heads", "whole positions fill a tile of 128 rows"),
        ({"pack_heads": 256}, "pack_heads", "use one of"),
    ],
    ids=str,
)
def test_what_the_hardware_cannot_do_is_refused(fields, argument, rule):
    with pytest.raises(ArgumentError, match=rule) as caught:
        BlackwellForwardConfig(**{"stages": 3, **fields})
    assert caught.value.argument == argument
