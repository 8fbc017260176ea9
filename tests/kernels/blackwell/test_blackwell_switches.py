"""Switches of BlackwellForwardConfig beyond the paper: each right, free of races, free of spills; none changes a bit of the results."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from forward_call import Options, attention, compiled
from reported_cases import stepping_row_maximum
from test_blackwell_code import problem, trips
from test_blackwell_forward import ARCH, CAUSAL, assert_right, bits, tuned

from fa4.arch import get_arch
from fa4.compiler import get
from fa4.config import BlackwellForwardConfig
from fa4.testing import AttentionShape, make_inputs
from fa4.tuning import blackwell_forward_config
from fa4.vgpu import Gpu, VgpuError

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

PUBLISHED_REGISTERS = [(192, 80, 48), (184, 88, 56)]
SWITCHES = {
    "select": {"rescale": "select"},
    "registers": {"registers": PUBLISHED_REGISTERS[1]},
    "stages": {"stages": 3},  # odd: the ring starts again also after K
    "early": {"early_keys": 32},
    "two": {"rescale": "select", "stages": 3},
    "all": {"rescale": "select", "registers": PUBLISHED_REGISTERS[1], "stages": 2},
}
FEW = ["select"]


def switched(names):
    return [pytest.param(SWITCHES[name], id=name, marks=() if name in FEW else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("fields", switched(SWITCHES))
def test_a_switch_changes_no_bit(fields):
    """The maximum rises by 8.1 with the second key tile, which asks for a rescale; the first two slots of the ring are used twice."""
    inputs = stepping_row_maximum(2, 128, torch.bfloat16, rising=False)
    options = Options(causal=True, softmax_scale=1.0)
    config = tuned(inputs, causal=True)
    expected = attention(Gpu(ARCH), inputs.q, inputs.k, inputs.v, options, config)
    assert_right(expected, inputs, options)
    gpu = Gpu(ARCH, checks="hazards")
    found = attention(gpu, inputs.q, inputs.k, inputs.v, options, replace(config, **fields))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, expected, strict=True))


def test_select_needs_no_vote_and_no_branch():
    task = problem(64, "causal")
    config = blackwell_forward_config(task, get_arch(ARCH))
    branch, select = (get(task, replace(config, rescale=form), ARCH).ptx for form in ("branch", "select"))
    assert branch.count("vote.sync.any") == select.count("vote.sync.any") + config.q_tiles
    ((with_branch,), (without,)) = (trips(ptx)["correction"] for ptx in (branch, select))
    assert without == with_branch  # the same work, always done


def test_select_without_its_fence_is_a_race():
    """What has to stay: tcgen05.wait::st before the arrive. The virtual GPU notices that it is missing."""
    inputs = make_inputs(AttentionShape(1, 130, 300, 1, 1, 64))
    config = replace(tuned(inputs, causal=True), rescale="select")
    artifact = compiled(inputs.q, inputs.v, CAUSAL, config, ARCH)
    stores = list(re.finditer(r"tcgen05\.st\.sync\.aligned\.32x32b\.x64\.b32", artifact.ptx))
    assert len(stores) == config.q_tiles
    wait = artifact.ptx.index("tcgen05.wait::st.sync.aligned;", stores[0].end())
    weak = artifact.ptx[:wait] + artifact.ptx[wait:].replace("tcgen05.wait::st.sync.aligned;", "tcgen05.fence::before_thread_sync;", 1)
    attention(Gpu(ARCH, checks="hazards"), inputs.q, inputs.k, inputs.v, CAUSAL, artifact=artifact)
    with pytest.raises(VgpuError, match="tcgen05"):
        attention(Gpu(ARCH, checks="hazards"), inputs.q, inputs.k, inputs.v, CAUSAL, artifact=replace(artifact, ptx=weak))


def issued(task):
    """Products (m) and commits (c) in the order of the text."""
    ptx = get(task, blackwell_forward_config(task, get_arch(ARCH)), ARCH).ptx
    return "".join("m" if kind == "mma" else "c" for kind in re.findall(r"tcgen05\.(mma|commit)\.cta_group", ptx))


def test_correction_of_tile_0_overlaps_the_products_of_tile_1():
    """At the end O0 is told to be complete before the products of tile 1 are issued, so that correction divides it meanwhile."""
    assert issued(problem(64, "causal")).endswith("m" * 8 + "c" + "m" * 8 + "cc")  # O0 += P0 V, o_full; O1 += P1 V, o_full, kv_empty


def test_the_next_tile_begins_between_the_last_products():
    """O0 += P0 V, o_full; the next S0, s_full; O1 += P1 V, o_full, kv_empty; the next S1, s_full, kv_empty. Not where O goes over Q."""
    O0, O1 = "m" * 8 + "c", "m" * 8 + "cc"
    assert issued(problem(64, "causal")).startswith(O0 + "m" * 4 + "c" + O1 + "m" * 4 + "cc")
    over_q = issued(problem(192, "causal", head_dim_v=128))
    assert over_q.startswith("m" * 12 + "c" + "m" * 12 + "cc")
    assert over_q.endswith("cc" + O0 + O1)  # behind q_empty


@pytest.mark.parametrize("registers", PUBLISHED_REGISTERS, ids=str)
def test_budgets_fill_the_registers_of_an_sm(registers):
    softmax, correction, other = BlackwellForwardConfig(stages=3, registers=registers).registers
    assert 128 * (2 * softmax + correction + other) == int(get_arch(ARCH).registers_per_sm) == 65536


def budget_cases():
    for registers in PUBLISHED_REGISTERS:
        for dims in ((64, 64), (128, 128), (192, 128)):
            for mask in ("full", "causal"):
                yield pytest.param(registers, dims, mask, id=f"{registers}-{dims}-{mask}")


@pytest.mark.slow
@pytest.mark.parametrize(("registers", "dims", "mask"), list(budget_cases()))
def test_budgets_do_not_spill(registers, dims, mask):
    task = problem(dims[0], mask, head_dim_v=dims[1])
    config = replace(blackwell_forward_config(task, get_arch(ARCH)), registers=registers)
    (kernel,) = get(task, config, ARCH).kernels
    assert kernel.resources.stack == 0
