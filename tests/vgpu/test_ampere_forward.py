"""The Ampere forward kernel, as it ships, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forward_call import Options, attention, compiled

from fa4.config import AmpereForwardConfig
from fa4.reference import standard_attention
from fa4.runtime.virtual import parsed
from fa4.testing import AttentionShape, compare, make_inputs, torch_attention
from fa4.vgpu import Gpu, PendingCopyError, VgpuError

pytestmark = [pytest.mark.vgpu, pytest.mark.compile]

SMALL = AmpereForwardConfig(64, 32, 1, 128)
STAGES = AmpereForwardConfig(64, 32, 2, 128)

PLAIN = Options()


def check(inputs, options=PLAIN, config=None, gpu=None):
    out, lse = attention(gpu or Gpu(), inputs.q, inputs.k, inputs.v, options, config)
    reference = standard_attention(*[x.double().numpy() for x in (inputs.q, inputs.k, inputs.v)], **options.keywords())
    baseline = torch_attention(inputs.q, inputs.k, inputs.v, **options.keywords())
    results = [compare("out", out, reference.out, baseline[0]), compare("lse", lse, reference.lse, baseline[1])]
    assert all(r.ok for r in results), "\n".join(map(str, results))
    return out, lse


def test_one_tile():
    check(make_inputs(AttentionShape(1, 64, 64)), config=SMALL)


@pytest.mark.parametrize("seqlens", [(1, 1), (63, 130), (130, 63), (200, 1), (1, 200)])
def test_ragged_lengths_and_grouped_heads(seqlens):
    check(make_inputs(AttentionShape(2, *seqlens, 4, 2)), config=SMALL)


@pytest.mark.parametrize("seqlens", [(128, 128), (70, 150), (150, 70)])
def test_causal(seqlens):
    check(make_inputs(AttentionShape(1, *seqlens, 2, 1)), Options(causal=True), SMALL)


@pytest.mark.parametrize("window", [(16, 8), (-5, 20), (20, -3), pytest.param((0, 0), marks=pytest.mark.slow), (-200, 300)])
def test_windows(window):
    check(make_inputs(AttentionShape(1, 90, 120, 2, 1)), Options(window_size=window), SMALL)


def test_padding_rows_never_reach_a_result():
    """Keys and queries that a tile reads beyond a sequence belong to nobody: the buffers end there, and the rest is NaN."""
    inputs = make_inputs(AttentionShape(2, 50, 40, 1, 1))
    check(inputs, config=SMALL)


SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]


@pytest.mark.parametrize("config", [SMALL, pytest.param(STAGES, marks=pytest.mark.slow)], ids=str)
def test_schedules_do_not_change_a_bit(config):
    inputs = make_inputs(AttentionShape(1, 130, 100, 2, 1))
    results = [
        attention(Gpu(schedule=s, seed=n, resident=1 + n), inputs.q, inputs.k, inputs.v, Options(causal=True), config) for s, n in SCHEDULES
    ]
    for out, lse in results[1:]:
        assert torch.equal(out.view(torch.int16), results[0][0].view(torch.int16))
        assert torch.equal(lse.view(torch.int32), results[0][1].view(torch.int32))


def test_deviating_approximations_stay_within_the_bound():
    inputs = make_inputs(AttentionShape(1, 64, 96))
    check(inputs, config=SMALL)
    for seed in range(2):
        check(inputs, config=SMALL, gpu=Gpu(approximate="random", seed=seed))


def without(ptx: str, place: int) -> str:
    """The text with one line taken out."""
    lines = ptx.splitlines()
    return "\n".join([*lines[:place], "", *lines[place + 1 :]])


def test_every_missing_wait_and_barrier_is_found():
    """Each synchronising instruction that runs is taken out in turn: waits show in any schedule, barriers in strict priorities."""
    inputs = make_inputs(AttentionShape(1, 64, 150))
    artifact = compiled(inputs.q, inputs.v, config=SMALL)

    def run(gpu, place):
        changed = replace(artifact, ptx=without(artifact.ptx, place))
        return attention(gpu, inputs.q, inputs.k, inputs.v, artifact=changed)[0]

    expected, _ = attention(Gpu(), inputs.q, inputs.k, inputs.v, artifact=artifact)
    (code,) = parsed(artifact.ptx, artifact.cubin).code.values()
    ran = {op.line - 1 for index, _ in code.blocks for op in (*code.kernel.blocks[index].ops, code.kernel.blocks[index].end) if op}
    lines = artifact.ptx.splitlines()
    waits = [i for i, line in enumerate(lines) if i in ran and ("cp.async.wait_group" in line or "cp.async.commit_group" in line)]
    barriers = [i for i, line in enumerate(lines) if i in ran and "bar.sync" in line]
    assert len(waits) == 9
    for place in waits:
        with pytest.raises(PendingCopyError, match="before the asynchronous copy"):
            run(Gpu(), place)
    missed = []
    for place in barriers:
        try:
            out = run(Gpu(schedule="priority"), place)
        except VgpuError:
            continue
        if torch.equal(out.view(torch.int16), expected.view(torch.int16)):
            missed.append(place)
    assert missed == []
    assert len(barriers) == 5


HEAD_DIMS = (8, 24, 40, 64, 72, 96, 128, 192, 256)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(head_dim, causal):
    for shape in (AttentionShape(1, 130, 197, 2, 1, head_dim), AttentionShape(2, 77, 33, 1, 1, head_dim)):
        check(make_inputs(shape), Options(causal=causal))


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (192, 128)])
def test_two_head_dims(dims):
    check(make_inputs(AttentionShape(1, 130, 197, 2, 1, *dims)))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(0, 0), (16, 0), (33, 5), (None, 10), (7, None), (-5, 20), (10, -3), (1000, 1000), (-300, None), (None, -300)]
)
def test_all_windows(window, causal):
    for lengths in ((150, 170), (190, 90)):
        check(make_inputs(AttentionShape(1, *lengths, 2, 2)), Options(causal=causal, window_size=window))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{"softmax_scale": -0.3}, {"softmax_scale": 0.0}, {"softmax_scale": 2.0}, {"softcap": 5.0}, {"softcap": 50.0, "softmax_scale": -1.0}],
)
def test_scales_and_softcap(options, dtype, causal):
    check(make_inputs(AttentionShape(1, 130, 197, 2, 1), dtype), Options(causal=causal, **options))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize(("schedule", "seed"), [(s, n) for s in ("random", "priority") for n in range(5)])
def test_many_schedules(schedule, seed, factor):
    inputs = make_inputs(AttentionShape(1, 130, 197, 2, 1), seed=seed).scaled(factor)
    check(inputs, Options(causal=True), gpu=Gpu(schedule=schedule, seed=seed))
