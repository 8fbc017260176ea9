"""Which instructions kernels from a compiler execute here, as the documentation's table says; the rest have unit tests alone."""

from __future__ import annotations

import pytest
import test_ampere_forward
import test_gemm
import test_tma_kernels
from forward_call import Options

from fa4.testing import AttentionShape, make_inputs
from fa4.vgpu import Gpu
from fa4.vgpu.isa import ENDINGS, FORMS, form_key
from fa4.vgpu.isa.table import WITNESSED

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


def key_of(opcode: str) -> str:
    """The key with most modifiers, whether the instruction ends a block or not."""
    key, _ = max((form_key(opcode, forms) for forms in (FORMS, ENDINGS)), key=lambda found: (bool(found[0]), found[1]))
    return key


def test_the_table_says_what_compiled_kernels_execute():
    assert {key_of(opcode) for opcode in executed()} == WITNESSED
