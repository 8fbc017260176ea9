"""What the Blackwell forward moves, as formulas. Pure arithmetic; tests/kernels/blackwell compares it with what runs count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.config import ELEMENT_BYTES, BlackwellForwardConfig
from fa4.reference import flash2_operand_traffic
from fa4.testing.inputs import AttentionShape
from fa4.testing.traffic import ForwardTraffic

SINGLE = BlackwellForwardConfig(stages=3)
PAIR = replace(SINGLE, cta_pair=True)
CONFIGS = [SINGLE, PAIR, replace(SINGLE, q_tiles=1), replace(SINGLE, q_tiles=1, pack_heads=4), replace(PAIR, pack_heads=8)]


@pytest.mark.parametrize("config", CONFIGS[:3], ids=["single", "pair", "one query tile"])
def test_whole_tiles_without_a_mask_are_flash_attention_2(config):
    traffic = ForwardTraffic(AttentionShape(2, 1024, 1024, 4, 2, 64), config)
    assert traffic.flash2 == ELEMENT_BYTES * 8 * flash2_operand_traffic(1024, 64, traffic.rows) == traffic.loads + traffic.stores
    assert traffic.beyond_queries == traffic.beyond_keys == traffic.masked == traffic.without_keys == traffic.zeros == 0


def test_a_pair_loads_half_of_the_keys():
    shape = AttentionShape(1, 1024, 2048, 3, 1, 64)
    single, pair = (ForwardTraffic(shape, config) for config in (SINGLE, PAIR))
    q = ELEMENT_BYTES * 3 * 1024 * 64
    assert single.loads - q == 2 * (pair.loads - q)


def test_packed_heads_share_the_keys():
    shape = AttentionShape(1, 32, 2048, 4, 1, 64)
    apart, packed = (ForwardTraffic(shape, config) for config in (CONFIGS[2], CONFIGS[3]))
    assert (apart.heads, packed.heads, apart.rows, packed.rows) == (4, 1, 128, 128)
    assert packed.loads * 4 == apart.loads


LENGTH = st.integers(1, 1500)
BOUND = st.none() | st.integers(-300, 900)


@given(LENGTH, LENGTH, st.integers(1, 4), st.integers(1, 20), st.integers(0, 20), st.tuples(BOUND, BOUND), st.sampled_from(CONFIGS))
def test_terms_add_up(seqlen_q, seqlen_k, group, width, width_v, window, config):
    shape = AttentionShape(2, seqlen_q, seqlen_k, 2 * group, 2, 8 * width, 8 * width_v)
    t = ForwardTraffic(shape, config, window)
    assert t.loads + t.stores == t.flash2 + t.beyond_queries + t.beyond_keys - t.masked - t.without_keys
    assert min(t.beyond_queries, t.beyond_keys, t.masked, t.without_keys) >= 0
    assert t.zeros <= ELEMENT_BYTES * 2 * seqlen_q * 2 * group * shape.dim_v
    assert len(t.key_tiles) * t.rows * t.heads >= 2 * 2 * group * seqlen_q
