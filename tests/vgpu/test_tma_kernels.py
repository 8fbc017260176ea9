"""Kernels of CuTe-DSL that load and store by TMA, against torch; and every synchronising instruction taken out in turn."""

from __future__ import annotations

import itertools
import re
from functools import lru_cache

import pytest
import torch
from dsl import compile_dsl

from fa4.vgpu import Gpu, VgpuError

pytestmark = [pytest.mark.vgpu, pytest.mark.compile]

SCHEDULES = [("round_robin", 0), ("random", 0), ("random", 1), ("priority", 0), ("priority", 1)]


@lru_cache(maxsize=8)
def compiled(dtype, arch, reduce, cluster):
    import cutlass
    from tma_kernels import Twice, arguments

    element = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}[dtype]
    return compile_dsl(Twice(element, reduce, cluster), arguments(element), arch, "twice")


def check(kernel, gpu, dtype, reduce, cluster, shape=(90, 200)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = shape[0] if cluster == 1 else 32 * cluster
    x = x if cluster == 1 else x[:32].contiguous()
    y = torch.ones(rows, shape[1], dtype=dtype)
    kernel(gpu, x, y)
    expected = 2 * x.float().repeat(cluster, 1) + reduce
    assert torch.equal(y, expected.to(dtype))


CASES = [
    (torch.bfloat16, "sm_90a", False, 1),
    (torch.float32, "sm_100a", True, 1),
    (torch.float16, "sm_90a", True, 2),
    (torch.bfloat16, "sm_100a", False, 4),
]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MORE = [case for case in itertools.product(DTYPES, ("sm_90a", "sm_100a"), (False, True), (1, 2)) if case not in CASES]


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_tiles_through_shared_memory(case):
    dtype, arch, reduce, cluster = case
    kernel = compiled(*case)
    for schedule, seed in SCHEDULES:
        check(kernel, Gpu(arch, schedule=schedule, seed=seed), dtype, reduce, cluster)
    check(kernel, Gpu(arch, delay="early"), dtype, reduce, cluster)


SYNCHRONISES = re.compile(r"\t(mbarrier|bar|fence|cp\.async\.bulk\.(wait|commit)|barrier)[._]")
LOOK = re.compile(r"mbarrier\.try_wait\S* (\w+), \[(%r\d+)\]")


def mistakes(ptx):
    """(line, what to write instead) of each synchronising instruction: nothing, or a wait that never waits."""
    for i, line in enumerate(ptx.splitlines()):
        wait = LOOK.search(line)
        if wait:
            yield i, f"setp.eq.b32 {wait[1]}, {wait[2]}, {wait[2]};"
        elif SYNCHRONISES.search(line):
            yield i, ""


@pytest.mark.parametrize("case", [CASES[0], pytest.param(CASES[2], marks=pytest.mark.slow)], ids=str)
def test_missing_synchronisation_is_found(case):
    """By an error or by wrong values in one of a few schedules; fences order what this machine executes in order anyway."""
    dtype, arch, reduce, cluster = case
    kernel = compiled(*case)
    missed = []
    tail = kernel.ptx.splitlines().index(next(x for x in kernel.ptx.splitlines() if "expect_tx" in x))
    for line, text in mistakes(kernel.ptx):
        for schedule, seed in [("round_robin", 0), *(("priority", n) for n in range(4))]:
            try:
                check(kernel.with_line(line, text), Gpu(arch, schedule=schedule, seed=seed), dtype, reduce, cluster, (40, 200))
            except (VgpuError, AssertionError):
                break
        else:
            missed.append(kernel.ptx.splitlines()[line].split()[0] + " at the end" * (line > tail))
    # The producer's three waits at its end keep a CTA from ending before its peers have told it that they read the last tiles; in one
    # CTA there is nobody to wait for, and in two the last of them is enough.
    ends = ["mbarrier.try_wait.parity.shared.b64 at the end"] * (3 if cluster == 1 else 2)
    assert missed == ["fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;", *ends]
