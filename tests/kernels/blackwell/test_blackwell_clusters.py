"""Pairs of CTAs, packed heads and single query tiles on the virtual GPU, with every check."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forward_call import Options, attention, compiled
from test_blackwell_forward import (
    ARCH,
    CAUSAL,
    FULL,
    assert_bitwise_equal_over,
    assert_moves,
    assert_right,
    changed_canaries,
    embedded,
    run,
    tuned,
)

from fa4.config import Exp2Policy
from fa4.testing import AttentionShape, make_inputs
from fa4.tuning import Queries, with_stages
from fa4.vgpu import Gpu
from fa4.vgpu.errors import VgpuError

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

WINDOW = Options(window_size=(140, 30))
HIDDEN = Options(window_size=(None, -300))
SCHEDULES = [("random", 1, "late"), ("priority", 2, "late"), ("priority", 3, "early")]


def configured(masked=True, **fields):
    """A function of the inputs: as tuned, but for the fields, and as many stages as fit unless one of them."""

    def configure(inputs):
        registers = {"registers": (240, 80, 48)} if fields.get("q_tiles") == 1 else {}  # as tuned for one query tile
        config = replace(tuned(inputs, masked), **{"cta_pair": False, "v_apart": False, **registers, **fields})
        return config if "stages" in fields else with_stages(config, inputs.q.shape[3], inputs.v.shape[3])

    return configure


PAIR = configured(cta_pair=True)
PACKED = configured(q_tiles=1, pack_heads=4)
PERSISTENT_PAIR = configured(masked=False, cta_pair=True, ctas=4, rescale_threshold=0.0)


def checked(shape, options, configure, dtype=torch.bfloat16):
    """The right numbers and the expected bytes, with every check and canaries beside the outputs; nothing spills."""
    inputs = make_inputs(shape, dtype)
    config = configure(inputs)
    whole_out, out = embedded((shape.batch, shape.seqlen_q, shape.heads_q, shape.dim_v), (1, 3, 1, 8), dtype)
    whole_lse, lse = embedded((shape.batch, shape.heads_q, shape.seqlen_q), (1, 1, 5), torch.float32)
    artifact = compiled(inputs.q, inputs.v, options, config, ARCH)
    assert artifact.kernels[0].resources.stack == 0
    assert_moves(run(inputs, options, config, (out, lse), checks="isa"))
    assert changed_canaries(whole_out, out) == changed_canaries(whole_lse, lse) == 0


# Pairs


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (AttentionShape(1, 600, 700, 1, 1, 64), CAUSAL),  # two tiles of 512 rows, the second without rows in its second CTA
        (AttentionShape(2, 300, 20, 1, 1, 64), CAUSAL),  # rows without keys in a tile with some
    ],
    ids=str,
)
def test_pair(shape, options):
    checked(shape, options, PAIR)


@pytest.mark.slow
def test_pairs_that_compute_several_tiles_load_half_of_the_keys():
    inputs = make_inputs(AttentionShape(1, 512, 256, 3, 1, 64), torch.float16)
    found = [run(inputs, FULL, configure(inputs)) for configure in (PERSISTENT_PAIR, configured(masked=False))]
    for each in found:
        assert_moves(each)
    q = inputs.q.numel() * inputs.q.itemsize
    pair, single = (each.report.bytes["bulk load"] - q for each in found)
    assert 2 * pair == single == 3 * 2 * 2 * inputs.k.numel() * inputs.k.itemsize  # heads, query tiles, K and V
    assert found[0].report.launches[0].grid == (4, 1, 1)


def test_schedules_do_not_change_a_bit_of_pairs():
    assert_bitwise_equal_over(SCHEDULES, AttentionShape(1, 520, 300, 1, 1, 64), CAUSAL, torch.bfloat16, PAIR)


def without_last(text, ptx):
    before, found, after = ptx.rpartition(text)
    assert found
    return before + after


FAULTS = {
    "a CTA leaves while the other may still use its memory": lambda ptx: without_last(
        "barrier.cluster.wait;", without_last("barrier.cluster.arrive;", ptx)
    ),
    "P is announced to the CTA's own MMA warp": lambda ptx: ptx.replace("mapa.shared::cluster.u32 there,", "mov.b32 there,").replace(
        ", 0; mbarrier.arrive.release", "; mbarrier.arrive.release"
    ),
    "a copy tells the CTA's own barrier": lambda ptx: ptx.replace(", -16777217;", ", -1;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_pairs_are_noticed(fault):
    inputs = make_inputs(AttentionShape(1, 520, 300, 1, 1, 64))
    artifact = compiled(inputs.q, inputs.v, CAUSAL, PAIR(inputs), ARCH)
    broken = replace(artifact, ptx=FAULTS[fault](artifact.ptx))
    assert broken.ptx != artifact.ptx
    with pytest.raises(VgpuError):
        attention(Gpu(ARCH, checks="isa"), inputs.q, inputs.k, inputs.v, CAUSAL, artifact=broken)


@pytest.mark.slow
def test_o_leaves_through_its_own_q():
    """One CTA computes several tiles, D and Dv differ: the next Q of a query tile may come when O of the same one has left."""
    configure = configured(masked=False, ctas=1, o_over_q=True, stages=4)
    checked(AttentionShape(1, 260, 140, 2, 1, 32, 16), FULL, configure)


# Packed heads


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (AttentionShape(2, 40, 150, 6, 2, 64), CAUSAL),  # two query tiles; three heads in four places
        (AttentionShape(1, 5, 2, 4, 1, 64), CAUSAL),  # rows without keys
        (AttentionShape(1, 40, 5, 4, 1, 64), CAUSAL),  # a query tile without keys
    ],
    ids=str,
)
def test_packed_heads(shape, options):
    checked(shape, options, PACKED)


def test_schedules_do_not_change_a_bit_of_packed_heads():
    assert_bitwise_equal_over(SCHEDULES, AttentionShape(1, 40, 150, 3, 1, 64), CAUSAL, torch.bfloat16, PACKED)


# All of it

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (56, 32)]
SWITCHES = {
    "pair": {"cta_pair": True},
    "pair, one query tile": {"cta_pair": True, "q_tiles": 1},
    "pair, O over Q": {"masked": False, "cta_pair": True, "ctas": 2, "o_over_q": True, "stages": 4},
    "pair, persistent": {"masked": False, "cta_pair": True, "ctas": 2},
    "pair, packed": {"cta_pair": True, "pack_heads": 2},
    "packed": {"pack_heads": 8, "exp2": Exp2Policy(3)},  # as tuned at D 128 with a mask
    "packed, one query tile": {"pack_heads": 4, "q_tiles": 1},
    "packed, persistent": {"masked": False, "pack_heads": 4, "q_tiles": 1, "ctas": 1},
    "one query tile": {"q_tiles": 1},
}


CASES = [(dims, switch) for dims in DIMS for switch in ("pair", "packed")]
CASES += [(DIMS[0], switch) for switch in SWITCHES if (DIMS[0], switch) not in CASES]


@pytest.mark.slow
@pytest.mark.parametrize("options", [CAUSAL, FULL, WINDOW, HIDDEN], ids=["causal", "full", "window", "hidden"])
@pytest.mark.parametrize(("dims", "switch"), CASES, ids=str)
def test_matrix(dims, switch, options):
    configure = configured(**SWITCHES[switch])
    for (seqlen_q, seqlen_k), heads in zip(((1, 17), (65, 129), (600, 300)), (2, 1, 2), strict=True):
        dtype = torch.float16 if dims[0] == 96 else torch.bfloat16
        checked(AttentionShape(1, seqlen_q, seqlen_k, heads, 1, *dims), options, configure, dtype)


SETTINGS = {
    "threshold 0": {"rescale_threshold": 0.0},
    "nothing emulated": {"exp2": Exp2Policy(0)},
    "all emulated": {"exp2": Exp2Policy(16)},
    "all emulated, degree 5": {"exp2": Exp2Policy(16, degree=5)},
    "two stages": {"stages": 2},
    "O over Q": {"o_over_q": True, "stages": 4},
    "single order": {"order": "single"},
    "lpt order": {"order": "lpt"},
    "registers": {"registers": (184, 88, 56)},
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 4, 16])
def test_shares_of_exponentials(share):
    inputs = make_inputs(AttentionShape(1, 300, 400, 1, 1, 64))
    expected = 128 * (1 - share / 16)
    assert expected <= run(inputs, FULL, configured(exp2=Exp2Policy(share))(inputs)).exponentials <= expected + 1


@pytest.mark.slow
@pytest.mark.parametrize("pair", [False, True], ids=["alone", "pair"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("options", [CAUSAL, FULL], ids=["causal", "full"])
def test_switches(setting, pair, options):
    configure = configured(masked=options.causal, **SETTINGS[setting], cta_pair=pair)
    checked(AttentionShape(1, 600, 400, 1, 1, 64), options, configure)


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["late", "early"])
@pytest.mark.parametrize("schedule", ["random", "priority"])
@pytest.mark.parametrize("case", ["pair", "pairs", "packed"])
def test_twenty_seeds_do_not_change_a_bit(case, schedule, delay):
    shape, options, dtype, configure = {
        "pair": (AttentionShape(1, 520, 300, 1, 1, 64), CAUSAL, torch.bfloat16, PAIR),
        "pairs": (AttentionShape(1, 512, 256, 3, 1, 64), FULL, torch.float16, PERSISTENT_PAIR),
        "packed": (AttentionShape(1, 40, 150, 3, 1, 64), CAUSAL, torch.bfloat16, PACKED),
    }[case]
    assert_bitwise_equal_over([(schedule, seed, delay) for seed in range(20)], shape, options, dtype, configure)


# What is chosen


@pytest.mark.parametrize(
    ("seqlen_q", "group", "expected"),
    [
        (1, 1, Queries(1)),
        (1, 8, Queries(1, 8)),
        (16, 8, Queries(1, 8)),
        (17, 8, Queries(2, 8)),
        (43, 3, Queries(2, 4)),
        (100, 4, Queries(1)),  # four tiles either way
        (1, 128, Queries(1, 128)),
        (1, 256, Queries(1)),  # more heads than rows
        (129, 8, Queries(2)),
        (300, 1, Queries(3)),
    ],
    ids=str,
)
def test_queries(seqlen_q, group, expected):
    assert Queries.of(seqlen_q, group) == expected


def test_calls_get_the_kernel_for_their_queries():
    """Through ``fa4.attention``: eight heads of one position in one CTA."""
    import fa4

    inputs = make_inputs(AttentionShape(1, 2, 150, 8, 1, 64))
    out, lse = fa4.attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend="vgpu", arch=ARCH)
    assert_right((out, lse), inputs, CAUSAL)
