"""Functions of CuTe-DSL on the virtual GPU, passed tensors in each way that their users do."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import cutlass.cute as cute
import dsl_kernels
import numpy as np
import pytest
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_ptr
from dsl_kernels import Scale, multiprocessors, overwrite, reverse, scale, scale_anything, scale_pair, scale_pointers, scale_twice, shift

import fa4
from fa4 import tuning
from fa4.arch import get_arch
from fa4.compiler import lookup
from fa4.problem import AttentionProblem
from fa4.vgpu import LaunchError, OutOfBoundsError, SharedGlobalError, UninitializedError, attach

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]

TVM = "--enable-tvm-ffi"
X = torch.arange(100, dtype=torch.float32)


def nan(n: int = 100) -> torch.Tensor:
    return torch.full((n,), torch.nan)


def source_line(words: str) -> int:
    lines = Path(dsl_kernels.__file__).read_text().splitlines()
    return next(number for number, text in enumerate(lines, start=1) if words in text)


@pytest.mark.parametrize("options", ["", TVM])
def test_from_dlpack(options):
    y = nan()
    with attach("sm_80") as gpu:
        x_, y_ = (from_dlpack(t, assumed_align=16, enable_tvm_ffi=bool(options)).mark_layout_dynamic() for t in (X, y))
        compiled = cute.compile(scale, x_, y_, Float32(2), options=options)
        compiled(x_, y_, Float32(2))
    assert torch.equal(y, 2 * X)
    assert gpu.report().ctas == 2


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("options", ["", TVM])
def test_direct_arguments_of_a_function_compiled_from_fakes(options, library):
    n = cute.sym_int()
    fake = [make_fake_compact_tensor(Float32, (n,)) for _ in range(2)]
    x, y = (X, nan()) if library == "torch" else (X.numpy(), nan().numpy())
    with attach("sm_80"):
        compiled = cute.compile(scale, *fake, Float32(0), options=options)
        compiled(x, y, 3.0)
    assert np.array_equal(y, 3 * X)


def test_direct_call():
    y = nan()
    with attach("sm_80"):
        scale(from_dlpack(X), from_dlpack(y), Float32(2))
        assert torch.equal(y, 2 * X)
        scale_anything(X, y, Float32(3))
        assert torch.equal(y, 3 * X)
        scale_anything(X.numpy(), y.numpy(), Float32(4))
    assert torch.equal(y, 4 * X)


@pytest.mark.parametrize("options", ["", TVM])
def test_tensors_inside_a_tuple(options):
    y = nan()
    with attach("sm_80"):
        x_, y_ = (from_dlpack(t, enable_tvm_ffi=bool(options)) for t in (X, y))
        compiled = cute.compile(scale_pair, (x_, y_), Float32(2), options=options)
        compiled((x_, y_), Float32(2))
        assert torch.equal(y, 2 * X)
        if options:
            compiled((X, y), 3.0)
            assert torch.equal(y, 3 * X)


@pytest.mark.parametrize("options", ["", TVM])
def test_pointers_to_registered_memory(options):
    y = nan()
    with attach("sm_80") as gpu:
        x_, y_ = (
            make_ptr(Float32, gpu.register(t, name, writable), cute.AddressSpace.gmem, assumed_align=4)
            for t, name, writable in ((X, "x", False), (y, "y", True))
        )
        compiled = cute.compile(scale_pointers, x_, y_, Int32(100), Float32(2), options=options)
        compiled(x_, y_, Int32(100), Float32(2))
        assert torch.equal(y, 2 * X)
        with pytest.raises(OutOfBoundsError, match="read-only"):
            compiled(x_, x_, Int32(100), Float32(2))
        with pytest.raises(OutOfBoundsError, match=r"outside|beyond"):
            compiled(x_, y_, Int32(101), Float32(2))


def test_memory_is_forgotten_with_its_tensor():
    with attach("sm_80") as gpu:
        y = nan()
        y_ = from_dlpack(y)
        pointer = make_ptr(Float32, y.data_ptr(), cute.AddressSpace.gmem, assumed_align=4)
        compiled = cute.compile(scale_pointers, pointer, pointer, Int32(100), Float32(2))
        compiled(pointer, pointer, Int32(100), Float32(2))
        del y_
        gc.collect()
        with pytest.raises(OutOfBoundsError):
            compiled(pointer, pointer, Int32(100), Float32(2))
    assert not gpu.memory.buffers


@pytest.mark.parametrize("options", ["", TVM])
def test_several_launches_in_one_function(options):
    y = nan()
    with attach("sm_80") as gpu:
        x_, y_ = (from_dlpack(t, enable_tvm_ffi=bool(options)) for t in (X, y))
        cute.compile(scale_twice, x_, y_, Float32(3), options=options)(x_, y_, Float32(3))
        assert torch.equal(y, 9 * X)
        assert len(gpu.reports) == 2


def test_specialisations_with_equal_names_are_told_apart():
    y = nan()
    with attach("sm_80") as gpu:
        x_, y_ = from_dlpack(X), from_dlpack(y)
        first, second = (cute.compile(Scale(factor), x_, y_) for factor in (2, 5))
        for compiled, factor in ((first, 2), (second, 5), (first, 2)):
            compiled(x_, y_)
            assert torch.equal(y, factor * X)
    assert len({report.kernel for report in gpu.reports}) == 1


def test_clusters_are_passed_on():
    y = nan(128)
    with attach("sm_90a") as gpu:
        seen = []
        gpu.launch = lambda _program, kernel, grid, block, shared, params, cluster: seen.append(cluster)
        x_, y_ = from_dlpack(torch.zeros(128)), from_dlpack(y)
        cute.compile(scale_twice, x_, y_, Float32(3), 2)(x_, y_, Float32(3))
    assert seen == [None, (2, 1, 1)]


@pytest.mark.parametrize(("arch", "sms"), [("sm_80", None), ("sm_100a", None), ("sm_100a", 2)])
def test_hardware_info(arch, sms):
    y = nan(1)
    with attach(arch, sms=sms):
        multiprocessors(from_dlpack(y))
    assert y.item() == (sms or int(get_arch(arch).sm_count))


@pytest.mark.parametrize("options", ["", TVM])
def test_an_error_names_kernel_and_source(options):
    x, y = torch.zeros(64), nan(64)
    line = source_line("the line that an error names")
    with attach("sm_80"):
        x_, y_ = (from_dlpack(t, enable_tvm_ffi=bool(options)) for t in (x, y))
        compiled = cute.compile(shift, x_, y_, Int32(0), options=options)
        compiled(x_, y_, Int32(0))  # the clean twin
        assert not y.any()
        with pytest.raises(OutOfBoundsError) as error:
            compiled(x_, y_, Int32(3))
    place = error.value.place
    assert "shift_kernel" in place.kernel
    assert (place.cta, place.warp, place.lane) == ((0, 0, 0), 1, 29)  # thread 61 is the first to read beyond 64
    assert place.ptx_text.startswith("ld.global")
    assert place.ptx_line > 0
    assert place.source.endswith(f"dsl_kernels.py:{line}")
    assert f"{x.data_ptr() + 256:#x}" in str(error.value)


def test_a_missing_barrier_shows_in_some_schedule():
    x, y = torch.randn(128), nan(128)
    with attach("sm_80", schedule="priority"):
        x_, y_ = from_dlpack(x), from_dlpack(y)
        right, wrong = (cute.compile(reverse, x_, y_, synchronise) for synchronise in (True, False))
    for seed in range(3):
        with attach("sm_80", schedule="priority", seed=seed):
            right(x_, y_)
            assert torch.equal(y, x.flip(0))
            with pytest.raises(UninitializedError, match="shared memory is read, but was never written"):
                wrong(x_, y_)


def test_unwritten_memory_as_nan():
    """For kernels that load more than they use; here the result shows what was loaded."""
    x, y = torch.randn(128), torch.zeros(128)
    with attach("sm_80", schedule="priority", unwritten="nan", checks="basic"):
        x_, y_ = from_dlpack(x), from_dlpack(y)
        cute.compile(reverse, x_, y_, False)(x_, y_)
    right = y == x.flip(0)
    assert 0 < int(right.sum()) < 128
    assert y[~right].isnan().all()


@pytest.mark.parametrize("options", ["", TVM])
def test_what_the_block_changed_is_put_back(options):
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.cutlass_dsl import CuTeDSL

    before = BaseDSL._prepare_compilation, CuTeDSL._get_dsl().envar.arch
    x = torch.zeros(64)
    with attach("sm_86"):
        x_ = from_dlpack(x, enable_tvm_ffi=bool(options))
        compiled = cute.compile(scale, x_, x_, Float32(1), options=options)
    with pytest.raises(KeyError), attach("sm_86"):
        raise KeyError
    assert (BaseDSL._prepare_compilation, CuTeDSL._get_dsl().envar.arch) == before
    with pytest.raises(Exception, match=r"inside fa4\.vgpu\.attach|cudaErrorLaunchFailure"):
        compiled(x_, x_, Float32(1))
    with attach("sm_86"):
        compiled(x_, x_, Float32(1))


def test_bad_use_is_refused():
    x = torch.zeros(64)
    with attach("sm_80") as gpu:
        with pytest.raises(LaunchError, match="attached already"), attach("sm_80"):
            pass
        with pytest.raises(LaunchError, match="--gpu-arch sm_90a: the attached GPU is sm_80"):
            cute.compile(scale, from_dlpack(x), from_dlpack(x), Float32(1), options="--gpu-arch sm_90a")
        with pytest.raises(LaunchError, match="no CPU tensor"):
            gpu.register([1.0], "x")
        with pytest.raises(LaunchError, match=r"register\('x'\): .*gradient"):
            gpu.register(torch.zeros(3, requires_grad=True), "x")
        plain = from_dlpack(x)
        compiled = cute.compile(scale, plain, plain, Float32(1))
    with attach("sm_90a"):
        compiled(plain, plain, Float32(1))  # PTX without a letter runs on later machines
        newer = cute.compile(scale, plain, plain, Float32(1))
    with attach("sm_80"), pytest.raises(LaunchError, match="compiled for sm_90a, the attached GPU is sm_80"):
        newer(plain, plain, Float32(1))
    for arch, options, message in (
        ("sm_70", {}, "arch='sm_70'"),
        ("sm_80", {"schedule": "fair"}, "schedule='fair'"),
        ("sm_80", {"delay": "never"}, "delay='never'"),
        ("sm_80", {"unwritten": "zero"}, "unwritten='zero': must be error or nan"),
    ):
        with pytest.raises(LaunchError, match=message), attach(arch, **options):
            pass


def test_settings_are_the_defaults():
    with fa4.settings(vgpu_seed=7, vgpu_schedule="random", vgpu_delay="early", vgpu_processes=3), attach("sm_80") as gpu:
        assert (gpu.seed, gpu.schedule, gpu.early, gpu.processes) == (7, "random", True, 3)
    with fa4.settings(vgpu_processes=3), attach("sm_80", seed=1, schedule="priority", delay="late", processes=1) as gpu:
        assert (gpu.seed, gpu.schedule, gpu.early, gpu.processes) == (1, "priority", False, 1)


def test_several_processes():
    y, z = nan(), nan()
    with attach("sm_80", processes=2) as gpu:
        x_, y_, z_ = from_dlpack(X), from_dlpack(y), from_dlpack(z)
        compiled = cute.compile(scale_twice, x_, y_, Float32(3))
        compiled(x_, y_, Float32(3))
    with attach("sm_80") as one:
        compiled(x_, z_, Float32(3))
    assert torch.equal(y, z)
    assert [replace(report, seconds=0.0) for report in gpu.reports] == [replace(report, seconds=0.0) for report in one.reports]


def test_an_error_of_several_processes_comes_out_of_the_call():
    y = nan()
    with attach("sm_80", checks="basic", processes=2), pytest.raises(SharedGlobalError, match="use processes=1") as caught:
        cute.compile(overwrite, from_dlpack(y))(from_dlpack(y))
    assert caught.value.place.source.endswith(f"dsl_kernels.py:{source_line('y[thread] = Float32(block)')}")
    assert torch.isnan(y).all()


def test_report():
    y = nan()
    with attach("sm_80") as gpu:
        x_, y_ = from_dlpack(X), from_dlpack(y)
        cute.compile(scale_twice, x_, y_, Float32(3))(x_, y_, Float32(3))
    report = gpu.report()
    data = json.loads(json.dumps(report.data()))
    first, second = data["launches"]
    assert "scale_kernel" in first["kernel"]
    assert (first["grid"], first["block"]) == ([2, 1, 1], [64, 1, 1])
    assert data["bytes"]["global"] == first["bytes"]["global"] + second["bytes"]["global"] == 2 * 800
    assert data["instructions"] == sum(data["by_class"].values()) == sum(data["by_warp"]) == sum(data["by_source"].values())
    assert data["by_class"]["st"] == 2 * 4  # 100 elements are 4 warps
    (source,) = (source for source in data["by_source"] if source.endswith(f"dsl_kernels.py:{source_line('y[i] = x[i]')}"))
    text = str(report)
    assert source in text
    assert "launch 2: " in text
    assert repr(report).startswith("<Report: 2 launches, 4 CTAs, ")


def test_empty_is_nan():
    with attach("sm_80") as gpu:
        assert gpu.empty(2, 3).isnan().all()
        assert gpu.empty(5, dtype=torch.bfloat16).isnan().all()
        assert (gpu.empty(2, dtype=torch.int32) == -1).all()


def test_attention_inside_a_block_is_as_outside(tmp_path):
    """fa4 compiles for its own cache: an open block must not add line information there, or anything else."""
    problem = AttentionProblem("forward", "bfloat16", 8, 8)
    config = tuning.config(problem, get_arch("sm_80"))
    q, k, v = torch.randn(3, 1, 40, 1, 8).to(torch.bfloat16)
    artifacts, results = [], []
    for name, block in (("outside", nullcontext()), ("inside", attach("sm_80", line_info=True))):
        lookup.forget()
        with fa4.settings(cache_dir=str(tmp_path / name)), block:
            results.append(fa4.attention(q, k, v, backend="vgpu", arch="sm_80"))
            artifacts.append(lookup.get(problem, config, "sm_80"))
    lookup.forget()
    assert torch.equal(*results)
    assert ".loc" not in artifacts[1].ptx
    assert artifacts[0] == artifacts[1]
