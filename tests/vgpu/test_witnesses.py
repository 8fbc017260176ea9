"""Which instructions this project's kernels execute, as the documentation's table says; test_peer.py says it of flash-attn-4's."""

from __future__ import annotations

import pytest
import test_ampere_forward
import test_gemm
import test_tma_kernels
from forward_call import Options

from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu
from fa4.vgpu.isa.table import COMPILED, key_of

pytestmark = [pytest.mark.compile, pytest.mark.vgpu]


def executed() -> set[str]:
    opcodes: set[str] = set()
    for tile in test_gemm.HOPPER:
        opcodes |= set(test_gemm.check("sm_90a", **tile))
    for tile in test_gemm.BLACKWELL:
        opcodes |= set(test_gemm.check("sm_100a", **tile))
    for case in test_tma_kernels.CASES:
        gpu = Gpu(case[1])
        dtype, _, *rest = case
        test_tma_kernels.check(test_tma_kernels.compiled(*case), gpu, dtype, *rest)
        opcodes |= set(gpu.report().by_opcode)
    gpu = Gpu()
    inputs = make_inputs(AttentionShape(1, 100, 70, 2, 1))
    test_ampere_forward.check(inputs, Options(causal=True, softcap=5.0), test_ampere_forward.SMALL, gpu)
    return opcodes | set(gpu.report().by_opcode)


def test_the_table_says_what_kernels_of_this_project_execute():
    assert {key_of(opcode) for opcode in executed()} == COMPILED
