"""What the kernels before and after the backward share: a block takes 128 rows of one (batch, head), eight lanes a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from fa4.config import ROW_TILE

CHUNK = 8
"""Elements of 16 bits in one load or store of a lane."""

LANES = 8
"""Lanes of a row: 128 bytes of 16-bit elements side by side, a line of the cache."""


class Divisors(NamedTuple):
    """Exact divisions of a block's number by run-time counts: row tiles of a head, and heads."""

    tiles: cute.FastDivmodDivisorV2
    heads: cute.FastDivmodDivisorV2


class Tile(NamedTuple):
    """The rows of a block."""

    index: Int32
    head: Int32
    batch: Int32


@cute.jit
def locate(divisors: Divisors) -> Tile:
    """The tile of this block: tiles of a head are neighbours."""
    row, index = divmod(cute.arch.block_idx()[0], divisors.tiles)
    batch, head = divmod(row, divisors.heads)
    return Tile(Int32(index), Int32(head), Int32(batch))


def passes(threads: int) -> int:
    """How often the threads of a block go over its rows."""
    return ROW_TILE // (threads // LANES)


@cute.jit
def address(x: cute.Tensor, batch: Int32, row: Int32, head: Int32, column: Int32) -> Int64:
    """Address of an element of (B, S, H, D) in 64 bits, whatever the strides."""
    strides = x.layout.stride
    offset = Int64(batch) * strides[0] + Int64(row) * strides[1] + Int64(head) * strides[2] + Int64(column)
    return x.iterator.toint() + offset * (x.element_type.width // 8)


@cute.jit
def load(dtype: cutlass.Constexpr[Any], source: Int64, count: cutlass.Constexpr[int]) -> cute.Tensor:
    """``count`` elements, 16 bytes or a multiple, as registers."""
    values = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(global_tensor(dtype, source, count), values)
    return values


def global_tensor(dtype: Any, address: Int64, count: int) -> cute.Tensor:
    """``count`` elements from an address on that is a multiple of 16."""
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16), cute.make_layout(count))


def operand(dtype: Any, sizes: tuple[Any, Any, Any], head_dim: int) -> Any:
    """For ``cute.compile``: (B, S, H, D) with dynamic strides that are multiples of 16 bytes, the last one 1."""
    strides = tuple(cute.sym_int64(divisibility=CHUNK) for _ in range(3))
    return make_fake_tensor(dtype, (*sizes, head_dim), (*strides, 1), assumed_align=16)
