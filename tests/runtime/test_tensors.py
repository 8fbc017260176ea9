"""Which operands a kernel reads where they are, and which are copied."""

from __future__ import annotations

import pytest
import torch

from fa4.runtime.tensors import kernel_operand

SIZE = (2, 3, 4, 16)
STRIDES = (3 * 4 * 16, 4 * 16, 16, 1)
MEMORY = torch.arange(4096).to(torch.bfloat16)
assert MEMORY.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("size", "strides", "offset"),
    [
        (SIZE, STRIDES, 0),
        (SIZE, STRIDES, 8),
        (SIZE, (3 * 4 * 16, 16, 3 * 16, 1), 0),
        (SIZE, (3 * 4 * 24, 4 * 24, 24, 1), 0),
        (SIZE, (0, 0, 0, 1), 0),
        ((1, *SIZE[1:]), (5, *STRIDES[1:]), 0),
        ((2, 1, 4, 16), (64, 3, 16, 1), 0),
        ((2, 3, 1, 16), (48, 16, 7, 1), 0),
    ],
    ids=str,
)
def test_read_in_place(size, strides, offset):
    x = MEMORY.as_strided(size, strides, offset)
    assert kernel_operand(x) is x


@pytest.mark.parametrize(
    ("strides", "offset"),
    [
        (STRIDES, 1),
        (STRIDES, 4),
        ((3 * 4 * 16 + 4, 4 * 16, 16, 1), 0),
        ((3 * 4 * 20, 4 * 16 + 4, 16, 1), 0),
        ((3 * 4 * 20, 4 * 20, 20, 1), 0),
        ((3 * 4 * 16, 4 * 16, 1, 4), 0),
        ((3 * 4 * 32, 4 * 32, 32, 2), 0),
    ],
    ids=str,
)
def test_copied_once(strides, offset):
    x = MEMORY.as_strided(SIZE, strides, offset)
    copy = kernel_operand(x)
    assert copy is not x
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
