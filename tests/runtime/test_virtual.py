"""The forward kernel through ``fa4.attention(backend="vgpu")``: compiled host code, compiled PTX, against float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

import fa4
from fa4.testing import AttentionShape, check_attention, make_inputs

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

LENGTHS = [(1, 17), (65, 129), (127, 128), (192, 320), (300, 77), (0, 5), (5, 0)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 9)},
    "softcap": {"softcap": 10.0},
}
SCHEDULES = [("round_robin", 0), ("random", 1), ("priority", 2), ("priority", 3)]


def on_virtual_gpu(arch="sm_80"):
    def attention(q, k, v, **options):
        return fa4.attention(q, k, v, return_lse=True, backend="vgpu", arch=arch, **options)

    return attention


def check(shape, dtype=torch.bfloat16, *, arch="sm_80", layout="contiguous", factor=1.0, **options):
    inputs = make_inputs(shape, dtype, layout=layout).scaled(factor)
    return check_attention(on_virtual_gpu(arch), inputs, backward=False, **options)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths):
    check(AttentionShape(2, *lengths, 4, 2, 64), causal=True)


@pytest.mark.parametrize("ratio", [1, 3, 5, 8])
def test_grouped_heads(ratio):
    check(AttentionShape(1, 65, 129, ratio, 1, 64), causal=True)


@pytest.mark.parametrize("scale", [-0.3, 0, 2.0])
@pytest.mark.parametrize("factor", [1.0, 30.0])
def test_scale_of_any_sign_and_large_logits(scale, factor):
    check(AttentionShape(1, 65, 129, 1, 1, 64), softmax_scale=scale, factor=factor, causal=True)


@pytest.mark.parametrize("layout", ["heads_first", "padded"])
def test_strides(layout):
    check(AttentionShape(2, 65, 129, 4, 2, 64), layout=layout, causal=True)


def test_last_stride_not_one():
    inputs = make_inputs(AttentionShape(1, 65, 65, 2, 2, 64))
    v = inputs.v.transpose(2, 3).contiguous().transpose(2, 3)
    check_attention(on_virtual_gpu(), replace(inputs, v=v), backward=False, causal=True)


def test_views_of_one_tensor():
    qkv = torch.randn(2, 70, 3, 2, 64).to(torch.bfloat16)
    q, k, v = qkv.unbind(2)
    inputs = replace(make_inputs(AttentionShape(2, 70, 70, 2, 2, 64)), q=q, k=k, v=v)
    check_attention(on_virtual_gpu(), inputs, backward=False, causal=True)


@pytest.mark.parametrize("window", [(7, -8), (-1, 0), (0, 0), (None, -300), (10**12, 0)], ids=str)
def test_windows(window):
    """Case 1 to 3 of the reported failures: no key in range, one rule for open sides, offsets of any size."""
    check(AttentionShape(1, 64, 80, 2, 1, 64), window_size=window)


def test_rows_without_keys():
    shape = AttentionShape(1, 300, 77, 1, 1, 64)
    inputs = make_inputs(shape)
    out, lse = on_virtual_gpu()(inputs.q, inputs.k, inputs.v, causal=True)
    assert not out[:, :223].any()
    assert (lse[:, :, :223] == -math.inf).all()


def test_row_maximum_that_keeps_rising():
    blocks, block = 8, 64
    inputs = make_inputs(AttentionShape(1, 16, blocks * block, 1, 1, 64))
    rise = torch.tensor([7.9, 8.1]).repeat(blocks // 2).cumsum(0) * math.log(2)
    k, q = 0.1 * inputs.k, 0.1 * inputs.q
    k[..., 0] = rise.repeat_interleave(block)[None, :, None].to(k.dtype)
    q[..., 0] = 1
    check_attention(on_virtual_gpu(), replace(inputs, q=q, k=k), backward=False, softmax_scale=1.0, causal=True)


def test_nan_in_memory_that_no_row_may_see_does_not_leak():
    """Rows before and after each sequence are NaN: padding rows of a tile must be zeroed, not read."""
    shape = AttentionShape(1, 70, 90, 2, 1, 64)
    inputs = make_inputs(shape)

    def embedded(x):
        padded = torch.full((1, x.shape[1] + 128, *x.shape[2:]), math.nan, dtype=x.dtype)
        padded[:, 64 : 64 + x.shape[1]] = x
        return padded[:, 64 : 64 + x.shape[1]]

    padded = replace(inputs, q=embedded(inputs.q), k=embedded(inputs.k), v=embedded(inputs.v))
    check_attention(on_virtual_gpu(), padded, backward=False, causal=True)


def test_every_schedule_gives_the_same_bits():
    inputs = make_inputs(AttentionShape(1, 192, 320, 3, 1, 64))
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
    assert (gpu.seed, gpu.schedule, gpu.early) == (7, "random", True)
    assert not gpu_from_settings("sm_80").early


def test_lengths_numbers_and_strides_are_arguments(monkeypatch):
    """Case 43: whatever changes from call to call, one kernel serves it."""
    from fa4.compiler import lookup

    found = []
    original = lookup._find
    monkeypatch.setattr(lookup, "_find", lambda key, request: found.append(key) or original(key, request))
    lookup.forget()
    for step, (lengths, ratio, layout) in enumerate([((9, 17), 1, "contiguous"), ((65, 40), 3, "padded"), ((1, 90), 2, "heads_first")]):
        options = {"window_size": (5 + step, 3 - step * 5), "softcap": 5.0 + step, "softmax_scale": 0.1 - step}
        check(AttentionShape(1 + step, *lengths, ratio, 1, 64), layout=layout, **options)
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


@pytest.mark.parametrize("dims", [8, 40, 128, (128, 96), 192], ids=str)
def test_head_dims(dims):
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, 0)
    check(AttentionShape(1, 65, 129, 2, 1, dim, dim_v), causal=True)


@pytest.mark.parametrize("mask", ["full", "softcap"])
def test_masks_in_float16(mask):
    check(AttentionShape(1, 65, 129, 2, 1, 64), torch.float16, **MASKS[mask])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_newer_architectures_run_the_ampere_kernel(arch):
    check(AttentionShape(1, 65, 129, 2, 1, 64), arch=arch, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 72, 96, 128, 192, 256, (64, 128), (192, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_matrix(dim, dtype, mask):
    """Every head dim, dtype and mask; lengths, ratios, layouts and schedules in turn over each."""
    dim, dim_v = dim if isinstance(dim, tuple) else (dim, 0)
    turns = zip(
        LENGTHS, itertools.cycle([1, 3, 5, 8]), itertools.cycle(["contiguous", "padded", "heads_first"]), itertools.cycle(SCHEDULES)
    )
    for lengths, ratio, layout, (schedule, seed) in turns:
        with fa4.settings(vgpu_schedule=schedule, vgpu_seed=seed):
            check(AttentionShape(1, *lengths, ratio, 1, dim, dim_v), dtype, layout=layout, **MASKS[mask])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_matrix_of_architectures(arch, dim, mask):
    check(AttentionShape(1, 192, 320, 3, 1, dim), arch=arch, **MASKS[mask])
