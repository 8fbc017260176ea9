"""What the compiler makes of the forward kernel: instructions per trip, registers, shared memory. Nothing is executed."""

from __future__ import annotations

import re
from pathlib import Path

import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32
from golden import assert_recorded
from ptx_loops import loops

from fa4.arch import get_arch
from fa4.config import WARP, ampere_forward_shared_memory, padded_head_dim
from fa4.kernels.ampere.forward.kernel import AmpereForward
from fa4.kernels.ampere.forward.layouts import copy_threads
from fa4.problem import AttentionProblem
from fa4.tuning import ampere_forward_config

pytestmark = pytest.mark.compile

# Facts are [registers, stack, spill stores, spill loads, shared memory], bytes but for the registers.
GOLDEN = Path(__file__).with_name("resources.json")
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (True, True)}}


def problem(head_dim, mask="full", dtype="bfloat16", head_dim_v=None, softcap=False):
    return AttentionProblem("forward", dtype, head_dim, head_dim_v or head_dim, softcap=softcap, **MASKS[mask])


# Every mask, dtype and warp shape, those that other tests run by default, so that they are compiled once.
DEFAULT = [
    (problem(64, "causal"), "sm_80"),
    (problem(64, "window"), "sm_80"),
    (problem(64, "full", "float16"), "sm_80"),
    (problem(64, "full", "float16", softcap=True), "sm_80"),
    (problem(128, "causal"), "sm_80"),
]
# Everything on sm_80; on the other targets the extremes: the simplest mask with loops of both kinds, and everything at once.
FULL = [
    (problem(d, mask, dtype, softcap=softcap), "sm_80")
    for d in (64, 96, 128, 192, 256)
    for dtype in ("float16", "bfloat16")
    for mask in MASKS
    for softcap in (False, True)
]
FULL += [
    (problem(d, mask, softcap=softcap), arch)
    for d in (64, 96, 128, 192, 256)
    for arch in ("sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
    for mask, softcap in (("causal", False), ("window", True))
    if d > 128 or arch not in ("sm_100a", "sm_103a")  # which have a kernel of their own
]
FULL += [(problem(128, "causal", "float16"), "sm_90a"), (problem(72, "window", head_dim_v=40), "sm_89")]
FULL += [(problem(192, "causal", head_dim_v=128), "sm_80")]
CASES = [pytest.param(*case) for case in DEFAULT]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in FULL if case not in DEFAULT]


def facts(compiled):
    return compiled.resources


def identifier(value):
    if isinstance(value, str):
        return value
    return AmpereForward(value, ampere_forward_config(value, get_arch("sm_80"))).name.removeprefix("fa4_ampere_forward_").rpartition("_")[0]


def count(body, opcode):
    return sum(opcode in line for line in body)


def copies(rows, head_dim, threads):
    down, along = copy_threads(rows, head_dim, threads)
    return rows // down * (padded_head_dim(head_dim) // (8 * along))


def expected_per_trip(task, config):
    """Instructions per thread and key tile, from the tiles alone."""
    k_steps, v_steps = padded_head_dim(task.head_dim) // 16, padded_head_dim(task.head_dim_v) // 16
    blocks_m, blocks_n = config.tile_m // (config.threads // WARP * 16), config.tile_n // 16
    loads = sum(copies(config.tile_n, d, config.threads) for d in (task.head_dim, task.head_dim_v))
    scores = 4 * 2 * blocks_m * blocks_n
    return {
        "cp.async.cg.shared.global": loads,
        "cp.async.commit_group": 2 if config.stages == 1 else 1,
        "cp.async.wait_group": 2 if config.stages == 1 else 1,
        "bar.sync": 2 if config.stages == 1 else 1,
        "ldmatrix.sync.aligned.m8n8.x4.shared": k_steps * (blocks_m + blocks_n),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared": v_steps * blocks_n,
        "mma.sync.aligned.m16n8k16": 2 * blocks_m * blocks_n * (k_steps + v_steps),
        # One per score and one per row for the rescaling; softcap adds an exp2 and a reciprocal per score.
        "ex2.approx.ftz.f32": scores * (2 if task.softcap else 1) + 2 * blocks_m,
        "rcp.approx.ftz.f32": scores if task.softcap else 0,
    }


@pytest.mark.parametrize(("task", "arch"), CASES, ids=identifier)
class TestCompiled:
    def test_instructions_per_trip(self, compile_ptx, task, arch):
        config = ampere_forward_config(task, get_arch(arch))
        bodies = loops(compile_ptx(task, arch).ptx, "mma.sync")
        assert len(bodies) == (3 if task.window[0] else 2)
        expected = expected_per_trip(task, config)
        for body in bodies:
            assert {opcode: count(body, opcode) for opcode in expected} == expected

    def test_no_slow_or_local_code(self, compile_ptx, task, arch):
        ptx = compile_ptx(task, arch).ptx
        assert ".local" not in ptx
        for body in loops(ptx, "mma.sync"):
            assert not re.search(r"\b(div|rem|sqrt)\.", "\n".join(body))
            assert count(body, "cvt.rn.") == count(body, "x2.f32")

    def test_shared_memory_is_the_budget(self, compile_ptx, task, arch):
        config = ampere_forward_config(task, get_arch(arch))
        assert compile_ptx(task, arch).shared == ampere_forward_shared_memory(config, task.head_dim, task.head_dim_v).size

    def test_nothing_spills(self, compile_ptx, task, arch):
        if max(task.head_dim, task.head_dim_v) <= 128:
            assert compile_ptx(task, arch).resources[1:4] == [0, 0, 0]

    def test_resources_are_the_recorded_ones(self, compile_ptx, task, arch):
        compiled = compile_ptx(task, arch)
        assert_recorded(GOLDEN, compiled, arch, facts(compiled))

    def test_name(self, compile_ptx, task, arch):
        name = compile_ptx(task, arch).name
        assert name == AmpereForward(task, ampere_forward_config(task, get_arch(arch))).name + "_0"
        assert "cutlass" not in name


@pytest.mark.slow
def test_numbers_of_a_call_are_arguments(tmp_path):
    """Other values of scale, softcap and bounds trace to the same PTX, whose parameters they are."""
    task = AttentionProblem("forward", "bfloat16", 16, 16, window=(True, True), softcap=True)
    kernel = AmpereForward(task, ampere_forward_config(task, get_arch("sm_80")))
    *tensors, _, _, _, _, stream = kernel.compile_arguments()
    texts = {
        cute.compile(
            kernel,
            *tensors,
            Float32(scale),
            Float32(cap),
            Int32(left),
            Int32(right),
            stream,
            options=f"--gpu-arch sm_80 --keep-ptx --dump-dir {tmp_path}",
            no_jit_engine=True,
        ).__ptx__
        for scale, cap, left, right in ((1.0, 1.0, 0, 0), (-0.5, 30.0, -8, 2**31 - 1))
    }
    assert len(texts) == 1
    (ptx,) = texts
    assert len(re.findall(r"\.param \.f32", ptx)) == 2  # scale_log2 and gain


def test_compiles_for_tvm_ffi(tmp_path):
    task = AttentionProblem("forward", "float16", 16, 8, causal=True)
    kernel = AmpereForward(task, ampere_forward_config(task, get_arch("sm_80")))
    options = f"--gpu-arch sm_80 --enable-tvm-ffi --keep-ptx --dump-dir {tmp_path}"
    assert ".entry" in cute.compile(kernel, *kernel.compile_arguments(), options=options, no_jit_engine=True).__ptx__


def test_default_run_is_small():
    assert len(DEFAULT) + 3 <= 12
