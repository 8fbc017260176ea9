"""What the compiler makes of the kernels before and after the backward: registers, and accesses of 16 bytes. Nothing is executed."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden import assert_recorded

from fa4.inspection.ptx import opcodes
from fa4.problem import AttentionProblem

pytestmark = pytest.mark.compile

# Facts are [registers, stack, spill stores, spill loads, shared memory], bytes but for the registers.
GOLDEN = Path(__file__).with_name("resources.json")


def problem(operation, head_dim, dtype="bfloat16"):
    return AttentionProblem(operation, dtype, head_dim, head_dim)


OPERATIONS = ("preprocess", "postprocess")
DEFAULT = [(problem(operation, 64), "sm_100a") for operation in OPERATIONS]
FULL = [
    (problem(operation, dim, dtype), arch)
    for operation in OPERATIONS
    for dim in (64, 96, 128, 256)
    for dtype in ("bfloat16", "float16")
    for arch in ("sm_80", "sm_90a", "sm_100a", "sm_120a")
]
CASES = [pytest.param(*case) for case in DEFAULT]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in FULL if case not in DEFAULT]


def facts(compiled):
    return compiled.resources


def identifier(value):
    return value if isinstance(value, str) else f"{value.direction} {value.dtype} {value.head_dim}"


@pytest.mark.parametrize(("task", "arch"), CASES, ids=identifier)
class TestCompiled:
    def test_resources_are_the_recorded_ones(self, compile_ptx, task, arch):
        compiled = compile_ptx(task, arch)
        assert_recorded(GOLDEN, compiled, arch, facts(compiled))
        assert compiled.resources[1:4] == [0, 0, 0]
        assert ".local" not in compiled.ptx

    def test_every_access_but_those_of_a_number_a_row_is_of_16_bytes(self, compile_ptx, task, arch):
        words = [opcode for opcode in opcodes(compile_ptx(task, arch).ptx) if opcode.startswith(("ld.global", "st.global"))]
        passes, turns = 4, -(-task.head_dim // 64)
        narrow = [opcode for opcode in words if ".v4." not in opcode and ".v2.b64" not in opcode]
        if task.direction == "preprocess":  # lse; its log2 and delta
            assert len(narrow) == 3 * passes
        else:
            assert narrow == []
            assert len(words) == 3 * passes * turns  # two reads and a write for 8 columns

    def test_name(self, compile_ptx, task, arch):
        name = compile_ptx(task, arch).name
        assert name.startswith(f"fa4_any_{task.direction}_")
        assert "cutlass" not in name
