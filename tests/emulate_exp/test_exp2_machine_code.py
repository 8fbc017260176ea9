"""Instructions per element, counted in the machine code: those that the cost model is built on."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from exp2_helpers import ProbeConfig, probe

from fa4.emulate_exp import cost
from fa4.inspection import nvdisasm, sass

pytestmark = pytest.mark.compile

PER_THREAD = 4


@cache
def opcodes(form, arch, degree=3, pair=True):
    """SASS instructions of a probe by base name."""
    ((_, function),) = sass.parse(nvdisasm.disassemble(probe(ProbeConfig(degree, form, pair), arch).cubin)).items()
    return Counter(instruction.opcode.partition(".")[0] for instruction in function.instructions)


def per_element(form, arch, **options):
    """What the exponential adds to a kernel that copies, by base name; constants that are loaded once are not counted."""
    added = opcodes(form, arch, **options).copy()
    added.subtract(opcodes("copy", arch))
    return {name: count / PER_THREAD for name, count in added.items() if name in ALU or name in FMA or name == "MUFU" if count}


FMA = {"FADD": 1, "FMUL": 1, "FFMA": 1, "FADD2": 2, "FMUL2": 2, "FFMA2": 2}
"""Multiply-add results per lane."""
ALU = ("FMNMX", "LEA", "SHF", "IADD3", "VIADD", "SEL", "FSEL", "FSETP")


def results(counts):
    """Multiply-add and ALU results per element."""
    return sum(FMA.get(name, 0) * n for name, n in counts.items()), sum(n for name, n in counts.items() if name in ALU)


@pytest.mark.parametrize(
    ("arch", "degree"),
    [
        ("sm_80", 3),
        pytest.param("sm_90a", 3, marks=pytest.mark.slow),
        pytest.param("sm_100a", 1, marks=pytest.mark.slow),
        ("sm_100a", 3),
        ("sm_100a", 6),
        pytest.param("sm_103a", 3, marks=pytest.mark.slow),
        pytest.param("sm_120a", 3, marks=pytest.mark.slow),
    ],
)
def test_counts_of_the_cost_model(arch, degree):
    fma, alu = results(per_element("fast", arch, degree=degree))
    assert fma == cost.emulation_fma(degree)
    assert alu == cost.EMULATION_ALU


def test_packed_instructions_on_blackwell():
    assert per_element("fast", "sm_100a") == {"FMNMX": 1, "FADD2": 1.5, "FFMA2": 1.5, "LEA": 1}
    assert per_element("unclamped", "sm_100a") == {"FADD2": 1.5, "FFMA2": 1.5, "LEA": 1}
    assert per_element("full", "sm_100a") == {"FMNMX": 1, "FADD2": 1.5, "FFMA2": 2, "FMUL2": 0.5, "LEA": 1}


def test_scalar_instructions_elsewhere():
    expected = {"FMNMX": 1, "FADD": 3, "FFMA": 3, "LEA": 1}
    assert per_element("fast", "sm_80") == expected
    assert per_element("fast", "sm_100a", pair=False) == expected


def test_special_function_unit_is_counted():
    """The counter sees what the emulation avoids."""
    assert per_element("mufu", "sm_100a")["MUFU"] == 1
