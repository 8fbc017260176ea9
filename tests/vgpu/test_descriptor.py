"""Matrix descriptors against a slow statement of the formulas, one element at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix_tiles import element_address

from fa4.vgpu import MatrixDescriptorError, OutOfBoundsError, UninitializedError, UnsupportedInstructionError
from fa4.vgpu.descriptor import MatrixDescriptor, Operand, decode, read, swizzled, unit_map
from fa4.vgpu.memory import Block, FaultError

SHARED = 1 << 18
SWIZZLES = [0, 32, 64, 128]


@st.composite
def placements(draw):
    size = draw(st.sampled_from([1, 2, 4]))
    mn_major = draw(st.booleans())
    mn = draw(st.integers(1, 16)) * (16 if size == 1 and mn_major else 8)
    operand = Operand("A", mn, 32 // size, size, mn_major)
    swizzle = draw(st.sampled_from(SWIZZLES))
    align = max(swizzle, 16)
    start = draw(st.integers(0, 2000)) * 16
    if swizzle and not mn_major:
        start = start // align * align + draw(st.integers(0, max(swizzle // 32 - 1, 0))) * 32
    leading, stride = (draw(st.integers(0, 255)) * 16 for _ in range(2))
    return MatrixDescriptor(start, leading, stride, swizzle), operand


@given(placements(), st.booleans())
def test_elements_are_where_the_formulas_say(case, blackwell):
    descriptor, operand = case
    data = np.random.default_rng(0).integers(0, 256, SHARED, dtype=np.uint8)
    block = Block("shared", data, tracked=True)
    block.state[:] = 0xFF
    got = read(block, (descriptor.encode(blackwell),), blackwell, operand).view(f"u{operand.itemsize}")
    got = got.T if operand.mn_major else got
    values = np.array([[element_address(descriptor, operand, m, k) for k in range(operand.k)] for m in range(operand.mn)])
    expected = np.stack([data[values + i] for i in range(operand.itemsize)], axis=-1).view(f"u{operand.itemsize}")[..., 0]
    assert np.array_equal(got, expected)


@given(st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1), st.sampled_from(SWIZZLES), st.booleans())
def test_encode_and_decode_are_inverse(start, leading, stride, swizzle, blackwell):
    descriptor = MatrixDescriptor(16 * start, 16 * leading, 16 * stride, swizzle)
    assert decode(descriptor.encode(blackwell), blackwell, "A") == descriptor


@given(st.sampled_from(SWIZZLES), st.integers(0, 100))
def test_swizzle_is_a_bijection_of_each_period_and_its_own_inverse(swizzle, period):
    addresses = period * 1024 + np.arange(0, 1024, 16)
    there = swizzled(addresses, swizzle)
    assert sorted(there.tolist()) == addresses.tolist()
    assert np.array_equal(swizzled(there, swizzle), addresses)
    assert (np.abs(there - addresses) < max(swizzle, 16)).all()


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("mn_major", [False, True])
def test_a_packed_operand_uses_each_unit_once(swizzle, mn_major):
    operand = Operand("B", 64, 16, 2, mn_major)
    row = swizzle or 16
    if mn_major:
        leading, stride = (16 * row, 8 * row) if swizzle else (8 * 128, 128)
    else:
        leading, stride = (128, 256) if not swizzle else (0, 8 * row)
    units = unit_map(operand, leading, stride, swizzle, 0)
    assert len(set(units.reshape(-1).tolist())) == units.size == 64 * 16 * 2 // 16


def fault(bits, blackwell=True):
    with pytest.raises(FaultError) as caught:
        decode(bits, blackwell, "B")
    return caught.value


GOOD = MatrixDescriptor(1024, 16, 1024, 128)


@pytest.mark.parametrize(
    ("change", "blackwell", "error", "words"),
    [
        (1 << 14, True, MatrixDescriptorError, "bits 14 are reserved"),
        (1 << 31, False, MatrixDescriptorError, "bits 31 are reserved"),
        (1 << 46, False, MatrixDescriptorError, "bits 46 are reserved"),
        (1 << 55, True, MatrixDescriptorError, "bits 55 are reserved"),
        (1 << 46, True, MatrixDescriptorError, "bits 46 to 48 must be 1"),
        (5 << 61, True, MatrixDescriptorError, "layout 7 does not exist"),
        (3 << 61, True, UnsupportedInstructionError, "32-byte atoms"),
        (2 << 49, True, UnsupportedInstructionError, "base offset"),
        (2 << 49, False, UnsupportedInstructionError, "base offset"),
        (1 << 52, True, UnsupportedInstructionError, "absolute leading dimension"),
    ],
)
def test_wrong_fields_are_named(change, blackwell, error, words):
    found = fault(GOOD.encode(blackwell) ^ change, blackwell)
    assert found.error is error
    assert words in found.message
    assert "descriptor of B" in found.message
    assert decode(GOOD.encode(blackwell), blackwell, "B") == GOOD


def test_operands_that_do_not_fit_are_named():
    block = Block("shared", np.zeros(8192, np.uint8), tracked=True)
    block.state[:] = 0xFF
    operand = Operand("A", 64, 16, 2, False)
    read(block, (MatrixDescriptor(0, 16, 1024, 128).encode(True),), True, operand)
    for descriptor, changed, error, words in (
        (MatrixDescriptor(1024, 16, 1024, 128), operand, OutOfBoundsError, "A: 16 bytes at shared address"),
        (MatrixDescriptor(112, 16, 1024, 128), operand, MatrixDescriptorError, "leave the row of a 128-byte swizzle"),
        (MatrixDescriptor(0, 16, 1024, 128), Operand("A", 8, 32, 1, True), MatrixDescriptorError, "8 contiguous bytes"),
    ):
        with pytest.raises(FaultError) as caught:
            read(block, (descriptor.encode(True),), True, changed)
        assert caught.value.error is error
        assert words in caught.value.message
    block.state[8000] = 0
    with pytest.raises(FaultError) as caught:
        read(block, (MatrixDescriptor(0, 16, 1024, 128).encode(True),), True, Operand("A", 64, 64, 2, False))
    assert caught.value.error is UninitializedError
    assert "A: byte 0x1f40 of shared memory is read, but was never written" in caught.value.message
