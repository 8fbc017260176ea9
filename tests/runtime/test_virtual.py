"""The forward on the virtual GPU: schedules, architectures, and what reaches a launch; its results are in test_forward.py."""

from __future__ import annotations

import itertools

import pytest
import torch
from forward_check import MASKS, SCHEDULES, check, on_virtual_gpu

import fa4
from fa4.testing import AttentionShape, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def test_every_schedule_gives_the_same_bits():
    inputs = make_inputs(AttentionShape(1, 140, 200, 2, 1, 64))
    results = []
    for (schedule, seed), delay in zip(SCHEDULES, itertools.cycle(["late", "early"])):
        with fa4.settings(vgpu_schedule=schedule, vgpu_seed=seed, vgpu_delay=delay):
            results.append(on_virtual_gpu()(inputs.q, inputs.k, inputs.v, causal=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_settings_reach_the_machine():
    from fa4.runtime.virtual import gpu_from_settings

    with fa4.settings(vgpu_seed=7, vgpu_schedule="random", vgpu_delay="early"):
        gpu = gpu_from_settings("sm_80")
    assert (gpu.seed, gpu.schedule, gpu.early, gpu.processes) == (7, "random", True, 1)
    assert not gpu_from_settings("sm_80").early
    with fa4.settings(vgpu_processes=2):
        assert gpu_from_settings("sm_80").processes == 2


def test_several_processes_give_the_same_bits():
    inputs = make_inputs(AttentionShape(1, 192, 320, 3, 1, 64))
    expected = on_virtual_gpu()(inputs.q, inputs.k, inputs.v, causal=True)
    with fa4.settings(vgpu_processes=2):
        results = on_virtual_gpu()(inputs.q, inputs.k, inputs.v, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_lengths_numbers_and_strides_are_arguments(monkeypatch):
    """Case 43: whatever changes from call to call, one kernel serves it; for softcap see tests/kernels/ampere/test_forward_code.py."""
    from fa4.compiler import lookup

    found = []
    original = lookup._find
    monkeypatch.setattr(lookup, "_find", lambda key, request: found.append(key) or original(key, request))
    lookup.forget()
    for step, (lengths, ratio, layout) in enumerate([((9, 17), 1, "contiguous"), ((65, 40), 3, "padded"), ((1, 90), 2, "heads_first")]):
        options = {"window_size": (5 + step, 3 - step * 5), "softmax_scale": 0.1 - step}
        check(on_virtual_gpu(), AttentionShape(1 + step, *lengths, ratio, 1, 64), layout=layout, **options)
    assert len(found) == 1


def test_large_batch():
    """More blocks than the y and z dimensions of a grid could number, without running them: the launch is what is looked at."""
    from fa4.runtime import virtual

    seen = []
    gpu = virtual.Gpu("sm_80")
    gpu.launch = lambda _program, kernel, grid, *_: seen.append((kernel, grid))
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(65536, 4, 8, 64)
    out, lse = torch.empty(65536, 4, 8, 64, dtype=torch.bfloat16), torch.empty(65536, 8, 4)
    from fa4.arch import get_arch
    from fa4.compiler import get
    from fa4.problem import AttentionProblem
    from fa4.tuning import config

    problem = AttentionProblem("forward", "bfloat16", 64, 64, causal=True)
    artifact = get(problem, config(problem, get_arch("sm_80")), "sm_80")
    virtual.run(gpu, artifact, (q, q, q), (out, lse), (0.125, None, None, None))
    ((kernel, grid),) = seen
    assert kernel.startswith("fa4_ampere_forward_bf16_d64_causal")
    assert grid == (65536 * 8, 1, 1)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_newer_architectures_run_the_ampere_kernel(arch):
    check(on_virtual_gpu(arch), AttentionShape(1, 65, 129, 2, 1, 64), causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_matrix_of_architectures(arch, dim, mask):
    check(on_virtual_gpu(arch), AttentionShape(1, 192, 320, 3, 1, dim), **MASKS[mask])
