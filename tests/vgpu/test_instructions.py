from __future__ import annotations

import struct

import numpy as np
import pytest
from instruction_cases import CASES
from instruction_table import DTYPES, expected_array, kernel_text, operand_arrays
from small_float_cases import small_cases

from fa4.vgpu import Gpu, Program


def run_case(case, arrays, gpu):
    """The result array of a case on a virtual GPU."""
    count = len(arrays[0])
    out = np.zeros(count, "uint8" if case.result == "pred" else DTYPES[case.result])
    addresses = []
    for i, array in enumerate([*arrays, out]):
        addresses.append(0x10000 * (i + 1))
        gpu.register_buffer(addresses[-1], array, f"p{i + 1}")
    params = [struct.pack("<Q", value) for value in (count, *addresses)]
    gpu.launch(Program.parse(kernel_text(case)), "case", (-(-count // 128),), (128,), 0, params)
    return out.astype(bool) if case.result == "pred" else out


def check(case, arrays, actual):
    expected = expected_array(case, arrays)
    relative, absolute = case.tolerance
    if expected.dtype.kind == "f":
        same = (actual == expected) & (np.signbit(actual) == np.signbit(expected)) | (np.isnan(actual) & np.isnan(expected))
        if relative or absolute:
            wide, exact = actual.astype(np.float64), expected.astype(np.float64)
            with np.errstate(invalid="ignore"):
                # half a unit for the rounding of the expected value itself
                same |= np.abs(wide - exact) <= (relative + 2.0**-24) * np.abs(exact) + absolute
    else:
        same = actual == expected
    if not same.all():
        bad = int(np.flatnonzero(~same)[0])
        operands = [a[bad] for a in arrays]
        pytest.fail(f"{case}: of {operands!r} came {actual[bad]!r}, expected {expected[bad]!r}; {int((~same).sum())} of {len(same)} differ")


@pytest.mark.parametrize("case", CASES + small_cases(), ids=str)
def test_instruction(case):
    arrays = operand_arrays(case)
    if any(case.tolerance):  # random bits are outside the range for which the ISA states an error
        arrays = [a[:-64] for a in arrays]
    check(case, arrays, run_case(case, arrays, Gpu()))


@pytest.mark.parametrize("case", [c for c in CASES if any(c.tolerance)], ids=str)
def test_deviations_stay_within_the_stated_error(case):
    arrays = [a[:-64] for a in operand_arrays(case)]
    check(case, arrays, run_case(case, arrays, Gpu(seed=3, approximate="random")))
