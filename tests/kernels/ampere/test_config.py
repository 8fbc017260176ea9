"""Configurations, shared-memory budget and tuning: pure functions."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.arch import ARCHS, get_arch
from fa4.config import AmpereForwardConfig, ampere_forward_shared_memory, check_ampere_forward, padded_head_dim, swizzle_columns
from fa4.errors import ArgumentError, UnsupportedError
from fa4.problem import AttentionProblem
from fa4.tuning import ampere_forward_config

HEAD_DIMS = range(8, 257, 8)


def test_every_head_dim_on_every_arch_has_a_config_that_fits():
    for d, dv, arch in itertools.product(HEAD_DIMS, HEAD_DIMS, ARCHS.values()):
        config = ampere_forward_config(AttentionProblem("forward", "bfloat16", d, dv), arch)
        assert ampere_forward_shared_memory(config, d, dv).size <= int(arch.smem_per_block)


@given(d=st.sampled_from(HEAD_DIMS), dv=st.sampled_from(HEAD_DIMS), arch=st.sampled_from(list(ARCHS.values())), data=st.data())
def test_masks_softcap_and_dtype_do_not_change_the_config(d, dv, arch, data):
    flag = st.booleans()
    problem = AttentionProblem(
        "forward",
        data.draw(st.sampled_from(["float16", "bfloat16"])),
        d,
        dv,
        data.draw(flag),
        (data.draw(flag), data.draw(flag)),
        data.draw(flag),
    )
    assert ampere_forward_config(problem, arch) == ampere_forward_config(AttentionProblem("forward", "float16", d, dv), arch)


def test_budget_shows_its_arithmetic():
    config = AmpereForwardConfig(128, 64, 2, 128)
    need = ampere_forward_shared_memory(config, 72, 40)
    assert need.size == 2 * (128 * 80 + 2 * 64 * (80 + 48))
    assert need.arithmetic == "max(Q 128 x 80 + 2 stages x 64 x (K 80 + V 48), O 128 x 48) x 2 bytes = max(53248, 12288) = 53248 bytes"


def test_output_can_be_what_needs_most():
    assert ampere_forward_shared_memory(AmpereForwardConfig(128, 16, 1, 128), 8, 256).size == 2 * 128 * 256


def test_what_does_not_fit_is_refused_with_the_arithmetic():
    with pytest.raises(UnsupportedError, match=r"= 131072 bytes, but sm_86 has 101376 per block"):
        check_ampere_forward(AmpereForwardConfig(128, 64, 1, 256), 256, 256, get_arch("sm_86"))


def test_head_dim_beyond_every_row_is_refused():
    with pytest.raises(UnsupportedError, match="per block"):
        ampere_forward_config(AttentionProblem("forward", "bfloat16", 512, 512), get_arch("sm_80"))


@pytest.mark.parametrize(
    ("argument", "values"),
    [("threads", (128, 64, 1, 96)), ("tile_m", (96, 64, 1, 128)), ("tile_n", (128, 40, 1, 128)), ("stages", (128, 64, 0, 128))],
)
def test_impossible_tiles_are_refused(argument, values):
    with pytest.raises(ArgumentError, match=argument):
        AmpereForwardConfig(*values)


@given(d=st.integers(1, 256))
def test_padding_and_swizzle(d):
    padded = padded_head_dim(d)
    assert padded % 16 == 0
    assert 0 <= padded - d < 16
    assert padded % swizzle_columns(padded) == 0
