"""Views of mma.sync accumulators, and reductions over the four lanes that share a row.

An m16n8 accumulator (PTX ISA, Matrix Fragments for mma.m16n8k16) gives a lane four values: columns ``2 * (lane % 4) + {0, 1}`` of the
rows ``lane / 4`` and ``lane / 4 + 8``. A tile of them has the CuTe shape ``((2, 2), M, N)``: (column, row half), atoms.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32


def by_row(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator as (rows, columns) of this thread, without moving a register."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def by_n16(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator as ``((2, 2), M, (2, N / 2))``: the two n8 blocks that one ldmatrix x4 of operand B feeds."""
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        (shape[0], shape[1], (2, shape[2] // 2)),
        stride=(stride[0], stride[1], (stride[2], 2 * stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """View of a 16-bit accumulator as operand A of the next product: two n8 blocks side by side are one k16 block.

    P never leaves registers because the m16n8 accumulator and the m16k16 operand give a lane the same rows and, per k8 half, the
    same columns.
    """
    shape, stride = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((*shape[0], 2), shape[1], shape[2] // 2),
        stride=((*stride[0], stride[2]), stride[1], 2 * stride[2]),
    )
    return cute.make_tensor(acc.iterator, layout)


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes of a row; every lane gets it."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))


@cute.jit
def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes of a row, in an order that is the same for every lane."""
    value = value + cute.arch.shuffle_sync_bfly(value, offset=2)
    return value + cute.arch.shuffle_sync_bfly(value, offset=1)
